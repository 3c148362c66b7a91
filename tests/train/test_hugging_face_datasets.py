"""Hugging Face data sets, made here: by number and as streams, plain and as tensors, padded and packed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meshwright import Batches, ConfigError, DataError, Job, Packing, Padding, Strategy

datasets = pytest.importorskip("datasets")

LENGTHS = [1 + (7 * number) % 11 for number in range(50)]
JOB, RANKS = Job(global_batch=12, seed=5), 3


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def sequences() -> Iterator[dict[str, Any]]:
    for number, length in enumerate(LENGTHS):
        yield {"input_ids": [number] * length, "prompt_length": length // 2}


@pytest.fixture(scope="module")
def by_number(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return datasets.Dataset.from_generator(sequences, cache_dir=str(tmp_path_factory.mktemp("cache")))


def read(data: Any, **options: Any) -> list[int]:
    """The numbers of the sequences in the order in which ranks together get them."""
    options = {"collate": Padding(), **options}
    ranks = [list(Batches(data, JOB, Strategy(dp=RANKS), rank=rank, **options)) for rank in range(RANKS)]
    found = []
    for step in range(max(map(len, ranks))):
        for batches in ranks:
            for batch in batches[step : step + 1]:
                assert set(batch) == {"input_ids", "attention_mask", "labels"}
                lengths = batch["attention_mask"].sum(1)
                numbers = batch["input_ids"][:, 0]
                assert lengths.tolist() == [LENGTHS[number] for number in numbers]
                assert torch.equal((batch["labels"] != -100).sum(1), lengths - lengths // 2)
                found += numbers.tolist()
    return found


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
@pytest.mark.parametrize("workers", [0, 1])
def test_by_number(by_number: Any, form: str | None, workers: int) -> None:
    data = by_number.with_format(form)
    wanted = read(list(sequences()), epochs=2)
    assert read(data, epochs=2, workers=workers) == wanted
    assert read(data, epochs=2, workers=workers, start=36) == wanted[36:]
    assert sorted(wanted) == sorted(2 * list(range(50)))


@pytest.mark.parametrize("form", [None, "torch"])
@pytest.mark.parametrize("workers", [0, 1])
def test_as_a_stream(by_number: Any, form: str | None, workers: int) -> None:
    data = by_number.to_iterable_dataset(num_shards=5).with_format(form)
    both = read(data, workers=workers, epochs=2)
    assert both[:50] == sorted(both[50:]) == list(range(50)), "later epochs take its shards in an order of its own"
    assert both == read(data, epochs=2)
    assert read(data, workers=workers, start=24) == list(range(24, 50))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_shuffled_at_its_source_has_another_order_each_epoch(by_number: Any, workers: int) -> None:
    data = by_number.to_iterable_dataset(num_shards=5).shuffle(seed=1, buffer_size=20)
    found = read(data, epochs=2, workers=workers)
    first, second = found[:50], found[50:]
    assert first != second
    assert sorted(first) == sorted(second) == list(range(50))
    assert read(data, epochs=2, start=60, workers=workers) == found[60:]
    with pytest.raises(ConfigError, match="shuffle=True for a stream") as caught:
        read(data, shuffle=True)
    assert "dataset.shuffle" in caught.value.fix


def test_a_stream_split_by_rank_is_its_own(by_number: Any) -> None:
    from datasets.distributed import split_dataset_by_node

    found = []
    for rank in range(RANKS):
        data = split_dataset_by_node(by_number.to_iterable_dataset(num_shards=6), rank=rank, world_size=RANKS)
        batches = Batches(data, JOB, Strategy(dp=RANKS), rank=rank, sharded=True, collate=Padding())
        found += [number for batch in batches for number in batch["input_ids"][:, 0].tolist()]
    assert sorted(found) == list(range(50))


def test_a_torch_loader_around_it(by_number: Any) -> None:
    loader = torch.utils.data.DataLoader(by_number, shuffle=True, collate_fn=Padding())
    assert read(loader, collate=None) == read(by_number)


def test_columns_of_one_length_are_stacked() -> None:
    data = datasets.Dataset.from_dict(
        {"input_ids": [[n, n + 1] for n in range(24)], "labels": [n % 2 for n in range(24)]}
    )
    for form in (None, "torch"):
        batches = Batches(data.with_format(form), JOB, Strategy(), shuffle=False)
        batch = next(iter(batches))
        assert batch["input_ids"].tolist() == [[n, n + 1] for n in range(12)]
        assert batch["labels"].tolist() == [n % 2 for n in range(12)]


def test_packed(by_number: Any) -> None:
    rows = [Packing(16)(data) for data in (by_number, by_number.with_format("torch"), by_number.to_iterable_dataset())]
    tokens = [
        [row["input_ids"].tolist() for row in map(dict, packed)] for packed in (rows[2], *map(in_order, rows[:2]))
    ]
    assert tokens[0] == tokens[1] == tokens[2]
    assert sum(row.count(49) for row in tokens[0]) == LENGTHS[49]


def in_order(rows: Any) -> list[Any]:
    return [rows[number] for number in range(len(rows))]


def test_what_is_no_data_set(by_number: Any) -> None:
    both = datasets.DatasetDict({"train": by_number, "test": by_number})
    with pytest.raises(ConfigError, match="the keys train, test"):
        Batches(both, JOB, Strategy())
    texts = datasets.Dataset.from_dict({"text": ["a"] * 24})
    with pytest.raises(DataError, match="'text' is no number") as caught:
        list(Batches(texts, JOB, Strategy()))
    assert "remove_columns" in caught.value.fix


def test_nothing_imports_it_for_a_plain_list() -> None:
    import subprocess
    import sys

    program = (
        "import sys, meshwright as m; m.Batches([1, 2], m.Job(global_batch=1), m.Strategy()); m.Packing(4)([[1, 2]]);"
        "print({'datasets', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "set()"
