"""What can be wrong with a study."""


class StudyProblem(ValueError):
    """A study that cannot be started or gone on with; the message says which and why."""
