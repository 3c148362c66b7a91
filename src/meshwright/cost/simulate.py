"""Plays a schedule with durations and bytes: when each action starts and ends, who is idle, what is held at most.

The model. A rank has three things that run beside each other, each doing one action at a time in the schedule's order:

- the device itself, which computes;
- a wire to each peer, which carries messages. A message leaves as soon as what it carries is computed and the wire is
  free, keeps the wire for `bytes / bytes_per_s`, and arrives `latency_s` later. The two directions of a pair do not
  slow each other. Under `blocking` there are no wires: sender and receiver meet (rendezvous in program order, as the
  validator has it), and both devices wait until the message has arrived.
- one stream of collectives for gathers and reduces, which share the same links. The gathers of a compute action are
  issued when the compute action before it starts (one window ahead). A stage of U equal units goes on unit by unit:
  compute starts when the first unit is gathered and ends no sooner than one unit's share after the last is. The
  reduce of a unit starts when its share of the backward is done, and compute goes on beside it. With `overlap=False`
  gathers and reduces are done by the device, one after the other.

What is not in it: collectives, messages and compute do not slow each other where they run together (durations may be
stretched for that), buffers for gathers one window ahead are taken as there, and a forward and a backward never run
side by side on one device (DualPipeV's pairs run one after the other).

Since every order is fixed beforehand, each time is a maximum of sums of durations: no duration that grows makes
anything earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from meshwright.collector import collector_paused
from meshwright.errors import ConfigError, PlanError
from meshwright.schedule import COMPUTE, Action, InFlight, Kind, Schedule, Span, in_flight
from meshwright.spec import Link

__all__ = ["Durations", "Played", "simulate"]

#: Seconds by kind and stage. Gathers and reduces: of the whole stage, of which each unit takes an equal share.
#: Send: what a message takes beside its latency and bytes. Kinds other than those that compute may be left out (0 s).
Durations = Callable[[Kind, int], float] | Mapping[tuple[Kind, int], float]
_UNIT_KINDS = frozenset(("gather", "release", "reduce"))


@dataclass(frozen=True, kw_only=True)
class Played:
    """A played schedule. Per rank: starts and ends are those of its actions in order, busy is the time it computes.

    `seconds` are those that were given, of each kind of action by stage. `peak_bytes` is the most that a rank holds at
    one time, None where no bytes were given.
    """

    schedule: Schedule
    starts_s: tuple[list[float], ...]
    ends_s: tuple[list[float], ...]
    makespan_s: float
    busy_s: tuple[float, ...]
    seconds: Mapping[str, Sequence[float]] = field(repr=False)
    peak_bytes: tuple[int, ...] | None = None

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Time at which a rank does not compute, from the start of the step to its end on the last rank."""
        return tuple(self.makespan_s - busy for busy in self.busy_s)

    @property
    def bubble_fraction(self) -> float:
        """Idle time over all time, all ranks together."""
        whole = self.makespan_s * len(self.busy_s)
        return 1 - sum(self.busy_s) / whole if whole else 0.0

    @property
    def in_flight(self) -> tuple[InFlight, ...]:
        """The microbatches each rank holds at most."""
        return in_flight(self.schedule)

    def spans(self, rank: int) -> Iterator[Span]:
        """A rank's actions with their times, in the schedule's order."""
        lines = zip(self.schedule.ranks[rank], self.starts_s[rank], self.ends_s[rank], strict=True)
        for (kind, stage, microbatch, unit, peer, peer_stage), start, end in lines:
            waits = 0.0
            if kind in COMPUTE:
                length = self.seconds[kind][stage]
                waits = max(0.0, end - start - length) if end != start + length else 0.0
            yield Span(rank, kind, start, end, stage, microbatch, unit, peer, peer_stage, waits)


