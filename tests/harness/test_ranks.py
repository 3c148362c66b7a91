"""The harness itself: results by rank, and failures that end all ranks in bounded time with the right text."""

import os
import signal
import subprocess
import sys
import time
import warnings

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import RankError, run_one, run_ranks


def summed(value: float) -> tuple[int, float]:
    total = torch.tensor(value * (dist.get_rank() + 1))
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def process_id() -> int:
    return os.getpid()


def raises_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("about to fail")  # noqa: T201  what a rank prints is in its log
        raise ValueError(f"rank {rank} has had enough")
    dist.barrier()


def hangs_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)
    dist.barrier()


def dies_on(rank: int, children: str) -> None:
    if dist.get_rank() == rank:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(children, "w") as file:
            file.write(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def warns() -> None:
    warnings.warn("mind the gap", stacklevel=1)


def large() -> torch.Tensor:
    return torch.full((1 << 20,), float(dist.get_rank()))


def test_results_are_in_the_order_of_ranks() -> None:
    assert run_ranks(3, summed, 2.0) == [(0, 12.0), (1, 12.0), (2, 12.0)]


def test_a_large_result_comes_back() -> None:
    zeros, ones = run_ranks(2, large)
    assert zeros.sum() == 0
    assert ones.sum() == 1 << 20


def test_one_process_has_no_group_and_is_run_once() -> None:
    assert run_one(dist.is_initialized) is False
    assert run_one(process_id) == run_one(process_id)


def test_a_rank_that_raises_ends_all_and_is_shown_alone() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(3, raises_on, 1, timeout_s=20)
    text = str(caught.value)
    assert caught.value.rank == 1
    assert "ValueError: rank 1 has had enough" in text
    assert "about to fail" in text
    assert "rank 0 of 3" not in text
    assert "rank 2 of 3" not in text


def test_the_same_failure_on_all_ranks_is_told_once() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, warns, timeout_s=20)
    assert str(caught.value).count("UserWarning: mind the gap") == 1
    assert "failed as rank" in str(caught.value)


def test_a_rank_that_hangs_is_shown_with_its_stack_in_time() -> None:
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(2, hangs_on, 1, timeout_s=3)
    assert time.monotonic() - begin < 15
    text = str(caught.value)
    assert "rank 1 of 2 was not done after 3 s" in text
    assert "in hangs_on" in text


def test_a_killed_rank_comes_first_and_its_children_end(tmp_path: os.PathLike[str]) -> None:
    children = os.path.join(tmp_path, "child")
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(3, dies_on, 2, children, timeout_s=30)
    assert time.monotonic() - begin < 15
    assert caught.value.rank == 2
    assert str(caught.value).startswith("rank 2 of 3 died: SIGKILL")
    with open(children) as file:
        assert _is_gone(int(file.read()))


def _is_gone(process: int) -> bool:
    for _ in range(100):
        if not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_no_rank_survives_a_failure() -> None:
    with pytest.raises(RankError):
        run_ranks(2, raises_on, 0, timeout_s=20)
    assert run_ranks(2, summed, 1.0) == [(0, 3.0), (1, 3.0)]
