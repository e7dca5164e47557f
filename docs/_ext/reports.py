"""Pages that ``comet-moe report`` and ``comet-moe audit`` draw of docs/results, made with the site.

A folder with a ``study.json``, in itself or in its folders, gets one ``report.html`` of these studies beside
its page, and its page a link to it. So does each audit in ``results/audit``. The pages are large and follow
from files that are committed, so they are not in the repository.
"""

import json
from pathlib import Path

from sphinx.application import Sphinx

from comet_moe.experiments.report import write_report
from comet_moe.experiments.report.audit_page import write_audit_page

DOCS = Path(__file__).parents[1]
LINK = '\n\n<p><a href="report.html">The page of <code>comet-moe report</code> about this study</a></p>\n'


def studies_of(folder: Path) -> list[Path]:
    """The study of a folder of results, then those in its folders."""
    return [file.parent for file in (*folder.glob("study.json"), *sorted(folder.glob("*/study.json")))]


def audits_of(folder: Path) -> list[Path]:
    """The audits of a folder of results."""
    return sorted(folder.glob("*.json")) if folder.name == "audit" else []


def add_link(app: Sphinx, name: str, source: list[str]) -> None:
    """Link the page of a study to its report."""
    page = Path(app.env.doc2path(name))
    if page.match("results/*/README.md") and studies_of(page.parent):
        heading, end, rest = source[0].partition("\n")
        source[0] = heading + end + LINK + rest
    elif page.match("results/audit/README.md"):
        links = (f'<a href="{file.stem}.html">{file.stem}</a>' for file in audits_of(page.parent))
        source[0] += f"\n\n<p>The pages of <code>comet-moe audit</code>: {', '.join(links)}</p>\n"


def draw(app: Sphinx, error: Exception | None) -> None:
    """Write the report of each study into the site."""
    if error is not None or app.builder.format != "html":
        return
    for page in sorted(DOCS.glob("results/*/README.md")):
        if studies := studies_of(page.parent):
            write_report(studies, Path(app.outdir, page.parent.relative_to(DOCS), "report.html"))
        for audit in audits_of(page.parent):
            out = Path(app.outdir, page.parent.relative_to(DOCS), f"{audit.stem}.html")
            write_audit_page(json.loads(audit.read_text()), audit.stem, out)


def setup(app: Sphinx) -> dict[str, bool]:
    """Link when sources are read, draw when the site is written."""
    app.connect("source-read", add_link)
    app.connect("build-finished", draw)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
