"""Every wrong input gives one clear error and exit code 2, before anything is launched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import meshwright.train.run
from meshwright.cli import app

TEXT = b"the quick brown fox jumps over the lazy dog\n" * 200
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
sequence = 32
[data]
path = "corpus.txt"
[train]
steps = 4
"""
TWO_DEVICES = """
[cluster]
name = "two cores"
[[cluster.nodes]]
devices = 2
device = { name = "core", memory_bytes = 2147483648 }
"""


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a job that is right; nothing may be launched from it."""

    def launched(*args: object, **kwargs: object) -> None:
        raise AssertionError("the mistake was not found before the launch")

    monkeypatch.setattr(meshwright.train.run, "launch", launched)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_bytes(TEXT)
    (tmp_path / "job.toml").write_text(JOB + TWO_DEVICES)
    return tmp_path


@pytest.fixture
def as_nobody(work: Path) -> Iterator[None]:
    """Root may read and write everything; these tests must not."""
    if os.geteuid() != 0:
        yield
        return
    os.chown(work, 65534, 65534)
    for folder in work.parents:
        if folder.stat().st_uid == os.geteuid() and folder != folder.parent and "pytest" in folder.name:
            folder.chmod(0o755)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def refuse(*arguments: str) -> str:
    """The one error of a command that must fail; blanks folded."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    text = result.stderr
    assert "Traceback" not in result.output
    assert text.count("meshwright:") == 1, text
    return " ".join(text.split())


