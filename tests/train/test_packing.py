"""Documents packed into rows: what stands where, and that nothing is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshwright import Batches, ConfigError, DataError, Engine, Job, Packing, Strategy
from meshwright.models import Decoder, DecoderConfig, token_loss
from meshwright.train.packing import PackedRows, PackedStream
from tests.harness.ranks import run_one

Row = dict[str, Tensor]


def documents_of(lengths: list[int]) -> list[list[int]]:
    """Documents whose tokens tell where they stand."""
    return [[1000 * (number + 1) + place for place in range(length)] for number, length in enumerate(lengths)]


class Again:
    """A stream that begins anew."""

    def __init__(self, documents: list[Any]) -> None:
        self.documents, self.epochs = documents, []  # type: tuple[list[Any], list[int]]

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Any:
        return iter(self.documents)


def same(one: Row, other: Row) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_a_row_in_full() -> None:
    rows = Packing(8, pad_token=7)(documents_of([3, 4, 2]))
    assert isinstance(rows, PackedRows)
    assert len(rows) == 2
    assert {key: value.tolist() for key, value in rows[0].items()} == {
        "input_ids": [1000, 1001, 1002, 2000, 2001, 2002, 2003, 7],
        "labels": [-100, 1001, 1002, -100, 2001, 2002, 2003, -100],
        "position_ids": [0, 1, 2, 0, 1, 2, 3, 0],
        "documents": [0, 0, 0, 1, 1, 1, 1, -1],
    }
    assert rows[1]["documents"].tolist() == [0, 0, -1, -1, -1, -1, -1, -1]
    with pytest.raises(IndexError, match="row 2 of 2"):
        rows[2]


def test_a_long_document_is_cut_into_documents_of_their_own() -> None:
    (first, second, third) = [dict(row) for row in Packing(4)(Again(documents_of([2, 9, 3])))][:3]
    assert first["input_ids"].tolist() == [1000, 1001, 0, 0]
    assert second["input_ids"].tolist() == [2000, 2001, 2002, 2003]
    assert third["labels"].tolist() == [-100, 2005, 2006, 2007]
    assert third["position_ids"].tolist() == [0, 1, 2, 3]


@given(lengths=st.lists(st.integers(0, 23), min_size=1, max_size=25), length=st.integers(2, 12))
@settings(max_examples=60, deadline=None)
def test_every_token_once_in_order_and_every_label_within_its_document(lengths: list[int], length: int) -> None:
    documents = documents_of(lengths)
    packing = Packing(length)
    rows = packing(documents)
    stream = packing(Again(documents))
    assert isinstance(stream, PackedStream)
    found = [rows[n] for n in range(len(rows))]
    assert all(same(one, other) for one, other in zip(found, stream, strict=True))
    tokens = [row["input_ids"][row["documents"] >= 0].tolist() for row in found]
    assert [token for row in tokens for token in row] == [token for document in documents for token in document]
    learned = 0
    for row, following in zip(found, [*found, None][1:], strict=True):
        assert all(value.shape == (length,) and value.dtype == torch.int64 for value in row.values())
        used = row["documents"] >= 0
        if following is not None:  # what begins the next row did not fit any more
            size = int((following["documents"] == 0).sum())
            assert int(used.sum()) + size > length
        counts = row["labels"] != -100
        learned += int(counts.sum())
        assert torch.equal(row["labels"][counts], row["input_ids"][counts])
        begins = used & (row["position_ids"] == 0)
        assert torch.equal(counts, used & ~begins)
        for place in counts.nonzero().flatten().tolist():
            assert row["input_ids"][place - 1] == row["input_ids"][place] - 1
    pieces = sum(-(-size // length) for size in lengths)
    assert learned == sum(lengths) - pieces


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_kinds_of_documents(kind: Any) -> None:
    wanted = Packing(8)(documents_of([3, 4]))[0]
    ids = [kind(document) for document in documents_of([3, 4])]
    assert same(Packing(8)(ids)[0], wanted)  # type: ignore[index]
    assert same(Packing(8)([{"input_ids": document, "id": "x"} for document in ids])[0], wanted)  # type: ignore[index]


def test_labels_and_instructions_of_documents() -> None:
    documents = [
        {"input_ids": [1, 2, 3], "labels": [4, 5, -100]},
        {"input_ids": [6, 7, 8], "prompt_length": 2},
        {"input_ids": [9, 10], "completion_mask": [1, 1]},
    ]
    (row,) = Packing(9)(iter(documents))
    assert row["labels"].tolist() == [-100, 5, -100, -100, -100, 8, -100, 10, -100]


class TestCollating:
    def rows(self) -> list[Row]:
        return list(Packing(6)(iter(documents_of([2, 3, 4]))))

    def test_attention_stays_within_a_document(self) -> None:
        batch = Packing(6).collate(self.rows())
        assert set(batch) == {"input_ids", "labels", "position_ids", "attention_mask"}
        mask = batch["attention_mask"]
        assert (mask.shape, mask.dtype) == ((2, 1, 6, 6), torch.bool)
        assert mask[0, 0].int().tolist() == [
            [1, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [0, 0, 1, 0, 0, 0],
            [0, 0, 1, 1, 0, 0],
            [0, 0, 1, 1, 1, 0],
            [0, 0, 0, 0, 0, 1],
        ]

    def test_other_kinds_of_attention(self) -> None:
        plain = Packing(6).collate(self.rows())["attention_mask"]
        added = Packing(6, attention="eager").collate(self.rows())["attention_mask"]
        assert torch.equal(added == 0, plain)
        assert torch.equal(added == float("-inf"), ~plain)
        assert "attention_mask" not in Packing(6, attention="positions").collate(self.rows())


class TestWithBatches:
    @pytest.mark.parametrize("workers", [0, 1])
    def test_rows_by_number_and_as_a_stream(self, workers: int) -> None:
        documents = documents_of([3, 4, 2, 9, 1, 5, 5, 6, 2, 2, 7, 3, 3, 1])
        rows = [row.tolist() for row in map(dict, Packing(8)(Again(documents))) for row in [row["input_ids"]]]
        for data in (documents, Again(documents)):
            packed = Packing(8)(data)
            ranks = [
                list(
                    Batches(packed, Job(global_batch=2), Strategy(dp=2), rank=r, workers=workers, epochs=2, **options)  # type: ignore[arg-type]
                )
                for r in (0, 1)
                for options in [{"shuffle": False} if data is documents else {}]
            ]
            found = [row for pair in zip(*ranks, strict=False) for batch in pair for row in batch["input_ids"].tolist()]
            assert found == (rows * 2)[: len(found)]
            assert len(found) + 1 >= 2 * len(rows)
            assert ranks[0][0]["attention_mask"].shape == (1, 1, 8, 8)
            if data is not documents and not workers:
                assert data.epochs == [0, 1, 0, 1]  # type: ignore[attr-defined]

    def test_a_generator_of_documents_is_read_once(self) -> None:
        packed = Packing(8)(iter(documents_of([3, 4])))
        with pytest.raises(ConfigError, match="epochs=3"):
            Batches(packed, Job(global_batch=1), Strategy(), epochs=3)


def decoder_losses() -> tuple[float, float]:
    """The built-in decoder's loss over packed rows by the engine, and over each document by itself."""
    torch.manual_seed(3)
    model = Decoder(DecoderConfig(vocab_size=101, hidden_size=12, num_hidden_layers=2, initializer_range=0.3)).double()
    documents = [[number + 3 * place for place in range(2 + 5 * number % 9)] for number in range(20)]
    parts = [token_loss(model(torch.tensor([ids[:-1]])), torch.tensor([ids[1:]])) for ids in documents]
    alone = float(sum(total for total, _ in parts).detach()) / sum(int(count) for _, count in parts)  # type: ignore[union-attr]
    rows = Packing(16)(documents)
    job = Job(global_batch=len(rows), param_dtype="float64", compute_dtype="float64", reduce_dtype="float64")  # type: ignore[arg-type]
    engine = Engine(model, shifted, lambda parameters: torch.optim.SGD(parameters, lr=0.0), job, Strategy())
    (batch,) = Batches(rows, job, Strategy())
    return engine.step(batch).loss, alone


