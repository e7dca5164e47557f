"""Whether the test rows can tell anything: below a minimum the sentence says what is missing.

A difference of losses is tested with a normal approximation, which needs some rows. A target with classes
also needs some rows of two classes: what is known of a rare class comes from its rows alone.
"""

from collections.abc import Mapping, Sequence

from comet_moe.experiments.studies.frontier import Row

MIN_ROWS = 30
"""Test rows with a target that a verdict takes."""
MIN_CLASS_ROWS = 10
"""Test rows that it takes of each of two classes."""


def missing_evidence(rows: Sequence[Row]) -> str:
    """What is missing for a verdict on any target; "" where there is enough, or where it was not recorded."""
    tasks: Mapping[str, list[int]] = next((row["test_rows"] for row in rows if row.get("test_rows")), {})
    missing = {name: _missing(name, counts) for name, counts in tasks.items()}
    if not missing or not all(missing.values()):
        return ""
    most = max(tasks, key=lambda name: sum(tasks[name]))  # of several targets the one with the most rows
    return missing[most]


def few_rows(rows: Sequence[Row]) -> list[str]:
    """The targets whose metrics rest on too few test rows."""
    tasks: Mapping[str, list[int]] = next((row["test_rows"] for row in rows if row.get("test_rows")), {})
    return [name for name, counts in tasks.items() if _missing(name, counts)]


def _missing(name: str, counts: list[int]) -> str:
    """What one target lacks, from its test rows of each class, or in all."""
    total = sum(counts)
    if total < MIN_ROWS:
        return f"{name} has {total} test rows, and a verdict takes at least {MIN_ROWS}"
    if len(counts) > 1:
        second = sorted(counts)[-2]
        if second < MIN_CLASS_ROWS:
            which = "rarer" if len(counts) == 2 else "second most frequent"
            return (
                f"{name} has {second} test rows of its {which} class, of {total:,}, and a verdict takes at "
                f"least {MIN_CLASS_ROWS}"
            )
    return ""
