"""From the records of all runs to what is told: every deviation as a part of what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from meshwright.measure.equality import Mismatch, Run, deviations, join
from meshwright.measure.verify.asked import CLIP_NORM, job_of
from meshwright.measure.verify.runs import OPTIMIZERS, RATES, Facts
from meshwright.spec import Strategy
from meshwright.spec.verified import ModuleDeviation, Verified

__all__ = ["compare_runs", "failed"]

_ENGINE, _PLAIN = "one process, the same microbatches", "plain PyTorch, the whole batch"
_MOST_TOLD = 20
#: What is told first: a wrong tensor explains a wrong norm, and a wrong start everything.
_ORDER = ("initial", "steps", "weight", "gradient", "update", "scalar", "report")


def failed(strategy: Strategy, facts: Facts, sequence: int, why: str, log: str) -> Verified:
    """A verification whose ranks did not come to an end, where one process did."""
    return Verified(
        strategy=str(strategy),
        copy=facts.copy,
        ranks=strategy.world_size,
        global_batch=job_of(strategy, sequence).global_batch,
        against={},
        failure=why,
        log=log,
    )


@dataclass
class _Found:
    """What the comparisons have found so far."""

    facts: Facts
    largest: dict[tuple[str, str], float] = field(default_factory=dict)
    """By kind and module (or scalar)."""
    against: dict[str, float] = field(default_factory=dict)
    worst: tuple[float, str, Mismatch | None] = (-1.0, "", None)
    beyond: dict[tuple[int, int, str], tuple[float, str]] = field(default_factory=dict)
    """Mismatches by step, kind and name: by how much at the most, and in words."""

    def note(self, entry: Mismatch, reference: str, optimizer: str) -> None:
        share = _share(entry)
        module = self.facts.modules.get(entry.name, (entry.name, "", 0))[0]
        place = (entry.kind.split()[0], module)
        self.largest[place] = max(self.largest.get(place, 0.0), share)
        self.against[reference] = max(self.against.get(reference, 0.0), share)
        words = f"{_named(entry)}, step {entry.step} of {optimizer}"
        if share > self.worst[0]:
            self.worst = (share, words, entry)
        if not entry.within:
            key = (entry.step, _ORDER.index(entry.kind.split()[0]), entry.name)
            told = f"{words}: {entry.error:.2g} where {entry.bound:.2g} is allowed, against {reference}"
            self.beyond[key] = max(self.beyond.get(key, (0.0, "")), (share, told))

    def told(self) -> tuple[str, ...]:
        """Mismatches in words: those of the earliest step first, of one step the tensors, the most wrong first."""
        found = sorted(self.beyond.items(), key=lambda item: (*item[0][:2], -item[1][0]))
        return tuple(words for _, (_, words) in found[:_MOST_TOLD])


def compare_runs(
    strategy: Strategy, facts: Facts, sequence: int, ranks: Mapping[str, Sequence[Path]], references: Mapping[str, Any]
) -> Verified:
    """Compare what every rank has recorded with both references, an optimizer at a time.

    Args:
        strategy: how the ranks ran.
        facts: about the model.
        sequence: tokens per sequence.
        ranks: the files of all ranks, by optimizer.
        references: the files of the references, by optimizer, under `engine` and `plain`.
    """
    found, clipped = _Found(facts), True
    for optimizer in OPTIMIZERS:
        runs = join([_load(place) for place in ranks[optimizer]])
        clipped &= all(step.grad_norm > CLIP_NORM for step in runs[0].steps)
        for name, reference in ((_ENGINE, "engine"), (_PLAIN, "plain")):
            wanted = _load(references[reference][optimizer])
            for entry in _entries(runs, wanted, optimizer):
                found.note(entry, name, optimizer)
    worst = found.worst[2]
    return Verified(
        strategy=str(strategy),
        copy=facts.copy,
        ranks=strategy.world_size,
        global_batch=job_of(strategy, sequence).global_batch,
        loss=max(found.largest.get(("scalar", "loss"), 0.0), found.largest.get(("weight", "of the loss"), 0.0)),
        norm=max(found.largest.get(("scalar", name), 0.0) for name in ("grad_norm", "clipped_norm")),
        modules=tuple(_modules(found)),
        against=found.against,
        worst=found.worst[1],
        worst_error=worst.error if worst else 0.0,
        worst_bound=worst.bound if worst else 0.0,
        clipped=clipped,
        mismatches=found.told(),
        beyond=len(found.beyond),
    )


def _entries(runs: Sequence[Run], wanted: Run, optimizer: str) -> Iterator[Mismatch]:
    """Every deviation of every rank; ranks of one replica hold the same tensors."""
    for rank, run in enumerate(runs):
        if [step.report for step in run.steps] != [step.report for step in runs[0].steps]:
            yield Mismatch("report", f"of rank {rank}, which differs from that of rank 0", 0, math.inf, 0.0)
    for run in {id(run.initial): run for run in runs}.values():
        steps = [
            replace(step, weight=own.weight) if math.isnan(step.weight) else step
            for step, own in zip(wanted.steps, run.steps, strict=True)
        ]
        yield from deviations(
            run, Run(wanted.initial, steps), dtype="float64", optimizer=optimizer, learning_rate=RATES[optimizer]
        )


def _modules(found: _Found) -> Iterator[ModuleDeviation]:
    sizes: dict[tuple[str, str], int] = {}
    for name, kind, size in found.facts.modules.values():
        sizes[name, kind] = sizes.get((name, kind), 0) + size
    for (name, kind), size in sizes.items():
        yield ModuleDeviation(
            name=name,
            kind=kind,
            parameters=size,
            gradient=found.largest.get(("gradient", name), 0.0),
            update=max(found.largest.get(("update", name), 0.0), found.largest.get(("initial", name), 0.0)),
        )


def _share(entry: Mismatch) -> float:
    """A deviation as a part of what is allowed; nothing may be off where nothing is allowed."""
    if not entry.within:
        return max(entry.error / entry.bound, 1.0) if entry.bound > 0 and math.isfinite(entry.error) else 1e300
    return entry.error / entry.bound if entry.bound > 0 else 0.0


def _named(entry: Mismatch) -> str:
    scalars = {"grad_norm": "gradient norm", "clipped_norm": "clipped gradient norm"}
    if entry.kind == "scalar":
        return scalars.get(entry.name, entry.name)
    joint = " " if entry.kind in ("weight", "report", "steps") else " of "
    return f"{entry.kind}{joint}{entry.name}"


def _load(place: Path) -> Run:
    run: Run = torch.load(place, weights_only=False, mmap=True)
    return run
