"""Checkpoint folders: a save is whole or not at all, what is not whole is passed over, nothing read is executed."""

from __future__ import annotations

import fcntl
import os
import pickle
import resource
import shutil
import signal
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader

from meshwright.errors import CheckpointError
from meshwright.runtime import checkpoint_files
from meshwright.runtime.checkpoint import complete, load_checkpoint, newest, remove_stale, save_checkpoint, stored
from tests.harness.ranks import RankError, run_ranks
from tests.runtime.checkpoints import refusal, save_filled, small_checkpoint, small_disk

ROOT = os.geteuid() == 0
NOBODY = 65534


# --------------------------------------------------------------------------------------------- killed, cut, left behind


def _save_and_die(folder: Path, rank: int, moment: str) -> None:
    def die(*_: Any) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    if dist.get_rank() == rank:
        if moment == "rename":
            Path.rename = die  # type: ignore[assignment,method-assign]
        else:
            checkpoint_files.os.fsync = die  # type: ignore[attr-defined]
    save_filled("shard", folder)


@pytest.mark.parametrize(("rank", "moment"), [(1, "write"), (0, "write"), (0, "rename")])
def test_G6_a_rank_killed_in_the_middle_of_a_save(tmp_path: Path, rank: int, moment: str) -> None:
    older = small_checkpoint(tmp_path / "step-000002")
    with pytest.raises(RankError, match=f"rank {rank} of 3 died: SIGKILL"):
        run_ranks(3, _save_and_die, tmp_path / "step-000010", rank, moment)
    found, skipped = newest(tmp_path)
    assert found == older
    [(left, reason)] = skipped
    assert left.name.startswith("step-000010.tmp-")
    assert reason == "was left over by a save that did not end"
    assert complete(left) is None if moment == "rename" else complete(left) == "no manifest"
    assert remove_stale(tmp_path) == [left]
    assert newest(tmp_path) == (older, [])


def test_newest_goes_by_step_and_says_what_it_passed_over(tmp_path: Path) -> None:
    assert newest(tmp_path / "missing") == (None, [])
    assert newest(tmp_path) == (None, [])
    paths = {
        step: small_checkpoint(tmp_path / f"step-{step:06d}") for step in (9, 999_999, 1_000_000, 1_000_001, 1_000_002)
    }
    (tmp_path / "step-12").mkdir()
    (tmp_path / "notes.txt").touch()
    (paths[1_000_002] / "manifest.json").unlink()
    data = paths[1_000_001] / "rank-00000.safetensors"
    size = data.stat().st_size
    os.truncate(data, size - 3)
    reasons = [
        (paths[1_000_001], f"truncated file rank-00000.safetensors has {size - 3} of {size} bytes"),
        (paths[1_000_002], "no manifest"),
    ]
    assert newest(tmp_path) == (paths[1_000_000], reasons)
    for path in paths.values():
        shutil.rmtree(path)
    assert newest(tmp_path) == (None, [])


def test_complete_says_why_not(tmp_path: Path) -> None:
    folder = small_checkpoint(tmp_path / "c")
    data, manifest = folder / "rank-00000.safetensors", folder / "manifest.json"
    whole, text = data.read_bytes(), manifest.read_text()
    assert complete(folder) is None
    data.unlink()
    assert complete(folder) == "missing file rank-00000.safetensors"
    data.write_bytes(whole + b"x")
    assert complete(folder) == f"changed file {data.name} has {len(whole) + 1} bytes instead of {len(whole)}"
    with pytest.raises(CheckpointError, match="changed file"):
        load_checkpoint(folder, {"model.a": torch.zeros(2, 3)})
    data.write_bytes(whole)
    for broken in ("", text[:-5], "[]", '{"format": 1}', "\udcff", "[" * 100_000):
        manifest.write_bytes(broken.encode(errors="surrogateescape"))
        assert "manifest" in (complete(folder) or "")
    manifest.write_text(text.replace('"format": 1', '"format": 2'))
    assert complete(folder) == "it has format 2, this version reads format 1"
    manifest.write_text(text.replace(data.name, f"../c/{data.name}"))
    assert complete(folder) == "the manifest is not one of Meshwright"
    assert complete(tmp_path / "d") == "there is no such folder"


