"""What notebooks show of mixtures, monitors and audits, and the notebook of examples."""

import ast
import json
from html.parser import HTMLParser
from pathlib import Path

import torch

import comet_moe
from comet_moe import MoE, MultiGateMoE, RoutingMonitor
from comet_moe.experts import DenseExperts
from comet_moe.gates import TopKGate
from comet_moe.notebook import bars, table, verdict_badge

NOTEBOOK = Path(__file__).parent.parent / "examples" / "quickstart.ipynb"


class Elements(HTMLParser):
    """The elements and the text of a piece of HTML; every element must be closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.names, self.text = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.names.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def run_notebook():
    """What each cell of code shows, as HTML where it has it."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names, shown = {}, []
    for cell in cells:
        if cell["cell_type"] == "code":
            body = ast.parse("".join(cell["source"])).body
            last = body.pop() if isinstance(body[-1], ast.Expr) else None
            exec(compile(ast.Module(body, []), str(NOTEBOOK), "exec"), names)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)
                shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else value)
    return shown


def test_the_notebook_runs_and_shows_mixture_verdict_and_audit(capsys):
    mixture, verdict, audit = (text for text in run_notebook() if text is not None)
    assert "CometGate" in mixture
    assert "routes" in Elements(verdict).text
    assert "Mixtures" in Elements(audit).text
    printed = capsys.readouterr().out
    losses = [float(line.rsplit(" ", 1)[1]) for line in printed.splitlines() if line.startswith("dense")]
    assert len(losses) == 3


def test_the_notebook_is_committed_without_outputs():
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        assert not cell.get("outputs")


def test_a_mixture_shows_its_parts_and_their_parameters():
    moe = MultiGateMoE(
        experts=DenseExperts(4, 8, 2), gates=[TopKGate(8, 4, k=2)] * 2, shared=torch.nn.Linear(8, 2)
    )
    text = Elements(moe._repr_html_()).text
    assert "MultiGateMoE of 4 experts, execution auto" in text
    assert [part for part in text if part in ("experts", "gate 0", "gate 1", "shared")] == [
        "experts",
        "gate 0",
        "gate 1",
        "shared",
    ]
    assert text[text.index("shared") + 2] == "18"


def test_a_monitor_shows_the_verdict_of_each_gate_and_its_loads():
    model = MoE(experts=DenseExperts(4, 8, 2), gate=TopKGate(8, 4, k=2))
    with RoutingMonitor(model) as monitor:
        assert "<td" not in monitor._repr_html_()  # before a batch
        model(torch.randn(64, 8))
    elements = Elements(monitor._repr_html_())
    assert "routes" in elements.text
    assert elements.names.count("rect") == 4


def test_an_audit_shows_its_findings_before_its_mixtures():
    model = MoE(experts=DenseExperts(4, 8, 1), gate=TopKGate(8, 4, k=2), return_routing=False)
    with torch.no_grad():
        model.gates[0].weight.zero_()
        model.gates[0].bias.copy_(torch.tensor([9.0, 0.0, 0.0, 0.0]))
    batch = (torch.randn(64, 8), torch.zeros(64, 1))

    def row_losses(model, batch):
        return (model(batch[0]) - batch[1]).square().mean(1)

    report = comet_moe.audit(model, [batch], row_losses)
    elements = Elements(report._repr_html_())
    assert report.findings
    for finding in report.findings:
        assert finding.message in elements.text
    assert elements.text.index(report.findings[0].message) < elements.text.index("Mixtures")


def test_cells_are_html_and_captions_are_text():
    elements = Elements(table("a < b", ["<i>"], [["<b>1</b>"]]))
    assert elements.text == ["a < b", "<i>", "1"]
    assert elements.names.count("i") == 0
    assert Elements(verdict_badge("<static>")).text == ["<static>"]


def test_bars_need_a_load_and_not_too_many_experts():
    assert bars([]) == bars([0.0, 0.0]) == bars([1.0] * 65) == ""
    assert Elements(bars([0.5, 1.0])).names == ["svg", "rect", "rect"]
