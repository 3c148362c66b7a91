"""What a step of a strategy holds in memory on every pipeline rank: its schedule played with bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from meshwright.cost.held import adapted, stage_moments
from meshwright.cost.moments import Moment, StageMoments
from meshwright.cost.stages import Stage, cut
from meshwright.schedule import compute_orders
from meshwright.spec import Job, ModelSpec, Strategy
from meshwright.spec.conventions import Convention

__all__ = ["CATEGORIES", "RankMemory", "StepMemory", "recomputed_blocks"]

CATEGORIES = ("parameters", "gradients", "optimizer", "gathered", "activations", "logits")

#: Schedules that hold every microbatch of a step at once. The others repeat themselves: after so many microbatches a
#: stage no moment is new.
_ALL_IN_FLIGHT = ("gpipe", "looped-bfs")
_STEADY = 4
_NOTHING = (0, 0)
#: Actions of one rank in order: kind, stage, microbatch.
Actions = Iterable[tuple[str, int, int]]


def recomputed_blocks(model: ModelSpec, strategy: Strategy) -> int:
    """How many of the first layers recompute."""
    layers = len(model.layers)
    return 0 if strategy.recompute == "none" else min(strategy.recompute_blocks or layers, layers)


@dataclass
class _Progress:
    """How far one stage is in the step, and what its microbatches in flight hold."""

    forwards: int = 0
    inputs: int = 0
    backwards: int = 0
    held: dict[int, tuple[int, int]] = field(default_factory=dict)


class _Situation(NamedTuple):
    """All on which the moments inside an action depend: the action, and how far its stage is."""

    kind: str
    stage: int
    first: bool
    earlier: bool
    last: bool


class RankMemory:
    """The memory of one pipeline rank: at rest on every tier, and at the largest moment of a step.

    Attributes:
        stages: the stages that this rank holds, in forward order.
        parameters, optimizer: bytes at rest on the device; of the parameters, `cut_parameters` are shares of a group.
        host, disk: bytes on those tiers.
        largest_unit: bytes of the largest ZeRO unit but the root unit, in the compute dtype.
        gathers_in_flight: units that ZeRO-3 gathers at once at most.
    """

    def __init__(self, stages: tuple[Stage, ...], moments: dict[int, StageMoments], actions: Actions) -> None:
        self.stages = stages
        self._moments, self._actions = moments, actions
        states = [stage.states for stage in moments.values()]
        self.parameters = sum(state.parameters for state in states)
        self.cut_parameters = sum(state.parameters for state in states if state.cut)
        self.optimizer = sum(state.optimizer for state in states)
        self.padding = sum(state.padding for state in states)
        self.host = sum(state.elsewhere("host") for state in states) + self._sent()
        self.largest_unit = max((stage.largest_unit for stage in moments.values()), default=0)
        self.gathers_in_flight = max((stage.gathers_in_flight for stage in moments.values()), default=0)
        self.disk = sum(state.elsewhere("disk") for state in states)

    def _sent(self) -> int:
        """Bytes of activations on the host, at most: those of the microbatches in flight."""
        if not any(stage.sent for stage in self._moments.values()):
            return 0
        held = most = 0
        for kind, stage, _ in self._actions:
            if kind != "backward-weight":
                held += self._moments[stage].sent * (1 if kind == "forward" else -1)
            most = max(most, held)
        return most

    @cached_property
    def peak(self) -> Moment:
        """The moment with the most bytes; the first one of equals."""
        # Of actions that differ only in what lies beside them, the one with the most beside it is enough.
        fullest: dict[_Situation, Moment] = {}
        totals: dict[_Situation, int] = {}
        for situation, others, activations, logits in self._walk():
            total = others.total + activations + logits
            if total > totals.get(situation, -1):
                fullest.pop(situation, None)  # put back behind the others: they stay in the order of the step
                fullest[situation] = others._replace(activations=activations, logits=logits)
                totals[situation] = total
        most, found = -1, None
        for situation, beside in fullest.items():
            more = beside.total
            for moment in self._inside(situation):
                total = more + moment.gradients + moment.gathered + moment.activations + moment.logits
                if total > most:
                    most, found = total, (moment, beside)
        ending = self._ending()
        return ending if found is None or ending.total > most else found[0].plus(found[1])

    @property
    def peak_bytes(self) -> int:
        """Bytes of tensors at the largest moment."""
        return self.parameters + self.optimizer + self.peak.total

    @property
    def at_rest(self) -> dict[str, int]:
        """Bytes on the device between steps, by category."""
        return dict.fromkeys(CATEGORIES, 0) | {"parameters": self.parameters, "optimizer": self.optimizer}

    @property
    def in_step(self) -> dict[str, int]:
        """Bytes on the device at the largest moment, by category."""
        moving = {name: getattr(self.peak, name) for name in ("gradients", "gathered", "activations", "logits")}
        return self.at_rest | moving

    @property
    def divided(self) -> dict[str, int]:
        """The part of `in_step` that the shard group divides: a larger one makes it smaller."""
        if not any(stage.states.sharded for stage in self._moments.values()):
            return dict.fromkeys(CATEGORIES, 0)
        cut = {"parameters": self.cut_parameters, "optimizer": self.optimizer, "gradients": self.peak.reduced}
        return dict.fromkeys(CATEGORIES, 0) | cut

    def moments(self) -> Iterator[Moment]:
        """Every moment of a step that differs from those before it."""
        seen = set()
        for both in self._situations():
            if both not in seen:
                seen.add(both)
                yield from (moment.plus(both[1]) for moment in self._inside(both[0]))
        yield self._ending()

    def _situations(self) -> Iterator[tuple[_Situation, Moment]]:
        """Every action in order, and what is there besides: other microbatches of its stage, and the other stages."""
        for situation, others, activations, logits in self._walk():
            yield situation, others._replace(activations=activations, logits=logits)

    def _walk(self) -> Iterator[tuple[_Situation, Moment, int, int]]:
        """Every action in order; what other stages hold beside it, and activations and logits of other microbatches.
        One loop with few calls, for a search walks through many schedules."""
        order = list(self._actions)
        total = Counter(stage for kind, stage, _ in order if kind == "forward")
        progress = {stage: _Progress() for stage in self._moments}
        states = dict.fromkeys(self._moments, (False, False, False))
        idle = {index: stage.idle(begun=False, ended=False, earlier=False) for index, stage in self._moments.items()}
        others: dict[int, Moment] = {}  # by stage: what the other stages hold, until one of them changes
        activations = logits = 0  # of all microbatches in flight
        for kind, index, microbatch in order:
            stage, mine = self._moments[index], progress[index]
            own = mine.held.pop(microbatch, _NOTHING)
            activations, logits = activations - own[0], logits - own[1]
            if index not in others:
                others[index] = _sum("", (other for number, other in idle.items() if number != index))
            last = mine.backwards == total[index] - 1
            earlier = mine.backwards > 0 or (stage.fused and mine.inputs > 0)
            yield _Situation(kind, index, mine.forwards == 0, earlier, last), others[index], activations, logits
            if kind == "forward":
                mine.forwards += 1
                own = mine.held[microbatch] = stage.kept
            elif kind == "backward-input":
                mine.inputs += 1
                own = mine.held[microbatch] = stage.waiting, 0
            else:
                mine.backwards += 1
                own = _NOTHING
            activations, logits = activations + own[0], logits + own[1]
            earlier = mine.backwards > 0 or (stage.fused and mine.inputs > 0)
            state = mine.forwards > 0, mine.backwards == total[index], earlier
            if state != states[index]:
                states[index] = state
                idle[index] = stage.idle(begun=state[0], ended=state[1], earlier=state[2])
                others.clear()

    def _inside(self, situation: _Situation) -> Iterator[Moment]:
        kind, index, first, earlier, last = situation
        stage = self._moments[index]
        if kind == "forward":
            waiting = stage.idle(begun=False, ended=False, earlier=earlier)
            beside = Moment("", waiting.gradients, waiting.reduced, 0, 0, 0)
            yield from (moment.plus(beside) for moment in stage.forward(first=first))
        else:
            half = {"backward-input": "input", "backward-weight": "weight"}.get(kind, "")
            yield from stage.backward(earlier=earlier, last=last, half=half)

    def _ending(self) -> Moment:
        return _sum("optimizer", [stage.optimizer() for stage in self._moments.values()])


class StepMemory:
    """The memory of a step of a strategy, on every pipeline rank.

    Raises:
        ConfigError: the global batch does not divide into microbatches, or the stages do not fit the model.
        UnsupportedCombination: the schedule is not defined for these numbers of stages and microbatches.
    """

    def __init__(self, model: ModelSpec, job: Job, strategy: Strategy, convention: Convention | None = None) -> None:
        if convention is not None:
            model = adapted(model, convention)
        self.microbatches = strategy.microbatches(job.global_batch)
        self.stages = cut(model, strategy)
        recomputed = recomputed_blocks(model, strategy)
        moments = {}
        for stage in self.stages:
            layers = sum(block.kind == "layer" for block in stage.blocks)
            moments[stage.index] = stage_moments(stage, job, strategy, convention, recomputed=min(recomputed, layers))
            recomputed -= min(recomputed, layers)
        self.ranks = tuple(
            RankMemory(tuple(self.stages[i] for i in held), {i: moments[i] for i in held}, actions)
            for held, actions in _by_rank(strategy, self.microbatches)
        )
        self.moments_of = moments

    @cached_property
    def worst(self) -> RankMemory:
        """The rank with the largest peak; the first one of equals."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)


