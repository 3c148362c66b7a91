"""What a run leaves behind for comparison: all tensors by their global name, on the CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.runtime.boxes import Box, Held
from meshwright.runtime.mesh import RankMesh

__all__ = ["Piece", "Run", "Step", "join", "piece"]


@dataclass(frozen=True)
class Piece:
    """A rank's part of a tensor: boxes of the whole one. Ranks with the same `replica` hold all of it together.

    Some of them may hold the same: copies over tensor-parallel ranks.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[Box, Tensor], ...]
    replica: tuple[int, ...]

    def __sub__(self, other: Piece) -> Piece:
        """The difference, part by part."""
        pairs = zip(self.parts, other.parts, strict=True)
        return replace(self, parts=tuple((box, mine - theirs) for (box, mine), (_, theirs) in pairs))


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


def piece(held: Held, mesh: RankMesh) -> Tensor | Piece:
    """A copy of this rank's part of a tensor, or of the whole where it has that. No collective is called."""
    tensor = held.tensor.detach()
    if not isinstance(tensor, DTensor) and held.cut is None:
        return tensor.clone()
    replica: tuple[int, ...] = (mesh.dp_rank,)
    if isinstance(tensor, DTensor):
        replica = tuple(tensor.device_mesh.get_local_rank(dim) for dim in range(tensor.device_mesh.ndim - 1))
    if held.cut is None:
        replica = (*replica, mesh.tp_rank)  # each tensor-parallel rank has all of it
    return Piece(held.shape, tuple((box, part.clone()) for box, part in held.pieces()), replica)


def join(runs: Sequence[Run]) -> list[Run]:
    """The runs of all ranks with whole tensors, each put together from the pieces of the rank's replica.

    Where several ranks hold the same part, each sees its own copy. Ranks that see the same get the same dictionaries.
    """
    joined: dict[object, Run] = {}
    keys = [_sight(runs, rank) for rank in range(len(runs))]
    for rank, (run, key) in enumerate(zip(runs, keys, strict=True)):
        if key not in joined:
            steps = [
                replace(
                    step,
                    gradients=_whole([other.steps[number].gradients for other in runs], rank),
                    updates=_whole([other.steps[number].updates for other in runs], rank),
                )
                for number, step in enumerate(run.steps)
            ]
            joined[key] = Run(_whole([other.initial for other in runs], rank), steps)
    return [_with_own_reports(run, joined[key]) for run, key in zip(runs, keys, strict=True)]


def _with_own_reports(run: Run, seen: Run) -> Run:
    steps = [
        replace(step, gradients=whole.gradients, updates=whole.updates)
        for step, whole in zip(run.steps, seen.steps, strict=True)
    ]
    return Run(seen.initial, steps)


def _sight(runs: Sequence[Run], rank: int) -> tuple[object, ...]:
    """What tells ranks apart that see other tensors: of each its replica, or the rank where there are copies of it."""
    found: list[object] = [frozenset(runs[rank].initial)]
    for name, value in runs[rank].initial.items():
        own: Any = value
        if not isinstance(own, Piece):
            return (rank,)
        held = sum(
            part.numel() for other in _replica([run.initial for run in runs], name, own) for _, part in other.parts
        )
        found.append(own.replica if held == math.prod(own.shape) else rank)
    return tuple(found)


def _replica(values: Sequence[Mapping[str, Any]], name: str, own: Piece) -> list[Piece]:
    """All pieces of the replica to which a piece belongs."""
    pieces = [value[name] for value in values if name in value]
    return [other for other in pieces if isinstance(other, Piece) and other.replica == own.replica]


def _whole(values: Sequence[Mapping[str, Any]], rank: int) -> dict[str, Any]:
    """Whole tensors as a rank sees them; those of other stages as the first rank that holds them does."""
    whole = {}
    for name in dict.fromkeys(name for value in values for name in value):
        seer = rank if name in values[rank] else next(i for i, value in enumerate(values) if name in value)
        own = values[seer][name]
        whole[name] = _put_together([own, *_replica(values, name, own)]) if isinstance(own, Piece) else own
    return whole


def _put_together(pieces: Sequence[Piece]) -> Tensor:
    """The first pieces lie above the last."""
    first = next(part for piece in pieces for _, part in piece.parts)
    whole = first.new_empty(pieces[0].shape)
    seen = torch.zeros(pieces[0].shape, dtype=torch.bool)
    for held in reversed(pieces):
        for box, part in held.parts:
            whole[box], seen[box] = part, True
    assert seen.all(), "a rank has no gradient where others have one"
    return whole