@collector_paused()
def simulate(
    schedule: Schedule,
    durations: Durations,
    *,
    link: Link | Callable[[int, int], Link] | None = None,
    message_bytes: float | Callable[[int], float] = 0,
    blocking: bool = False,
    overlap: bool = True,
    held_bytes: Callable[[Action], tuple[int, int]] | None = None,
) -> Played:
    """Play a valid schedule.

    Args:
        schedule: unit by unit or not: both take the same time.
        durations: seconds by kind and stage.
        link: of every message, or by the ranks of sender and receiver; None is a link that takes no time.
        message_bytes: of the activation between stage s and s + 1 for one microbatch, by s or the same for all; the
            gradient that comes back has as many.
        blocking: sender and receiver wait for each other.
        overlap: collectives run beside compute.
        held_bytes: what an action adds to the bytes its rank holds when it starts, and when it ends (negative: frees).
            At equal times what ends is counted before what starts.

    Raises:
        ConfigError: a duration is missing or negative.
        PlanError: the schedule cannot be played to its end; `validate` says why.
    """
    player = _Player(schedule, durations, blocking, overlap)
    player.measure_messages(link, message_bytes)
    player.play()
    makespan = max(max(ends, default=0.0) for ends in player.ends)
    peaks = None
    if held_bytes is not None:
        lines = zip(schedule.ranks, player.starts, player.ends, strict=True)
        peaks = tuple(_peak(actions, starts, ends, held_bytes) for actions, starts, ends in lines)
    return Played(
        schedule=schedule,
        starts_s=tuple(player.starts),
        ends_s=tuple(player.ends),
        makespan_s=makespan,
        busy_s=tuple(player.busy),
        seconds=player.seconds,
        peak_bytes=peaks,
    )


def _peak(
    actions: tuple[Action, ...],
    starts: list[float],
    ends: list[float],
    held_bytes: Callable[[Action], tuple[int, int]],
) -> int:
    changes: list[tuple[float, bool, int]] = []
    for action, start, end in zip(actions, starts, ends, strict=True):
        at_start, at_end = held_bytes(action)
        changes.append((start, True, at_start))
        changes.append((end, False, at_end))
    held = peak = 0
    for _, _, change in sorted(changes):
        held += change
        peak = max(peak, held)
    return peak


