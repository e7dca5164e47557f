"""TopKGate with copied weights gives the choices and weights of the routers in transformers."""

import pytest
import torch

from comet_moe.gates import TopKGate

pytest.importorskip("transformers", reason="needs the extra comet-moe[hf]")

from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

P, N, K, ROWS = 24, 16, 3, 200


def mixtral():
    config = MixtralConfig(hidden_size=P, num_local_experts=N, num_experts_per_tok=K)
    return MixtralTopKRouter(config), TopKGate(P, N, K)


def qwen(norm_topk_prob):
    config = Qwen3MoeConfig(
        hidden_size=P, num_experts=N, num_experts_per_tok=K, norm_topk_prob=norm_topk_prob
    )
    return Qwen3MoeTopKRouter(config), TopKGate(P, N, K, normalize="selected" if norm_topk_prob else "all")


def deepseek(norm_topk_prob=True, groups=4, top_groups=2, scale=2.5, bias_update=0.0):
    config = DeepseekV3Config(
        hidden_size=P,
        n_routed_experts=N,
        num_experts_per_tok=K,
        n_group=groups,
        topk_group=top_groups,
        routed_scaling_factor=scale,
        norm_topk_prob=norm_topk_prob,
    )
    router = DeepseekV3TopkRouter(config)
    gate = TopKGate(
        P,
        N,
        K,
        normalize="selected" if norm_topk_prob else "all",
        score="sigmoid",
        bias_update=bias_update,
        groups=groups,
        top_groups=top_groups,
        scale=scale,
    )
    bias = 0.3 * torch.randn(N)
    router.e_score_correction_bias.copy_(bias)
    gate.balance_bias.copy_(bias)
    return router, gate


ROUTERS = {
    "mixtral": mixtral,
    "qwen3-moe": lambda: qwen(norm_topk_prob=True),
    "qwen3-moe, not normalised": lambda: qwen(norm_topk_prob=False),
    "deepseek-v3": deepseek,
    "deepseek-v3, balanced": lambda: deepseek(bias_update=0.001),
    "deepseek-v3, not normalised": lambda: deepseek(norm_topk_prob=False),
    "deepseek-v3, one group": lambda: deepseek(groups=1, top_groups=1, scale=1.0),
    "deepseek-v3, small groups": lambda: deepseek(groups=8, top_groups=3, scale=0.5),
}


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("training", [True, False])
def test_weights_are_those_of_the_router_in_transformers(name, training):
    router, gate = ROUTERS[name]()
    with torch.no_grad():
        torch.nn.init.normal_(router.weight)
        gate.weight.copy_(router.weight)
    x = torch.randn(ROWS, P)
    logits, weights, experts = router(x)
    wanted = torch.zeros(ROWS, N).scatter(-1, experts, weights)
    routing = gate.train(training)(x)
    torch.testing.assert_close(routing.weights, wanted, atol=1e-6, rtol=0)
    torch.testing.assert_close(routing.logits, logits)
    with torch.no_grad():
        torch.testing.assert_close(gate(x).weights, wanted, atol=1e-6, rtol=0)
    values = torch.randn(N)
    (gradient,) = torch.autograd.grad((routing.weights * values).sum(), gate.weight)
    (wanted_gradient,) = torch.autograd.grad((wanted * values).sum(), router.weight)
    # Sums over 200 rows of terms of size 1, in another order.
    torch.testing.assert_close(gradient, wanted_gradient, atol=1e-4, rtol=1e-4)
