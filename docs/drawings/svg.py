"""An SVG in the light or the dark theme, with the shapes that the pictures of this folder need."""

import base64
import io
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

FOLDER = Path(__file__).parent
THEMES = {
    "light": {"ink": "#1a1f26", "faint": "#5a6472", "line": "#c3cad4", "ground": "#ffffff"},
    "dark": {"ink": "#e7ebf0", "faint": "#a3adba", "line": "#48525f", "ground": "#14181d"},
}
FONT = "system-ui, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"


@dataclass
class Drawing:
    """An SVG in one theme."""

    width: int
    height: int
    theme: str
    title: str
    parts: list[str] = field(default_factory=list)

    def text(
        self, x: float, y: float, words: str, size: int = 14, colour: str = "ink", anchor: str = "middle"
    ) -> None:
        """One line of text around, from or up to ``x``."""
        fill = THEMES[self.theme].get(colour, colour)
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" '
            f'text-anchor="{anchor}">{words}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, width: float, colour: str = "ink") -> None:
        """A line with round ends."""
        self.parts.append(
            f'<path d="M{x1:.1f} {y1:.1f}C{x1:.1f} {(y1 + y2) / 2:.1f} {x2:.1f} {(y1 + y2) / 2:.1f} {x2:.1f} '
            f'{y2:.1f}" fill="none" stroke="{THEMES[self.theme].get(colour, colour)}" '
            f'stroke-width="{width:.2f}" stroke-linecap="round"/>'
        )

    def box(self, x: float, y: float, side: float, colour: str, opacity: float = 1) -> None:
        """A filled square with a thin edge."""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{side:.1f}" height="{side:.1f}" fill="{colour}" '
            f'fill-opacity="{opacity:.3f}" stroke="{THEMES[self.theme]["line"]}" stroke-width="0.5"/>'
        )

    def image(self, x: float, y: float, side: float, pixels: np.ndarray) -> None:
        """Colours (rows, columns, 3) in 0..255 as a square of ``side``."""
        file = io.BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG", optimize=True)
        data = base64.b64encode(file.getvalue()).decode()
        self.parts.append(
            f'<image x="{x}" y="{y}" width="{side}" height="{side}" image-rendering="pixelated" '
            f'href="data:image/png;base64,{data}"/>'
        )

    def stroke(self, x1: float, y1: float, x2: float, y2: float, width: float, colour: str) -> None:
        """A straight line."""
        self.parts.append(
            f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" '
            f'stroke="{THEMES[self.theme].get(colour, colour)}" stroke-width="{width}"/>'
        )

    def dot(self, x: float, y: float, radius: float, colour: str) -> None:
        """A filled circle."""
        fill = THEMES[self.theme].get(colour, colour)
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}"/>')

    def render(self) -> str:
        """The text of the file."""
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="{FONT}" role="img">\n'
            f"<title>{self.title}</title>\n"
            f'<rect width="100%" height="100%" rx="8" fill="{THEMES[self.theme]["ground"]}"/>\n'
            f"{body}\n</svg>\n"
        )

    def save(self, name: str) -> None:
        """Write ``name-theme.svg`` beside this file."""
        (FOLDER / f"{name}-{self.theme}.svg").write_text(self.render(), encoding="utf-8")
