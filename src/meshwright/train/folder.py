"""The folder of a run: where everything that training writes lies, and which folder a run may take."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError
from meshwright.spec.files import write_text

__all__ = ["RunFolder", "free_folder"]

_STEP = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run.

    job.toml, plan.toml          what was asked and what was decided; together they repeat the run
    metrics.jsonl                one line per optimizer step, by global rank 0
    result.json                  figures of the finished run
    checkpoints/step-000100/     complete checkpoints, the newest few
    logs/rank-N.log              the output of rank N
    """

    path: Path

    @property
    def job(self) -> Path:
        return self.path / "job.toml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint after `step` optimizer steps."""
        return self.checkpoints / f"step-{step:06d}"

    def holds_checkpoints(self) -> bool:
        """Whether a checkpoint of any kind lies there, complete or not."""
        return self.checkpoints.is_dir() and any(_STEP.match(entry.name) for entry in self.checkpoints.iterdir())

    def prepare(self) -> None:
        """Make the folder and try to write to it.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            for folder in (self.checkpoints, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
                probe = folder / f".probe-{os.getpid()}"
                probe.touch()
                probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"cannot write to the output folder {self.path}",
                why=str(error),
                fix="choose a folder that you may write to with --out",
            ) from error

    def write_result(self, figures: dict[str, Any]) -> None:
        """Write the figures of the finished run."""
        write_text(self.result, json.dumps(figures, indent=1) + "\n")

    def read_result(self) -> dict[str, Any]:
        """The figures of the finished run; empty where there are none."""
        try:
            found = json.loads(self.result.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def keep_metrics_until(self, step: int) -> None:
        """Drop the metrics of later steps, which a resumed run takes again, and a line that was cut off."""
        kept = []
        try:
            lines = self.metrics.read_text(encoding="utf-8").splitlines()
        except OSError:
            lines = []
        for line in lines:
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                continue
        write_text(self.metrics, "".join(f"{line}\n" for line in kept))

    def prune_checkpoints(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints; called after one was written, so the newest is complete."""
        found = [(int(match[1]), path) for path in self.checkpoints.iterdir() if (match := _STEP.fullmatch(path.name))]
        for _, path in sorted(found, reverse=True)[keep:]:
            # Without its manifest it is no checkpoint any more, should the rest not be removed.
            (path / "manifest.json").unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


def free_folder(wanted: Path) -> RunFolder:
    """`wanted`, or the first of `wanted-2`, `wanted-3`, ... that holds no checkpoints.

    Raises:
        ConfigError: it cannot be looked into.
    """
    number = 1
    while True:
        folder = RunFolder(wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}"))
        try:
            if not folder.holds_checkpoints():
                return folder
        except OSError as error:
            raise ConfigError(
                f"cannot look into the output folder {folder.path}", why=str(error), fix="choose another with --out"
            ) from error
        number += 1