class _Player:
    """Every rank's place in its actions, and the times found so far."""

    def __init__(self, schedule: Schedule, durations: Durations, blocking: bool, overlap: bool) -> None:
        self.schedule, self.blocking, self.overlap = schedule, blocking, overlap
        self.m, self.stages, self.size = schedule.microbatches, len(schedule.stage_ranks), len(schedule.ranks)
        self.places = self.stages * self.m
        self.seconds = _table(schedule, durations)
        self.units = [max(1, schedule.units_of(stage)) for stage in range(self.stages)]
        self.starts = [[0.0] * len(actions) for actions in schedule.ranks]
        self.ends = [[0.0] * len(actions) for actions in schedule.ranks]
        self.busy = [0.0] * self.size
        # When a message leaves and arrives, by the stage and microbatch that needs it: activations, then gradients.
        # What is not there yet, or is computed on the rank itself, stays at -1.
        self.leaves = [-1.0] * (2 * self.places)
        self.arrives = self.leaves.copy()
        self.waiting: dict[int, int] = {}
        self.ready = list(range(self.size))
        self.through: set[int] = set()
        # By rank and peer: when the wire is free.
        self.wires: list[dict[int | None, float]] = [{} for _ in schedule.ranks]
        # (seconds to arrive, seconds on the wire) by sending stage; towards the next stage, then the one before.
        self.messages: list[list[tuple[float, float]]] = []
        self.collectives = [_Collectives(self, rank, actions) for rank, actions in enumerate(schedule.ranks)]

    def measure_messages(
        self, link: Link | Callable[[int, int], Link] | None, message_bytes: float | Callable[[int], float]
    ) -> None:
        """How long each message takes."""
        for step in (1, -1):
            line = []
            for stage in range(self.stages):
                other = stage + step
                if not 0 <= other < self.stages:
                    line.append((0.0, 0.0))
                    continue
                own, peer = self.schedule.stage_ranks[stage], self.schedule.stage_ranks[other]
                edge = min(stage, other)
                used = link(own, peer) if callable(link) else link
                count = message_bytes(edge) if callable(message_bytes) else message_bytes
                on_wire = self.seconds["send"][stage] + (count / used.bytes_per_s if used else 0.0)
                line.append((on_wire + (used.latency_s if used else 0.0), on_wire))
            self.messages.append(line)

    def play(self) -> None:
        """Run every rank as far as it comes, again and again."""
        runs = [self.run(rank) for rank in range(self.size)]
        while self.ready:
            rank = self.ready.pop()
            if next(runs[rank], True):
                self.through.add(rank)
        stuck = [rank for rank in range(self.size) if rank not in self.through]
        if stuck:
            raise PlanError(
                f"schedule {self.schedule.name} stops: ranks {', '.join(map(str, stuck))} wait for ever",
                why="what they wait for is never sent, or they wait for each other",
                fix="validate the schedule, which names the fault",
            )

    def run(self, rank: int) -> Iterator[bool]:
        """Play a rank's actions; yields False where it has to wait. One loop with few calls, for there are many."""
        starts, ends = self.starts[rank], self.ends[rank]
        m, places, seconds, leaves, arrives = self.m, self.places, self.seconds, self.leaves, self.arrives
        collectives, blocking, wires, waiting = self.collectives[rank], self.blocking, self.wires[rank], self.waiting
        onward, back = self.messages
        now = busy = 0.0
        for index, action in enumerate(self.schedule.ranks[rank]):
            kind, stage, microbatch, _, peer, other = action
            if kind == "receive" and not blocking:
                number = stage * m + microbatch if other == stage - 1 else stage * m + microbatch + places
                if arrives[number] < 0:
                    waiting[number] = rank
                    yield False
                starts[index], ends[index] = leaves[number], arrives[number]
            elif kind == "send" and not blocking:
                if other == stage + 1:
                    number = other * m + microbatch
                    until_there, on_wire = onward[stage]
                else:
                    number = (stage - 1) * m + microbatch + places
                    until_there, on_wire = back[stage]
                start = wires.get(peer, 0.0)
                if start < now:
                    start = now
                wires[peer] = start + on_wire
                starts[index] = leaves[number] = start
                ends[index] = arrives[number] = start + until_there
                if number in waiting:
                    self.ready.append(waiting.pop(number))
            elif kind == "forward" or kind == "backward" or kind == "backward-input" or kind == "backward-weight":
                start = now
                if kind != "backward-weight":
                    start = arrives[stage * m + microbatch if kind == "forward" else stage * m + microbatch + places]
                    if start < now:
                        start = now
                length = seconds[kind][stage]
                busy += length
                if collectives.any:
                    start, now = collectives.compute(index, start, length)
                else:
                    now = start + length
                starts[index] = start
                ends[index] = now
            elif kind in _UNIT_KINDS:
                now = collectives.play(index, now)
            else:
                number, length = self.both_ways(action)
                if number not in waiting:
                    waiting[number] = rank
                    leaves[number] = now
                    yield False
                else:
                    # The other rank came first, and waits since what was noted.
                    leaves[number] = max(leaves[number], now)
                    arrives[number] = leaves[number] + length
                    self.ready.append(waiting.pop(number))
                starts[index] = leaves[number]
                ends[index] = now = arrives[number]
        self.busy[rank] = busy

    def both_ways(self, action: Action) -> tuple[int, float]:
        """The number of a message, from the side of its sender or receiver, and how long it takes to arrive."""
        _, stage, microbatch, _, _, other = action
        source, target = (stage, other or 0) if action.kind == "send" else (other or 0, stage)
        back = target < source
        return target * self.m + microbatch + back * self.places, self.messages[back][source][0]


