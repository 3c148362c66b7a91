"""A user's own schedule from CSV: read, written, completed with messages and units, and refused by line and cell."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ConfigError, PlanError
from meshwright.schedule import SCHEDULES, make_schedule, parse_schedule, read_schedule, write_schedule


@given(name=st.sampled_from(SCHEDULES), half=st.integers(1, 4))
def test_what_is_written_is_read_again(name: str, half: int) -> None:
    ranks = 1 if name == "single" else half
    made = make_schedule(name, ranks=ranks, microbatches=2 * half)
    orders, stage_ranks, microbatches = parse_schedule(write_schedule(made), name="again")
    assert (stage_ranks, microbatches) == (made.stage_ranks, 2 * half)
    kept = [[a for a in actions if a.peer is None] for actions in made.ranks]
    assert orders == kept


def test_a_file_becomes_a_whole_schedule(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(" 0F0 ,0F1,,0I0,0W0,0B1\n,1F0,1B0,(1F1;1B1)OVERLAP_F_B\n\n")
    mine = read_schedule(path, units=2, zero=3, shard=2, dp=2)
    assert (mine.name, mine.microbatches, mine.stage_ranks) == ("mine", 2, (0, 1))
    assert (mine.count("gather", 0), mine.count("reduce", 0), mine.count("send", 0)) == (8, 4, 2)
    assert [a.kind for a in mine.ranks[1] if a.peer is None and a.kind in ("forward", "backward")] == [
        "forward",
        "backward",
        "forward",
        "backward",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0B0\n1F0,1X0", "line 2, cell 2: 1X0 is not understood"),
        ("0F0,0SEND_F0,0B0", "cell 2: 0SEND_F0 is not understood"),
        ("0F0,0B", "cell 2: 0B is not understood"),
        ("0F0,0B0\n\n1F0,1B0", "line 2: no action"),
        ("", "line 1: no action"),
        ("0F0,0B0\n0F1,0B1", "stage 0 is on ranks 0 and 1"),
        ("0F0,0B0\n2F0,2B0", "stage 1 has no action"),
        ("0F0,0B0\n999999999999F0", "stage 1 has no action"),
        ("0F0,0B0,0F999999999999", "microbatch 1 has no action"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_schedule(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0B0,0F1\n1F0,1B0,1F1,1B1", "microbatch 1 of stage 0 does not run backward"),
        ("0F0,0I0\n1F0,1B0", "does not run backward-weight"),
        ("0B0,0F0\n1F0,1B0", "rank 0 waits for ever at backward of microbatch 0 on stage 0"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0", "rank 0 waits for ever at backward of microbatch 0"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(PlanError, match=says):
        read_schedule(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv cannot be read"):
        read_schedule(tmp_path / "none.csv")
