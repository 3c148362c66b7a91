"""Runs a function on several ranks, each a process of its own, and ends all of them at the first failure.

Ranks are forked from the fork server of the standard library, which has imported torch and everything else that is
slow (`preload.py`) and never runs autograd. They meet in a file, so no port is taken. What a rank prints goes to a log
of its own; it is shown when something fails.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver, get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["RankError", "prepared", "run_one", "run_ranks"]

T = TypeVar("T")

#: After the first failure: how long other ranks may still report theirs, so that the first cause can be told apart.
_GRACE_S = 0.3
#: Set in the environment, the logs of all ranks of a failed run are kept.
_KEEP = "MESHWRIGHT_KEEP_LOGS"
_CONTEXT = get_context("forkserver")
_ANSWERS: dict[tuple[str, str, bytes], Any] = {}
_PREPARATIONS: list[Callable[[], None]] = []


class RankError(AssertionError):
    """A rank raised, died or did not end in time. `rank` is the first that failed; the text shows all that did."""

    def __init__(self, rank: int, text: str) -> None:
        self.rank = rank
        super().__init__(text)


def run_ranks(world: int, fn: Callable[..., T], *args: Any, timeout_s: float = 60.0) -> list[T]:
    """Runs `fn(*args)` on `world` ranks in one gloo process group.

    `fn` is a module-level function; it, its arguments and its result are pickled. Warnings are errors in the ranks.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankError: a rank raised, died or was not done after `timeout_s` seconds. No rank is left running.
    """
    group = _Group(world, grouped=True, timeout_s=timeout_s)
    return group.run(fn, args)


def run_one(fn: Callable[..., T], *args: Any, timeout_s: float = 60.0) -> T:
    """Runs `fn(*args)` in one process without a process group. Equal calls are answered from memory.

    Raises:
        RankError: as for `run_ranks`.
    """
    key = (fn.__module__, fn.__qualname__, pickle.dumps(args))
    if key not in _ANSWERS:
        group = _Group(1, grouped=False, timeout_s=timeout_s)
        _ANSWERS[key] = group.run(fn, args)[0]
    answer: T = _ANSWERS[key]
    return answer


@contextlib.contextmanager
def prepared(prepare: Callable[[], None]) -> Iterator[None]:
    """Inside, every rank of `run_ranks` calls `prepare()` first; references by `run_one` do not."""
    _PREPARATIONS.append(prepare)
    try:
        yield
    finally:
        _PREPARATIONS.remove(prepare)


@dataclass
class _Failure:
    """Why one rank failed. A `died` one explains what other ranks then say of a lost connection, so it goes first."""

    rank: int
    text: str
    at_s: float
    died: bool = False


@dataclass
class _Group:
    """The parent's side of one run."""

    world: int
    grouped: bool
    timeout_s: float
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="meshwright-ranks-")))
    processes: list[ForkServerProcess] = field(default_factory=list)
    replies: dict[connection.Connection, int] = field(default_factory=dict)
    waiting: list[connection.Connection] = field(default_factory=list)
    results: dict[int, Any] = field(default_factory=dict)
    failures: list[_Failure] = field(default_factory=list)

    def run(self, fn: Callable[..., T], args: tuple[Any, ...]) -> list[T]:
        try:
            self._start(pickle.dumps((fn, args, _PREPARATIONS if self.grouped else [])))
            self._collect(time.monotonic() + self.timeout_s)
            if self.failures:
                self._collect(time.monotonic() + _GRACE_S, after_failure=True)
            elif self.replies:
                self._show_stacks()
        finally:
            self._end()
        error = self._error() if self.failures or self.replies else None
        if error is None or not os.environ.get(_KEEP):
            shutil.rmtree(self.folder)
        if error is not None:
            raise error
        return [self.results[rank] for rank in range(self.world)]

    def _start(self, payload: bytes) -> None:
        _start_server()
        for rank in range(self.world):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_rank_main, args=(rank, self, payload, theirs))
            process.start()
            theirs.close()
            self.processes.append(process)
            self.replies[ours] = rank

    def __getstate__(self) -> dict[str, Any]:
        # What a rank needs to know of its group; pipes and processes stay with the parent.
        return {name: getattr(self, name) for name in ("world", "grouped", "timeout_s", "folder")}

    def _collect(self, deadline: float, after_failure: bool = False) -> None:
        """Takes replies until all are in, one failed (later ones too with `after_failure`) or time is up."""
        while self.replies and (after_failure or not self.failures):
            ready = connection.wait(list(self.replies), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for pipe in ready:
                assert isinstance(pipe, connection.Connection)
                rank = self.replies.pop(pipe)
                self._take(rank, pipe)

    def _take(self, rank: int, pipe: connection.Connection) -> None:
        try:
            kind, value = pickle.loads(pipe.recv_bytes())  # noqa: S301  written by our own rank
        except (EOFError, ConnectionError):
            self.processes[rank].join(5)
            code = self.processes[rank].exitcode
            how = signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
            self.failures.append(_Failure(rank, f"died: {how}", time.monotonic(), died=True))
            return
        if kind == "result":
            self.results[rank] = value
            pipe.close()
        else:
            self.failures.append(_Failure(rank, value[1], value[0]))
            # The failed rank waits at its open pipe: were it gone, others would report a lost connection.
            self.waiting.append(pipe)

    def _show_stacks(self) -> None:
        """Has every rank that is still running write its Python stack to its log."""
        for rank in self.replies.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid(rank), signal.SIGUSR1)
        time.sleep(_GRACE_S)

    def _pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def _end(self) -> None:
        for rank, process in enumerate(self.processes):
            if self.failures or self.replies:
                # A rank leads a process group of its own: what it has started ends with it.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._pid(rank), signal.SIGKILL)
                process.kill()
            process.join()
        for pipe in (*self.replies, *self.waiting):
            pipe.close()

    def _error(self) -> RankError:
        lines = []
        failures = sorted(self.failures, key=lambda failure: (not failure.died, failure.at_s))
        hung = [] if failures else sorted(self.replies.values())
        for rank in hung:
            lines.append(f"rank {rank} of {self.world} was not done after {self.timeout_s:g} s\n{self._log(rank)}")
        told: dict[str, int] = {}
        for failure in failures:
            first = told.setdefault(failure.text, failure.rank)
            text = failure.text if first == failure.rank else f"failed as rank {first} did"
            lines.append(f"rank {failure.rank} of {self.world} {text}\n{self._log(failure.rank)}")
        kept = os.environ.get(_KEEP)
        lines.append(f"logs of all ranks: {self.folder}" if kept else f"({_KEEP}=1 keeps the logs of all ranks)")
        return RankError(failures[0].rank if failures else hung[0], "\n".join(lines))

    def _log(self, rank: int) -> str:
        path = self.folder / f"rank-{rank}.log"
        text = path.read_text(errors="replace")[-4000:].strip() if path.exists() else ""
        return f"--- log of rank {rank}\n{text}\n---" if text else "(its log is empty)"


