"""Reading the user's samples into batches, by number or from a stream, in this process or in a data worker.

What goes wrong in their code becomes one error that names the sample. It is handed over as a value, `Failed`, because a
worker's exception would reach the user as the text of a traceback within a traceback.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from meshwright.errors import ConfigError, DataError, MeshwrightError
from meshwright.runtime.batch import rows as rows_of
from meshwright.runtime.seeds import seed_for

__all__ = [
    "ByNumber",
    "Failed",
    "Rows",
    "Stream",
    "is_by_number",
    "one_shot",
    "own_randomness",
    "require_samples",
]

Collate = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Failed:
    """In a batch's place: why there is none."""

    error: MeshwrightError


@dataclass(frozen=True)
class Rows:
    """Which of all samples are this rank's: those from `first` to `first + share` of each `whole` from `start` on."""

    start: int
    whole: int
    first: int
    share: int
    keep_short: bool

    def of(self, total: int) -> Iterator[range]:
        """Sample numbers of each of this rank's batches, where there are `total` samples."""
        for begin in range(self.start, total, self.whole):
            if begin + self.whole > total and not self.keep_short:
                return
            mine = range(min(begin + self.first, total), min(begin + self.first + self.share, total))
            if mine:
                yield mine

    def count(self, total: int) -> int:
        """How many batches `of` yields."""
        whole, rest = divmod(max(0, total - self.start), self.whole)
        return whole + (self.keep_short and rest > self.first)


class ByNumber(Dataset[Any]):
    """Batches of samples that are read by number: asked for pairs of sample number and index, gives a batch."""

    def __init__(self, data: Any, collate: Collate, seed: int) -> None:
        self._data, self._collate, self._seed = data, collate, seed

    def __getitem__(self, picked: Sequence[tuple[int, int]]) -> Any:
        samples = []
        with own_randomness() as reseed:
            for number, index in picked:
                reseed(self._seed, "sample", number)
                try:
                    samples.append(self._data[index])
                except Exception as error:
                    return Failed(
                        _told(error, f"sample {index} cannot be read", "correct the data set, or this sample")
                    )
            reseed(self._seed, "collate", picked[0][0])
            return _collated(self._collate, samples, [index for _, index in picked])


class Stream(IterableDataset[Any]):
    """Batches of samples that come one after the other. All are read; those that are other ranks' are dropped."""

    def __init__(self, data: Any, collate: Collate, seed: int, rows: Rows, epochs: int | None) -> None:
        self._data, self._collate, self._seed, self._rows, self._epochs = data, collate, seed, rows, epochs

    def __iter__(self) -> Iterator[Any]:
        rows = self._rows
        number, mine = 0, []
        for number, sample in enumerate(self._samples(), 1):
            if isinstance(sample, Failed):
                yield sample
                return
            place = (number - 1 - rows.start) % rows.whole
            if number > rows.start and rows.first <= place < rows.first + rows.share:
                mine.append((number - 1, sample))
            if number > rows.start and place == rows.whole - 1:
                yield self._batch(mine)
                mine = []
        try:
            if rows.start == 0:
                require_samples(number, rows)
        except DataError as error:
            yield Failed(error)
            return
        if mine and rows.keep_short:
            yield self._batch(mine)

    def _batch(self, mine: list[tuple[int, Any]]) -> Any:
        with own_randomness() as reseed:
            reseed(self._seed, "collate", mine[0][0])
            return _collated(self._collate, [sample for _, sample in mine], [number for number, _ in mine])

    def _samples(self) -> Iterator[Any]:
        """The samples of all epochs; a `Failed` where the user's code raised."""
        number = epoch = 0
        while self._epochs is None or epoch < self._epochs:
            if hasattr(self._data, "set_epoch"):
                self._data.set_epoch(epoch)
            before, stream = number, None
            while True:
                try:
                    stream = iter(self._data) if stream is None else stream
                    sample = next(stream)
                except StopIteration:
                    break
                except Exception as error:
                    yield Failed(_told(error, f"sample {number} cannot be read", "correct the stream, or this sample"))
                    return
                yield sample
                number += 1
            if number == before:
                return  # nothing comes, and will not in another epoch
            epoch += 1


