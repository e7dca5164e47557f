"""torch-rechub's MMOE on the rows of prepare.py, as its package trains it: python peer.py DATA FOLDER

Runs in an environment of its own with torch-rechub, pandas and pyarrow; writes FOLDER/peer.json.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch_rechub.basic.features import DenseFeature, SequenceFeature, SparseFeature
from torch_rechub.models.multi_task import MMOE
from torch_rechub.trainers import MTLTrainer
from torch_rechub.utils.data import DataGenerator

TARGETS = {"census": ["income_50k", "never_married"], "movielens": ["liked", "loved"]}
NUMBERS = ["age", "wage_per_hour", "capital_gains", "capital_losses", "stock_dividends", "num_emp"]
NUMBERS += ["weeks_worked", "year"]
LIST_LENGTH = 6


def encode(tables: list[pd.DataFrame], targets: list[str]) -> tuple[list[dict], list]:
    """Categories as codes (0 is unknown or padding) and standardised numbers, fitted on the train rows."""
    train = tables[0]
    inputs, features = [{} for _ in tables], []
    for name in train.columns.drop(targets):
        if isinstance(train[name].iloc[0], np.ndarray):
            values = sorted(set(np.concatenate(train[name].to_list())))
            columns = [pad(table[name], values) for table in tables]
            features.append(SequenceFeature(name, len(values) + 1, 8, pooling="mean", padding_idx=0))
        elif name in NUMBERS:
            mean, deviation = train[name].mean(), train[name].std()
            columns = [((table[name] - mean) / deviation).to_numpy(np.float32) for table in tables]
            features.append(DenseFeature(name))
        else:
            texts = [table[name].astype(object).fillna("missing").astype(str) for table in tables]
            values = sorted(texts[0].unique())
            code = {value: index + 1 for index, value in enumerate(values)}
            columns = [text.map(code).fillna(0).to_numpy(np.int64) for text in texts]
            features.append(SparseFeature(name, vocab_size=len(values) + 1, embed_dim=8))
        for given, column in zip(inputs, columns, strict=True):
            given[name] = column
    return inputs, features


def pad(lists: pd.Series, values: list[str]) -> np.ndarray:
    """(N, LIST_LENGTH) codes from 1 on, 0 where a list has ended."""
    code = {value: index + 1 for index, value in enumerate(values)}
    codes = np.zeros((len(lists), LIST_LENGTH), np.int64)
    for row, elements in enumerate(lists):
        found = [code.get(element, 0) for element in elements[:LIST_LENGTH]]
        codes[row, : len(found)] = found
    return codes


def main() -> None:
    """Train, predict, and write AUCs and seconds per epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if (options.folder / "peer.json").exists():
        return
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    tables = [pd.read_parquet(options.data / f"{name}.parquet") for name in ("train", "validation", "test")]
    names = TARGETS[options.data.name]
    inputs, features = encode(tables, names)
    targets = [table[names].to_numpy(np.float32) for table in tables]
    loaders = DataGenerator(inputs[0], targets[0]).generate_dataloader(
        x_val=inputs[1],
        y_val=targets[1],
        x_test=inputs[2],
        y_test=targets[2],
        batch_size=options.batch_size,
        num_workers=0,
    )
    tasks = ["classification"] * 2
    towers = [{"dims": [8]}] * 2
    model = MMOE(features, tasks, n_expert=8, expert_params={"dims": [32]}, tower_params_list=towers)
    options.folder.mkdir(parents=True, exist_ok=True)
    trainer = MTLTrainer(
        model,
        task_types=tasks,
        optimizer_params={"lr": 1e-3},
        n_epoch=options.epochs,
        earlystop_patience=5,
        model_path=str(options.folder),
    )
    epochs = []
    train_one_epoch = trainer.train_one_epoch

    def timed(loader):
        started = time.perf_counter()
        losses = train_one_epoch(loader)
        epochs.append(time.perf_counter() - started)
        return losses

    trainer.train_one_epoch = timed
    trainer.fit(loaders[0], loaders[1])
    auc = dict(zip(names, trainer.evaluate(trainer.model, loaders[2]), strict=True))
    record = {
        "auc": auc,
        "epoch_seconds": epochs,
        "threads": options.threads,
        "batch_size": options.batch_size,
    }
    (options.folder / "peer.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
