"""The page of an audit: findings, tables per mixture, no network and no scripts."""

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from comet_moe import __version__
from comet_moe.experiments.report.page import load_templates, read_asset
from comet_moe.files import write_text


def write_audit_page(report: Mapping[str, Any], title: str, out: Path) -> None:
    """Write the page of ``report``, what ``comet-moe audit --json`` prints, to ``out``.

    Raises:
        WriteError: ``out`` cannot be written; an existing file is unchanged.
        MissingExtraError: Jinja2 is not installed.
    """
    write_text(out, render_audit_page(report, title))


def render_audit_page(report: Mapping[str, Any], title: str) -> str:
    """The HTML file."""
    environment = load_templates()
    environment.filters["gain"] = _gain
    environment.filters["percent"] = _percent
    environment.filters["plus_minus"] = _plus_minus
    return str(
        environment.get_template("audit.html").render(
            report=report,
            title=title,
            style=read_asset("page.css"),
            version=__version__,
            today=date.today().isoformat(),
        )
    )


def _gain(found: Mapping[str, Any] | None) -> str:
    return "-" if found is None else _plus_minus(found["gain"], found["interval"])


def _plus_minus(value: float, interval: Sequence[float] | None) -> str:
    """A value with half of its interval: in cells of their own, they made the table wider than the page."""
    return f"{value:.4f}" if interval is None else f"{value:.4f} ± {(interval[1] - interval[0]) / 2:.4f}"


def _percent(share: float, interval: Sequence[float] | None = None) -> str:
    half = "" if interval is None else f" ± {50 * (interval[1] - interval[0]):.0f}"
    return f"{100 * share:.0f}{half} %"
