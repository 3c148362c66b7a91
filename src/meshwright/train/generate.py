"""Text from a checkpoint, in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from meshwright.errors import CheckpointError, ConfigError
from meshwright.models import generate
from meshwright.train.model import load_decoder

__all__ = ["generate_text"]

_SMALL_PARAMETERS = 20_000_000


def generate_text(checkpoint: Path, prompt: str, *, tokens: int, temperature: float, seed: int) -> str:
    """The prompt's continuation, without the prompt; bytes that are no UTF-8 appear as the replacement character.

    Args:
        checkpoint: a complete checkpoint of a byte model.
        prompt: at least one character.
        tokens: bytes to generate.
        temperature: 0 takes the likeliest byte each time.
        seed: of the draws; the same text for the same seed.

    Raises:
        CheckpointError: the checkpoint cannot be used.
        ConfigError: an option is out of range.
    """
    if not prompt:
        raise ConfigError(
            "the prompt is empty", why="a continuation needs something to continue", fix="give --prompt TEXT"
        )
    if tokens < 1:
        raise ConfigError(f"--tokens {tokens} is not a positive number", fix="use 1 or more")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"--temperature {temperature} is not possible", fix="use 0 or more, for example 0.8")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"--seed {seed} is out of range", fix="use a seed from 0 to 2^63-1")
    model = load_decoder(checkpoint)
    if model.config.vocab_size < 256:
        raise CheckpointError(
            f"checkpoint {checkpoint} is not of a byte model",
            why=f"its vocabulary has {model.config.vocab_size} entries, and text has 256 bytes",
            fix="give a checkpoint of meshwright train",
        )
    encoded = prompt.encode(errors="surrogateescape")
    ids = torch.tensor(list(encoded))
    with _few_threads(sum(parameter.numel() for parameter in model.parameters())):
        found = generate(model, ids, max_new_tokens=tokens, temperature=temperature, seed=seed)
    return bytes(min(token, 255) for token in found[len(encoded) :].tolist()).decode(errors="replace")


@contextlib.contextmanager
def _few_threads(parameters: int) -> Iterator[None]:
    """One thread for a small model: threads that wait for each other after every tiny operation take several times as
    long, and far longer on a busy machine."""
    before = torch.get_num_threads()
    if parameters < _SMALL_PARAMETERS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
