"""`meshwright generate`: text from a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["generate"]


def generate(
    checkpoint: Annotated[
        Path, typer.Argument(help="A run folder (its newest complete checkpoint is taken) or a checkpoint folder.")
    ],
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    tokens: Annotated[int, typer.Option(help="How many bytes to generate.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest byte each time.")] = 0.8,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
) -> None:
    """Continue a text with a trained model."""
    from meshwright.train.generate import generate_text
    from meshwright.train.model import find_checkpoint

    found, skipped = find_checkpoint(checkpoint)
    for path, why in skipped:
        print(f"skipped {path}: {why}", file=sys.stderr)
    print(prompt + generate_text(found, prompt, tokens=tokens, temperature=temperature, seed=seed))
