"""Students of one teacher as the trials of a study."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comet_moe.exceptions import RecipeError
from comet_moe.experiments.bert.build import build_student
from comet_moe.experiments.bert.distill import DistillationContext, load_context, train_student
from comet_moe.experiments.bert.run import BertFolder, teacher_settings
from comet_moe.experiments.config import BertConfig, Override, load_bert_config, parse_setting
from comet_moe.experiments.training.records import ResultRecord
from comet_moe.experiments.training.trainer import Callbacks


class StudentRunner:
    """Runs trials that distil one teacher; they share the teacher and the data."""

    def __init__(self) -> None:
        self._loaded: tuple[Any, DistillationContext] | None = None

    def base(self, recipe: str, settings: Sequence[str]) -> BertConfig:
        """The recipe with ``settings``, on the rows that the teacher was trained on."""
        overrides = [parse_setting(setting) for setting in settings]
        config = load_bert_config(recipe, overrides)
        if config.stage != "distill":
            raise RecipeError(f"a study trains students, got stage={config.stage}: leave it out")
        if config.teacher is None:
            raise RecipeError(
                f"recipe {recipe} needs teacher, the folder of a `comet-moe bert finetune {config.task}`: "
                f"--set teacher=RUN"
            )
        teacher = BertFolder(Path(config.teacher)).teacher()
        teacher_config = teacher.config()
        if teacher_config.task != config.task:
            raise RecipeError(
                f"the teacher in {teacher.path} was trained on {teacher_config.task}, not on {config.task}"
            )
        data: list[Override] = [
            (["data", name], value) for name, value in teacher_config.data.model_dump().items()
        ]
        identity: list[Override] = [([name], value) for name, value in teacher_settings(teacher).items()]
        return load_bert_config(recipe, [*data, *overrides, *identity])

    def check(self, config: BertConfig) -> None:
        """Build the student once; scores the neurons of the teacher if that was not done yet."""
        context = self._context(config)
        build_student(config, context.teacher, context.data, context.importance)

    def folder(self, path: Path) -> BertFolder:
        """The folder of a run."""
        return BertFolder(path)

    def run(self, config: BertConfig, folder: BertFolder, callbacks: Callbacks) -> ResultRecord:
        """Distil, from the last checkpoint if there is one; returns the result."""
        return train_student(self._context(config), config, folder, callbacks)

    def _context(self, config: BertConfig) -> DistillationContext:
        shared = (config.teacher, config.data, config.experts.importance)
        if self._loaded is None or self._loaded[0] != shared:
            self._loaded = (shared, load_context(config))
        return self._loaded[1]