def test_a_save_that_still_runs_is_left_alone(tmp_path: Path) -> None:
    running, dead = tmp_path / "step-000003.tmp-0123abcd", tmp_path / "step-000002.tmp-0123abcd"
    for folder in (running, dead):
        folder.mkdir()
        (folder / checkpoint_files.LOCK).touch()
    with (running / checkpoint_files.LOCK).open("rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert dict(newest(tmp_path)[1])[running] == "is being saved now"
        assert remove_stale(tmp_path) == [dead]
    assert remove_stale(tmp_path) == [running]


def test_a_taken_name_is_refused_and_a_broken_checkpoint_set_aside(tmp_path: Path) -> None:
    folder = small_checkpoint(tmp_path / "step-000001")
    with pytest.raises(CheckpointError, match="a complete checkpoint is there already"):
        small_checkpoint(folder)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    for taken in ("mine", "file"):
        with pytest.raises(CheckpointError, match="something else is there already"):
            small_checkpoint(tmp_path / taken)
    os.truncate(folder / "rank-00000.safetensors", 3)
    small_checkpoint(folder, b=torch.zeros(2))
    assert list(stored(folder)) == ["model.b"]
    names = sorted(path.name.partition(".")[::2] for path in tmp_path.glob("step*"))
    assert names[0] == ("step-000001", "")
    assert [suffix.partition("-")[0] for _, suffix in names] == ["", "broken"]
    (tmp_path / "empty").mkdir()
    assert complete(small_checkpoint(tmp_path / "empty")) is None


# -------------------------------------------------------------------------------------------- disks that do not take it


def _save_on_full_disk(folder: Path, lie: bool) -> str:
    if lie:
        usage = shutil.disk_usage("/")._replace(free=2**60)
        checkpoint_files.shutil.disk_usage = lambda _: usage  # type: ignore[attr-defined]
    tensors = {f"model.{index}": torch.zeros(1024, 64) for index in range(4)}
    return refusal(save_checkpoint, folder, tensors, {})


@pytest.mark.parametrize("lie", [False, True])
def test_a_full_disk_is_one_error_on_every_rank(tmp_path: Path, lie: bool) -> None:
    with small_disk(tmp_path / "disk", 2**19) as disk:
        older = small_checkpoint(disk / "step-000001")
        texts = run_ranks(2, _save_on_full_disk, disk / "step-000002", lie)
        assert texts[0] == texts[1]
        assert "host" in texts[0]
        assert str(disk / "step-000002") in texts[0]
        assert "the disk is full" in texts[0]
        assert ("0.000 GiB (524,288 bytes) to write" if lie else "0.001 GiB (1,048,576 bytes) to write") in texts[0]
        assert "free" in texts[0]
        assert newest(disk) == (older, [])
        assert list(disk.iterdir()) == [older]


def _save_where_one_fails(folder: Path, rank: int) -> str:
    if dist.get_rank() == rank:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        return refusal(save_filled, "shard", folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_cannot_write_ends_the_save_on_all(tmp_path: Path, rank: int) -> None:
    texts = run_ranks(3, _save_where_one_fails, tmp_path / "c", rank)
    assert len(set(texts)) == 1
    assert f"rank {rank} on host" in texts[0]
    assert f"rank-{rank:05d}.safetensors" in texts[0]
    assert "File too large" in texts[0]
    assert list(tmp_path.iterdir()) == []


def _save_as_nobody(folder: Path, rank: int | None) -> str:
    if rank not in (None, dist.get_rank()):
        return refusal(save_filled, "shard", folder)
    os.seteuid(NOBODY)
    try:
        return refusal(save_filled, "shard", folder)
    finally:
        os.seteuid(0)


@pytest.mark.skipif(not ROOT, reason="only root can be somebody else")
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_an_unwritable_folder_is_one_error_on_every_rank(tmp_path: Path, rank: int | None) -> None:
    texts = run_ranks(2, _save_as_nobody, tmp_path / "c", rank)
    assert texts[0] == texts[1]
    assert f"rank {rank or 0} on host" in texts[0]
    assert "Permission denied" in texts[0]
    assert "every rank may write" in texts[0]
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------- damaged and malicious


def _load_small(folder: Path) -> str:
    return refusal(load_checkpoint, folder, {"model.a": torch.zeros(2, 3)})


@pytest.mark.parametrize("keep", [0, 8, 60])
def test_a_damaged_file_is_one_error_on_every_rank(tmp_path: Path, keep: int) -> None:
    data = small_checkpoint(tmp_path / "c") / "rank-00000.safetensors"
    whole = data.read_bytes()
    data.write_bytes(whole[:keep] + bytes(len(whole) - keep))
    for texts in (run_ranks(2, _load_small, tmp_path / "c"), [_load_small(tmp_path / "c")]):
        assert len(set(texts)) == 1
        assert "rank-00000.safetensors" in texts[0]


class _Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_no_pickle_in_the_folder_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, mark = small_checkpoint(tmp_path / "step-000001"), tmp_path / "executed"
    evil = pickle.dumps(_Evil(mark))
    for name in (".metadata", "__0_0.distcp", "rank-00001.safetensors", "model.pt", "manifest.pkl"):
        (folder / name).write_bytes(evil)

    def forbidden(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a pickle was read")

    with monkeypatch.context() as patch:
        for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
            patch.setattr(module, name, forbidden)
        assert newest(tmp_path) == (folder, [])
        assert stored(folder) == {"model.a": ((2, 3), torch.float32)}
        found = torch.zeros(2, 3)
        assert load_checkpoint(folder, {"model.a": found}) == {"step": 1}
        assert found.equal(torch.arange(6.0).reshape(2, 3))
    assert run_ranks(2, _load_small, folder) == ["", ""]

    for name in ("rank-00000.safetensors", "manifest.json"):
        good = (folder / name).read_bytes()
        (folder / name).write_bytes(evil.ljust(len(good), b"\0")[: len(good)])
        assert _load_small(folder)
        assert all(run_ranks(2, _load_small, folder))
        (folder / name).write_bytes(good)
    assert not mark.exists()

    # The control: PyTorch's own reader of such a folder does execute it.
    with pytest.raises(AttributeError):
        FileSystemReader(folder).read_metadata()
    assert mark.exists()
