"""What a rank leaves behind when it fails, and which of several failures was the first cause. No torch here.

Every rank keeps its current step in a small status file and writes a failure record when it raises. When a run ends
badly, the launcher reads both, beside the exit codes, and tells the rank that failed from those that only lost it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright import errors
from meshwright.errors import MeshwrightError, RankFailure

__all__ = ["ExitedRank", "FailureRecord", "StatusFile", "clear_stale", "first_cause", "read_status", "record_failure"]

_STEP_WIDTH = 20
_LOG_LINES = 12
_TRACE_LINES = 24
_COMMUNICATION_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")
_COMMUNICATION_WORDS = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection refused",
    "timed out waiting",
    "socket timeout",
    "processgroup",
    "gloo",
    "nccl",
    "tcpstore",
    "remote process exited",
)


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """An exception on one rank. `step` is the optimizer step it was in, 0 before the first; `time_s` since the epoch.

    `parts` holds what, why and fix of an error of Meshwright's own, else nothing.
    """

    rank: int
    host: str
    step: int
    time_s: float
    kind: str
    message: str
    trace: str
    parts: dict[str, str]

    @property
    def is_communication(self) -> bool:
        """Whether it tells only that another rank was lost, or that a collective failed."""
        text = self.message.lower()
        return self.kind in _COMMUNICATION_TYPES or (
            self.kind in ("RuntimeError", "TimeoutError", "OSError", "ConnectionError")
            and any(word in text for word in _COMMUNICATION_WORDS)
        )


@dataclass(frozen=True, kw_only=True)
class ExitedRank:
    """How the process of a rank ended: a negative exit code is the signal that killed it. `order` counts up from the
    first that was noticed; those with `by_launcher` were ended because another had failed."""

    rank: int
    exit_code: int
    order: int
    by_launcher: bool = False


class StatusFile:
    """The current step of one rank on disk: 20 bytes overwritten in place by one system call per step."""

    def __init__(self, logs: Path, rank: int) -> None:
        self._handle = os.open(_status_path(logs, rank), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        os.pwrite(self._handle, f"\n{os.getpid()}\n{socket.gethostname()}\n".encode(), _STEP_WIDTH)
        self.step = 0
        self.enter(0)

    def enter(self, step: int) -> None:
        """Note that optimizer step `step` (from 1) has begun."""
        self.step = step
        os.pwrite(self._handle, f"{step:<{_STEP_WIDTH}d}".encode(), 0)

    def close(self) -> None:
        """Close the file; it stays on disk."""
        os.close(self._handle)


def read_status(logs: Path, rank: int) -> tuple[int, int, str] | None:
    """Step, process id and host of a rank, or None where it left no status."""
    try:
        step, pid, host = _status_path(logs, rank).read_text().split("\n")[:3]
        return int(step), int(pid), host
    except (OSError, ValueError):
        return None


def record_failure(logs: Path, rank: int, step: int, error: BaseException) -> None:
    """Write a rank's failure record, whole or not at all."""
    parts = {"what": error.what, "why": error.why, "fix": error.fix} if isinstance(error, MeshwrightError) else {}
    record = FailureRecord(
        rank=rank,
        host=socket.gethostname(),
        step=step,
        time_s=time.time(),
        kind=type(error).__name__,
        message=str(error),
        trace="".join(traceback.format_exception(error)),
        parts=parts,
    )
    place = _failure_path(logs, rank)
    aside = place.with_suffix(f".{os.getpid()}.tmp")
    aside.write_text(json.dumps(asdict(record), indent=1), encoding="utf-8")
    os.replace(aside, place)


def clear_stale(logs: Path) -> None:
    """Remove what ranks of an earlier launch left in the folder."""
    for pattern in ("failure-rank-*.json", "status-rank-*", "rank-*.log"):
        for path in logs.glob(pattern):
            path.unlink(missing_ok=True)


def first_cause(logs: Path, exited: list[ExitedRank], *, resume: str) -> MeshwrightError:
    """The error to show: the first cause among failure records in `logs` and ended processes.

    Its text is the failing rank's own. The order: a mistake of the user's that a rank found, handed back as it was
    raised there; a rank killed by a signal that the launcher did not send; a rank that raised something else of its
    own; a rank that exited without a word; last lost connections, which are consequences.

    Args:
        logs: the folder of status files, records and logs.
        exited: processes that ended with another exit code than 0, as far as this launcher saw them.
        resume: how to go on, for the text.
    """
    records = _read_records(logs)
    known = {record.rank for record in records}
    own = sorted((r for r in records if not r.is_communication), key=lambda record: record.time_s)
    silent = sorted((e for e in exited if e.rank not in known and not e.by_launcher), key=lambda entry: entry.order)
    killed = [entry for entry in silent if entry.exit_code < 0]
    mistakes = [record for record in own if record.parts]
    # An abort is how some libraries answer a lost peer; any other signal comes before what it made others raise.
    if not mistakes and killed and (not own or any(-entry.exit_code != signal.SIGABRT for entry in killed)):
        return _killed(logs, min(killed, key=lambda entry: -entry.exit_code == signal.SIGABRT), resume)
    if own:
        return _raised((mistakes or own)[0], logs, resume)
    if silent:
        return _silent(logs, silent[0], resume)
    lost = sorted(records, key=lambda record: record.time_s)
    if lost:
        return _lost(logs, lost, resume)
    return RankFailure("the ranks ended without an error text", why=f"the logs are in {logs}", fix=resume)


