"""Job files: the built-in one, and what is said of those that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.errors import ConfigError
from meshwright.spec import DecoderShape, Job, describe
from meshwright.spec.job_file import DataSpec, JobFile, TrainSpec, read_job


def written(tmp_path: Path, text: str) -> Path:
    (tmp_path / "job.toml").write_text(text)
    return tmp_path / "job.toml"


def test_the_built_in_job_is_a_small_model_of_bytes_on_this_machine() -> None:
    job_file = read_job()
    assert job_file.cluster is None
    assert job_file.pins == []
    assert job_file.data.path == ""
    assert job_file.job.clip_norm == 1.0
    assert job_file.job.optimizer.warmup_steps > 0
    model = describe(job_file.model, sequence=job_file.job.sequence, compute_dtype=job_file.job.compute_dtype)
    assert job_file.model.vocab_size == 256
    assert len(model.layers) >= 4
    assert model.parameters > 1_000_000


def test_what_is_left_out_has_its_default(tmp_path: Path) -> None:
    assert read_job(written(tmp_path, "format = 1\n")) == JobFile()
    assert JobFile() == JobFile(model=DecoderShape(), job=Job(), data=DataSpec(), train=TrainSpec())


def test_values_are_set_from_the_command_line(tmp_path: Path) -> None:
    path = written(tmp_path, "format = 1\n[strategy]\ndp = 2\n")
    words = [
        "job.optimizer.learning_rate=1e-4 train.prompt='a = b'",
        "strategy.zero=3",
        "job.allow_recompute=none,full",
    ]
    job_file = read_job(path, words)
    assert job_file.job.optimizer.learning_rate == 1e-4
    assert job_file.train.prompt == "a = b"
    assert [str(pin) for pin in job_file.pins] == ["dp=2", "zero=3"]
    assert job_file.job.allow_recompute == ("none", "full")


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("format = 1\n[job]\nglobal_bach = 3\n", "unknown key job.global_bach", "global_batch"),
        ("format = 1\n[jobs]\n", "unknown key jobs", "job"),
        ("format = 1\n[strategy]\nzerro = 3\n", "unknown key strategy.zerro", "zero"),
        ("format = 1\n[strategy]\nzero = true\n", "strategy.zero=True has the wrong type", "zero"),
        ("format = 1\n[strategy.offload]\noptimiser = 'host'\n", "unknown key strategy.offload.optimiser", "optimizer"),
        ("format = 1\n[job]\nsequence = '3'\n", "job.sequence='3' is not right", "job.sequence"),
        ("format = 1\n[job]\nsequence = 2.5\n", "job.sequence=2.5 is not right", "job.sequence"),
        ("format = 1\njob = 3\n", "job=3 is not right", "job"),
        ("format = 1\n[job]\ncompute_dtype = 'bf16'\n", "job.compute_dtype=bf16 is not known", "bfloat16"),
        (
            "format = 1\n[job.optimizer]\nname = 'adam'\n",
            "job.optimizer.name=adam is not known",
            "did you mean adamw?",
        ),
        ("format = 1\n[model]\nhidden_size = 0\n", "model.hidden_size=0 is not a size", "model.hidden_size"),
        ("format = 1\n[data]\nvalidation_every = 1\n", "data.validation_every=1", "2 or more"),
        ("format = 1\n[train]\nsteps = 0\n", "train.steps=0 is not a positive number", "train.steps"),
        ("format = 1\n[train]\nprompt = ''\n", "train.prompt is empty", "train.prompt"),
        ("format = 1\n[train]\nout = ''\n", "train.out is empty", "train.out"),
        ("format = 1\n[train]\ntimeout_s = 0\n", "train.timeout_s=0", "train.timeout_s"),
        ("format = 1\n[[cluster.nodes]]\ndevices = 2\n", "is not right", "cluster"),
        ("format = 1\n[cluster]\nname = 'x'\nnodes = []\n", "cluster x has no nodes", "cluster.nodes"),
        ("format = 2\n", "format=2 cannot be read", "format = 1"),
        ("[job]\n", "format=None cannot be read", "format = 1"),
        ("format = 1\n[job\n", "is not valid TOML", "correct the file"),
    ],
)
def test_a_wrong_file_names_itself_the_key_and_the_remedy(tmp_path: Path, text: str, what: str, fix: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_job(path)
    assert what in caught.value.what
    assert str(path) in caught.value.what
    assert fix in caught.value.fix


def test_a_wrong_set_names_itself() -> None:
    with pytest.raises(ConfigError, match=r"the built-in job with --set job\.sequence=0: job\.sequence=0"):
        read_job(None, ["job.sequence=0"])


@pytest.mark.parametrize("words", [["job.sequence"], ["job.sequence<=4"], ["job.sequence=4", "job.sequence=5"], ["=4"]])
def test_words_that_set_nothing_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="--set"):
        read_job(None, words)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file"):
        read_job(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot read"):
        read_job(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read"):
        read_job(tmp_path / "binary.toml")
