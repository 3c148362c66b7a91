"""Checkpoint folders as files: what makes one complete, which is the newest, what a dead save left behind.

    step-000120/
        rank-00000.safetensors ...   the pieces of tensors that a rank wrote, with their offsets in the whole tensor;
                                     further pieces of one tensor lie in rank-00000-2.safetensors and so on
        manifest.json                written last: format, every file with its size, the caller's own values

A save writes into `step-000120.tmp-<token>` beside it and renames that when everything is on the disk. The manifest is
the one place for the truth: a folder without a readable one whose file sizes match is not a checkpoint.

Nothing here is executed when it is read: JSON and safetensors only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError

__all__ = [
    "Draft",
    "complete",
    "explained",
    "newest",
    "read_files",
    "read_manifest",
    "remove_stale",
]

#: Version of the folder's layout; raised when an older Meshwright could no longer read it.
FORMAT = 1
MANIFEST = "manifest.json"
#: Lies in a temporary folder, locked for as long as the process that makes the checkpoint lives.
LOCK = "saving.lock"

_STEP = re.compile(r"step-(\d{6,})")
_TEMPORARY = re.compile(r"(.+)\.tmp-[0-9a-f]{8}")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
#: What a file system answers that cannot sync a folder or lock a file.
_NOT_OFFERED = (errno.EINVAL, errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS)


# ---------------------------------------------------------------------------------------------------- what is there


def read_manifest(folder: Path) -> dict[str, Any]:
    """What the caller of the save gave as `manifest`. Raises CheckpointError where there is no readable one."""
    manifest: dict[str, Any] = _read(folder)["manifest"]
    return manifest


def read_files(folder: Path) -> dict[str, int]:
    """Names and sizes in bytes of the files of a checkpoint. Raises CheckpointError where there is no manifest."""
    files: dict[str, int] = _read(folder)["files"]
    return files


def complete(folder: Path) -> str | None:
    """None for a complete checkpoint, otherwise the reason why the folder is none."""
    try:
        files = read_files(folder)
    except CheckpointError as error:
        return error.why
    for name, size in files.items():
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError:
            return f"missing file {name}"
        except OSError as error:
            return f"file {name} cannot be read: {error.strerror}"
        if found < size:
            return f"truncated file {name} has {found} of {size} bytes"
        if found > size:
            return f"changed file {name} has {found} bytes instead of {size}"
    return None


def newest(parent: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest complete checkpoint under a folder, by the step in its name `step-%06d`.

    Returns:
        Its path or None, and what was passed over with the reason: newer folders that are not complete, and temporary
        ones of saves that did not end.
    """
    steps: list[tuple[int, Path]] = []
    skipped: list[tuple[Path, str]] = []
    for path in _entries(parent):
        if match := _STEP.fullmatch(path.name):
            steps.append((int(match[1]), path))
        elif _is_temporary(path):
            busy = _in_use(path)
            skipped.append((path, "is being saved now" if busy else "was left over by a save that did not end"))
    for _, path in sorted(steps, reverse=True):
        reason = complete(path)
        if reason is None:
            return path, sorted(skipped)
        skipped.append((path, reason))
    return None, sorted(skipped)


def remove_stale(parent: Path) -> list[Path]:
    """Removes the temporary folders of saves whose process is gone; returns those that are removed."""
    removed = []
    for path in _entries(parent):
        if _is_temporary(path) and not _in_use(path):
            shutil.rmtree(path, ignore_errors=True)
            if not path.exists():
                removed.append(path)
    return removed


