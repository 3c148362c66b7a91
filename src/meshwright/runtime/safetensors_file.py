"""A safetensors file, written with one tensor in memory at a time; its own library's `save_file` needs all of them.

The format: 8 bytes of header length (little endian), a JSON header of dtypes, shapes and offsets, the raw data.
https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["CODES", "DTYPES", "Piece", "as_bytes", "write_pieces"]

#: What the format calls each dtype.
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A tensor of a file, or a box of one: its name and shape, its dtype (one of `CODES`), its place in the whole."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_pieces(
    path: Path, pieces: Sequence[Piece], buffers: Iterable[memoryview], *, metadata: Mapping[str, str]
) -> int:
    """Writes a file, one piece in memory at a time, and syncs it to the disk.

    Args:
        path: a new file.
        pieces: no two of one name, and large elements before small ones so that each is aligned when mapped.
        buffers: the bytes of the pieces, in their order.
        metadata: texts for the header.

    Returns:
        The size of the file in bytes.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for piece in pieces:
        start, end = end, end + piece.size_bytes
        header[piece.name] = {"dtype": CODES[piece.dtype], "shape": piece.shape, "data_offsets": (start, end)}
    assert len(header) == len(pieces) + 1, "two pieces of one name in one file"
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for buffer in buffers:
            file.write(buffer)
        file.flush()
        assert file.tell() == 8 + len(text) + end, "buffers and pieces differ in size"
        os.fsync(file.fileno())
        return file.tell()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, row by row; a view where its own memory is that already."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    data: memoryview = flat.view(torch.uint8).numpy().data
    return data
