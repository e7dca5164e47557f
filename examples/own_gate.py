"""A gate of your own, by its name: in recipes, studies, estimators and models of transformers.

    python examples/own_gate.py [--quick]
    comet-moe --import examples/own_gate.py train multidigits --set gate=nearest

The gate sends a row to the experts whose centres are nearest: g(x) = softmax over the k smallest distances of
-sharpness · |x - c_i|². A gate is a subclass of ``Gate`` that sets ``num_experts`` and returns a ``Routing``.
``register_gate`` gives it a name; the arguments of its constructor are its settings.
"""

import argparse
import json
import subprocess
import sys
import tempfile

import torch
from torch import Tensor, nn

from comet_moe import Routing
from comet_moe.gates import Gate, register_gate


@register_gate("nearest")
class NearestCentreGate(Gate):
    """The k experts whose centres are nearest to the row, weighted by a softmax of -distance².

    Args:
        in_features: p.
        num_experts: n.
        k: number of experts per sample.
        sharpness: factor on the distances.
    """

    def __init__(self, in_features: int, num_experts: int, k: int = 2, sharpness: float = 1.0):
        super().__init__()
        self.in_features, self.num_experts, self.k = in_features, num_experts, k
        self.sharpness = sharpness
        self.centres = nn.Parameter(torch.randn(num_experts, in_features))

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """Route rows x (B, ..., p)."""
        logits = -self.sharpness * (x.unsqueeze(-2) - self.centres).square().sum(-1)  # (B, ..., n)
        best, chosen = logits.topk(min(self.k, self.num_experts), dim=-1)
        weights = torch.zeros_like(logits).scatter(-1, chosen, best.softmax(-1))
        return Routing(weights=weights, logits=logits)


def comet_moe(*arguments: str) -> dict:
    """Run ``comet-moe --import own_gate.py ... --json``; its result."""
    command = [sys.executable, "-m", "comet_moe", "--import", __file__, *arguments, "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main() -> None:
    """Check the gate, then use it in four ways."""
    # Here, not above: the command line imports this file for the gate alone.
    from sklearn.datasets import load_wine
    from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

    from comet_moe.hf import gate_factory, replace_routers
    from comet_moe.sklearn import MoEClassifier
    from comet_moe.testing import check_gate

    parser = argparse.ArgumentParser(description="A gate of your own.")
    parser.add_argument("--quick", action="store_true", help="fewer epochs, less than a minute")
    epochs = 2 if parser.parse_args().quick else 30

    torch.manual_seed(0)
    check_gate(NearestCentreGate)
    print("check_gate: the gate keeps every law")

    X, y = load_wine(return_X_y=True, as_frame=True)
    settings = {"sharpness": 0.1}
    classifier = MoEClassifier("nearest", epochs=epochs, gate_settings=settings, random_state=0).fit(X, y)
    print(f"MoEClassifier: accuracy {classifier.score(X, y):.2f}")

    with tempfile.TemporaryDirectory() as folder:
        config = MixtralConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
        )
        model = MixtralForCausalLM(config)
        replace_routers(model, gate_factory("nearest", **settings))
        model.save_pretrained(f"{folder}/model")
        saved = AutoModelForCausalLM.from_pretrained(f"{folder}/model")
        tokens = torch.arange(10).unsqueeze(0)
        same = torch.equal(saved.eval()(tokens).logits, model.eval()(tokens).logits)
        print(f"replace_routers: the saved model computes the same: {same}")

        table = f"{folder}/wine.csv"
        X.assign(kind=y).to_csv(table, index=False)
        quick = ["--set", f"training.epochs={epochs}"]
        data = ["--set", f"data.path={table}", "--set", "data.options.targets={kind: {}}"]
        run = comet_moe("train", "table", "--set", "gate=nearest+", *data, *quick, "--out", f"{folder}/run")
        print(f"comet-moe train: {run['gate']} has a test loss of {run['test_loss']:.3f}")

        options = ["--gates", "dense,nearest", "--seeds", "1", "--no-trees", "--workers", "1", *quick]
        study = comet_moe("compare", table, "--targets", "kind", *options, "--out", f"{folder}/study")
        losses = {row["gate"]: round(row["test_loss_mean"], 3) for row in study["rows"]}
        print(f"comet-moe compare: test losses {losses}")


if __name__ == "__main__":
    main()
