"""Small random models of each family, and batches for them."""

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

P, N, K, VOCABULARY = 16, 4, 2, 40
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": P,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": K,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # so that tokens and experts differ
}


def mixtral(**settings):
    return MixtralForCausalLM(MixtralConfig(**{**COMMON, "num_local_experts": N, **settings}))


def qwen2(**settings):
    sizes = {"num_experts": N, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**{**COMMON, **sizes, **settings}))


def qwen3(**settings):
    sizes = {"num_experts": N, "moe_intermediate_size": 12, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**COMMON, **sizes, **settings}))


def olmoe(**settings):
    return OlmoeForCausalLM(OlmoeConfig(**{**COMMON, "num_experts": N, **settings}))


def deepseek(**settings):
    sizes = {
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 12,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    }
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**{**COMMON, **sizes, **settings}))
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            torch.nn.init.normal_(module.e_score_correction_bias, std=0.2)
    return model


FAMILIES = {
    "mixtral": mixtral,
    "qwen2_moe": qwen2,
    "qwen3_moe": qwen3,
    "olmoe": olmoe,
    "deepseek_v3": deepseek,
}


def build(family, seed=0, **settings):
    torch.manual_seed(seed)
    return FAMILIES[family](**settings).eval()


def left_padded():
    """Two sequences of 6 tokens, the second with 2 of padding on the left."""
    ids = torch.randint(3, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
