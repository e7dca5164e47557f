"""The rows of tasks: every published format is read, wrong files are named, random choices repeat."""

import json

import numpy as np
import pandas as pd
import pytest

from comet_moe.exceptions import DataError, RecipeError
from comet_moe.experiments.bert.run import load_tokenizer
from comet_moe.experiments.bert.tasks import TASKS, find_task, read_texts
from comet_moe.experiments.bert.tokens import encode, evaluation_batches, training_batches
from tiny_bert import save_checkpoint, write_rte, write_squad

# A line of each official tsv file, and what it means.
PUBLISHED = {
    "cola": ("CoLA", None, "gj04\t1\t\tthe cat sat .", ("the cat sat .",), 1),
    "sst2": ("SST-2", "sentence\tlabel", "a big cat \t0", ("a big cat",), 0),
    "mrpc": (
        "MRPC",
        "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        '1\t7\t8\tthe "cat sat\tthe cat',
        ('the "cat sat', "the cat"),
        1,
    ),
    "qqp": (
        "QQP",
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        "1\t2\t3\tis it ?\twas it ?\t0",
        ("is it ?", "was it ?"),
        0,
    ),
    "mnli": (
        "MNLI",
        "index\tsentence1\tsentence2\tlabel1\tgold_label",
        "0\tthe cat\ta dog\tneutral\tcontradiction",
        ("the cat", "a dog"),
        2,
    ),
    "qnli": (
        "QNLI",
        "index\tquestion\tsentence\tlabel",
        "0\twas it ?\tit was .\tnot_entailment",
        ("was it ?", "it was ."),
        1,
    ),
    "rte": (
        "RTE",
        "index\tsentence1\tsentence2\tlabel",
        "0\tthe cat\ta cat\tentailment",
        ("the cat", "a cat"),
        0,
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(str(save_checkpoint(tmp_path_factory.mktemp("tiny"))))


def write_published(root, name):
    folder, header, line, texts, label = PUBLISHED[name]
    (root / folder).mkdir(parents=True, exist_ok=True)
    dev = ["dev_matched.tsv", "dev_mismatched.tsv"] if name == "mnli" else ["dev.tsv"]
    for file in ("train.tsv", *dev):
        (root / folder / file).write_text("\n".join([*([header] if header else []), line, line]) + "\n")
    return texts, label


@pytest.mark.parametrize("name", PUBLISHED)
def test_official_files_are_read_from_the_root_of_glue_and_from_their_folder(tmp_path, name):
    for other in PUBLISHED:
        texts, label = write_published(tmp_path, other)
    texts, label = write_published(tmp_path, name)
    for source in (tmp_path, tmp_path / PUBLISHED[name][0]):
        read = read_texts(TASKS[name], source)
        assert {"train", "dev"} <= set(read.splits)
        assert ("mismatched" in read.splits) == (name == "mnli")
        for rows in read.splits.values():
            assert len(rows) == 2
            row = rows.iloc[1]
            assert tuple(row[column] for column in "ab" if column in rows) == texts
            assert row["label"] == label
        assert read.notes == []


def test_squads_json_is_read(tmp_path):
    read = read_texts(TASKS["squad2"], write_squad(tmp_path))
    train = read.splits["train"]
    assert len(train) == 25
    assert train["answer_texts"].map(len).tolist() == [1, 1, 0, 1, 1] * 5
    row = train.iloc[0]
    start, text = row["answer_starts"][0], row["answer_texts"][0]
    assert row["context"][start : start + len(text)] == text


def parquet(folder, name, rows, **columns):
    folder.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame({key: [value] * rows for key, value in columns.items()})
    table["label"] = np.arange(rows) % 2
    table.to_parquet(folder / name)


def test_parquet_files_are_read_and_a_single_file_is_split_by_a_seed(tmp_path):
    parquet(tmp_path, "qqp_subset.parquet", 100, question1="a", question2="b")
    table = pd.read_parquet(tmp_path / "qqp_subset.parquet")
    table["question1"] = [f"q{row}" for row in range(100)]
    table.to_parquet(tmp_path / "qqp_subset.parquet")
    first, again, other = (read_texts(TASKS["qqp"], tmp_path, seed) for seed in (0, 0, 1))
    assert (len(first.splits["train"]), len(first.splits["dev"])) == (90, 10)
    assert set(first.splits["train"]["a"]).isdisjoint(first.splits["dev"]["a"])
    assert first.notes == [
        "train and dev are both from qqp_subset.parquet: 10 of 100 rows are dev, chosen with seed 0"
    ]
    assert first.splits["dev"].equals(again.splits["dev"])
    assert not first.splits["dev"].equals(other.splits["dev"])


def test_the_dev_rows_of_mrpc_are_chosen_from_msrs_train_rows(tmp_path):
    parquet(tmp_path, "mrpc_msr_train.parquet", 4076, sentence1="a", sentence2="b")
    parquet(tmp_path, "mrpc_msr_test.parquet", 5, sentence1="a", sentence2="b")
    read = read_texts(TASKS["mrpc"], tmp_path)
    assert {name: len(rows) for name, rows in read.splits.items()} == {"train": 3668, "dev": 408, "test": 5}


def test_questions_are_split_by_article(tmp_path):
    rows = [
        {
            "title": f"article {number % 10}",
            "context": "the cat",
            "question": f"{number} ?",
            "answer_texts": ["cat"],
            "answer_starts": [4],
            "is_impossible": False,
        }
        for number in range(60)
    ]
    pd.DataFrame(rows).to_parquet(tmp_path / "dev_subset.parquet")
    splits = read_texts(TASKS["squad2"], tmp_path).splits
    assert len(splits["dev"]) == 6
    assert set(splits["dev"]["title"]).isdisjoint(splits["train"]["title"])


def test_the_number_of_train_rows_can_be_given(tmp_path):
    read = read_texts(TASKS["rte"], write_rte(tmp_path), train_rows=20)
    assert len(read.splits["train"]) == 20
    assert len(read.splits["dev"]) == 16
    assert read.notes == ["20 of 48 train rows, chosen with seed 0"]


def test_lines_with_missing_fields_are_left_out_and_counted(tmp_path):
    write_published(tmp_path, "qqp")
    with (tmp_path / "QQP" / "train.tsv").open("a") as file:
        file.write("4\t5\tbroken\n")
    read = read_texts(TASKS["qqp"], tmp_path)
    assert len(read.splits["train"]) == 2
    assert read.notes == ["train.tsv: 1 lines with missing fields are left out"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "sentence\tlbl\na\t1\n",
            r"train.tsv has no column label; did you mean lbl\? Its columns are sentence, lbl.",
        ),
        ("sentence\tlabel\na\t7\n", r"has the label '7' in data row 1; it must be one of negative, positive"),
        ("sentence\tlabel\n", r"train.tsv has no rows"),
    ],
)
def test_a_wrong_table_is_named(tmp_path, text, says):
    write_published(tmp_path, "sst2")
    (tmp_path / "SST-2" / "train.tsv").write_text(text)
    with pytest.raises(DataError, match=says):
        read_texts(TASKS["sst2"], tmp_path)


