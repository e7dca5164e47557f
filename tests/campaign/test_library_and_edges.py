"""Causes 9 and 10: the library names wrong arguments and keeps its laws; edges of the command line."""

import os
import shutil
import subprocess
import sys
import threading

import pandas as pd
import pytest
import torch
from benchmarks.simulate import simulate_ranks
from command import comet_moe as run_command
from outcomes import SMALL, refuse, sets
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import comet_moe
from comet_moe import (
    MoE,
    MultiGateMoE,
    Permutation,
    PermutedGate,
    Routing,
    RoutingMonitor,
    parameter_groups,
    sinkhorn,
)
from comet_moe.checks import should_check_values, without_value_checks
from comet_moe.experts import ConvExperts, DenseExperts, ModuleExperts
from comet_moe.gates import (
    CometGate,
    DSelectKGate,
    ExpertChoiceGate,
    Gate,
    HashGate,
    ProductKeyGate,
    RegularizedGate,
    ReluGate,
    SoftmaxGate,
    SubsetGate,
    TopKGate,
    WarmupGate,
)
from comet_moe.mixture.ple import PLE
from comet_moe.parallel import clip_grad_norm_, data_parallel, expert_parallel
from comet_moe.routing import Pairs

P, N = 6, 5


def top_k():
    return TopKGate(P, N, k=2)


def mixture():
    return MoE(experts=DenseExperts(5, 6, 3), gate=TopKGate(6, 5, k=2))


def ple(**changes):
    options = {
        "layers": 1,
        "num_tasks": 2,
        "in_features": 6,
        "out_features": 6,
        "private": 1,
        "shared": 2,
        "experts": lambda n, width: DenseExperts(n, width, 6),
        "gate": lambda width, n: TopKGate(width, n, k=1),
    }
    return PLE(**(options | changes))


