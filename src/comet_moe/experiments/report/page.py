"""The page: sections, data, style and scripts in one HTML file that loads nothing else."""

from collections.abc import Mapping, Sequence
from datetime import date
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from comet_moe import __version__
from comet_moe.exceptions import needs_extra
from comet_moe.experiments.report.section import Section, build_section
from comet_moe.experiments.studies.reading import read_studies
from comet_moe.files import write_text

SCRIPTS = ("theme.js", "drawing.js", "loss_plots.js", "routing_plots.js", "trees.js", "groups.js", "page.js")


def write_report(
    paths: Sequence[Path], out: Path, title: str | None = None, pictures: Mapping[str, str] | None = None
) -> Path:
    """Write the report of the runs, studies and ablations in ``paths`` to the file ``out``.

    Args:
        paths: folders of studies and runs.
        out: the HTML file.
        title: of the page; by default the name of the study, or the number of studies.
        pictures: an SVG by name of a study, shown at the top of its section.

    Raises:
        StudyError: a folder has neither a study nor runs.
        WriteError: ``out`` cannot be written; an existing file is unchanged.
        MissingExtraError: Jinja2 or plotly is not installed.
    """
    sections = [build_section(study, index) for index, study in enumerate(read_studies(paths))]
    write_text(out, render_page(sections, title, pictures))
    return out


def check_extra() -> None:
    """Raise MissingExtraError if Jinja2 or plotly is missing; callers use it before long work."""
    with needs_extra("report", "writing a report"):
        import_module("jinja2")
        import_module("plotly.offline")


def render_page(
    sections: list[Section], title: str | None = None, pictures: Mapping[str, str] | None = None
) -> str:
    """The HTML file."""
    check_extra()
    plotly = import_module("plotly.offline")
    several = f"{len(sections)} comparisons of gates"
    title = title or (sections[0].study.title if len(sections) == 1 else several)
    return str(
        load_templates()
        .get_template("page.html")
        .render(
            title=title,
            sections=sections,
            pictures=pictures or {},
            data={"sections": [section.data for section in sections]},
            style=read_asset("page.css"),
            plotly=plotly.get_plotlyjs(),
            scripts="".join(map(read_asset, SCRIPTS)),
            version=__version__,
            today=date.today().isoformat(),
        )
    )


def load_templates() -> Any:
    """The Jinja2 environment: it escapes every text, and an undefined name is an error."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("comet_moe.experiments.report", "assets"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # The filter tojson also escapes text that would end a script element or a quoted attribute.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def read_asset(name: str) -> str:
    """The text of a file of the page: a style or a script."""
    return (
        resources.files("comet_moe.experiments.report").joinpath("assets", name).read_text(encoding="utf-8")
    )
