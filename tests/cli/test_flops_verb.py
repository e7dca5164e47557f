"""``comet-moe flops``: operations that torch counts equal those that a run reports."""

import json
import math

import pytest
from command import refusal, succeed

from comet_moe.gates.registry import DENSE_KINDS, gate_kinds

SIZES = [f"data.options.{split}_size=300" for split in ("train", "validation", "test")]
SETS = [part for setting in SIZES for part in ("--set", setting)]


@pytest.mark.parametrize("gate", ["softmax", "topk", "dselect", "comet+"])
def test_the_count_of_a_run_equals_its_result(tmp_path, gate):
    out = tmp_path / "run"
    succeed(
        "train", "multidigits", *SETS, "--set", f"gate={gate}", "--set", "training.epochs=1", "--out", out
    )
    result = json.loads((out / "result.json").read_text())
    rows = {row["pass"]: row for row in succeed("flops", out, "--json").json["rows"]}
    # One is counted by torch, the other computed by closed form.
    assert math.isclose(rows["inference"]["total_flops"], result["flops_per_sample"], rel_tol=1e-12)
    assert rows["inference"]["experts_per_sample"] == pytest.approx(result["experts_per_sample"], rel=1e-12)
    parts = sum(rows["inference"][f"{part}_flops"] for part in ("gate", "experts", "shared"))
    assert math.isclose(parts, rows["inference"]["total_flops"], rel_tol=1e-12)


def test_gates_of_a_recipe_cost_what_the_appendix_of_the_paper_says():
    found = succeed("flops", "multidigits", *SETS, "--json").json["rows"]
    rows = {(row["gate"], row["pass"]): row for row in found}
    assert {gate for gate, _ in rows} == {kind for kind in gate_kinds() if kind not in ("hash", "hash-k")}
    n, k, tasks, p, depth = 8, 2, 2, 144, 3
    assert rows["topk", "inference"]["gate_flops"] == tasks * 2 * p * n
    assert rows["comet", "training"]["gate_flops"] == tasks * 2 * p * k * (2 * n - 1)
    # A hard path: one split per level and the leaf. HARD_GAMMA leaves a few splits soft.
    assert rows["comet", "inference"]["gate_flops"] == pytest.approx(
        tasks * 2 * p * k * (depth + 1), rel=0.02
    )
    assert rows["softmax", "inference"]["experts_per_sample"] == n
    assert rows["topk", "inference"]["experts_per_sample"] == k
    assert rows["comet", "inference"]["experts_per_sample"] <= k + 0.02
    mixtures = [row for row in found if row["gate"] not in DENSE_KINDS]
    assert len({row["shared_flops"] for row in mixtures}) == 1


def test_mistakes_are_named(tmp_path):
    assert "there is no recipe 'nonesuch'" in refusal("flops", "nonesuch")
    assert "a hash gate needs keys" in refusal("flops", "multidigits", *SETS, "--gates", "hash")
    (tmp_path / "config.yaml").write_text("recipe: multidigits")
    assert "--gates and --set are for recipes" in refusal("flops", tmp_path, "--gates", "topk")
