"""Draw the frontier of each page, and print what the rules say: python docs/results/frontiers.py [PAGE]...

Each page has ``frontier-light.svg`` and ``frontier-dark.svg`` beside it, and the sentences in its text, from
its committed runs. A page of two data sets has one picture for each, ``frontier-NAME-light.svg``. Dense
networks from other studies of the same setting take part, under names that say their width.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from comet_moe.experiments.report.frontier_picture import THEMES, draw_frontier
from comet_moe.experiments.studies.defaults import FRONTIER, TOP_PERCENT
from comet_moe.experiments.studies.frontier import add_dense_tests
from comet_moe.experiments.studies.reading import Study, read_studies, to_frame
from comet_moe.experiments.studies.records import TrialRecord
from comet_moe.experiments.studies.tables import compare_gates
from comet_moe.experiments.studies.winner import winner
from comet_moe.experiments.training.records import TREES, ResultRecord

sys.path.append(str(Path(__file__).parent))
import raw
from studies import Row

RESULTS = Path(__file__).parent
WIDTH = 95
"""Of the lines of text: a block of the site is as wide at 1280 pixels."""

Names = Mapping[str, str]
"""The networks to take, by their name in a study, with the name that they get here."""


@dataclass(frozen=True)
class Source:
    """Networks of one study: the folder of it, or the ``runs.jsonl`` of a page.

    Attributes:
        path: relative to this folder.
        names: None for all networks of a study, as they are called there.
        top_percent: share of the trials that count in a tuning study.
    """

    path: str
    names: Names | None = None
    top_percent: float = TOP_PERCENT

    def rows(self) -> list[Row]:
        """The networks that have a result."""
        path = RESULTS / self.path
        study = _study_of_runs(path, self.names or {}) if path.is_file() else read_studies([path])[0]
        rows = [row for row in compare_gates(study, self.top_percent) if row["test_loss_mean"] is not None]
        if self.names is None or path.is_file():
            return rows
        return [row | {"gate": self.names[row["gate"]]} for row in rows if row["gate"] in self.names]


@dataclass(frozen=True)
class Picture:
    """What one picture shows."""

    title: str
    sources: Sequence[Source]
    name: str = "frontier"

    def rows(self) -> list[Row]:
        """All networks, those of one name from the study with the lowest validation loss."""
        chosen: dict[str, Row] = {}
        for row in (row for source in self.sources for row in source.rows()):
            known = chosen.get(row["gate"])
            if known is None or row["validation_loss_mean"] < known["validation_loss_mean"]:
                chosen[row["gate"]] = row
        return add_dense_tests(list(chosen.values()))

    def sentences(self) -> str:
        """What the rules say."""
        decision = winner(self.rows())
        return f"{decision.recommendation} {decision.answer}".strip()


def _study_of_runs(file: Path, names: Names) -> Study:
    runs = raw.read(file)
    trials = []
    for prefix, gate in names.items():
        for index, result in enumerate(raw.of(runs, prefix)):
            known = {key: value for key, value in result.items() if key in ResultRecord.model_fields}
            trials.append(TrialRecord.of_run(gate, index, ResultRecord.model_validate(known)))
    gates = list(dict.fromkeys(trial.gate for trial in trials))
    count = max(trial.index for trial in trials) + 1
    return Study(
        path=file.parent,
        name=file.parent.name,
        kind="ablation",
        recipe=file.parent.name,
        gates=gates,
        trials_per_gate=count,
        experts=None,
        alpha=None,
        settings=[],
        space={gate: {} for gate in gates},
        trials=to_frame(trial.row(None) for trial in trials),
    )


WARM = {gate: f"{gate}, warm-up" for gate in ("hash", "topk", "comet")}
SEVEN = {
    "dense": "dense",
    "softmax": "softmax",
    "topk": "topk",
    "comet": "comet",
    "comet-info": "comet, information",
    "topk-warm": "topk, warm-up",
    "comet-warm": "comet, both",
}
NINE = {
    "dense": "dense",
    "mmoe": "softmax",
    "ple": "softmax@ple",
    "topk": "topk",
    "comet": "comet",
    "comet+": "comet+",
    "trees": TREES,
}


WIDTHS = {gate: gate for gate in FRONTIER}


def _under(folder: str, names: Names) -> dict[str, str]:
    return {f"{folder}/{name}": gate for name, gate in names.items()}


PAGES: dict[str, list[Picture]] = {
    "ablation": [
        Picture(
            "MovieLens-200k: six gates and the dense network",
            [Source("ablation"), Source("controls/dense", {"dense": "dense"})],
        )
    ],
    "bert": [Picture("SST-2: students of one teacher", [Source("bert")])],
    "books": [
        Picture(
            "Books: ten networks, and dense ones of a quarter and a half of the operations",
            [
                Source("books"),
                Source(
                    "books/runs.jsonl",
                    {
                        "k1/runs/dense": "dense-0.25x",
                        "k2/runs/dense": "dense-0.5x",
                        "one-expert/runs/comet": "comet, one tree",
                        "no-entropy/runs/comet": "comet, no entropy",
                    },
                ),
            ],
        )
    ],
    "controls": [
        Picture(
            "MovieLens-200k: gates after a warm-up and without, and the dense network",
            [
                Source("controls/dense", {"dense": "dense"}),
                Source("controls/warmup", WARM),
                Source("ablation", {gate: gate for gate in WARM}),
            ],
        )
    ],
    "digits": [Picture("Digits of 8 x 8 pixels: eight networks", [Source("digits")])],
    "jester": [Picture("Jester: ten networks", [Source("jester")])],
    "movielens": [
        Picture(
            "MovieLens: nine networks, each at the better of two learning rates",
            [
                Source("movielens/rate-1.5e-4"),
                Source("movielens/rate-4e-4"),
                Source("movielens/softmax-cost", {"dense": "dense-3x"}),
                Source("movielens/per-task-cost", {"dense-per-task": "dense-per-task"}),
            ],
        )
    ],
    "multidigits": [Picture("Two overlapping digits: five gates", [Source("multidigits")])],
    "multifashionmnist": [Picture("MultiFashionMNIST: eight networks", [Source("multifashionmnist")])],
    "multimnist": [Picture("MultiMNIST: eight networks", [Source("multimnist")])],
    "routing": [
        Picture(
            "MovieLens-200k: seven networks",
            [Source("routing/runs.jsonl", _under("movielens-200k", SEVEN))],
            "frontier-movielens",
        ),
        Picture(
            "MNIST with Fashion-MNIST: seven networks",
            [Source("routing/runs.jsonl", _under("mnist-fashion", SEVEN))],
            "frontier-images",
        ),
    ],
    "small-experts": [
        Picture(
            "Small experts: COMET and dense networks of several widths, new seeds",
            [
                Source("small-experts/new-seeds"),
                Source("small-experts/filters-2", {"switch": "switch"}),
                Source("small-experts/same-cost", {"dense": "dense-1.16x"}),
                Source("small-experts/filters-2-twice", {"dense": "dense-1.87x"}),
            ],
        )
    ],
    "tables": [
        Picture(
            "Census: six networks and boosted trees",
            [Source("tables/runs.jsonl", _under("census", NINE))],
            "frontier-census",
        ),
        Picture(
            "MovieLens-1M as a table: six networks and boosted trees",
            [Source("tables/runs.jsonl", _under("movielens", NINE))],
            "frontier-movielens",
        ),
    ],
    "tuning": [
        Picture(
            "MovieLens-100K: the best five trials of each network",
            [Source("tuning"), Source("tuning/control", {"dense": "dense-1.5x"}, top_percent=12.5)],
        )
    ],
    "verdicts": [
        Picture(
            "Four regimes: COMET and dense networks",
            [Source("verdicts/runs.jsonl", _under("0/regimes", {"comet": "comet"} | WIDTHS))],
            "frontier-regimes",
        ),
        Picture(
            "A formula per shop: hash routing and dense networks",
            [Source("verdicts/runs.jsonl", _under("0/keys", {"hash": "hash"} | WIDTHS))],
            "frontier-keys",
        ),
    ],
}


def drawn(page: str) -> Iterator[tuple[str, str]]:
    """The files of the pictures of ``page``, with their content."""
    for picture in PAGES[page]:
        for theme in THEMES:
            yield f"{picture.name}-{theme}.svg", draw_frontier(picture.rows(), picture.title, theme)


def described(page: str) -> str:
    """What the rules say of each picture of ``page``, as the page has it."""
    titles = [f"{picture.title}\n" if len(PAGES[page]) > 1 else "" for picture in PAGES[page]]
    texts = [fill(picture.sentences(), WIDTH, break_on_hyphens=False) for picture in PAGES[page]]
    return "\n".join(title + text for title, text in zip(titles, texts, strict=True))


def main(pages: Sequence[str]) -> None:
    """Write the pictures of ``pages``, and print what the rules say."""
    for page in pages:
        for name, text in drawn(page):
            (RESULTS / page / name).write_text(text, encoding="utf-8")
        print(described(page))


if __name__ == "__main__":
    main(sys.argv[1:] or list(PAGES))
