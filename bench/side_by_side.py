"""Contenders side by side: the engine and others on the same model, weights, data, loss and optimizer.

They take steps in turns of one each, in random order. A round makes pairs: a ratio is the median of those of the
rounds, its interval 95% of a bootstrap over rounds. Memory is counted for each in processes of its own. The first
losses of all have to be equal.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from choice_ranks import Ranks

__all__ = ["OURS", "RANK", "Case", "add_arguments", "compare", "others_of", "say"]

#: What a rank runs.
RANK = str(Path(__file__).parent / "side_by_side_rank.py")
DRAWS, INSIDE = 4000, 0.95
#: Steps whose losses are compared, and how far apart they may be, relative.
FIRST, APART = 4, 1e-4
OURS = "meshwright"


@dataclass(frozen=True)
class Case:
    """One setting, and who runs it besides the engine.

    Attributes:
        given: what a contender is built with.
    """

    name: str
    ranks: int
    peers: tuple[str, ...]
    given: dict[str, Any]

    def contenders(self, others: dict[str, str]) -> Iterator[str]:
        """Those that can run here: the engine first."""
        yield from (who for who in (OURS, *self.peers) if who != "deepspeed" or who in others)


@dataclass
class Found:
    """What was measured of a contender: seconds of each round, by the clock and of cores; bytes."""

    clock_s: list[float] = field(default_factory=list)
    core_s: list[float] = field(default_factory=list)
    tensor_bytes: int = 0
    process_bytes: int = 0
    losses: list[float] = field(default_factory=list)


Results = dict[tuple[str, str], Found]


def measure_time(cases: list[Case], peers: str, others: dict[str, str], rounds: int, results: Results) -> None:
    """Steps in turns, of cases on the same number of ranks.

    Args:
        peers: the module that makes contenders.
        others: the Python that runs a contender, where it is not this one.
    """
    order = random.Random(0)
    with ExitStack() as stack:
        started: dict[tuple[str, str], Ranks] = {}
        turns: list[tuple[Case, str, Ranks]] = []
        for case in cases:
            for who in case.contenders(others):
                python = others.get(who, sys.executable)
                kept = (python, case.name if who in others else "")  # DeepSpeed has one mesh in a process
                if kept not in started:
                    started[kept] = stack.enter_context(Ranks(case.ranks, script=RANK, python=python))
                ranks, name = started[kept], f"{case.name} {who}"
                ranks.ask({"do": "build", "name": name, "peers": peers, "who": who, "arguments": case.given})
                losses = ranks.ask({"do": "losses", "name": name, "count": FIRST})
                by_step = zip(*losses, strict=True)
                results[case.name, who] = Found(
                    losses=[statistics.mean(loss for loss in step if loss is not None) for step in by_step]
                )
                turns.append((case, who, ranks))
                say(f"{name} built")
        for number in range(rounds):
            for case, who, ranks in order.sample(turns, len(turns)):
                answers = ranks.ask({"do": "time", "name": f"{case.name} {who}"})
                results[case.name, who].clock_s.append(max(clock for clock, _ in answers))
                results[case.name, who].core_s.append(sum(core for _, core in answers))
            say(f"{cases[0].ranks} ranks: round {number + 1} of {rounds}")


def measure_memory(cases: list[Case], peers: str, others: dict[str, str], results: Results) -> None:
    """Each contender in processes of its own; the rank that needs most."""
    for case in cases:
        for who in case.contenders(others):
            order = {"do": "memory", "name": case.name, "peers": peers, "who": who, "arguments": case.given}
            with Ranks(case.ranks, script=RANK, python=others.get(who, sys.executable)) as ranks:
                answers = ranks.ask(order)
            found = results.setdefault((case.name, who), Found())
            found.tensor_bytes, found.process_bytes = (max(column) for column in zip(*answers, strict=True))
            say(f"{case.name}: memory of {who}")


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """The median of the rounds' ratios, and the bounds of its bootstrap."""
    pairs, draw = [a / b for a, b in zip(ours, theirs, strict=True)], random.Random(1)
    drawn = sorted(statistics.median(draw.choices(pairs, k=len(pairs))) for _ in range(DRAWS))
    cut = int(DRAWS * (1 - INSIDE) / 2)
    return statistics.median(pairs), drawn[cut], drawn[-1 - cut]


def report(cases: list[Case], others: dict[str, str], results: Results) -> Iterator[str]:
    """A row for each pair."""
    yield f"{'':<24} {'against':<13} {'step':>15} {'time':>20} {'core seconds':>20} {'tensors':>18} {'process':>18}"
    for case in cases:
        ours = results[case.name, OURS]
        for who in list(case.contenders(others))[1:]:
            theirs = results[case.name, who]
            words = f"{case.name:<24} {who:<13}"
            if ours.clock_s:
                steps = (statistics.median(found.clock_s) for found in (ours, theirs))
                words += " " + "{:>5.2f} : {:>5.2f} s".format(*steps)
                for column in ("clock_s", "core_s"):
                    words += "   {:.3f} ({:.3f}-{:.3f})".format(*ratio(getattr(ours, column), getattr(theirs, column)))
            for column in ("tensor_bytes", "process_bytes"):
                a, b = getattr(ours, column), getattr(theirs, column)
                if a and b:
                    words += f"  {a / 2**20:>3.0f}:{b / 2**20:>3.0f} MiB {a / b:.3f}"
            if ours.losses:
                apart = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses, strict=True))
                words += "" if apart <= APART else f"  LOSSES DIFFER by {apart:.1e}"
            yield words


def say(words: str) -> None:
    """To whoever waits."""
    print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `compare` and `others_of` read."""
    parser.add_argument("--rounds", type=int, default=24, help="of steps on 2 ranks; on 4 there are half as many")
    parser.add_argument("--ranks", type=int, choices=(2, 4), help="these cases alone")
    parser.add_argument("--case", help="the cases alone whose names have this in them")
    parser.add_argument("--deepspeed", metavar="PYTHON", help="the Python of an environment with DeepSpeed")
    parser.add_argument("--only", choices=("time", "memory"))


def others_of(chosen: argparse.Namespace) -> dict[str, str]:
    """The Python of each contender that has one of its own."""
    return {"deepspeed": chosen.deepspeed} if chosen.deepspeed else {}


def compare(every: Sequence[Case], peers: str, chosen: argparse.Namespace) -> None:
    """Measure the cases that were asked for, and print a row for each pair."""
    others, begun, load = others_of(chosen), time.monotonic(), os.getloadavg()[0]
    cases = [case for case in every if chosen.ranks in (None, case.ranks) and (chosen.case or "") in case.name]
    results: Results = {}
    if chosen.only != "memory":
        for ranks in sorted({case.ranks for case in cases}):
            alike = [case for case in cases if case.ranks == ranks]
            measure_time(alike, peers, others, chosen.rounds if ranks == 2 else chosen.rounds // 2, results)
    if chosen.only != "time":
        measure_memory(cases, peers, others, results)
    for line in report(cases, others, results):
        print(line)
    print(f"load before: {load:.1f}; {time.monotonic() - begun:.0f} s")
