"""What the student's loss is made of."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from comet_moe.bert import convert_bert
from comet_moe.experiments.bert.evaluate import batch_flops, effective_parameters, stored_parameters
from comet_moe.experiments.bert.students import discrepancy, symmetric_divergence
from tiny_bert import batch, inputs, tiny_bert


def test_divergence_is_half_the_sum_of_both_kl():
    student, teacher = torch.randn(5, 3).double(), torch.randn(5, 3).double()
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    there = F.kl_div(log_p, log_q, log_target=True, reduction="batchmean")
    back = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    torch.testing.assert_close(symmetric_divergence(student, teacher), (there + back) / 2)


def test_hidden_states_and_answers_are_compared_over_unmasked_tokens():
    mask = torch.tensor([[True, True, False], [True, True, False]])
    student, teacher = (
        SimpleNamespace(
            hidden_states=[torch.randn(2, 3, 4) for _ in range(2)],
            start_logits=torch.randn(2, 3),
            end_logits=torch.randn(2, 3),
        )
        for _ in range(2)
    )
    pairs = zip(student.hidden_states, teacher.hidden_states, strict=True)
    expected = sum(F.mse_loss(s[mask], t[mask]) for s, t in pairs)
    for name in ("start_logits", "end_logits"):
        logits = (getattr(output, name)[:, :2] for output in (student, teacher))
        expected = expected + symmetric_divergence(*logits) / 2
    torch.testing.assert_close(discrepancy(student, teacher, mask), expected)


@pytest.mark.parametrize("kind", ["classifier", "answers"])
def test_a_student_equal_to_its_teacher_has_no_discrepancy(kind):
    teacher = tiny_bert(kind)
    student = convert_bert(teacher, "comet", experts=1, expert_size=48, shared=0)
    arguments = inputs(batch(kind=kind))
    with torch.no_grad():
        found = [model(**arguments, output_hidden_states=True) for model in (student, teacher)]
        gap = discrepancy(*found, arguments["attention_mask"].bool())
    assert len(found[0].hidden_states) == 4
    assert float(gap) == pytest.approx(0, abs=1e-9)
    changed = SimpleNamespace(**found[1])
    changed.hidden_states = (*found[1].hidden_states[:-1], found[1].hidden_states[-1] + 1)
    assert float(discrepancy(found[0], changed, arguments["attention_mask"].bool())) == pytest.approx(
        1, abs=1e-4
    )


@pytest.mark.parametrize("kind", ["classifier", "answers"])
@pytest.mark.parametrize(
    ("gate", "route_by"),
    [
        (None, "token"),
        ("hash", "token"),
        ("comet", "token"),
        ("comet", "sentence"),
        ("topk+", "token"),
        ("topk+", "sentence"),
    ],
)
def test_operations_by_closed_form_are_those_that_torch_counts(kind, gate, route_by):
    model = tiny_bert(kind, attn_implementation="eager")
    routings = []
    extra = {}
    if gate is not None:
        model = convert_bert(model, gate, experts=4, expert_size=18, shared=8, route_by=route_by)
        extra = {"routings": routings}
    arguments = inputs(batch(kind=kind))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**arguments, **extra)
    assert batch_flops(model, 4, 9, routings) == counter.get_total_flops()


def test_effective_parameters_leave_out_the_experts_that_do_not_run():
    dense = tiny_bert()
    assert effective_parameters(dense, []) == stored_parameters(dense)
    student = convert_bert(dense, "hash", experts=4, expert_size=12, shared=0)
    experts = student.bert.encoder.layer[0].moe.experts
    one = stored_parameters(experts) / 4
    assert stored_parameters(student) - effective_parameters(student, [1.0, 1.0, 2.0]) == (3 + 3 + 2) * one
