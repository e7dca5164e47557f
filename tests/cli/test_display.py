"""What a verb prints about runs."""

from comet_moe.cli._display import LiveRuns, RunRow, print_summary
from comet_moe.experiments.training.records import EpochRecord, EvaluationRecord, RoutingRecord, SummaryRecord

ROUTING = RoutingRecord(
    experts_per_sample=2,
    share_of_samples=[1, 1, 0, 0],
    share_of_weight=[0.5, 0.5, 0, 0],
    effective_experts=2,
    information=0,
    load_ratio=2,
    dead_experts=[2, 3],
)
VALIDATION = EvaluationRecord(
    loss=1, tasks={"digit": {}}, experts_per_sample=2, flops_per_sample=1, routing={"digit": ROUTING}
)
EPOCH = EpochRecord(
    epoch=1,
    train_loss=1,
    train_aux_loss=0,
    warnings=["after epoch 1, gate digit is static: ..."],
    samples_per_second=1,
    validation=VALIDATION,
    best_validation_loss=1,
    patience_left=1,
    seconds=1,
)


def test_a_warning_is_one_line_on_standard_error(capsys):
    row = RunRow("one", epochs=2)
    LiveRuns([row]).callbacks(row).on_epoch(EPOCH)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("one: warning: after epoch 1, gate digit is static: ...\n")
    assert printed.err.count("\n") == 2  # and the line of the epoch


def test_a_summary_says_what_each_gate_does(capsys):
    print_summary(SummaryRecord(routing={"digit": ROUTING}), "a run")
    assert (
        "gate of digit: static, information 0.000 nats, 2.00 effective experts of 4"
        in capsys.readouterr().out
    )
