"""What each pipeline rank does in a step, and when: the executed timeline."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from meshwright.runtime.mesh import RankMesh
from meshwright.schedule import Action, Span, Timeline

__all__ = ["Tracer"]

_COLLECTIVES = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "reduce"}
#: A message: the stage and microbatch it goes into, and whether it is an activation.
Message = tuple[int, int, bool]


class Tracer:
    """Notes a rank's actions while a step is played.

    On an accelerator every action is waited for, so that a traced step is slower than others.

    Args:
        mesh: of this rank.
    """

    def __init__(self, mesh: RankMesh) -> None:
        self._mesh = mesh
        # Hosts share no other clock; on one host it advances evenly.
        self._zero_s = time.time() - time.perf_counter()
        self._spans: list[Span] = []
        self._began_s = self._now()
        self._start_s = self._began_s
        self._posted: dict[Message, tuple[Action, float]] = {}

    def begin(self) -> None:
        """An action begins."""
        self._start_s = self._now()

    def end(self, action: Action) -> None:
        """It has ended."""
        if self._mesh.device.type != "cpu":
            torch.accelerator.synchronize()
        if action.kind == "receive":
            self._posted[_message(action)] = action, self._start_s
            return
        self._spans.append(self._span(action, self._start_s, self._now()))

    def arrived(self, stage: int, microbatch: int, *, activation: bool) -> None:
        """What a compute action has waited for is there: only now it begins."""
        now_s = self._now()
        posted = self._posted.pop((stage, microbatch, activation), None)
        if posted is not None:
            self._spans.append(self._span(posted[0], posted[1], now_s))
        self._start_s = now_s

    def collective(self, kind: str, start_s: float, end_s: float) -> None:
        """A collective was called, by the clock of `time.perf_counter`."""
        if kind in _COLLECTIVES:
            start_s, end_s = start_s + self._zero_s, end_s + self._zero_s
            self._spans.append(Span(self._mesh.pp_rank, _COLLECTIVES[kind], start_s, end_s))  # type: ignore[arg-type]

    def finish(self, schedule_ended_s: float) -> Timeline:
        """The timeline of this rank's pipeline, on all of its ranks; all call it when the step is done.

        Args:
            schedule_ended_s: when the last action had ended, by the clock of `time.perf_counter`.
        """
        rank = self._mesh.pp_rank
        self._spans.append(Span(rank, "after", schedule_ended_s + self._zero_s, self._now()))
        told: list[Any] = [(self._began_s, self._spans)]
        if self._mesh.pp > 1:
            told = [None] * self._mesh.pp
            dist.all_gather_object(told, (self._began_s, self._spans), group=self._mesh.pp_group)
        first_s = min(began_s for began_s, _ in told)
        arrivals = {_sent(span): span.end_s for _, spans in told for span in spans if span.kind == "receive"}
        ranks = []
        for _, spans in told:
            ended = (s._replace(end_s=arrivals.get(_sent(s), s.end_s)) if s.kind == "send" else s for s in spans)
            moved = (s._replace(start_s=s.start_s - first_s, end_s=s.end_s - first_s) for s in ended)
            ranks.append(tuple(sorted(moved, key=lambda span: span.start_s)))
        return Timeline("executed", tuple(ranks))

    def _now(self) -> float:
        return time.perf_counter() + self._zero_s

    def _span(self, action: Action, start_s: float, end_s: float) -> Span:
        return Span(
            self._mesh.pp_rank,
            action.kind,
            start_s,
            end_s,
            action.stage,
            action.microbatch,
            action.unit,
            action.peer,
            action.peer_stage,
        )


def _message(action: Action) -> Message:
    """Of a receive."""
    return action.stage, action.microbatch, action.peer_stage == action.stage - 1


def _sent(span: Span) -> tuple[Any, ...]:
    """The same for both ends of a message: where from, where to, and which microbatch."""
    ends = (span.stage, span.peer_stage) if span.kind == "send" else (span.peer_stage, span.stage)
    return (*ends, span.microbatch)
