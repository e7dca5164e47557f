"""The code of docs/many-experts.md, with fewer experts and steps."""

from pages import ROOT, blocks

PAGE = "docs/many-experts.md"


def test_the_tutorial_trains_a_layer_of_small_experts(capsys):
    code = "\n".join(blocks(PAGE, "python"))
    sizes = "EXPERTS, STEPS = 2**20, 150"
    assert sizes in code
    names = {}
    exec(compile(code.replace(sizes, "EXPERTS, STEPS = 2**12, 30"), str(ROOT / PAGE), "exec"), names)
    assert names["losses"][-1] < names["losses"][0]
    assert names["experts"].inner.grad is None  # the steps are complete
    assert "experts per row" in capsys.readouterr().out
