"""A user's own data as each rank's batches: the order, who takes what, going on, workers, and what cannot be."""

from __future__ import annotations

import itertools
import math
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from meshwright import Batches, ConfigError, DataError, Engine, Job, Strategy
from meshwright.train.order import SampleOrder
from tests.harness.ranks import RankError, run_ranks

GLOBAL = 12
LAYOUTS = [(1, 12), (2, 3), (3, 4), (4, 1), (6, 2), (12, 1)]


class Numbers(Dataset[Tensor]):
    """Samples that are their own numbers, and a note of which were read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        self.read.append(index)
        return torch.tensor(index)


class Counting(IterableDataset[int]):
    """A stream that begins anew for every iterator, from `epoch * 1000` on."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(1000 * self.epoch, 1000 * self.epoch + self.size))


def job(global_batch: int = GLOBAL, seed: int = 3) -> Job:
    return Job(global_batch=global_batch, seed=seed)


def rank_batches(data: Any, dp: int, microbatch: int = 1, **options: Any) -> list[list[list[int]]]:
    """What each rank's batches hold."""
    made = [Batches(data, job(), Strategy(dp=dp, microbatch=microbatch), rank=rank, **options) for rank in range(dp)]
    found = [[batch.tolist() for batch in batches] for batches in made]
    if not isinstance(data, (Counting, DataLoader)):
        assert [len(batches) for batches in made] == [len(batches) for batches in found]
    return found


def global_batches(ranks: list[list[list[int]]]) -> list[list[int]]:
    """The global batches that ranks' batches make, those of ranks that have run out being empty."""
    longest = max(len(batches) for batches in ranks)
    return [[row for batches in ranks for row in (batches[k : k + 1] or [[]])[0]] for k in range(longest)]


def numbers_of(ranks: list[list[list[int]]]) -> list[int]:
    return [row for batch in global_batches(ranks) for row in batch]


class TestOrder:
    @given(
        size=st.integers(24, 60),
        epochs=st.integers(1, 3),
        start=st.integers(0, 70),
        layout=st.sampled_from(LAYOUTS),
        stream=st.booleans(),
        last=st.sampled_from(["short", "drop"]),
    )
    @settings(max_examples=80, deadline=None)
    def test_ranks_together_are_one_process(
        self, size: int, epochs: int, start: int, layout: tuple[int, int], stream: bool, last: str
    ) -> None:
        if stream:
            data, whole = Counting(size), [1000 * epoch + n for epoch in range(epochs) for n in range(size)]
        else:
            order = SampleOrder(size, 3)
            data, whole = list(range(size)), [order(n) for n in range(size * epochs)]
        wanted = [whole[at : at + GLOBAL] for at in range(start, len(whole), GLOBAL)]
        if last == "drop" and wanted and len(wanted[-1]) < GLOBAL:
            wanted.pop()
        ranks = rank_batches(data, *layout, epochs=epochs, start=start, last=last)
        assert global_batches(ranks) == wanted
        assert all(len(batch) <= GLOBAL // layout[0] for batches in ranks for batch in batches)

    def test_a_short_end_leaves_later_ranks_with_fewer_batches(self) -> None:
        ranks = rank_batches(list(range(GLOBAL + 5)), 4, shuffle=False)
        assert ranks == [[[0, 1, 2], [12, 13, 14]], [[3, 4, 5], [15, 16]], [[6, 7, 8]], [[9, 10, 11]]]

    def test_every_epoch_has_another_order_and_all_samples(self) -> None:
        found = numbers_of(rank_batches(list(range(24)), 2, epochs=3))
        epochs = [found[at : at + 24] for at in (0, 24, 48)]
        assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
        assert epochs[0] != epochs[1] != epochs[2]

    def test_the_seed_is_the_jobs_or_its_own(self) -> None:
        data = list(range(24))
        first = numbers_of(rank_batches(data, 2))
        assert first == numbers_of(rank_batches(data, 3, seed=3)) != numbers_of(rank_batches(data, 2, seed=4))

    def test_without_end(self) -> None:
        batches = Batches([*range(5), *range(5)], job(), Strategy(dp=1), epochs=None, shuffle=False)
        stream = iter(batches)
        assert [next(stream).tolist()[0] for _ in range(4)] == [0, 2, 4, 1]
        with pytest.raises(TypeError, match="not known"):
            len(batches)

    def test_iterating_twice_begins_twice(self) -> None:
        batches = Batches(list(range(30)), job(), Strategy(dp=1))
        assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in batches]

    def test_the_users_random_state_is_left_alone(self) -> None:
        torch.manual_seed(1)
        before = torch.get_rng_state()
        list(Batches(Noisy(24), job(), Strategy(dp=1)))
        assert torch.equal(torch.get_rng_state(), before)