def set_(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (set_("job.globl_batch=4"), ["unknown key job.globl_batch", "did you mean global_batch?"]),
        (set_("nothing.at_all=4"), ["unknown key nothing"]),
        (set_("job.global_batch=many"), ["job.global_batch='many'", "Expected int"]),
        (set_("job.global_batch"), ["--set 'job.global_batch' is not an assignment"]),
        (set_("data.path=missing.txt"), ["no corpus at data.path='missing.txt'"]),
        (set_("data.path=*.nothing"), ["no file matches"]),
        (set_("job.sequence=100000", "model.max_position_embeddings=100000"), ["shorter than one sample"]),
        (set_("job.sequence=600"), ["600", "max_position_embeddings"]),
        (set_("job.global_batch=0"), ["job.global_batch=0 is not a positive number"]),
        (set_("job.global_batch=-8"), ["job.global_batch=-8 is not a positive number"]),
        (["--pin", "zero=4"], ["zero=4 is not a ZeRO stage"]),
        (["--pin", "dp=0"], ["dp=0 is not a positive number"]),
        (["--pin", "dp=4"], ["4", "2 devices"]),
        (["--pin", "dp=2", "--pin", "shard=3", "--pin", "zero=1"], ["shard=3 does not divide dp=2"]),
        (["--pin", "zero=1", "--pin", "zero=2"], ["contradicts itself: zero=1 and zero=2"]),
        (["--pin", "microbatch>=4", "--pin", "microbatch<=2"], ["contradicts itself"]),
        (["--pin", "tp=2", "--pin", "dp=2"], ["tp=2 dp=2 pinned", "2 devices"]),
        (["--strategy", "cp=2"], ["context parallelism (cp=2) is not executable yet"]),
        (["--pin", "pp=3"], ["3", "2 devices"]),
        (["--strategy", "dp=2 zro=3"], ["zro"]),
        (["--strategy", "dp=2", "--pin", "zero=3"], ["--strategy", "--pin"]),
        (["--plan", "no-plan.toml"], ["no file no-plan.toml"]),
        (["--plan", "job.toml"], ["job.toml"]),
        (["--plan", "job.toml", "--pin", "zero=3"], ["--plan", "--pin"]),
        (["--nnodes", "0"], ["--nnodes 0 is not a number of machines"]),
        (["--nnodes", "2"], ["--nnodes 2 without a meeting place"]),
        (["--nnodes", "2", "--rdzv-endpoint", "a:1", "--rdzv-id", "x", "--node-rank", "2"], ["--node-rank 2"]),
        (["--resume", "--out", "nothing-here"], ["nothing-here", "checkpoint"]),
        (set_("model.vocab_size=100"), ["vocab_size=100", "256"]),
        (set_("train.steps=0"), ["train.steps=0"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_value_is_named(arguments: list[str], says: list[str]) -> None:
    text = refuse("train", "job.toml", *arguments)
    for part in says:
        assert part in text


def test_missing_job_file() -> None:
    assert "no file jobs.toml" in refuse("train", "jobs.toml")


def test_toml_syntax_error(work: Path) -> None:
    (work / "job.toml").write_text(JOB + "[train\n")
    text = refuse("train", "job.toml")
    assert "job.toml is not valid TOML" in text
    assert "line" in text


def test_empty_corpus(work: Path) -> None:
    (work / "corpus.txt").write_bytes(b"")
    assert "corpus corpus.txt is empty" in refuse("train", "job.toml")


def test_unreadable_corpus(work: Path, as_nobody: None) -> None:
    (work / "mine").write_bytes(TEXT)
    (work / "mine").chmod(0)
    assert "cannot read corpus file mine" in refuse("train", "job.toml", *set_("data.path=mine"))


def test_unwritable_output_folder(work: Path, as_nobody: None) -> None:
    (work / "locked").mkdir(mode=0o555)
    assert "cannot write to the output folder locked/run" in refuse("train", "job.toml", "--out", "locked/run")


def test_output_folder_below_a_file() -> None:
    assert "output folder corpus.txt/run" in refuse("train", "job.toml", "--out", "corpus.txt/run")


def test_C2_global_batch_that_no_microbatch_divides_names_the_nearest() -> None:
    text = refuse("train", "job.toml", "--pin", "dp=2", *set_("job.global_batch=7"))
    assert "global_batch=7" in text
    assert "dp=2" in text
    assert "6 or 8" in text


def test_C2_seven_ranks_and_a_global_batch_of_256_name_the_nearest_that_divide(work: Path) -> None:
    (work / "job.toml").write_text((JOB + TWO_DEVICES).replace("devices = 2", "devices = 7"))
    text = refuse("train", "job.toml", "--pin", "dp=7", *set_("job.global_batch=256"))
    assert "252 or 259" in text


def test_cluster_that_this_machine_is_not(work: Path) -> None:
    (work / "job.toml").write_text((JOB + TWO_DEVICES).replace('name = "core"', 'name = "xpu", kind = "xpu"'))
    text = refuse("train", "job.toml")
    assert "2 devices of kind xpu" in text
    assert "meshwright plan" in text


def test_pinned_strategy_that_does_not_fit_memory() -> None:
    pins = ["--pin", "dp=2", "--pin", "zero=0"]
    text = refuse("train", "job.toml", *pins, *set_("model.hidden_size=4096", "model.intermediate_size=16384"))
    assert "GiB" in text


def half_written(folder: Path) -> Path:
    place = folder / "checkpoints" / "step-000010"
    place.mkdir(parents=True)
    (place / "rank-00000.safetensors").write_bytes(b"12345678")
    return place


def complete(folder: Path, **changes: object) -> Path:
    """A checkpoint whose manifest names its only file; enough for what is looked at before a launch."""
    place = half_written(folder)
    model = {"vocab_size": 256, "hidden_size": 16, **changes}
    extra = {"model": model, "optimizer": "adamw", "data": {}}
    manifest = {"engine": {"steps_done": 2}, "extra": extra}
    data = {"format": 1, "files": {"rank-00000.safetensors": 8}, "manifest": manifest}
    (place / "manifest.json").write_text(json.dumps(data))
    return place


def test_resume_where_the_only_checkpoint_is_half_written(work: Path) -> None:
    half_written(work / "run")
    text = refuse("train", "job.toml", "--resume", "--out", "run")
    assert "run/checkpoints holds no complete checkpoint" in text
    assert "step-000010: no manifest" in text


def test_resume_from_a_checkpoint_of_another_model(work: Path) -> None:
    complete(work / "run", hidden_size=64)
    text = refuse("train", "job.toml", "--resume", "--out", "run")
    assert "step-000010 is of another model" in text
    assert "hidden_size was 64 and is 16 now" in text


def test_generate_from_no_checkpoint(work: Path) -> None:
    assert "no checkpoint at nowhere" in refuse("generate", "nowhere", "--prompt", "x")
    assert "corpus.txt is not a checkpoint" in refuse("generate", "corpus.txt", "--prompt", "x")
    half = half_written(work / "run")
    assert "no manifest" in refuse("generate", str(half), "--prompt", "x")
    assert "holds no complete checkpoint" in refuse("generate", "run", "--prompt", "x")


def test_generate_from_a_checkpoint_of_another_model(work: Path) -> None:
    place = complete(work / "run", num_experts=8)
    assert "does not know" in refuse("generate", str(place), "--prompt", "x")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x", "--tokens", "0"], "--tokens 0"),
        (["--prompt", "x", "--temperature", "-1"], "--temperature -1"),
        (["--prompt", "x", "--seed", "-1"], "--seed -1"),
    ],
)
def test_generate_with_wrong_options(work: Path, options: list[str], says: str) -> None:
    complete(work / "run")
    assert says in refuse("generate", "run", *options)


@pytest.mark.parametrize(
    "arguments",
    [["train", "--no-such-option"], ["generate"], ["generate", "x"], ["no-such-command"], ["train", "--nnodes", "two"]],
    ids=" ".join,
)
def test_wrong_usage(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "job.toml", "--set", "job.sequense=4"], "did you mean sequence?"),
        (["generate", "nowhere", "--prompt", "x"], "no checkpoint at nowhere"),
    ],
)
def test_as_a_command_of_its_own(work: Path, arguments: list[str], says: str) -> None:
    command = [sys.executable, "-c", "from meshwright.cli import main; main()", *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=work, check=False)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
