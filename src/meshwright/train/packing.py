"""Documents packed into rows of one length, which attend to themselves alone."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from meshwright.errors import ConfigError, DataError
from meshwright.train.collate import is_count, learned

__all__ = ["PackedRows", "PackedStream", "Packing"]


class Packing:
    """Packs documents into rows of exactly `length` tokens, in order; `Packing(2048)(documents)` is data for `Batches`.

    A document goes into the current row where it still fits; otherwise the row is padded and a new one begun. One that
    is longer than `length` is cut into pieces of that length and a rest, each of which is a document of its own from
    then on: no piece sees another. Documents without tokens are left out. The rows depend on the documents and their
    order alone.

    A row is `input_ids`, `labels`, `position_ids` (from 0 in each document) and `documents` (their numbers in the row,
    -1 for padding), int64 [length] each. Labels are those of the document (see `Padding`: its own, or its tokens
    without its prompt) but for each document's first, which stays `ignore`: a causal model would predict it from the
    document before. `collate` stacks rows and makes the mask; `Batches` uses it by itself.

    Args:
        length: tokens of a row; 2 or more.
        pad_token: the id at the places that stay empty.
        ignore: the label that does not count.
        attention: how the model is told which tokens see each other. `"sdpa"`: `attention_mask` is boolean
            [B, 1, length, length], true for the same document and not later, as `scaled_dot_product_attention` takes
            it, and so Hugging Face models with `attn_implementation="sdpa"`. `"eager"`: the same as 0 and -inf in
            float32, to be added to the scores; Hugging Face's eager attention adds whatever it is given, and a boolean
            mask would do nothing there. `"positions"`: no mask; Hugging Face models with `use_cache=False` read the
            documents from `position_ids` that begin again, which flash attention needs and long rows gain by.

    Raises:
        ConfigError: the length or the kind of attention cannot be.
    """

    def __init__(
        self,
        length: int,
        *,
        pad_token: int = 0,
        ignore: int = -100,
        attention: Literal["sdpa", "eager", "positions"] = "sdpa",
    ) -> None:
        if not is_count(length, 2):
            raise ConfigError(
                f"length={length!r} is not a row of 2 or more tokens", fix="use the model's sequence length"
            )
        if attention not in ("sdpa", "eager", "positions"):
            raise ConfigError(
                f"attention={attention!r} is not known",
                why="it is sdpa, eager or positions",
                fix="use the one that the model computes with",
            )
        self.length, self.pad_token, self.ignore, self.attention = length, pad_token, ignore, attention

    def __call__(self, documents: Iterable[Any]) -> PackedRows | PackedStream:
        """The rows of documents, each a sequence of token ids or a mapping with `input_ids`.

        Returns:
            Rows by number where documents have numbers too (each is looked at once here, for its length);
            otherwise a stream of rows, made as it is read.
        """
        if hasattr(documents, "__getitem__") and hasattr(documents, "__len__"):
            return PackedRows(self, documents)
        return PackedStream(self, documents)

    def document(self, number: int, given: Any) -> dict[str, Tensor]:
        """A document's input_ids and labels.

        Raises:
            DataError: it is none; the text has its number.
        """
        sample = given if isinstance(given, Mapping) else {"input_ids": given}
        wanted = ("input_ids", "labels", "attention_mask", "completion_mask", "prompt_length")
        try:
            tokens: Any = sample.get("input_ids")
            if hasattr(tokens, "__len__") and len(tokens) == 0:
                return {"input_ids": torch.empty(0, dtype=torch.int64), "labels": torch.empty(0, dtype=torch.int64)}
            found = learned({key: sample[key] for key in wanted if key in sample}, self.ignore, True)
            if found["labels"].shape != found["input_ids"].shape:
                raise DataError(
                    f"{list(found['labels'].shape)} labels for {list(found['input_ids'].shape)} tokens",
                    why="a packed document has one label per token",
                    fix="correct its labels, or leave them out",
                )
        except DataError as error:
            raise DataError(f"document {number}: {error.what}", why=error.why, fix=error.fix) from error
        return {"input_ids": found["input_ids"], "labels": found["labels"].long()}

    def row(self, pieces: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """One row of pieces that fit into it."""
        made = {
            "input_ids": torch.full((self.length,), self.pad_token),
            "labels": torch.full((self.length,), self.ignore),
            "position_ids": torch.zeros(self.length, dtype=torch.int64),
            "documents": torch.full((self.length,), -1),
        }
        at = 0
        for number, piece in enumerate(pieces):
            size = len(piece["input_ids"])
            made["input_ids"][at : at + size] = piece["input_ids"]
            made["labels"][at + 1 : at + size] = piece["labels"][1:]
            made["position_ids"][at : at + size] = torch.arange(size)
            made["documents"][at : at + size] = number
            at += size
        made["position_ids"][at:] = torch.arange(self.length - at)
        return made

    def collate(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """A batch of rows: `input_ids`, `labels`, `position_ids`, and `attention_mask` as `attention` says."""
        batch = {key: torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels", "position_ids")}
        if self.attention != "positions":
            documents = torch.stack([row["documents"] for row in rows])
            # Padding sees padding: a token that sees none would have no attention weights at all.
            same = documents[:, None, :, None] == documents[:, None, None, :]
            mask = same.logical_and_(torch.ones(self.length, self.length, dtype=torch.bool).tril())
            if self.attention == "eager":
                mask = torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))
            batch["attention_mask"] = mask
        return batch


class PackedRows:
    """Rows by number, of documents by number. Only where each row begins and ends is kept."""

    def __init__(self, packing: Packing, documents: Any) -> None:
        self.packing, self.documents = packing, documents
        self._pieces = array("q")  # document, begin, end; one after the other
        self._rows = array("q", [0])  # where the pieces of each row end
        for row in _filled(_cut(self._lengths(), packing.length), packing.length):
            for document, begin, end in row:
                self._pieces.extend((document, begin, end))
            self._rows.append(len(self._pieces))

    def _lengths(self) -> Iterator[int]:
        for number in range(len(self.documents)):
            yield len(self.packing.document(number, self.documents[number])["input_ids"])

    def __len__(self) -> int:
        return len(self._rows) - 1

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        pieces = self._pieces[self._rows[row] : self._rows[row + 1]]
        found = []
        for document, begin, end in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
            whole = self.packing.document(document, self.documents[document])
            found.append({key: value[begin:end] for key, value in whole.items()})
        return self.packing.row(found)

    def collate(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """See `Packing.collate`."""
        return self.packing.collate(rows)


class PackedStream:
    """Rows of a stream of documents, made as they are read."""

    def __init__(self, packing: Packing, documents: Iterable[Any]) -> None:
        self.packing, self.documents = packing, documents

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        length = self.packing.length
        read = (self.packing.document(number, given) for number, given in enumerate(self.documents))
        kept: dict[int, dict[str, Tensor]] = {}

        def lengths() -> Iterator[int]:
            for number, document in enumerate(read):
                kept[number] = document
                yield len(document["input_ids"])

        for row in _filled(_cut(lengths(), length), length):
            pieces = [{key: value[begin:end] for key, value in kept[number].items()} for number, begin, end in row]
            for number in [number for number in kept if number < row[-1][0]]:
                del kept[number]
            yield self.packing.row(pieces)

    def set_epoch(self, epoch: int) -> None:
        """Hand the number of the epoch on to the documents, where they ask for it."""
        if hasattr(self.documents, "set_epoch"):
            self.documents.set_epoch(epoch)

    def collate(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """See `Packing.collate`."""
        return self.packing.collate(rows)


def _cut(lengths: Iterable[int], longest: int) -> Iterator[tuple[int, int, int]]:
    """Pieces `(document, begin, end)` of documents, none longer than `longest` or empty."""
    for document, length in enumerate(lengths):
        for begin in range(0, length, longest):
            yield document, begin, min(begin + longest, length)


def _filled(pieces: Iterable[tuple[int, int, int]], length: int) -> Iterator[list[tuple[int, int, int]]]:
    """Pieces row by row: each into the current row where it fits, or else the first of the next."""
    row: list[tuple[int, int, int]] = []
    used = 0
    for piece in pieces:
        size = piece[2] - piece[1]
        if used + size > length:
            yield row
            row, used = [], 0
        row.append(piece)
        used += size
    if row:
        yield row
