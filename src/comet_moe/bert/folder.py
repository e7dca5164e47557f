"""The folder of a COMET-BERT run: as every run's, with a model that transformers can load."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from comet_moe.bert.schema import BertRun
from comet_moe.recipes import RecipeError
from comet_moe.recipes.loading import first_problem
from comet_moe.training import RunError, RunFolder
from comet_moe.training.writing import as_json, atomically, write_text


class BertFolder(RunFolder):
    """The files of one run; ``model/`` is for ``from_pretrained``, ``importance.safetensors`` a teacher's."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.model_folder = path / "model"
        self.importance_file = path / "importance.safetensors"

    def start(self, config: BertRun) -> None:  # type: ignore[override]
        """Make the folder and write the configuration; on a run that goes on there is nothing to do."""
        if self.state() == "empty":
            write_text(self.config_file, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))

    def config(self) -> BertRun:  # type: ignore[override]
        """The configuration that the run was started with."""
        if not self.config_file.exists():
            raise RunError(f"{self.path} holds no run: it has no config.yaml")
        try:
            return BertRun.model_validate(yaml.safe_load(self.config_file.read_text(encoding="utf-8")))
        except ValidationError as error:
            raise RecipeError(f"{self.config_file} is not of a BERT run: {first_problem(error)}") from error
        except yaml.YAMLError as error:
            raise RecipeError(f"{self.config_file} is not YAML: {' '.join(str(error).split())}") from error

    def bind_facts(self, facts: dict[str, Any]) -> None:
        """Keep what is known of the data; other facts than before are an error."""
        if not self.data_file.exists():
            write_text(self.data_file, as_json(facts, indent=2) + "\n")
            return
        known = self.data()
        changed = sorted(key for key in known.keys() | facts.keys() if known.get(key) != facts.get(key))
        if changed:
            raise RunError(
                f"the data of {facts['name']} is not what {self.path} was started with ({', '.join(changed)} "
                f"changed): restore the data, or start another run"
            )

    def finished_model(self) -> Path:
        """The folder of the best weights."""
        result = self.result()
        if not (self.model_folder / "config.json").exists():
            raise RunError(f"{self.path} has no model: {result.get('reason', 'its folder is gone')}")
        return self.model_folder

    def write_importance(self, scores: Tensor) -> None:
        """Write how much each neuron matters, (L, neurons)."""
        atomically(self.importance_file, lambda path: save_file({"importance": scores.contiguous()}, path))

    def importance(self) -> Tensor | None:
        """How much each neuron matters, (L, neurons); None if that was not computed yet."""
        if not self.importance_file.exists():
            return None
        scores: Tensor = load_file(self.importance_file)["importance"]
        return scores