ROUTING = Routing(weights=torch.eye(4))
ARGUMENTS = {
    "features as text": lambda: CometGate("6", N, k=2),
    "k as text": lambda: CometGate(P, N, k="2"),
    "k as a fraction": lambda: TopKGate(P, N, k=2.5),
    "k as a bool": lambda: TopKGate(P, N, k=True),
    "k as a tensor": lambda: TopKGate(P, N, k=torch.ones(2)),
    "gamma as text": lambda: CometGate(P, N, k=2, gamma="a"),
    "gamma as None": lambda: CometGate(P, N, k=2, gamma=None),
    "gamma NaN": lambda: CometGate(P, N, k=2, gamma=float("nan")),
    "entropy as a list": lambda: CometGate(P, N, k=2, entropy=[1.0]),
    "no experts": lambda: CometGate(P, None, k=2),
    "normalize": lambda: TopKGate(P, N, k=2, normalize=3),
    "score": lambda: TopKGate(P, N, k=2, score=4),
    "groups": lambda: TopKGate(P, N, k=2, groups="x"),
    "reachability": lambda: DSelectKGate(P, 8, k=2, reachability=None),
    "steps": lambda: Permutation(N, steps="a"),
    "one tau": lambda: Permutation(N, steps=3, tau=1),
    "tau as text": lambda: Permutation(N, steps=3, tau=("a", 1)),
    "three taus": lambda: Permutation(N, steps=3, tau=(1.0, 1.0, 1.0)),
    "one number of iterations": lambda: Permutation(N, steps=3, iterations=3),
    "iterations of 0": lambda: Permutation(N, steps=3, iterations=(0, 3)),
    "logits as a list": lambda: sinkhorn([[1.0]]),
    "logits as a vector": lambda: sinkhorn(torch.zeros(3)),
    "logits not square": lambda: sinkhorn(torch.zeros(2, 3)),
    "logits as integers": lambda: sinkhorn(torch.zeros(3, 3, dtype=torch.int64)),
    "tau of sinkhorn": lambda: sinkhorn(torch.zeros(3, 3), tau="a"),
    "rounds of sinkhorn": lambda: sinkhorn(torch.zeros(3, 3), iterations=-1),
    "rounds as text": lambda: sinkhorn(torch.zeros(3, 3), iterations="a"),
    "mixture of nothing": lambda: MoE(experts=None, gate=None),
    "other number of experts": lambda: MoE(experts=DenseExperts(N, P, 3), gate=TopKGate(P, 4, k=2)),
    "no gates": lambda: MultiGateMoE(experts=DenseExperts(N, P, 3), gates=[]),
    "gates as None": lambda: MultiGateMoE(experts=DenseExperts(N, P, 3), gates=None),
    "a subset that is a number": lambda: SubsetGate(TopKGate(P, 2, k=1), experts=3, num_experts=N),
    "a subset of texts": lambda: SubsetGate(TopKGate(P, 2, k=1), experts=["a", "b"], num_experts=N),
    "keys as text": lambda: HashGate("a", N),
    "seed as text": lambda: HashGate(10, N, seed="x"),
    "seed beyond 64 bits": lambda: HashGate(10, N, seed=2**70),
    "units as text": lambda: DenseExperts(N, "a", 3),
    "regularised nothing": lambda: RegularizedGate(None),
    "warm-up of text": lambda: WarmupGate(top_k(), steps="a"),
    "a permuted nothing": lambda: PermutedGate(None, None),
    "another size of permutation": lambda: PermutedGate(top_k(), Permutation(4, steps=2)),
    "target as text": lambda: ReluGate(P, N, target="a"),
    "capacity as text": lambda: ExpertChoiceGate(P, N, capacity="a"),
    "monitor of a number": lambda: RoutingMonitor(3),
    "step of a number": lambda: comet_moe.step(3),
    "value checks as text": lambda: comet_moe.set_value_checks("x"),
    "input None": lambda: top_k()(None),
    "input as a list": lambda: top_k()([[1.0] * P]),
    "input of integers": lambda: top_k()(torch.zeros(2, P, dtype=torch.int64)),
    "input of other width": lambda: top_k()(torch.zeros(2, 3)),
    "input NaN": lambda: top_k()(torch.full((2, P), float("nan"))),
    "mask as a list": lambda: top_k()(torch.zeros(2, P), mask=[True, False]),
    "mask of other shape": lambda: top_k()(torch.zeros(2, P), mask=torch.ones(3, dtype=torch.bool)),
    "keys as a list": lambda: HashGate(4, N)(torch.zeros(2, P), keys=[1, 2]),
    "keys out of range": lambda: HashGate(4, N)(torch.zeros(2, P), keys=torch.tensor([1, 9])),
    "top of text": lambda: top_k()(torch.zeros(2, P)).top("a"),
    "top of too many": lambda: top_k()(torch.zeros(2, P)).top(9),
    "routing of nothing": lambda: Routing(),
    "routing of a vector": lambda: Routing(weights=torch.zeros(3)),
    "experts, negative count": lambda: DenseExperts(5, 6, 3)(torch.zeros(4, 6), [-1, 2, 1, 1, 1]),
    "experts, too few counts": lambda: DenseExperts(5, 6, 3)(torch.zeros(4, 6), [4]),
    "experts, text as counts": lambda: DenseExperts(5, 6, 3)(torch.zeros(4, 6), "abcde"),
    "experts, fractions": lambda: DenseExperts(5, 6, 3)(torch.zeros(4, 6), [0.5, 0.5, 1.0, 1.0, 1.0]),
    "experts, wide rows": lambda: DenseExperts(5, 6, 3)(torch.zeros(4, 7), [1, 1, 1, 1, 0]),
    "experts, float offsets": lambda: DenseExperts(5, 6, 3)(torch.zeros(4, 6), torch.ones(5)),
    "experts, activation": lambda: DenseExperts(5, 6, 3, activation=[1]),
    "experts, no modules": lambda: ModuleExperts("ab"),
    "experts, a number": lambda: ModuleExperts(3),
    "convolutions, one number": lambda: ConvExperts(5, 3, [4], kernel_size=3),
    "mixture of None": lambda: mixture()(None),
    "mixture of a list": lambda: mixture()([[1.0] * 6]),
    "mixture of an array": lambda: mixture()(torch.zeros(2, 6).numpy()),
    "mixture of a sparse tensor": lambda: mixture()(torch.zeros(2, 6).to_sparse()),
    "mixture, share": lambda: MoE(
        experts=DenseExperts(5, 6, 3), gate=TopKGate(6, 5, k=2), sparse_share=float("nan")
    ),
    "PLE, execution": lambda: ple(execution="x"),
    "PLE, share": lambda: ple(sparse_share=float("nan")),
    "PLE, experts": lambda: ple(experts=lambda n, width: DenseExperts(n + 1, width, 6)),
    "PLE, no experts": lambda: ple(experts=None),
    "PLE, no gate": lambda: ple(gate=None),
    "PLE of None": lambda: ple()(None),
    "learning rate, NaN": lambda: parameter_groups(mixture(), float("nan")),
    "learning rate, negative": lambda: parameter_groups(mixture(), -1.0),
    "learning rate, text": lambda: parameter_groups(mixture(), "a"),
    "parameters of None": lambda: parameter_groups(None, 0.1),
    "monitor, names": lambda: RoutingMonitor(mixture(), names=-1),
    "mesh, None": lambda: expert_parallel(mixture(), None),
    "mesh, a name": lambda: expert_parallel(mixture(), "ep"),
    "mesh of data": lambda: data_parallel(mixture(), None),
    "norm, text": lambda: clip_grad_norm_(mixture().parameters(), "a"),
    "norm, negative": lambda: clip_grad_norm_(mixture().parameters(), -1.0),
    "ranks of None": lambda: simulate_ranks(None, 5, 4, 4),
    "negative bytes": lambda: simulate_ranks(ROUTING, 5, -4, 4),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_wrong_argument_is_a_value_error(name):
    with pytest.raises(ValueError, match=r"\w"):
        ARGUMENTS[name]()


def test_value_checks_are_switched_off_in_one_thread_only():
    x, seen, inside, leave = torch.zeros(2), [], threading.Event(), threading.Event()

    def train():
        with without_value_checks():
            seen.append(should_check_values(x))
            inside.set()
            leave.wait()
        seen.append(should_check_values(x))

    thread = threading.Thread(target=train)
    thread.start()
    inside.wait()
    assert should_check_values(x)
    with without_value_checks():
        leave.set()
        thread.join()  # overlaps: the other thread leaves first
        assert not should_check_values(x)
    assert should_check_values(x)
    assert seen == [False, True]


GATES = {
    "comet": lambda: CometGate(P, N, k=2),
    "topk": top_k,
    "dselect": lambda: DSelectKGate(P, 8, k=2),
    "softmax": lambda: SoftmaxGate(P, N),
    "relu": lambda: ReluGate(P, N, target=2),
    "comet+": lambda: PermutedGate(CometGate(P, N, k=2), Permutation(N, steps=4)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", GATES)
def test_forward_mode_derivatives_are_those_of_differences(name, training):
    gate = GATES[name]().double().train(training)
    x, tangent = torch.randn(2, 7, P, dtype=torch.double)
    with forward_ad.dual_level():
        got = forward_ad.unpack_dual(gate(forward_ad.make_dual(x, tangent)).weights).tangent
    step = 1e-6
    differences = (gate(x + step * tangent).weights - gate(x - step * tangent).weights) / (2 * step)
    torch.testing.assert_close(got, differences, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", GATES)
def test_make_fx_records_the_gate_and_not_its_values(name, training):
    gate = GATES[name]().train(training)
    x, other = torch.randn(2, 7, P)
    traced = make_fx(lambda x: gate(x).weights)(x)
    torch.testing.assert_close(traced(other), gate(other).weights)


class PairsGate(Gate):
    """A user's gate that returns its pairs in any order."""

    def __init__(self, order):
        super().__init__()
        self.num_experts, self.in_features, self.order = N, P, order
        self.linear = torch.nn.Linear(P, N)

    def forward(self, x, keys=None, mask=None):
        weights = self.linear(x).softmax(-1)
        sample = torch.arange(len(x)).repeat_interleave(N)[self.order]
        expert = torch.arange(N).repeat(len(x))[self.order]
        pairs = Pairs(sample, expert, weights[sample, expert])
        return Routing.from_pairs(pairs, torch.Size([len(x)]), N)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("execution", ["dense", "sparse"])
def test_pairs_in_any_order_are_routed_alike(execution, training):
    moe = MoE(experts=DenseExperts(N, P, 3), gate=PairsGate(torch.randperm(7 * N)))
    moe.execution = execution
    moe.train(training)
    x = torch.randn(7, P)
    with without_value_checks():
        got, routing = moe(x)
        torch.testing.assert_close(routing.weights, moe.gate.linear(x).softmax(-1))
        moe.gate.order = torch.arange(7 * N)
        torch.testing.assert_close(got, moe(x)[0])


def searching(shared):
    search = Permutation(N, steps=4)
    other = search if shared else Permutation(N, steps=4)
    gates = [PermutedGate(top_k(), search), PermutedGate(top_k(), other)]
    return MultiGateMoE(experts=DenseExperts(N, P, 3), gates=gates)


def test_separate_searches_do_not_load_into_a_shared_one():
    with pytest.raises(RuntimeError, match="share one: build the model with separate searches"):
        searching(shared=True).load_state_dict(searching(shared=False).state_dict())
    searching(shared=True).load_state_dict(searching(shared=True).state_dict())


def test_a_hash_gate_refuses_experts_that_it_does_not_have():
    with pytest.raises(RuntimeError, match=r"must name experts 0\.\.2, got 4"):
        HashGate(100, 3).load_state_dict(HashGate(100, 5).state_dict())
    HashGate(100, 5).load_state_dict(HashGate(100, 5, seed=1).state_dict())


@pytest.mark.parametrize("expert", [-1, 0.5, 3])
def test_a_table_of_a_hash_gate_names_experts_that_there_are(expert):
    gate = HashGate(4, 3)
    with pytest.raises(RuntimeError, match=rf"assignment must name experts 0\.\.2, got {expert}"):
        gate.load_state_dict({"assignment": torch.tensor([0, 1, 2, expert])})


def test_a_pair_that_comes_twice_is_refused():
    twice = Pairs(torch.tensor([1, 0, 1]), torch.tensor([2, 2, 2]), torch.tensor([0.5, 1.0, 0.5]))
    with pytest.raises(ValueError, match="sample 1 has expert 2 twice"):
        Routing.from_pairs(twice, torch.Size([2]), 3)


@pytest.mark.parametrize("balance", [{"bias_update": 0.1}, {"balance": "quantile"}])
def test_a_balancing_bias_that_requires_a_gradient_is_moved(balance):
    gate = TopKGate(6, 4, k=2, score="sigmoid", **balance)
    gate.balance_bias.requires_grad_()
    gate(torch.randn(9, 6))
    comet_moe.step(gate)
    assert gate.balance_bias.any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: ExpertChoiceGate(6, 4),
        lambda: ProductKeyGate(6, 4, k=2),
        lambda: ReluGate(6, 4, target=2),
        lambda: CometGate(6, 4, k=2, balance="normalize"),
        lambda: CometGate(6, 4, k=2, balance="median"),
    ],
)
def test_buffers_that_require_a_gradient_are_moved(make):
    gate, x = make(), torch.randn(9, 6)
    for buffer in gate.buffers():
        buffer.requires_grad_(buffer.is_floating_point())
    before = [buffer.detach().clone() for buffer in gate.buffers()]
    gate(x).weights.sum().backward()
    comet_moe.step(gate)
    assert any(not old.equal(new) for old, new in zip(before, gate.buffers(), strict=True))


def test_a_search_refuses_an_order_that_is_no_permutation():
    search = Permutation(5, steps=3)
    state = {name: torch.full_like(value, 99) for name, value in search.state_dict().items()}
    gate = PermutedGate(TopKGate(6, 5, k=2), search).eval()
    search.load_state_dict(state)
    with pytest.raises(ValueError, match="must be a permutation of 5 experts, got"):
        gate(torch.zeros(3, 6))


# Edges.


def test_the_version_is_shown():
    done = run_command("--version")
    assert (done.code, done.out.strip()) == (0, comet_moe.__version__)


@pytest.mark.parametrize("size", ["abc", "", "1.5", "²"])
def test_a_wrong_number_of_processes_is_named(tmp_path, monkeypatch, size):
    monkeypatch.setenv("WORLD_SIZE", size)
    refuse("train", "multidigits", "--out", tmp_path / "run", says="WORLD_SIZE")


@pytest.mark.parametrize("gate", ["topk", "sigmoid", "relu"])
@pytest.mark.parametrize("verb", ["train", "tune"])
def test_more_experts_per_sample_than_there_are_is_refused(tmp_path, verb, gate):
    settings = sets([*SMALL[:-1], "gate.k=99"])
    choice = ["--gates", gate] if verb == "tune" else ["--set", f"gate={gate}"]
    out = tmp_path / "out"
    refuse(verb, "multidigits", *choice, *settings, "--out", out, says="gate.k must be at most 8")
    assert not out.exists()


def test_a_working_directory_that_was_deleted_is_named(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    refuse("train", "multidigits", says="working directory")


def test_the_command_that_resumes_is_quoted(made, tmp_path, monkeypatch):
    from comet_moe.experiments.training.trainer import Trainer

    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "run", interrupt)
    done = run_command("train", "multidigits", *sets(SMALL), "--out", tmp_path / "my run")
    assert done.code == 130
    assert f"--out '{tmp_path / 'my run'}' --resume" in done.err


class Full:
    """A standard error on a full disk."""

    encoding = "utf-8"

    def write(self, text):
        raise OSError(28, "No space left on device")

    def flush(self):
        raise OSError(28, "No space left on device")

    def isatty(self):
        return False


@pytest.mark.parametrize("stream", [Full(), None], ids=["full", "closed"])
def test_a_lost_standard_error_does_not_end_a_training(made, copy, monkeypatch, stream):
    from comet_moe.cli import main

    folder = copy("stopped")
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "argv", ["comet-moe", "train", "multidigits", "--out", str(folder), "--resume"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    assert (folder / "result.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.1, 0.3, 0.5, 0.7, 1.0, 2.0])
def test_an_interrupt_at_any_moment_prints_no_traceback(tmp_path, seconds):
    import signal
    import time

    from command import default_sigint

    with default_sigint():
        process = subprocess.Popen(
            [sys.executable, "-m", "comet_moe", "train", "multidigits", "--out", tmp_path / "run"],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    # Until `main` is called, it is the interpreter that ends, in the middle of an import.
    assert "in main" not in err
    assert process.returncode in (130, -signal.SIGINT, 1)


# Data of BERT.


def tsv(folder, text):
    (folder / "RTE").mkdir()
    for name in ("train", "dev"):
        (folder / "RTE" / f"{name}.tsv").write_text(text)
    return folder


HEADER = "index\tsentence1\tsentence2\tlabel\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        HEADER,
        HEADER + "0\n",
        "a\tb\n1\t2\n",
        HEADER + "0\ta\tb\tmaybe\n",
        HEADER + "0\ta\tb\t\n",
        "\0",
    ],
)
def test_a_table_of_texts_without_rows_is_named(tiny, tmp_path, text):
    import tiny_bert

    refuse(
        *("bert", "finetune", "rte", "--model", tiny / "tiny", "--data", tsv(tmp_path, text)),
        *(*tiny_bert.sets(), "--out", tmp_path / "run"),
        says=str(tmp_path),
    )


QUESTION = {
    "title": "t",
    "context": "a cat sat",
    "question": "who sat ?",
    "answer_texts": ["cat"],
    "answer_starts": [2],
    "is_impossible": False,
}
WRONG = {
    "null answers": {"answer_texts": None},
    "null starts": {"answer_starts": None},
    "more answers than starts": {"answer_texts": ["cat", "sat"]},
    "an answer that is not there": {"answer_texts": ["dog"]},
    "a start before the text": {"answer_texts": ["t"], "answer_starts": [-1]},
    "a start behind the text": {"answer_starts": [99]},
    "a null context": {"context": None},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_are_named(tmp_path, name):
    from comet_moe.exceptions import DataError
    from comet_moe.experiments.bert.tasks import find_task, read_texts

    rows = [QUESTION | {"title": str(number)} for number in range(20)] + [QUESTION | WRONG[name]]
    pd.DataFrame(rows).to_parquet(tmp_path / "squad2_train.parquet")
    with pytest.raises(DataError, match="squad2_train"):
        read_texts(find_task("squad2"), tmp_path)


def test_overlong_questions_are_cut_so_that_their_context_fits(tiny):
    from comet_moe.experiments.bert.run import load_tokenizer
    from comet_moe.experiments.bert.tasks import find_task
    from comet_moe.experiments.bert.tokens import encode

    table = pd.DataFrame([QUESTION | {"question": "the cat " * 300, "context": "a cat sat " * 50}])
    features = encode(find_task("squad2"), table, load_tokenizer(str(tiny / "tiny")), 32, 8)
    assert features.lengths.max() <= 32
    assert all((offsets[:, 0] >= 0).sum() > 8 for offsets in features.offsets[:-1])


def test_spreadsheets_can_be_given_ids_that_they_do_not_run(made, tmp_path):
    folder = shutil.copytree(made / "ratings", tmp_path / "run")
    table = tmp_path / "new.csv"
    table.write_text("user,item\n=1+1,i1\n+x,@y\nu1,i1\n")
    run_command("predict", folder, table, "-o", tmp_path / "out.csv", "--escape-formulas")
    ids = pd.read_csv(tmp_path / "out.csv", dtype=str)
    assert ids["user"].tolist() == ["'=1+1", "'+x", "u1"]
    assert ids["item"].tolist() == ["i1", "'@y", "i1"]
    run_command("predict", folder, table, "-o", tmp_path / "plain.csv")
    assert pd.read_csv(tmp_path / "plain.csv", dtype=str)["user"].tolist() == ["=1+1", "+x", "u1"]
    assert os.listdir(tmp_path)
