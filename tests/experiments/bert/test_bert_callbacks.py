"""The Trainer of transformers with a sparse student, and transformers' mixtures with our dispatch."""

import pytest
import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Trainer,
    TrainingArguments,
)

from comet_moe import MoE, Permutation
from comet_moe.bert import MoECallback, convert_bert
from comet_moe.experts import DenseExperts
from comet_moe.gates import CometGate
from tiny_bert import VOCABULARY, batch, tiny_bert

STEPS = 6


class Rows(torch.utils.data.Dataset):
    """Whether the second token is the same as the first: rows that can be learnt."""

    def __init__(self, rows=32):
        self.rows = batch(rows, 6, padded=False)

    def __len__(self):
        return len(self.rows["labels"])

    def __getitem__(self, row):
        return {name: value[row] for name, value in self.rows.items()}


def test_the_trainer_trains_and_the_callback_steps_every_search(tmp_path):
    student = convert_bert(
        tiny_bert(), "comet+", experts=3, expert_size=12, shared=4, search_steps=4, entropy=0.1
    )
    before = {name: value.clone() for name, value in student.state_dict().items()}
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="steps",
        save_steps=3,
        logging_steps=1,
    )
    rows = Rows()
    trainer = Trainer(
        model=student,
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=[MoECallback()],
        compute_metrics=lambda found: {
            "share": float((found.predictions.argmax(-1) == found.label_ids).mean())
        },
    )
    trainer.train()
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len([name for name in losses[0] if name.endswith("/information")]) == 3
    assert not any(module._forward_hooks for module in student.modules())
    searches = [module for module in student.modules() if isinstance(module, Permutation)]
    assert [int(search.progress) for search in searches] == [4, 4, 4]
    after = student.state_dict()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert any("experts" in name for name in changed)
    assert any("leaf_weight" in name for name in changed)
    metrics = trainer.evaluate()
    assert 0 <= metrics["eval_share"] <= 1
    saved = type(student).from_pretrained(tmp_path / "checkpoint-3")
    progress = [int(module.progress) for module in saved.modules() if isinstance(module, Permutation)]
    assert progress == [3, 3, 3]


class Mixture(torch.nn.Module):
    """A model with a mixture; it adds the auxiliary losses itself only where it is told to."""

    def __init__(self, adds_aux_loss):
        super().__init__()
        torch.manual_seed(0)
        self.adds_aux_loss = adds_aux_loss
        self.embedding = torch.nn.Embedding(len(VOCABULARY), 8)
        gate = CometGate(8, 4, k=2, gamma=1.0, entropy=0.5)
        self.moe = MoE(experts=DenseExperts(4, 8, 2), gate=gate)

    def forward(self, input_ids, labels=None):
        logits, routing = self.moe(self.embedding(input_ids).mean(1))
        if labels is None:
            return {"logits": logits}
        loss = torch.nn.functional.cross_entropy(logits, labels)
        return {"loss": loss + routing.aux_loss if self.adds_aux_loss else loss, "logits": logits}


class SummingMixture(Mixture):
    """The same with a loss that is a sum over the items of all accumulated batches."""

    def forward(self, input_ids, labels=None, num_items_in_batch=None, **kwargs):
        logits, routing = self.moe(self.embedding(input_ids).mean(1))
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch
        if self.adds_aux_loss:  # the mean over the two batches that are accumulated
            loss = loss + routing.aux_loss / 2
        return {"loss": loss, "logits": logits}


class Sentences(Rows):
    def __getitem__(self, row):
        return {name: self.rows[name][row] for name in ("input_ids", "labels")}


def train_mixture(model, folder, callback, **options):
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        optim="sgd",
        learning_rate=1.0,
        max_grad_norm=0.0,
        logging_steps=1,
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        **{"report_to": [], "gradient_accumulation_steps": 2, **options},
    )
    torch.manual_seed(1)
    trainer = Trainer(model=model, args=arguments, train_dataset=Sentences())
    callback.add_to(trainer)
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", [Mixture, SummingMixture])
def test_auxiliary_losses_are_added_as_by_the_model_itself(tmp_path, kind):
    wanted = train_mixture(kind(adds_aux_loss=True), tmp_path, MoECallback(add_aux_loss=False))
    found = train_mixture(kind(adds_aux_loss=False), tmp_path, MoECallback())
    without = train_mixture(kind(adds_aux_loss=False), tmp_path, MoECallback(add_aux_loss=False))
    weights = [trainer.model.moe.gate.split_weight for trainer in (found, wanted, without)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_model_that_has_added_its_auxiliary_losses_gets_no_more(tmp_path):
    torch.manual_seed(0)
    teacher = tiny_bert()
    found = []
    for add_aux_loss in (None, False, True):
        torch.manual_seed(0)
        student = convert_bert(teacher, "comet", experts=3, expert_size=12, shared=4, entropy=0.1)
        trainer = train_mixture(student, tmp_path, MoECallback(add_aux_loss=add_aux_loss))
        found.append(trainer.state.log_history[0]["loss"])
    assert found[0] == found[1] < found[2]


def test_the_loggers_of_the_trainer_get_the_statistics(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    train_mixture(Mixture(False), tmp_path, MoECallback(interval=1), report_to=["tensorboard"])
    (file,) = tmp_path.rglob("events.out*")
    events = EventAccumulator(str(file))
    events.Reload()
    assert [scalar.step for scalar in events.Scalars("train/routing/moe.gates.0/information")] == [1, 2, 3]


def test_a_loss_computed_outside_the_model_is_refused_unless_it_adds_the_auxiliary_losses(tmp_path):
    class WithoutLoss(Mixture):
        def forward(self, input_ids, labels=None):
            return super().forward(input_ids)

    with pytest.raises(ValueError, match=r"WithoutLoss returned no loss.*add_aux_loss=False"):
        train_mixture(WithoutLoss(False), tmp_path, MoECallback())


SIZES = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}

MIXTURES = {
    "gated": lambda: MixtralForCausalLM(
        MixtralConfig(
            **SIZES,
            num_local_experts=4,
        )
    ),
    "with shared expert": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **SIZES,
            moe_intermediate_size=12,
            shared_expert_intermediate_size=12,
            num_experts=4,
        )
    ),
    "transposed with biases": lambda: GptOssForCausalLM(
        GptOssConfig(
            **SIZES,
            head_dim=8,
            num_local_experts=4,
        )
    ),
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures_of_transformers_have_the_same_outputs_with_our_dispatch(kind):
    model = MIXTURES[kind]().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    ids = batch(3, 8, padded=False)["input_ids"]
    found = {}
    for implementation in ("eager", "comet_moe"):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        outputs = model(ids, labels=ids)
        outputs.loss.backward()
        gradients = {name: value.grad.clone() for name, value in model.named_parameters()}
        found[implementation] = (outputs.logits.detach(), gradients)
    (logits, gradients), (ours, our_gradients) = found["eager"], found["comet_moe"]
    # The sums run over the same products in another order.
    torch.testing.assert_close(ours, logits, atol=1e-5, rtol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(our_gradients[name], gradient, atol=1e-5, rtol=1e-4)
