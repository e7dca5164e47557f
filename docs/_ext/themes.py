"""A picture NAME-light.svg or .png is shown in the light theme, NAME-dark in its place in the dark one."""

from docutils import nodes
from sphinx.application import Sphinx


def add_dark(app: Sphinx, doctree: nodes.document) -> None:
    """Put the dark picture beside the light one; the theme shows one of them."""
    for image in list(doctree.findall(nodes.image)):
        if image["uri"].endswith(("-light.svg", "-light.png")):
            dark = image.deepcopy()
            dark["uri"] = image["uri"].replace("-light.", "-dark.")
            image["classes"].append("only-light")
            dark["classes"].append("only-dark")
            image.parent.insert(image.parent.index(image) + 1, dark)


def setup(app: Sphinx) -> dict[str, bool]:
    """Run before Sphinx collects pictures."""
    app.connect("doctree-read", add_dark, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
