"""What a run leaves behind for comparison: all tensors by their global name, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

__all__ = ["Piece", "Run", "Step", "join", "piece"]

T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """A rank's part of a tensor: the `index`-th along `dim`. Ranks with the same `replica` hold one whole tensor."""

    tensor: Tensor
    dim: int
    index: int
    replica: tuple[int, ...]


@dataclass
class Step:
    """One optimizer step.

    `gradients` are those of the loss (all sums over the global weight) before clipping, None where a parameter got
    none; `updates` are the differences that the optimizer step made to the parameters. Ranks return pieces of tensors;
    after `join` all are whole.
    """

    loss: float
    weight: float
    grad_norm: float
    clipped_norm: float
    gradients: dict[str, Tensor | None]
    updates: dict[str, Tensor]
    collectives: dict[str, int] = field(default_factory=dict)

    @property
    def report(self) -> tuple[float, float, float, float]:
        """What every rank must report alike."""
        return self.loss, self.weight, self.grad_norm, self.clipped_norm


@dataclass
class Run:
    """All steps of a run, and the parameters that it began with."""

    initial: dict[str, Tensor]
    steps: list[Step]


def piece(tensor: Tensor) -> Tensor | Piece:
    """A copy of this rank's part of a tensor, or of the whole where it has that. No collective is called."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    [(at, placement)] = [(at, p) for at, p in enumerate(tensor.placements) if isinstance(p, Shard)]
    replica = tuple(c for place, c in enumerate(coordinate) if place != at)
    return Piece(tensor.to_local().clone(), placement.dim, coordinate[at], replica)


def join(runs: Sequence[Run]) -> list[Run]:
    """The runs of all ranks with whole tensors, put together from the pieces of each replica.

    Ranks of one replica get the same dictionaries.
    """
    replicas: dict[object, list[Run]] = {}
    for rank, run in enumerate(runs):
        first: object = next(iter(run.initial.values()))
        replicas.setdefault(first.replica if isinstance(first, Piece) else rank, []).append(run)
    joined: dict[int, Run] = {}
    for members in replicas.values():
        initial = _whole([run.initial for run in members])
        steps = [
            replace(
                parts[0],
                gradients=_whole([part.gradients for part in parts]),
                updates=_whole([part.updates for part in parts]),
            )
            for parts in zip(*(run.steps for run in members), strict=True)
        ]
        for run in members:
            own = [
                replace(step, gradients=whole.gradients, updates=whole.updates)
                for step, whole in zip(run.steps, steps, strict=True)
            ]
            joined[id(run)] = Run(initial, own)
    return [joined[id(run)] for run in runs]


def _whole(parts: Sequence[Mapping[str, T]]) -> dict[str, T]:
    return {name: _put_together([part[name] for part in parts]) for name in parts[0]}


def _put_together(values: Sequence[T]) -> T:
    first = values[0]
    if not isinstance(first, Piece):
        return first
    pieces = sorted((value for value in values if isinstance(value, Piece)), key=lambda part: part.index)
    assert [part.index for part in pieces] == list(range(len(values))), "a rank has no gradient where others have one"
    return torch.cat([part.tensor for part in pieces], dim=first.dim)  # type: ignore[return-value]  # whole, where the others are pieces
