"""Blocks that take a known time, by which a pipeline's measured step can be held against the simulated one.

A block sleeps in its forward, in the half of its backward that its input needs, and in the half that its weight needs.
Sleeping takes no core, so that any number of ranks fit on this machine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["measure"]

WIDTH = 4
FORWARD, INPUT, WEIGHT = "forward", "backward-input", "backward-weight"


@dataclass
class _Slept:
    """Seconds that were asked for, and that it took: a core that is busy wakes late."""

    asked_s: float = 0.0
    took_s: float = 0.0


SLEPT = _Slept()


def _sleep(seconds: float) -> None:
    if seconds:
        begin = time.perf_counter()
        time.sleep(seconds)
        SLEPT.asked_s += seconds
        SLEPT.took_s += time.perf_counter() - begin


class _Through(torch.autograd.Function):
    """What it is given, after `forward_s`, and the same for its gradient after `backward_s`."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        context.backward_s = backward_s
        _sleep(forward_s)
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        _sleep(context.backward_s)
        return gradients[0], None, None


def _through(value: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
    result: torch.Tensor = _Through.apply(value, forward_s, backward_s)  # type: ignore[no-untyped-call]  # torch's own
    return result


class SlowBlock(nn.Module):
    """[B, WIDTH] -> [B, WIDTH], in the seconds given by kind of action."""

    def __init__(self, seconds: dict[str, float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.seconds = seconds

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        through = _through(hidden, self.seconds[FORWARD], self.seconds[INPUT])
        weight = _through(self.weight, 0.0, self.seconds[WEIGHT])
        return through * weight


class SlowModel(nn.Module):
    """An embedding, blocks and a head; only the blocks take time."""

    def __init__(self, blocks: int, seconds: dict[str, float]) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(SlowBlock(seconds) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        result: torch.Tensor = self.head(hidden)
        return result


def measure(*, strategy: str, microbatches: int, seconds: dict[str, float], steps: int) -> dict[str, Any]:
    """Steps of an engine over slow blocks, one on each stage.

    Args:
        seconds: of a stage, by kind of action.

    Returns:
        Seconds of the step as it is simulated, and of each that was taken; how many times longer than asked it slept.
    """
    from meshwright.cost.simulate import simulate
    from meshwright.runtime import Engine
    from meshwright.spec import Job, parse_strategy

    asked = parse_strategy(strategy)
    stages = asked.pp * asked.virtual_stages
    batch = (torch.ones(microbatches, WIDTH), torch.ones(microbatches, 1))
    engine = Engine(
        SlowModel(stages, seconds),
        lambda outputs, targets: ((outputs - targets).square().sum(), targets.numel()),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        Job(global_batch=microbatches, sequence=WIDTH),
        asked,
        example=batch,
        measure_memory="never",
    )
    kinds = {**seconds, "backward": seconds[INPUT] + seconds[WEIGHT]}
    table: Any = {(kind, stage): value for kind, value in kinds.items() for stage in range(stages)}
    simulated = simulate(engine.schedule, table).makespan_s
    engine.step(batch)
    SLEPT.asked_s = SLEPT.took_s = 0.0
    taken = [engine.step(batch).step_s for _ in range(steps)]
    return {"simulated_s": simulated, "taken_s": taken, "slept": SLEPT.took_s / SLEPT.asked_s}
