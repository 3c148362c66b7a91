"""Tensor parallelism applied: a model's parameters become this rank's slices, and its modules speak with each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.errors import ConfigError, UnsupportedCombination
from meshwright.runtime.collectives import Traffic
from meshwright.runtime.mesh import RankMesh
from meshwright.runtime.seeds import SplitStreams
from meshwright.runtime.tp.communicate import Wire
from meshwright.runtime.tp.divide import Region, divide
from meshwright.runtime.tp.gradients import compare_copies, sum_shares
from meshwright.runtime.tp.heads import tell_heads
from meshwright.runtime.tp.modules import (
    Entries,
    cut_sequences,
    divide_embedding,
    divide_head,
    gather_columns,
    leave_rows,
    pick_heads,
    sum_experts,
)
from meshwright.runtime.tp.plan import plan_sharding
from meshwright.runtime.units import Blocks, owners
from meshwright.runtime.vocabulary import Columns, VocabularyLogits
from meshwright.runtime.zero import Zero

__all__ = ["TensorParallel", "require_one_stream"]


class TensorParallel:
    """A model divided over the tensor-parallel ranks of a mesh.

    Args:
        model: with whole parameters, real or meta; each becomes this rank's slice.
        blocks: of the model, in order.
        mesh: with more than one tensor-parallel rank.
        annotations: the user's, see `plan_sharding`.
        sequence_parallel: activations between divided matrices are cut along the tokens.

    Raises:
        ConfigError: annotations that cannot be.
        UnsupportedCombination: the model cannot be divided over so many ranks, and what would do.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Blocks,
        mesh: RankMesh,
        traffic: Traffic,
        device: torch.device,
        *,
        annotations: Mapping[str, str],
        sequence_parallel: bool,
    ) -> None:
        if mesh.tp_group is None:
            raise TypeError("there is nothing to divide over")  # an internal error: build() asks before
        styles = plan_sharding(model, annotations)
        if sequence_parallel:
            require_one_stream(model, blocks, [entry.style for entry in styles.values()])
        names = [name for name, _ in blocks] if sequence_parallel else []
        self.sharding = divide(model, styles, mesh.tp, blocks=names)
        self.wire = Wire(mesh.tp_group, traffic, sequence_parallel=sequence_parallel)
        self.streams = SplitStreams(mesh.tp_rank, device)
        #: Whether heads return whole logits instead of divided ones.
        self.whole_logits = False
        self._compared = False
        self._model = model
        self._modules = dict(model.named_modules())
        self._final_norm = any(entry.style == "sequence" for entry in styles.values())
        self._keep_slices()
        for region in self.sharding.regions:
            self._enter_region(region, block=region.parent in {name for name, _ in blocks})
        for name, entry in styles.items():
            self._divide(name, entry.style)
        if sequence_parallel:
            cut_sequences(self.wire, blocks[0][1], blocks[-1][1], joins=not self._final_norm)

    def sum_shares(self, zero: Zero) -> ConfigError | None:
        """After a step's reduces: sum the gradients that are shares; in the first step, what is wrong with them."""
        gradients, wrong = zero.gradients(), None
        if not self._compared and gradients:
            self._compared = True
            wrong = compare_copies(gradients, zero.cuts, self.wire)
        sum_shares(gradients, zero.cuts, self.wire)
        return wrong

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the model returns whole logits: for what is not a loss."""
        self.whole_logits = True
        try:
            yield
        finally:
            self.whole_logits = False

    def _keep_slices(self) -> None:
        for name, places in owners(self._model).items():
            parameter: nn.Parameter = getattr(places[0].module, places[0].name)
            cut = self.sharding.cuts[name]
            if cut.replicated:
                continue
            if parameter.is_meta:
                local = torch.empty(cut.local_shape(self.wire.rank), dtype=parameter.dtype, device="meta")
            else:
                local = cut.take(parameter.detach(), self.wire.rank)
            own = nn.Parameter(local, requires_grad=parameter.requires_grad)
            for place in places:
                setattr(place.module, place.name, own)

    def _enter_region(self, region: Region, *, block: bool) -> None:
        parent, wire, heads = self._modules[region.parent], self.wire, region.heads
        gathers = not block and (heads is not None or region.gathers)
        entries = Entries(wire, self.streams, parent, region.parent, gathers=gathers)
        for name in region.columns:
            module: Any = self._modules[name]
            entries.watch(module)
            _tell_outputs(module, self.sharding.widths[name][wire.rank])
            if region.gathers:
                gather_columns(module, wire, self.streams, self.sharding.widths[name])
            elif heads is not None and heads.selects and self.sharding.is_whole(name):
                pick_heads(module, heads, wire.rank)
        if heads is not None:
            leaf = [name.rpartition(".")[2] for name in region.columns]
            tell_heads(parent, heads, config=len(leaf) == 1)

    def _divide(self, name: str, style: str) -> None:
        module, wire, sharding = self._modules[name], self.wire, self.sharding
        if style in ("rowwise", "split-input"):
            leave_rows(module, wire, self.streams, widths=sharding.widths[name], splits=style == "split-input")
        elif style == "experts":
            sum_experts(module, wire, self.streams, name)
        elif style == "vocab":
            widths = sharding.widths[name]
            start, size = sum(widths[: wire.rank]), widths[wire.rank]
            if isinstance(module, nn.Embedding):
                divide_embedding(module, wire, start, size)
            else:
                divide_head(module, wire, size, self._logits(widths), gathers=self._final_norm)

    def _logits(self, widths: list[int]) -> Callable[[torch.Tensor], Any]:
        columns = Columns(tuple(widths), self.wire.group, self.wire.traffic)

        def result(local: torch.Tensor) -> Any:
            logits = VocabularyLogits.of(local, columns)
            return logits.whole() if self.whole_logits else logits

        return result


def _tell_outputs(module: Any, outputs: int) -> None:
    """Modules that give their outputs a shape by a number of their own."""
    for name in ("out_features", "nf"):
        if hasattr(module, name):
            setattr(module, name, outputs)


def require_one_stream(model: nn.Module, blocks: Blocks, styles: Sequence[str]) -> None:
    """Refuse what computes over the tokens of a sequence between its divided matrices."""
    config = getattr(model, "config", None)
    why = ""
    if not blocks:
        why = "it has no blocks, between which activations are cut"
    elif getattr(config, "is_encoder_decoder", False):
        why = "its decoder reads the whole sequence of its encoder"
    elif "experts" in styles:
        why = "its routers choose experts for the tokens of a whole sequence"
    if why:
        raise UnsupportedCombination(
            f"sequence parallelism of a {type(model).__name__}", why=why, fix="set sequence_parallel=false"
        )
