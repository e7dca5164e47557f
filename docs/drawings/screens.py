"""Take the pictures of the first page of the site, light and dark: python docs/drawings/screens.py DEMO

DEMO is a folder with the page and what a terminal of 82 columns shows:
COLUMNS=82 script -qec 'comet-moe demo --page DEMO/demo.html 2>/dev/null' DEMO/demo.txt
The notebook is examples/quickstart.ipynb, whose cells are run. Needs chromium.
"""

import ast
import io
import json
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console
from rich.text import Text

FOLDER = Path(__file__).parent
NOTEBOOK = FOLDER.parents[1] / "examples" / "quickstart.ipynb"
SIZE = (760, 570)
COLORS = 128
WIDTH = 82
STYLE = """
:root { color-scheme: light dark; }
body { margin: 1.2rem; font: 15px/1.45 system-ui, sans-serif; background: light-dark(#ffffff, #14181d);
  color: light-dark(#1a1f26, #e7ebf0); }
pre { font: 14px/1.4 ui-monospace, monospace; margin: 0.3rem 0; white-space: pre; }
pre.code { background: light-dark(#f3f5f8, #1d242c); padding: 0.6rem; border-radius: 0.3rem; }
td, th { padding: 0.2rem 0.8rem 0.2rem 0; vertical-align: top; }
"""


def run_cells(cells: list[dict[str, Any]], last: int) -> str:
    """The cells up to the one with index ``last`` as HTML, with what they show; all are run."""
    names: dict[str, Any] = {}
    shown = []
    for cell in cells[: last + 1]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            continue
        body = ast.parse(source).body
        result = body.pop() if isinstance(body[-1], ast.Expr) else None
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(ast.Module(body, []), str(NOTEBOOK), "exec"), names)
            value = result and eval(compile(ast.Expression(result.value), str(NOTEBOOK), "eval"), names)
        lines = source.splitlines()
        code = "\n".join(lines if len(lines) < 16 else ["...", *lines[-6:]])
        shown.append(f'<pre class="code">{escape(code)}</pre>')
        shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else "")
        shown.append(f"<pre>{escape(printed.getvalue())}</pre>" if printed.getvalue() else "")
    return "\n".join(shown[3:])  # without the imports and the data


def show_terminal(text: str) -> str:
    """What a terminal shows, with its colours."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    lines = [line for line in text.splitlines() if not line.startswith("Script ")]
    console.print(Text.from_ansi("\n".join(["$ comet-moe demo", *lines])))
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def take(page: Path, name: str, skip: int = 0) -> None:
    """Screenshots of a page in both themes, without its first ``skip`` pixels."""
    for theme in ("light", "dark"):
        out = FOLDER / f"screen-{name}-{theme}.png"
        dark = ["--blink-settings=preferredColorScheme=0"] if theme == "dark" else []
        size = f"--window-size={SIZE[0]},{SIZE[1] + skip}"
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", size, *dark, f"--screenshot={out}"]
        subprocess.run(["chromium", *options, page.absolute().as_uri()], check=True, capture_output=True)
        shot = Image.open(out).convert("RGB").crop((0, skip, SIZE[0], SIZE[1] + skip))
        shot.quantize(COLORS).save(out, optimize=True)


def main(demo: Path) -> None:
    """Take all of them."""
    take(demo / "demo.html", "page", skip=370)  # the list of comparisons
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    bodies = {
        "terminal": show_terminal((demo / "demo.txt").read_text(encoding="utf-8")),
        "notebook": run_cells(cells, len(cells) - 1),
    }
    with tempfile.TemporaryDirectory() as scratch:
        for name, body in bodies.items():
            page = Path(scratch) / f"{name}.html"
            page.write_text(f"<!doctype html><style>{STYLE}</style>{body}", encoding="utf-8")
            take(page, name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
