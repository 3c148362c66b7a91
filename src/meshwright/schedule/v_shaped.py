"""Compute orders of the V-shaped schedules: two stages a rank, the first and the last, the second and the second last.

Rank r of p holds stage r and stage 2p - 1 - r, so that the turn of the pipeline lies on one rank and needs no message.
"""

from __future__ import annotations

from collections import Counter, deque

from meshwright.errors import UnsupportedCombination
from meshwright.schedule.action import Kind, new_action
from meshwright.schedule.orders import Order

__all__ = ["dualpipe_v", "zb_v"]


class _Rank:
    """The actions of one rank while they are being written: each kind and stage counts its own microbatches.

    Microbatches at `limit` and above are counted but not written.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.actions = Order()
        self.counts: Counter[tuple[str, int]] = Counter()
        self.weights: deque[tuple[int, int]] = deque()

    def run(self, kind: Kind, stage: int) -> None:
        """The next microbatch of a kind on a stage. A whole backward counts as a backward-input."""
        counted = "backward-input" if kind == "backward" else kind
        microbatch = self.counts[counted, stage]
        self.counts[counted, stage] += 1
        if microbatch < self.limit:
            self.actions.append(new_action((kind, stage, microbatch, None, None, None)))
        if kind == "backward-input":
            self.weights.append((stage, microbatch))

    def run_oldest_weight(self) -> None:
        """The backward-weight that has waited longest; nothing when none waits."""
        if self.weights:
            self.actions.append(new_action(("backward-weight", *self.weights.popleft(), None, None, None)))


def zb_v(ranks: int, microbatches: int, rank: int) -> Order:
    """ZB-V for any number of microbatches: fewer than 2p - 1 are a filled pipeline with the others left out.

    Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6.
    """
    filled = max(2 * ranks - 1, microbatches)
    down, up, line = rank, 2 * ranks - 1 - rank, _Rank(microbatches)

    def both_halves(stage: int) -> None:
        line.run("backward-input", stage)
        line.run("backward-weight", stage)

    for _ in range(2 * (ranks - rank) - 1):
        line.run("forward", down)
    for _ in range(rank):
        line.run("forward", up)
        line.run("forward", down)
    for _ in range(ranks - rank):
        line.run("forward", up)
        both_halves(up)
    while line.counts["forward", up] < max(line.counts["forward", down], filled):
        if line.counts["forward", down] < filled:
            line.run("forward", down)
        both_halves(down)
        line.run("forward", up)
        both_halves(up)
    for _ in range(rank):
        line.run("backward-input", down)
        line.run("backward-input", up)
    for _ in range(ranks - rank):
        both_halves(down)
    for stage in (up, down):
        while line.counts["backward-weight", stage] < line.counts["backward-input", stage]:
            line.run("backward-weight", stage)
    return line.actions


def dualpipe_v(ranks: int, microbatches: int, rank: int) -> Order:
    """DualPipeV: DualPipe cut in half. A forward and the backward beside it stand one after the other here.

    The eight steps of `DualPipeV.step` in https://github.com/deepseek-ai/DualPipe; DeepSeek-V3, arXiv 2412.19437,
    section 3.2.1.

    Raises:
        UnsupportedCombination: fewer microbatches than stages.
    """
    if microbatches < 2 * ranks:
        fits = microbatches // 2
        fewer = f", or {fits} rank{'s' * (fits > 1)}" if fits else ""
        raise UnsupportedCombination(
            f"schedule dualpipev with {microbatches} microbatches on {ranks} ranks",
            why=f"its two directions meet only with at least as many microbatches as stages, which are {2 * ranks}",
            fix=f"use {2 * ranks} or more microbatches{fewer}, or schedule zb-v, which takes any number",
        )
    down, up, line = rank, 2 * ranks - 1 - rank, _Rank(microbatches)
    after = ranks - rank - 1
    for _ in range(2 * after):
        line.run("forward", down)
    for _ in range(rank + 1):
        line.run("forward", down)
        line.run("forward", up)
    for _ in range(after):
        line.run("backward-input", up)
        line.run_oldest_weight()
        line.run("forward", up)
    for _ in range(microbatches - 2 * ranks + rank + 1):
        line.run("forward", down)
        line.run("backward", up)
        line.run("forward", up)
        line.run("backward", down)
    for _ in range(after):
        line.run("backward", up)
        line.run("forward", up)
        line.run("backward", down)
    # From the middle of the way down on, backwards are split and the weight halves fill what would be idle.
    kind: Kind = "backward"
    for turn in range(2 * (rank + 1)):
        if turn == 2 * ((rank + 1) // 2) + (rank % 2 == 0):
            kind = "backward-input"
        line.run(kind, down if turn % 2 else up)
    for _ in range(after):
        line.run_oldest_weight()
        line.run(kind, down)
    for _ in range(rank + 1):
        line.run_oldest_weight()
    return line.actions
