"""Plain technical English: short sentences, and no words that readers had to guess at."""

import re
import subprocess
from pathlib import Path

import pytest

from sentences import docstring_sentences, document_sentences

ROOT = Path(__file__).parent.parent
SUFFIXES = {".py", ".md", ".yaml", ".html", ".js", ".css", ".sh", ".toml"}
DOCSTRING_WORDS = 25
DOCUMENT_WORDS = 30

UNITS = (
    "batch|epoch|expert|gate|layer|line|page|row|run|sample|second|selector|step|study|task|token|tree|trial"
)
AVOID = {
    rf"\b(one|an?) \w+ an? ({UNITS})\b": "per",
    r"\bfigures?\b": "metrics or results",
    r"\blaid over\b|\blays? \w+ \w+ over\b": "override",
    r"\bgo(es)? on with\b|\bgone on with\b|\bto go on\b": "resume",
    r"\bat hand\b": "available",
    r"\bnobody\b": "the plain condition",
    r"\bis no number\b": "NaN",
    r"\bbudget buys\b": "loss by number of trials",
    r"\bpenalt(y|ies)\b": "auxiliary loss",
    r"\b(Lesson|Fitting|Watch|GateAround|nobody_looks)\b": "the plain name",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bfiles? of strangers\b|\bstrangers' files?\b": "untrusted files",
    r"\btold on (standard error|stderr)\b": "reported on stderr",
    r"\b(not|no \w+ (is|was)) shown to\b": "no significant difference",
    r"\bnearest to a gain\b": "the closest it gets to a gain",
    r"\bfor want of\b": "for lack of",
}
ALLOWED = {"tests/test_language.py", "CHANGELOG.md", "tests/gates/test_golden.py"}
PLOTS = ("src/comet_moe/experiments/report/", "tests/experiments/report/")  # a figure is an HTML element


def tracked_files():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout, so that the files of the project are not known")
    names = [name for name in listed.stdout.splitlines() if Path(name).suffix in SUFFIXES]
    return [name for name in names if name not in ALLOWED and (ROOT / name).exists()]


@pytest.mark.parametrize("pattern", AVOID)
def test_no_file_uses_words_of_the_old_dialect(pattern):
    search = re.compile(pattern, re.IGNORECASE)
    found = [
        f"{name}:{number}: {line.strip()}"
        for name in tracked_files()
        if not ("figure" in pattern and name.startswith(PLOTS))
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), start=1)
        if search.search(line)
    ]
    assert not found, f"say {AVOID[pattern]}:\n" + "\n".join(found)


def long_sentences(name, sentences, limit):
    return [
        f"{name}:{sentence.line}: {sentence.words} words: {sentence.text}"
        for sentence in sentences((ROOT / name).read_text(encoding="utf-8"))
        if sentence.words > limit
    ]


def test_a_sentence_of_a_docstring_has_at_most_25_words():
    names = [name for name in tracked_files() if name.startswith("src/") and name.endswith(".py")]
    found = [line for name in names for line in long_sentences(name, docstring_sentences, DOCSTRING_WORDS)]
    assert names
    assert not found, "make two sentences of each:\n" + "\n".join(found)


def test_a_sentence_of_a_document_has_at_most_30_words():
    pages = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/")
    names = [name for name in tracked_files() if name.startswith(pages) and name.endswith(".md")]
    found = [line for name in names for line in long_sentences(name, document_sentences, DOCUMENT_WORDS)]
    assert names
    assert not found, "make two sentences of each:\n" + "\n".join(found)


DOCUMENT = """# A heading without an end

The loss is 0.5 (e.g. with `one. two`), vs. 0.7 before. It needs [a link of one](page.md#part. x). *Why?*
A gate has weights of shape (B, ..., n)
over two lines.

- an item. Its second sentence
  goes over two lines
- another item

| a table | is left. out |
|---|---|

```sh
code. is left out
```

$$
x. y
$$

The formula $a. b$ is one word.
"""


def test_sentences_of_a_document_are_found_with_their_lines():
    found = [(sentence.line, sentence.words, sentence.text) for sentence in document_sentences(DOCUMENT)]
    assert found == [
        (1, 5, "A heading without an end"),
        (3, 10, "The loss is 0.5 (e.g. with `one. two`), vs. 0.7 before."),
        (3, 6, "It needs a link of one."),
        (3, 1, "*Why?*"),
        (4, 10, "A gate has weights of shape (B, ..., n) over two lines."),
        (7, 2, "an item."),
        (7, 7, "Its second sentence goes over two lines"),
        (9, 2, "another item"),
        (22, 6, "The formula $a. b$ is one word."),
    ]


DOCSTRINGS = '''"""The summary. Its detail."""

LIMIT = 3
"""What a limit is."""


def function(a, b):
    """Do one thing
    over two lines.

    .. math:: x. y

    Args:
        a: the first. See ``b. c``
            over two lines.
        b (int): the second

    Returns:
        One value, or none.

    Example:
        >>> function(1. , 2)
        a result. of code
    """
'''


def test_sentences_of_docstrings_are_found_with_their_lines():
    found = [(sentence.line, sentence.words, sentence.text) for sentence in docstring_sentences(DOCSTRINGS)]
    assert found == [
        (1, 2, "The summary."),
        (1, 2, "Its detail."),
        (4, 4, "What a limit is."),
        (8, 6, "Do one thing over two lines."),
        (14, 2, "the first."),
        (14, 5, "See ``b. c`` over two lines."),
        (16, 2, "the second"),
        (19, 4, "One value, or none."),
    ]
