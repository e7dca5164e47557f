"""Comparisons, tables, estimators and models of transformers: the newest ways in, misused."""

import copy
import datetime
import decimal
import json
import shutil

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from command import comet_moe as run_command
from outcomes import SMALL, refuse, sets, survive

from comet_moe.sklearn import MoEClassifier, MoERegressor, MultiTaskMoE

# Comparisons and studies: refused before the first trial, and without a folder.

COMPARISONS = {
    "--targets": ["", "nope", ",", "bought,nope", "bought,bought", "*", " ", "bought\x1b[31m", "../x"],
    "--features": ["nope", "bought", "age,age", ","],
    "--exclude": ["nope", "spend", "customer_id,age,city,income,joined,tags,member,shop,segment,visits"],
    "--tasks": ["bought", "bought=", "=binary", "bought=x", "nope=binary", "spend=count", "spend=binary"],
    "--weights": ["bought=-1", "bought=nan", "bought=inf", "bought=x", "nope=1", "=", "bought=0,spend=0"],
    "--gates": ["nope", " ", ",", "topk,topk", "../x", "hash", "TOPK"],
    "--seeds": ["0", "-1", "99999999999999", "nan"],
    "--budget": ["nan", "-1m", "x", "", "10", "0s"],
    "--page": [".", "/dev/null/x.html", "/dev/null", ""],
    "--storage": ["foo", "sqlite://", "mysql://x/y", "sqlite:///customers.csv"],
    "--set": [
        *("gate=topk", "training.epochs=0", "seed=-1", "data.path=other.csv", "data.options.targets=[age]"),
        *("parallel.experts=0", "parallel.experts=3", "training.device=tpu", "training.precision=float16"),
        *("data.options.groups=[nope]", "data.options.groups={a: 1}", "data.options.groups=[city,city]"),
        *("model.experts=0", "model.mixture=x", "gate.k=100", "=", "a", "a=", "..=1"),
    ],
}


@pytest.mark.parametrize(
    ("option", "value"), [(option, value) for option, values in COMPARISONS.items() for value in values]
)
def test_a_wrong_option_of_compare_is_refused_before_the_training(made, tmp_path, monkeypatch, option, value):
    monkeypatch.chdir(tmp_path)
    shutil.copy(made / "customers.csv", tmp_path)
    given = {"--targets": "bought,spend", "--gates": "topk", "--out": "study", option: value}
    done = run_command("compare", "customers.csv", *(part for pair in given.items() for part in pair))
    *notes, sentence = done.err.splitlines()
    assert done.code == 2, done.err
    assert sentence.startswith("comet-moe: ")
    assert all(note.startswith("note: ") for note in notes), notes
    assert [path.name for path in tmp_path.iterdir()] == ["customers.csv"]


@pytest.mark.parametrize("pairs", ["bought=1,bought=2", "spend=2,spend=2"])
@pytest.mark.parametrize("option", ["--tasks", "--weights"])
def test_a_target_that_is_given_two_values_is_refused(made, tmp_path, option, pairs):
    words = ["compare", made / "customers.csv", "--targets", "bought,spend", "--out", tmp_path / "study"]
    refuse(*words, option, pairs, says="given twice")


@pytest.mark.parametrize("setting", ["parallel.experts=2", "training.precision=float16"])
def test_what_no_trial_can_run_with_is_refused_before_the_first(tmp_path, setting):
    out = tmp_path / "study"
    name = setting.partition("=")[0]
    refuse("tune", "multidigits", "--gates", "topk", *sets([*SMALL[:-1], setting]), "--out", out, says=name)
    assert not out.exists()


# Tables of others.


def test_the_table_is_not_replaced_by_its_predictions(made, tmp_path):
    table = tmp_path / "same.csv"
    shutil.copy(made / "customers.csv", table)
    before = table.read_bytes()
    refuse("predict", made / "table", table, "-o", table, says="is the table itself")
    (tmp_path / "link.csv").symlink_to(table)
    refuse("predict", made / "table", tmp_path / "link.csv", "-o", table, says="is the table itself")
    assert table.read_bytes() == before


