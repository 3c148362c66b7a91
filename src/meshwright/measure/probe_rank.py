"""The process of one measuring rank: `python -m meshwright.measure.probe_rank RANK RANKS FOLDER ROUNDS full|tiny`.

Rank 0 says on its standard output how far it is, a line of JSON at a time; each rank leaves its figures in the folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from meshwright.measure.probes import Sizes, disk, probes
from meshwright.runtime.ranks import local_device

__all__ = ["main"]

_TIMEOUT_S = 120
#: On a busy machine there are fewer rounds: what has taken so long gets no other.
_ENOUGH_S = 30.0


def main(rank: int, ranks: int, folder: Path, rounds: int, kind: str) -> None:
    """Go through the rounds and write `rank-R.json`: the median seconds of every cell, and facts about the device."""
    torch.set_num_threads(1)
    device = local_device()
    if ranks > 1:
        backend = dist.get_default_backend_for_device(device)
        meeting = f"file://{folder / 'store'}"
        dist.init_process_group(
            backend, init_method=meeting, rank=rank, world_size=ranks, timeout=timedelta(seconds=_TIMEOUT_S)
        )
    sizes = Sizes.of(device.type, tiny=kind == "tiny")
    todo = probes(device, sizes, ranks)
    steps, done = rounds * len(todo) + 1, 0
    begun = time.monotonic()
    cells: dict[str, list[float]] = {}
    for number in range(rounds):
        if number > 1 and _late(begun, device, ranks):
            break
        for name, probe in todo:
            _tell(rank, name, done, steps)
            if ranks > 1:
                dist.barrier()
            for cell, seconds in probe().items():
                cells.setdefault(cell, []).append(seconds)
            done += 1
    found = {cell: median(seconds) for cell, seconds in cells.items()}
    if ranks > 1:
        dist.barrier()
    if rank == 0:
        _tell(rank, "disk", done, steps)
        found |= disk(sizes)
    facts = {"kind": device.type, "multiprocessors": _multiprocessors(device), "torch": torch.__version__}
    (folder / f"rank-{rank}.json").write_text(json.dumps({"cells": found, "facts": facts}), encoding="utf-8")
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def _late(begun: float, device: torch.device, ranks: int) -> bool:
    """Whether the time is up, as rank 0 sees it: another round takes as long as those before did."""
    late = torch.tensor([float(time.monotonic() - begun > _ENOUGH_S)], device=device)
    if ranks > 1:
        dist.broadcast(late, 0)
    return bool(late.item())


def _tell(rank: int, what: str, done: int, steps: int) -> None:
    if rank == 0:
        sys.stdout.write(json.dumps({"what": what, "done": done, "of": steps}) + "\n")
        sys.stdout.flush()


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
