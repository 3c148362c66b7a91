"""Parameters cut over tensor-parallel ranks: whole by name in checkpoints, weight files and comparisons, any layout."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_with_torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.errors import CheckpointError
from meshwright.measure.equality.records import Run, join, piece
from meshwright.runtime.boxes import Held, own_part
from meshwright.runtime.checkpoint import load_checkpoint, save_checkpoint, stored
from meshwright.runtime.cuts import Cut, even_segments
from meshwright.runtime.export import export_model, read_tensor
from meshwright.runtime.state import adopt_optimizer_states, model_states, new_optimizer_states, optimizer_states
from meshwright.spec import Strategy
from tests.harness.ranks import run_one, run_ranks
from tests.runtime.cut_models import STATES, Laid, filled_optimizer, lay, same, whole_state, wholes
from tests.runtime.warm import listening

TP_FIRST = ("pp", "tp", "dp_replicate", "dp_shard", "cp")
LAYOUTS = {
    1: [Strategy()],
    2: [Strategy(tp=2), Strategy(dp=2, zero=3)],
    3: [Strategy(tp=3)],
    4: [
        Strategy(tp=4),
        Strategy(tp=2, dp=2),
        Strategy(tp=2, dp=2, zero=3),
        Strategy(tp=2, dp=2, zero=1, mesh_order=TP_FIRST),
        Strategy(dp=4, zero=2, shard=2),
    ],
    6: [Strategy(tp=2, dp=3, zero=3), Strategy(tp=3, dp=2, zero=2)],
    8: [Strategy(tp=2, dp=4, zero=3, shard=2)],
}
#: What six and eight ranks write is read by fewer; reading in them takes longest.
WORLDS = [
    *(world for world in LAYOUTS if world < 6),
    *(pytest.param(world, marks=pytest.mark.slow) for world in (6, 8)),
]
WRITTEN = [(world, at) for world, layouts in LAYOUTS.items() for at in range(len(layouts))]


def _run(world: int, fn: Any, *args: Any) -> list[Any]:
    return [run_one(fn, *args)] if world == 1 else run_ranks(world, fn, *args, timeout_s=120)


# ---------------------------------------------------------------------------------------------------------- each layout


def see_every_layout(folder: Path) -> list[str]:
    """Lay out, save, export, read and record under every strategy of this many ranks; what is wrong."""
    wrong = []
    world = dist.get_world_size() if dist.is_initialized() else 1
    for at, strategy in enumerate(LAYOUTS[world]):
        laid, right = lay(strategy, seed=1), wholes(1, strategy)
        wrong += [f"{strategy}: {name} begins with other values" for name in laid.differing(right)]
        states = model_states(laid.model, laid.zero) | optimizer_states(filled_optimizer(laid), laid.zero)
        save_checkpoint(folder / f"{world}-{at}", states, {"of": str(strategy)})
        options: dict[str, Any] = {"dtype": None, "group": None}
        export_model(laid.model, laid.zero, folder / f"export-{world}-{at}", max_shard_bytes=1000, **options)
        for name, value in right.items():
            if not torch.equal(read_tensor(laid.model, laid.zero, name), value):
                wrong.append(f"{strategy}: {name} is read wrong")
        read_tensor(laid.model, laid.zero, "table")
    return wrong


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    for world in LAYOUTS:
        wrong = {text for texts in _run(world, see_every_layout, folder) for text in texts}
        assert not wrong, "\n".join(sorted(wrong))
    return folder


def test_what_lies_on_the_disk_does_not_tell_the_layout(written: Path) -> None:
    right = wholes(1)
    for world, at in WRITTEN:
        entries = stored(written / f"{world}-{at}")
        for name in wholes(1, LAYOUTS[world][at]):
            assert entries[f"model.{name}"] == (tuple(right[name].shape), torch.float32)
            assert entries[f"optimizer.{name}.exp_avg_sq"] == (tuple(right[name].shape), torch.float64)
            assert entries[f"optimizer.{name}.step"] == ((), torch.float32)
        files = (written / f"{world}-{at}").glob("*.safetensors")
        size = sum(value.nbytes for path in files for value in load_file(path).values())
        assert size == sum(math.prod(shape) * dtype.itemsize for shape, dtype in entries.values())  # each element once


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_pytorchs_own_reader_reads_fused_weights(written: Path) -> None:
    right = wholes(1)
    tensors = {f"model.{name}": torch.zeros_like(value) for name, value in right.items()}
    load_with_torch(dict(tensors), storage_reader=HuggingFaceStorageReader(str(written / "4-0")))
    assert [name for name, value in right.items() if not torch.equal(tensors[f"model.{name}"], value)] == []


@pytest.mark.parametrize(("world", "at"), WRITTEN)
def test_exports_are_whole_and_without_padding(written: Path, world: int, at: int) -> None:
    right = wholes(1, LAYOUTS[world][at])
    files = sorted((written / f"export-{world}-{at}").glob("*.safetensors"))
    assert len(files) > 1
    found = {name: value for path in files for name, value in load_file(path).items()}
    assert found.keys() == right.keys() | {"count", "table"}
    assert [name for name, value in right.items() if not torch.equal(found[name], value)] == []


# ------------------------------------------------------------------------------------------------------ another layout


def load_every_layout(folder: Path) -> list[str]:
    """Load what every layout wrote under every strategy of this many ranks; what is wrong."""
    wrong = []
    world = dist.get_world_size() if dist.is_initialized() else 1
    for strategy in LAYOUTS[world]:
        laid, right = lay(strategy, seed=2), wholes(1, strategy)
        for writer in WRITTEN:
            place = folder / f"{writer[0]}-{writer[1]}"
            entries = stored(place)
            if ("model.layers.scalar.weight" in entries) != ("layers.scalar.weight" in right):
                continue  # a model without the scalar
            with torch.no_grad():
                for parameter in laid.zero.stored.values():
                    parameter.zero_()
            laid.model.get_buffer("count").zero_()
            wrong += [f"{strategy} from {LAYOUTS[writer[0]][writer[1]]}: {text}" for text in _load(laid, place, right)]
    return wrong


def _load(laid: Laid, place: Path, right: dict[str, Tensor]) -> Iterator[str]:
    optimizer = torch.optim.AdamW(laid.zero.stored.values())
    states = new_optimizer_states(optimizer, laid.zero, stored(place))
    load_checkpoint(place, model_states(laid.model, laid.zero) | states)
    adopt_optimizer_states(optimizer, laid.zero.stored, states, {})
    yield from laid.differing(right)
    if laid.model.get_buffer("count") != 7:
        yield "the buffer"
    for name, parameter in laid.zero.stored.items():
        if optimizer.state[parameter]["step"] != 7.0:
            yield f"step of {name}"
        for key in STATES:
            if not same(optimizer.state[parameter][key], laid.wanted(name, whole_state(name, key))):
                yield f"{key} of {name}"


@pytest.mark.parametrize("world", WORLDS)
def test_any_layout_loads_what_any_other_wrote(written: Path, world: int) -> None:
    for wrong in _run(world, load_every_layout, written):
        assert not wrong, "\n".join(wrong)


def load_another_shape(folder: Path) -> str:
    """The cut of a model with another vocabulary: its local shapes are those of a rank of the right one."""
    laid = lay(Strategy(tp=2), seed=1)
    name = "layers.embedding.weight"
    cut = Cut.of((102, 4), 0, [[segment] for segment in even_segments(102, 2)])
    held = model_states(laid.model, laid.zero)
    held[f"model.{name}"] = Held(laid.zero.stored[name], cut, laid.mesh.tp_rank)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(folder, held)
    return str(error.value)


def test_whole_shapes_are_compared(written: Path) -> None:
    for text in run_ranks(2, load_another_shape, written / "4-0"):
        assert "model.layers.embedding.weight is stored as 101x4, and is 102x4 here" in text


# ---------------------------------------------------------------------------------------------------------- warm starts


def warm_start(folder: Path) -> list[str]:
    wrong = []
    for strategy in LAYOUTS[dist.get_world_size() if dist.is_initialized() else 1]:
        file = folder / ("all.safetensors" if strategy.shard == 1 or not strategy.zero else "sharded.safetensors")
        right, own = wholes(1, strategy), wholes(2, strategy)
        for real in (False, True):
            laid = lay(strategy, seed=2, weights=file, real=real)
            wrong += [f"{strategy}, {real=}: {name}" for name in laid.differing(right)]
        with listening() as texts:
            laid = lay(strategy, seed=2, weights=folder / "some.safetensors")
        some = {name: right[name] if name in load_file(folder / "some.safetensors") else own[name] for name in right}
        wrong += [f"{strategy}, some: {name}" for name in laid.differing(some)]
        assert len(texts) == (1 if not dist.is_initialized() or dist.get_rank() == 0 else 0)
    return wrong


@pytest.mark.parametrize("world", WORLDS)
def test_weight_files_are_read_piece_by_piece(tmp_path: Path, world: int) -> None:
    right = {name: value.double() for name, value in wholes(1).items()}  # converted on the way
    save_file({**right, "count": torch.tensor(7), "table": torch.arange(5.0)}, tmp_path / "all.safetensors")
    del right["layers.scalar.weight"]
    save_file({**right, "count": torch.tensor(7), "table": torch.arange(5.0)}, tmp_path / "sharded.safetensors")
    some = [f"layers.{name}.weight" for name in ("fused", "row", "key", "embedding")]  # their biases are initialised
    save_file({name: right[name] for name in some}, tmp_path / "some.safetensors")
    for wrong in _run(world, warm_start, tmp_path):
        assert not wrong, "\n".join(wrong)


# ---------------------------------------------------------------------------------------------------------- comparisons


def record_parts(world: int) -> list[Run]:
    """What each layout leaves behind; the last rank's copy of a key head is wrong by one."""
    runs = []
    for strategy in LAYOUTS[world]:
        laid = lay(strategy, seed=1)
        held = {name: laid.zero.held(name, tensor) for name, tensor in laid.zero.stored.items()}
        if strategy.tp == 4 and laid.mesh.tp_rank == 3:
            held["layers.key.weight"].tensor.add_(1)
        runs.append(Run({name: piece(own, laid.mesh) for name, own in held.items()}, []))
    return runs


