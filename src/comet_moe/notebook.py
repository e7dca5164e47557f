"""What a notebook shows of mixtures, statistics and audits: small tables of HTML."""

from collections.abc import Iterable, Sequence
from html import escape

VERDICT_COLORS = {"routes": "#1f7a4d", "blends": "#9a6700", "static": "#b4471a", "dense": "#5a6472"}
_LEFT = "text-align: left"
_BAR = 60
"""Width of the longest bar in pixels."""


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells, which are HTML; captions and heads are text."""
    top = _row("th", [escape(head) for head in heads])
    body = "".join(_row("td", row) for row in rows)
    title = f'<caption style="{_LEFT}; font-weight: bold">{escape(caption)}</caption>'
    return f"<table>{title}<thead>{top}</thead><tbody>{body}</tbody></table>"


def _row(element: str, cells: Iterable[str]) -> str:
    inner = "".join(f'<{element} style="{_LEFT}">{cell}</{element}>' for cell in cells)
    return f"<tr>{inner}</tr>"


def verdict_badge(verdict: str) -> str:
    """The word of a verdict in its color."""
    color = VERDICT_COLORS.get(verdict, "inherit")
    return f'<b style="color: {color}">{escape(verdict)}</b>'


def bars(values: Sequence[float], most: int = 64) -> str:
    """One bar per value, as high as its share of the largest one; "" for more than ``most`` values."""
    largest = max(values, default=0.0)
    if not 0 < len(values) <= most or not largest > 0:
        return ""
    width = max(1.0, _BAR / len(values))
    shown = "".join(
        f'<rect x="{index * width:.1f}" y="{20 - 20 * value / largest:.1f}" width="{0.8 * width:.1f}" '
        f'height="{20 * value / largest:.1f}"/>'
        for index, value in enumerate(values)
    )
    size = f'width="{len(values) * width:.0f}" height="20"'
    return f'<svg {size} fill="currentColor" role="img" aria-label="load of each expert">{shown}</svg>'
