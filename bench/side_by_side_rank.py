"""One rank of a bench: keeps contenders, and takes a step of one or counts its memory when asked.

Orders name the module next to this file that makes the contenders, by `PEERS`: each builds its model and returns a
step, `batch -> loss` (None where a rank has none). Its `batch_of(number)` is the batch of a step, and
`warm(**arguments)` what a process does before its memory is counted: what imports bring is no part of it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class Rank:
    """Contenders by name, each a step."""

    def __init__(self) -> None:
        self._steps: dict[str, Any] = {}
        self._batches: dict[str, Any] = {}
        self._taken: dict[str, int] = {}

    def build(self, *, name: str, peers: str, who: str, arguments: dict[str, Any]) -> None:
        """Make one more contender."""
        module = importlib.import_module(peers)
        self._steps[name], self._batches[name] = module.PEERS[who](**arguments), module.batch_of
        self._taken[name] = 0

    def losses(self, *, name: str, count: int) -> list[float | None]:
        """Of the next `count` steps."""
        found = [self._step(name) for _ in range(count)]
        return [float(loss) if loss is not None else None for loss in found]

    def time(self, *, name: str) -> tuple[float, float]:
        """Seconds of a step, by the clock and of this process's threads."""
        import torch.distributed as dist

        dist.barrier()
        clock, busy = time.perf_counter(), time.process_time()
        self._step(name)
        return time.perf_counter() - clock, time.process_time() - busy

    def memory(self, *, name: str, peers: str, who: str, arguments: dict[str, Any]) -> tuple[int, int]:
        """Of a contender in a process that has made no other.

        Returns:
            Bytes of tensors at the peak of a step, and how many bytes the process grew by in it, since before the
            model was made.
        """
        import torch.distributed as dist
        from live_tensors import LiveTensors, peak_resident, resident

        importlib.import_module(peers).warm(**arguments)
        before = resident()
        self.build(name=name, peers=peers, who=who, arguments=arguments)
        for _ in range(2):
            self._step(name)
        dist.barrier()
        grown = peak_resident(lambda: self._step(name)) - before
        dist.barrier()
        with LiveTensors() as counted:
            self._step(name)
        return counted.peak, grown

    def call(self, *, module: str, function: str, arguments: dict[str, Any]) -> Any:
        """Something else that a module can do on all ranks."""
        return getattr(importlib.import_module(module), function)(**arguments)

    def _step(self, name: str) -> Any:
        self._taken[name] += 1
        return self._steps[name](self._batches[name](self._taken[name]))


def main(rank: int, world: int, store: str) -> None:
    answers = os.fdopen(os.dup(1), "w")  # the ordinary output belongs to the libraries
    os.dup2(2, 1)
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mine = Rank()
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(mine, order.pop("do"))(**order)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
