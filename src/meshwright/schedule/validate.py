"""The validator: a schedule that cannot run is an error before it is played, never a hang."""

from __future__ import annotations

from operator import itemgetter

from meshwright.errors import PlanError
from meshwright.schedule.action import Action, Schedule
from meshwright.schedule.units import needs_units

__all__ = ["validate"]

#: How far a microbatch has come on a stage.
_NEW, _FORWARD, _INPUT, _DONE = range(4)


def validate(schedule: Schedule) -> None:
    """Check that a schedule is complete, matched, in order, and free of deadlock.

    - Every microbatch runs forward once on each stage, then either backward once, or backward-input and then
      backward-weight once. Stages are numbered without gaps and each lies on one rank.
    - Between neighbouring stages on different ranks each activation and each gradient is sent once, after the action
      that makes it, to the rank of the other stage, and received there once, before the action that needs it. Stages
      on one rank send nothing and run in the order of their needs.
    - A unit is gathered only while released and released only while gathered; a stage that is gathered at all is whole
      at each of its compute actions (the first stage's backward-input, which does nothing, aside), and released at the
      end. A unit is reduced only where a backward (or
      backward-weight) has made a gradient since its last reduce, and where a stage is reduced at all no gradient is
      left over.
    - No deadlock under rendezvous in program order: each rank does its actions strictly one after the other, and a send
      and its receive are done together, once both ranks have come to them. Whatever passes this passes with every
      weaker demand (buffered or asynchronous sends, receives posted early).

    Raises:
        PlanError: naming the rank, the action and what is wrong with it.
    """
    check = _Check(schedule)
    for rank, actions in enumerate(schedule.ranks):
        check.rank(rank, actions)
    check.complete()
    check.matched()
    check.meetings()


