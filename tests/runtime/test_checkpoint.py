"""Checkpoints: any layout loads what any other wrote, bit by bit, each rank reading only its slices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_with_torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright.errors import CheckpointError
from meshwright.runtime import checkpoint_storage
from meshwright.runtime.checkpoint import complete, load_checkpoint, read_manifest, save_checkpoint, stored
from meshwright.runtime.safetensors_file import CODES
from tests.harness.ranks import run_one, run_ranks
from tests.runtime.checkpoints import (
    MANIFEST,
    bits_of,
    differing,
    load_zeros,
    refusal,
    save_filled,
    small_checkpoint,
    tensors_of,
    values_of,
)

DTYPES = list(CODES)


def _run(world: int, layout: str, fn: Any, folder: Path) -> list[Any]:
    """On one rank and "plain": without torch.distributed."""
    return [run_one(fn, layout, folder)] if (world, layout) == (1, "plain") else run_ranks(world, fn, layout, folder)


@pytest.mark.parametrize(
    ("world", "layout", "readers"),
    [
        (4, "shard", [(1, "plain"), (1, "shard"), (2, "shard"), (3, "shard"), (6, "shard"), (4, "hybrid")]),
        (4, "hybrid", [(1, "plain"), (3, "shard"), (6, "hybrid")]),
        (2, "plain", [(3, "shard")]),
        (1, "plain", [(1, "plain"), (3, "shard"), (2, "plain")]),
    ],
)
def test_any_layout_loads_what_any_other_wrote(
    tmp_path: Path, world: int, layout: str, readers: list[tuple[int, str]]
) -> None:
    folder = tmp_path / "new" / "step-000007"
    _run(world, layout, save_filled, folder)
    assert complete(folder) is None
    assert read_manifest(folder) == MANIFEST
    assert sorted(path.name for path in folder.parent.iterdir()) == ["step-000007"]
    for count, other in readers:
        assert _run(count, other, load_zeros, folder) == [[]] * count


def _save_columns(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    save_checkpoint(
        folder, {"model.w": distribute_tensor(values_of("w", (6, 101), torch.float64), mesh, [Shard(1)])}, {}
    )


def _load_rows(folder: Path) -> bool:
    whole = values_of("w", (6, 101), torch.float64)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)])
    load_checkpoint(folder, {"model.w": rows})
    return bits_of(rows) == bits_of(distribute_tensor(whole, mesh, [Shard(0)]))


def test_columns_load_as_rows(tmp_path: Path) -> None:
    run_ranks(3, _save_columns, tmp_path / "c")
    assert run_ranks(2, _load_rows, tmp_path / "c") == [True, True]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits_in_every_shape(tmp_path: Path, dtype: torch.dtype) -> None:
    shapes: list[tuple[int, ...]] = [(), (1,), (7,), (3, 5), (2, 3, 5), (0,), (3, 0)]
    whole = {f"model.{shape}": (torch.rand(shape) * 100).to(dtype) for shape in shapes}
    whole["model.bytes"] = torch.arange(3, dtype=torch.uint8)  # the rest would not be aligned behind it
    save_checkpoint(tmp_path / "c", whole, {})
    found = {name: torch.zeros_like(value) for name, value in whole.items()}
    load_checkpoint(tmp_path / "c", found)
    assert {name: bits_of(value) for name, value in found.items()} == {name: bits_of(v) for name, v in whole.items()}


def test_every_value_is_written_once(tmp_path: Path) -> None:
    once = sum(tensor.nbytes for tensor in tensors_of("plain", filled=True).values())
    for layout in ("shard", "hybrid", "plain"):
        run_ranks(4, save_filled, layout, tmp_path / layout)
        size = 0
        for path in (tmp_path / layout).glob("rank-*"):
            with path.open("rb") as file:
                size += path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
        assert size == once


def test_stored_tells_global_shapes_and_dtypes(tmp_path: Path) -> None:
    run_ranks(4, save_filled, "shard", tmp_path / "c")
    wanted = {name: (tuple(value.shape), value.dtype) for name, value in tensors_of("plain", filled=True).items()}
    assert stored(tmp_path / "c") == wanted


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_pytorchs_own_reader_reads_it(tmp_path: Path) -> None:
    run_ranks(4, save_filled, "shard", tmp_path / "c")
    tensors = tensors_of("plain", filled=False)
    load_with_torch(dict(tensors), storage_reader=HuggingFaceStorageReader(str(tmp_path / "c")))
    assert differing(tensors, "plain") == []


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.a cannot be saved"):
        small_checkpoint(tmp_path / "c", a=torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match="manifest cannot be saved"):
        save_checkpoint(tmp_path / "c", {"model.a": torch.zeros(2)}, {"path": tmp_path})
    assert list(tmp_path.iterdir()) == []


def test_pieces_that_are_missing_are_told(tmp_path: Path) -> None:
    run_ranks(3, save_filled, "shard", tmp_path / "c")
    manifest = tmp_path / "c" / "manifest.json"
    data = json.loads(manifest.read_text())
    del data["files"]["rank-00001.safetensors"]
    manifest.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"pieces of \S+ are missing"):
        stored(tmp_path / "c")


# ------------------------------------------------------------------------------------------------- each its own slices


def _read_share(folder: Path, rows: int, columns: int) -> tuple[int, int, int]:
    """Bytes of this rank's share, bytes of the boxes that it read, growth of its peak resident memory in bytes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.zeros(1).expand(rows, columns)
    share = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    share.to_local().fill_(1.0)
    read: list[int] = []
    box = checkpoint_storage._box

    def counted(*args: Any) -> torch.Tensor:
        part = box(*args)
        read.append(part.nbytes)
        return part

    checkpoint_storage._box = counted  # type: ignore[assignment]
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _peak_bytes()
    load_checkpoint(folder, {"model.w": share})
    growth = _peak_bytes() - before
    assert share.to_local().eq(0.25).all()
    return share.to_local().nbytes, sum(read), growth


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def test_Q1_each_rank_reads_only_its_slices(tmp_path: Path) -> None:
    rows, columns = 4000, 4096
    small_checkpoint(tmp_path / "c", w=torch.full((rows, columns), 0.25))
    for share, read, growth in run_ranks(4, _read_share, tmp_path / "c", rows, columns):
        assert read == share == rows * columns  # a fourth of the 4-byte elements
        assert growth < 2 * share  # the whole is four


