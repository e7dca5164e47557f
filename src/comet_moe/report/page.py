"""The page: chapters, data, style and scripts in one file that asks for nothing else."""

import json
from collections.abc import Sequence
from datetime import date
from importlib import import_module, resources
from pathlib import Path
from string import Template
from typing import Any

from comet_moe import __version__
from comet_moe.analysis.reading import read_studies
from comet_moe.io import write_text
from comet_moe.report.format import decimals, plus_minus
from comet_moe.report.markup import Html, element, join, table
from comet_moe.report.section import KINDS, Chapter, build_chapter

SCRIPTS = ("theme.js", "plots.js", "tree.js", "page.js")


def write_report(paths: Sequence[Path], out: Path) -> Path:
    """Write the report of the runs, studies and ablations in ``paths`` to ``out``, whole or not at all.

    Raises StudyError for a folder that holds none, WriteError for a place that cannot be written.
    """
    chapters = [build_chapter(study, place) for place, study in enumerate(read_studies(paths))]
    write_text(out, page(chapters))
    return out


def page(chapters: list[Chapter]) -> str:
    """The whole file."""
    alone = len(chapters) == 1
    title = chapters[0].study.title if alone else f"{len(chapters)} comparisons of gates"
    return Template(_asset("page.html")).substitute(
        title=join(title, " - comet-moe report"),
        style=_asset("page.css"),
        header=_header(title, chapters),
        body=join(*(() if alone else (_overview(chapters),)), *(chapter.html(alone) for chapter in chapters)),
        footer=_footer(),
        data=as_data({"chapters": [chapter.data for chapter in chapters]}),
        plotly=import_module("plotly.offline").get_plotlyjs(),
        script="".join(map(_asset, SCRIPTS)),
    )


def as_data(value: Any) -> str:
    """JSON that may stand in a script element: no ``<`` that could end it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return resources.files("comet_moe.report").joinpath("assets", name).read_text(encoding="utf-8")


def _header(title: str, chapters: list[Chapter]) -> Html:
    alone = len(chapters) == 1
    unfinished = [chapter.unfinished for chapter in chapters if chapter.unfinished]
    return element(
        "header",
        element("p", "comet-moe report", class_="eyebrow"),
        element("h1", title),
        element("p", chapters[0].facts, class_="lead") if alone else "",
        *(element("p", sentence, class_="banner") for sentence in unfinished),
        _contents(chapters[0]) if alone else "",
    )


def _contents(chapter: Chapter) -> Html:
    items = [element("li", element("a", part.title, href=f"#{chapter.link(part)}")) for part in chapter.parts]
    return element("nav", element("ul", *items, class_="contents"), aria_label="Contents")


def _overview(chapters: list[Chapter]) -> Html:
    head = [
        element("th", name, scope="col")
        for name in ("comparison", "kind", "gates", "complete", "lowest", "test loss x100")
    ]
    return element(
        "section",
        table(
            "For each comparison the gate with the lowest test loss.",
            head,
            list(map(_overview_row, chapters)),
        ),
        class_="chapter",
    )


def _overview_row(chapter: Chapter) -> Html:
    study, rows = chapter.study, chapter.rows
    best = next((row for row in rows if row["lowest"]), None)
    places = decimals([row["test_loss_se"] for row in rows])
    complete = sum(row["trials_complete"] for row in rows)
    asked = sum(row["trials_planned"] for row in rows)
    cells = (
        KINDS[study.kind].lower(),
        str(len(study.gates)),
        f"{complete:,}/{asked:,}",
        best["gate"] if best else "-",
        plus_minus(best["test_loss_mean"], best["test_loss_se"], places) if best else "-",
    )
    link = element("a", study.title, href=f"#{chapter.anchor}")
    return element("tr", element("th", link, scope="row"), *(element("td", cell) for cell in cells))


def _footer() -> Html:
    said = (
        f"Written by comet-moe {__version__} on {date.today().isoformat()}. Losses are x100 and contain no "
        f"penalties. A + in the name of a gate is local search. This file is whole: it loads nothing."
    )
    return element("footer", element("p", said))
