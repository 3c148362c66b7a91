"""What makes two trainings the same run: its checkpoints carry it, and a resume compares it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError
from meshwright.spec import Plan
from meshwright.spec.job_file import DataSpec
from meshwright.train.data import ByteCorpus

__all__ = ["describe_run", "require_same_run"]


def describe_run(plan: Plan, data: DataSpec, corpus: ByteCorpus) -> dict[str, Any]:
    """What a checkpoint tells besides the engine's own values: the model, and what the order of samples hangs on."""
    job = plan.job
    return {
        "model": dataclasses.asdict(plan.decoder),
        "optimizer": job.optimizer.name,
        "data": {
            **corpus.fingerprint(),
            "sequence": job.sequence,
            "validation_every": data.validation_every,
            "seed": job.seed,
        },
    }


def require_same_run(checkpoint: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to go on from a checkpoint of another model, optimizer or order of samples.

    Raises:
        CheckpointError: naming every value that differs.
    """
    for key, what, fix in (
        ("model", "is of another model", "give the [model] that wrote it, or start a new run without --resume"),
        ("optimizer", "was trained with another optimizer", "keep optimizer.name, or start a new run without --resume"),
        ("data", "was trained on other samples", "keep the corpus, or start a new run without --resume"),
    ):
        old, new = saved.get(key), now[key]
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
            why = "; ".join(f"{name} was {old.get(name)} and is {new.get(name)} now" for name in names)
        else:
            why = f"{key} was {old} and is {new} now"
        raise CheckpointError(f"checkpoint {checkpoint} {what}", why=why, fix=fix)
