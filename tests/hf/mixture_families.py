"""Tiny random models of every family of mixtures in transformers, and what is known about each."""

import importlib
import re
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING,
    CONFIG_MAPPING_NAMES,
    model_type_to_module_name,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

VOCABULARY = 40
SIZES = {
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "index_n_heads", "mamba_n_heads", "mamba_expand"), 2),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group", "moe_layer_freq"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 12),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "shared_intermediate_size"), 24),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "mamba_d_state"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim", "head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "index_topk"), 8),
    **dict.fromkeys(
        ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "pad_token_id"), 0
    ),
    "hidden_size": 16,
    "mamba_d_head": 16,
    "max_position_embeddings": 64,
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # so that tokens and experts differ
}
SPARSE = ["sparse"] * 2
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
GEMMA = {"head_dim": None, "top_k_experts": 2}
WITHOUT_CALL = {"ernie4_5_vl_moe": 2}
"""Mixtures of a folder that texts do not reach, because they are for images."""

OVERRIDES = {
    "axk1": {"head_dim": None},
    "bailing_hybrid": LINEAR,
    "beam": {"mlp_layer_types": SPARSE},
    "deepseek_v3": {
        "head_dim": None,
        "n_routed_experts": None,
        "num_experts": None,
        "num_local_experts": 8,
        "n_group": 4,
        "topk_group": 2,
    },
    "dbrx": {
        **dict.fromkeys(("n_heads", "n_layers"), 2),
        "d_model": 16,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10},
        "ffn_config": {"ffn_hidden_size": 12, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 16},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": SPARSE},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [12, 12],
        "moe_k": 2,
        "mlp_layer_types": SPARSE,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10},
    },
    "flint": {"mlp_only_layers": []},
    "diffusion_gemma_text": GEMMA,
    "gemma4_text": {**GEMMA, "enable_moe_block": True, "vocab_size_per_layer_input": VOCABULARY},
    "glm5_next_text": {
        **LINEAR,
        "mlp_layer_types": SPARSE,
        "index_kpool": 2,
        "qk_rope_head_dim": 0,
        "linear_head_dim": 8,
        "linear_num_heads": 2,
        "hc_mult": 2,
    },
    "glm4v_moe_text": {
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10}
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "use_mamba_kernels": False,
        "mamba_dt_rank": 4,
    },
    "kimi_linear": LINEAR,
    "laguna": {"mlp_layer_types": SPARSE},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {
        **dict.fromkeys(("moe_topk", "zero_expert_num", "num_layers"), 2),
        "ffn_hidden_size": 24,
        "expert_ffn_hidden_size": 12,
        "head_dim": 4,
    },
    "mimo_v2_flash": {"swa_head_dim": 8, "layer_types": ["full_attention"] * 2},
    "qwen3_5_moe_text": LINEAR,
    "qwen3_next": LINEAR,
    "qwen4_exp_text": {
        **LINEAR,
        **dict.fromkeys(("hc_count", "indexer_n_heads", "indexer_compress_ratio"), 2),
        "indexer_kv_heads": 1,
        **dict.fromkeys(("hc_lowrank", "indexer_budget"), 4),
        "indexer_head_dim": 8,
    },
    "step3p5": {
        "sliding_window": 4,
        "layer_types": ["full_attention"] * 2,
        "mlp_layer_types": SPARSE,
        "share_expert_dim": 12,
    },
    "zaya": {"router_hidden_size": 8, "num_experts_per_tok": 1},
    "unlimited_ocr_text": {"head_dim": None},
}
"""What a family needs besides SIZES; None leaves a size at its default."""

REPLACED = {
    "afmoe",
    "deepseek_v4",
    "ernie4_5_moe",
    "ernie4_5_vl_moe",
    "kolibri1",
    "laguna",
    "muse_spark",
    "openai_privacy_filter",
    "phimoe",
}
"""Folders whose routers can be replaced, but not copied as a TopKGate."""

