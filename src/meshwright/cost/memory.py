"""What a step of a strategy holds in memory on every pipeline rank: its schedule played with bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import pairwise
from operator import mul

from meshwright.cost.held import adapted, stage_moments
from meshwright.cost.moments import Moment, StageMoments
from meshwright.cost.occasions import Occasion, Occasions, Progress, occasions
from meshwright.cost.stages import Stage, cut
from meshwright.schedule import stage_ranks
from meshwright.spec import Job, ModelSpec, Strategy
from meshwright.spec.conventions import Convention

__all__ = ["CATEGORIES", "RankMemory", "StepMemory", "recomputed_blocks"]

CATEGORIES = ("parameters", "gradients", "optimizer", "gathered", "activations", "logits")


def recomputed_blocks(model: ModelSpec, strategy: Strategy) -> int:
    """How many of the first layers recompute."""
    layers = len(model.layers)
    return 0 if strategy.recompute == "none" else min(strategy.recompute_blocks or layers, layers)


#: All on which the moments inside an action depend: its kind and stage; whether it is the stage's first, gradients of
#: earlier microbatches are there, and it is the stage's last.
_Situation = tuple[str, int, bool, bool, bool]


class RankMemory:
    """The memory of one pipeline rank: at rest on every tier, and at the largest moment of a step.

    Attributes:
        stages: the stages that this rank holds, in forward order.
        parameters, optimizer: bytes at rest on the device; of the parameters, `cut_parameters` are shares of a group.
        host, disk: bytes on those tiers.
        largest_unit: bytes of the largest ZeRO unit but the root unit, in the compute dtype.
        gathers_in_flight: units that ZeRO-3 gathers at once at most.
    """

    def __init__(
        self,
        stages: tuple[Stage, ...],
        moments: dict[int, StageMoments],
        find: Callable[[], Occasions],
        message_bytes: int = 0,
    ) -> None:
        self.stages = stages
        self._moments, self._find, self._message_bytes = moments, find, message_bytes
        self._places = {stage.index: at for at, stage in enumerate(stages)}
        self._besides: dict[tuple[int, tuple[Progress, ...]], Moment] = {}
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
        sent = [self._moments[stage.index].sent for stage in self.stages]
        most = 0
        for one, lines in self._occasions.items():
            if one.kind == "forward":
                most = max(most, *(sum(map(mul, held, sent)) + self._moments[one.stage].sent for held in lines))
        return most

    @cached_property
    def _occasions(self) -> Occasions:
        return self._find()

    @cached_property
    def peak(self) -> Moment:
        """The moment with the most bytes; the first one of equals."""
        # Of actions that differ only in what lies beside them, the one with the most beside it is enough.
        stages = [self._moments[index] for index in self._places]
        sizes = [sum(stage.kept) for stage in stages] + [stage.waiting for stage in stages]
        fullest: dict[_Situation, tuple[int, int, Occasion, tuple[int, ...]]] = {}
        for occasion, lines in self._occasions.items():
            most, first, held = -1, 0, tuple[int, ...]()
            for line, number in lines.items():  # the first comes first
                total = sum(map(mul, line, sizes))
                if total > most:
                    most, first, held = total, -number, line
            situation, total = self._situation(occasion), self._beside(occasion).total + most
            if situation not in fullest or (total, first) > fullest[situation][:2]:
                fullest[situation] = total, first, occasion, held
        # The first of equals in the order of the step.
        largest = {situation: self._largest(situation) for situation in fullest}
        whole = {key: (total + largest[key].total, first) for key, (total, first, *_) in fullest.items()}
        found = max(whole, key=whole.__getitem__)
        ending, inside = self._ending(), largest[found].plus(self._flying(*fullest[found][2:]))
        return ending if ending.total > inside.total else inside

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
        order = sorted(
            (number, occasion, held) for occasion, lines in self._occasions.items() for held, number in lines.items()
        )
        seen = set()
        for _, occasion, held in order:
            both = self._situation(occasion), self._flying(occasion, held)
            if both not in seen:
                seen.add(both)
                layers = range(len(self._moments[occasion.stage].layers))
                yield from (moment.plus(both[1]) for moment in self._inside(both[0], layers))
        yield self._ending()

    def _situation(self, occasion: Occasion) -> _Situation:
        kind, stage, first, last, progress = occasion
        now = progress[self._places[stage]]
        earlier = now.backwards or (self._moments[stage].fused and now.halves)
        return kind, stage, first, earlier, last

    def _beside(self, occasion: Occasion) -> Moment:
        """What the other stages hold besides microbatches in flight."""
        key = occasion.stage, occasion.progress
        if key not in self._besides:
            stages = zip(self._places, occasion.progress, strict=True)
            others = [self._moments[index].after(there) for index, there in stages if index != occasion.stage]
            self._besides[key] = others[0] if len(others) == 1 else _sum("", others)
        return self._besides[key]

    def _flying(self, occasion: Occasion, held: tuple[int, ...]) -> Moment:
        """The same, with the microbatches in flight."""
        stages = [self._moments[index] for index in self._places]
        kept = [stage.kept for stage in stages]
        activations = sum(map(mul, held, [*(one for one, _ in kept), *(stage.waiting for stage in stages)]))
        logits = sum(map(mul, held, (one for _, one in kept)))
        beside = self._beside(occasion)
        activations += self._message_bytes
        return Moment(beside.phase, beside.gradients, beside.reduced, beside.gathered, activations, logits)

    def _largest(self, situation: _Situation) -> Moment:
        """The moment inside an action with the most bytes; the first one of equals. Stages that are alike share it."""
        kind, index, first, earlier, last = situation
        known = self._moments[index].largest
        key = kind, first, earlier, last
        if key not in known:
            known[key] = max(self._inside(situation, self._moments[index].telling), key=_total)
        return known[key]

    def _inside(self, situation: _Situation, layers: Sequence[int]) -> Iterator[Moment]:
        """The moments inside an action, where it comes to these layers of its stage."""
        kind, index, first, earlier, last = situation
        stage = self._moments[index]
        if kind == "forward":
            waiting = stage.idle(begun=False, ended=False, earlier=earlier)
            beside = Moment("", waiting.gradients, waiting.reduced, 0, 0, 0)
            yield from (moment.plus(beside) for moment in stage.forward(layers, first=first))
        else:
            half = {"backward-input": "input", "backward-weight": "weight"}.get(kind, "")
            yield from stage.backward(layers, earlier=earlier, last=last, half=half)

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
        moments, alike = {}, dict[tuple[object, ...], StageMoments]()
        for stage in self.stages:
            layers = sum(block.kind == "layer" for block in stage.blocks)
            here = min(recomputed, layers)
            recomputed -= here
            key = (stage.alike or stage.index, not stage.index, stage.loss_bytes, here)
            if key not in alike:
                alike[key] = stage_moments(stage, job, strategy, convention, recomputed=here)
            moments[stage.index] = alike[key]
        lies = stage_ranks(strategy.schedule, strategy.pp, strategy.virtual_stages)
        ranks = []
        for rank in range(strategy.pp):
            held = tuple(stage for stage in self.stages if lies[stage.index] == rank)
            find = partial(occasions, strategy.schedule, strategy.pp, self.microbatches, strategy.virtual_stages, rank)
            own = {stage.index: moments[stage.index] for stage in held}
            # What other stacks hold of messages is in what was fitted to them.
            messages = self._messages(lies, rank, strategy.microbatch) if convention is None else 0
            ranks.append(RankMemory(held, own, find, messages))
        self.ranks = tuple(ranks)
        self.moments_of = moments

    def _messages(self, lies: tuple[int, ...], rank: int, sequences: int) -> int:
        """Bytes of messages of a pipeline rank: what it has sent last to each other one, and what it receives next."""
        sizes: dict[int, int] = {}
        for index, other in pairwise(range(len(lies))):
            ends = {lies[index], lies[other]}
            if rank in ends and len(ends) > 1:
                (peer,) = ends - {rank}
                size = sequences * self.stages[index].blocks[-1].output_bytes
                sizes[peer] = max(sizes.get(peer, 0), size)
        return sum(sizes.values()) + max(sizes.values(), default=0)

    @cached_property
    def worst(self) -> RankMemory:
        """The rank with the largest peak; the first one of equals."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)


def _total(moment: Moment) -> int:
    return moment.total


def _sum(phase: str, parts: Iterable[Moment]) -> Moment:
    total = Moment(phase, 0, 0, 0, 0, 0)
    for part in parts:
        total = total.plus(part)
    return total
