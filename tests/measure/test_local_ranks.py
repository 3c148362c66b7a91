"""Processes of this machine: followed, told by their own words, and never left running."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.measure.local_ranks import Ended, LocalRanks


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def number(place: Path) -> int:
    """The number that a process has written, once it is there."""
    for _ in range(200):
        if place.exists() and (text := place.read_text()):
            return int(text)
        time.sleep(0.05)
    raise AssertionError(f"{place} was not written")


def wait(place: Path) -> Callable[[], None]:
    def work() -> None:
        place.write_text(str(os.getpid()))
        time.sleep(60)

    return work


def fail() -> None:
    raise ValueError("of my own")


def test_all_that_end_well(tmp_path: Path) -> None:
    with LocalRanks(tmp_path) as ranks:
        ranks.fork("one", lambda: (tmp_path / "one").touch())
        ranks.start("two", "platform", [])
        assert ranks.follow(60) is None
        assert ranks.out_path("two").read_text()
    assert (tmp_path / "one").exists()


def test_the_first_failure_ends_the_others(tmp_path: Path) -> None:
    with LocalRanks(tmp_path) as ranks:
        ranks.fork("waits", wait(tmp_path / "waits.pid"))
        process = number(tmp_path / "waits.pid")
        ranks.fork("fails", fail)
        assert ranks.follow(60) == Ended("fails", 1)
        assert "ValueError: of my own" in ranks.log("fails")
        assert alive(process)
    assert not alive(process)


def test_time_is_up(tmp_path: Path) -> None:
    with LocalRanks(tmp_path) as ranks:
        ranks.fork("waits", wait(tmp_path / "waits.pid"))
        ended = ranks.follow(0.2)
        assert ended == Ended("waits", None)
        assert ended.how == "was not done in time"


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_what_a_started_one_has_forked_ends_with_it(tmp_path: Path) -> None:
    program = "import os, sys, time; os.fork() or open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    (tmp_path / "forks.py").write_text(program)
    with LocalRanks(tmp_path) as ranks:
        ranks.start("forks", "forks", [str(tmp_path / "pid")], PYTHONPATH=str(tmp_path))
        process = number(tmp_path / "pid")
        assert alive(process)
    for _ in range(100):
        if not alive(process):
            break
        time.sleep(0.05)
    assert not alive(process)