class _Check:
    """What is known of a schedule's microbatches and messages while its ranks are gone through."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.m = schedule.microbatches
        self.stage_ranks = schedule.stage_ranks
        self.last = len(self.stage_ranks) - 1
        if not schedule.ranks or self.m < 1 or -1 in self.stage_ranks or self.last < 0:
            raise self.bad(0, None, "each stage from 0 on must run on a rank, and a microbatch through them")
        if not isinstance(schedule.units, int) and len(schedule.units) != self.last + 1:
            raise self.bad(0, None, f"units are given for {len(schedule.units)} of {self.last + 1} stages")
        m, inner = self.m, self.last * self.m
        self.places = inner + m
        self.state = bytearray(self.places)
        # By the stage and microbatch that needs it: whether an activation, or gradient, is sent, and is there. The
        # first stage needs no activation and the last no gradient; what stays on its rank counts as sent.
        self.sent = (bytearray(b"\1" * m + bytes(inner)), bytearray(bytes(inner) + b"\1" * m))
        self.there = (bytearray(self.sent[0]), bytearray(self.sent[1]))
        # The messages of each rank in order: activations are numbered from 0, gradients from `places`.
        self.messages: list[list[int]] = [[] for _ in schedule.ranks]

    def bad(self, rank: int, action: Action | None, why: str) -> PlanError:
        at = f" at {describe(action)}" if action else ""
        return PlanError(
            f"schedule {self.schedule.name} is not playable: rank {rank}{at}",
            why=why,
            fix="this is a fault of the schedule's maker",
        )

    def rank(self, rank: int, actions: tuple[Action, ...]) -> None:
        """Go through a rank's actions. One loop with few calls: a schedule may have hundreds of thousands of them."""
        m, state, places, ranks = self.m, self.state, self.places, self.stage_ranks
        own = frozenset(stage for stage, at in enumerate(ranks) if at == rank)
        ready_forward, ready_backward = self.there
        units = _Units(self, rank, actions)
        messages = self.messages[rank]
        for action in actions:
            kind, stage, microbatch, _, peer, other = action
            if stage not in own or not 0 <= microbatch < m:
                raise self.bad(rank, action, f"its stages are {sorted(own)}, its microbatches 0 to {m - 1}")
            place = stage * m + microbatch
            if kind == "receive":
                before = other == stage - 1
                there = ready_forward if before else ready_backward
                if other is None or (other != stage + 1 and not before) or not 0 <= other <= self.last:
                    raise self.bad(rank, action, self.why_not_message(rank, action))
                if there[place] or ranks[other] != peer or peer == rank:
                    raise self.bad(rank, action, self.why_not_message(rank, action))
                there[place] = 1
                messages.append(place if before else place + places)
                continue
            elif kind == "send":
                ahead = other == stage + 1
                target = place + m if ahead else place - m
                sent, need = (self.sent[0], _FORWARD) if ahead else (self.sent[1], _INPUT)
                if other is None or (other != stage - 1 and not ahead) or not 0 <= target < places:
                    raise self.bad(rank, action, self.why_not_message(rank, action))
                if state[place] < need or sent[target] or ranks[other] != peer or peer == rank:
                    raise self.bad(rank, action, self.why_not_message(rank, action))
                sent[target] = 1
                messages.append(target if ahead else target + places)
                continue
            elif kind == "forward":
                if state[place] or not ready_forward[place]:
                    raise self.bad(rank, action, self.why_not_compute(action))
                state[place] = _FORWARD
                if stage + 1 in own:
                    self.sent[0][place + m] = ready_forward[place + m] = 1
            elif kind == "backward" or kind == "backward-input":
                if state[place] != _FORWARD or not ready_backward[place]:
                    raise self.bad(rank, action, self.why_not_compute(action))
                state[place] = _DONE if kind == "backward" else _INPUT
                if stage - 1 in own:
                    self.sent[1][place - m] = ready_backward[place - m] = 1
            elif kind == "backward-weight":
                if state[place] != _INPUT:
                    raise self.bad(rank, action, self.why_not_compute(action))
                state[place] = _DONE
            else:
                units.unit_action(action)
                continue
            if units.any:
                units.compute(action)
        units.end()

    def why_not_compute(self, action: Action) -> str:
        kind, stage, microbatch, *_ = action
        state = self.state[stage * self.m + microbatch]
        if kind == "forward":
            if state:
                return "this microbatch has already run forward"
            return f"the activation of stage {stage - 1} is not there: it has not run, or has not been received"
        if kind == "backward-weight":
            return "its backward-input has not run, or its backward-weight already has"
        if state != _FORWARD:
            return "its forward has not run, or its backward already has"
        return f"the gradient of stage {stage + 1} is not there: it has not run, or has not been received"

    def why_not_message(self, rank: int, action: Action) -> str:
        kind, stage, microbatch, _, peer, other = action
        if other is None or not 0 <= other <= self.last or abs(stage - other) != 1:
            return "sends and receives do not match: the stage at the other end is no neighbour"
        if peer != self.stage_ranks[other]:
            return f"the peer is wrong: stage {other} lies on rank {self.stage_ranks[other]}"
        if peer == rank:
            return "both stages lie on this rank, which sends itself nothing"
        what = "activation" if (other > stage) == (kind == "send") else "gradient"
        if kind == "send" and self.state[stage * self.m + microbatch] < (_FORWARD if what == "activation" else _INPUT):
            return f"the {what} is not there yet"
        return f"the {what} is {'sent' if kind == 'send' else 'received'} twice"

    def complete(self) -> None:
        for place, state in enumerate(self.state):
            if state != _DONE:
                stage, microbatch = divmod(place, self.m)
                missing = {_NEW: "forward", _FORWARD: "backward", _INPUT: "backward-weight"}[state]
                why = f"microbatch {microbatch} of stage {stage} does not run {missing}"
                raise self.bad(self.stage_ranks[stage], None, why)

    def matched(self) -> None:
        for what, sent, there in zip(("activation", "gradient"), self.sent, self.there, strict=True):
            if sent == there:
                continue
            place = next(i for i in range(self.places) if sent[i] != there[i])
            stage, microbatch = divmod(place, self.m)
            how = "sent but never received" if sent[place] else "received but never sent"
            why = f"sends and receives do not match: the {what} for stage {stage}, microbatch {microbatch}, is {how}"
            raise self.bad(self.stage_ranks[stage], None, why)

    def meetings(self) -> None:
        """Let ranks meet at their messages, in order, until all are through or all wait."""
        done = [0] * len(self.messages)
        waiting: dict[int, int] = {}
        ready = list(range(len(self.messages)))
        while ready:
            rank = ready.pop()
            line, index = self.messages[rank], done[rank]
            while index < len(line):
                message = line[index]
                other = waiting.pop(message, None)
                if other is None:
                    waiting[message] = rank
                    break
                done[other] += 1
                ready.append(other)
                index += 1
            done[rank] = index
        stuck = [rank for rank, line in enumerate(self.messages) if done[rank] < len(line)]
        if stuck:
            texts = [f"rank {rank} waits at {self.nth_message(rank, done[rank])}" for rank in stuck[:4]]
            raise self.bad(stuck[0], None, "deadlock, each waits for another: " + ", ".join(texts))

    def nth_message(self, rank: int, index: int) -> str:
        found = [action for action in self.schedule.ranks[rank] if action.kind in ("send", "receive")]
        return describe(found[index])


