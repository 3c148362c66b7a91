"""Seconds of a published step, from whichever column a row has."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.cost.published.flops import counted_flops
from meshwright.cost.published.rows import Unpriced
from meshwright.cost.published.setups import Setup

__all__ = ["COLUMNS", "disagreement", "published_steps"]

#: Columns that tell a step's time, the one to trust most first.
COLUMNS = ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
#: From here on two columns of a row are said to contradict each other.
_FAR = 0.05


def published_steps(setup: Setup) -> dict[str, float]:
    """Seconds per optimizer step by each column that the row has, the one to trust most first.

    TFLOP/s and MFU count as the row's source counts (`Setup.counting`); MFU is of the peak of the dtype in which the
    layers multiply matrices.
    """
    return dict(_steps(setup))


def disagreement(steps: dict[str, float]) -> str:
    """What the other columns say where one differs by more than 5% from the first, "" where none does."""
    values = list(steps.items())
    far = [(name, value / values[0][1] - 1) for name, value in values[1:] if abs(value / values[0][1] - 1) > _FAR]
    return ", ".join(f"{name} says {share:+.0%}" for name, share in far)


def _steps(setup: Setup) -> Iterator[tuple[str, float]]:
    row, gpus = setup.row, setup.strategy.world_size
    for column in COLUMNS:
        value = row.maybe(column)
        if not value or value < 0:
            continue
        if column == "step_time_s":
            yield column, value
        elif column == "tokens_per_s_per_gpu":
            yield column, setup.tokens / (value * gpus)
        else:
            try:
                rate = value * 1e12 if column == "tflops_per_gpu" else _share(value) * _peak(setup)
                yield column, _flops(setup) / (rate * gpus)
            except Unpriced:
                continue


def _share(mfu: float) -> float:
    """A utilisation as a fraction; above 1.5 it is in percent."""
    return mfu / 100 if mfu > 1.5 else mfu


def _flops(setup: Setup) -> float:
    recompute = setup.strategy.recompute == "full" and not setup.strategy.recompute_blocks
    whole = setup.model(whole=True)
    each = counted_flops(setup.counting, whole, setup.described, setup.job.sequence, recompute=recompute)
    return float(each * setup.job.global_batch)


def _peak(setup: Setup) -> float:
    peaks = setup.cluster.nodes[0].device.peak_flops_per_s
    told = setup.convention.product_dtype
    peak = peaks.get(told, 0.0) if told else peaks.get(setup.job.compute_dtype, 0.0)
    if not peak:
        raise Unpriced(f"the peak of {setup.row.text('gpu_type')} is not known")
    return peak
