"""`meshwright plan`: the table, the file, and one clear error with exit code 2 for a wrong input."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from meshwright.cli import app
from meshwright.planner import make_plan
from meshwright.spec import Plan, this_machine
from meshwright.spec.files import read_noun
from meshwright.spec.job_file import read_job

TWO_DEVICES = """
format = 1
[cluster]
name = "two cores"
[[cluster.nodes]]
devices = 2
device = { name = "core", memory_bytes = 2147483648 }
[job]
global_batch = 16
[strategy]
zero = 3
"""


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "job.toml").write_text(TWO_DEVICES)
    (tmp_path / "broken.toml").write_text("format = 1\n[job\n")
    (tmp_path / "tiny.toml").write_text(TWO_DEVICES.replace("2147483648", "400000000"))
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_built_in_job_is_planned_for_this_machine() -> None:
    result = run()
    assert result.exit_code == 0, result.output
    expected = make_plan(read_job().model, this_machine(), read_job().job)
    assert str(expected.strategy) in result.output


def test_the_plan_file_reads_back_as_the_plan() -> None:
    result = run("job.toml", "--pin", "microbatch<=4", "--set", "job.global_batch=24", "--out", "out/plan.toml")
    assert result.exit_code == 0, result.output
    assert "written to out/plan.toml" in result.output
    plan = read_noun(Plan, "out/plan.toml")
    assert str(plan.strategy) == "dp=2 zero=3 microbatch=4"
    assert plan.pinned == {"zero": "3", "microbatch": "<=4"}
    assert plan.cluster.name == "two cores"
    job_file = read_job("job.toml", ["job.global_batch=24"])
    assert job_file.cluster is not None
    assert plan.job == job_file.job


def test_a_strategy_by_hand_is_taken_whole() -> None:
    result = run("job.toml", "--set", "strategy.zero=1", "--strategy", "dp=2 zero=1 microbatch=2")
    assert result.exit_code == 0, result.output
    assert "Plan  dp=2 zero=1 microbatch=2" in result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["missing.toml"], "no file missing.toml"),
        (["jop.toml"], "did you mean job.toml?"),
        (["broken.toml"], "broken.toml is not valid TOML"),
        (["job.toml", "--set", "job.global_bach=8"], "unknown key job.global_bach"),
        (["job.toml", "--set", "jobs.global_batch=8"], "unknown key jobs"),
        (["job.toml", "--set", "job.global_batch=eight"], "job.global_batch='eight' is not right"),
        (["job.toml", "--set", "job.global_batch=0"], "job.global_batch=0 is not a positive number"),
        (["job.toml", "--set", "job.global_batch=-8"], "job.global_batch=-8 is not a positive number"),
        (["job.toml", "--pin", "microbatch=3"], "global_batch=16 cannot be split over dp=2 in microbatches of 3"),
        (["job.toml", "--set", "strategy.zero=4"], "zero=4 is not a ZeRO stage"),
        (["job.toml", "--pin", "dp=0"], "dp=0 is not a positive number"),
        (["job.toml", "--pin", "dp=4"], "dp=4 pinned but two cores has 2 devices"),
        (["job.toml", "--pin", "shard=3"], "shard=3 does not divide dp=2"),
        (["job.toml", "--pin", "zero=1"], "pins contradicts itself: zero=3 and zero=1"),
        (["job.toml", "--pin", "tp=2"], "tensor parallelism (tp=2) is not executable yet"),
        (["job.toml", "--pin", "zero"], "--pin 'zero' is not an assignment"),
        (["tiny.toml", "--strategy", "dp=2 zero=3 microbatch=8"], "nothing fits within the pins"),
        (["job.toml", "--out", "job.toml/plan.toml"], "cannot write job.toml/plan.toml"),
    ],
)
def test_wrong_input_is_one_clear_error(arguments: list[str], text: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert text in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("meshwright: ") == 1
