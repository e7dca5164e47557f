"""The Trainer of transformers with a sparse student, and transformers' mixtures with our dispatch."""

import pytest
import torch
from tiny_bert import VOCABULARY, batch, tiny_bert
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

from comet_moe import Permutation
from comet_moe.bert import SearchCallback, convert_bert

STEPS = 6


class Rows(torch.utils.data.Dataset):
    """Whether the second token is the same as the first: rows that can be learnt."""

    def __init__(self, rows=32):
        self.rows = batch(rows, 6, padded=False)

    def __len__(self):
        return len(self.rows["labels"])

    def __getitem__(self, row):
        return {name: value[row] for name, value in self.rows.items()}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_trainer_trains_and_the_callback_steps_every_search(tmp_path, accumulation):
    student = convert_bert(
        tiny_bert(), "comet+", experts=3, expert_size=12, shared=4, search_steps=4, entropy=0.1
    )
    before = {name: value.clone() for name, value in student.state_dict().items()}
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=accumulation,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="steps",
        save_steps=3,
    )
    rows = Rows()
    trainer = Trainer(
        model=student,
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=[SearchCallback()],
        compute_metrics=lambda found: {
            "share": float((found.predictions.argmax(-1) == found.label_ids).mean())
        },
    )
    trainer.train()
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
