"""From the corpus to batches: which rows a rank takes, whatever the layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from meshwright.models import IGNORED_LABEL
from meshwright.train.data import ByteCorpus
from meshwright.train.order import SampleOrder

__all__ = ["Samples", "batch_of"]


class Samples:
    """Training and validation batches of one of `dp` data-parallel ranks.

    Row i of global batch s is training sample number `s * global_batch + i`; rank r takes the r-th of `dp` equal parts.
    """

    def __init__(self, corpus: ByteCorpus, *, seed: int, rank: int, dp: int) -> None:
        self._corpus = corpus
        self._order = SampleOrder(corpus.train_windows, seed)
        self._rank = rank
        self._dp = dp

    def numbers(self, seen: int, global_batch: int) -> range:
        """This rank's sample numbers of the global batch that starts after `seen` samples."""
        share = global_batch // self._dp
        return range(seen + self._rank * share, seen + (self._rank + 1) * share)

    def batch(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of training samples; int64 [len(numbers), sequence] each."""
        return batch_of([self._corpus.train_window(self._order(number)) for number in numbers])

    def validation(self, samples: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of `samples` validation windows, spread evenly over the corpus, `rows` at a time.

        A rank that has none gets one row that carries no loss, so that it can take part in the others' collectives.
        """
        available = self._corpus.validation_windows
        count = min(samples, available)
        mine = range(self._rank * count // self._dp, (self._rank + 1) * count // self._dp)
        windows = [index * available // count for index in mine]
        for start in range(0, len(windows), rows):
            yield batch_of([self._corpus.validation_window(index) for index in windows[start : start + rows]])
        if not windows:
            inputs, targets = batch_of([self._corpus.validation_window(0)])
            yield inputs, torch.full_like(targets, IGNORED_LABEL)


def batch_of(windows: Sequence[bytes]) -> tuple[Tensor, Tensor]:
    """Inputs and targets of windows of equal length S + 1; int64 [windows, S] each."""
    tokens = torch.frombuffer(bytearray(b"".join(windows)), dtype=torch.uint8).view(len(windows), -1).long()
    return tokens[:, :-1], tokens[:, 1:]
