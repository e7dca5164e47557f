"""Tokens per second of the best student of each gate against their teacher, in one interleaved run.

python docs/results/bert/speed.py FOLDER TASK, with the folder of run.sh; one thread, nothing else running.
"""

import sys
from pathlib import Path

import torch
from benchmarks.timing import measure_ratios

from comet_moe.experiments.bert.run import BertFolder, load_tokenizer
from comet_moe.experiments.bert.tokens import evaluation_batches, load_task_data

ROWS = 32
BATCHES = 8
SECONDS = 30


def best_students(study: Path) -> dict[str, BertFolder]:
    """The runs whose models the study kept, one per gate."""
    runs = sorted(path.parent.parent for path in study.glob("runs/*/model/config.json"))
    return {run.name.rsplit("-", 1)[0]: BertFolder(run) for run in runs}


def main(folder: Path, task: str) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    teacher, students = BertFolder(folder / f"{task}-teacher"), best_students(folder / task)
    models = [run.trained_model() for run in (*students.values(), teacher)]
    dev = load_task_data(teacher.config(), load_tokenizer(str(teacher.model_folder))).splits["dev"]
    every = list(evaluation_batches(dev, ROWS))
    batches = [dev.batch(rows) for rows in every[:: max(1, len(every) // BATCHES)]]  # short and long ones
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)

    def forward(model: torch.nn.Module) -> None:
        with torch.no_grad():
            for batch in batches:
                model(**batch)

    found = measure_ratios([lambda model=model: forward(model) for model in models], SECONDS)  # type: ignore[misc]
    print("| model | tokens/s | time / teacher | quartiles |\n|---|---|---|---|")
    print(f"| teacher | {tokens / found[0].reference_seconds:,.0f} | 1 | |")
    for gate, ratio in zip(students, found, strict=False):
        speed = f"{tokens / ratio.seconds:,.0f}"
        print(f"| {gate} | {speed} | {ratio.value:.2f} | {ratio.low:.2f}-{ratio.high:.2f} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
