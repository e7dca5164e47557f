"""Files of the repository that are not pages of the site: links to them, and pages that repeat them.

A page links to a file as GitHub does, ``../examples/causal_lm.py``; in the site such a link leads to the file
in the repository. ``CHANGELOG.md`` and ``CONTRIBUTING.md`` are included by pages of the site, and links
to them lead there.
"""

import re
import tomllib
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = f"{PROJECT['urls']['Repository']}/blob/main/"
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "README.md": "index.md"}
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")


def rewrite(app: Sphinx, name: str, source: list[str]) -> None:
    """Turn links that leave docs/ into links to the repository, or to the page that includes the file."""
    page = Path(app.env.doc2path(name))
    source[0] = LINK.sub(lambda link: _target(page.parent, link[1], link[2] or ""), source[0])


def _target(folder: Path, link: str, anchor: str) -> str:
    file = (folder / link).resolve()
    if not file.exists():
        raise ExtensionError(f"{folder} has a link to {link}, which does not exist")
    if file.is_relative_to(DOCS) and file.suffix in (".md", ".svg", ".png"):
        return link + anchor
    inside = file.relative_to(ROOT).as_posix()
    if inside in PAGES:
        up = "../" * len(folder.relative_to(DOCS).parts)
        return up + PAGES[inside] + (anchor if inside != "README.md" else "")
    return REPOSITORY + inside + anchor


def setup(app: Sphinx) -> dict[str, bool]:
    """Rewrite sources when they are read."""
    app.connect("source-read", rewrite)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
