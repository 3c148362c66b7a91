"""Training with pipeline parallelism: every schedule with tensor and data parallelism, as one process trains."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from meshwright.spec import parse_assignments, this_machine
from meshwright.spec.job_file import JobFile
from meshwright.train.choose import choose_plan
from meshwright.train.launch import Nodes
from tests.harness.ranks import run_one, run_ranks
from tests.train.tiny import SHAPE, corpus, metrics, rank_of, run_folder

SHAPE_OF_FOUR = replace(SHAPE, num_hidden_layers=4, tie_word_embeddings=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float64",
    "steps": 3,
    "evaluate_every": 2,
    "checkpoint_every": 2,
    "shape": SHAPE_OF_FOUR,
}
SCHEDULES = (
    "1f1b",
    "gpipe",
    "zb-h1",
    "interleaved-1f1b virtual_stages=2",
    "interleaved-zb virtual_stages=2",
    "looped-bfs virtual_stages=2",
    "zb-v",
    "dualpipev",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


@cache
def one_process(place: Path) -> list[dict[str, Any]]:
    """Metrics of the run of one rank."""
    run_folder(place / "whole", "dp=1 microbatch=3", corpus(place / "corpus"), **OPTIONS)
    run_one(rank_of, place / "whole")
    return metrics(place / "whole")


def trains(place: Path, strategy: str, world: int) -> None:
    expected = one_process(place)
    name = strategy.replace(" ", "-")
    run_folder(place / name, strategy, place / "corpus", **OPTIONS)
    runs = run_ranks(world, rank_of, place / name, timeout_s=240)
    assert "step 3/3" in runs[0].screen
    assert not any(run.screen for run in runs[1:])
    found = metrics(place / name)
    assert len(found) == len(expected)
    for line, wanted in zip(found, expected, strict=True):
        assert line["loss"] == pytest.approx(wanted["loss"], rel=1e-12)
        assert line["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-9)
        assert ("validation_loss" in line) == ("validation_loss" in wanted) == (line["step"] >= 2)
        assert line.get("validation_loss", 0) == pytest.approx(wanted.get("validation_loss", 0), rel=1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_the_trainer_trains_a_pipeline_as_one_process(place: Path, schedule: str) -> None:
    trains(place, f"pp=2 dp=2 zero=2 schedule={schedule}", 4)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_trainer_trains_every_schedule_on_eight_ranks(place: Path, schedule: str) -> None:
    trains(place, f"pp=2 tp=2 dp=2 sequence_parallel=true schedule={schedule}", 8)


def chosen(*words: str, sets: tuple[str, ...] = ()) -> tuple[Any, list[str]]:
    """The plan for pins of the job file (`sets`) and of the command line, and what was said."""
    said: list[str] = []
    pins = {pin.key: pin.value for pin in parse_assignments(sets, option="--set")}
    plan = choose_plan(
        JobFile(model=SHAPE_OF_FOUR, strategy=pins),
        plan=None,
        pins=words,
        strategy=None,
        nodes=Nodes(),
        earlier=None,
        say=said.append,
    )
    return plan, said


@pytest.mark.parametrize("way", ["set", "pin"])
def test_a_pinned_number_of_stages_needs_no_schedule(way: str) -> None:
    plan, _ = chosen(sets=("pp=2",)) if way == "set" else chosen("pp=2")
    assert plan.strategy.pp == 2
    assert plan.strategy.schedule != "single"
    assert plan.executable


def test_more_ranks_than_cores_share_them_where_they_are_pinned() -> None:
    here = this_machine()
    plan, said = chosen("pp=2", "tp=2", f"dp={2 * here.devices}")
    ranks = 8 * here.devices
    assert plan.strategy.world_size == ranks == plan.cluster.devices
    assert said == [f"{ranks} ranks share the {here.devices} cores of this machine: they take turns, and are slow"]
    (group,) = plan.cluster.nodes
    assert group.device.memory_bytes * ranks <= here.nodes[0].device.memory_bytes * here.devices