RECORDED = {
    "dbrx": "the router returns logits; the mixture chooses",
    "diffusion_gemma": "the router normalises and scales what it reads",
    "gemma4": "the router normalises and scales what it reads",
    "inkling": "the router also weighs the shared experts",
    "longcat_flash": "the router has more classes than there are experts",
    "zaya": "the router has a state that the next layer reads",
}
"""Folders whose routers are not replaced, and why. Their routes are recorded, replayed and audited."""

NOT_COVERED = {
    "doge": "the layer has product keys, and no module that is a router",
    "jetmoe": "attention has experts too, and routers return sorted rows",
    "nllb_moe": "encoder and decoder; experts have a capacity",
    "switch_transformers": "encoder and decoder; experts have a capacity",
    "vitpose_backbone": "experts are chosen by data set, without a router",
}
"""Folders whose mixtures are not found, and why."""


FAST = ("deepseek_v4", "glm4_moe", "gpt_oss", "llama4_text", "qwen3_next")
"""The model types that are tested each time; the others are slow together."""

IS_OLD = Version(transformers.__version__) < Version("5.22")
"""Older versions have routers of other shapes in some families, and lose modules that an adapter saved."""


def folder_of(model_type):
    return model_type_to_module_name(model_type)


def model_class(model_type):
    config_class = CONFIG_MAPPING[model_type]
    for auto, mapping in ((AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING), (AutoModel, MODEL_MAPPING)):
        if config_class in mapping:
            return auto.from_config
    folder = folder_of(model_type)
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    for kind in vars(module).values():  # the text model of one with images has no auto class
        is_model = isinstance(kind, type) and issubclass(kind, PreTrainedModel)
        if is_model and kind.config_class is config_class and kind.__name__.endswith("TextModel"):
            return kind
    raise LookupError(model_type)


def build_family(model_type):
    """A model of 2 layers whose routers have biases that count."""
    torch.manual_seed(0)
    config_class, own = CONFIG_MAPPING[model_type], OVERRIDES.get(model_type, {})
    known = config_class()
    sizes = {name: size for name, size in SIZES.items() if name not in own and hasattr(known, name)}
    own = {name: size for name, size in own.items() if size is not None and hasattr(known, name)}
    config = config_class(**sizes, **own)
    model = model_class(model_type)(config).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_buffers(), *model.named_parameters()):
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                tensor.normal_(std=0.2)
            if name.endswith("tid2eid"):  # a hash router chooses different experts
                tensor.copy_(torch.rand(len(tensor), 4).argsort(-1)[:, : tensor.shape[1]])
    return model


def find_mixtures():
    """The folders of transformers whose text models have mixtures: their code has routers or experts."""
    models = Path(transformers.__file__).parent / "models"
    pattern = re.compile(r"^class \w*(Router|TopKGating|Experts|MoE|Moe|MOE)\w*\(", re.MULTILINE)
    found = set()
    for path in models.glob("*/modeling_*.py"):
        if path.stem == f"modeling_{path.parent.name}" and pattern.search(path.read_text(encoding="utf-8")):
            found.add(path.parent.name)
    return found


def covered_families():
    """The model types whose routers are replaced in tests, those of the installed version."""
    covered = find_mixtures() - set(NOT_COVERED)
    others = re.compile("vision|audio|code_predictor|talker|mm_model|encoder")
    found = [name for name in CONFIG_MAPPING_NAMES if folder_of(name) in covered and not others.search(name)]
    composite = {"text_config", "thinker_config"}
    return sorted(name for name in found if not composite & CONFIG_MAPPING[name].sub_configs.keys())


def family_parameters(replaced=False):
    """All of them for pytest, or those whose routers are replaced: some fast, the others for new versions."""
    slow = (pytest.mark.slow, pytest.mark.skipif(IS_OLD, reason="needs transformers 5.22"))
    names = [name for name in covered_families() if not (replaced and folder_of(name) in RECORDED)]
    return [pytest.param(name, marks=() if name in FAST else slow) for name in names]
