"""Small models that were trained on a language with a structure, and batches of it."""

import copy

import torch
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM

VOCABULARY, LENGTH, N, K = 32, 16, 4, 2
COEFFICIENT = 0.02


def sentences(number, seed):
    """(number, LENGTH) tokens: the next token is a permutation of this one, chosen by the one before it."""
    rules = torch.Generator().manual_seed(0)
    permutations = torch.stack([torch.randperm(VOCABULARY, generator=rules) for _ in range(4)])
    draws = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (number, LENGTH), generator=draws)
    for place in range(2, LENGTH):
        tokens[:, place] = permutations[tokens[:, place - 2] % 4, tokens[:, place - 1]]
    return tokens


def batches(number=2, rows=32, seed=100):
    return [{"input_ids": sentences(rows, seed + index)} for index in range(number)]


def sequence_loss(model, batch):
    """(B,) mean loss of each sequence, without padding."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    real = torch.ones_like(losses) if mask is None else (mask[:, 1:] * mask[:, :-1]).to(losses.dtype)
    return (losses * real).sum(1) / real.sum(1).clamp_min(1)


def train(model, steps=120, rows=16, lr=1e-2):
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for step in range(steps):
        ids = sentences(rows, 10_000 + step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


def untrained(**settings):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "num_local_experts": N,
        "num_experts_per_tok": K,
        "router_aux_loss_coef": COEFFICIENT,
        "output_router_logits": True,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return MixtralForCausalLM(MixtralConfig(**{**sizes, **settings}))


def copy_of(model):
    return copy.deepcopy(model)