def test_wrong_questions_are_named(tmp_path):
    write_squad(tmp_path)
    path = tmp_path / "train-v2.0.json"
    published = json.loads(path.read_text())
    published["data"][0]["paragraphs"][0]["qas"][0]["answers"][0]["answer_start"] += 1
    path.write_text(json.dumps(published))
    with pytest.raises(DataError, match=r"has the answer .* in data row 1 at character"):
        read_texts(TASKS["squad2"], tmp_path)
    path.write_text(json.dumps({"data": [{"title": "a"}]}))
    with pytest.raises(DataError, match="is not a readable SQuAD file"):
        read_texts(TASKS["squad2"], tmp_path)


def test_missing_files_and_unknown_tasks_are_named(tmp_path):
    with pytest.raises(
        DataError, match=r"has no rte_train.parquet or RTE/train.tsv or train.tsv; give the folder"
    ):
        read_texts(TASKS["rte"], tmp_path)
    with pytest.raises(RecipeError, match="there is no task 'wnli': choose one of cola, sst2"):
        find_task("wnli")


def test_a_batch_is_padded_to_its_longest_row(tmp_path, tokenizer):
    rows = read_texts(TASKS["rte"], write_rte(tmp_path)).splits["train"]
    features = encode(TASKS["rte"], rows, tokenizer, max_length=12, stride=0)
    assert features.lengths.max() == 12
    chosen = np.array([3, 0, 5])
    batch = features.batch(chosen)
    assert batch["input_ids"].shape == (3, features.lengths[chosen].max())
    for index, row in enumerate(chosen):
        length = features.lengths[row]
        assert batch["input_ids"][index, :length].tolist() == features.ids[row].tolist()
        assert batch["attention_mask"][index].tolist()[:length] == [1] * length
        assert not batch["attention_mask"][index, length:].any()
    assert batch["labels"].tolist() == rows["label"].iloc[chosen].tolist()
    assert batch["token_type_ids"].max() == 1


