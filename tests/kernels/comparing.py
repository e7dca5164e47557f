"""Compares a compiled loop with the torch version beside it, in values and gradients."""

import torch

DOUBLE = {"dtype": torch.float64}


def gradients(function, *inputs):
    leaves = [value.clone().requires_grad_() for value in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(5)
    loss = sum((o * torch.rand(o.shape, generator=generator, **DOUBLE)).sum() for o in outputs)
    loss.backward()
    return [o.detach() for o in outputs] + [
        torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves
    ]


def assert_same(fast, plain, *inputs):
    for got, wanted in zip(gradients(fast, *inputs), gradients(plain, *inputs), strict=True):
        scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
        torch.testing.assert_close(got, wanted, atol=1e-10 * scale, rtol=0)
