"""HTML that is safe by construction: a text is escaped unless it was made here."""

from html import escape


class Html(str):
    """Text that is HTML already."""


def element(name: str, *children: str, **attributes: str | bool | None) -> Html:
    """``<name attributes>children</name>``.

    An attribute that is None or False is left out, one that is True has no value; a trailing underscore in
    its name (``class_``) falls away, another one becomes a hyphen.
    """
    said = "".join(_attribute(key, value) for key, value in attributes.items())
    return Html(f"<{name}{said}>{join(*children)}</{name}>")


def join(*children: str) -> Html:
    """The children one after the other, plain texts escaped."""
    return Html("".join(child if isinstance(child, Html) else escape(child) for child in children))


def _attribute(key: str, value: str | bool | None) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{escape(value)}"'


def table(caption: str, head: list[Html], rows: list[Html]) -> Html:
    """A table in a box that scrolls by itself where the screen is narrow."""
    inner = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *head)),
        element("tbody", *rows),
    )
    return element("div", inner, class_="scroll", role="region", tabindex="0", aria_label=str(caption))
