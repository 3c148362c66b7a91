"""What only a machine with GPUs can prove: NCCL, bf16 kernels, the allocator. Run it there: `make gpu-check`.

Starts one rank per GPU and trains a small decoder with every ZeRO stage, in float32 and with bf16 compute; losses and
gradient norms must be equal for all stages, states must lie on the GPU, a checkpoint must go on under another stage.
Exits with 2 on a machine with a single GPU, where only part of this can be checked.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

STEPS = 4
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


def rank_main(folder: Path) -> None:
    """One rank: all stages, compared with ZeRO-0."""
    import torch.distributed as dist

    from meshwright import Engine, Job, Strategy
    from meshwright.models import Decoder, DecoderConfig, token_loss
    from meshwright.runtime import join_ranks, local_device

    device = local_device()
    join_ranks(device)
    world = dist.get_world_size()
    config = DecoderConfig(hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8)

    def engine(zero: int, compute: str) -> Engine:
        return Engine(
            lambda: Decoder(config),
            token_loss,
            lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
            Job(global_batch=4 * world, sequence=128, compute_dtype=compute, clip_norm=1.0),  # type: ignore[arg-type]
            Strategy(dp=world, zero=zero, microbatch=2, prefetch=1 if zero == 3 and world > 1 else 0),
        )

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (STEPS, 4 * world, 129), generator=generator)
    for compute in ("float32", "bfloat16"):
        reference: list[tuple[float, float]] = []
        for zero in range(4):
            made = engine(zero, compute)
            reports = [made.step((batch[:, :-1].contiguous(), batch[:, 1:].contiguous())) for batch in ids]
            found = [(report.loss, report.grad_norm) for report in reports]
            reference = reference or found
            worst = max(
                abs(a - b) / abs(b) for f, r in zip(found, reference, strict=True) for a, b in zip(f, r, strict=True)
            )
            kind = next(iter(made.named_parameters().values())).device.type
            if dist.get_rank() == 0:
                peak = reports[-1].peak_bytes
                print(
                    f"{compute:9} zero={zero} worst relative difference {worst:.1e} on {kind}; memory {peak}",
                    flush=True,
                )
            if not worst <= TOLERANCE[compute] or kind == "cpu":
                raise SystemExit(f"zero={zero} {compute}: {worst:.1e} is over {TOLERANCE[compute]} or not on a GPU")
            if zero == 3:
                made.save(folder / compute)
                other = engine(1, compute)
                other.load(folder / compute)
                pair = (ids[0][:, :-1].contiguous(), ids[0][:, 1:].contiguous())
                before, after = made.step(pair).loss, other.step(pair).loss
                if not abs(before - after) <= TOLERANCE[compute] * abs(before):
                    raise SystemExit(f"after loading under ZeRO-1 the loss is {after}, and {before} without")
    dist.destroy_process_group()


def main() -> int:
    """Start the ranks; 0 when everything held."""
    if "RANK" in os.environ:
        rank_main(Path(sys.argv[1]))
        return 0
    if not torch.cuda.is_available():
        print("gpu-check: no GPU here, so nothing was checked", file=sys.stderr)
        return 1
    if torch.cuda.device_count() == 1:
        print("gpu-check: one GPU: sharding, hybrid sharding and NCCL between ranks are NOT checked", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={torch.cuda.device_count()}",
        ]
        code = subprocess.run([*command, __file__, folder], check=False).returncode
    return code or (0 if torch.cuda.device_count() > 1 else 2)


if __name__ == "__main__":
    sys.exit(main())
