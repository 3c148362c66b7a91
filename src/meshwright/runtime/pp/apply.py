"""Pipeline parallelism applied: a model cut into stages, of which this rank keeps its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.errors import ConfigError
from meshwright.runtime._torch import group_timeout
from meshwright.runtime.absent import leave_out
from meshwright.runtime.batch import rows, split, to_device
from meshwright.runtime.mesh import RankMesh
from meshwright.runtime.pp.assignment import Assignment
from meshwright.runtime.pp.example import guess_batch
from meshwright.runtime.pp.inference import Together
from meshwright.runtime.pp.messages import Form
from meshwright.runtime.pp.points import Point, Points
from meshwright.runtime.pp.route import Route, assign, route, same_places
from meshwright.runtime.pp.stage import Loose, Stage
from meshwright.runtime.pp.staged import Shared, StagedZero
from meshwright.runtime.pp.trial import try_forward
from meshwright.runtime.replicas import Replicas
from meshwright.runtime.seeds import DropoutStreams
from meshwright.runtime.tensors import find_tensors, map_values
from meshwright.runtime.tp.communicate import Wire
from meshwright.runtime.units import Blocks, Owner, Unit, make_units
from meshwright.runtime.zero import Used, Zero
from meshwright.schedule import stage_ranks
from meshwright.spec import Strategy, even_layers

__all__ = ["Look", "PipelineParallel"]


@dataclass(frozen=True)
class Look:
    """What a batch looks like.

    Attributes:
        kind: on which its route depends.
        shapes: on which the forms of what stages hand on depend.
    """

    kind: Any
    shapes: Any


class PipelineParallel:
    """A model cut into stages, whose forward stays the model's own.

    Made before anything else changes the model; `keep_own` then takes from this rank what other ranks hold.

    Args:
        model: whole, with real or meta parameters.
        blocks: of the model.
        strategy: with `pp` above 1.
        mesh: of this rank.
        device: of activations.
        example: a batch as steps take them, of any number of rows; guessed where None.
        labels: whether the model is called with labels.

    Raises:
        ConfigError: the model cannot be cut, or into fewer stages.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Blocks,
        strategy: Strategy,
        mesh: RankMesh,
        device: torch.device,
        *,
        example: Any,
        labels: bool,
    ) -> None:
        _require_whole_answers(model)
        self._model, self._mesh, self.device, self._labels = model, mesh, device, labels
        self.count = strategy.pp * strategy.virtual_stages
        self.ranks = stage_ranks(strategy.schedule, strategy.pp, strategy.virtual_stages)
        #: Stages of this rank, in order.
        self.own = [stage for stage, rank in enumerate(self.ranks) if rank == mesh.pp_rank]
        self.points = Points(model, blocks, device)
        batch = guess_batch(model) if example is None else split(example, 0, min(rows(example), strategy.microbatch))
        flow = try_forward(self.points, to_device(batch, device), labels=labels, guessed=example is None)
        called = list(dict.fromkeys(call.point for call in flow.calls if call.block))
        if len(called) < self.count:
            raise ConfigError(
                f"{self.count} stages for a model of {len(called)} blocks",
                why="every stage needs a block, and blocks are the children of the model's lists of modules",
                fix=f"set pp x virtual_stages to {max(1, len(called))} or less, or name smaller blocks (blocks=[...])",
            )
        sizes = strategy.stages or even_layers(len(called), self.count)
        stages = assign(flow, sizes)
        self.assignment = Assignment(self.points, flow, stages, self.ranks)
        first = route(flow, stages, self.count)
        self._routes: dict[Any, Route] = {_kind(batch): first}
        self._forms: dict[tuple[int, Any], list[Form]] = {}
        #: Blocks that recompute.
        self.recomputed: set[nn.Module] = set()
        #: Which parameters take part in a step.
        self.used = Used(list(self.assignment.whole))
        self.stages: dict[int, Stage] = {}
        self.copies: list[tuple[str, tuple[Owner, ...]]] = []
        self._blocks = list(blocks)
        told = {flow.calls[value[0]].point for values in first.crossing for value in values}
        self._told = {call.point: call.point in told for call in flow.calls}
        self._ends = {flow.calls[index].point for index, _ in flow.results if index >= 0}

    # ------------------------------------------------------------------------------------------------------- building

    def keep_own(self, *, sharded: bool) -> None:
        """Take the parameters of other ranks' stages out of the model, and make this rank's stages.

        Args:
            sharded: ZeRO shards parameters: one that two stages of this rank use needs a copy then.
        """
        own = set(self.own)
        modules = {
            stage: [self.points.points[name].module for name in self.assignment.points_of(stage)] for stage in own
        }
        loose = {stage: self._take_loose(stage) for stage in self.own}
        inside = {
            stage: {id(part) for module in (*found, *loose[stage].values()) for part in module.modules()}
            for stage, found in modules.items()
        }
        for name, places in self.assignment.parameters.items():
            held = [stage for stage in self.assignment.holders[name] if stage in own]
            if not held:
                for place in places:
                    leave_out(place, self.device)
                continue
            # The first place keeps the parameter itself: by it initial values are drawn, and files name it.
            keeper = next((stage for stage in held if id(places[0].module) in inside[stage]), held[0])
            for stage in held if sharded else ():
                if stage == keeper:
                    continue
                mine = tuple(place for place in places if id(place.module) in inside[stage])
                first = {id(p.module) for p in places if id(p.module) in inside[keeper]}
                if any(id(place.module) in first for place in mine):
                    raise ConfigError(
                        f"the module that holds {name} is called in stages {keeper} and {stage}, both on this rank",
                        why="ZeRO shards a module's parameters in one stage",
                        fix="use zero=0, or a schedule with one stage on each rank (1f1b, gpipe)",
                    )
                parameter: nn.Parameter = getattr(places[0].module, places[0].name)
                copy = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                for place in mine:
                    setattr(place.module, place.name, copy)
                self.used.add_copy(_copy_name(name, stage), name)
                self.copies.append((name, mine))
        for stage in self.own:
            last = stage == self.count - 1
            self.stages[stage] = Stage(stage, self.points, modules[stage], loose[stage], last=last)

    def units(self, stage: int, unit_blocks: int) -> list[Unit]:
        """The ZeRO units of a stage of this rank: parameters by global name, each in one stage of this rank."""
        module = self.stages[stage]
        inside = {id(part) for part in module.modules()}
        listed = [(name, block) for name, block in self._blocks if id(block) in inside]
        names = {id(getattr(w[0].module, w[0].name)): name for name, w in self.assignment.parameters.items()}
        copied = {id(getattr(where[0].module, where[0].name)): name for name, where in self.copies}
        elsewhere = {place for _, where in self.copies for place in where}
        taken = {name for earlier in self.own if earlier < stage for name in self.assignment.names_of(earlier)}
        taken -= set(copied.values())
        found = []
        for unit in make_units(module, unit_blocks=unit_blocks, blocks=listed):
            parameters: dict[str, tuple[Owner, ...]] = {}
            for where in unit.parameters.values():
                key = id(getattr(where[0].module, where[0].name))
                if key in copied:
                    parameters[_copy_name(copied[key], stage)] = where
                elif names[key] not in taken:
                    rest = (
                        place for place in self.assignment.parameters[names[key]] if place not in (*where, *elsewhere)
                    )
                    parameters[names[key]] = (*where, *rest)
            if parameters:
                name = f"stage {stage}" if unit.modules == (module,) else unit.name
                found.append(Unit(name, unit.modules, parameters))
        return found

    def borrowed(self, stage: int) -> list[Owner]:
        """Where the parameters hang that a stage uses and an earlier stage of this rank has in its units."""
        inside = {id(part) for part in self.stages[stage].modules()}
        own = {name for earlier in self.own if earlier < stage for name in self.assignment.names_of(earlier)}
        copied = {name for name, _ in self.copies}
        names = [name for name in self.assignment.names_of(stage) if name in own and name not in copied]
        return [
            next(place for place in self.assignment.parameters[name] if id(place.module) in inside) for name in names
        ]

    def shared(self) -> list[Shared]:
        """Weights that stages on several ranks hold, in one order; all ranks call it, to make the groups."""
        found = []
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for name in self.assignment.whole:
            holders = tuple(dict.fromkeys(sorted(self.ranks[stage] for stage in self.assignment.holders[name])))
            if len(holders) < 2:
                continue
            if holders not in groups:
                groups[holders] = self._group(holders)
            if self._mesh.pp_rank in holders:
                found.append(Shared(name, groups[holders], first=holders[0] == self._mesh.pp_rank))
        return found

    def unit_counts(self, zero: Zero) -> tuple[int, ...]:
        """The number of ZeRO units of every stage; all ranks call it."""
        counts = [0] * self.count
        if isinstance(zero, StagedZero):
            for stage, part in zero.parts.items():
                counts[stage] = len(part.units)
        told: list[Any] = [None] * self._mesh.pp
        dist.all_gather_object(told, counts, group=self._mesh.pp_group)
        return tuple(map(sum, zip(*told, strict=True)))

    @contextmanager
    def together(self, loose: Mapping[str, torch.Tensor], *, results: bool = True) -> Iterator[None]:
        """Inside, all ranks of the pipeline call the model, or parts of it, together, outside of a step.

        Args:
            loose: whole parameters that code between points uses, by name.
            results: whether all of them get what the model returns, not only those that have the loss.
        """
        runner = Together(self, self._mesh.pp_group, self._mesh.pp_rank, results=results)
        with self.points.with_loose(loose), self.points.under(runner):
            yield

    def mark_late(self, parts: Mapping[int, Zero]) -> None:
        """Tell ways to hold parameters which of them several stages of this rank use."""
        often = [
            name for name, stages in self.assignment.holders.items() if sum(stage in self.own for stage in stages) > 1
        ]
        for part in parts.values():
            if isinstance(part, Replicas):
                part.late.update(often)

    def second_copies(self) -> list[tuple[str, Callable[[], nn.Parameter]]]:
        """Weights that a later stage of this rank has a copy of, and where that is."""
        return [(name, partial(getattr, where[0].module, where[0].name)) for name, where in self.copies]

    def watch_dropout(self, streams: DropoutStreams) -> None:
        """Tell the streams of the blocks that are passed by."""

        def tell(point: Point, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if point.block:
                streams.passed(point.name)

        self.points.passed.append(tell)

    def watch_length(self, wire: Wire) -> None:
        """Tell sequence parallelism how long the sequences are that an earlier stage cuts."""
        first = self._blocks[0][0]

        def tell(point: Point, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if point.name == first:
                wire.length = find_tensors((args, kwargs))[0].shape[1]

        self.points.passed.append(tell)

    # ------------------------------------------------------------------------------------------------------ in a step

    def look(self, batch: Any) -> Look:
        """What the runtime remembers of batches like this one."""
        return Look(_kind(batch), _shapes(batch))

    def route_of(self, batch: Any, look: Look) -> Route:
        """How the forward of a batch runs through the stages; found anew for every kind of batch."""
        kind = look.kind
        if kind not in self._routes:
            flow = try_forward(self.points, batch, labels=self._labels)
            self._routes[kind] = route(flow, same_places(flow, self.assignment.places), self.count)
        return self._routes[kind]

    def is_new(self, stage: int, look: Look) -> bool:
        """Whether the forms of what a stage is handed for a batch of these sizes have not been told yet."""
        return (stage, look.shapes) not in self._forms

    def learn(self, stage: int, look: Look, forms: list[Form]) -> None:
        """They are told now."""
        self._forms[stage, look.shapes] = forms

    def forms(self, stage: int, look: Look) -> list[Form]:
        """What was told."""
        return self._forms[stage, look.shapes]

    def tells(self, point: str, *, results: bool) -> bool:
        """Whether other ranks need what a point returns, outside of a step."""
        if point not in self._told:
            return True
        return self._told[point] or (results and point in self._ends)

    # -------------------------------------------------------------------------------------------------------- details

    def _take_loose(self, stage: int) -> dict[str, Loose]:
        """The loose parameters of a stage as parts of it."""
        found = {}
        for name, owner in self.points.loose.items():
            if stage in self.assignment.loose[owner]:
                found[name] = Loose(getattr(owner.module, owner.name))
                self.assignment.add_place(owner, Owner(found[name], "value"))
        return found

    def _group(self, holders: tuple[int, ...]) -> dist.ProcessGroup | None:
        mesh = self._mesh
        if len(holders) == mesh.pp:
            return mesh.pp_group
        lines: list[Any] = [None] * dist.get_world_size()
        members = dist.get_process_group_ranks(mesh.pp_group)
        dist.all_gather_object(lines, [members[holder] for holder in holders])
        mine = None
        for line in sorted({tuple(line) for line in lines}):
            group = dist.new_group(list(line), timeout=group_timeout(self.device))
            if dist.get_rank() in line:
                mine = group
        return mine


def _copy_name(name: str, stage: int) -> str:
    return f"{name} (stage {stage})"


def _require_whole_answers(model: nn.Module) -> None:
    """Refuse what Hugging Face collects from inside of blocks, wherever they are."""
    config = getattr(model, "config", None)
    for name in ("output_router_logits", "output_hidden_states", "output_attentions"):
        if getattr(config, name, False) is True:
            raise ConfigError(
                f"{name}=True with pp above 1",
                why="it collects what every block has inside, and no stage has all blocks",
                fix=f"set model.config.{name}=False, or use pp=1",
            )


def _kind(batch: Any) -> Any:
    """What the route of a batch depends on: its structure, dtypes and numbers of dims, not its sizes."""
    return _described(batch, lambda tensor: (tensor.dim(), tensor.dtype))


def _shapes(batch: Any) -> Any:
    return _described(batch, lambda tensor: (tuple(tensor.shape), tensor.dtype))


def _described(value: Any, tell: Callable[[torch.Tensor], Any]) -> Any:
    words: list[Any] = []

    def one(item: Any) -> Any:
        words.append(tell(item) if isinstance(item, torch.Tensor) else repr(item))
        return item

    copied = map_values(one, value)
    outline = map_values(lambda tensor: None, copied)
    return repr(outline), tuple(words)
