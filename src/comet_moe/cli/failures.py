"""Which exceptions are a user's mistake, and the sentence that says so."""


def explain(error: Exception) -> str | None:
    """One sentence for a mistake in what was given; None for a fault of ours."""
    from comet_moe.analysis.study import StudyError
    from comet_moe.data import DataError
    from comet_moe.recipes import RecipeError
    from comet_moe.writing import CannotWrite

    if isinstance(error, OSError) and error.strerror:  # a disk that is full, a file that is not ours
        return f"{error.filename or 'a file'}: {error.strerror}"
    is_mistake = isinstance(error, DataError | RecipeError | StudyError | CannotWrite) or (
        isinstance(error, ValueError) and _is_of_rooms_with_torch(error)
    )
    return " ".join(str(error).split()) if is_mistake else None


def _is_of_rooms_with_torch(error: ValueError) -> bool:
    """Asked last: loading these takes seconds where torch is not there yet."""
    from comet_moe.export import ExportError
    from comet_moe.training import RunError
    from comet_moe.tuning import StudyProblem

    return isinstance(error, RunError | ExportError | StudyProblem)
