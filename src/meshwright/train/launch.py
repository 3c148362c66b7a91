"""Starts one worker process per device through torchrun's elastic agent, and says why they ended."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError
from meshwright.train.failures import ExitedRank, clear_stale, first_cause

__all__ = ["Nodes", "launch"]

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
_SHUTDOWN_S = 15
_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher")


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """How several machines find each other; torchrun's own options under their own names.

    Every machine runs the same command. With `rdzv_backend` "c10d" they meet at `rdzv_endpoint` (host:port of one of
    them) under `rdzv_id`; with "static" each also gives its `node_rank`.

    Raises:
        ConfigError: the options contradict each other.
    """

    nnodes: int = 1
    node_rank: int | None = None
    rdzv_endpoint: str = ""
    rdzv_id: str = ""
    rdzv_backend: str = "c10d"

    def __post_init__(self) -> None:
        if self.nnodes < 1:
            raise ConfigError(f"--nnodes {self.nnodes} is not a number of machines", fix="use 1 or more")
        if self.nnodes > 1 and not (self.rdzv_endpoint and self.rdzv_id):
            raise ConfigError(
                f"--nnodes {self.nnodes} without a meeting place",
                why="several machines need to know where to meet and which run they belong to",
                fix="give --rdzv-endpoint HOST:PORT and --rdzv-id NAME, the same on every machine",
            )
        if self.rdzv_backend == "static" and self.node_rank is None:
            raise ConfigError(
                "--rdzv-backend static without a node rank", fix="give --node-rank, 0 on the first machine"
            )
        if self.node_rank is not None and not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(
                f"--node-rank {self.node_rank} with --nnodes {self.nnodes} is not a node",
                fix=f"use 0 to {self.nnodes - 1}",
            )


def launch(arguments: list[str], *, ranks: int, nodes: Nodes, logs: Path, resume: str) -> bool:
    """Run `python -m meshwright.train.worker ARGUMENTS` on every rank of this machine and wait for all to end.

    Args:
        arguments: for the worker.
        ranks: processes on this machine.
        nodes: the other machines.
        logs: the folder where ranks write their logs, states and failures.
        resume: how to go on after a failure, for the text of an error.

    Returns:
        Whether global rank 0 was on this machine.

    Raises:
        RankFailure: a rank raised or died; the text is that rank's own.
        MeshwrightError: a mistake of the user's that a rank found.
        ConfigError: the machines could not meet.
        KeyboardInterrupt: the run was interrupted by Ctrl-C.
        SystemExit: it was ended by another signal.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    clear_stale(logs)
    with _quiet(), _signals_kept(), tempfile.TemporaryDirectory(prefix="meshwright-agent-") as scratch:
        try:
            agent = elastic_launch(_config(ranks, nodes, scratch), sys.executable)
            return 0 in agent("-m", "meshwright.train.worker", *arguments)
        except ChildFailedError as error:
            raise first_cause(logs, _exited(error.failures), resume=resume) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + int(error.sigval)) from None
        except (RendezvousError, ValueError, ConnectionError, TimeoutError) as error:
            raise ConfigError(
                f"the machines cannot meet at {nodes.rdzv_endpoint or 'this machine'}",
                why=str(error),
                fix="check --rdzv-endpoint, --rdzv-id, --rdzv-backend and --nnodes on every machine",
            ) from error


def _config(ranks: int, nodes: Nodes, scratch: str) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    alone = nodes.nnodes == 1 and not nodes.rdzv_endpoint
    return LaunchConfig(
        min_nodes=nodes.nnodes,
        max_nodes=nodes.nnodes,
        nproc_per_node=ranks,
        run_id=nodes.rdzv_id or uuid.uuid4().hex,
        rdzv_backend=nodes.rdzv_backend,
        rdzv_endpoint="localhost:0" if alone else nodes.rdzv_endpoint,
        rdzv_configs={"rank": nodes.node_rank} if nodes.rdzv_backend == "static" else {},
        local_addr="localhost" if alone else None,
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=_SHUTDOWN_S,
        signals_to_handle=",".join(_SIGNALS),
        logs_specs=DefaultLogsSpecs(log_dir=scratch),
    )


def _exited(failures: dict[int, Any]) -> list[ExitedRank]:
    """The agent's failures in the order it noticed them, those that it ended itself marked.

    At the first failure the agent sends SIGTERM to all others, and SIGKILL to what is left after `_SHUTDOWN_S`.
    """
    entries = list(failures.items())
    if not entries:
        return []
    first_s = min(failure.timestamp for _, failure in entries)
    others = any(failure.exitcode != -signal.SIGTERM for _, failure in entries)
    exited = []
    for order, (rank, failure) in enumerate(entries):
        asked = failure.exitcode == -signal.SIGTERM and (others or order > 0)
        forced = failure.exitcode == -signal.SIGKILL and failure.timestamp - first_s >= _SHUTDOWN_S - 1
        exited.append(ExitedRank(rank=rank, exit_code=failure.exitcode, order=order, by_launcher=asked or forced))
    return exited


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the agent's own messages off the screen: what went wrong is said once, by `first_cause`."""
    silent = logging.NullHandler()
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(silent)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(silent)
            logger.propagate = propagate


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Put back the signal handlers and the variable that the agent sets and leaves."""
    name = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    variable = os.environ.get(name)
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in map(signal.Signals.__getitem__, _SIGNALS)} if main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if variable is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = variable