class TestGoingOn:
    @pytest.mark.parametrize("dp", [1, 2, 3, 4])
    def test_from_where_it_stopped_on_any_number_of_ranks(self, dp: int) -> None:
        whole = global_batches(rank_batches(list(range(50)), 1, epochs=2))
        for steps in (1, 4, 7):
            ranks = rank_batches(list(range(50)), dp, epochs=2, start=steps * GLOBAL)
            assert global_batches(ranks) == whole[steps:]

    def test_another_global_batch_goes_on_with_the_next_sample(self) -> None:
        whole = numbers_of(rank_batches(list(range(48)), 1))
        made = Batches(list(range(48)), job(global_batch=8), Strategy(dp=1), start=12)
        assert [row for batch in made for row in batch.tolist()] == whole[12:]

    def test_what_was_seen_is_not_read_again(self) -> None:
        data = Numbers(10_000)
        batches = Batches(data, job(), Strategy(dp=2), rank=1, start=9_984)
        assert [len(batch) for batch in batches] == [6]
        assert len(data.read) == 6

    def test_a_rank_reads_its_own_samples_only(self) -> None:
        data = Numbers(60)
        list(Batches(data, job(), Strategy(dp=3), rank=2, shuffle=False))
        assert data.read == [at + row for at in range(0, 60, 12) for row in range(8, 12)]

    def test_nothing_is_left(self) -> None:
        for data in (list(range(24)), Counting(24)):
            assert list(Batches(data, job(), Strategy(dp=1), start=24)) == []


class TestSharded:
    def test_ranks_may_run_out_at_different_times(self) -> None:
        sizes = (20, 7, 13)
        made = [
            Batches(Counting(size), job(), Strategy(dp=3), rank=rank, sharded=True) for rank, size in enumerate(sizes)
        ]
        found = [[batch.tolist() for batch in batches] for batches in made]
        assert [[row for batch in batches for row in batch] for batches in found] == [list(range(n)) for n in sizes]
        assert [len(batches) for batches in found] == [5, 2, 4]

    def test_it_goes_on_on_as_many_ranks(self) -> None:
        made = Batches(Counting(20), job(), Strategy(dp=3), rank=1, sharded=True, start=24)
        assert next(iter(made)).tolist() == [8, 9, 10, 11]
        with pytest.raises(ConfigError, match="start=25 samples over dp=3"):
            Batches(Counting(20), job(), Strategy(dp=3), rank=1, sharded=True, start=25)


