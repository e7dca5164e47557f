"""Captions of the navigation are headings with a level, as screen readers need it; docutils leaves it out."""

from typing import Any

from sphinx.application import Sphinx


def add_level(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Add aria-level to the captions of the theme's navigation and of the page's own tables of contents."""
    for name in ("furo_navigation_tree", "body"):
        if name in context:
            context[name] = context[name].replace('role="heading"', 'role="heading" aria-level="2"')


def setup(app: Sphinx) -> dict[str, bool]:
    """Run after the theme has made its navigation."""
    app.connect("html-page-context", add_level, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