def _by_rank(strategy: Strategy, microbatches: int) -> Iterator[tuple[list[int], Actions]]:
    """The stages of each pipeline rank, and its actions."""
    if strategy.pp == 1:
        # The third of many microbatches finds what the second did: three are enough.
        few = range(min(microbatches, 3))
        yield [0], [(kind, 0, k) for k in few for kind in ("forward", "backward")]
        return
    steady = _STEADY * strategy.pp * strategy.virtual_stages
    if strategy.schedule in _ALL_IN_FLIGHT or microbatches % strategy.pp:
        steady = microbatches
    for order in _orders(strategy.schedule, strategy.pp, min(microbatches, steady), strategy.virtual_stages):
        yield sorted({stage for _, stage, _ in order}), order


@lru_cache(maxsize=64)  # a search looks at many strategies of one schedule
def _orders(name: str, ranks: int, microbatches: int, virtual: int) -> tuple[tuple[tuple[str, int, int], ...], ...]:
    """The compute actions of each rank: kind, stage, microbatch."""
    orders = compute_orders(name, ranks=ranks, microbatches=microbatches, virtual_stages=virtual)
    return tuple(tuple((action.kind, action.stage, action.microbatch) for action in actions) for actions in orders)


def _sum(phase: str, parts: Iterable[Moment]) -> Moment:
    total = Moment(phase, 0, 0, 0, 0, 0)
    for part in parts:
        total = total.plus(part)
    return total
