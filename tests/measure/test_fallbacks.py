"""Modules that cannot run without data: they are measured in another way, and the description says so."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.measure import trace

WIDTH, TOKENS, EXPERTS = 8, 7, 3


class Router(nn.Module):
    """Every token goes to one of three experts; how many go to each is asked of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({f"expert{i}": nn.Linear(WIDTH, WIDTH, bias=False) for i in range(EXPERTS)})

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts.values()):
            rows = (chosen == number).nonzero().flatten()
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, None])
        return x + out.view_as(x)


class Asking(nn.Module):
    """Plain layers; what happens before them depends on the data."""

    def __init__(self, *, asks: bool = True) -> None:
        super().__init__()
        self.asks = asks
        self.enter = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.leave = nn.Linear(WIDTH, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.enter(ids)
        if self.asks and int(ids.max()) > 10**6:
            x = -x
        for layer in self.layers:
            x = x + layer(x).tanh()
        out: Tensor = self.leave(x)
        return out


@torch.library.custom_op("meshwright_tests::twice", mutates_args=())
def _twice(x: Tensor) -> Tensor:
    return 2 * x


_twice.register_autograd(lambda ctx, grad: 2 * grad)


class Foreign(nn.Module):
    """Uses an operation of which only the real run is known."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _twice(self.inner(x))
        return out


class Outside(nn.Module):
    """Leaves PyTorch on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        factor = float(np.abs(x.detach().numpy()).mean())
        out: Tensor = self.inner(x) * factor
        return out


class Picky(nn.Module):
    """Runs only on values that nobody can guess."""

    def __init__(self, hidden: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x)) * {42.0: 1.0}[x.flatten()[0].item()]
        return out


def _sequence(kind: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), kind(), nn.Linear(WIDTH, WIDTH))


def test_a_router_is_measured_on_random_values() -> None:
    spec = trace(_sequence(Router), torch.zeros(2, TOKENS, WIDTH))
    assert "1 (Router) and its like measured on random values (DynamicOutputShapeException" in spec.source
    # Each token passes the gate and one expert, whichever it is.
    wanted = 2 * TOKENS * WIDTH * (EXPERTS + WIDTH)
    assert [layer.forward_flops for layer in spec.layers][1:3] == [wanted, wanted]
    assert spec.layers[1].backward_flops == 2 * wanted
    assert spec.layers[1].saved_bytes["full"] == 4 * TOKENS * WIDTH
    assert spec.layers[1].saved_bytes["none"] > 4 * TOKENS * WIDTH * 3
    assert spec.layers[1].parameters == EXPERTS * WIDTH + EXPERTS * WIDTH * WIDTH


def test_data_that_is_asked_for_outside_the_blocks_is_real_there() -> None:
    ids = torch.zeros(2, TOKENS, dtype=torch.int64)
    plain, asking = trace(Asking(asks=False), ids), trace(lambda: Asking(), ids)
    assert "outside the blocks measured on real tensors (DataDependentOutputException" in asking.source
    assert "real" not in plain.source
    for name in ("parameters", "forward_flops", "backward_flops", "saved_bytes", "alive_bytes", "output_bytes"):
        for mine, other in zip(asking.blocks, plain.blocks, strict=True):
            assert getattr(mine, name) == getattr(other, name), (mine.name, name)


@pytest.mark.parametrize("kind", [Foreign, Outside])
def test_what_only_runs_for_real_is_run_for_real(kind: type[nn.Module]) -> None:
    spec = trace(_sequence(kind), torch.zeros(2, TOKENS, WIDTH))
    assert "measured on random values" in spec.source
    assert spec.layers[1].forward_flops == spec.layers[0].forward_flops == 2 * TOKENS * WIDTH * WIDTH
    assert spec.layers[1].backward_flops == 2 * spec.layers[1].forward_flops


def test_what_does_not_run_on_random_values_is_counted_from_shapes() -> None:
    spec = trace(_sequence(Picky), torch.zeros(2, TOKENS, WIDTH))
    assert "counted from the shapes of parameters, as it does not run on random values (KeyError" in spec.source
    assert spec.layers[1].forward_flops == 2 * TOKENS * 2 * WIDTH * WIDTH
    assert spec.layers[2].saved_bytes == {
        "none": 4 * TOKENS * WIDTH * 5,  # the block's input, and inputs and outputs of both matrices
        "selective": 4 * TOKENS * WIDTH * 3,
        "full": 4 * TOKENS * WIDTH,
    }


def test_what_is_too_large_to_run_is_counted_from_shapes() -> None:
    hidden = 2**26 + 1  # 4 GiB and more, which are never allocated
    spec = trace(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Picky(hidden)), torch.zeros(2, TOKENS, WIDTH))
    assert "being too large (4.0 GiB) to run" in spec.source
    assert spec.layers[1].forward_flops == 2 * TOKENS * 2 * WIDTH * hidden
    assert spec.parameters == WIDTH * WIDTH + WIDTH + 2 * WIDTH * hidden


def test_an_error_that_has_nothing_to_do_with_data_is_told() -> None:
    with pytest.raises(ConfigError, match="does not run on the example inputs in 1") as caught:
        trace(_sequence(Router), torch.zeros(2, WIDTH))
    assert "dim" in caught.value.why.lower() or "IndexError" in caught.value.why
