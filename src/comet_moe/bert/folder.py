"""The folder of a COMET-BERT run: as every run's, with a model that transformers can load."""

import shutil
import zlib
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from comet_moe.recipes import BertRun, load_bert_recipe
from comet_moe.training import RunError, RunFolder
from comet_moe.writing import as_json, atomically, write_text


class BertFolder(RunFolder):
    """The files of one run; ``model/`` is for ``from_pretrained``, ``importance.safetensors`` a teacher's."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.model_folder = path / "model"
        self.importance_file = path / "importance.safetensors"

    def config(self) -> BertRun:  # type: ignore[override]  # of another kind of run
        """The configuration that the run was started with."""
        self.check_started()
        return load_bert_recipe(str(self.config_file))

    def teacher(self) -> "BertFolder":
        """The folder of the teacher: this one, or that of which this run's student learns."""
        config = self.config()
        if config.stage == "finetune" or config.teacher is None:
            return self
        return BertFolder(Path(config.teacher))

    def checksum(self) -> int:
        """Of the best weights."""
        return zlib.crc32((self.finished_model() / "model.safetensors").read_bytes())

    def drop_model(self) -> None:
        """Remove the best weights."""
        shutil.rmtree(self.model_folder, ignore_errors=True)

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
