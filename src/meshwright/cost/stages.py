"""Stages: which blocks each pipeline stage holds. Every block is on exactly one stage; none is ever left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from msgspec import Struct

from meshwright.errors import ConfigError
from meshwright.schedule import FOLDED
from meshwright.spec import BlockSpec, ModelSpec, Strategy, even_layers

__all__ = ["Stage", "cut", "shard_group"]


def shard_group(strategy: Strategy) -> int:
    """Ranks over which ZeRO cuts a parameter: the shard group, and the ranks of context parallelism inside it."""
    return strategy.shard * strategy.cp if strategy.zero else 1


class Stage(Struct, frozen=True):
    """One stage: its number over all ranks, its blocks in forward order, and what the loss keeps where it is the last.

    `copied_parameters` counts elements of a tied weight that another stage owns: this stage holds a copy. Where that
    other stage is on the same rank, the copy (`borrowed_parameters`) has no optimizer states. `around_bytes` is kept
    once per microbatch by what stands between blocks, on every stage but the first, whose embedding tells of it.
    `alike` are the kinds of its blocks (`ModelSpec.kinds`), which stages that cost the same share; empty where it holds
    a copy.
    """

    index: int
    blocks: tuple[BlockSpec, ...]
    loss_bytes: int = 0
    copied_parameters: int = 0
    borrowed_parameters: int = 0
    around_bytes: int = 0
    alike: tuple[int, ...] = ()

    @property
    def parameters(self) -> int:
        """Elements that this stage owns: summed over stages they are the model's."""
        return sum(block.parameters for block in self.blocks) - self.copied_parameters


def cut(model: ModelSpec, strategy: Strategy) -> tuple[Stage, ...]:
    """The stages of a strategy in forward order: its own `stages`, or the layers spread evenly.

    Raises:
        ConfigError: there are fewer layers than stages, or `stages` does not add up to the model's layers.
    """
    count, layers = strategy.pp * strategy.virtual_stages, len(model.layers)
    sizes = strategy.stages or even_layers(layers, count)
    if sum(sizes) != layers:
        raise ConfigError(
            f"stages={','.join(map(str, sizes))} hold {sum(sizes)} layers, but {model.name} has {layers}",
            why="every layer is on exactly one stage",
            fix=f"let stages add up to {layers}, or leave stages out",
        )
    if min(sizes) < 1:
        raise ConfigError(
            f"{count} stages for the {layers} layers of {model.name}",
            why="every stage needs a layer (pp x virtual_stages stages)",
            fix=f"set pp x virtual_stages to {layers} or less",
        )
    places = [index for index, block in enumerate(model.blocks) if block.kind == "layer"]
    starts = [0, *(places[sum(sizes[:stage])] for stage in range(1, count))]
    ends = [*starts[1:], len(model.blocks)]
    around = sum(block.fixed_bytes for block in model.blocks if block.kind == "embedding")
    stages = []
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        blocks = model.blocks[start:end]
        # A schedule that is laid out as a V has its first and its last stage on one rank: it needs a copy only where
        # ZeRO shards each stage's parameters.
        folded = strategy.schedule in FOLDED and index == count - 1
        apart = count > 1 and not (folded and shard_group(strategy) == 1)
        own, copied = _with_copies(blocks, model) if apart else (tuple(blocks), 0)
        stages.append(
            Stage(
                index,
                own,
                loss_bytes=model.loss_bytes if index == count - 1 else 0,
                copied_parameters=copied,
                borrowed_parameters=copied if folded else 0,
                around_bytes=around if index else 0,
                alike=() if copied else model.kinds[start:end],
            )
        )
    return tuple(stages)


def _with_copies(blocks: Sequence[BlockSpec], model: ModelSpec) -> tuple[tuple[BlockSpec, ...], int]:
    """Blocks with the tied weights that they use and that lie on another stage, as parameters of their own."""
    if not any(block.tied_parameters for block in blocks):
        return tuple(blocks), 0
    names = {block.name for block in blocks}
    elsewhere = [block for block in model.blocks if block.name not in names]
    found, copied = [], 0
    for block in blocks:
        tied = block.tied_parameters
        shapes = [shape for other in elsewhere for shape in other.tensors if tied and math.prod(shape) == tied]
        owner_is_away = bool(shapes) or any(tied and other.parameters >= tied for other in elsewhere)
        if tied and owner_is_away and not _owned(blocks, tied):
            shape = shapes[0] if shapes else (tied,)
            block = replace(
                block,
                parameters=block.parameters + tied,
                tied_parameters=0,
                tensors=(*block.tensors, shape) if block.tensors or not block.parameters else (),
            )
            copied += tied
        found.append(block)
    return tuple(found), copied


def _owned(blocks: Sequence[BlockSpec], size: int) -> bool:
    return any(math.prod(shape) == size for block in blocks for shape in block.tensors)
