"""A model whose parameters are cut over tensor-parallel ranks in every way there is, on any mesh, and its states.

Its modules compute nothing: what is looked at is where elements lie. What is right is said without the code that is
tested, by `Cut.take` and DTensor's own sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from meshwright.runtime.collectives import Traffic
from meshwright.runtime.cuts import Cut, Segment, even_segments
from meshwright.runtime.init import materialise
from meshwright.runtime.mesh import RankMesh, rank_mesh
from meshwright.runtime.pretrained import Pretrained
from meshwright.runtime.replicas import Replicas
from meshwright.runtime.shards import Shards
from meshwright.runtime.units import make_units
from meshwright.runtime.zero import Zero
from meshwright.spec import Strategy

__all__ = ["STATES", "Laid", "cuts_of", "filled_optimizer", "lay", "same", "whole_state", "wholes"]

STATES = {"exp_avg": torch.float32, "exp_avg_sq": torch.float64}
CPU = torch.device("cpu")


def _heads(ranks: int, heads: int, size: int, start: int = 0) -> list[list[Segment]]:
    """Key/value heads: each rank has those that its queries look at, whole; several ranks may have the same."""
    found = []
    for rank in range(ranks):
        first, last = rank * heads // ranks, -(-(rank + 1) * heads // ranks)
        found.append([(start + first * size, (last - first) * size)])
    return found


def _single(segments: list[Segment]) -> list[list[Segment]]:
    return [[segment] for segment in segments]


def _side_by_side(*parts: list[list[Segment]]) -> list[list[Segment]]:
    return [[segment for own in rank for segment in own] for rank in zip(*parts, strict=True)]


def _fused(tp: int) -> list[list[Segment]]:
    """Six query heads of 2 rows, then two key heads and two value heads, which ranks share where there are more."""
    return _side_by_side(_single(even_segments(12, tp, step=2)), _heads(tp, 2, 2, 12), _heads(tp, 2, 2, 16))


#: By module and name: the whole shape, and the cut over a number of ranks; None: without one, whole on each.
PARAMETERS: dict[str, tuple[tuple[int, ...], Callable[[int], Cut] | None]] = {
    "column.weight": ((10, 6), lambda tp: Cut.of((10, 6), 0, _single(even_segments(10, tp)))),
    "row.weight": ((5, 12), lambda tp: Cut.of((5, 12), 1, _single(even_segments(12, tp, step=2)))),
    "row.bias": ((5,), None),
    "gate_up.weight": (
        (14, 3),
        lambda tp: Cut.of((14, 3), 0, _side_by_side(*(_single(even_segments(7, tp, start=at)) for at in (0, 7)))),
    ),
    "fused.weight": ((20, 5), lambda tp: Cut.of((20, 5), 0, _fused(tp))),
    "fused.bias": ((20,), lambda tp: Cut.of((20,), 0, _fused(tp))),
    "key.weight": ((6, 5), lambda tp: Cut.of((6, 5), 0, _heads(tp, 2, 3), partial=True)),
    "embedding.weight": (
        (101, 4),
        lambda tp: Cut.of((101, 4), 0, _single(even_segments(101, tp)), length=-(-101 // tp)),
    ),
    "head.bias": ((101,), lambda tp: Cut.of((101,), 0, _single(even_segments(101, tp)), length=-(-101 // tp))),
    "norm.weight": ((7,), lambda tp: Cut.whole((7,), tp, partial=True)),
    "few.weight": ((2, 3), lambda tp: Cut.of((2, 3), 0, _single(even_segments(2, tp)))),
    "experts.weight": ((3, 4, 6), lambda tp: Cut.of((3, 4, 6), 2, _single(even_segments(6, tp)))),
    "none.weight": ((0, 3), lambda tp: Cut.of((0, 3), 1, _single(even_segments(3, tp)))),
    "scalar.weight": ((), lambda tp: Cut.whole((), tp)),
}


def _names(strategy: Strategy) -> list[str]:
    """ZeRO has no way to shard a scalar."""
    return [name for name, (shape, _) in PARAMETERS.items() if shape or strategy.shard == 1 or not strategy.zero]


def cuts_of(tp: int) -> dict[str, Cut]:
    """The cuts of all parameters by global name."""
    return {f"layers.{name}": cut(tp) for name, (_, cut) in PARAMETERS.items() if cut is not None}


class Layer(nn.Module):
    """Parameters, initialised in a way that depends on all their shapes and on every element's place."""

    def reset_parameters(self) -> None:
        size = sum(parameter.numel() for parameter in self.parameters())
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=1 / (1 + size))


