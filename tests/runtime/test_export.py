"""Exports: what other tools read is what the engine holds, whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from meshwright.models import token_loss
from meshwright.runtime import export
from meshwright.runtime.boxes import Held, own_part
from meshwright.runtime.mesh import RankMesh
from tests.harness.hugging_face import FAMILIES, make_model, rows_of
from tests.harness.ranks import run_ranks
from tests.runtime.checkpoints import small_disk
from tests.runtime.warm import differing, hollow, listening, quiet, refused, start

NOBODY = 65534


# --------------------------------------------------------------------------------------------------------- round trips


LAYOUTS = {2: ((0, False), (1, True), (2, False), (3, True)), 3: ((0, True), (1, False), (2, True), (3, False))}


def export_every_layout(folder: Path) -> list[dict[str, Tensor]]:
    """After a step, as each engine reads its own tensors."""
    values = []
    for zero, tied in LAYOUTS[dist.get_world_size()]:
        engine = start(hollow("llama", tied=tied), None, zero=zero)
        engine.step(rows_of("llama", seed=1, dtype=torch.float32))
        engine.export(folder / str(zero), max_shard_bytes=9_000)
        values.append({name: engine.read(name) for name in engine.named_parameters()})
    return values


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_every_layout_exports_and_begins_again(tmp_path: Path, ranks: int) -> None:
    by_rank = run_ranks(ranks, export_every_layout, tmp_path)
    for at, (zero, tied) in enumerate(LAYOUTS[ranks]):
        values, folder = by_rank[0][at], tmp_path / str(zero)
        assert all(other[at][name].equal(value) for other in by_rank for name, value in values.items())
        with listening() as texts:
            engine = start(hollow("llama", tied=tied), folder)
        assert texts == []
        assert differing(engine, values) == []
        stored = {key: value for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}
        assert stored.keys() == values.keys()
        assert ("lm_head.weight" in stored) != tied
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        total = sum(4 * value.numel() for value in values.values())
        assert index["metadata"]["total_size"] == total
        assert index["weight_map"].keys() == stored.keys()
        assert len(set(index["weight_map"].values())) > 1


def test_bfloat16_files_and_their_config(tmp_path: Path) -> None:
    model = make_model("llama", tied=True, dtype=torch.float32)
    start(model, None).export(tmp_path / "out", dtype=torch.bfloat16)
    with quiet():
        found = FAMILIES["llama"][0].from_pretrained(tmp_path / "out")
    assert found.dtype == torch.bfloat16
    assert all(found.get_parameter(name).equal(p.bfloat16()) for name, p in model.named_parameters())
    assert "dtype=torch.int8" in refused(start(model, None).export, tmp_path / "other", dtype=torch.int8)


class Mixed(nn.Module):
    """Buffers of several dtypes, one of which is not saved; no config."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("none", torch.zeros(0, 4))
        self.register_buffer("made", torch.zeros(3), persistent=False)


def export_mixed(folder: Path) -> None:
    start(Mixed, None, zero=3, loss=token_loss).export(folder)


def test_buffers_are_exported_and_no_config_is_made_up(tmp_path: Path) -> None:
    run_ranks(2, export_mixed, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    fresh = start(Mixed, None, loss=token_loss)
    assert found.keys() == {"layer.weight", "layer.bias", "count", "flags", "none"}
    assert all(value.equal(fresh.read(name)) for name, value in found.items())
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert "no parameter or buffer 'lyer.weight'" in refused(fresh.read, "lyer.weight")


# ------------------------------------------------------------------------------------------------------------ failures


def export_once(folder: Path) -> str:
    engine = start(make_model("llama", tied=False, dtype=torch.float32), None, zero=3)
    return refused(engine.export, folder)


def test_a_taken_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    text, other = run_ranks(2, export_once, tmp_path / "mine")
    assert text == other
    assert "something else is there already" in text
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "thesis.tex"]


def test_a_full_disk_is_one_error_on_every_rank(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2**14) as disk:
        text, other = run_ranks(2, export_once, disk / "out")
        assert text == other
        assert "CheckpointError: rank 0 on host" in text
        assert "the disk is full" in text
        assert not list(disk.iterdir())


def export_cut_short(folder: Path) -> str:
    """The first rank's disk fails in the middle of a file."""
    if dist.get_rank() == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    try:
        return export_once(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_a_disk_that_fails_in_the_middle_is_one_error_on_every_rank(tmp_path: Path) -> None:
    text, *others = run_ranks(3, export_cut_short, tmp_path / "out")
    assert others == [text, text]
    assert "could not write" in text
    assert "File too large" in text
    assert not list(tmp_path.iterdir())


def export_as_nobody(folder: Path) -> str:
    os.seteuid(NOBODY)
    try:
        return export_once(folder)
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_an_unwritable_folder_is_one_error_on_every_rank(tmp_path: Path) -> None:
    text, other = run_ranks(2, export_as_nobody, tmp_path / "out")
    assert text == other
    assert "Permission denied" in text
    assert not list(tmp_path.iterdir())


@contextlib.contextmanager
def replaced(name: str, value: Any) -> Iterator[None]:
    before = getattr(export, name)
    setattr(export, name, value)
    try:
        yield
    finally:
        setattr(export, name, before)


def export_shapes_of_zero(folder: Path) -> str:
    """What other frameworks wrote: of every tensor what the first rank held itself."""

    def local(held: Held, dtype: torch.dtype, mesh: RankMesh) -> Tensor | None:
        return own_part(held.tensor).to(dtype) if dist.get_rank() == 0 else None

    with replaced("gather_to_first", local):
        return export_once(folder)


def test_G5_tensors_without_elements_are_not_called_done(tmp_path: Path) -> None:
    text, other = run_ranks(2, export_shapes_of_zero, tmp_path / "out")
    assert text == other
    assert re.search(
        r"CheckpointError: model\.embed_tokens\.weight cannot .* 612 elements \(51x12\) of 1212", text, re.S
    )
    assert not list(tmp_path.iterdir())
