"""ModelSpec: a model as an ordered list of blocks with what each costs, known without building it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

from meshwright.errors import ConfigError
from meshwright.spec.layout import Layout

__all__ = ["AttentionWork", "BlockCollective", "BlockSpec", "ModelSpec", "Product", "shard_dim"]


def shard_dim(shape: tuple[int, ...], group: int) -> int:
    """The dim on which ZeRO cuts a tensor over a shard group: the first.

    A stack of matrices (experts) with a number that the group does not divide is cut on the second dim where that one
    divides: padding a few experts up to many ranks would multiply them.
    """
    stacked = len(shape) >= 3 and shape[0] % group != 0 and shape[1] % group == 0
    return 1 if stacked else 0


class Product(NamedTuple):
    """A matrix product of the forward: rows x inner times inner x columns, `groups` of them side by side.

    `rows` counts those of one sequence on this rank, of all groups together: each group has rows / groups (experts), so
    that flops are 2 x rows x inner x columns. `weighted`: one factor is a parameter, so that its part of a split
    backward can wait; without, both factors are activations. `experts`: its rows are tokens that a router sent here.
    """

    rows: int
    inner: int
    columns: int
    groups: int = 1
    weighted: bool = True
    experts: bool = False

    @property
    def flops(self) -> int:
        """Two per multiply-add, forward."""
        return 2 * self.rows * self.inner * self.columns


class AttentionWork(NamedTuple):
    """What one kernel that stores no scores computes: flops over all pairs, forward and backward; `causal_flops` of the
    forward are those that its mask lets it skip. `channels` per head."""

    flops: int
    backward_flops: int
    causal_flops: int
    channels: int


@dataclass(frozen=True, kw_only=True)
class BlockCollective:
    """A collective that model parallelism adds to a block: `forward` and `backward` times per microbatch, and again in
    backward `selective` or `full` times where the block recomputes so.

    `kind` is all_reduce, all_gather, reduce_scatter, all_to_all or send; `dimension` the mesh dimension it runs over;
    `message_bytes` the whole, unsharded message for one sequence.
    """

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
    dimension: Literal["tp", "cp", "ep"]
    message_bytes: int
    forward: int = 1
    backward: int = 1
    selective: int = 0
    full: int = 0

    def again(self, policy: str) -> int:
        """Times per microbatch under a recompute policy besides `forward` and `backward`."""
        return {"selective": self.selective, "full": self.full}.get(policy, 0)


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """One block: what ZeRO can gather as a unit and a pipeline can place on a stage.

    Figures are those of one rank under the model's `Layout`, for one sequence, and grow linearly with the number of
    sequences in a microbatch; `fixed_bytes` alone does not.

    `parameters` counts elements that this block owns on this rank (a tied weight belongs to the first block that uses
    it); `tied_parameters` counts those it uses but another block owns. `tensors` lists the shapes of the owned
    parameters: sharding cuts each by itself, so that padding is exact; without it the block is one flat tensor.
    `frozen` and `experts` are those of the tensors that get no gradient, and those that expert parallelism lays over
    ranks (ZeRO shards them over a group that is smaller by the factor ep); both are listed in `tensors` too. `shares`
    are those whose gradients the tensor-parallel ranks sum once a step, as they lie in its message.
    `forward_flops` counts two per multiply-add of matrix products and of attention over all S x S pairs;
    `causal_flops` is what of it a causal kernel may skip; `backward_flops` counts the backward without recompute
    (left out: twice the forward). `moved_bytes` are bytes read and written by the forward's operations.
    `saved_bytes` maps a recompute policy to the bytes kept from forward to backward, each storage once, and
    `alive_bytes` to what is alive while the block's own backward runs: what was kept and what is computed again (left
    out: as much as without recompute). `fixed_bytes` is kept once per microbatch, whatever its number of sequences.
    `output_bytes` is what leaves the block. `backward_extra_bytes` is the largest amount alive at a block boundary of
    the backward pass besides what was saved (the gradient that enters the block; for the head the gradient of the
    logits). `waiting_bytes` is what waits between the two halves of a split backward: the inputs of matrix products
    and norms with weights and the gradients of their outputs, each storage once. `weight_bytes` is the part of `moved_bytes` that
    reads parameters: it does not grow with the number of sequences. `buffer_bytes` are buffers, such as rotary
    frequencies.

    What takes time: `products` and `attention` of the forward (their flops are `forward_flops`); `element_bytes` and
    `backward_element_bytes`, what all other operations read and write, forward and backward; `kernels` and
    `backward_kernels`, how many operations are started, of every kind. A block without `products` is known by its flops
    alone.
    """

    name: str
    kind: Literal["embedding", "layer", "head"]
    parameters: int
    forward_flops: int
    moved_bytes: int
    saved_bytes: dict[str, int]
    output_bytes: int
    backward_extra_bytes: int = 0
    tied_parameters: int = 0
    tensors: tuple[tuple[int, ...], ...] = ()
    alive_bytes: dict[str, int] = field(default_factory=dict)
    fixed_bytes: int = 0
    frozen: tuple[tuple[int, ...], ...] = ()
    experts: tuple[tuple[int, ...], ...] = ()
    shares: tuple[tuple[int, ...], ...] = ()
    buffer_bytes: int = 0
    causal_flops: int = 0
    backward_flops: int = -1
    weight_bytes: int = 0
    waiting_bytes: int = 0
    collectives: tuple[BlockCollective, ...] = ()
    products: tuple[Product, ...] = ()
    attention: tuple[AttentionWork, ...] = ()
    element_bytes: int = 0
    backward_element_bytes: int = 0
    kernels: int = 0
    backward_kernels: int = 0

    def __post_init__(self) -> None:
        if self.parameters < 0 or self.forward_flops < 0 or min(self.saved_bytes.values(), default=0) < 0:
            raise ConfigError(f"block {self.name}: a negative count", fix="describe the block with counts of 0 or more")
        if self.backward_flops < 0:
            object.__setattr__(self, "backward_flops", 2 * self.forward_flops)
        held = sum(math.prod(shape) for shape in self.tensors)
        if self.tensors and held != self.parameters:
            raise ConfigError(
                f"block {self.name}: its tensors hold {held} elements, but parameters={self.parameters}",
                fix="list the shape of every parameter that the block owns",
            )

    def named(self, name: str) -> BlockSpec:
        """The same block under another name: a copy without the checks, as a model may have a hundred of them."""
        made = object.__new__(BlockSpec)
        made.__dict__.update(self.__dict__, name=name)
        return made

    def share(self, group: int, *, expert_group: int = 0, trained: bool = False, whole: bool = False) -> int:
        """Elements of this block that each rank of a shard group stores, padding included.

        Each tensor is cut (`shard_dim`) into `group` equal pieces, the last ones padded (`torch.chunk`, as
        `fully_shard`).

        Args:
            group: ranks over which a tensor is cut.
            expert_group: ranks over which each tensor of `experts` is cut; 0 means as many.
            trained: leave out frozen tensors.
            whole: what all ranks of the groups store together.
        """
        tensors = self.tensors or ((self.parameters,),)
        return _share(tensors, self.experts, self.frozen if trained else (), group, expert_group or group, whole)

    def summed(self, group: int) -> int:
        """Elements of `shares` that each rank of a shard group has."""
        return _share(self.shares, (), (), group, group, False)

    @property
    def trained_parameters(self) -> int:
        """Parameters of this block that get a gradient."""
        return self.parameters - sum(math.prod(shape) for shape in self.frozen)


@lru_cache(maxsize=4096)  # a model repeats its layers, a search repeats its groups
def _share(
    tensors: tuple[tuple[int, ...], ...],
    experts: tuple[tuple[int, ...], ...],
    left_out: tuple[tuple[int, ...], ...],
    group: int,
    expert_group: int,
    whole: bool,
) -> int:
    plain, laid, without = Counter(tensors), Counter(experts), Counter(left_out)
    plain -= laid + (without - laid)
    laid -= without
    cuts = ((plain, group), (laid, expert_group))
    return sum(
        count * _part(shape, ranks) * (ranks if whole else 1) for held, ranks in cuts for shape, count in held.items()
    )


def _part(shape: tuple[int, ...], ranks: int) -> int:
    dim = shard_dim(shape, ranks)
    return -(-shape[dim] // ranks) * (math.prod(shape) // max(shape[dim], 1))


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model: its blocks in forward order, as one rank sees them under a layout.

    `loss_bytes` is what the loss keeps for backward, per sequence, besides the logits; `loss_element_bytes` and
    `backward_loss_element_bytes` are what it reads and writes, forward and backward. `source` says where the figures
    come from: a `config.json`, a trace.
    """

    name: str
    layout: Layout
    blocks: tuple[BlockSpec, ...]
    loss_bytes: int = 0
    loss_element_bytes: int = 0
    backward_loss_element_bytes: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        if not any(block.kind == "layer" for block in self.blocks):
            raise ConfigError(f"model {self.name} has no layer", fix="describe at least one block of kind 'layer'")

    @property
    def parameters(self) -> int:
        """Parameter elements, tied weights once."""
        return sum(block.parameters for block in self.blocks)

    @cached_property
    def layers(self) -> tuple[BlockSpec, ...]:
        """The repeated blocks, in order."""
        return tuple(block for block in self.blocks if block.kind == "layer")

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """A number for each block, which blocks share that differ in nothing but their names."""
        known: list[dict[str, Any]] = []
        found = []
        for block in self.blocks:
            figures = block.__dict__ | {"name": ""}
            if figures not in known:
                known.append(figures)
            found.append(known.index(figures))
        return tuple(found)

    @property
    def root_parameters(self) -> int:
        """Parameter elements outside the layers: the root unit of ZeRO."""
        return self.parameters - sum(block.parameters for block in self.layers)

    def units(self, unit_blocks: int) -> tuple[int, ...]:
        """Parameter elements of each ZeRO unit that holds any: the root unit, then groups of `unit_blocks` layers."""
        return tuple(
            size for size in (sum(b.parameters for b in unit) for unit in self.unit_groups(unit_blocks)) if size
        )

    def unit_groups(self, unit_blocks: int) -> tuple[tuple[BlockSpec, ...], ...]:
        """The blocks of each ZeRO unit: the root unit first (it may hold no parameters), then groups of layers."""
        layers = self.layers
        groups = [layers[i : i + unit_blocks] for i in range(0, len(layers), unit_blocks)]
        return (tuple(block for block in self.blocks if block.kind != "layer"), *groups)
