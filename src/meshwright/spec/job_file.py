"""The job file: everything a run is asked for. What its `[strategy]` names is pinned, the rest is planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError
from meshwright.spec.cluster import Cluster
from meshwright.spec.decoder import DecoderShape
from meshwright.spec.files import from_table, load_toml, require_format
from meshwright.spec.job import Job
from meshwright.spec.plan import PLAN_FORMAT
from meshwright.spec.text import Assignment, apply_assignments, parse_assignments, pins_from_table

__all__ = ["DataSpec", "JobFile", "TrainSpec", "read_job"]

_DEFAULT = Path(__file__).with_name("default_job.toml")


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """The corpus. `path` is a file, a folder or a glob pattern; empty for the Python standard library's own sources.

    Every `validation_every`-th window of `sequence` tokens is kept for validation.
    """

    path: str = ""
    validation_every: int = 20

    def __post_init__(self) -> None:
        if self.validation_every < 2:
            raise ConfigError(
                f"data.validation_every={self.validation_every} leaves nothing to train on",
                why="every so manieth window is for validation",
                fix="set data.validation_every to 2 or more",
            )


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """The run: `steps` optimizer steps, and what happens every so many of them.

    `evaluate_samples` sequences are evaluated each time, all ranks together. `keep_checkpoints` newest ones stay.
    `out` is the folder of the run. At the end `generate_tokens` tokens continue `prompt`. `timeout_s` is how long a
    rank waits for the others. `trace` is a file for a trace of one step, executed beside simulated; none where empty.
    """

    steps: int = 200
    evaluate_every: int = 100
    evaluate_samples: int = 64
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    out: str = "runs/default"
    generate_tokens: int = 200
    prompt: str = "def "
    timeout_s: float = 60.0
    trace: str = ""

    def __post_init__(self) -> None:
        for name in ("steps", "evaluate_every", "evaluate_samples", "checkpoint_every", "keep_checkpoints"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(
                    f"train.{name}={value} is not a positive number", fix=f"set train.{name} to 1 or more"
                )
        if self.generate_tokens < 0:
            raise ConfigError(
                f"train.generate_tokens={self.generate_tokens} is negative",
                fix="set train.generate_tokens to 0 or more",
            )
        if self.generate_tokens and not self.prompt:
            raise ConfigError(
                "train.prompt is empty", why="a continuation needs something to continue", fix="set train.prompt"
            )
        if not self.out:
            raise ConfigError("train.out is empty", fix="set train.out to the folder of the run")
        if not 0 < self.timeout_s < float("inf"):
            raise ConfigError(f"train.timeout_s={self.timeout_s} is not a time", fix="set train.timeout_s above 0")


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """A whole job file. What is left out has the default of its noun; without `[cluster]` it is for this machine."""

    format: int = PLAN_FORMAT
    model: DecoderShape = field(default_factory=DecoderShape)
    cluster: Cluster | None = None
    job: Job = field(default_factory=Job)
    strategy: dict[str, Any] = field(default_factory=dict)
    data: DataSpec = field(default_factory=DataSpec)
    train: TrainSpec = field(default_factory=TrainSpec)

    def __post_init__(self) -> None:
        pins_from_table(self.strategy)

    @property
    def pins(self) -> list[Assignment]:
        """What `[strategy]` pins."""
        return pins_from_table(self.strategy)


def read_job(path: str | Path | None = None, sets: Sequence[str] = ()) -> JobFile:
    """Read a job file, with some of its values changed.

    Args:
        path: the file; None for the built-in job, a small model of bytes on the Python standard library's sources.
        sets: words of the text form, such as `["train.steps=100"]`; keys are dotted.

    Raises:
        ConfigError: the file is missing, unreadable or not TOML; a key is unknown; a value has the wrong type or is
            illegal.
    """
    name = "the built-in job" if path is None else str(path)
    table = load_toml(_DEFAULT if path is None else path)
    require_format(table, name)
    apply_assignments(table, parse_assignments(sets, option="--set"))
    try:
        return from_table(JobFile, table, "")
    except ConfigError as error:
        place = f"{name} with --set {' '.join(sets)}" if sets else name
        raise type(error)(f"{place}: {error.what}", why=error.why, fix=error.fix) from error