def _raised(record: FailureRecord, logs: Path, resume: str) -> MeshwrightError:
    kind = getattr(errors, record.kind, None)
    if record.parts and isinstance(kind, type) and issubclass(kind, MeshwrightError):
        mine: MeshwrightError = kind(record.parts["what"], why=record.parts["why"], fix=record.parts["fix"])
        return mine
    lines = record.trace.rstrip().splitlines()
    shown = lines if len(lines) <= _TRACE_LINES else [lines[0], "  ...", *lines[-_TRACE_LINES:]]
    return RankFailure(
        f"rank {record.rank} on {record.host} failed {_when(record.step)}: {record.kind}: {record.message}",
        why="\n    ".join(["its own traceback is", *shown]),
        fix=f"correct the cause ({_log_path(logs, record.rank)} has the rank's output); {resume}",
    )


def _killed(logs: Path, entry: ExitedRank, resume: str) -> RankFailure:
    number = -entry.exit_code
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    reason = {
        "SIGKILL": "SIGKILL comes from the operating system when memory runs out, or from a person or a scheduler",
        "SIGTERM": "SIGTERM comes from a person or a scheduler",
        "SIGSEGV": "SIGSEGV is a crash inside a compiled library",
        "SIGBUS": "SIGBUS is a crash while reading a mapped file, or shared memory that ran out",
    }.get(name, "the process was ended from outside, or crashed inside a compiled library")
    return RankFailure(
        f"{_where(logs, entry.rank)} was killed by {name} {_when(_step_of(logs, entry.rank))}",
        why=reason + _log_tail(logs, entry.rank),
        fix=f"free memory or pin a strategy that needs less; {resume}" if name == "SIGKILL" else resume,
    )


def _silent(logs: Path, entry: ExitedRank, resume: str) -> RankFailure:
    return RankFailure(
        f"{_where(logs, entry.rank)} exited with code {entry.exit_code} {_when(_step_of(logs, entry.rank))}",
        why="it left no error" + _log_tail(logs, entry.rank),
        fix=resume,
    )


def _lost(logs: Path, records: list[FailureRecord], resume: str) -> RankFailure:
    first = records[0]
    return RankFailure(
        f"rank {first.rank} on {first.host} lost the other ranks {_when(first.step)}: {first.message.splitlines()[0]}",
        why=f"another rank stopped answering and left no error of its own; last seen: {_last_seen(logs)}",
        fix=f"look at the logs in {logs}, and at the screens of the other nodes; {resume}",
    )


def _read_records(logs: Path) -> list[FailureRecord]:
    records = []
    for path in sorted(logs.glob("failure-rank-*.json")):
        try:
            records.append(FailureRecord(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue
    return records


def _last_seen(logs: Path) -> str:
    seen = []
    for path in sorted(logs.glob("status-rank-*"), key=lambda path: int(path.name.rpartition("-")[2])):
        rank = int(path.name.rpartition("-")[2])
        status = read_status(logs, rank)
        if status is not None:
            seen.append((status[0], f"rank {rank} on {status[2]} {_when(status[0])}"))
    earliest = min((step for step, _ in seen), default=0)
    return "; ".join(text for step, text in seen if step == earliest) or "no rank"


def _step_of(logs: Path, rank: int) -> int:
    status = read_status(logs, rank)
    return status[0] if status else 0


def _where(logs: Path, rank: int) -> str:
    status = read_status(logs, rank)
    return f"rank {rank} on {status[2] if status else socket.gethostname()}"


def _when(step: int) -> str:
    return f"during step {step}" if step else "before its first step"


def _log_tail(logs: Path, rank: int) -> str:
    path = _log_path(logs, rank)
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    except OSError:
        return ""
    return "\n    ".join([f"; the end of {path}:", *lines]) if lines else ""


def _status_path(logs: Path, rank: int) -> Path:
    return logs / f"status-rank-{rank}"


def _failure_path(logs: Path, rank: int) -> Path:
    return logs / f"failure-rank-{rank}.json"


def _log_path(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.log"
