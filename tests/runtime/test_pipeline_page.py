"""The page on pipeline parallelism shows what runs: its script over two ranks, and its commands."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshwright.cli import app
from tests.harness.ranks import run_one, run_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "pipeline-parallel.md").read_text(encoding="utf-8")
(TRAIN,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for line in PAGE.splitlines() if line.startswith("meshwright ")]


def run_page(folder: str, script: str) -> float:
    os.chdir(folder)
    names: dict[str, object] = {}
    exec(script, names)  # noqa: S102  (it is the page)
    loss = names["report"].loss  # type: ignore[attr-defined]  # a StepReport
    return float(loss)


def test_the_script_trains_and_one_process_goes_on(tmp_path: Path) -> None:
    first, second = run_ranks(2, run_page, str(tmp_path), TRAIN)
    assert first == second
    once = TRAIN.replace('pp=2, schedule="1f1b", microbatch=2', "microbatch=2")
    alone = once.replace(
        'engine.save("checkpoint")', 'engine.load("checkpoint")\nreport = engine.step((ids[:, :-1], ids[:, 1:]))'
    )
    assert run_one(run_page, str(tmp_path), alone) < first
    assert run_one(run_page, str(tmp_path), once.replace('"checkpoint"', '"other"')) == pytest.approx(first, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ["--set", "train.steps=2", "--set", "train.generate_tokens=0"] if " train " in command else []
    done = CliRunner().invoke(app, [*shlex.split(command)[1:], *quick])
    assert done.exit_code == 0, done.output