class Noisy(Dataset[Tensor]):
    """A sample and three random numbers, as an augmentation draws them."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        drawn = float(torch.rand(())), float(np.random.rand()), random.random()
        return torch.tensor([index, *drawn], dtype=torch.float64)


class TestWorkers:
    @pytest.mark.parametrize("workers", [1, 2])
    def test_workers_change_neither_order_nor_randomness(self, workers: int) -> None:
        def samples(dp: int, workers: int) -> dict[int, list[float]]:
            made = [Batches(Noisy(40), job(), Strategy(dp=dp), rank=r, workers=workers) for r in range(dp)]
            rows = [row for batches in made for batch in batches for row in batch.tolist()]
            return {int(row[0]): row for row in rows}

        alone, together = samples(1, 0), samples(2, workers)
        assert alone == together
        assert len({tuple(row[1:]) for row in alone.values()}) == 40
        made = Batches(Numbers(40), job(), Strategy(dp=1), workers=workers)
        assert [b.tolist() for b in made] == global_batches(rank_batches(list(range(40)), 1))

    def test_a_stream_is_read_ahead_by_one(self) -> None:
        assert rank_batches(Counting(40), 2, workers=1, epochs=2) == rank_batches(Counting(40), 2, epochs=2)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_sample_that_raises_is_named(self, workers: int) -> None:
        batches = Batches(Broken(range(40)), job(), Strategy(dp=1), workers=workers, shuffle=False)
        stream = iter(batches)
        assert next(stream).tolist() == list(range(12))
        with pytest.raises(DataError, match=r"sample 17 cannot be read") as caught:
            next(stream)
        assert "KeyError: 'text'" in str(caught.value)
        assert "test_batches.py:" in str(caught.value)
        assert "Traceback" not in str(caught.value)

    @pytest.mark.parametrize("workers", [0, 1])
    def test_a_stream_that_raises_is_told(self, workers: int) -> None:
        batches = Batches(BrokenStream(), job(), Strategy(dp=2), workers=workers, rank=1)
        with pytest.raises(DataError, match="sample 17 cannot be read"):
            list(batches)

    def test_a_killed_worker_is_told(self) -> None:
        with pytest.raises(DataError, match="a data worker was lost"):
            list(Batches(Deadly(24), job(), Strategy(dp=1), workers=1))

    def test_errors_can_be_sent(self) -> None:
        error = DataError("what", why="why", fix="fix")
        assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301  just made


class Deadly(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        import os

        os._exit(1)


class Broken:
    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        if index == 17:
            raise KeyError("text")
        return int(self.samples[index])


class BrokenStream:
    def __iter__(self) -> Iterator[int]:
        yield from range(17)
        raise OSError("the source is gone")


class TestLoaders:
    def loader(self, size: int = 40, **options: Any) -> DataLoader[Any]:
        return DataLoader(Numbers(size), **options)

    def read(self, loader: DataLoader[Any], **options: Any) -> list[int]:
        return numbers_of(rank_batches(loader, 2, **options))

    def test_shuffle_is_taken_over(self) -> None:
        plain = numbers_of(rank_batches(list(range(40)), 2))
        assert self.read(self.loader()) == list(range(40))
        assert self.read(self.loader(shuffle=True)) == plain
        assert self.read(self.loader(), shuffle=True) == plain
        assert self.read(self.loader(shuffle=True), shuffle=False) == list(range(40))

    def test_collate_workers_and_drop_last_are_taken_over(self) -> None:
        loader = self.loader(collate_fn=plus_one, num_workers=1, drop_last=True)
        assert self.read(loader) == list(range(1, 37))
        assert self.read(loader, last="short", workers=0, collate=torch.stack) == list(range(40))
        made = Batches(loader, job(), Strategy(dp=1))
        assert len(made) == 3

    def test_a_worker_is_begun_by_its_function(self) -> None:
        loader = self.loader(num_workers=1, worker_init_fn=seven_threads, collate_fn=threads, timeout=50)
        assert set(self.read(loader)) == {7}

    @pytest.mark.parametrize("size", [1, 3, 6, 12])
    def test_batch_sizes_that_are_meant(self, size: int) -> None:
        made = Batches(self.loader(batch_size=size), job(), Strategy(dp=2, microbatch=3), rank=0)
        assert len(next(iter(made))) == 6

    def test_another_batch_size_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="batch_size=5") as caught:
            Batches(self.loader(batch_size=5), job(), Strategy(dp=2, microbatch=3), rank=0)
        assert "microbatch 3, rows of a rank 6, global batch 12" in str(caught.value)

    def test_the_order_of_another_sampler(self) -> None:
        evens = Subset(Numbers(80), range(0, 80, 2))
        assert self.read(DataLoader(evens)) == list(range(0, 80, 2))
        backwards = self.loader(sampler=range(39, -1, -1))
        assert self.read(backwards) == list(range(39, -1, -1))
        assert self.read(backwards, start=24) == list(range(15, -1, -1))

    @pytest.mark.parametrize("generator", [False, True])
    def test_a_random_sampler_depends_on_seed_and_epoch(self, generator: bool) -> None:
        own = torch.Generator().manual_seed(8) if generator else None
        state = own.get_state() if own else torch.get_rng_state()
        sampler = WeightedRandomSampler([1.0] * 39 + [400.0], 30, generator=own)
        loader = self.loader(sampler=sampler)
        first = numbers_of(rank_batches(loader, 1, epochs=2))
        assert first == numbers_of(rank_batches(loader, 3, epochs=2))
        assert first[36:] == numbers_of(rank_batches(loader, 2, epochs=2, start=36))
        assert first != numbers_of(rank_batches(loader, 1, epochs=2, seed=4))
        assert first[:30] != first[30:]
        assert first.count(39) > 30
        assert torch.equal(own.get_state() if own else torch.get_rng_state(), state)
        assert len(numbers_of(rank_batches(self.loader(sampler=RandomSampler(range(40), num_samples=25)), 1))) == 25

    def test_batch_samplers(self) -> None:
        plain = BatchSampler(SequentialSampler(range(40)), 6, drop_last=True)
        assert self.read(self.loader(batch_sampler=plain)) == list(range(36))
        with pytest.raises(ConfigError, match="a batch sampler of its own"):
            Batches(self.loader(batch_sampler=[[0, 1], [2, 3]]), job(), Strategy(dp=1))
        with pytest.raises(ConfigError, match="batch_size=None"):
            Batches(self.loader(batch_size=None), job(), Strategy(dp=1))

    def test_a_distributed_sampler_is_refused(self) -> None:
        sampler = DistributedSampler(Numbers(40), num_replicas=2, rank=0)
        with pytest.raises(ConfigError, match="DistributedSampler"):
            Batches(self.loader(sampler=sampler), job(), Strategy(dp=2), rank=0)

    def test_a_sampler_beside_shuffle_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="shuffle=True beside"):
            Batches(self.loader(sampler=range(40)), job(), Strategy(dp=1), shuffle=True)

    def test_a_loader_of_a_stream(self) -> None:
        assert numbers_of(rank_batches(DataLoader(Counting(40), batch_size=6), 2)) == list(range(40))


def plus_one(samples: list[Tensor]) -> Tensor:
    return torch.stack(samples) + 1


def seven_threads(worker: int) -> None:
    torch.set_num_threads(7)


def threads(samples: list[Tensor]) -> Tensor:
    return torch.full((len(samples),), torch.get_num_threads())


class Endless:
    """Samples by number, of unknown number."""

    def __getitem__(self, index: int) -> int:
        return index


class TestWrongData:
    @pytest.mark.parametrize(
        ("data", "text"),
        [
            ({"train": [1], "test": [2]}, "data is a mapping .dict with the keys train, test"),
            ("corpus.txt", "data of type str holds no samples"),
            (17, "data of type int holds no samples"),
            (None, "data of type NoneType holds no samples"),
            (lambda: [1], "function holds no samples"),
            (Endless(), "has no length"),
        ],
    )
    def test_what_holds_no_samples(self, data: Any, text: str) -> None:
        with pytest.raises(ConfigError, match=text):
            Batches(data, job(), Strategy(dp=1))

    @pytest.mark.parametrize("stream", [False, True])
    def test_no_samples_or_too_few(self, stream: bool) -> None:
        def data(size: int) -> Any:
            return Counting(size) if stream else list(range(size))

        def read(size: int, **options: Any) -> None:
            for rank in range(3):
                list(Batches(data(size), job(), Strategy(dp=3), rank=rank, **options))

        for last in ("short", "drop"):
            with pytest.raises(DataError, match="the data holds no samples"):
                read(0, last=last)
        with pytest.raises(DataError, match="there are 8 samples for a global batch of 12"):
            read(8)
        read(9)
        with pytest.raises(DataError, match="there are 11 samples for a global batch of 12"):
            read(11, last="drop")
        read(6, epochs=2, last="drop")
        with pytest.raises(DataError, match="there are 3 samples"):
            list(Batches(data(3), job(), Strategy(dp=3), rank=0, sharded=True, last="drop"))

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"epochs": 0}, "epochs=0"),
            ({"epochs": 1.5}, "epochs=1.5"),
            ({"start": -1}, "start=-1"),
            ({"workers": -1}, "workers=-1"),
            ({"seed": "a"}, "seed='a'"),
            ({"last": "keep"}, "last='keep'"),
            ({"rank": 2}, "rank=2 of dp=2"),
            ({"rank": True}, "rank=True"),
        ],
    )
    def test_wrong_arguments(self, options: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigError, match=text):
            Batches(list(range(40)), job(), Strategy(dp=2), **{"rank": 0, **options})

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"shuffle": True}, r"shuffle=True for a stream .Counting"),
            ({"workers": 2}, "2 workers for a stream"),
        ],
    )
    def test_what_a_stream_cannot_do(self, options: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigError, match=text):
            Batches(Counting(40), job(), Strategy(dp=1), **options)

    def test_a_generator_can_be_read_once(self) -> None:
        with pytest.raises(ConfigError, match="epochs=2 for a generator"):
            Batches((n for n in range(40)), job(), Strategy(dp=1), epochs=2)
        batches = Batches((n for n in range(40)), job(), Strategy(dp=1))
        assert sum(len(batch) for batch in batches) == 40
        with pytest.raises(DataError, match="a generator that was read before"):
            list(batches)

    @pytest.mark.parametrize(
        ("odd", "text"),
        [
            ({"x": 1.0}, "another kind of sample than row 0"),
            ({"x": [1.0], "y": 2}, "rows 0 and 5 have different shapes"),
            ({"x": "a", "y": 2}, "'x' is no number"),
            ({"x": None, "y": 2}, "'x' is no number"),
            ({"x": [[1.0], [1.0, 2.0]], "y": 2}, "lists of different lengths"),
            ((1.0, 2), "another kind of sample than row 0"),
        ],
    )
    @pytest.mark.parametrize("workers", [0, 1])
    def test_a_sample_of_another_kind(self, odd: Any, text: str, workers: int) -> None:
        data = [{"x": [1.0, 2.0], "y": n} for n in range(24)]
        data[17] = odd
        batches = iter(Batches(data, job(), Strategy(dp=1), shuffle=False, workers=workers))
        first = next(batches)
        assert (first["x"].shape, first["x"].dtype, first["y"].dtype) == ((12, 2), torch.float32, torch.int64)
        with pytest.raises(DataError, match=text) as caught:
            next(batches)
        assert "samples 12, 13, 14" in str(caught.value)

    def test_a_collate_function_that_joins_samples(self) -> None:
        with pytest.raises(ConfigError, match="made 1 rows of 12 samples"):
            list(Batches(list(range(24)), job(), Strategy(dp=1), collate=lambda rows: torch.tensor([sum(rows)])))
        with pytest.raises(DataError, match="the batch holds no tensor"):
            list(Batches(list(range(24)), job(), Strategy(dp=1), collate=list))

    def test_ranks_without_a_group(self) -> None:
        with pytest.raises(ConfigError, match="needs 2 ranks, but there are 1"):
            Batches(list(range(24)), job(), Strategy(dp=2))

    def test_the_launcher_names_the_rank(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        batches = Batches(list(range(24)), job(), Strategy(dp=2), shuffle=False)
        assert next(iter(batches)).tolist() == list(range(6, 12))

    def test_a_global_batch_that_does_not_divide(self) -> None:
        with pytest.raises(ConfigError, match="global_batch=12 cannot be split"):
            Batches(list(range(24)), job(), Strategy(dp=5), rank=0)


def own_rows(size: int) -> list[list[int]]:
    ranks = torch.distributed.get_world_size()
    return [batch.tolist() for batch in Batches(Numbers(size), job(), Strategy(dp=ranks))]


def rows_of_other_data() -> None:
    rank = torch.distributed.get_rank()
    Batches(list(range(40 + rank)), job(), Strategy(dp=3))


def rows_of_own_streams() -> list[int]:
    rank = torch.distributed.get_rank()
    made = Batches(Counting(40 + 6 * rank), job(), Strategy(dp=3), sharded=True)
    return [len(batch) for batch in made]


class TestRanks:
    @pytest.mark.parametrize("world", [2, 3])
    def test_ranks_know_their_rows(self, world: int) -> None:
        found = run_ranks(world, own_rows, 41)
        assert global_batches(found) == global_batches(rank_batches(list(range(41)), 1))
        assert [len(batches) for batches in found] == {2: [4, 3], 3: [4, 4, 3]}[world]

    def test_ranks_with_other_data_are_told(self) -> None:
        with pytest.raises(RankError, match="rank 0 and rank 1 have different samples") as caught:
            run_ranks(3, rows_of_other_data)
        assert "samples: 40 on rank 0, 41 on rank 1" in str(caught.value)

    def test_ranks_with_streams_of_their_own(self) -> None:
        assert [sum(rows) for rows in run_ranks(3, rows_of_own_streams)] == [40, 46, 52]


def test_numbers_of_batches() -> None:
    for size in range(24, 40):
        for dp in (1, 2, 3):
            whole, rest = divmod(size, GLOBAL)
            share = GLOBAL // dp
            wanted = [whole + (rest > rank * share) for rank in range(dp)]
            made = [Batches(list(range(size)), job(), Strategy(dp=dp), rank=rank) for rank in range(dp)]
            assert [len(batches) for batches in made] == wanted
            assert max(wanted) == math.ceil(size / GLOBAL)


FLOAT64 = {"param_dtype": "float64", "compute_dtype": "float64", "reduce_dtype": "float64"}


def trained(folder: Path, steps: int, zero: int, size: int, sharded: bool = False) -> tuple[list[float], int, float]:
    """Losses of at most `steps` steps on samples that were not seen yet, their number, and a loss over all of them.

    It goes on from the checkpoint if there is one, and leaves one otherwise.
    """
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    torch.manual_seed(0)
    data = [(torch.randn(3, dtype=torch.float64), torch.randn(2, dtype=torch.float64)) for _ in range(size)]
    work, strategy = Job(global_batch=GLOBAL, seed=3, **FLOAT64), Strategy(dp=ranks, zero=zero, microbatch=2)  # type: ignore[arg-type]
    engine = Engine(
        torch.nn.Sequential(torch.nn.Linear(3, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2)).double(),
        lambda outputs, targets: ((outputs - targets).square().sum(), len(targets)),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        work,
        strategy,
        batch_scope="local",
        blocks=["0"],
    )
    if folder.exists():
        engine.load(folder)
    mine = iter(data[: 5 + 9 * rank]) if sharded else data
    batches = Batches(mine, work, strategy, epochs=1 if sharded else 2, start=engine.samples_seen, sharded=sharded)
    losses = [report.loss for report in engine.steps(itertools.islice(batches, steps))]
    if not folder.exists():
        engine.save(folder)
    return losses, engine.samples_seen, engine.evaluate(Batches(data, work, strategy, shuffle=False))


def test_training_goes_on_with_the_samples_that_are_left(tmp_path: Path) -> None:
    """Whole, or stopped in the first epoch and gone on with other ranks and ZeRO, losses are the same."""
    whole, seen, final = run_ranks(1, trained, tmp_path / "whole", 99, 0, 53)[0]
    assert (len(whole), seen) == (9, 106)
    first, _, _ = run_ranks(2, trained, tmp_path / "half", 3, 3, 53)[0]
    for second, total, last in run_ranks(3, trained, tmp_path / "half", 99, 2, 53):
        assert first + second == pytest.approx(whole, rel=1e-12)
        assert total == seen
        assert last == pytest.approx(final, rel=1e-12)


@pytest.mark.parametrize("size", [6, 7, 41])
def test_a_short_end_is_a_step_of_its_own(tmp_path: Path, size: int) -> None:
    """Ranks that have fewer rows of it, or none, change nothing."""
    whole, seen, final = run_ranks(1, trained, tmp_path / "1", 99, 0, 2 * size)[0]
    assert (len(whole), seen) == (math.ceil(4 * size / GLOBAL), 4 * size)
    for losses, total, last in run_ranks(3, trained, tmp_path / "3", 99, 3, 2 * size):
        assert losses == pytest.approx(whole, rel=1e-12)
        assert total == seen
        assert last == pytest.approx(final, rel=1e-12)


def test_streams_of_their_own_run_out_at_different_times(tmp_path: Path) -> None:
    found = run_ranks(3, trained, tmp_path / "own", 99, 3, 24, True)
    assert found[0] == found[1] == found[2]
    losses, seen, _ = found[0]
    assert (len(losses), seen) == (6, 5 + 14 + 23)


def rows_by_another_sampler() -> None:
    rank = torch.distributed.get_rank()
    loader = DataLoader(Numbers(40), sampler=range(rank, 40 - 2 + rank))
    Batches(loader, job(), Strategy(dp=2))


def test_ranks_with_another_order_are_told() -> None:
    with pytest.raises(RankError, match="rank 0 and rank 1 have different order of the sampler"):
        run_ranks(2, rows_by_another_sampler)
