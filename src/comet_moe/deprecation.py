"""What is to go, when, and what to use in its place: said in code, and shown to users as a warning.

A public name keeps working for at least one minor version after it is deprecated. ``DEPRECATIONS`` lists what
is deprecated now; a test fails once the version is reached in which an entry is to be removed.
"""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Deprecation:
    """One deprecated name.

    Attributes:
        name: of the function, class or argument.
        since: version that warns for the first time, such as "0.3".
        removal: version that no longer has it.
        use: what to use in its place.
    """

    name: str
    since: str
    removal: str
    use: str

    def __str__(self) -> str:
        return (
            f"{self.name} is deprecated since comet-moe {self.since} and is removed in {self.removal}: "
            f"use {self.use}"
        )

    def is_overdue(self, version: str) -> bool:
        """Whether ``version`` is at or after the removal."""
        return _numbers(version) >= _numbers(self.removal)


DEPRECATIONS: list[Deprecation] = []
"""Filled when the modules that deprecate something are imported."""


def deprecated(*, since: str, removal: str, use: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for a function or method: calling it warns by a FutureWarning, shown by default.

    For a class, decorate its ``__init__``.

    Example:
        >>> from comet_moe.deprecation import DEPRECATIONS, deprecated
        >>> @deprecated(since="0.3", removal="0.5", use="new_sum")
        ... def old_sum(values):
        ...     return sum(values)
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     old_sum([1, 2])
        3
        >>> print(caught[0].message)
        old_sum is deprecated since comet-moe 0.3 and is removed in 0.5: use new_sum
        >>> _ = DEPRECATIONS.pop()
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        entry = Deprecation(function.__qualname__.removesuffix(".__init__"), since, removal, use)
        DEPRECATIONS.append(entry)

        @functools.wraps(function)
        def warn_and_call(*args: P.args, **kwargs: P.kwargs) -> R:
            warnings.warn(str(entry), FutureWarning, stacklevel=2)
            return function(*args, **kwargs)

        return warn_and_call

    return decorate


def renamed_argument(
    old: str, new: str, *, since: str, removal: str
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """A decorator for a function whose argument ``old`` is now called ``new``: both work, ``old`` warns."""

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        owner = function.__qualname__.removesuffix(".__init__")
        entry = Deprecation(f"the argument {old} of {owner}", since, removal, new)
        DEPRECATIONS.append(entry)

        @functools.wraps(function)
        def rename_and_call(*args: Any, **kwargs: Any) -> R:
            if old in kwargs:
                if new in kwargs:
                    raise TypeError(f"{owner} got both {new} and its old name {old}: give {new} alone")
                warnings.warn(str(entry), FutureWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return rename_and_call

    return decorate


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
