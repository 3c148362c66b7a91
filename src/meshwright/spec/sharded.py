"""Sharded: a model over tensor-parallel ranks, as plain data: what is split how, what is whole and why, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Exchange", "Sharded", "ShardedModules", "ShardedParameter"]


@dataclass(frozen=True, kw_only=True)
class ShardedParameter:
    """A parameter of a module: its whole shape, and the one that each rank holds."""

    name: str
    shape: tuple[int, ...]
    rank_shapes: tuple[tuple[int, ...], ...]

    @property
    def even(self) -> bool:
        """Whether all ranks hold the same shape."""
        return len(set(self.rank_shapes)) <= 1


@dataclass(frozen=True, kw_only=True)
class ShardedModules:
    """Modules that are held alike: the same place in every block.

    Attributes:
        name: theirs, with `*` in the place of numbers that differ.
        count: how many there are.
        style: how they are divided.
        source: who says so: `annotation`, `published`, `corrected`, `known`, `completed` or `default`.
        parameters: those of one of them.
        whole_bytes: of all of them together in one process; 0 where their parameters are counted with other modules.
        rank_bytes: what each rank holds of them.
        notes: what it means, and why, in words.
    """

    name: str
    count: int
    style: str
    source: str
    parameters: tuple[ShardedParameter, ...]
    whole_bytes: int
    rank_bytes: tuple[int, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Collectives over the tensor-parallel ranks for one microbatch, at one place of the model.

    Attributes:
        name: the block, with `*` for its number, or a module outside of blocks.
        count: how many such there are.
        forward: collectives of one of them in the forward, by kind (`all-reduce`, ...).
        backward: in the backward.
        why: what they bring together.
    """

    name: str
    count: int
    forward: dict[str, int]
    backward: dict[str, int]
    why: str


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """A model over tensor-parallel ranks.

    Attributes:
        model: as it was named.
        kind: its class.
        tp: tensor-parallel ranks.
        sequence_parallel: whether activations between divided matrices are cut along the tokens.
        dtype: of the stored parameters.
        modules: all that hold parameters, in the model's order.
        parameters: of the whole model, tied ones once.
        rank_parameters: what each rank holds, copies and padding included.
        replicated_parameters: those that every rank holds whole.
        padding: elements on all ranks together that stand for nothing.
        whole_bytes: of the parameters in one process.
        rank_bytes: on each rank.
        exchanges: the collectives of one microbatch.
        shares: parameters (whole ones, or copies) whose gradients are summed over the ranks once a step.
    """

    model: str
    kind: str
    tp: int
    sequence_parallel: bool
    dtype: str
    modules: tuple[ShardedModules, ...]
    parameters: int
    rank_parameters: tuple[int, ...]
    replicated_parameters: int
    padding: int
    whole_bytes: int
    rank_bytes: tuple[int, ...]
    exchanges: tuple[Exchange, ...]
    shares: int

    @property
    def replicated_share(self) -> float:
        """The part of the model that every rank holds whole."""
        return self.replicated_parameters / self.parameters if self.parameters else 0.0

    @property
    def even(self) -> bool:
        """Whether all ranks hold equally much."""
        return len(set(self.rank_bytes)) <= 1
