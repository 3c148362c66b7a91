"""What a torch `DataLoader` says about its samples, taken over; and the orders that samplers give."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from meshwright.errors import ConfigError
from meshwright.runtime.seeds import seed_for
from meshwright.train.sources import own_randomness

__all__ = ["Loader", "SamplerOrder", "taken_over"]


@dataclass(frozen=True)
class Loader:
    """The parts of a DataLoader that remain when the batches are ours."""

    data: Any
    collate: Any = None
    shuffle: bool | None = None
    sampler: Any = None
    workers: int = 0
    drop_last: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def taken_over(loader: DataLoader[Any], sizes: dict[str, int]) -> Loader:
    """Take a DataLoader apart.

    Args:
        loader: not iterated over.
        sizes: batch sizes that mean no contradiction, by what they are.

    Raises:
        ConfigError: it makes batches, or an order, that cannot be kept.
    """
    sampler, size, drop_last = loader.sampler, loader.batch_size, loader.drop_last
    if size is None:
        given = loader.batch_sampler
        if given is None:
            raise ConfigError(
                "a DataLoader with batch_size=None",
                why="its dataset makes the batches, but who takes which samples is decided here",
                fix="give a dataset of single samples",
            )
        if type(given) is not BatchSampler:
            raise ConfigError(
                f"a DataLoader with a batch sampler of its own ({type(given).__name__})",
                why="which samples make a batch follows from job.global_batch and dp",
                fix="give the order alone: DataLoader(dataset, sampler=...)",
            )
        sampler, size, drop_last = given.sampler, given.batch_size, given.drop_last
    if size not in {1, *sizes.values()}:
        known = ", ".join(f"{name} {value}" for name, value in sizes.items())
        raise ConfigError(
            f"a DataLoader with batch_size={size}",
            why=f"the job and the strategy say {known}",
            fix=f"leave batch_size out of the DataLoader, or set job.global_batch or the microbatch to match {size}",
        )
    if isinstance(sampler, DistributedSampler):
        raise ConfigError(
            "a DataLoader with a DistributedSampler",
            why="which rank takes which samples is decided here; both together would skip most",
            fix="leave the sampler out, and say shuffle=True or False",
        )
    shuffle, own = _order_of(loader, sampler)
    options: dict[str, Any] = {"timeout": loader.timeout, "worker_init_fn": loader.worker_init_fn}
    if loader.pin_memory and torch.accelerator.is_available():
        options["pin_memory"] = True
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
        options["multiprocessing_context"] = loader.multiprocessing_context
    return Loader(
        data=loader.dataset,
        collate=None if loader.collate_fn is default_collate else loader.collate_fn,
        shuffle=shuffle,
        sampler=own,
        workers=loader.num_workers,
        drop_last=drop_last,
        options=options,
    )


def _order_of(loader: DataLoader[Any], sampler: Any) -> tuple[bool | None, Any]:
    """Whether a DataLoader shuffles, or the sampler that says otherwise; None for a stream."""
    if not hasattr(loader.dataset, "__len__") or isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return None, None
    if type(sampler) is SequentialSampler:
        return False, None
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return True, None
    return None, sampler


class SamplerOrder:
    """The order that a sampler gives: its indices of one epoch after the other, drawn anew from (seed, epoch).

    Every rank draws the whole epoch. `set_epoch` is called where there is one, and the random states of torch, numpy
    and Python, and of the sampler's own `generator`, are set from (seed, epoch) meanwhile.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self._sampler, self._seed = sampler, seed
        self._epoch = 0
        self._indices = self._drawn(0)
        self.samples = len(self._indices)

    def __call__(self, number: int) -> int:
        epoch, place = divmod(number, self.samples)
        if epoch != self._epoch:
            self._epoch, self._indices = epoch, self._drawn(epoch)
            if len(self._indices) != self.samples:
                raise ConfigError(
                    f"the sampler gave {self.samples} samples in epoch 0 and {len(self._indices)} in epoch {epoch}",
                    why="the position in the data counts samples, so that every epoch must have as many",
                    fix="use a sampler of one length",
                )
        return self._indices[place]

    def first_epoch(self) -> int:
        """A number that tells one order from another."""
        return seed_for("order", *self._indices)

    def _drawn(self, epoch: int) -> list[int]:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        own = getattr(self._sampler, "generator", None)
        state = own.get_state() if isinstance(own, torch.Generator) else None
        try:
            with own_randomness() as reseed:
                reseed(self._seed, "sampler", epoch)
                if isinstance(own, torch.Generator):
                    own.manual_seed(seed_for(self._seed, "sampler", epoch))
                return [int(index) for index in self._sampler]
        finally:
            if isinstance(own, torch.Generator) and state is not None:
                own.set_state(state)
