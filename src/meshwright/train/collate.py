"""Samples made into one batch: stacked where all are alike, padded where their lengths differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from meshwright.errors import ConfigError, DataError

__all__ = ["Padding", "is_count", "learned", "pad", "prompt_mask", "stack"]

_MASKS = ("completion_mask", "prompt_length")


class Padding:
    """A collate function for samples that are mappings with `input_ids`, a 1-D sequence of token ids.

    What comes out is a dict of tensors, one row per sample:

    - `input_ids` is padded with `pad_token`; `attention_mask` is made where it is missing, and padded with 0.
    - `labels` are those of the sample, or a copy of its input_ids without what its attention_mask leaves out; padded
      with `ignore`. A sample's `prompt_length` (tokens at its beginning) or `completion_mask` (1 for a token that is
      learned) puts `ignore` at what is not learned; these two keys go no further.
    - another key is per token if it is named in `per_token`, or, without that, if each sample's value is 1-D and as
      long as its input_ids: padded with 0. Every other key must have one shape in all samples: stacked.

    Lists, tuples, numpy arrays and tensors are the same to it. It can be sent to data workers.

    Args:
        pad_token: the id at places without a token; the model does not see them, so that any valid id will do.
        ignore: the label that does not count.
        multiple: lengths are rounded up to a multiple of it.
        side: where the padding stands. `"left"` is for causal models: it adds `position_ids`, which begin at a sample's
            first token, and that token's label does not count: it would be predicted from padding.
        labels: make `labels` where they are missing.
        per_token: names of all keys per token besides input_ids, attention_mask and labels.

    Raises:
        DataError: a sample that does not fit; the text says which and why.
    """

    def __init__(
        self,
        *,
        pad_token: int = 0,
        ignore: int = -100,
        multiple: int = 1,
        side: Literal["right", "left"] = "right",
        labels: bool = True,
        per_token: Collection[str] | None = None,
    ) -> None:
        if not is_count(multiple, 1):
            raise ConfigError(f"multiple={multiple!r} is not a length", fix="use 1, or a power of two such as 8")
        if side not in ("right", "left"):
            raise ConfigError(f"side={side!r} is not known", why="it is right or left", fix="use one of them")
        self.pad_token, self.ignore, self.multiple, self.side = pad_token, ignore, multiple, side
        self.labels, self.per_token = labels, None if per_token is None else frozenset(per_token)

    def __call__(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        rows = [_named(index, learned, row, self.ignore, self.labels) for index, row in enumerate(samples)]
        _require_alike(rows)
        for row in rows:
            row.setdefault("attention_mask", torch.ones_like(row["input_ids"]))
            if self.side == "left" and "labels" in row and row["labels"].shape == row["input_ids"].shape:
                row["labels"] = row["labels"].clone()
                row["labels"][:1] = self.ignore
        lengths = [len(row["input_ids"]) for row in rows]
        batch = {key: self._column(key, [row[key] for row in rows], lengths) for key in rows[0]}
        if self.side == "left" and "position_ids" not in batch:
            batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        return batch

    def _column(self, key: str, values: list[Tensor], lengths: list[int]) -> Tensor:
        fill: int = {"input_ids": self.pad_token, "labels": self.ignore}.get(key) or 0
        fits = [value.dim() == 1 and len(value) == length for value, length in zip(values, lengths, strict=True)]
        if key == "labels" and all(value.dim() == 1 for value in values):
            # Those of a decoder have lengths of their own; as many in every row are no sequence (classes, say).
            alike = len({len(value) for value in values}) == 1
            return torch.stack(values) if alike and not any(fits) else self._padded(values, fill)
        if key in ("input_ids", "attention_mask") or (
            key in self.per_token if self.per_token is not None else all(fits)
        ):
            if not all(fits):
                row = fits.index(False)
                raise DataError(
                    f"row {row}: {key} has shape {list(values[row].shape)} for {lengths[row]} tokens",
                    why="a key per token has one value for each of input_ids",
                    fix=f"make {key} as long as input_ids",
                )
            return self._padded(values, fill)
        shapes = [value.shape for value in values]
        other = next((row for row, shape in enumerate(shapes) if shape != shapes[0]), None)
        if other is not None:
            raise DataError(
                f"{key!r} has shape {list(shapes[0])} in row 0 and {list(shapes[other])} in row {other}",
                why="it is not as long as input_ids, so that it is stacked, and stacking needs one shape",
                fix=f"give {key!r} one shape or one value per token, or a collate function of your own",
            )
        return torch.stack(values)

    def _padded(self, values: list[Tensor], fill: int) -> Tensor:
        longest = max(1, *(len(value) for value in values))
        width = -(-longest // self.multiple) * self.multiple
        made = values[0].new_full((len(values), width), fill)
        for row, value in enumerate(values):
            at = slice(len(value)) if self.side == "right" else slice(width - len(value), width)
            made[row, at] = value
        return made


def pad(
    samples: Sequence[Any],
    *,
    pad_token: int = 0,
    ignore: int = -100,
    multiple: int = 1,
    side: Literal["right", "left"] = "right",
    labels: bool = True,
    per_token: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """One padded batch of samples of different lengths; see `Padding`, which is the same to hand on as `collate`."""
    padding = Padding(
        pad_token=pad_token, ignore=ignore, multiple=multiple, side=side, labels=labels, per_token=per_token
    )
    return padding(samples)


def prompt_mask(sample: Mapping[str, Any], prompt_length: int, *, ignore: int = -100) -> dict[str, Any]:
    """The sample with `labels` that leave out its first `prompt_length` tokens: an instruction is read, not learned.

    Raises:
        DataError: the sample has no input_ids, or fewer tokens than that.
    """
    return {**sample, "labels": learned({**sample, "prompt_length": prompt_length}, ignore, True)["labels"]}


def learned(sample: Any, ignore: int, labels: bool) -> dict[str, Tensor]:
    """A sample as tensors, its labels made where there are none, without the keys that said what is not learned.

    Raises:
        DataError: it is no mapping with `input_ids`, or what it says does not fit them.
    """
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        keys = f"the keys {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else type(sample).__name__
        raise DataError(
            f"a sample without input_ids ({keys})",
            why="padding and packing take mappings with token ids, as tokenizers return them",
            fix="tokenize first, or give a collate function of your own",
        )
    row = {str(key): as_tensor(key, value) for key, value in sample.items()}
    tokens = row["input_ids"]
    if tokens.dim() != 1 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise DataError(
            f"input_ids of shape {list(tokens.shape)} and dtype {tokens.dtype}",
            why="a sample is one sequence of whole numbers",
            fix="give one row per sample (tokenizers return a batch with return_tensors)",
        )
    row["input_ids"] = tokens.long()
    marks = {name: row.pop(name) for name in _MASKS if name in row}
    if "labels" not in row and (labels or marks):
        seen = row.get("attention_mask")
        made = row["input_ids"].clone()
        row["labels"] = made if seen is None or seen.shape != made.shape else made.masked_fill(seen == 0, ignore)
    for name, mark in marks.items():
        row["labels"] = _masked(name, mark, row["labels"], len(tokens), ignore)
    return row


def _masked(name: str, mark: Tensor, labels: Tensor, length: int, ignore: int) -> Tensor:
    """Labels without what a `completion_mask` or `prompt_length` leaves out."""
    fits = mark.dim() == 0 and 0 <= int(mark) <= length if name == "prompt_length" else mark.shape == (length,)
    if not fits or labels.shape != (length,):
        shown = int(mark) if mark.dim() == 0 else f"of shape {list(mark.shape)}"
        raise DataError(
            f"{name} {shown} for {length} tokens and labels of shape {list(labels.shape)}",
            why="prompt_length is a number of tokens, completion_mask has one value per token, and labels have too",
            fix=f"correct {name}, or leave it out and give labels",
        )
    kept = torch.arange(length) >= mark if name == "prompt_length" else mark != 0
    return labels.masked_fill(~kept, ignore)


def stack(samples: Sequence[Any]) -> Any:
    """One batch of samples that are alike: torch's `default_collate`, with lists of numbers taken as tensors.

    Raises:
        DataError: samples of different structure or shape, or with values that are no numbers.
    """
    rows = [_named(index, _numbers, sample) for index, sample in enumerate(samples)]
    _require_alike(rows)
    shapes = [_shapes(row) for row in rows]
    other = next((index for index, found in enumerate(shapes) if found != shapes[0]), None)
    if other is not None:
        raise DataError(
            f"rows 0 and {other} have different shapes",
            why=f"row 0 has {shapes[0]}, row {other} has {shapes[other]}, and they are stacked",
            fix="pad them: collate=Padding() for sequences of tokens, or a collate function of your own",
        )
    return default_collate(rows)


def is_count(value: Any, least: int) -> bool:
    """Whether a value is a whole number from `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def as_tensor(name: object, value: Any) -> Tensor:
    """A number, a list or array of numbers or a tensor as a tensor.

    Raises:
        DataError: it is something else.
    """
    if isinstance(value, Tensor):
        return value
    try:
        made = np.asarray(value)
        if made.dtype.kind in "biuf":
            own = made.dtype.kind == "f" and not isinstance(value, np.ndarray | np.generic)
            return torch.tensor(made, dtype=torch.get_default_dtype() if own else None)
        shown = f"{type(value).__name__} {value!r}"[:60]
    except ValueError:
        shown = "lists of different lengths"
    raise DataError(
        f"{str(name)!r} is no number, nor a list or array of numbers: {shown}",
        why="a model is called with tensors",
        fix="tokenize it, take it out of the samples (remove_columns), or give a collate function of your own",
    )


def _numbers(sample: Any, name: str = "the sample") -> Any:
    """A sample with tensors in all its places."""
    if isinstance(sample, Mapping):
        return {str(key): _numbers(value, str(key)) for key, value in sample.items()}
    if isinstance(sample, tuple) or (isinstance(sample, list) and any(map(_is_array, sample))):
        return tuple(_numbers(value, f"place {place}") for place, value in enumerate(sample))
    return as_tensor(name, sample)


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _structure(row: Any) -> Any:
    """What must be the same in all samples of a batch, as one comparable value that can be shown."""
    if isinstance(row, Mapping):
        return {key: _structure(value) for key, value in row.items()}
    return [_structure(value) for value in row] if isinstance(row, tuple) else "tensor"


def _shapes(row: Any) -> Any:
    if isinstance(row, Mapping):
        return {key: _shapes(value) for key, value in row.items()}
    return [_shapes(value) for value in row] if isinstance(row, tuple) else list(row.shape)


def _require_alike(rows: Sequence[Any]) -> None:
    """Refuse samples of another structure than the first.

    Raises:
        DataError: naming both rows.
    """
    for index, row in enumerate(rows):
        if _structure(row) != _structure(rows[0]):
            raise DataError(
                f"row {index} is another kind of sample than row 0",
                why=f"row 0 has {_structure(rows[0])}, row {index} has {_structure(row)}",
                fix="give every sample the same keys (or the same number of values)",
            )


def _named(index: int, function: Any, *args: Any) -> Any:
    """Call a function on a row, whose error names it."""
    try:
        return function(*args)
    except DataError as error:
        raise DataError(f"row {index}: {error.what}", why=error.why, fix=error.fix) from error
