"""`meshwright train` as a command: real processes, from the plan to the sample, and what happens when ranks fail."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

import meshwright.train.run
from meshwright.cli import app
from meshwright.train.failures import read_status
from tests.train.tiny import corpus, metrics

JOB = """
format = 1
[model]
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
[job]
global_batch = 8
sequence = 16
clip_norm = 1.0
[job.optimizer]
learning_rate = 3e-3
[data]
path = "corpus"
[train]
steps = 6
checkpoint_every = 3
generate_tokens = 20
timeout_s = 20
[cluster]
name = "two cores"
[[cluster.nodes]]
devices = 2
device = { name = "core", memory_bytes = 2147483648 }
"""
#: What the ranks may take to end after a fault, and what a whole run may take on a busy machine.
MOST_S = 60
WHOLE_S = 200


@dataclass
class Command:
    """A run of the command line in a process of its own, in `folder`."""

    process: subprocess.Popen[str]
    folder: Path

    @property
    def logs(self) -> Path:
        return self.folder / "run" / "logs"

    def step_of(self, rank: int) -> int:
        status = read_status(self.logs, rank)
        return status[0] if status else 0

    def wait_for_step(self, step: int) -> list[int]:
        """Wait until both ranks have begun that step; their process ids."""
        deadline = time.monotonic() + WHOLE_S
        while min(self.step_of(0), self.step_of(1)) < step:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "the ranks took too long to start"
            time.sleep(0.02)
        found = [read_status(self.logs, rank) for rank in range(2)]
        return [status[1] for status in found if status is not None]

    def forget(self) -> None:
        """Remove what the ranks of an earlier run left, so that it is not taken for that of the next."""
        for path in self.logs.glob("status-rank-*"):
            path.unlink()

    def end(self, timeout_s: float = MOST_S) -> tuple[int, str, str]:
        """Exit code, standard output and error once it has ended, which must be soon."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err


