"""Random streams that do not depend on the layout: each is derived from what it is for, never from a rank."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["DropoutStreams", "SplitStreams", "preserved_random_state", "seed_for"]


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


def _begin(seed: int, device: torch.device) -> None:
    """Set the stream of the host and of the device.

    `torch.manual_seed` goes through every kind of device that there could be, and for each that is not in use writes
    down the stack: more than a small block computes.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed_all(seed)


class DropoutStreams:
    """Dropout from (seed, step, global microbatch, block, call): the same for every layout, replayed by recompute.

    The stream is set before the model's forward, before each block's and after it, outside of what recompute replays.

    Args:
        seed: the job's.
        blocks: by name.
        device: that draws.
        part: of each sequence that this rank computes in blocks, where ranks have different ones.
        split: the streams between divided matrices.
    """

    def __init__(
        self,
        seed: int,
        blocks: Sequence[tuple[str, nn.Module]],
        device: torch.device,
        *,
        part: int = 0,
        split: SplitStreams | None = None,
    ) -> None:
        self._seed, self._device, self._part, self._split = seed, device, part, split
        self._now: tuple[int, int] | None = None
        self._calls: Counter[str] = Counter()
        for name, block in blocks:
            block.register_forward_pre_hook(lambda module, args, name=name: self._set(name))
            block.register_forward_hook(lambda module, args, output, name=name: self.passed(name))

    def start(self, step: int, microbatch: int) -> None:
        """Begin the forward of a global microbatch of a step."""
        self._now = (step, microbatch)
        self._calls.clear()
        if self._split is not None:
            self._split.begin()
        self._set("")

    def passed(self, block: str) -> None:
        """What follows a block has a stream of its own, so that it does not matter who ran the block."""
        self._set(f"after {block}")

    def stop(self) -> None:
        """Leave the random state alone from here on (evaluation, generation)."""
        self._now = None
        if self._split is not None:
            self._split.end()

    def _set(self, block: str) -> None:
        if self._now is not None:
            parts = (self._part,) if block and self._part else ()
            seed = seed_for(self._seed, "dropout", *self._now, block, self._calls[block], *parts)
            _begin(seed, self._device)
            self._calls[block] += 1


class SplitStreams:
    """Dropout between divided matrices: every tensor-parallel rank has other activations there, and another stream.

    It is derived from the seed that the stream outside began with, which recompute restores, so that it is replayed.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._outside: torch.Tensor | None = None
        self._inside = ""
        self._active = False

    def begin(self) -> None:
        """A forward of a step."""
        self._outside, self._active = None, True

    def end(self) -> None:
        """Leave the random state alone from here on."""
        self._outside, self._active = None, False

    def divide(self, name: str) -> None:
        """Activations are divided from here on, in the region of this name.

        (A recompute ends where the last tensor is made that backward needs: inside of a region, often.)
        """
        if self._active and (self._outside is None or name != self._inside):
            self._outside, self._inside = self._state(), name
            _begin(seed_for(torch.initial_seed(), "divided", name, self._rank), self._device)

    def join(self) -> None:
        """All ranks have the same activations again, and the stream outside goes on."""
        if self._outside is not None:
            if self._device.type == "cpu":
                torch.set_rng_state(self._outside)
            else:
                torch.get_device_module(self._device).set_rng_state(self._outside)
            self._outside = None

    def _state(self) -> torch.Tensor:
        if self._device.type == "cpu":
            return torch.get_rng_state()
        state: torch.Tensor = torch.get_device_module(self._device).get_rng_state()
        return state