class _Collectives:
    """The stream of one rank's gathers and reduces."""

    def __init__(self, player: _Player, rank: int, actions: tuple[Action, ...]) -> None:
        self.player, self.rank, self.actions = player, rank, actions
        self.any = not _UNIT_KINDS.isdisjoint(map(itemgetter(0), actions))
        self.free = 0.0
        self.begun: set[int] = set()
        # Of the compute action that comes next: when its first unit is gathered, and when all are.
        self.first = self.all = 0.0
        # Of the compute action before: start, end, one unit's share, units reduced since.
        self.before = (0.0, 0.0, 0.0)
        self.reduced = 0
        # By the index of a compute action: the gathers of the one after it.
        self.ahead: dict[int, list[int]] = {}
        if self.any:
            last = None
            for index, action in enumerate(actions):
                if action.kind in COMPUTE:
                    last = index
                elif action.kind == "gather" and last is not None:
                    self.ahead.setdefault(last, []).append(index)

    def compute(self, index: int, start: float, length: float) -> tuple[float, float]:
        """Start and end of a compute action that may start at `start`; issues the gathers of the next one."""
        share = length / self.player.units[self.actions[index].stage]
        start = max(start, self.first)
        end = max(start + length, self.all + share) if self.all else start + length
        self.first = self.all = 0.0
        self.before, self.reduced = (start, end, share), 0
        if self.player.overlap:
            for gather in self.ahead.get(index, ()):
                self.gather(gather, start)
        return start, end

    def gather(self, index: int, issued: float) -> float:
        action = self.actions[index]
        count = self.player.units[action.stage]
        length = self.player.seconds["gather"][action.stage]
        one = length / count
        start = max(self.free, issued)
        self.free = start + (length if action.unit is None else one)
        self.first = self.first or start + one
        self.all = self.free
        self._note(index, start, self.free)
        self.begun.add(index)
        return self.free

    def play(self, index: int, now: float) -> float:
        """Play a gather, release or reduce that the rank comes to at `now`; when the rank goes on."""
        action = self.actions[index]
        if action.kind == "release":
            self._note(index, now, now)
            return now
        overlap = self.player.overlap
        if action.kind == "gather":
            if index in self.begun:
                return now
            end = self.gather(index, now)
            return now if overlap else end
        count = self.player.units[action.stage]
        length = self.player.seconds["reduce"][action.stage]
        one = length / count
        if not overlap:
            end = now + (length if action.unit is None else one)
            self._note(index, now, end)
            return end
        started, ended, share = self.before
        self.reduced += 1
        if action.unit is None:
            start = max(self.free, started + share)
            self.free = max(start + length, ended + one)
        else:
            done = ended if self.reduced == count else started + self.reduced * share
            start = max(self.free, done)
            self.free = start + one
        self._note(index, start, self.free)
        return now

    def _note(self, index: int, start: float, end: float) -> None:
        self.player.starts[self.rank][index] = start
        self.player.ends[self.rank][index] = end


def _table(schedule: Schedule, durations: Durations) -> dict[str, list[float]]:
    """Seconds of every kind that occurs, by stage."""
    kinds: dict[Kind, None] = {"send": None}
    for actions in schedule.ranks:
        kinds.update(dict.fromkeys(map(itemgetter(0), actions)))
    table: dict[str, list[float]] = {}
    for kind in kinds:
        line = []
        for stage in range(len(schedule.stage_ranks)):
            if callable(durations):
                value = durations(kind, stage)
            else:
                value = durations.get((kind, stage), -1.0 if kind in COMPUTE else 0.0)
            if value < 0:
                raise ConfigError(
                    f"the duration of {kind} on stage {stage} is missing or negative",
                    fix="give 0 or more seconds for every kind of compute action on every stage",
                )
            line.append(value)
        table[kind] = line
    return table
