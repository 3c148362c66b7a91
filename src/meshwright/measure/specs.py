"""From figures to a ModelSpec: which block owns which parameters, and what one sequence adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from meshwright.measure.figures import Figures, WalkFigures
from meshwright.measure.stand_in import Held
from meshwright.measure.values import bytes_of, storages_of
from meshwright.measure.walk import POLICIES
from meshwright.measure.work import Work, for_one
from meshwright.spec.model import AttentionWork, BlockSpec, Product

__all__ = ["Ownership", "block_specs"]


@dataclass(frozen=True)
class Ownership:
    """Parameters and buffer bytes by part: 0 before the blocks, then each block, then what comes after them.

    A parameter belongs to the first part that uses it; `tied` are those that a part uses and another owns.
    """

    owned: tuple[tuple[Held, ...], ...]
    tied: tuple[tuple[Held, ...], ...]
    buffer_bytes: tuple[int, ...]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        blocks: Sequence[tuple[str, nn.Module]],
        held: Sequence[Held],
        used: Sequence[set[str]],
    ) -> Ownership:
        """Who owns what. `used` names the parameters read before the blocks, and after them."""
        place: dict[int, int] = {}
        for index, (_, block) in enumerate(blocks):
            for module in block.modules():
                place.setdefault(id(module), index + 1)
        last = len(blocks) + 1
        owned: list[list[Held]] = [[] for _ in range(last + 1)]
        tied: list[list[Held]] = [[] for _ in range(last + 1)]
        for parameter in held:
            parts = {place[id(owner.module)] for owner in parameter.places if id(owner.module) in place}
            parts.update(part for part, names in ((0, used[0]), (last, used[1])) if parameter.name in names)
            first, *others = sorted(parts) or [0]
            owned[first].append(parameter)
            for part in others:
                tied[part].append(parameter)
        buffers = [storages_of([]) for _ in range(last + 1)]
        for module in model.modules():
            for buffer in module.buffers(recurse=False):
                buffers[place.get(id(module), 0)].update(storages_of([buffer]))
        return cls(
            tuple(tuple(part) for part in owned),
            tuple(tuple(part) for part in tied),
            tuple(bytes_of(part) for part in buffers),
        )


def block_specs(
    names: Sequence[str],
    ownership: Ownership,
    one: tuple[WalkFigures, int],
    more: tuple[WalkFigures, int],
    *,
    recompute: bool = True,
) -> tuple[BlockSpec, ...]:
    """The blocks from the figures of two microbatches, each with its number of sequences.

    An embedding or head that owns, uses and does nothing is left out. Without `recompute`, all policies are none.
    """
    (first, sequences), (second, others) = one, more
    parts = [first.embedding, *first.blocks, first.head]
    counterparts = [second.embedding, *second.blocks, second.head]
    specs = []
    for index, (figures, other) in enumerate(zip(parts, counterparts, strict=True)):
        is_layer = 0 < index < len(parts) - 1
        slope, start = figures.line(other, sequences, others)
        if not recompute:
            for kept in (slope.saved_bytes, slope.alive_bytes, start.saved_bytes, start.alive_bytes):
                kept.update(dict.fromkeys(POLICIES, kept["none"]))
        held, tied = ownership.owned[index], ownership.tied[index]
        if not is_layer and not (held or tied or figures.moved_bytes or any(figures.saved_bytes.values())):
            continue
        kind, name = (
            ("layer", names[index - 1]) if is_layer else ("head", "head") if index else ("embedding", "embedding")
        )
        work = for_one(figures.work, sequences, other.work, others)
        specs.append(_spec(name, kind, held, tied, ownership.buffer_bytes[index], slope, start, work))
    return tuple(specs)


def _spec(
    name: str,
    kind: str,
    held: Sequence[Held],
    tied: Sequence[Held],
    buffer_bytes: int,
    slope: Figures,
    start: Figures,
    work: Sequence[Work],
) -> BlockSpec:
    fixed = max(0, min(start.saved_bytes[policy] for policy in POLICIES))

    def kept(per_sequence: dict[str, int], once: dict[str, int]) -> dict[str, int]:
        # What only some policies keep once per microbatch is counted for each sequence: exact for one, else too much.
        return {policy: max(0, per_sequence[policy] + once[policy] - fixed) for policy in POLICIES}

    flops = slope.forward_flops + start.forward_flops
    known = work if sum(one.flops for one in work) == flops else ()  # else known by its flops alone
    return BlockSpec(
        name=name,
        kind=kind,  # type: ignore[arg-type]  # one of the three kinds
        parameters=sum(parameter.elements for parameter in held),
        tied_parameters=sum(parameter.elements for parameter in tied),
        tensors=tuple(_shape(parameter) for parameter in held),
        frozen=tuple(_shape(parameter) for parameter in held if not parameter.trained),
        buffer_bytes=buffer_bytes,
        forward_flops=flops,
        backward_flops=slope.backward_flops + start.backward_flops,
        causal_flops=slope.causal_flops + start.causal_flops,
        moved_bytes=slope.moved_bytes + start.moved_bytes,
        output_bytes=slope.output_bytes + start.output_bytes,
        backward_extra_bytes=slope.gradient_bytes + start.gradient_bytes,
        waiting_bytes=slope.waiting_bytes + start.waiting_bytes,
        weight_bytes=max(0, start.moved_bytes),
        saved_bytes=kept(slope.saved_bytes, start.saved_bytes),
        alive_bytes=kept(slope.alive_bytes, start.alive_bytes),
        fixed_bytes=fixed,
        products=tuple(one for one in known if isinstance(one, Product)),
        attention=tuple(one for one in known if isinstance(one, AttentionWork)),
        element_bytes=max(0, slope.element_bytes + start.element_bytes),
        backward_element_bytes=max(0, slope.backward_element_bytes + start.backward_element_bytes),
        kernels=slope.kernels + start.kernels,
        backward_kernels=slope.backward_kernels + start.backward_kernels,
    )


def _shape(parameter: Held) -> tuple[int, ...]:
    return parameter.shape or (1,)
