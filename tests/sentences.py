"""The sentences of documents and docstrings, with the line that each begins in.

Code, tables, formulas, link targets and doctests are left out. A heading, a list item and an entry of a
Google-style section are sentences of their own.
"""

import ast
import re
from dataclasses import dataclass

ABBREVIATIONS = {"al.", "approx.", "cf.", "e.g.", "eq.", "i.e.", "resp.", "sec.", "vs."}
ENTRY_SECTIONS = {"Args:", "Attributes:", "Raises:"}
ITEM = re.compile(r"\s*(?:[-*•]|\d+[.)])\s+")
ENTRY = re.compile(r"\s*[\w.*`]+(?:, [\w.*`]+)*(?: \([^)]*\))?: ")
SECTION = re.compile(r"[A-Z]\w*:$")
JOINT = "\0"
"""In place of a space within what counts as one word."""
END = re.compile(r"[.!?][\"')\]*_”]*(?=\s|$)")


@dataclass(frozen=True)
class Sentence:
    """A sentence, the number of the line that it begins in, and how many words it has."""

    line: int
    text: str

    words: int
    """Inline code, a formula and a shape such as (B, ..., n) are one word each."""


def split_sentences(lines):
    """The sentences of one paragraph, given as pairs of a line number and its text."""
    text = _without_markup("\n".join(line for _, line in lines))
    first, start, found = lines[0][0], 0, []
    for end in [*END.finditer(text), None]:
        stop = len(text) if end is None else end.end()
        last_word = text[start:stop].split()[-1:]
        if end is not None and last_word and _is_no_end(last_word[0], text[stop:].lstrip()):
            continue
        begin = start + len(text[start:stop]) - len(text[start:stop].lstrip())
        parts = text[begin:stop].split()
        words = sum(any(letter.isalnum() for letter in part) for part in parts)
        if words:
            line = first + text.count("\n", 0, begin)
            found.append(Sentence(line, " ".join(parts).replace(JOINT, " "), words))
        start = stop
    return found


def _is_no_end(word, rest):
    is_ellipsis = word.endswith("...") and not rest[:1].isupper()
    return is_ellipsis or word.lower().lstrip("(\"'“") in ABBREVIATIONS


def _without_markup(text):
    """``text`` with as many lines, in which everything that counts as one word is one."""

    def one_word(match):
        return re.sub(r"\s+", JOINT, match[0]) + "\n" * match[0].count("\n")

    def target_out(match):
        return match[1] + "\n" * match[0].count("\n", len(match[1]) + 1)

    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", lambda match: "\n" * match[0].count("\n"), text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", target_out, text)
    text = re.sub(r"(?::\w+(?::\w+)?:|\{\w+\})?(`+)[^`]+\1", one_word, text)
    text = re.sub(r"\$\$?[^$]+\$\$?", one_word, text)
    text = re.sub(r"</?\w[^>]*>", lambda match: "\n" * match[0].count("\n"), text)
    return re.sub(r"\([^\s()]+(?:,\s[^\s()]+)+\)", one_word, text)


def document_sentences(text):
    """The sentences of a Markdown document."""
    return [sentence for block in _document_blocks(text.splitlines()) for sentence in split_sentences(block)]


def _document_blocks(lines):
    block, fence, is_formula = [], None, False
    for number, line in enumerate(lines, start=1):
        stripped = line.strip()
        opened = re.match(r"(`{3,}|~{3,}|:{3,})", stripped)
        if fence is not None:
            if stripped.startswith(fence):
                fence = None
            continue
        if stripped.startswith("$$"):
            is_formula = not is_formula and not stripped.endswith("$$", 2)
            continue
        if opened and not stripped.startswith(":::"):
            fence = opened[1]
        is_prose = not is_formula and not opened and not re.match(r"[|<:]|\(\w+\)=$|[-=*_]{3,}$", stripped)
        starts = ITEM.match(line) or stripped.startswith("#")
        if block and (not stripped or not is_prose or starts):
            yield block
            block = []
        if stripped and is_prose:
            block.append((number, ITEM.sub("", stripped, count=1).lstrip("#> ") if starts else stripped))
        if stripped.startswith("#") and block:
            yield block
            block = []
    if block:
        yield block


def docstring_sentences(source):
    """The sentences of all docstrings of a module, those of its attributes included."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            if isinstance(text, str):
                blocks = _docstring_blocks(text.splitlines(), node.value.lineno)
                found += [sentence for block in blocks for sentence in split_sentences(block)]
    return sorted(found, key=lambda sentence: sentence.line)


def _docstring_blocks(lines, first):
    block, skipped_above, in_doctest, entry_indent = [], None, False, None
    margin = min((_indent(line) for line in lines[1:] if line.strip()), default=0)
    for number, line in enumerate(lines, start=first):
        stripped = line.strip()
        indent = 0 if number == first else _indent(line) - margin
        if not stripped:
            if block:
                yield block
            block, in_doctest = [], False
            continue
        if skipped_above is not None and indent > skipped_above:
            continue
        skipped_above = None
        in_doctest = in_doctest or stripped.startswith(">>>")
        is_heading = SECTION.fullmatch(stripped) is not None
        if entry_indent is not None and (indent < entry_indent or is_heading):
            entry_indent = None
        is_entry = entry_indent is not None and indent == entry_indent
        item = ITEM.match(stripped)
        if block and (in_doctest or is_heading or is_entry or item or stripped.startswith("..")):
            yield block
            block = []
        if is_heading:
            entry_indent = indent + 4 if stripped in ENTRY_SECTIONS else None
        elif stripped.startswith(".. "):
            skipped_above = indent
        elif not in_doctest:
            text = ENTRY.sub("", stripped, count=1) if is_entry else stripped
            block.append((number, ITEM.sub("", text, count=1) if item else text))
            if stripped.endswith("::"):
                yield block
                block, skipped_above = [], indent
    if block:
        yield block


def _indent(line):
    return len(line) - len(line.lstrip())
