"""Training with tensor parallelism: the same rows on ranks that share a model, interruptions, and the command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright.spec import Plan
from meshwright.spec.files import read_noun
from tests.harness.ranks import run_one, run_ranks
from tests.train.test_launch import WHOLE_S, prepared, run_here, start
from tests.train.tiny import RankRun, corpus, metrics, rank_of, run_folder

STEPS = 6
BATCH = 12


def read_by(runs: list[RankRun], steps: range) -> list[int]:
    """Sample numbers of data-parallel ranks, in the order of the global batches."""
    return [number for step in steps for run in runs for number in run.numbers[step]]


def test_ranks_that_share_a_model_read_the_same_and_a_run_goes_on_with_any_layout(tmp_path: Path) -> None:
    data = corpus(tmp_path / "corpus")
    options = {"dtype": "float64", "steps": STEPS, "evaluate_every": 3, "checkpoint_every": 2}
    run_folder(tmp_path / "whole", "dp=1 microbatch=3", data, **options)
    whole = read_by([run_one(rank_of, tmp_path / "whole")], range(1, STEPS + 1))

    place = tmp_path / "broken"
    folder = run_folder(place, "dp=2 tp=2 zero=2 sequence_parallel=true microbatch=3", data, **options)
    first = run_ranks(4, rank_of, place, None, 3)
    assert first[0].windows == first[1].windows != first[2].windows == first[3].windows
    run_folder(place, "dp=2 zero=3 microbatch=2", data, **options)
    second = run_ranks(2, rank_of, place, folder.checkpoint(2), 5)
    run_folder(place, "tp=2 microbatch=4 recompute=full", data, **options)
    third = run_ranks(2, rank_of, place, folder.checkpoint(4))
    assert third[0].windows == third[1].windows

    parts = [read_by(first[::2], range(1, 3)), read_by(second, range(3, 5)), read_by(third[:1], range(5, STEPS + 1))]
    assert [number for part in parts for number in part] == whole == list(range(STEPS * BATCH))
    for line, expected in zip(metrics(place), metrics(tmp_path / "whole"), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-12)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-9)
        assert ("validation_loss" in line) == ("validation_loss" in expected) == (line["step"] % 3 == 0)
        if "validation_loss" in line:
            assert line["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-9)


def test_the_command_trains_divided_generates_and_goes_on_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepared(tmp_path / "work")
    pinned = ("--set", "strategy.tp=2", "--set", "strategy.sequence_parallel=true")
    code, out, err = start(folder, "train", "job.toml", "--out", "run", *pinned).end(WHOLE_S)
    assert (code, err) == (0, "")
    plan = read_noun(Plan, folder / "run" / "plan.toml")
    assert (plan.strategy.tp, plan.strategy.sequence_parallel, plan.strategy.dp) == (2, True, 1)
    assert plan.executable
    assert plan.cost.terms["tensor parallel"] > 0
    assert "tp=2 sequence_parallel=true" in out
    # What a step sends is what the plan says, but for the check of copies in the first one.
    for line in metrics(folder / "run"):
        assert line["collectives"] == plan.cost.collectives
    monkeypatch.chdir(folder)
    assert run_here("generate", "run", "--prompt", "12 13", "--tokens", "9").startswith("12 13")
    whole = ("--set", "strategy.tp=1", "--set", "strategy.sequence_parallel=false", "--set", "train.steps=8")
    again = ("train", "--resume", "--out", "run", *whole)
    code, out, err = start(folder, *again).end(WHOLE_S)
    assert (code, err) == (0, "")
    assert "going on from run/checkpoints/step-000006" in out
    assert re.findall(r"^step (\d)/8 ", out, re.MULTILINE) == ["7", "8"]
