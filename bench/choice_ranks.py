"""Ranks that stay: one process per rank, which keeps the engines of a model's strategies and takes steps when asked.

The parent's side is `Ranks`; run as a script, this file is one rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Ranks"]


class Ranks:
    """`world` processes in one gloo group, one thread each.

    Args:
        script: what a rank runs, with its number, `world` and a file for them to meet as arguments.
        python: that runs it.
    """

    def __init__(self, world: int, *, script: str = __file__, python: str = sys.executable) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="meshwright-choice-")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self._processes = [
            subprocess.Popen(
                [python, script, str(rank), str(world), str(Path(self._folder.name) / "store")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(world)
        ]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._folder.cleanup()

    def ask(self, order: dict[str, Any]) -> list[Any]:
        """The answer of every rank to one order.

        Raises:
            RuntimeError: a rank has ended; its own error stands on the screen.
        """
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.write(json.dumps(order) + "\n")
                process.stdin.flush()
        return [self._answer(process) for process in self._processes]

    def _answer(self, process: subprocess.Popen[str]) -> Any:
        line = process.stdout.readline() if process.stdout is not None else ""
        if not line:
            raise RuntimeError(f"a rank has ended with exit code {process.wait()}")
        return json.loads(line)


class _Rank:
    """One rank: engines by strategy, all of the model that was asked for last."""

    def __init__(self) -> None:
        self._engines: dict[str, Any] = {}
        self._batch: Any = None
        self._job: Any = None
        self._config: Any = None

    def model(self, *, model: dict[str, Any], job: dict[str, Any]) -> None:
        """Another model and job; the engines of the last one are gone."""
        import gc

        import torch

        from meshwright.spec import DecoderShape, Job
        from meshwright.spec.files import from_table
        from meshwright.train.model import decoder_config

        self._engines.clear()
        gc.collect()
        self._config = decoder_config(from_table(DecoderShape, model, "model"))
        self._job = from_table(Job, job, "job")
        numbers = torch.Generator().manual_seed(self._job.seed)
        shape = (self._job.global_batch, self._job.sequence + 1)
        tokens = torch.randint(self._config.vocab_size, shape, generator=numbers)
        self._batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def steps(self, *, strategy: str, count: int) -> list[float]:
        """Seconds of `count` steps after one that is not counted; an engine is built at its first visit."""
        import torch.distributed as dist

        if strategy not in self._engines:
            self._engines[strategy] = self._build(strategy)
            self._engines[strategy].step(self._batch)
        engine = self._engines[strategy]
        dist.barrier()
        engine.step(self._batch)
        return [engine.step(self._batch).step_s for _ in range(count)]

    def _build(self, strategy: str) -> Any:
        from meshwright.models import Decoder, token_loss
        from meshwright.runtime import Engine
        from meshwright.spec import parse_strategy
        from meshwright.train.optim import optimizer_factory

        return Engine(
            lambda: Decoder(self._config),
            token_loss,
            optimizer_factory(self._job.optimizer),
            self._job,
            parse_strategy(strategy),
            measure_memory="never",
        )


def main(rank: int, world: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mine = _Rank()
    orders: dict[str, Any] = {"model": mine.model, "steps": mine.steps}
    for line in sys.stdin:
        order = json.loads(line)
        answer = orders[order.pop("do")](**order)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
