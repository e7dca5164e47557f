"""Small random dense models of each family, with a batch for each."""

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

P, NEURONS, LAYERS, VOCABULARY = 16, 24, 2, 40
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": P,
    "intermediate_size": NEURONS,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


def llama(**settings):
    return LlamaForCausalLM(LlamaConfig(**{**COMMON, **settings}))


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=P,
            n_inner=NEURONS,
            n_layer=LAYERS,
            n_head=2,
            n_positions=32,
            initializer_range=0.3,
        )
    )


def gpt_neox():
    return GPTNeoXForCausalLM(GPTNeoXConfig(**COMMON))


def bert():
    return BertForSequenceClassification(BertConfig(**COMMON))


def vit():
    sizes = {name: COMMON[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    heads = {"num_attention_heads": 2, "initializer_range": 0.3}
    return ViTForImageClassification(ViTConfig(**sizes, **heads, image_size=8, patch_size=4, num_channels=1))


def opt():
    sizes = {"ffn_dim": NEURONS, "word_embed_proj_dim": P}
    return OPTForCausalLM(OPTConfig(**{**COMMON, **sizes}))


FAMILIES = {"llama": llama, "gpt2": gpt2, "gpt_neox": gpt_neox, "bert": bert, "vit": vit}


def build(family, seed=0):
    torch.manual_seed(seed)
    return {**FAMILIES, "opt": opt}[family]().eval()


def batch(family, labels=False):
    generator = torch.Generator().manual_seed(1)
    if family == "vit":
        inputs = {"pixel_values": torch.randn(3, 1, 8, 8, generator=generator)}
    else:
        inputs = {"input_ids": torch.randint(3, VOCABULARY, (3, 5), generator=generator)}
    if labels:
        is_causal = family not in ("bert", "vit")
        inputs["labels"] = inputs["input_ids"] if is_causal else torch.tensor([0, 1, 1])
    return inputs
