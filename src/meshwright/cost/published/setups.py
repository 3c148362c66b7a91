"""What a published row ran, as far as all sources have it in common: degrees, batch, devices."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from meshwright.cost.estimate import Estimate, estimate
from meshwright.cost.published.rows import PublishedRow, Unpriced
from meshwright.errors import MeshwrightError
from meshwright.spec import Cluster, Device, Job, Layout, NodeGroup, Strategy
from meshwright.spec.conventions import Convention
from meshwright.spec.devices import find_device
from meshwright.spec.families import Described
from meshwright.spec.job import Recompute

__all__ = ["Run", "Setup", "mixed_precision", "read_run"]

_GIB = 2**30
_PER_NODE = 8
#: Where the catalogue does not know a device: what the driver and error correction leave of its memory.
_VISIBLE = 0.985
#: Memory in GB of devices that tables name without it and the catalogue does not know.
_SIZES = {"A6000": 48}
#: Times the stages: microbatches enough to fill a pipeline.
_FILLED = 2


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a published row ran.

    `convention` declares how its stack holds bytes; `plain` tells its kernels and what the row itself says (recompute,
    chunked loss), and nothing of the stack's bytes. `assumed` lists what the row does not say and what was taken.
    """

    row: PublishedRow
    described: Described
    cluster: Cluster
    job: Job
    strategy: Strategy
    convention: Convention
    plain: Convention
    assumed: tuple[str, ...] = ()

    def estimate(self, *, declared: bool = True) -> Estimate:
        """Its predicted memory, with or without the bytes of its stack declared.

        Raises:
            ConfigError: the model cannot be laid out so.
        """
        told, strategy = (self.convention if declared else self.plain), self.strategy
        # Once a pipeline is full, more microbatches find what those before did.
        count = min(strategy.microbatches(self.job.global_batch), _FILLED * strategy.pp)
        job = replace(self.job, stack=told.stack, global_batch=count * strategy.microbatch * strategy.dp)
        layout = Layout.of(job, strategy, attention=told.attention)
        return estimate(self.described.at(layout), self.cluster, job, strategy, convention=told)


@dataclass(kw_only=True)
class Run:
    """Degrees and batch of a row, before they become a `Strategy` and a `Job`. `options` are the strategy's fields."""

    row: PublishedRow
    options: dict[str, Any]
    gpus: int
    global_batch: int
    sequence: int
    assumed: list[str]

    def setup(
        self, described: Described, told: Convention, *, job: Job | None = None, plain: Convention | None = None
    ) -> Setup:
        """The setup with this model and stack; the job is in mixed precision unless it is given."""
        return Setup(
            row=self.row,
            described=described,
            cluster=_cluster(self.row.text("gpu_type"), self.gpus),
            job=job or mixed_precision(self),
            strategy=Strategy(**self.options),
            convention=told,
            plain=plain or told.without_bytes(),
            assumed=tuple(self.assumed),
        )


def mixed_precision(run: Run) -> Job:
    """Float32 weights and gradients, bf16 compute."""
    return Job(global_batch=run.global_batch, sequence=run.sequence, compute_dtype="bfloat16")


def read_run(row: PublishedRow, *, zero: int | None = None, sequence: int | None = None) -> Run:
    """Degrees and batch of a row.

    Args:
        zero: where the stack knows better than the column.
        sequence: where the column is empty.

    Raises:
        Unpriced: one of them is not published, or they contradict each other.
    """
    assumed = []
    gpus, tp, pp, cp = row.count("gpus"), row.count("tp", 1), row.count("pp", 1), row.count("cp", 1)
    dp = row.count("dp", gpus // (tp * pp * cp))
    if dp * tp * pp * cp != gpus:
        raise Unpriced(f"dp x tp x pp x cp is {dp * tp * pp * cp}, but it ran on {gpus} GPUs")
    microbatch, batch = row.count("micro_batch"), row.count("global_batch", 0)
    if not batch:
        batch = dp * microbatch * (_FILLED * pp if pp > 1 else 1)
        assumed.append(f"global batch {batch}" + (", enough to fill the pipeline" if pp > 1 else ""))
    options: dict[str, Any] = {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "microbatch": microbatch,
        "zero": row.count("zero") if zero is None else zero,
        "recompute": _recompute(row.text("recompute").lower()),
    }
    if pp > 1:
        chunks = row.count("vp", 1)
        options |= {"schedule": "interleaved-1f1b", "virtual_stages": chunks} if chunks > 1 else {"schedule": "1f1b"}
    return Run(
        row=row,
        options=options,
        gpus=gpus,
        global_batch=batch,
        sequence=sequence or row.count("seq"),
        assumed=assumed,
    )


def _recompute(text: str) -> Recompute:
    if text.startswith("full"):
        return "full"
    return "selective" if "selective" in text or "sac" in text else "none"


def _cluster(gpu: str, count: int) -> Cluster:
    per_node = min(count, _PER_NODE)
    nodes = NodeGroup(count=math.ceil(count / per_node), devices=per_node, device=_device(gpu))
    return Cluster(name=f"{count} x {gpu}", nodes=(nodes,))


@lru_cache(maxsize=64)
def _device(gpu: str) -> Device:
    """The device that a table names, by the catalogue where its memory agrees, else by the memory that is named."""
    exact = re.search(r"([0-9.]+) ?GiB", gpu)
    if exact:
        return Device(name=gpu, kind="cuda", memory_bytes=int(float(exact[1]) * _GIB))
    rough = re.search(r"([0-9]+) ?GB", gpu, re.IGNORECASE)
    name = gpu if gpu.startswith(("RTX", "Titan")) else re.split(r"[ (]", gpu.replace("_", "-"))[0]
    size = float(rough[1]) if rough else _SIZES.get(name)
    try:
        known = find_device(name).device
    except MeshwrightError as error:
        if size is None:
            raise Unpriced(f"the memory of {gpu} is not published") from error
    else:
        if size is None or abs(known.memory_bytes / _GIB - size) < 0.1 * size:
            return known
    return Device(name=gpu, kind="cuda", memory_bytes=int(size * _VISIBLE * _GIB))
