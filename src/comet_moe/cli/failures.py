"""Which exceptions are a user's mistake, and the sentence that says so."""


def explain(error: Exception) -> str | None:
    """One sentence for a mistake in what was given; None for a fault of ours."""
    from comet_moe.analysis.study import StudyError
    from comet_moe.data import DataError
    from comet_moe.recipes import RecipeError
    from comet_moe.writing import CannotWrite

    mistakes: tuple[type[Exception], ...] = (DataError, RecipeError, StudyError, CannotWrite)
    if isinstance(error, ValueError):  # torch is loaded only if what failed has loaded it already
        from comet_moe.export import ExportError
        from comet_moe.training import RunError
        from comet_moe.tuning import StudyProblem

        mistakes += (RunError, ExportError, StudyProblem)
    if isinstance(error, OSError) and error.strerror:  # a disk that is full, a file that is not ours
        return f"{error.filename or 'a file'}: {error.strerror}"
    return " ".join(str(error).split()) if isinstance(error, mistakes) else None
