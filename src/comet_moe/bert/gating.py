"""The gate of a layer: a gate of the library, by token or by sentence, with load balance and local search.

Shapes: B sentences, T tokens, p features, E experts.
"""

from torch import Tensor

from comet_moe.bert.configuration import CometBertConfig
from comet_moe.gates import Gate, GateWrapper, build_gate
from comet_moe.gates.registry import DENSE_KINDS, find_gate
from comet_moe.local_search import Permutation, PermutedGate
from comet_moe.routing import Routing


def build_layer_gate(config: CometBertConfig, layer: int) -> Gate:
    """The gate that ``config`` describes, for ``layer`` (from 0)."""
    gate = _build_gate(config, layer)
    if config.route_by == "sentence":
        gate = SentenceGate(gate)
    if not config.uses_search:
        return gate
    search = Permutation(
        config.num_experts,
        steps=config.search_steps,
        zeta=config.zeta,
        tau=(config.tau[0], config.tau[1]),
        iterations=(config.sinkhorn_iterations[0], config.sinkhorn_iterations[1]),
        gumbel=config.gumbel,
        lr_factor=config.search_lr_factor,
    )
    return PermutedGate(gate, search)


def _build_gate(config: CometBertConfig, layer: int) -> Gate:
    p, n = config.hidden_size, config.num_experts
    names = () if config.kind in DENSE_KINDS else find_gate(config.kind).settings
    return build_gate(
        config.kind,
        p,
        n,
        num_keys=config.vocab_size,
        seed=config.hash_seed + layer,
        load_balance=config.load_balance,
        z_loss=config.z_loss,
        information=config.information,
        warmup_steps=config.warmup_steps,
        **{name: value for name in names if (value := getattr(config, name)) is not None},
    )


class SentenceGate(GateWrapper):
    """Routes all tokens of a sentence as ``gate`` routes the mean of its unmasked tokens.

    Args:
        gate: any but a hash gate.
    """

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """Route ``x`` (B, T, p); ``mask`` (B, T) is False where a token is padding."""
        sentences, tokens = x.shape[:2]
        if mask is None:
            routing = self.gate(x.mean(1))
        else:
            total = (x * mask.unsqueeze(-1)).sum(1)
            routing = self.gate(total / mask.sum(1, keepdim=True).clamp_min(1), mask=mask.any(1))

        def for_each_token(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.unsqueeze(1).expand(-1, tokens, *values.shape[1:])

        token_routing = Routing(
            weights=for_each_token(routing.weights),
            aux_loss=routing.aux_loss,
            logits=for_each_token(routing.logits),
            selectors=for_each_token(routing.selectors),
            contributions=for_each_token(routing.contributions),
        ).masked(mask)
        counted = routing.gate_flops
        token_routing.gate_flops = self.gate.flops() * sentences if counted is None else counted
        return token_routing
