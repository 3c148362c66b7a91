"""Text files as one stream of bytes, memory-mapped and cut into windows of one sample each."""

from __future__ import annotations

import glob
import hashlib
import mmap
import os
import stat
import sysconfig
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from pathlib import Path

from meshwright.errors import DataError

__all__ = ["ByteCorpus", "default_corpus"]

_OPEN_FILES = 128
_PROBE_BYTES = 8192
_NOT_OURS = ("site-packages", "dist-packages", "__pycache__")


class ByteCorpus:
    """The bytes of text files, read in sorted order as one stream across file borders.

    Sample i is the window of `sequence + 1` bytes that starts at byte `i * sequence`: inputs are its first `sequence`
    bytes, targets its last. Every `validation_every`-th window belongs to validation, the others to training. Files
    are mapped when a window of theirs is first read, at most 128 at a time; nothing is copied but the window itself.

    Args:
        path: a file, a folder (every file below it that is not hidden and holds no NUL byte in its first 8 KiB), a
            glob pattern (`**` goes through folders), or "" for the Python standard library's own sources.
        sequence: tokens per sample; a token is a byte.
        validation_every: 2 or more.

    Raises:
        DataError: the corpus is missing, empty, unreadable or shorter than one sample.
    """

    def __init__(self, path: str, *, sequence: int, validation_every: int = 20) -> None:
        self.name = path or "the Python standard library's sources"
        self.sequence = sequence
        self.validation_every = validation_every
        found = _sized(default_corpus() if path == "" else _resolve(path), self.name)
        self.files = [file for file, size in found if size]
        self._sizes = [size for _, size in found if size]
        self._starts = [0, *accumulate(self._sizes)]
        self._open: OrderedDict[int, mmap.mmap] = OrderedDict()
        self.bytes = self._starts[-1]
        self.windows = max(0, self.bytes - 1) // sequence
        if not self.bytes:
            raise DataError(f"corpus {self.name} is empty", why="its files hold no bytes", fix="give files with text")
        if self.windows < 1:
            raise DataError(
                f"corpus {self.name} is shorter than one sample",
                why=f"it holds {self.bytes} bytes and one sample needs job.sequence + 1 = {sequence + 1}",
                fix=f"give more text, or set job.sequence to {self.bytes - 1} or less"
                if self.bytes > 1
                else "give more text",
            )

    @property
    def validation_windows(self) -> int:
        """Windows kept for validation; 0 when there are fewer than `validation_every` windows."""
        return self.windows // self.validation_every

    @property
    def train_windows(self) -> int:
        """Windows to train on."""
        return self.windows - self.validation_windows

    def train_window(self, index: int) -> bytes:
        """Training window `index`, 0 <= index < `train_windows`; `sequence + 1` bytes."""
        return self.window(index + index // (self.validation_every - 1))

    def validation_window(self, index: int) -> bytes:
        """Validation window `index`, 0 <= index < `validation_windows`; `sequence + 1` bytes."""
        return self.window(index * self.validation_every + self.validation_every - 1)

    def window(self, index: int) -> bytes:
        """Window `index` of the stream; `sequence + 1` bytes.

        Raises:
            DataError: a file has become shorter than it was, or can no longer be read.
        """
        if not 0 <= index < self.windows:
            raise IndexError(f"window {index} of {self.windows}")
        at = index * self.sequence
        wanted = self.sequence + 1
        file = bisect_right(self._starts, at) - 1
        pieces = []
        while wanted:
            offset = at - self._starts[file]
            piece = self._mapped(file)[offset : offset + wanted]
            pieces.append(piece)
            at += len(piece)
            wanted -= len(piece)
            file += 1
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def fingerprint(self) -> dict[str, int | str]:
        """What a checkpoint remembers of the corpus: number of files, bytes, and a hash of their order and sizes.

        Names count relative to their common folder, so that a corpus may be moved.
        """
        digest = hashlib.sha256()
        base = os.path.commonpath([file.parent for file in self.files])
        for file, size in zip(self.files, self._sizes, strict=True):
            digest.update(f"{os.path.relpath(file, base)}\0{size}\0".encode(errors="surrogateescape"))
        return {"files": len(self.files), "bytes": self.bytes, "hash": digest.hexdigest()[:16]}

    def close(self) -> None:
        """Unmap and close every file; they are opened again when needed."""
        while self._open:
            self._close_one()

    def _mapped(self, file: int) -> mmap.mmap:
        """The mapping of a file, whose size is looked at each time: reading a lost page would end the process."""
        size = self._sizes[file]
        try:
            if file not in self._open:
                while len(self._open) >= _OPEN_FILES:
                    self._close_one()
                with self.files[file].open("rb") as opened:
                    if os.fstat(opened.fileno()).st_size < size:
                        raise self._shrunk(file)
                    self._open[file] = mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_READ)
            self._open.move_to_end(file)
            mapping = self._open[file]
            if mapping.size() < size:
                raise self._shrunk(file)
        except OSError as error:
            raise DataError(
                f"cannot read {self.files[file]} of corpus {self.name}",
                why=str(error),
                fix="leave the corpus as it is while it is trained on, and resume with --resume",
            ) from error
        return mapping

    def _close_one(self) -> None:
        self._open.popitem(last=False)[1].close()

    def _shrunk(self, file: int) -> DataError:
        return DataError(
            f"{self.files[file]} of corpus {self.name} has become shorter",
            why=f"it had {self._sizes[file]} bytes when the run started",
            fix="leave the corpus as it is while it is trained on; put the file back and resume with --resume",
        )


