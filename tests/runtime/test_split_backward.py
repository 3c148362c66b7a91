"""The two halves of a backward make the gradients of a whole one, whatever leads to what."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from meshwright.runtime.pp.split import backward_input


class Parts(nn.Module):
    """Two results: one of the input, one of weights alone, which may lead to the first one too."""

    def __init__(self, *, meet: bool) -> None:
        super().__init__()
        self.first, self.second, self.bias = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.meet = meet

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        alone = torch.tanh(self.bias(torch.ones(3)))
        hidden = torch.tanh(self.first(hidden))
        return self.second(hidden) + (alone if self.meet else 0.0), alone


def _gradients(module: nn.Module, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    found = [tensor.grad for tensor in (*module.parameters(), *tensors)]
    module.zero_grad()
    for tensor in tensors:
        tensor.grad = None
    return found


@pytest.mark.parametrize("meet", [False, True])
@pytest.mark.parametrize("start", ["input", "first weights", "unused weights"])
def test_halves_add_up(start: str, meet: bool) -> None:
    torch.manual_seed(0)
    module, unused = Parts(meet=meet).double(), nn.Parameter(torch.ones(2))
    given = torch.randn(2, 3, dtype=torch.float64, requires_grad=start == "input")
    gradients = [torch.randn(2, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)]
    inputs = [given] if start == "input" else []
    torch.set_default_dtype(torch.float64)
    try:
        torch.autograd.backward(module(given), gradients)
        expected = _gradients(module, inputs)
        roots = [get_gradient_edge(result) for result in module(given)]
    finally:
        torch.set_default_dtype(torch.float32)
    now = {"input": [], "first weights": list(module.first.parameters()), "unused weights": [unused]}[start]
    later = [weight for weight in module.parameters() if not any(weight is one for one in now)]
    deferred = backward_input(roots, gradients, inputs, later, now)
    at_once = {*now, *(module.bias.parameters() if meet else ())}  # used in two places, these need not wait
    assert all((weight.grad is None) == (weight not in at_once) for weight in module.parameters())
    deferred.run(later[::2])
    deferred.run(later[1::2])
    for found, whole in zip(_gradients(module, inputs), expected, strict=True):
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-14)
