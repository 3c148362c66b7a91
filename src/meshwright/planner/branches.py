"""Branch and bound over one space: what a search does on one set of machines.

A mesh is looked at by the work it cannot do without, then with the recomputation that memory makes necessary, then
schedule by schedule, then strategy by strategy; only what is still ahead is played, and only what is ahead by its true
time is looked at for memory in full. Nothing is left out that may be better than what is found, but in spaces so large
that looking at all of it would take minutes: there the search ends after an amount of work, looks once more near the
best, and tells by how much something better may exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from meshwright.cost.floors import Floors
from meshwright.cost.pricer import Pricer
from meshwright.errors import ConfigError
from meshwright.planner.amounts import Amounts
from meshwright.planner.frontier import Entry, Frontier
from meshwright.planner.meshes import Mesh, MeshClass
from meshwright.planner.near import mesh_of
from meshwright.planner.nearest import Nearest
from meshwright.planner.objective import Objective
from meshwright.planner.result import Counts, Result
from meshwright.planner.rule import Candidate, leanness
from meshwright.planner.space import Shape, Space
from meshwright.spec import Strategy, is_executable

__all__ = ["Branches"]

#: What other schedules may hold less than 1F1B by cutting layers differently, as a share of a device's memory.
_SPARE = 1.1
#: A search of a large space ends after so much work, counted in stages of the strategies it looked at (and so many more
#: for each): some seconds. What may have been lost by that is told (`Counts.unproven`).
_MOST_WORK = 26_000
_EACH = 8
#: So many times as much where less than what is wanted was found that fits; and the part of it that looking once more
#: near the best may take.
_WITHOUT = 4
_NEAR = 0.75
#: Meshes after which enough strategies should have been found.
_PATIENCE = 100
_STEPS_LEFT = {
    "_class": 6,
    "_mesh": 5,
    "_ways": 4.5,
    "_firm": 4,
    "_schedules": 3,
    "_lean": 2,
    "_shapes": 1.5,
    "_time": 1,
    "_fit": 0,
}


class Branches:
    """One search of a space."""

    def __init__(self, pricer: Pricer, space: Space, objective: Objective, most: int) -> None:
        self._pricer, self._space, self._objective, self._most = pricer, space, objective, most
        self._frontier = Frontier(_STEPS_LEFT)
        #: The objective of the worst of those that are wanted, once there are so many.
        self._limit: tuple[float, ...] = (math.inf,)
        self._found: dict[tuple[Any, ...], Candidate] = {}
        self._short = Nearest()
        self._per_node = min(group.devices for group in pricer.cluster.nodes)
        #: By layout, microbatch and whether all ranks lie on one node: seconds times ranks, at least.
        self._device_seconds: dict[tuple[object, ...], float] = {}
        #: The last mesh with a layout and microbatch that do not fit: it has the most pipeline ranks.
        self._unfit: dict[tuple[object, ...], Mesh] = {}
        #: By mesh without dp and microbatch: those two, where nothing fits.
        self._hopeless: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        self._counts = Counts()
        self._recorded = self._work = 0
        self._floors = Floors(pricer)
        self._amounts = Amounts(pricer, space, self._floors, self._short)

    def run(self) -> Result:
        """Search to the end, or until so much was looked at that the best of it has to do: first without pipelines,
        whose many schedules would otherwise come before what is plain; in the end once more near the best."""
        classes, left = list(self._space.classes()), list[Entry]()
        for piped in (False, True):
            for group in classes:
                if (group.pp > 1) == piped:
                    self._open(group, group.dps[::-1] if self._objective.name == "time" else group.dps, 0)
            left += self._drain(_MOST_WORK, _WITHOUT * _MOST_WORK)
        left = self._look_near(left)
        for mesh in self._unfit.values():
            if (lean := self._space.leanest(mesh)) is not None:
                self._short.note(lean, self._floors.least_bytes(lean))
        best, least = self._best(), min((value[-1] for value, *_ in left if value <= self._limit), default=math.inf)
        if best and least < math.inf:
            self._counts.unproven = max(0.0, 1 - least / self._value(best[0])[-1])
        return Result(best, self._short.candidates(self._space, self._candidate), self._counts)

    def _drain(self, most: float, without: float) -> list[Entry]:
        """Do what is still to be done, up to so much work, or so much where less than what is wanted was found; what is
        left of it."""
        begun, recorded = self._work, self._recorded
        patience, meshes = _PATIENCE, self._counts.meshes
        while self._frontier:
            value, step, arguments = self._frontier.pop()
            if value > self._limit:
                continue
            fresh = self._recorded - recorded
            if self._work - begun > (most if fresh >= self._most else without):
                return [(value, step, arguments), *self._frontier.rest()]
            if self._counts.meshes - meshes > patience and fresh < self._most:
                self._frontier.hurry()
                patience *= 2
            try:
                step(*arguments)
            except ConfigError as error:  # what the model or a schedule cannot do shows only now
                self._space.illegal = self._space.illegal or error
        return []

    def _look_near(self, left: list[Entry]) -> list[Entry]:
        """Go on with what is left on meshes near that of the best, and then of a better one; what is left."""
        most, begun, seen, best = _NEAR * _MOST_WORK, self._work, set[Mesh](), self._best()
        while left and best and self._work - begun < most and (center := Mesh.of(best[0].strategy)) not in seen:
            seen.add(center)
            others = []
            for value, step, arguments in left:
                if mesh_of(arguments).near(center):
                    self._frontier.push(value, step, arguments)
                else:
                    others.append((value, step, arguments))
                if isinstance(arguments[-1], int) and isinstance(arguments[-2], tuple):
                    self._open_near(center, *arguments[-3:])
            left, best = others + self._drain(most, most), self._best()
        return left

    def _open_near(self, center: Mesh, group: MeshClass, dps: tuple[int, ...], at: int) -> None:
        if group.at(center.dp).near(center):
            for dp in dps[at + 1 :]:
                if group.at(dp).near(center):
                    self._open(group, (dp,), 0)

    def _push(self, devices: int, floor_s: float, step: Callable[..., None], *arguments: Any) -> None:
        if (value := self._objective.value(devices, floor_s)) <= self._limit:
            self._frontier.push(value, step, arguments)

    # --- meshes -------------------------------------------------------------------------------------------------------

    def _open(self, group: MeshClass, dps: tuple[int, ...], at: int) -> None:
        """Push a class of meshes by the least their layout and microbatch can take; none where these do not fit."""
        ranks = group.of_a_replica * dps[at]
        key = (*group[:1], *group[2:6], ranks <= self._per_node)
        if key not in self._device_seconds:
            self._device_seconds[key] = self._least_device_s(key, group.at(dps[at]))
        if self._device_seconds[key] < math.inf:
            self._push(ranks, self._device_seconds[key] / ranks, self._class, group, dps, at)
        elif key in self._unfit:
            self._unfit[key] = group.at(dps[at])

    def _least_device_s(self, key: tuple[object, ...], mesh: Mesh) -> float:
        """Seconds times ranks that a layout and a microbatch take at least; infinite where they do not fit into the
        largest device under any pipeline, ZeRO stage and data parallelism."""
        try:
            lean = self._space.leanest(mesh)
            needed = 0 if lean is None else self._floors.microbatch_bytes(lean, lean.recompute)
            if lean is None or needed <= self._pricer.budget_bytes(Strategy()):
                return self._floors.work_s(self._space.plain(mesh))
            self._unfit[key] = mesh
        except ConfigError as error:  # what the model cannot do shows only now
            self._space.illegal = self._space.illegal or error
        return math.inf

    def _class(self, group: MeshClass, dps: tuple[int, ...], at: int) -> None:
        mesh = group.at(dps[at])
        self._push(mesh.ranks, self._floors.mesh_s(self._space.plain(mesh)), self._mesh, mesh, group, dps, at)

    def _too_large(self, group: MeshClass) -> bool:
        """Whether nothing of a class fits: not even what keeps least on the most ranks. Then nothing with a larger
        microbatch on as many ranks or fewer does."""
        known = self._hopeless.setdefault(group[:5], [])
        size, dp = group.microbatch, group.dps[-1]
        if any(size >= most and dp <= ranks for most, ranks in known):
            return True
        lean = self._space.leanest(group.at(dp))
        if lean is None or self._has_room(lean, self._floors.least_bytes(lean)):
            return False
        known.append((size, dp))
        return True

    def _mesh(self, mesh: Mesh, group: MeshClass, dps: tuple[int, ...], at: int) -> None:
        if at + 1 < len(dps):
            self._open(group, dps, at + 1)
        self._counts.meshes += 1
        if self._too_large(group):
            return
        lean = self._space.leanest(mesh)
        if lean is None or not self._has_room(lean, self._floors.least_bytes(lean)):
            return
        least = self._amounts.lean_s(lean)
        if least < math.inf:
            self._push(mesh.ranks, least, self._ways, mesh, lean)
        else:
            self._short.note(lean, self._floors.least_bytes(lean))

    def _ways(self, mesh: Mesh, lean: Strategy) -> None:
        """Push a mesh again by the time it takes with the communication of its quickest way to shard."""
        ways = [
            (*found, way) for way in self._space.sharded(lean) if (found := self._amounts.needed(way))[0] < math.inf
        ]
        if ways:
            self._push(mesh.ranks, min(least for least, *_ in ways), self._firm, mesh, ways)
        else:
            self._short.note(lean, self._floors.least_bytes(lean))

    def _firm(self, mesh: Mesh, ways: list[tuple[float, tuple[int, ...], Strategy]]) -> None:
        """Push a mesh again by the time it takes with the recomputation that 1F1B needs: no schedule keeps less."""
        best, fewest = math.inf, [len(entry.blocks) for entry in self._space.recomputes]
        for least, places, way in sorted(ways, key=itemgetter(0)):
            if self._objective.value(mesh.ranks, least) > self._limit:
                break
            known = least < best and way.schedule in ("single", "1f1b")
            for number, (entry, place) in enumerate(zip(self._space.recomputes, places, strict=True)):
                found = self._amounts.fewest(way, entry, place, _SPARE) if known and place >= 0 else place
                if found < 0:
                    continue
                fewest[number] = min(fewest[number], found)
                if least < best:
                    changed = self._space.recomputing(way, entry, entry.blocks[found])
                    best = min(best, self._floors.recomputed_mesh_s(changed))
                if number == 0:
                    fewest[1:] = [min(n, max(0, place)) for n, place in zip(fewest[1:], places[1:], strict=True)]
                    break
        if best < math.inf:
            kept = tuple(
                n if n < len(entry.blocks) else -1 for n, entry in zip(fewest, self._space.recomputes, strict=True)
            )
            self._push(mesh.ranks, best, self._schedules, mesh, kept)

    def _schedules(self, mesh: Mesh, places: tuple[int, ...]) -> None:
        """Push every schedule by its floor with the least recomputation that may be enough on this mesh.

        Args:
            places: of each way to recompute, the place in its numbers of blocks of the least; -1 where none is enough.
        """
        for shapes in self._space.schedules(mesh):
            self._push(mesh.ranks, self._amounts.least_s(shapes[0].variants[0], places), self._lean, shapes, places)

    def _lean(self, shapes: list[Shape], places: tuple[int, ...]) -> None:
        """Push a schedule again by the time it takes with the recomputation that its leanest strategy needs."""
        lean = min((strategy for shape in shapes for strategy in shape.variants), key=leanness)
        found = []
        for entry, place in zip(self._space.recomputes, places, strict=True):
            found.append(self._amounts.fewest(lean, entry, place) if place >= 0 else -1)
            if found[0] >= 0:
                found += places[1:]
                break
        if max(found) >= 0:
            self._push(
                shapes[0].mesh.ranks, self._amounts.least_s(lean, tuple(found)), self._shapes, shapes, tuple(found)
            )

    # --- strategies ---------------------------------------------------------------------------------------------------

    def _shapes(self, shapes: list[Shape], places: tuple[int, ...]) -> None:
        for shape in shapes:
            for strategy in shape.variants:
                self._recompute(shape, strategy, 0, places)

    def _recompute(self, shape: Shape, strategy: Strategy, first: int, places: tuple[int, ...]) -> None:
        """Push a strategy with the least recomputation that may fit. Where the first way may, the others are left until
        it turns out that it does not."""
        for number, entry in enumerate(self._space.recomputes[first:], first):
            if places[number] < 0:
                continue
            self._counts.strategies += 1
            self._work += _EACH + strategy.pp * strategy.virtual_stages
            least = self._space.recomputing(strategy, entry, entry.blocks[places[number]])
            if self._objective.value(shape.mesh.ranks, self._floors.strategy_s(least)) > self._limit:
                continue
            place = self._amounts.fewest(strategy, entry, places[number])
            if place < 0:
                continue
            changed = self._space.recomputing(strategy, entry, entry.blocks[place])
            self._push(shape.mesh.ranks, self._floors.strategy_s(changed), self._time, shape, changed, number, places)
            if number == 0:
                return

    def _time(self, shape: Shape, strategy: Strategy, number: int, places: tuple[int, ...]) -> None:
        """Play a strategy; it comes up again by its true time."""
        if self._beaten(shape, self._floors.strategy_s(strategy)):
            return
        settled = self._space.settled(strategy)
        short = self._pricer.short_bytes(settled, ends=True)
        if short > 0:
            self._too_small(shape, settled, number, places, short)
            return
        self._counts.priced += 1
        self._push(shape.mesh.ranks, self._pricer.step_s(settled), self._fit, shape, settled, number, places)

    def _fit(self, shape: Shape, strategy: Strategy, number: int, places: tuple[int, ...]) -> None:
        """Look whether a strategy fits; otherwise with more recomputation."""
        if self._beaten(shape, self._pricer.step_s(strategy)):
            return
        short = self._pricer.short_bytes(strategy)
        if short <= 0 and self._pricer.fits(strategy):
            self._record(shape, strategy)
            return
        self._too_small(shape, strategy, number, places, max(short, 0))

    def _too_small(self, shape: Shape, strategy: Strategy, number: int, places: tuple[int, ...], short: int) -> None:
        """Go on with more recomputation than that of a strategy that is short of so many bytes."""
        unsettled = self._space.unsettled(strategy)
        if number == 0:
            self._recompute(shape, unsettled, 1, places)
        blocks = self._amounts.more(unsettled, self._space.recomputes[number], short)
        if blocks is not None:
            changed = self._space.recomputing(unsettled, self._space.recomputes[number], blocks)
            self._push(shape.mesh.ranks, self._floors.strategy_s(changed), self._time, shape, changed, number, places)
        else:
            self._short.note(strategy, self._pricer.budget_bytes(strategy) + short)

    # --- what is kept -------------------------------------------------------------------------------------------------

    def _candidate(self, strategy: Strategy) -> Candidate:
        executable = is_executable(strategy, self._space.job)
        return Candidate(strategy=strategy, pricer=self._pricer, executable=executable)

    def _record(self, shape: Shape, strategy: Strategy) -> None:
        """Keep a strategy that fits where it is the best of its shape."""
        key, found = shape[:-1], self._candidate(strategy)
        if key in self._found and self._found[key].key(self._objective) <= found.key(self._objective):
            return
        self._found[key] = found
        self._recorded += 1
        if len(self._found) >= self._most:
            values = sorted(self._value(candidate) for candidate in self._found.values())
            self._limit = values[self._most - 1]

    def _beaten(self, shape: Shape, step_s: float) -> bool:
        """Whether a strategy of the same shape is better than one that takes so long can be."""
        best = self._found.get(shape[:-1])
        return best is not None and self._value(best) < self._objective.value(shape.mesh.ranks, step_s)

    def _value(self, candidate: Candidate) -> tuple[float, ...]:
        return self._objective.value(candidate.strategy.world_size, candidate.step_s)

    def _best(self) -> list[Candidate]:
        return sorted(self._found.values(), key=lambda candidate: candidate.key(self._objective))[: self._most]

    def _has_room(self, strategy: Strategy, needed_bytes: int) -> bool:
        """Whether what a strategy needs at least fits; what does not is remembered."""
        if needed_bytes <= self._pricer.budget_bytes(strategy):
            return True
        self._short.note(strategy, needed_bytes)
        return False
