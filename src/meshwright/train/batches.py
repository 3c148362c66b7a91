"""The user's own data as each rank's batches, in an order that does not depend on the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from meshwright.errors import ConfigError, DataError
from meshwright.runtime.ranks import global_rank, world_size
from meshwright.runtime.seeds import seed_for
from meshwright.spec import Job, Strategy
from meshwright.train.collate import is_count, stack
from meshwright.train.loaders import Loader, SamplerOrder, taken_over
from meshwright.train.order import SampleOrder
from meshwright.train.packing import PackedRows, PackedStream
from meshwright.train.sources import (
    ByNumber,
    Failed,
    Rows,
    Stream,
    is_by_number,
    one_shot,
    require_samples,
)

__all__ = ["Batches"]


class Batches:
    """This rank's rows of every global batch of some data, for `Engine(..., batch_scope="local")`.

    Samples are numbered over the whole run. Sample n is number `n % N` of epoch `n // N`, in an order drawn from
    (seed, epoch) alone; a global batch is the next `job.global_batch` of them, across the border of epochs; rank r of
    dp takes rows `[r * share, (r + 1) * share)` of it, `share = global_batch / dp`. So ranks, ZeRO stages and workers
    change nothing in what a step is computed from. The data may be:

    - **by number**: a list, a `torch.utils.data.Dataset`, a Hugging Face `Dataset`, anything with `__getitem__` and
      `__len__`. A rank reads its own samples only, also when it begins at `start`.
    - **a stream**: an `IterableDataset` of torch or Hugging Face, any iterable. Every rank reads all of it and keeps
      its rows; what comes before `start` is read too and dropped. The order is the stream's own, and must be the same
      on every rank. `set_epoch(epoch)` is called where there is one.
    - a `torch.utils.data.DataLoader`, of which the dataset, `collate_fn`, `num_workers`, `drop_last`, `pin_memory` and
      the options of its workers are taken, and the order: shuffled, sequential, or the indices that another sampler
      gives for each epoch (see `SamplerOrder`). Its batch size may be 1 or one that the job or strategy names.

    Random numbers that reading a sample by number draws (torch on the CPU, numpy, Python) are seeded by its number.

    Args:
        data: what holds the samples.
        job: its global batch and seed.
        strategy: its dp.
        collate: a list of samples -> a batch with one row for each; by default they are stacked (`Packing` brings its
            own). `Padding()` is for sequences of different lengths.
        shuffle: in another order every epoch; by default what is read by number is, and a stream cannot be.
        seed: of the order; the job's by default.
        workers: processes that read ahead (torch's), 0 for none; at most 1 for a stream, which each would read whole
            (Hugging Face's buffered shuffle draws another order in a worker than without: go on with as many).
        epochs: how often to go through the data; None for without end.
        start: samples that were seen before: `engine.samples_seen`, under whatever layout.
        last: what fills no whole global batch at the very end: `"short"` (default): each rank yields the rows it has,
            fewer than its share or no batch at all; `"drop"`: it is left out.
        sharded: each rank's data is its own (streams that shard themselves): it takes `share` samples for each step,
            and may run out before others do. Then it can only be resumed on as many ranks.
        rank: this data-parallel rank; by default that of the process group, or of the launcher's environment.

    Raises:
        ConfigError: data, or arguments, that cannot be; what contradicts them in a DataLoader.
        DataError: no samples, or fewer than give every rank a batch; while iterating, a sample that cannot be read or
            collated, with its number.
    """

    def __init__(
        self,
        data: Any,
        job: Job,
        strategy: Strategy,
        *,
        collate: Callable[[Sequence[Any]], Any] | None = None,
        shuffle: bool | None = None,
        seed: int | None = None,
        workers: int | None = None,
        epochs: int | None = 1,
        start: int = 0,
        last: Literal["short", "drop"] | None = None,
        sharded: bool = False,
        rank: int | None = None,
    ) -> None:
        strategy.microbatches(job.global_batch)
        share = job.global_batch // strategy.dp
        loader = Loader(data)
        if isinstance(data, DataLoader):
            sizes = {"microbatch": strategy.microbatch, "rows of a rank": share, "global batch": job.global_batch}
            loader = taken_over(data, sizes)
        self.data = loader.data
        self._by_number = is_by_number(self.data)
        self.seed = job.seed if seed is None else seed
        self._workers = loader.workers if workers is None else workers
        self._epochs = epochs
        self._options = loader.options
        last = last or ("drop" if loader.drop_last else "short")
        _require_values(epochs=epochs, start=start, workers=self._workers, seed=self.seed, last=last)
        own = isinstance(self.data, PackedRows | PackedStream)
        self._collate = collate or loader.collate or (self.data.collate if own else stack)
        place = _rank_of(strategy) if rank is None else _require_rank(rank, strategy)
        self._rows = Rows(start, job.global_batch, place * share, share, last == "short")
        self._draws = self.seed
        if sharded:
            self._rows = Rows(_own_start(start, strategy.dp), share, 0, share, last == "short")
            self._draws = seed_for(self.seed, "shard", place)  # else ranks' n-th samples would draw the same
        self._order: Callable[[int], int] | None = None
        self._total: int | None = None
        if self._by_number:
            size = self._number(loader, shuffle)
        else:
            self._require_stream(shuffle)
        if rank is None and not sharded and dist.is_initialized() and world_size() > 1:
            self._require_same_on_all(shuffle)
        if self._by_number:
            require_samples(size * (self._epochs or self._rows.whole), self._rows)

    def __iter__(self) -> Iterator[Any]:
        options: dict[str, Any] = {"batch_size": None, "collate_fn": _same, "num_workers": self._workers}
        options |= {key: value for key, value in self._options.items() if self._workers or key == "pin_memory"}
        # A generator of its own: the loader would draw its workers' seed from the user's random state.
        options["generator"] = torch.Generator().manual_seed(seed_for(self.seed, "workers"))
        loader: DataLoader[Any]
        if self._by_number:
            samples = ByNumber(self.data, self._collate, self._draws)
            loader = DataLoader(samples, sampler=_Picked(self._picked), **options)
        else:
            stream = Stream(self.data, self._collate, self._draws, self._rows, self._epochs)
            loader = DataLoader(stream, **options)
        return _read(loader)

    def __len__(self) -> int:
        """This rank's number of batches.

        Raises:
            TypeError: it is not known, of a stream or without end.
        """
        if self._total is None:
            raise TypeError("the number of batches is not known: the data is a stream, or epochs=None")
        return self._rows.count(self._total)

    def _picked(self) -> Iterator[list[tuple[int, int]]]:
        """The sample numbers of each batch with their indices in the data."""
        assert self._order is not None, "data that is read by number has an order"
        total = self._total if self._total is not None else 2**62
        for numbers in self._rows.of(total):
            yield [(number, self._order(number)) for number in numbers]

    def _number(self, loader: Loader, shuffle: bool | None) -> int:
        """Find the order and the number of samples of an epoch.

        Raises:
            ConfigError: both a sampler and `shuffle` are given.
            DataError: there are too few.
        """
        size = len(self.data)
        if loader.sampler is not None:
            if shuffle is not None:
                raise ConfigError(
                    f"shuffle={shuffle} beside a DataLoader with a {type(loader.sampler).__name__}",
                    why="the sampler gives the order",
                    fix="leave out one of them",
                )
            order = SamplerOrder(loader.sampler, self.seed)
            self._order, size = order, order.samples
        elif shuffle if shuffle is not None else loader.shuffle is not False:
            self._order = SampleOrder(size, self.seed)
        else:
            self._order = lambda number: number % size
        self._total = None if self._epochs is None else size * self._epochs
        return size

    def _require_stream(self, shuffle: bool | None) -> None:
        """Refuse what a stream cannot do.

        Raises:
            ConfigError: naming it.
        """
        kind = type(self.data).__name__
        if shuffle:
            raise ConfigError(
                f"shuffle=True for a stream ({kind})",
                why="its samples come in its own order",
                fix="shuffle it at its source (Hugging Face: dataset.shuffle(seed=..., buffer_size=...)), "
                "or give data that is read by number",
            )
        if self._workers > 1:
            raise ConfigError(
                f"{self._workers} workers for a stream ({kind})",
                why="each would read it whole, or only a part that depends on the workers",
                fix="use workers=1, which reads ahead, or 0",
            )
        if self._epochs != 1 and one_shot(self.data):
            raise ConfigError(
                f"epochs={self._epochs} for a {kind}",
                why="it can be read only once",
                fix="give an object whose __iter__ begins anew, or epochs=1",
            )

    def _require_same_on_all(self, shuffle: bool | None) -> None:
        """Refuse ranks that were handed different data or arguments, whose rows would not make one batch.

        Raises:
            DataError: on every rank, with what differs.
        """
        order = self._order
        mine = {
            "samples": self._total if self._epochs else len(self.data) if self._by_number else None,
            "seed": self.seed,
            "start": self._rows.start,
            "global batch": self._rows.whole,
            "last": "short" if self._rows.keep_short else "drop",
            "shuffle": shuffle,
            "epochs": self._epochs,
            "order of the sampler": order.first_epoch() if isinstance(order, SamplerOrder) else None,
        }
        found: list[Any] = [None] * world_size()
        dist.all_gather_object(found, mine)
        for rank, theirs in enumerate(found):
            different = [key for key in mine if theirs[key] != found[0][key]]
            if different:
                raise DataError(
                    f"rank 0 and rank {rank} have different {' and '.join(different)}",
                    why="; ".join(
                        f"{key}: {found[0][key]} on rank 0, {theirs[key]} on rank {rank}" for key in different
                    ),
                    fix="give every rank the same data and arguments, or sharded=True where each has its own",
                )


class _Picked:
    """Something that a DataLoader takes for a sampler."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin()


def _same(batch: Any) -> Any:
    return batch


def _read(loader: DataLoader[Any]) -> Iterator[Any]:
    """The batches of a loader until one that failed.

    Raises:
        DataError: why it failed; or a worker was killed, did not answer in time, or raised apart from any sample.
    """
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            raise DataError(
                "a data worker was lost",
                why=str(error).strip().splitlines()[0],
                fix="see what it wrote, give it more memory, or read without workers (workers=0) to see its error",
            ) from error
        if isinstance(batch, Failed):
            del batches  # its workers end here and now, not when the error's traceback is forgotten
            raise batch.error
        yield batch


def _rank_of(strategy: Strategy) -> int:
    """This data-parallel rank's number, from the process group or, before the engine has joined it, from the launcher.

    Raises:
        ConfigError: the strategy is for another number of ranks.
    """
    launched = not dist.is_initialized() and "RANK" in os.environ
    world = int(os.environ.get("WORLD_SIZE", 1)) if launched else world_size()
    if world != strategy.world_size:
        raise ConfigError(
            f"the strategy {strategy} needs {strategy.world_size} ranks, but there are {world}",
            why="each data-parallel rank takes its own rows of a global batch",
            fix=f"launch with torchrun --nproc-per-node={strategy.world_size}, change dp or tp, or say rank=",
        )
    return strategy.data_rank(int(os.environ["RANK"]) if launched else global_rank())


def _require_rank(rank: int, strategy: Strategy) -> int:
    if not is_count(rank, 0) or rank >= strategy.dp:
        raise ConfigError(f"rank={rank!r} of dp={strategy.dp}", fix=f"use a rank from 0 to {strategy.dp - 1}")
    return rank


def _own_start(start: int, dp: int) -> int:
    """How many samples of its own data a rank has seen.

    Raises:
        ConfigError: they cannot have been the same number on all ranks.
    """
    if start % dp:
        raise ConfigError(
            f"start={start} samples over dp={dp} ranks with sharded=True",
            why="each rank has seen as many of its own",
            fix="resume on as many ranks as before",
        )
    return start // dp


def _require_values(**given: Any) -> None:
    if given["last"] not in ("short", "drop"):
        raise ConfigError(f"last={given['last']!r} is not known", why="it is short or drop", fix="use one of them")
    least = {"epochs": 1, "start": 0, "workers": 0, "seed": 0}
    for name, smallest in least.items():
        value = given[name]
        if name == "epochs" and value is None:
            continue
        if not is_count(value, smallest):
            raise ConfigError(f"{name}={value!r} is not a whole number from {smallest}", fix=f"use {smallest} or more")
