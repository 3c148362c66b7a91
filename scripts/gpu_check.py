"""What only a machine with GPUs can prove: NCCL, bf16 and fp16 kernels, the allocator. Run it there: `make gpu-check`.

Starts one rank per GPU and goes through the checks below; each compares with ZeRO-0, or with a single process.
Exits with 2 on a machine with a single GPU, where only part of this can be checked.

`--rehearse` goes through the same lines with two ranks on CPUs: that proves this script, and nothing of a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

STEPS = 4
TWO_STAGES = ("interleaved-1f1b", "looped-bfs", "interleaved-zb", "zb-v", "dualpipev")
SCHEDULES = ("gpipe", "1f1b", "zb-h1", *TWO_STAGES)
KINDS: Any = ("bfloat16", "float32")
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
REHEARSE = "--rehearse"


def engine(
    zero: int,
    compute: Any,
    *,
    scope: Any = "global",
    tp: int = 1,
    sequences: bool = False,
    pp: int = 1,
    schedule: Any = "single",
    **job: Any,
) -> Any:
    """A small decoder under a ZeRO stage, its matrices divided over `tp` ranks, its blocks over `pp`."""
    from meshwright import Engine, Job, Strategy
    from meshwright.models import Decoder, DecoderConfig, token_loss

    world, dp = dist.get_world_size(), dist.get_world_size() // (tp * pp)
    width = 32 if DEVICE == "cpu" else 256
    config = DecoderConfig(hidden_size=width, intermediate_size=3 * width, num_hidden_layers=4, num_attention_heads=8)
    return Engine(
        lambda: Decoder(config),
        token_loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
        Job(global_batch=4 * world, sequence=128, compute_dtype=compute, clip_norm=1.0, **job),
        Strategy(
            dp=dp,
            tp=tp,
            pp=pp,
            schedule=schedule,
            virtual_stages=2 if schedule in TWO_STAGES else 1,
            sequence_parallel=sequences,
            zero=zero,
            microbatch=2,
            prefetch=1 if zero == 3 and dp > 1 else 0,
        ),
        batch_scope=scope,
        device=DEVICE,
    )


def batches() -> list[tuple[Tensor, Tensor]]:
    """Global batches, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (STEPS, 4 * dist.get_world_size(), 129), generator=generator)
    return [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in ids]


def close(what: str, found: float, right: float, tolerance: float) -> None:
    """Tell a figure, and end the check where it is too far from what it should be."""
    error = abs(found - right) / abs(right)
    if dist.get_rank() == 0:
        print(f"  {what}: {found:.6g} beside {right:.6g}, {error:.1e} of {tolerance:.0e}", flush=True)
    if not error <= tolerance:
        raise SystemExit(f"{what}: {found} is not {right} within {tolerance}")


def stages(folder: Path) -> None:
    """Losses and norms are equal for all stages; states lie on the GPU; a checkpoint goes on under another stage."""
    for compute in ("float32", "bfloat16", "float16"):
        reference: list[Any] = []
        for zero in range(4):
            made = engine(zero, compute)
            reports = [made.step(batch) for batch in batches()]
            reference = reference or reports
            for report, right in zip(reports, reference, strict=True):
                close(f"{compute} zero={zero} loss of step {report.step}", report.loss, right.loss, TOLERANCE[compute])
                close(f"{compute} zero={zero} norm", report.grad_norm, right.grad_norm, TOLERANCE[compute])
            kinds = {parameter.device.type for parameter in made.named_parameters().values()}
            if kinds != {DEVICE}:
                raise SystemExit(f"parameters lie on {kinds}")
            if dist.get_rank() == 0:
                print(f"  memory {reports[-1].peak_bytes}", flush=True)
            if zero == 3:
                made.save(folder / compute)
                other = engine(1, compute)
                other.load(folder / compute)
                close(
                    "loss after loading",
                    other.step(batches()[0]).loss,
                    made.step(batches()[0]).loss,
                    TOLERANCE[compute],
                )


def narrow_reduces(folder: Path) -> None:
    """Gradients that are sent in bf16 train like those in float32, within their digits."""
    for zero in (0, 2, 3):
        found, right = (engine(zero, "float32", reduce_dtype=kind).step(batches()[0]).grad_norm for kind in KINDS)
        close(f"zero={zero} norm of gradients in bf16", found, right, 1e-2)


def unequal_ranks(folder: Path) -> None:
    """Ranks with unequal numbers of batches and of forwards: nothing hangs, and losses are of the rows there are."""
    world, rank = dist.get_world_size(), dist.get_rank()
    share = [tuple(part[4 * rank : 4 * rank + 4] for part in batch) for batch in batches()]
    losses = []
    for zero in (0, 3):
        made = engine(zero, "float32", scope="local")
        losses.append([report.loss for report in made.steps(share[: 2 + rank % 2])])
        with made.inference() as model:
            for _ in range(1 + 2 * rank):
                model(share[0][0].to(made.device))
        if len(losses[-1]) != min(3, 2 + (world > 1)):
            raise SystemExit(f"{len(losses[-1])} steps")
    for found, right in zip(losses[1], losses[0], strict=True):
        close("loss of unequal batches", found, right, TOLERANCE["float32"])