def _start_server() -> None:
    """Starts the fork server once, with the search path in its environment: Python 3.11 preloads without it."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        _CONTEXT.set_forkserver_preload(["tests.harness.preload"])
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _rank_main(rank: int, group: _Group, payload: bytes, reply: connection.Connection) -> None:
    """The rank's side of one run. It never returns: `os._exit` keeps a broken process group from blocking the end."""
    os.setsid()
    log = os.open(group.folder / f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=log)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True, chain=False)
    # Should the parent be gone, the rank ends on its own.
    faulthandler.dump_traceback_later(group.timeout_s + 30, exit=True, file=log)
    try:
        message = ("result", _call(rank, group, payload))
        data = pickle.dumps(message)
    except BaseException as error:
        text = "raised:\n" + "".join(traceback.format_exception(error))
        data = pickle.dumps(("failure", (time.monotonic(), text)))
        failed = True
    else:
        failed = False
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError):
        reply.send_bytes(data)
        if failed:
            reply.poll(None)
    os._exit(0)


def _call(rank: int, group: _Group, payload: bytes) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    fn, args, preparations = pickle.loads(payload)  # noqa: S301  written by our own parent
    for prepare in preparations:
        prepare()
    if not group.grouped:
        return fn(*args)
    store = dist.FileStore(str(group.folder / "store"), group.world)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=group.world,
        timeout=datetime.timedelta(seconds=group.timeout_s + 30),
    )
    result = fn(*args)
    dist.barrier()
    return result
