"""What a step of a strategy holds in memory on every pipeline rank: its schedule played with bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from meshwright.cost.held import adapted, stage_moments
from meshwright.cost.moments import Moment, StageMoments
from meshwright.cost.stages import Stage, cut
from meshwright.schedule import compute_orders
from meshwright.spec import Job, ModelSpec, Strategy
from meshwright.spec.conventions import Convention

__all__ = ["CATEGORIES", "RankMemory", "StepMemory", "recomputed_blocks"]

CATEGORIES = ("parameters", "gradients", "optimizer", "gathered", "activations", "logits")

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

    def begun(self, stage: StageMoments) -> bool:
        """Whether gradients of weights have been made."""
        return self.backwards > 0 or (stage.fused and self.inputs > 0)


class RankMemory:
    """The memory of one pipeline rank: at rest on every tier, and at the largest moment of a step.

    Attributes:
        stages: the stages that this rank holds, in forward order.
        parameters, optimizer: bytes at rest on the device; of the parameters, `cut_parameters` are shares of a group.
        host, disk: bytes on those tiers.
        largest_unit: bytes of the largest ZeRO unit but the root unit, in the compute dtype.
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
        return max(self.moments(), key=lambda moment: moment.total)

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
        order = list(self._actions)
        total = Counter(stage for kind, stage, _ in order if kind == "forward")
        progress = {stage: _Progress() for stage in self._moments}
        seen: set[tuple[object, ...]] = set()
        for kind, index, microbatch in order:
            stage, mine = self._moments[index], progress[index]
            mine.held.setdefault(microbatch, (0, 0))
            base = self._beside(progress, total, index, microbatch)
            earlier, last = mine.begun(stage), mine.backwards == total[index] - 1
            key = (kind, index, mine.forwards == 0, earlier, last, base)
            if key not in seen:
                seen.add(key)
                if kind == "forward":
                    inside = stage.forward(first=mine.forwards == 0)
                    base = base.plus(_gradients(stage.idle(begun=False, ended=False, earlier=earlier)))
                else:
                    half = {"backward-input": "input", "backward-weight": "weight"}.get(kind, "")
                    inside = stage.backward(earlier=earlier, last=last, half=half)
                yield from (moment.plus(base) for moment in inside)
            self._advance(kind, stage, mine, microbatch)
        ending = [stage.optimizer() for stage in self._moments.values()]
        yield _sum("optimizer", ending)

    def _beside(self, progress: dict[int, _Progress], total: Counter[int], current: int, microbatch: int) -> Moment:
        """What is there besides the current action: other microbatches of its stage, and the other stages."""
        parts = []
        for index, other in progress.items():
            held = [both for key, both in other.held.items() if (index, key) != (current, microbatch)]
            parts.append(Moment("", 0, 0, 0, sum(both[0] for both in held), sum(both[1] for both in held)))
            if index != current:
                stage, begun, ended = self._moments[index], other.forwards > 0, other.backwards == total[index]
                parts.append(stage.idle(begun=begun, ended=ended, earlier=other.begun(stage)))
        return _sum("", parts)

    @staticmethod
    def _advance(kind: str, stage: StageMoments, mine: _Progress, microbatch: int) -> None:
        if kind == "forward":
            mine.forwards += 1
            mine.held[microbatch] = stage.kept
        elif kind == "backward-input":
            mine.inputs += 1
            mine.held[microbatch] = stage.waiting, 0
        else:
            mine.backwards += 1
            del mine.held[microbatch]


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

    @property
    def floor_bytes(self) -> int:
        """What is there at the moment of the loss whatever the microbatch and the recompute policy (one stage)."""
        stage = self.moments_of[0]
        at_loss = stage.idle(begun=True, ended=False, earlier=False).gathered
        return self.ranks[0].parameters + self.ranks[0].optimizer + at_loss


def _by_rank(strategy: Strategy, microbatches: int) -> Iterator[tuple[list[int], Actions]]:
    """The stages of each pipeline rank, and its actions."""
    if strategy.pp == 1:
        # The third of many microbatches finds what the second did: three are enough.
        few = range(min(microbatches, 3))
        yield [0], [(kind, 0, k) for k in few for kind in ("forward", "backward")]
        return
    for order in _orders(strategy.schedule, strategy.pp, microbatches, strategy.virtual_stages):
        yield sorted({stage for _, stage, _ in order}), order


@lru_cache(maxsize=64)  # a search looks at many strategies of one schedule
def _orders(name: str, ranks: int, microbatches: int, virtual: int) -> tuple[tuple[tuple[str, int, int], ...], ...]:
    """The compute actions of each rank: kind, stage, microbatch."""
    orders = compute_orders(name, ranks=ranks, microbatches=microbatches, virtual_stages=virtual)
    return tuple(tuple((action.kind, action.stage, action.microbatch) for action in actions) for actions in orders)


def _gradients(moment: Moment) -> Moment:
    return Moment("", moment.gradients, moment.reduced, 0, 0, 0)


def _sum(phase: str, parts: Iterable[Moment]) -> Moment:
    total = Moment(phase, 0, 0, 0, 0, 0)
    for part in parts:
        total = total.plus(part)
    return total
