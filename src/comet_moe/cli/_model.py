"""The model that a command is given: a run, or what a study recommends."""

from pathlib import Path

from comet_moe.cli._text import echo


def resolve_model(path: Path) -> Path:
    """``path`` itself, or the recommended model of a study, with a note on standard error."""
    if not (path / "study.json").is_file():
        return path
    from comet_moe.experiments.studies.reading import read_studies
    from comet_moe.experiments.studies.winner import decide, winning_model

    (study,) = read_studies([path])
    for message in study.left_out():
        echo(f"note: {message}", err=True)
    model, why = winning_model(study, decide(study))
    echo(f"using {model}: {why}", err=True)
    return model


def resolve_run(path: Path) -> Path:
    """As `resolve_model`, for commands that need a network."""
    from comet_moe.exceptions import StudyError
    from comet_moe.experiments.training.records import BASELINES, is_baseline_file

    model = resolve_model(path)
    if is_baseline_file(model):
        raise StudyError(
            f"{path} recommends {BASELINES[model.stem]}, which is no network: give the folder of a run in "
            f"{path / 'runs'}"
        )
    return model
