"""The step: all microbatches forward and backward, one agreement over all ranks, the optimizer."""

from __future__ import annotations

import logging
import math
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from meshwright.errors import ConfigError
from meshwright.runtime.gradients import clip_factor, scale, sum_of_squares
from meshwright.runtime.memory import MemoryMeter
from meshwright.runtime.microbatches import Microbatches
from meshwright.runtime.player import play
from meshwright.runtime.pp import PipelineRun
from meshwright.runtime.ranks import global_rank, world_size
from meshwright.runtime.report import StepReport
from meshwright.runtime.seeds import preserved_random_state
from meshwright.runtime.uneven import require_no_failure

if TYPE_CHECKING:
    from meshwright.runtime.engine import Engine

__all__ = ["take_step"]

_LOG = logging.getLogger("meshwright")


def take_step(engine: Engine, mine: Any, count: int) -> StepReport:
    """One optimizer step with this rank's rows, of which the first `count` count.

    Raises:
        ConfigError: the loss breaks its contract, or an earlier step has failed.
        RankFailure: another rank failed.
    """
    begin = time.perf_counter()
    engine._require_whole()
    if engine._inside:
        raise ConfigError(
            "a step inside of engine.inference()",
            why="there the model is in evaluation mode, without gradients",
            fix="leave the context first",
        )
    run = Microbatches(engine, mine, count) if engine._pipeline is None else PipelineRun(engine, mine, count)
    measured = engine._measure == "every" or (engine._measure == "first" and engine._measured_steps < 2)
    meter = MemoryMeter(engine.model, engine.optimizer, engine._zero) if measured else None
    if measured and engine.device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(engine.device)
    engine._broken = True  # until the step is done: one that raises leaves half of its gradients behind
    try:
        with preserved_random_state(engine.device), meter or nullcontext():
            engine._zero.begin_step()
            run.meter = meter
            play(engine.schedule, engine._mesh.pp_rank, run, engine._tracer)
            run.finish()
            engine._schedule_ended_s = time.perf_counter()
            engine._zero.finish_reduces()
            if engine._tp is not None:
                run.refused = run.refused or engine._tp.sum_shares(engine._zero)
        loss, weight, norm = _agree(engine, run)
        skipped = not (weight > 0 and math.isfinite(norm))
        scale_used = engine._scale.factor
        factor = 1.0 if skipped else _update(engine, weight, norm)
    finally:
        engine._dropout.stop()
        engine._zero.end_step()
    engine._broken = False
    _note_measurement(engine, meter)
    if weight > 0:
        engine._scale.update(finite=not skipped)
    engine.steps_done += 1
    engine.skipped_steps += skipped
    engine.samples_seen += run.samples
    return StepReport(
        step=engine.steps_done,
        loss=loss,
        weight=weight,
        grad_norm=norm,
        clipped_norm=norm * factor,
        skipped=skipped,
        loss_scale=scale_used,
        tokens=run.tokens,
        step_s=time.perf_counter() - begin,
        peak_bytes=dict(engine._peak_bytes),
        collectives=engine._traffic.take(),
    )


def _agree(engine: Engine, run: Microbatches) -> tuple[float, float, float]:
    """The step's loss, global weight and gradient norm over all ranks, by one small all-reduce."""
    used = engine._zero.used.flags
    values = torch.zeros(6 + len(used), dtype=torch.float64, device=engine.device)
    if engine._mesh.leads:
        values[0], values[1], values[3], values[4] = run.loss, run.weight, run.tokens, run.samples
    if engine._zero.counts_norm:
        values[2] = sum_of_squares(engine._zero.counted())
    values[5], values[6:] = float(run.refused is not None), used
    if world_size() > 1:
        engine._traffic.count("statistics")
        dist.all_reduce(values)
    require_no_failure(run.refused, int(values[5]), "the first step")
    _drop_unused(engine, values[6:])
    loss, weight, squares, tokens, samples = values[:5].tolist()
    run.tokens, run.samples = round(tokens), round(samples)
    if weight <= 0:
        return float("nan"), weight, float("nan")
    return loss / weight, weight, squares**0.5 / weight / engine._scale.factor


def _update(engine: Engine, weight: float, norm: float) -> float:
    """Divide by the global weight, clip once, step the optimizer; the clip factor."""
    gradients = engine._zero.gradients()
    scale(gradients.values(), 1.0 / weight / engine._scale.factor)
    if engine.on_gradients is not None:
        engine.on_gradients({name: parameter.grad for name, parameter in engine.named_parameters().items()})
    factor = clip_factor(norm, engine.job.clip_norm)
    scale(gradients.values(), factor)
    engine.optimizer.step()
    if engine.scheduler is not None:
        engine.scheduler.step()
    return factor


def _drop_unused(engine: Engine, used: torch.Tensor) -> None:
    unused = engine._zero.drop_unused(used.cpu())
    if unused and unused != engine.unused_parameters and global_rank() == 0:
        _LOG.warning(
            "step %d: %d parameters took no part on any rank and keep no gradient: %s",
            engine.steps_done + 1,
            len(unused),
            ", ".join(unused[:8]),
        )
    engine.unused_parameters = unused


def _note_measurement(engine: Engine, meter: MemoryMeter | None) -> None:
    if meter is None:
        return
    engine._measured_steps += 1
    engine._peak_bytes, engine.category_peaks = dict(meter.peak), dict(meter.largest)
    if engine.device.type != "cpu":
        engine._peak_bytes["allocator"] = torch.accelerator.max_memory_allocated(engine.device)
