"""The simplest model of time: a constant utilisation per device. What a cost model must beat."""

from __future__ import annotations

from meshwright.cost.published.setups import Setup

__all__ = ["MFU", "baseline_s", "utilisation"]

#: Mean MFU of each device over the rows that constants are fitted on: MosaicML llm-foundry, and torchtitan's Llama 8B.
#: Model flops with attention over all pairs, of the peak of the dtype in which layers multiply matrices.
MFU = {
    "A100-SXM-40GB": 0.503,
    "A100-SXM-80GB": 0.534,
    "H100-SXM-80GB": 0.376,
    "H100500W-96GB": 0.249,
    "H200-SXM-141GB": 0.317,
}
_ALL = sum(MFU.values()) / len(MFU)
#: Where a device's peak is not known: that of an A100.
_PEAK = 312e12


def baseline_s(setup: Setup, flops: float) -> float:
    """Seconds of a step of `flops` model flops at the mean MFU of its device; of other devices at the mean of all."""
    return flops / (utilisation(setup) * peak(setup) * setup.strategy.world_size)


def utilisation(setup: Setup) -> float:
    """The mean MFU of its device."""
    return MFU.get(setup.cluster.nodes[0].device.name, _ALL)


def peak(setup: Setup) -> float:
    """Flops per second at the peak of the dtype in which its layers multiply matrices."""
    peaks = setup.cluster.nodes[0].device.peak_flops_per_s
    told = setup.convention.product_dtype
    return peaks.get(told) or peaks.get(setup.job.compute_dtype) or max(peaks.values(), default=_PEAK)