def _read(folder: Path) -> dict[str, Any]:
    """The whole manifest, its shape checked."""
    what = f"{folder} is not a complete checkpoint"
    fix = "take an older checkpoint, or copy this one again"
    try:
        data = json.loads((folder / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        if folder.is_dir():
            raise CheckpointError(what, why="no manifest", fix=fix) from None
        what, why, fix = f"no checkpoint at {folder}", "there is no such folder", "give the folder of a checkpoint"
        raise CheckpointError(what, why=why, fix=fix) from None
    except OSError as error:
        raise CheckpointError(what, why=f"the manifest cannot be read: {error.strerror}", fix=fix) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(what, why=f"the manifest is not readable: {error}", fix=fix) from error
    if not isinstance(data, dict) or not isinstance(data.get("format"), int):
        raise CheckpointError(what, why="the manifest is not one of Meshwright", fix=fix)
    if data["format"] != FORMAT:
        why = f"it has format {data['format']}, this version reads format {FORMAT}"
        raise CheckpointError(f"{folder} cannot be read", why=why, fix="use the Meshwright that wrote it")
    files, manifest = data.get("files"), data.get("manifest")
    if not isinstance(files, dict) or not isinstance(manifest, dict) or not all(map(_is_file, files.items())):
        raise CheckpointError(what, why="the manifest is not one of Meshwright", fix=fix)
    return data


def _is_file(entry: tuple[str, object]) -> bool:
    name, size_bytes = entry
    return Path(name).name == name and isinstance(size_bytes, int)


def _entries(parent: Path) -> list[Path]:
    with explained("look into", parent):
        return sorted(parent.iterdir()) if parent.is_dir() else []


def _is_temporary(path: Path) -> bool:
    return _TEMPORARY.fullmatch(path.name) is not None and path.is_dir()


def _in_use(temporary: Path) -> bool:
    """Whether the process that writes the temporary folder lives, on whatever host: the kernel drops its lock."""
    try:
        with (temporary / LOCK).open("rb+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


# ------------------------------------------------------------------------------------------------------- making one


class Draft:
    """A checkpoint while it is made: a temporary folder beside its name, locked while this process lives.

    Args:
        folder: the final name.
        needed_bytes: what all ranks together will write.

    Raises:
        CheckpointError: the name is taken.
        OSError: the folder cannot be made; ENOSPC where the disk has less free space than is needed.
    """

    def __init__(self, folder: Path, *, needed_bytes: int) -> None:
        self.folder = folder
        _refuse_taken(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if needed_bytes > shutil.disk_usage(folder.parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.path = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")
        self.path.mkdir()
        try:
            self._lock = (self.path / LOCK).open("xb")
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def commit(self, files: Mapping[str, int], manifest: Mapping[str, Any] | None) -> None:
        """Checks that the files are there with their sizes, writes the manifest and gives the folder its name.

        Without a manifest the folder is no checkpoint, but other tools' files.
        """
        for name, size in files.items():
            found = (self.path / name).stat().st_size
            if found != size:
                raise CheckpointError(
                    f"saving {self.folder} failed",
                    why=f"file {name} has {found} bytes where its rank wrote {size}",
                    fix="check the disk; hosts must share the file system of the checkpoint folder",
                )
        if manifest is not None:
            with (self.path / MANIFEST).open("x", encoding="utf-8") as file:
                whole = {"format": FORMAT, "files": dict(sorted(files.items())), "manifest": manifest}
                json.dump(whole, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
        _sync_folder(self.path)
        _refuse_taken(self.folder)
        if _is_broken(self.folder):
            # Its owner may want to look at it.
            self.folder.rename(self.folder.with_name(f"{self.folder.name}.broken-{secrets.token_hex(4)}"))
        self.path.rename(self.folder)
        _sync_folder(self.folder.parent)
        (self.folder / LOCK).unlink()

    def discard(self) -> None:
        """Removes what was written. For a failed save, once no rank writes any more."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Lets go of the lock: what is left now counts as left over."""
        self._lock.close()


def _refuse_taken(folder: Path) -> None:
    """Passes a free name, an empty folder, and a checkpoint that lost a part (training past it must not fail)."""
    if not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir())) or _is_broken(folder):
        return
    why = "a complete checkpoint is there already" if complete(folder) is None else "something else is there already"
    raise CheckpointError(f"{folder} cannot be saved", why=why, fix="save under another name, or remove it first")


def _is_broken(folder: Path) -> bool:
    try:
        data = json.loads((folder / MANIFEST).read_bytes())
    except OSError:
        return False
    except (ValueError, RecursionError):
        return True
    return isinstance(data, dict) and data.get("format") == FORMAT and complete(folder) is not None


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
    finally:
        os.close(handle)


# ------------------------------------------------------------------------------------------------------------ errors


@contextlib.contextmanager
def explained(action: str, path: Path, *, rank: int = 0, needed_bytes: int | None = None) -> Iterator[None]:
    """Turns whatever goes wrong inside into a CheckpointError that names rank, host, path and the space on the disk."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        what = f"rank {rank} on host {socket.gethostname()} could not {action} {path}"
        code = error.errno if isinstance(error, OSError) else None
        why = (error.strerror or str(error)) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        fix = ""
        if code in _FULL:
            need = "" if needed_bytes is None else f"{_gib(needed_bytes)} to write, "
            why = f"the disk is full ({why}): {need}{_free(path)} free"
            fix = "free space there, or choose a folder on another disk"
        elif code in _FORBIDDEN:
            fix = "choose a folder that every rank may write to, or change its permissions"
        raise CheckpointError(what, why=why, fix=fix) from error


def _free(path: Path) -> str:
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):
            return _gib(shutil.disk_usage(folder).free)
    return "an unknown amount"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.3f} GiB ({size_bytes:,} bytes)"
