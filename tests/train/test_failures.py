"""Which of several failures is shown."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from meshwright.errors import DataError, MeshwrightError, RankFailure
from meshwright.train.failures import ExitedRank, StatusFile, clear_stale, first_cause, read_status, record_failure

KILLED = -signal.SIGKILL
ENDED = -signal.SIGTERM


def fail(logs: Path, rank: int, error: Exception, step: int = 7) -> None:
    try:
        raise error
    except Exception as raised:
        record_failure(logs, rank, step, raised)


def exited(*entries: tuple[int, int] | tuple[int, int, bool]) -> list[ExitedRank]:
    return [
        ExitedRank(rank=rank, exit_code=code, order=order, by_launcher=bool(rest and rest[0]))
        for order, (rank, code, *rest) in enumerate(entries)
    ]


def cause(logs: Path, *entries: tuple[int, int] | tuple[int, int, bool]) -> MeshwrightError:
    return first_cause(logs, exited(*entries), resume="go on with --resume")


def lost(rank: int) -> RuntimeError:
    return RuntimeError(f"[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:{rank}")


def test_own_error_comes_before_the_connections_it_cost(tmp_path: Path) -> None:
    fail(tmp_path, 0, lost(2))
    fail(tmp_path, 1, lost(2))
    fail(tmp_path, 2, ZeroDivisionError("the loss has no tokens"))
    error = cause(tmp_path, (0, 1), (1, 1), (2, 1), (3, ENDED, True))
    assert type(error) is RankFailure
    assert error.what.startswith("rank 2 on ")
    assert "failed during step 7: ZeroDivisionError: the loss has no tokens" in error.what
    assert "test_failures.py" in error.why
    assert "--resume" in error.fix


def test_killed_rank_comes_before_what_others_raised_for_it(tmp_path: Path) -> None:
    status = StatusFile(tmp_path, 1)
    status.enter(41)
    status.close()
    (tmp_path / "rank-1.log").write_text("a last word\n")
    fail(tmp_path, 0, lost(1))
    fail(tmp_path, 2, RuntimeError("something that nobody has thought of"))
    error = cause(tmp_path, (0, 1), (1, KILLED), (2, 1), (3, ENDED, True))
    assert "rank 1 on " in error.what
    assert "was killed by SIGKILL during step 41" in error.what
    assert "memory" in error.why
    assert "a last word" in error.why


def test_abort_is_an_answer_to_anothers_error(tmp_path: Path) -> None:
    fail(tmp_path, 3, KeyError("labels"))
    assert "rank 3" in cause(tmp_path, (0, -signal.SIGABRT), (3, 1)).what


def test_first_of_two_own_errors(tmp_path: Path) -> None:
    fail(tmp_path, 3, KeyError("first"))
    fail(tmp_path, 1, KeyError("second"))
    assert "rank 3" in cause(tmp_path, (1, 1), (3, 1)).what


def test_users_mistake_is_handed_back_as_it_was(tmp_path: Path) -> None:
    fail(tmp_path, 1, DataError("a file has become shorter", why="because", fix="put it back"))
    fail(tmp_path, 0, lost(1))
    error = cause(tmp_path, (0, 1), (1, 1))
    assert type(error) is DataError
    assert (error.what, error.why, error.fix) == ("a file has become shorter", "because", "put it back")


def test_silent_exit_shows_the_end_of_the_log(tmp_path: Path) -> None:
    (tmp_path / "rank-2.log").write_text("\n".join(f"line {n}" for n in range(50)))
    error = cause(tmp_path, (2, 3), (0, ENDED, True))
    assert "rank 2" in error.what
    assert "exited with code 3 before its first step" in error.what
    assert "line 49" in error.why
    assert "line 20" not in error.why


def test_only_lost_connections_names_who_was_behind(tmp_path: Path) -> None:
    for rank, step in enumerate([9, 8, 9]):
        status = StatusFile(tmp_path, rank)
        status.enter(step)
        status.close()
    fail(tmp_path, 0, RuntimeError("[gloo] Timed out waiting 60000ms for recv operation to complete"), step=9)
    error = cause(tmp_path, (0, 1), (1, KILLED, True), (2, ENDED, True))
    assert "rank 0 on " in error.what
    assert "lost the other ranks during step 9" in error.what
    assert "rank 1 on " in error.why
    assert "during step 8" in error.why


def test_nothing_known(tmp_path: Path) -> None:
    assert isinstance(cause(tmp_path), RankFailure)


def test_damaged_records_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "failure-rank-0.json").write_text("{half")
    (tmp_path / "failure-rank-1.json").write_text("[1]")
    assert "rank 2" in cause(tmp_path, (2, KILLED)).what


def test_status_file(tmp_path: Path) -> None:
    import os
    import socket

    assert read_status(tmp_path, 0) is None
    status = StatusFile(tmp_path, 0)
    assert read_status(tmp_path, 0) == (0, os.getpid(), socket.gethostname())
    for step in (1, 999_999, 12):
        status.enter(step)
        assert read_status(tmp_path, 0) == (step, os.getpid(), socket.gethostname())
    status.close()
    clear_stale(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["DistBackendError", "DistNetworkError", "DistStoreError"])
def test_errors_of_the_process_group_are_consequences(tmp_path: Path, kind: str) -> None:
    fail(tmp_path, 0, type(kind, (RuntimeError,), {})("whatever the text"))
    fail(tmp_path, 1, ValueError("Broken pipe is what this user's own text says"))
    assert "rank 1" in cause(tmp_path, (0, 1), (1, 1)).what
