"""Write a model whose router learns nothing, to audit it: the folder model, and texts.txt.

It is a small, untrained Mixtral with one expert per token. Mixtral divides the weight of the expert by
itself, so that it is 1, and its gradient 0.
"""

from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM

torch.manual_seed(0)
config = MixtralConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_experts_per_tok=1,
    bos_token_id=None,
    eos_token_id=None,
)
MixtralForCausalLM(config).save_pretrained("model")
Path("texts.txt").write_text("A router should send different tokens to different experts.\n" * 60)
