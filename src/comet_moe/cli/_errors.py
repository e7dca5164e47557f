"""Which exceptions are a user's mistake, and the sentence that says so."""

from comet_moe.exceptions import CometError


def explain(error: Exception) -> str | None:
    """One sentence for a mistake in what was given; None for a fault of ours."""
    if isinstance(error, OSError) and error.strerror:  # a full disk, a file without permission
        return f"{error.filename or 'a file'}: {error.strerror}"
    return " ".join(str(error).split()) if isinstance(error, CometError) else None