@pytest.mark.parametrize("world", WORLDS[1:])
def test_recorded_parts_are_put_together(world: int) -> None:
    by_rank = run_ranks(world, record_parts, world, timeout_s=120)
    for at, strategy in enumerate(LAYOUTS[world]):
        right = wholes(1, strategy)
        runs = join([runs[at] for runs in by_rank])
        for rank, run in enumerate(runs):
            differing = [name for name, value in right.items() if not torch.equal(run.initial[name], value)]
            assert differing == (["layers.key.weight"] if strategy.tp == 4 and rank == 3 else []), f"{strategy} {rank}"
        own_copies = strategy.tp > 1 or not strategy.zero
        assert len({id(run.initial) for run in runs}) == (world if own_copies else strategy.replicas)


# ------------------------------------------------------------------------------------------------------------- property


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Cut, int, int]:
    """A cut of any kind over some ranks, how many shards each is laid over, and along which dim."""
    shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    dim, ranks = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))
    bounds = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=5)))
    edges = [0, *bounds, shape[dim]]
    segments = [(start, end - start) for start, end in itertools.pairwise(edges)]
    own: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for segment in segments:
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            own[rank].append(segment)
    padded = draw(st.none() | st.integers(max(sum(size for _, size in held) for held in own), shape[dim] + 3))
    cut = Cut.of(shape, dim, own, length=padded)
    return cut, draw(st.integers(1, 3)), draw(st.integers(0, len(shape) - 1))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
