"""Which experts COMET gives each regime: python experts.py [FOLDER]

With the folder of run.py, experts.jsonl is written anew: mean weights over the test rows of each regime. The
picture, experts-light.svg and experts-dark.svg, is drawn from experts.jsonl.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[2] / "drawings"))
from svg import THEMES, Drawing

HERE = Path(__file__).parent
REGIMES = ["neither", "up", "left", "left and up"]
COLOURS = {"light": "#2f6fb0", "dark": "#6fb1f2"}
SIDE, LEFT, TOP = 34, 130, 64


def measure(run_folder: Path) -> dict:
    """The mean weights (regimes, experts) of a run on its test rows, and the information between the two."""
    from comet_moe.experiments.training.batches import evaluation_batches, load_dataset
    from comet_moe.experiments.training.recipe import load_run

    run = load_run(run_folder)
    test = load_dataset(run.config).test
    names = [feature["name"] for feature in run.meta["table"]["features"] if feature["kind"] == "categorical"]
    labels = [f["categories"] for f in run.meta["table"]["features"] if f["kind"] == "categorical"]
    with torch.no_grad():
        weights = torch.cat(
            [run.model(batch.features)[1][0].weights for batch in evaluation_batches(test, 4096)]
        )
    is_yes = {name: [own.index("yes") + 3] for name, own in zip(names, labels, strict=True)}
    codes = np.asarray(test.features["categorical"])
    left, up = (np.isin(codes[:, names.index(name)], is_yes[name]) for name in ("left", "up"))
    regime = 2 * left + up
    shares = np.stack([weights.numpy()[regime == index].mean(0) for index in range(4)])
    joint = shares * np.bincount(regime, minlength=4)[:, None] / len(regime)
    known = joint > 0
    independent = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    information = float((joint[known] * np.log(joint[known] / independent[known])).sum())
    return {"weights": shares.astype(float).round(3).tolist(), "information": round(information, 2)}


def draw(found: list[dict], theme: str) -> str:
    """Rows are regimes, columns are experts; the darker, the larger the mean weight."""
    experts = len(found[0]["weights"][0])
    block = TOP + len(REGIMES) * SIDE
    title = "The weights of COMET's experts in each of four regimes"
    drawing = Drawing(LEFT + experts * SIDE + 20, block * len(found) + 10, theme, title)
    for index, seed in enumerate(found):
        top = index * block + TOP
        words = f"seed {index}: experts tell {seed['information']:.2f} of 1.39 nats about the regime"
        drawing.text(14, top - 30, words, 14, anchor="start")
        for column in range(experts):
            drawing.text(LEFT + (column + 0.5) * SIDE, top - 8, str(column), 13, "faint")
        for row, (regime, weights) in enumerate(zip(REGIMES, seed["weights"], strict=True)):
            drawing.text(LEFT - 10, top + (row + 0.62) * SIDE, regime, 14, anchor="end")
            for column, weight in enumerate(weights):
                drawing.box(LEFT + column * SIDE, top + row * SIDE, SIDE, COLOURS[theme], weight)
    return drawing.render()


if __name__ == "__main__":
    file = HERE / "experts.jsonl"
    if len(sys.argv) > 1:
        runs = sorted((Path(sys.argv[1]) / "0" / "regimes").glob("comet-*"))
        file.write_text("".join(json.dumps(measure(run)) + "\n" for run in runs))
    found = [json.loads(line) for line in file.read_text().splitlines()]
    for theme in THEMES:
        (HERE / f"experts-{theme}.svg").write_text(draw(found, theme), encoding="utf-8")
    for index, seed in enumerate(found):
        print(f"seed {index}: the experts tell {seed['information']:.2f} of 1.39 nats about the regime")
