"""Random streams that do not depend on the layout: each is derived from what it is for, never from a rank."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["DropoutStreams", "preserved_random_state", "seed_for"]


def seed_for(*parts: object) -> int:
    """A 63-bit seed from what the stream is for, for example `(seed, "init", module name)`."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """Leave the user's own random state as it was."""
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        with torch.random.fork_rng(devices=[device], device_type=device.type):
            yield


class DropoutStreams:
    """Dropout from (seed, step, global microbatch, block, call): the same for every layout, replayed by recompute.

    The stream is set before the model's forward and again before each block's, outside of what recompute replays.
    """

    def __init__(self, seed: int, blocks: Sequence[tuple[str, nn.Module]]) -> None:
        self._seed = seed
        self._now: tuple[int, int] | None = None
        self._calls: Counter[str] = Counter()
        for name, block in blocks:
            block.register_forward_pre_hook(lambda module, args, name=name: self._set(name))

    def start(self, step: int, microbatch: int) -> None:
        """Begin the forward of a global microbatch of a step."""
        self._now = (step, microbatch)
        self._calls.clear()
        self._set("")

    def stop(self) -> None:
        """Leave the random state alone from here on (evaluation, generation)."""
        self._now = None

    def _set(self, block: str) -> None:
        if self._now is not None:
            torch.manual_seed(seed_for(self._seed, "dropout", *self._now, block, self._calls[block]))
            self._calls[block] += 1
