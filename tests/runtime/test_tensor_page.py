"""The page on tensor parallelism shows what runs: its scripts over two ranks, and its commands."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshwright.cli import app
from tests.harness.ranks import run_one, run_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "tensor-parallel.md").read_text(encoding="utf-8")
MODEL, TRAIN, LOSS, SAMPLER, ALONE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for line in PAGE.splitlines() if line.startswith("meshwright ")]


def run_page(folder: str, *scripts: str) -> float:
    os.chdir(folder)
    sys.path.insert(0, folder)
    names: dict[str, object] = {}
    for script in scripts:
        exec(script, names)  # noqa: S102  (it is the page)
    loss = names["report"].loss  # type: ignore[attr-defined]  # a StepReport
    return float(loss)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_model.py").write_text(MODEL, encoding="utf-8")
    return tmp_path


def test_the_script_trains_and_one_process_goes_on(folder: Path) -> None:
    first, second = run_ranks(2, run_page, str(folder), TRAIN, SAMPLER)
    assert first == second
    once = TRAIN.replace("Strategy(tp=2, microbatch=4)", "Strategy(microbatch=4)").replace("sharding=SHARDING", "")
    alone = once.replace('engine.save("checkpoint")', ALONE + "\nreport = alone.step((ids[:, :-1], ids[:, 1:]))")
    assert run_one(run_page, str(folder), alone) < first
    assert run_one(run_page, str(folder), once.replace('"checkpoint"', '"other"')) == pytest.approx(first, rel=1e-5)


def test_the_loss_by_hand_is_the_same(folder: Path) -> None:
    own = re.sub(r"def loss.*?numel\(\)\n", lambda _: LOSS, TRAIN, count=1, flags=re.DOTALL)
    assert own.count("whole()") == 1
    by_hand = run_ranks(2, run_page, str(folder), own)[0]
    usual = run_ranks(2, run_page, str(folder), TRAIN.replace('"checkpoint"', '"again"'))[0]
    assert by_hand == pytest.approx(usual, rel=1e-6)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_run(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    more = [] if "llama" in command else [f"--annotate=layers.*.{name}=colwise" for name in "qkv"]
    more += [] if "llama" in command else ["--annotate", "layers.*.o=rowwise"]
    for arguments in ([], more):
        done = CliRunner().invoke(app, [*shlex.split(command)[1:], *arguments])
        assert done.exit_code == 0, done.output