def test_windows_cover_the_context_and_find_the_answer(tmp_path, tokenizer):
    rows = read_texts(TASKS["squad2"], write_squad(tmp_path)).splits["train"]
    features = encode(TASKS["squad2"], rows, tokenizer, max_length=24, stride=6)
    assert len(features) > len(rows)
    assert features.lengths.max() <= 24
    covered, found = {}, set()
    for window, example in enumerate(features.example):
        offsets = features.offsets[window]
        covered.setdefault(int(example), set()).update(offsets[offsets[:, 0] >= 0][:, 0].tolist())
        start, end = (features.targets[name][window] for name in ("start_positions", "end_positions"))
        if start:
            row = rows.iloc[example]
            assert row["context"][offsets[start, 0] : offsets[end, 1]] == row["answer_texts"][0]
            found.add(int(example))
    assert found == {number for number, texts in enumerate(rows["answer_texts"]) if texts}
    for example, starts in covered.items():
        words = rows["context"].iloc[example].split()
        assert len(starts) == len(words)


def test_a_long_question_is_cut(tmp_path, tokenizer):
    rows = read_texts(TASKS["squad2"], write_squad(tmp_path)).splits["train"].head(1)
    rows = rows.assign(question="cat " * 200)
    features = encode(TASKS["squad2"], rows, tokenizer, max_length=90, stride=6)
    cat = tokenizer.convert_tokens_to_ids("cat")
    assert (features.ids[0][: 64 + 1] == cat).sum() == 64


@pytest.mark.parametrize("grouped", [True, False])
def test_an_epoch_has_every_row_once_and_repeats_by_seed_and_epoch(tmp_path, tokenizer, grouped):
    rows = read_texts(TASKS["rte"], write_rte(tmp_path)).splits["train"]
    features = encode(TASKS["rte"], rows, tokenizer, max_length=32, stride=0)
    batches = training_batches(features, 5, seed=1, epoch=2, group_by_length=grouped)
    assert sorted(np.concatenate(batches)) == list(range(48))
    again = training_batches(features, 5, seed=1, epoch=2, group_by_length=grouped)
    assert all((a == b).all() for a, b in zip(batches, again, strict=True))
    other = training_batches(features, 5, seed=1, epoch=3, group_by_length=grouped)
    assert any(len(a) != len(b) or (a != b).any() for a, b in zip(batches, other, strict=True))
    assert sorted(np.concatenate(list(evaluation_batches(features, 7)))) == list(range(48))
