"""An argument that is described by one letter, as in "in_features: p.", is that letter, not a list item."""

import re
from typing import Any

from sphinx.application import Sphinx

LETTER = re.compile(r"^(\s+[\w, ]+: )([A-Za-z])([.,;] .*|\.)$")


def emphasise(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Write the letter in italics, before reStructuredText reads "p." as the start of a list."""
    lines[:] = [LETTER.sub(r"\1*\2*\3", line) for line in lines]


def setup(app: Sphinx) -> dict[str, bool]:
    """Run before napoleon, which reads the sections of a docstring."""
    app.connect("autodoc-process-docstring", emphasise, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
