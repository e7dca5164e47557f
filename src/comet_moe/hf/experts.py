"""The sparse dispatch of this library for the mixture-of-experts models of transformers.

Importing ``comet_moe.hf`` registers it: ``from_pretrained(..., experts_implementation="comet_moe")``, or
``model.set_experts_implementation("comet_moe")``. Pairs of weight 0 are not computed: padding, and the slots
that a gate leaves unused.

Shapes: N tokens, k choices, n experts, p features, h hidden units.
"""

from typing import Any, cast

import torch
from torch import Tensor

from comet_moe.exceptions import needs_extra
from comet_moe.experts import Experts
from comet_moe.experts.grouped_linear import grouped_linear
from comet_moe.kernels.mix import Epilogue
from comet_moe.kernels.plan import plan_from_pairs
from comet_moe.kernels.swiglu import swiglu
from comet_moe.mixture.dispatch import run_sparse

with needs_extra("hf", "comet_moe.hf"):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS


def sparse_experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Mix the selected experts of ``module``, a module of transformers: (N, p), (N, k), (N, k) -> (N, p)."""
    tokens, k = top_k_index.shape
    sample = torch.arange(tokens, device=hidden_states.device).repeat_interleave(k)
    expert, weight = top_k_index.flatten(), top_k_weights.reshape(-1, 1)
    # With expert parallelism, experts beyond the last are in other processes.
    runs = (expert < module.num_experts) & (weight.squeeze(1) != 0)
    plan = plan_from_pairs(sample[runs], expert[runs], weight[runs], tokens, module.num_experts)
    mixed = run_sparse(cast(Experts, _TransformersExperts(module)), hidden_states, plan)
    return mixed.squeeze(1).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register("comet_moe", sparse_experts_forward)


def _is_swiglu(module: Any) -> bool:
    """Whether the experts of ``module`` multiply silu of the first half by the second, as most models do."""
    is_default = getattr(type(module)._apply_gate, "__name__", "") == "_default_apply_gate"
    return is_default and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")


class _TransformersExperts:
    """The experts of a module of transformers, as :func:`run_sparse` needs them; nothing is copied."""

    epilogue = Epilogue()

    def __init__(self, module: Any):
        self.module = module

    def __call__(self, rows: Tensor, counts: list[int]) -> Tensor:
        """(M, p) -> (M, p)."""
        module = self.module
        if module.has_gate:
            gate_up = self._layer(rows, "gate_up_proj", counts)
            hidden = swiglu(gate_up) if _is_swiglu(module) else module._apply_gate(gate_up)
        else:
            hidden = module.act_fn(self._layer(rows, "up_proj", counts))
        out = self._layer(hidden, "down_proj", counts)
        return module.post_expert_norm(out) if getattr(module, "has_post_expert_norm", False) else out

    def _layer(self, rows: Tensor, name: str, counts: list[int]) -> Tensor:
        weight: Tensor = getattr(self.module, name)
        if self.module.is_transposed:
            weight = weight.transpose(1, 2)
        has_bias = self.module.has_bias
        bias = getattr(self.module, f"{name}_bias") if has_bias else weight.new_zeros(weight.shape[:2])
        return grouped_linear(rows, weight, bias, counts)