def default_corpus() -> list[Path]:
    """The `.py` sources of the running Python's standard library, sorted; every installation has them."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in _below(root) if path.suffix == ".py"]
    if not files:
        raise DataError(
            f"the default corpus is missing: {root} holds no .py file",
            why="this Python comes without the sources of its standard library",
            fix="name text of your own: --set data.path=FOLDER",
        )
    return files


def _resolve(path: str) -> list[Path]:
    expanded = os.path.expanduser(path)
    place = Path(expanded)
    try:
        mode = place.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        if glob.has_magic(expanded):
            files = sorted(Path(name) for name in glob.glob(expanded, recursive=True) if not os.path.isdir(name))
            if files:
                return files
            raise DataError(f"no file matches data.path={path!r}", fix="correct the pattern") from error
        raise DataError(
            f"no corpus at data.path={path!r}",
            why="there is no such file or folder",
            fix="give an existing file, folder or glob pattern, or leave data.path out",
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read corpus {path}", why=str(error), fix="choose text that you may read") from error
    if not stat.S_ISDIR(mode):
        return [place]
    files = [file for file in _below(place) if not _binary(file)]
    if not files:
        raise DataError(
            f"corpus folder {path} is empty", why="it holds no text file", fix="give a folder with text files"
        )
    return files


def _below(root: Path) -> list[Path]:
    """Files below a folder, sorted by their path in it; hidden ones and Python's installed packages left out."""
    found: list[Path] = []

    def refuse(error: OSError) -> None:
        raise DataError(
            f"cannot read corpus folder {error.filename}", why=str(error), fix="choose folders that you may read"
        ) from error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _NOT_OURS]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(file for file in found if file.is_file())


def _binary(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return b"\0" in opened.read(_PROBE_BYTES)
    except OSError as error:
        raise _unreadable(file, error) from error


def _sized(files: list[Path], name: str) -> list[tuple[Path, int]]:
    """Each file with its size in bytes, every one of them opened once: an error belongs before the run, not in it."""
    found = []
    for file in files:
        try:
            status = file.stat()
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"{file} of corpus {name} is not a regular file", fix="give files with text")
            with file.open("rb"):
                found.append((file, status.st_size))
        except OSError as error:
            raise _unreadable(file, error) from error
    return found


def _unreadable(file: Path, error: OSError) -> DataError:
    return DataError(f"cannot read corpus file {file}", why=str(error), fix="choose files that you may read")