def batch_norms(folder: Path) -> None:
    """Batch norms over the rows of all ranks are those of one process."""
    from meshwright import Engine, Job, MeanLoss, Strategy

    world = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    pictures, labels = torch.randn(4 * world, 3, 8, 8), torch.randint(0, 5, (4 * world,))
    right = float(F.cross_entropy(model(pictures), labels).detach())
    for zero in (0, 3):
        made = Engine(
            nn.SyncBatchNorm.convert_sync_batchnorm(model),
            MeanLoss(F.cross_entropy, weight=len),
            lambda parameters: torch.optim.SGD(parameters, lr=0.0),
            Job(global_batch=4 * world),
            Strategy(dp=world, zero=zero, microbatch=4),
            device=DEVICE,
        )
        close(f"zero={zero} loss with batch norms", made.step((pictures, labels)).loss, right, TOLERANCE["float32"])


def tensor_parallel(folder: Path) -> None:
    """Divided matrices give the numbers of whole ones, with ZeRO too; a checkpoint goes on undivided."""
    world = dist.get_world_size()
    for tp in sorted({n for n in (2, min(world, 8)) if world % n == 0 and n > 1}):
        for compute in ("float32", "bfloat16"):
            right = engine(0, compute).step(batches()[0])
            for zero, sequences in ((0, False), (0, True), (1, True), (3, False)):
                if zero and world == tp:
                    continue
                made = engine(zero, compute, tp=tp, sequences=sequences)
                report = made.step(batches()[0])
                what = f"{compute} tp={tp} zero={zero} sequence_parallel={sequences}"
                close(f"{what} loss", report.loss, right.loss, TOLERANCE[compute])
                close(f"{what} norm", report.grad_norm, right.grad_norm, TOLERANCE[compute])
        made.save(folder / f"tp-{tp}")
        other = engine(0, "bfloat16")
        other.load(folder / f"tp-{tp}")
        found, loaded = made.step(batches()[1]).loss, other.step(batches()[1]).loss
        close("loss after loading on undivided ranks", loaded, found, TOLERANCE["bfloat16"])


def pipeline(folder: Path) -> None:
    """Every schedule gives the numbers of one stage, with ZeRO and tensor parallelism; a checkpoint goes on uncut."""
    world = dist.get_world_size()
    if world % 2:
        return
    for compute in ("float32", "bfloat16"):
        right = engine(0, compute).step(batches()[0])
        for schedule in SCHEDULES:
            for zero, tp in ((0, 1), (1, 1), (2, 1), (3, 1), (0, 2), (3, 2)):
                if world % (2 * tp) or (zero and world == 2 * tp):
                    continue
                made = engine(zero, compute, tp=tp, pp=2, schedule=schedule)
                report = made.step(batches()[0])
                what = f"{compute} pp=2 {schedule} zero={zero} tp={tp}"
                close(f"{what} loss", report.loss, right.loss, TOLERANCE[compute])
                close(f"{what} norm", report.grad_norm, right.grad_norm, TOLERANCE[compute])
    made.save(folder / "pp-2")
    other = engine(0, "bfloat16")
    other.load(folder / "pp-2")
    found, loaded = made.step(batches()[1]).loss, other.step(batches()[1]).loss
    close("loss after loading without stages", loaded, found, TOLERANCE["bfloat16"])
    with made.inference() as model:
        model(batches()[0][0][:2].to(made.device))


CHECKS: tuple[Callable[[Path], None], ...] = (
    stages,
    narrow_reduces,
    unequal_ranks,
    batch_norms,
    tensor_parallel,
    pipeline,
)
DEVICE = "cpu" if REHEARSE in sys.argv else "cuda"


def rank_main(folder: Path) -> None:
    """One rank: all checks."""
    from meshwright.runtime import join_ranks, local_device

    join_ranks(local_device(DEVICE))
    for check in CHECKS:
        if dist.get_rank() == 0:
            print(f"{check.__name__}: {check.__doc__}", flush=True)
        check(folder)
    dist.destroy_process_group()


def main() -> int:
    """Start the ranks; 0 when everything held."""
    if "RANK" in os.environ:
        rank_main(Path(sys.argv[1]))
        return 0
    rehearsed = REHEARSE in sys.argv
    if not rehearsed and not torch.cuda.is_available():
        print("gpu-check: no GPU here, so nothing was checked", file=sys.stderr)
        return 1
    ranks = 2 if rehearsed else torch.cuda.device_count()
    if ranks == 1:
        print("gpu-check: one GPU: sharding, hybrid sharding and NCCL between ranks are NOT checked", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        code = subprocess.run([*command, __file__, folder, *sys.argv[1:]], check=False).returncode
    if rehearsed:
        print("gpu-check: a rehearsal on CPUs; nothing of a GPU was checked", file=sys.stderr)
    return code or (0 if ranks > 1 else 2)


if __name__ == "__main__":
    sys.exit(main())
