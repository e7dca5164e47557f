"""Forward hooks that stay with the model they were registered on."""

from collections.abc import Callable


class Hook:
    """Base class of forward hooks that do nothing in a copied or unpickled model."""

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*args: object) -> None:
    return None