def _model(names: list[str], device: str, shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    model, layers = nn.Module(), nn.ModuleDict()
    for name in names:
        module, _, parameter = name.partition(".")
        layer = layers[module] if module in layers else Layer()
        empty = torch.zeros(shapes.get(f"layers.{name}", PARAMETERS[name][0]), device=device)
        layer.register_parameter(parameter, nn.Parameter(empty))
        layers[module] = layer
    layers["head"].weight = layers["embedding"].weight
    model.layers = layers
    model.register_buffer("count", torch.tensor(7))
    model.register_buffer("table", torch.arange(5.0))
    return model


def wholes(seed: int, strategy: Strategy | None = None) -> dict[str, Tensor]:
    """Every parameter's whole value, as one process has it."""
    model = _model(_names(strategy or Strategy()), "meta", {})
    materialise(model, device=CPU, seed=seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def whole_state(name: str, key: str) -> Tensor:
    """The whole of an optimizer's state, the same in every process."""
    generator = torch.Generator().manual_seed(sum(f"{name}.{key}".encode()))
    shape = PARAMETERS[name.removeprefix("layers.")][0]
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(STATES[key])


@dataclass(frozen=True)
class Laid:
    """The model laid out over the ranks of a strategy."""

    model: nn.Module
    zero: Zero
    mesh: RankMesh

    def wanted(self, name: str, whole: Tensor) -> Tensor:
        """This rank's tensor of a whole one, laid out as the parameter of a name is."""
        cut, parameter = self.zero.cuts.get(name), self.zero.stored[name]
        local = whole if cut is None else cut.take(whole, self.mesh.tp_rank)
        if not isinstance(parameter, DTensor):
            return local.clone()
        return distribute_tensor(local, parameter.device_mesh, parameter.placements, src_data_rank=None)

    def differing(self, values: Mapping[str, Tensor]) -> list[str]:
        """Parameters of which this rank does not hold its part of the whole values, padding zero, to the bit."""
        assert self.zero.stored.keys() == values.keys()
        return [name for name, p in self.zero.stored.items() if not same(p, self.wanted(name, values[name]))]


def same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of one layout have the same elements here."""
    locals_ = [t.detach().to_local() if isinstance(t, DTensor) else t.detach() for t in (first, second)]
    return locals_[0].dtype == locals_[1].dtype and torch.equal(*locals_)


def lay(strategy: Strategy, *, seed: int, weights: Path | None = None, real: bool = False) -> Laid:
    """Lay the model out: its initial values from the seed, and from weight files where there are any.

    Args:
        strategy: for as many ranks as there are.
        seed: of the initial values.
        weights: a safetensors file.
        real: from a model with values (zeros) instead of one without.
    """
    mesh, cuts, names = rank_mesh(strategy, CPU), cuts_of(strategy.tp), _names(strategy)
    device = "cpu" if real else "meta"
    given = Pretrained(_model(names, device, {}), weights, None) if weights is not None else None
    model = _model(names, device, {name: cut.local_shape(mesh.tp_rank) for name, cut in cuts.items()})
    units, zero = make_units(model, unit_blocks=3), None
    dtypes = {f"{kind}_dtype": torch.float32 for kind in ("compute", "stored", "reduce")}
    if mesh.shard is not None:
        options = {"zero": strategy.zero, "prefetch": 0, "traffic": Traffic(), "host": None}
        zero = Shards(model, units, mesh, cuts, **options, **dtypes)
    materialise(model, device=CPU, seed=seed, given=given, cuts=cuts, tp_rank=mesh.tp_rank)
    if zero is not None:
        zero.find_stored()
    zero = zero or Replicas(units, mesh, cuts, **dtypes, traffic=Traffic())
    return Laid(model, zero, mesh)


def filled_optimizer(laid: Laid) -> torch.optim.Optimizer:
    """AdamW in the middle of a training run."""
    optimizer = torch.optim.AdamW(laid.zero.stored.values())
    for name, parameter in laid.zero.stored.items():
        states = {key: laid.wanted(name, whole_state(name, key)) for key in STATES}
        optimizer.state[parameter] = {"step": torch.tensor(7.0), **states}
    return optimizer
