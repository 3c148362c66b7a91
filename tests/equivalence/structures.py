"""Models as users write them: what passes between their blocks, what they are called with, which weights they train."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CASES", "Case", "Opaque"]

WIDTH, CLASSES = 6, 11


@dataclass(frozen=True)
class Carried:
    """What blocks hand on: tensors beside other things, one of them missing."""

    hidden: Tensor
    trace: tuple[Tensor, ...] = ()
    missing: Tensor | None = None
    depth: int = 0


class Named(NamedTuple):
    """The same as a named tuple."""

    hidden: Tensor
    depth: int


class Opaque:
    """A plain object with a tensor in it."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Block(nn.Module):
    """A block whose output is a `kind`; its own weights, a frozen one, one that is smaller than any group, buffers."""

    def __init__(self, kind: str, shared: nn.Linear | None = None) -> None:
        super().__init__()
        self.kind = kind
        self.inner = shared if shared is not None else nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.full((2,), 0.5))
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, WIDTH))
        self.register_buffer("wave", torch.linspace(0, 1, WIDTH).cos(), persistent=False)

    def forward(self, value: Any, mask: Tensor | None = None, *, twice: bool = False, times: int = 1) -> Any:
        hidden = value["hidden"] if isinstance(value, dict) else getattr(value, "hidden", value)
        if isinstance(value, list):
            hidden = value[0][0]
        for _ in range(times + twice):
            hidden = hidden + torch.tanh(self.inner(self.frozen(hidden)) * self.wave + self.shift)
        if mask is not None:
            hidden = hidden * mask[..., None]
        hidden = torch.cat([hidden[..., :3] * self.scale[0], hidden[..., 3:] * self.scale[1]], dim=-1)
        made: dict[str, Callable[[], Any]] = {
            "tensor": lambda: hidden,
            "view": lambda: hidden.view(hidden.shape),
            "dataclass": lambda: Carried(hidden, (hidden * 0.5,), None, 3),
            "named tuple": lambda: Named(hidden, 3),
            "dict": lambda: OrderedDict(hidden=hidden, depth=None),
            "nested list": lambda: [(hidden, 4), None],
            "opaque": lambda: Opaque(hidden),
        }
        return made[self.kind]()


class Model(nn.Module):
    """Blocks that hand on a `kind`, with weights tied across blocks, and a last module that is called twice."""

    def __init__(self, kind: str, *, options: dict[str, Any] | None = None, again: int = 0) -> None:
        super().__init__()
        self.again = again  # how many blocks run twice
        self.embedding = nn.Linear(WIDTH, WIDTH)
        first = Block(kind)
        self.blocks = nn.ModuleList([first, Block(kind), Block(kind, first.inner), Block(kind), Block("tensor")])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.options = options or {}

    def forward(self, inputs: Tensor, mask: Tensor | None = None, flag: bool = True, count: int = 1) -> Any:
        value: Any = self.embedding(torch.tanh(self.embedding(inputs)))
        for block in [*self.blocks[: self.again], *self.blocks]:
            value = block(value, mask if flag else None, times=count, **self.options)
        logits = self.head(value)
        return Carried(logits, (logits.mean(-1),))


@dataclass(frozen=True)
class Case:
    """A model, and what a batch of `rows` rows is."""

    model: Callable[[], nn.Module]
    batch: Callable[[Tensor, Tensor], Any]

    def rows(self, count: int, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(count, 3, WIDTH, generator=generator, dtype=torch.float64)
        return self.batch(inputs, torch.randint(0, CLASSES, (count, 3), generator=generator))


def loss(outputs: Carried, targets: Any) -> tuple[Tensor, int]:
    """Two losses of one model: of its logits, and of what else it returns."""
    labels = targets["labels"] if isinstance(targets, dict) else targets
    main = F.cross_entropy(outputs.hidden.flatten(0, 1), labels.flatten(), reduction="sum")
    return main + 0.1 * outputs.trace[0].square().sum(), labels.numel()


def _mask(inputs: Tensor) -> Tensor:
    return inputs[..., 0] > -0.5


CASES: dict[str, Case] = {
    kind: Case(lambda kind=kind: Model(kind), lambda inputs, labels: (inputs, labels))
    for kind in ("tensor", "view", "dataclass", "named tuple", "dict", "nested list")
}
CASES |= {
    "keywords": Case(
        lambda: Model("dataclass", options={"twice": True}),
        lambda inputs, labels: {"inputs": inputs, "mask": _mask(inputs), "flag": True, "count": 2, "labels": labels},
    ),
    "blocks twice": Case(lambda: Model("tensor", again=2), lambda inputs, labels: (inputs, labels)),
    "positional, None": Case(lambda: Model("dict"), lambda inputs, labels: ((inputs, None, False, 1), labels)),
    "keyword inputs, boolean": Case(
        lambda: Model("tensor"), lambda inputs, labels: ({"inputs": inputs, "mask": _mask(inputs)}, labels)
    ),
}
