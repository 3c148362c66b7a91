"""`meshwright generate`: text from a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import click

__all__ = ["generate"]


@click.command(epilog="CHECKPOINT is a run folder (its newest complete checkpoint is taken) or a checkpoint folder.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--prompt", required=True, help="The text to continue.")
@click.option("--tokens", type=int, default=200, show_default=True, help="How many bytes to generate.")
@click.option("--temperature", type=float, default=0.8, show_default=True, help="0 takes the likeliest byte each time.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same text.")
def generate(checkpoint: Path, prompt: str, tokens: int, temperature: float, seed: int) -> None:
    """Continue a text with a trained model."""
    from meshwright.train.generate import generate_text
    from meshwright.train.model import find_checkpoint

    found, skipped = find_checkpoint(checkpoint)
    for path, why in skipped:
        print(f"skipped {path}: {why}", file=sys.stderr)
    print(prompt + generate_text(found, prompt, tokens=tokens, temperature=temperature, seed=seed))