class _Units:
    """Which units of one rank are gathered, and which have a gradient that is not reduced."""

    def __init__(self, check: _Check, rank: int, actions: tuple[Action, ...]) -> None:
        self.check = check
        self.number = rank
        self.any = not {"gather", "release", "reduce"}.isdisjoint(map(itemgetter(0), actions))
        placed = [action for action in actions if action.kind in ("gather", "release", "reduce")] if self.any else []
        own = {action.stage for action in placed}
        self.sharded = {action.stage for action in placed if action.kind == "gather"}
        self.reduced = {action.stage for action in placed if action.kind == "reduce"}
        self.gathered: dict[int, set[int]] = {stage: set() for stage in own}
        self.fresh: dict[int, set[int]] = {stage: set() for stage in own}

    def compute(self, action: Action) -> None:
        stage = action.stage
        if (
            stage in self.sharded
            and needs_units(action)
            and len(self.gathered[stage]) < self.check.schedule.units_of(stage)
        ):
            raise self.check.bad(self.number, action, f"units of stage {stage} are not gathered")
        if stage in self.reduced and action.kind in ("backward", "backward-weight"):
            self.fresh[stage] = set(range(self.check.schedule.units_of(stage)))

    def unit_action(self, action: Action) -> None:
        kind, stage, _, unit, *_ = action
        if kind not in ("gather", "release", "reduce"):
            raise self.check.bad(self.number, action, f"{kind} is no kind of action")
        count = self.check.schedule.units_of(stage)
        if unit is None:
            units = set(range(count))
        elif 0 <= unit < count:
            units = {unit}
        else:
            raise self.check.bad(self.number, action, f"the stage has {count} units")
        if kind == "reduce":
            if not units <= self.fresh[stage]:
                why = "no backward has run since its last reduce, so there is no gradient"
                raise self.check.bad(self.number, action, why)
            self.fresh[stage] -= units
        elif kind == "gather":
            if units & self.gathered[stage]:
                raise self.check.bad(self.number, action, "the unit is already gathered")
            self.gathered[stage] |= units
        else:
            if not units <= self.gathered[stage]:
                raise self.check.bad(self.number, action, "the unit is not gathered")
            self.gathered[stage] -= units

    def end(self) -> None:
        for stage, units in self.gathered.items():
            if units:
                why = f"units {sorted(units)} of stage {stage} are still gathered at the end of the step"
                raise self.check.bad(self.number, None, why)
        for stage, units in self.fresh.items():
            if units:
                why = f"gradients of units {sorted(units)} of stage {stage} are not reduced at the end of the step"
                raise self.check.bad(self.number, None, why)


def describe(action: Action) -> str:
    """An action in words."""
    text = f"{action.kind} of stage {action.stage}, microbatch {action.microbatch}"
    if action.unit is not None:
        text += f", unit {action.unit}"
    return text if action.peer is None else f"{text} with rank {action.peer}"
