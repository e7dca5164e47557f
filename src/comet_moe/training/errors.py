"""The one exception of this room."""


class RunError(ValueError):
    """A run that cannot be made or used as asked; the message says which and what would be right."""
