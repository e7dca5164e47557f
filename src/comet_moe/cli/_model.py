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

    model = resolve_model(path)
    if model.is_file():
        raise StudyError(f"{path} recommends boosted trees, which are no network: give the folder of a run")
    return model