def shifted(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return token_loss(logits[:, :-1], batch["labels"][:, 1:])


def test_the_built_in_decoder_takes_packed_rows() -> None:
    packed, alone = run_one(decoder_losses)
    assert packed == pytest.approx(alone, rel=1e-12)


class TestWrongDocuments:
    @pytest.mark.parametrize(
        ("document", "text"),
        [
            ("some text", "document 1: 'input_ids' is no number"),
            ({"text": "a"}, "document 1: a sample without input_ids"),
            (5, r"document 1: input_ids of shape \[\]"),
            ([[1, 2]], r"document 1: input_ids of shape \[1, 2\]"),
            ({"input_ids": [1, 2], "labels": [1]}, r"document 1: \[1\] labels for \[2\] tokens"),
            (None, "document 1: 'input_ids' is no number"),
        ],
    )
    def test_the_document_is_named(self, document: Any, text: str) -> None:
        documents = [[1, 2, 3], document]
        with pytest.raises(DataError, match=text):
            Packing(8)(documents)
        with pytest.raises(DataError, match=text):
            list(Batches(Packing(8)(iter(documents)), Job(global_batch=1), Strategy()))

    @pytest.mark.parametrize("options", [{"length": 1}, {"length": 2.0}, {"attention": "flash"}])
    def test_wrong_options(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=f"{next(iter(options))}="):
            Packing(**{"length": 8, **options})

    def test_no_documents(self) -> None:
        with pytest.raises(DataError, match="no samples"):
            Batches(Packing(8)([[], []]), Job(global_batch=1), Strategy())