def start(folder: Path, *arguments: str, path: str = "") -> Command:
    search = os.pathsep.join([path, *sys.path] if path else sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", "from meshwright.cli import main; main()", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Command(process, folder)


def prepared(folder: Path) -> Path:
    corpus(folder / "corpus")
    (folder / "job.toml").write_text(JOB)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a finished run on two ranks, and what it showed."""
    folder = prepared(tmp_path_factory.mktemp("finished"))
    code, out, err = start(folder, "train", "job.toml", "--out", "run", "--pin", "dp=2 zero=1").end(WHOLE_S)
    assert (code, err) == (0, "")
    return folder, out


@pytest.fixture
def copied(finished: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder as the working folder."""
    folder = tmp_path / "work"
    shutil.copytree(finished[0], folder)
    monkeypatch.chdir(folder)
    return folder


def run_here(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_a_run_shows_plan_steps_memory_loss_sample_and_checkpoint(finished: tuple[Path, str]) -> None:
    folder, out = finished
    assert "dp=2 zero=1" in out
    assert "predicted" in out
    assert "measured" in out
    assert re.search(r"^validation loss \d\.\d\d nats per byte$", out, re.MULTILINE)
    assert "sample\n    def " in out
    assert "checkpoint run/checkpoints/step-000006" in out
    assert sorted(path.name for path in (folder / "run" / "checkpoints").iterdir()) == ["step-000003", "step-000006"]


def test_S1_global_rank_0_alone_writes_to_the_screen(finished: tuple[Path, str]) -> None:
    folder, out = finished
    assert re.findall(r"^step (\d)/6 ", out, re.MULTILINE) == ["1", "2", "3", "4", "5", "6"]
    assert [line["step"] for line in metrics(folder / "run")] == [1, 2, 3, 4, 5, 6]
    for line, shown in zip(metrics(folder / "run"), re.findall(r"loss (\d\.\d{4}) norm", out), strict=True):
        assert f"{line['loss']:.4f}" == shown
        assert line["tokens"] == 8 * 16
        assert line["learning_rate"] == 3e-3
        assert line["collectives"]["all_gather"] == line["collectives"]["reduce_scatter"] == 3
        assert line["memory_bytes"]["total"] > 0
    logs = folder / "run" / "logs"
    assert sorted(path.name for path in logs.glob("rank-*.log")) == ["rank-0.log", "rank-1.log"]
    assert (logs / "rank-1.log").read_text() == ""


def test_predicted_memory_is_measured_within_a_tenth(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    measured = json.loads((folder / "run" / "result.json").read_text())["in_step_bytes"]
    from meshwright.spec import Plan
    from meshwright.spec.files import read_noun

    predicted = read_noun(Plan, folder / "run" / "plan.toml").cost.in_step
    assert sum(predicted.values()) == pytest.approx(measured["total"], rel=0.1)


def test_generate_takes_the_newest_complete_checkpoint_and_names_what_it_skips(copied: Path) -> None:
    text = run_here("generate", "run", "--prompt", "12 13", "--tokens", "9")
    assert text.startswith("12 13")
    assert text == run_here("generate", "run/checkpoints/step-000006", "--prompt", "12 13", "--tokens", "9")
    half = copied / "run" / "checkpoints" / "step-000009"
    half.mkdir()
    result = CliRunner().invoke(app, ["generate", "run", "--prompt", "12 13", "--tokens", "9"])
    assert result.stdout == text
    assert "skipped run/checkpoints/step-000009: no manifest" in result.stderr


def test_resume_of_a_finished_run_says_so(copied: Path) -> None:
    out = run_here("train", "job.toml", "--out", "run", "--resume")
    assert "the run is finished" in out
    assert "step 6 of train.steps=6" in out


def test_G6_resume_on_another_number_of_ranks_skips_a_half_written_checkpoint(copied: Path) -> None:
    half = copied / "run" / "checkpoints" / "step-000007"
    shutil.copytree(copied / "run" / "checkpoints" / "step-000006", half)
    (half / "rank-00001.safetensors").write_bytes(b"cut")
    # The corpus, model and everything else come from the run's own job file.
    code, out, err = start(
        copied, *["train", "--resume", "--out", "run", "--pin", "dp=1", "--set", "train.steps=8"]
    ).end(WHOLE_S)
    assert (code, err) == (0, "")
    assert "skipped run/checkpoints/step-000007: truncated file rank-00001.safetensors" in out
    assert "going on from run/checkpoints/step-000006" in out
    assert re.findall(r"^step (\d)/8 ", out, re.MULTILINE) == ["7", "8"]
    assert [line["step"] for line in metrics(copied / "run")] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_B5_a_new_run_leaves_an_old_one_alone_and_its_plan_is_launched_again(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []

    def launch(arguments: list[str], **_: object) -> bool:
        launched.extend(arguments)
        return False

    monkeypatch.setattr(meshwright.train.run, "launch", launch)
    before = sorted((path, path.stat().st_mtime_ns) for path in (copied / "run").rglob("*"))
    out = run_here("train", "job.toml", "--out", "run", "--strategy", "dp=1")
    assert "run holds checkpoints of an earlier run, so this one goes to run-2" in out
    assert launched == [str(copied / "run-2")]
    assert sorted((path, path.stat().st_mtime_ns) for path in (copied / "run").rglob("*")) == before
    # Its plan can be executed again, as it is.
    run_here("train", "job.toml", "--plan", "run-2/plan.toml", "--out", "again")
    assert (copied / "again" / "plan.toml").read_text() == (copied / "run-2" / "plan.toml").read_text()
    result = CliRunner().invoke(app, ["train", "job.toml", "--plan", "run-2/plan.toml", "--set", "job.seed=1"])
    assert result.exit_code == 2
    assert "plan run-2/plan.toml is for another job than job.toml" in result.stderr
    result = CliRunner().invoke(app, ["train", "--plan", "run-2/plan.toml", "--set", "job.seed=1"])
    assert result.exit_code == 2
    assert "plan run-2/plan.toml is for another job than --set job.seed=1" in result.stderr


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[Command]:
    """A run that goes on until something ends it; all of its processes are gone afterwards."""
    command = start(prepared(tmp_path), *ENDLESS)
    yield command
    command.process.kill()
    command.process.communicate()


ENDLESS = (
    *["train", "job.toml", "--out", "run", "--pin", "dp=2", "--set", "train.steps=1000000"],
    "--set",
    "train.checkpoint_every=10",
)


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_killed_rank_ends_all_and_is_named_first(endless: Command) -> None:
    pids = endless.wait_for_step(12)
    os.kill(pids[1], signal.SIGKILL)
    code, _, err = endless.end()
    assert code == 1
    assert re.match(r"meshwright: rank 1 on \S+ was killed by SIGKILL during step \d+\n", err), err
    assert err.count("meshwright:") == 1
    assert "meshwright train --resume --out run" in err
    assert gone(pids)
    endless.forget()
    resumed = start(endless.folder, *["train", "--resume", "--out", "run", "--set", "train.steps=1000000"])
    resumed.wait_for_step(11)
    resumed.process.send_signal(signal.SIGTERM)
    code, out, _ = resumed.end()
    assert code == 128 + signal.SIGTERM
    assert re.search(r"going on from run/checkpoints/step-0000\d0", out)


def test_interrupt_ends_all_with_130(endless: Command) -> None:
    pids = endless.wait_for_step(2)
    endless.process.send_signal(signal.SIGINT)
    code, _, err = endless.end()
    assert code == 130
    assert err == "meshwright: interrupted\n"
    assert gone(pids)


def test_killed_launcher_leaves_no_rank_behind(endless: Command) -> None:
    pids = endless.wait_for_step(2)
    endless.process.kill()
    assert gone(pids)


def test_shrinking_corpus_is_the_users_own_error(endless: Command) -> None:
    pids = endless.wait_for_step(2)
    for file in (endless.folder / "corpus").iterdir():
        os.truncate(file, 100)
    code, _, err = endless.end()
    assert code == 2
    assert re.match(r"meshwright: \S*corpus\S* of corpus corpus has become shorter\n", err), err
    assert "Traceback" not in err
    assert gone(pids)


#: Makes rank 1 fail in the middle of a step: its third look at a file (the first two are before the run) raises.
BROKEN_READER = """
import os, sys
looks = []
def hook(event, arguments):
    if event == "open" and str(arguments[0]).endswith("corpus/03.txt"):
        looks.append(1)
        if len(looks) == 3:
            raise ZeroDivisionError("a fault of rank 1 alone")
if os.environ.get("RANK") == "1":
    sys.addaudithook(hook)
"""


def test_raising_rank_ends_all_and_its_error_is_shown_first(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(BROKEN_READER)
    command = start(prepared(tmp_path), *ENDLESS, path=str(broken))
    code, _, err = command.end(WHOLE_S)
    assert code == 1
    assert re.match(
        r"meshwright: rank 1 on \S+ failed during step \d+: ZeroDivisionError: a fault of rank 1 alone\n", err
    ), err
    assert err.count("Traceback") == 1
    assert "in _mapped" in err
    assert "closed by peer" not in err
    assert "a fault of rank 1 alone" in (command.logs / "rank-1.log").read_text()