@given(cuts())
def check_pieces(example: tuple[Cut, int, int]) -> None:
    cut, shards, shard_dim = example
    whole = torch.arange(1.0, 1 + math.prod(cut.shape)).reshape(cut.shape)
    count, once = torch.zeros(cut.shape), torch.zeros(cut.shape)
    for rank, shard in itertools.product(range(len(cut.segments)), range(shards)):
        with _shard_of(cut.take(whole, rank), shards, shard, shard_dim) as tensor:
            held = Held(tensor, cut, rank)
            for box, _ in held.pieces(once=True):
                once[box] += 1
            for box, view in held.pieces():
                assert torch.equal(whole[box], view)
                count[box] += 1
                view.fill_(-1)
            assert own_part(tensor)[own_part(tensor) != -1].count_nonzero() == 0, "only padding is left"
    assert torch.equal(once, torch.ones(cut.shape))
    copies = torch.zeros(cut.shape)
    for start, size in itertools.chain(*cut.segments):
        copies.narrow(cut.dim, start, size).add_(1)
    assert torch.equal(count, copies)


@contextlib.contextmanager
def _shard_of(local: Tensor, shards: int, shard: int, dim: int) -> Iterator[Tensor]:
    """A tensor sharded over ranks of which this process is one, and the others are not there."""
    if shards == 1:
        yield local
        return
    dist.init_process_group("fake", store=FakeStore(), rank=shard, world_size=shards)
    try:
        yield distribute_tensor(local, init_device_mesh("cpu", (shards,)), [Shard(dim)], src_data_rank=None)
    finally:
        dist.destroy_process_group()


def check_many() -> None:
    check_pieces()


def test_pieces_of_all_ranks_hold_every_element() -> None:
    run_one(check_many, timeout_s=200)