ROWS = 60
TYPES = {
    "dictionary": pa.array(["a", "b"] * (ROWS // 2)).dictionary_encode(),
    "decimal": pa.array([decimal.Decimal("1.5")] * ROWS),
    "duration": pa.array([datetime.timedelta(1)] * ROWS),
    "struct": pa.array([{"a": 1}] * ROWS),
    "map": pa.array([[("a", 1)]] * ROWS, pa.map_(pa.string(), pa.int64())),
    "nulls": pa.nulls(ROWS),
    "uint64": pa.array([2**64 - 1] * ROWS, pa.uint64()),
    "float16": pa.array(np.ones(ROWS, "f2")),
    "time": pa.array([datetime.time(1)] * ROWS),
    "lists of lists": pa.array([[[1]]] * ROWS),
    "bytes": pa.array([b"\xff"] * ROWS),
    "year 33,658": pa.array([10**18] * ROWS, pa.timestamp("us")),
    "year 9999": pa.array([datetime.date(9999, 1, 1)] * ROWS),
}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("column", ["age", "bought"])
def test_columns_of_every_type_are_read_or_refused(made, tmp_path, kind, column):
    table = pa.Table.from_pandas(pd.read_csv(made / "customers.csv"))
    table = table.set_column(table.column_names.index(column), column, TYPES[kind])
    pq.write_table(table, tmp_path / "t.parquet")
    survive("data", "inspect", tmp_path / "t.parquet", "--targets", "bought")
    survive("predict", made / "table", tmp_path / "t.parquet", "-o", tmp_path / "out.csv")


# Estimators: ValueError or TypeError, as scikit-learn's own.

X = np.random.default_rng(0).normal(size=(12, 3)).astype("f4")
Y = (X[:, 0] > 0).astype(int)
ESTIMATORS = {
    "gate": lambda: MoEClassifier(gate="nope").fit(X, Y),
    "experts": lambda: MoEClassifier(experts=10**9).fit(X, Y),
    "half an expert": lambda: MoEClassifier(experts=2.5).fit(X, Y),
    "k": lambda: MoEClassifier(gate="topk", k=99).fit(X, Y),
    "epochs": lambda: MoEClassifier(epochs=1e30).fit(X, Y),
    "device": lambda: MoEClassifier(device="tpu").fit(X, Y),
    "seed": lambda: MoEClassifier(random_state=-1).fit(X, Y),
    "one class": lambda: MoEClassifier().fit(X, Y * 0),
    "too few": lambda: MoEClassifier().fit(X, Y[:5]),
    "mappings": lambda: MoEClassifier().fit(X, np.array([{}] * 12)),
    "dates": lambda: MoERegressor().fit(X, pd.date_range("2020", periods=12)),
    "durations": lambda: MoERegressor().fit(X, pd.timedelta_range("1s", periods=12)),
    "infinite": lambda: MoERegressor().fit(X, np.full(12, np.inf)),
    "no columns": lambda: MoEClassifier().fit(X[:, :0], Y),
    "one dimension": lambda: MoEClassifier().fit(X[:, 0], Y),
    "objects": lambda: MoEClassifier().fit(np.array([[{}, [], ()]] * 12, dtype=object), Y),
    "two of a name": lambda: MoEClassifier().fit(pd.DataFrame(X, columns=["a", "a", "b"]), Y),
    "tasks": lambda: MultiTaskMoE(tasks=["a"]).fit(X, pd.DataFrame({"a": Y})),
    "two targets of a name": lambda: MultiTaskMoE(tasks={"a": "binary"}).fit(
        X, pd.DataFrame(np.stack([Y, Y], 1), columns=["a", "a"])
    ),
    "dates of a task": lambda: MultiTaskMoE(tasks={"a": "regression"}).fit(
        X, pd.DataFrame({"a": pd.date_range("2020", periods=12)})
    ),
}


@pytest.mark.parametrize("case", ESTIMATORS)
def test_wrong_parameters_and_data_of_estimators_are_refused(case):
    with pytest.raises((ValueError, TypeError)) as error:
        ESTIMATORS[case]()
    assert "None: gate" not in str(error.value)


# Configurations of transformers that hold gates.


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    from comet_moe.gates import CometGate
    from comet_moe.hf import replace_routers

    config = transformers.MixtralConfig(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    model = transformers.MixtralForCausalLM(config)
    replace_routers(model, CometGate)
    path = tmp_path_factory.mktemp("mixtral")
    model.save_pretrained(path)
    return path


NAME = "layers.0.mlp.gate"
CONFIGURATIONS = {
    "a list": lambda memory: [memory],
    "a text": lambda memory: "x",
    "no gates": lambda memory: memory.pop("gates"),
    "no mixtures": lambda memory: memory.pop("mixtures"),
    "no searches": lambda memory: memory.pop("searches"),
    "gates in a list": lambda memory: memory.update(gates=[1]),
    "mixtures in a list": lambda memory: memory.update(mixtures=[1]),
    "a number as gate": lambda memory: memory["gates"].update({NAME: 5}),
    "a number as mixture": lambda memory: memory["mixtures"].update({NAME: 5}),
    "no class": lambda memory: memory["gates"][NAME].pop("class"),
    "another class": lambda memory: memory["gates"][NAME].update({"class": "os.system"}),
    "a class in a list": lambda memory: memory["gates"][NAME].update({"class": ["CometGate"]}),
    "an unknown argument": lambda memory: memory["gates"][NAME].update(x=1),
    "k as text": lambda memory: memory["gates"][NAME].update(k="2"),
    "k of 1e12": lambda memory: memory["gates"][NAME].update(k=10**12),
    "1e12 experts": lambda memory: memory["gates"][NAME].update(num_experts=10**12),
    "more experts": lambda memory: memory["gates"][NAME].update(num_experts=7),
    "gamma NaN": lambda memory: memory["gates"][NAME].update(gamma=float("nan")),
    "another name": lambda memory: memory["gates"].update({"../x": memory["gates"].pop(NAME)}),
    "another kind": lambda memory: memory["mixtures"][NAME].update(kind="x"),
    "no layout": lambda memory: memory["mixtures"][NAME].update(kind="feed_forward"),
    "a layout of numbers": lambda memory: memory["mixtures"][NAME].update(
        kind="feed_forward", layout=[1, [2], 3, 4], expert_size=1, execution="auto"
    ),
    "a search too far": lambda memory: memory["gates"][NAME].update(
        {"class": "PermutedGate", "gate": dict(memory["gates"][NAME]), "search": 7}
    ),
}


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_a_damaged_configuration_of_gates_is_refused(mixtral, tmp_path, case):
    from transformers import AutoModelForCausalLM

    import comet_moe.hf  # noqa: F401 - registers the type of models with gates

    folder = shutil.copytree(mixtral, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    changed = copy.deepcopy(config["comet_moe"])
    returned = CONFIGURATIONS[case](changed)
    config["comet_moe"] = returned if case in ("a list", "a text") else changed
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"\w"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_weights_that_are_cut_off_are_refused(mixtral, tmp_path):
    from transformers import AutoModelForCausalLM

    import comet_moe.hf  # noqa: F401 - registers the type of models with gates

    folder = shutil.copytree(mixtral, tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:900])
    with pytest.raises(ValueError, match="cannot be read"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("settings", [{"experts": 10**9}, {"k": 0}, {"gate": "x"}, {"noise": float("nan")}])
def test_wrong_settings_of_upcycling_are_refused(settings):
    transformers = pytest.importorskip("transformers")
    from comet_moe.hf import replace_routers, upcycle

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=20, **sizes))
    with pytest.raises(ValueError, match=r"\w"):
        upcycle(model, **{"experts": 2} | settings)
    for wrong in (None, torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match=r"\w"):
            replace_routers(wrong)