def is_by_number(data: Any) -> bool:
    """Whether samples are read by number; otherwise they come as a stream.

    Raises:
        ConfigError: neither is possible.
    """
    if isinstance(data, Mapping):
        raise ConfigError(
            f"data is a mapping ({type(data).__name__} with the keys {', '.join(map(str, list(data)[:8]))})",
            why="it holds several data sets, or columns instead of samples",
            fix='give one of its data sets, for example data["train"]; or a list of samples',
        )
    if not isinstance(data, str | bytes):
        stream = hasattr(data, "__iter__")
        if not isinstance(data, IterableDataset) and hasattr(data, "__getitem__"):
            if hasattr(data, "__len__"):
                return True
            if not stream:
                raise ConfigError(
                    f"data of type {type(data).__name__} has no length",
                    why="samples are read by number, and how many there are is not known",
                    fix="give it a __len__, or make it a stream: an __iter__ without __getitem__",
                )
        if stream:
            return False
    raise ConfigError(
        f"data of type {type(data).__name__} holds no samples",
        why="samples are read by number (a list, a data set with __getitem__ and __len__) or come one by one",
        fix="call it, where it is a function that returns samples"
        if callable(data)
        else "give a list, a data set or an iterable of samples",
    )


def one_shot(data: Any) -> bool:
    """Whether a stream can be read only once, as a generator."""
    inner = getattr(data, "documents", data)
    return hasattr(inner, "__next__")


@contextmanager
def own_randomness() -> Iterator[Callable[..., None]]:
    """Random states of torch (CPU), numpy and Python that may be reseeded by purpose; afterwards they are as before.

    What is random in a sample (an augmentation) is then the same for every layout, number of workers and resume.
    """
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()

    def reseed(*purpose: object) -> None:
        seed = seed_for(*purpose)
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)

    try:
        yield reseed
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _collated(collate: Collate, samples: list[Any], indices: list[int]) -> Any:
    shown = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
    try:
        batch = collate(samples)
        found = rows_of(batch)
    except Exception as error:
        fix = "correct the collate function, or these samples"
        return Failed(_told(error, f"samples {shown} make no batch", fix))
    if found != len(samples):
        return Failed(
            ConfigError(
                f"the collate function made {found} rows of {len(samples)} samples ({shown})",
                why="the first dim of every tensor counts samples",
                fix="return one row per sample; to join several, use Packing or do it in the data set",
            )
        )
    return batch


def _told(error: Exception, what: str, fix: str) -> DataError:
    """An error in the user's code as one of ours, with its place; the cause is kept within this process."""
    if isinstance(error, MeshwrightError):
        made = DataError(f"{what}: {error.what}", why=error.why, fix=error.fix or fix)
    else:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        made = DataError(what, why=f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})", fix=fix)
    made.__cause__ = error
    return made


def require_samples(total: int, rows: Rows) -> None:
    """Refuse data of which some rank would get nothing.

    Raises:
        DataError: it is empty, or too short.
    """
    if total == 0:
        raise DataError(
            "the data holds no samples",
            why="it ends before the first",
            fix="look at its source and its filters; a generator that was read before is empty from then on",
        )
    dp = rows.whole // rows.share
    if total < rows.whole and (not rows.keep_short or total <= (dp - 1) * rows.share):
        whole = 'last="drop" leaves out what fills no whole global batch'
        raise DataError(
            f"there are {total} samples for a global batch of {rows.whole}",
            why="some rank would have none" if rows.keep_short else whole,
            fix="give more samples or epochs, or a smaller job.global_batch"
            + ("" if rows.keep_short else ', or last="short"'),
        )
