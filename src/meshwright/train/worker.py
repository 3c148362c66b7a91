"""The process of one rank: `python -m meshwright.train.worker RUN_FOLDER [CHECKPOINT]`, started by `launch`.

Only the standard output of global rank 0 stays where it is. Everything else that ranks print goes to a file each, and
what went wrong is written down for the launcher, which says it once.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import traceback
from pathlib import Path

__all__ = ["main"]

_SET_PARENT_DEATH_SIGNAL = 1


def main(arguments: list[str]) -> None:
    """Train as the rank that the environment names."""
    from meshwright.train.failures import StatusFile, record_failure
    from meshwright.train.folder import RunFolder

    rank = int(os.environ["RANK"])
    folder = RunFolder(Path(arguments[0]))
    _redirect(folder.logs, rank)
    _follow_launcher()
    # Before torch is loaded, and for this process only: all ranks of a machine share its cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // int(os.environ["LOCAL_WORLD_SIZE"]))))
    status = StatusFile(folder.logs, rank)
    try:
        import torch.distributed as dist

        from meshwright.train.loop import train_rank

        train_rank(folder, resume=Path(arguments[1]) if len(arguments) > 1 else None, on_begin=status.enter)
        dist.destroy_process_group()
    except BaseException as error:
        record_failure(folder.logs, rank, status.step, error)
        traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        # A broken process group may block the usual way out, and other ranks wait for this one's connections to close.
        os._exit(1)
    status.close()


def _redirect(logs: Path, rank: int) -> None:
    log = os.open(logs / f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    if rank != 0:
        os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable()


def _follow_launcher() -> None:
    """End with the launcher, however it ends: at once by Ctrl-C, and also when it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    main(sys.argv[1:])