# ------------------------------------------------------------------------------------------------------- another model


def _load_other(folder: Path, change: str) -> str:
    tensors: dict[str, torch.Tensor] = {f"model.{name}": torch.full((2, 3), -1.0) for name in "abcdef"}
    only = dist.get_rank() == dist.get_world_size() - 1 if dist.is_initialized() else True
    if change == "missing" and only:
        tensors |= {f"model.new{index}": torch.zeros(1) for index in range(5)}
    elif change == "shape":
        tensors["model.b"] = torch.zeros(3, 2)
    elif change == "scalar":
        tensors["model.b"] = torch.tensor(0.0)
    elif change == "dtype":
        tensors["model.b"] = torch.zeros(2, 3, dtype=torch.bfloat16)
    elif change == "fewer" or (change == "stages" and not only):
        del tensors["model.f"]
    text = refusal(load_checkpoint, folder, tensors)
    if text:
        assert (tensors["model.a"] == -1.0).all()  # untouched
    return text


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("missing", ["model.new0 is not stored; model.new1 is not stored; model.new2 is not stored; and 2 more"]),
        ("shape", ["model.b is stored as 2x3, and is 3x2 here"]),
        ("scalar", ["model.b is stored as 2x3, and is a scalar here"]),
        ("dtype", ["model.b is stored in torch.float32, and is in torch.bfloat16 here"]),
        ("fewer", ["model.f is stored, and this model has none"]),
    ],
)
def test_another_model_is_refused_on_every_rank(tmp_path: Path, change: str, parts: list[str]) -> None:
    small_checkpoint(tmp_path / "c", **{name: torch.ones(2, 3) for name in "abcdef"})
    for texts in (run_ranks(2, _load_other, tmp_path / "c", change), [run_one(_load_other, tmp_path / "c", change)]):
        assert len(set(texts)) == 1
        assert "is of another model" in texts[0]
        assert all(part in texts[0] for part in parts)


def test_stages_may_each_ask_for_their_part_and_kinds_may_be_left_out(tmp_path: Path) -> None:
    named = {f"model.{name}": torch.ones(2, 3) for name in "abcdef"} | {"optimizer.a.step": torch.tensor(1.0)}
    save_checkpoint(tmp_path / "c", named, {})
    assert run_ranks(2, _load_other, tmp_path / "c", "stages") == ["", ""]
