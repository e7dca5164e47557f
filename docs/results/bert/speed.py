"""The second table of docs/results/bert: tokens per second, sparse against dense, in one interleaved run.

python docs/results/bert/speed.py FOLDER, with the folders that run.sh made; one thread, nothing else running.
"""

import sys
from pathlib import Path

import torch

from comet_moe.bench.timing import ratios
from comet_moe.bert.data import evaluation_batches, load_task_data
from comet_moe.bert.run import BertFolder, load_model, load_tokenizer

ROWS = 32
BATCHES = 8
SECONDS = 30


def main(folder: Path) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("| task | model | tokens/s | time / dense | quartiles |")
    print("|---|---|---|---|---|")
    for task in ("rte", "cola", "mrpc", "sst2"):
        names = ["hash-0", "topk-0", "comet-0", "comet+-0", "teacher"]
        runs = [BertFolder(folder / f"{task}-{name}") for name in names]
        models = [load_model(str(run.finished_model())) for run in runs]
        data = load_task_data(runs[-1].config(), load_tokenizer(str(runs[-1].model_folder)))
        dev = data.splits["dev"]
        every = list(evaluation_batches(dev, ROWS))
        batches = [dev.batch(rows) for rows in every[:: max(1, len(every) // BATCHES)]]  # short and long ones
        tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)

        def forward(model: torch.nn.Module, batches: list = batches) -> None:  # type: ignore[type-arg]
            with torch.no_grad():
                for batch in batches:
                    model(**batch)

        found = ratios([lambda model=model: forward(model) for model in models], SECONDS)  # type: ignore[misc]
        print(f"| {task} | dense | {tokens / found[0].reference_seconds:,.0f} | 1 | |")
        for name, ratio in zip(names, found, strict=False):
            speed = f"{tokens / ratio.seconds:,.0f}"
            print(
                f"| {task} | {name[:-2]} | {speed} | {ratio.value:.2f} | {ratio.low:.2f}-{ratio.high:.2f} |"
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
