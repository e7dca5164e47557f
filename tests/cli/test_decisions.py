"""Terminal, JSON, page and the choice of a model agree on studies of different outcome."""

import html
import re
import sys
from pathlib import Path

import pytest
from command import comet_moe, succeed

from comet_moe.experiments.report import write_report
from comet_moe.experiments.studies.reading import read_studies
from comet_moe.experiments.studies.winner import decide

sys.path.append(str(Path(__file__).parents[1] / "experiments" / "studies"))
from made_studies import trial, write_study

# NAME=(validation loss, test loss, operations); the loss of boosted trees has no operations.
DENSE = {"dense-0.5x": (6.0, 6.0, 100.0), "dense": (5.0, 5.0, 200.0), "dense-2x": (5.1, 5.1, 400.0)}
OUTCOMES = {
    "a mixture pays": (DENSE | {"topk": (4.0, 4.0, 200.0)}, "topk"),
    "a mixture is level": (DENSE | {"topk": (4.95, 4.95, 200.0)}, "dense"),
    "a mixture is worse": (DENSE | {"comet": (7.0, 7.0, 200.0)}, "dense"),
    "lucky on validation": (DENSE | {"topk": (4.0, 5.2, 200.0), "comet": (4.5, 3.0, 200.0)}, "dense"),
    "the widest": (DENSE | {"dense-2x": (3.0, 3.0, 400.0), "topk": (4.0, 4.0, 200.0)}, "dense-2x"),
    "the narrowest": (DENSE | {"dense-0.5x": (4.0, 4.0, 100.0), "comet+": (4.5, 4.5, 200.0)}, "dense-0.5x"),
    "one expert per task": (
        DENSE | {"dense-per-task": (4.0, 4.0, 200.0), "topk": (4.1, 4.1, 200.0)},
        "dense-per-task",
    ),
    "too expensive to compare": (DENSE | {"softmax": (4.0, 4.0, 900.0)}, "softmax"),
    "a costly one and one that pays": (
        DENSE | {"softmax": (3.0, 3.0, 900.0), "topk": (4.0, 4.0, 200.0)},
        "softmax",
    ),
    "no dense network": ({"topk": (4.0, 4.0, 200.0), "comet": (4.1, 4.1, 200.0)}, "topk"),
    "trees": (DENSE | {"topk": (4.9, 4.9, 200.0), "trees": (2.0, 2.0, None)}, "trees"),
    "no operations": ({"dense": (5.0, 5.0, None), "topk": (4.9, 4.9, None)}, "dense"),
    "one seed": (DENSE | {"topk": (4.0, 4.0, 300.0)}, "dense"),
    "not converged": (DENSE | {"topk": (4.0, 4.0, 200.0)}, "dense"),
}


def study_of(folder, outcome):
    networks, _ = OUTCOMES[outcome]
    lines = [
        trial(
            name,
            seed,
            validation + change,
            test + change,
            flops_per_sample=operations,
            converged=outcome != "not converged" or name != "topk",
        )
        for name, (validation, test, operations) in networks.items()
        if name != "trees"
        for seed, change in enumerate((-0.1, 0.0, 0.1)[: 1 if outcome == "one seed" else 3])
    ]
    write_study(folder, lines, kind="ablation")
    for line in lines:
        (folder / line["run"]).mkdir(parents=True)
        (folder / line["run"] / "model.safetensors").touch()
    if "trees" in networks:
        validation, test, _ = networks["trees"]
        record = (
            f'{{"status": "complete", "gate": "trees", "validation_loss": {validation}, "test_loss": {test}}}'
        )
        (folder / "trees.json").write_text(record)
        (folder / "trees.skops").touch()
    return folder


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_all_outputs_have_one_decision(tmp_path, outcome):
    _, winner = OUTCOMES[outcome]
    folder = study_of(tmp_path / "study", outcome)
    (decision,) = succeed("table", folder, "--json").json["decisions"]
    assert decision["winner"] == winner
    printed = succeed("table", folder).out.replace("\\", "")  # escapes of Markdown
    source = write_report([folder], tmp_path / "page.html").read_text(encoding="utf-8")
    page = html.unescape(" ".join(re.sub(r"<[^>]+>", " ", source.partition("<script")[0]).split()))
    for sentence in (decision["recommendation"], decision["answer"]):
        assert sentence in printed
        assert sentence in page
    # In the table of losses, and in that of what stands behind them.
    marked = re.findall(r'<tr class="best">\s*<th scope="row" data-value="(.+?)">', source)
    assert marked == [winner, winner]
    # The weights are empty, so that prediction ends after the choice.
    done = comet_moe("predict", folder, tmp_path / "rows.csv", "-o", tmp_path / "out.csv")
    assert done.code == 2
    chosen = re.search(r"^using (.+?): (.+)", done.err)
    assert Path(chosen[1]).name == ("trees.skops" if winner == "trees" else f"{winner}-000")
    assert "recommended" in chosen[2]


def test_the_studies_have_different_outcomes(tmp_path):
    studies = read_studies([study_of(tmp_path / name, name) for name in OUTCOMES])
    decisions = [decide(study) for study in studies]
    # Without the numbers: which network, why, and whether a mixture pays.
    sentences = {re.sub(r"\d+\.\d+", "", found.recommendation + found.answer) for found in decisions}
    assert len(sentences) == len(OUTCOMES) >= 10
    assert {found.pays for found in decisions} == {True, False, None}
