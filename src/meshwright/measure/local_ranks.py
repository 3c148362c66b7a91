"""Processes on this machine that work together: each writes a log of its own, and all end at the first failure."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

__all__ = ["Ended", "LocalRanks"]

_TICK_S = 0.05


class _Process(Protocol):
    """What is asked of a process, started anew or forked."""

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""

    def kill(self) -> None:
        """End it, with what it has started."""


@dataclass(frozen=True)
class Ended:
    """A process that failed, by its name; `exit_code` is None where it was not done in time."""

    name: str
    exit_code: int | None

    @property
    def how(self) -> str:
        """In words."""
        if self.exit_code is None:
            return "was not done in time"
        if self.exit_code < 0:
            return f"was ended by {signal.Signals(-self.exit_code).name}"
        return f"failed with exit code {self.exit_code}"


class LocalRanks:
    """Processes with a log each in `folder`. Used as a context: none is left running at its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: dict[str, _Process] = {}

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def start(self, name: str, module: str, arguments: Iterable[str], **variables: str) -> None:
        """Start `python -m module arguments`, one thread to a process; its output goes to `name.out`.

        Args:
            name: of the process; its errors go to `name.log`.
            module: what it runs.
            arguments: for it.
            variables: of the environment, besides those of this process.
        """
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **variables}
        with self._log_path(name).open("w") as log, self.out_path(name).open("w") as out:
            self._processes[name] = _Started(
                subprocess.Popen(
                    [sys.executable, "-m", module, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=log,
                    env=environment,
                    start_new_session=True,  # what it forks ends with it
                )
            )

    def fork(self, name: str, work: Callable[[], None]) -> None:
        """Run `work()` in a copy of this process, which must not have run autograd; all it writes goes to its log."""
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if not process:
            _work(work, self._log_path(name))
        self._processes[name] = _Forked(process)

    def follow(
        self, timeout_s: float, *, names: Iterable[str] | None = None, tick: Callable[[], None] | None = None
    ) -> Ended | None:
        """Wait until all are done, one fails, or the time is up; the first that failed, or that was not done.

        Args:
            timeout_s: for this wait.
            names: of those that are waited for; all by default.
            tick: called again and again while it waits.
        """
        deadline = time.monotonic() + timeout_s
        waited = list(self._processes) if names is None else list(names)
        while True:
            late = time.monotonic() > deadline
            codes = {name: self._processes[name].poll() for name in waited}
            if tick is not None:
                tick()
            failed = next((name for name, code in codes.items() if code not in (None, 0)), None)
            running = next((name for name, code in codes.items() if code is None), None)
            if failed is not None or running is None or late:
                break
            time.sleep(_TICK_S)
        name = failed or running
        return None if name is None else Ended(name, codes[name])

    def end(self, names: Iterable[str] | None = None) -> None:
        """End those that are still running, all by default."""
        for name in list(self._processes) if names is None else names:
            self._processes.pop(name).kill()

    def log(self, name: str) -> str:
        """The end of what a process wrote on its standard error; of a forked one, all that it wrote."""
        path = self._log_path(name)
        return path.read_text(encoding="utf-8", errors="replace")[-4000:].strip() if path.exists() else ""

    def out_path(self, name: str) -> Path:
        """The file of what a started process writes on its standard output."""
        return self.folder / f"{name}.out"

    def _log_path(self, name: str) -> Path:
        return self.folder / f"{name}.log"


class _Started:
    """A process that began with an interpreter of its own, and leads a group of those that it forks."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class _Forked:
    """A copy of this process."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            process, status = os.waitpid(self._process, os.WNOHANG)
            if process:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self._process, signal.SIGKILL)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])


def _work(work: Callable[[], None], log: Path) -> None:
    """The child's side of a fork; it never returns, whatever `work` raises."""
    code = 1
    try:
        handle = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout = sys.stderr = os.fdopen(handle, "w", encoding="utf-8", closefd=False)  # whatever stood there
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
