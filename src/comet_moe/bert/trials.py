"""Students of one teacher as the trials of a study."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from comet_moe.bert.distill import Lesson, new_student, open_lesson, teach
from comet_moe.bert.run import BertFolder, taught_by
from comet_moe.bert.trainer_loop import Watch
from comet_moe.config import BertConfig, Override, load_bert_config, parse_setting
from comet_moe.exceptions import RecipeError
from comet_moe.training.trainer import Progress


class Students:
    """Runs trials that distil one teacher; what they share is opened once."""

    def __init__(self) -> None:
        self._lesson: tuple[Any, Lesson] | None = None

    def base(self, recipe: str, settings: Sequence[str]) -> BertConfig:
        """The configuration before anything is drawn: the recipe's, on the rows that the teacher had."""
        overrides = [parse_setting(setting) for setting in settings]
        asked = load_bert_config(recipe, overrides)
        if asked.stage != "distill":
            raise RecipeError(f"a study is of students, got stage={asked.stage}: leave it out")
        if asked.teacher is None:
            raise RecipeError(
                f"recipe {recipe} needs teacher, the folder of a `comet-moe bert finetune {asked.task}`: "
                f"--set teacher=RUN"
            )
        teacher = BertFolder(Path(asked.teacher)).teacher()
        taught = teacher.config()
        if taught.task != asked.task:
            raise RecipeError(
                f"the teacher in {teacher.path} was trained on {taught.task}, not on {asked.task}"
            )
        rows: list[Override] = [(["data", name], value) for name, value in taught.data.model_dump().items()]
        who: list[Override] = [([name], value) for name, value in taught_by(teacher).items()]
        return load_bert_config(recipe, [*rows, *overrides, *who])

    def check(self, config: BertConfig) -> None:
        """Make the student once, in memory; scores the teacher's neurons if nobody has."""
        new_student(config, self._lesson_of(config))

    def folder(self, path: Path) -> BertFolder:
        """The folder of a run."""
        return BertFolder(path)

    def run(
        self,
        config: BertConfig,
        folder: BertFolder,
        on_batch: Callable[[Progress], None],
        on_epoch: Callable[[dict[str, Any]], None],
    ) -> dict[str, Any]:
        """Distil, from the start or from where it stopped; the result."""
        return teach(self._lesson_of(config), config, folder, Watch(on_batch, on_epoch))

    def _lesson_of(self, config: BertConfig) -> Lesson:
        shared = (config.teacher, config.data, config.experts.importance)
        if self._lesson is None or self._lesson[0] != shared:
            self._lesson = (shared, open_lesson(config))
        return self._lesson[1]
