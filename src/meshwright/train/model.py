"""The built-in decoder from a job's `[model]` table, and from a checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError, ConfigError
from meshwright.models import Decoder, DecoderConfig
from meshwright.runtime.checkpoint import complete, load_checkpoint, newest, read_manifest, stored
from meshwright.spec import DecoderShape
from meshwright.spec.files import from_table

__all__ = ["decoder_config", "find_checkpoint", "load_decoder", "saved_extra"]


def decoder_config(shape: DecoderShape) -> DecoderConfig:
    """The model's own configuration for a shape."""
    values = dataclasses.asdict(shape)
    return DecoderConfig(**{**values, "head_dim": shape.head_dim or None})


def find_checkpoint(place: Path) -> tuple[Path, list[tuple[Path, str]]]:
    """The checkpoint that a path means: itself, or the newest complete one of a run folder.

    Returns:
        The checkpoint, and what was passed over with the reason.

    Raises:
        CheckpointError: there is no complete checkpoint.
    """
    if not place.exists():
        raise CheckpointError(
            f"no checkpoint at {place}", why="there is no such folder", fix="give a run or checkpoint folder"
        )
    reason = complete(place)
    if reason is None:
        return place, []
    for parent in (place / "checkpoints", place):
        found, skipped = newest(parent)
        if found is not None:
            return found, skipped
        if skipped:
            raise CheckpointError(
                f"{parent} holds no complete checkpoint",
                why="; ".join(f"{path.name}: {why}" for path, why in skipped),
                fix="start a new run, or give another checkpoint",
            )
    if (place / "plan.toml").exists():
        raise CheckpointError(
            f"the run in {place} has no checkpoint",
            why="it ended before its first (train.checkpoint_every steps)",
            fix="start it again, with a smaller train.checkpoint_every",
        )
    raise CheckpointError(f"{place} is not a checkpoint", why=reason, fix="give a run folder, or a checkpoint in it")


def saved_extra(checkpoint: Path) -> dict[str, Any]:
    """What the trainer noted in a checkpoint: model, optimizer, data.

    Raises:
        CheckpointError: it was not written by `meshwright train`.
    """
    extra = read_manifest(checkpoint).get("extra")
    if not isinstance(extra, dict) or "model" not in extra:
        raise CheckpointError(
            f"checkpoint {checkpoint} does not describe its model",
            why="it was not written by meshwright train",
            fix="load it with the script that wrote it",
        )
    return extra


def load_decoder(checkpoint: Path) -> Decoder:
    """The decoder in a checkpoint, whole, on the CPU, in the dtype it was stored in.

    Raises:
        CheckpointError: the checkpoint is not complete, or holds another kind of model.
    """
    try:
        shape = from_table(DecoderShape, saved_extra(checkpoint)["model"], "model")
    except ConfigError as error:
        raise CheckpointError(
            f"checkpoint {checkpoint} is of a model that this version does not know",
            why=error.what,
            fix="use the version of Meshwright that wrote it",
        ) from error
    model = Decoder(decoder_config(shape))
    dtypes = {dtype for name, (_, dtype) in stored(checkpoint).items() if name.startswith("model.")}
    if len(dtypes) == 1:
        model.to(dtypes.pop())
    load_checkpoint(checkpoint, {f"model.{name}": value.detach() for name, value in model.named_parameters()})
    return model.eval()
