"""Padding, labels and instruction masks; stacking."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright import Batches, ConfigError, DataError, Job, Padding, Strategy, pad, prompt_mask
from meshwright.train.collate import stack

KINDS = [list, tuple, np.array, torch.tensor, lambda ids: torch.tensor(ids, dtype=torch.int32)]


def lists(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {key: value.tolist() for key, value in batch.items()}


class TestPadding:
    @pytest.mark.parametrize("kind", KINDS)
    def test_ids_mask_and_labels(self, kind: Any) -> None:
        batch = pad([{"input_ids": kind([5, 6, 7])}, {"input_ids": kind([8])}], pad_token=9)
        assert lists(batch) == {
            "input_ids": [[5, 6, 7], [8, 9, 9]],
            "labels": [[5, 6, 7], [8, -100, -100]],
            "attention_mask": [[1, 1, 1], [1, 0, 0]],
        }
        assert {value.dtype for value in batch.values()} == {torch.int64}

    def test_what_is_there_is_kept(self) -> None:
        samples = [
            {"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0], "token_type_ids": [0, 1, 1]},
            {"input_ids": [8], "attention_mask": [1], "token_type_ids": [1]},
        ]
        assert lists(pad(samples)) == {
            "input_ids": [[5, 6, 0], [8, 0, 0]],
            "attention_mask": [[1, 1, 0], [1, 0, 0]],
            "token_type_ids": [[0, 1, 1], [1, 0, 0]],
            "labels": [[5, 6, -100], [8, -100, -100]],
        }
        given = pad([{"input_ids": [5, 6], "labels": [-1, 3]}, {"input_ids": [7], "labels": [4]}], ignore=-1)
        assert given["labels"].tolist() == [[-1, 3], [4, -1]]

    def test_sides_and_multiples(self) -> None:
        batch = pad([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}], side="left", multiple=4)
        assert lists(batch) == {
            "input_ids": [[0, 5, 6, 7], [0, 0, 0, 8]],
            "labels": [[-100, -100, 6, 7], [-100, -100, -100, -100]],
            "attention_mask": [[0, 1, 1, 1], [0, 0, 0, 1]],
            "position_ids": [[0, 0, 1, 2], [0, 0, 0, 0]],
        }

    def test_instructions_are_not_learned(self) -> None:
        samples = [{"input_ids": [5, 6, 7], "prompt_length": 2}, {"input_ids": [8, 9], "prompt_length": 0}]
        batch = pad(samples)
        assert batch["labels"].tolist() == [[-100, -100, 7], [8, 9, -100]]
        assert set(batch) == {"input_ids", "labels", "attention_mask"}
        masked = [{"input_ids": [5, 6, 7], "completion_mask": [0, 1, 0]}, {"input_ids": [8], "completion_mask": [1]}]
        assert pad(masked)["labels"].tolist() == [[-100, 6, -100], [8, -100, -100]]
        assert pad([prompt_mask({"input_ids": [5, 6, 7]}, 1)])["labels"].tolist() == [[-100, 6, 7]]
        assert prompt_mask({"input_ids": [5, 6], "labels": [1, 2], "id": 3}, 1)["id"] == 3

    def test_labels_may_be_left_alone(self) -> None:
        assert set(pad([{"input_ids": [5]}], labels=False)) == {"input_ids", "attention_mask"}
        classes = pad([{"input_ids": [5, 6], "labels": 2}, {"input_ids": [7], "labels": 0}])
        assert classes["labels"].tolist() == [2, 0]
        other = pad([{"input_ids": [5, 6], "labels": [1]}, {"input_ids": [7], "labels": [2, 3, 4]}])
        assert other["labels"].tolist() == [[1, -100, -100], [2, 3, 4]]

    def test_other_keys_are_per_token_or_stacked(self) -> None:
        samples = [
            {"input_ids": [5, 6, 7], "speaker": [1, 1, 2], "picture": np.ones((2, 2)), "weight": 0.5},
            {"input_ids": [8], "speaker": [3], "picture": np.zeros((2, 2)), "weight": 2},
        ]
        batch = pad(samples)
        assert batch["speaker"].tolist() == [[1, 1, 2], [3, 0, 0]]
        assert batch["picture"].shape == (2, 2, 2)
        same = [{"input_ids": [5, 6], "vector": [0.5, 1.5]}, {"input_ids": [7, 8], "vector": [0.0, 0.0]}]
        assert pad(same, multiple=4)["vector"].shape == (2, 4)
        assert pad(same, multiple=4, per_token=())["vector"].shape == (2, 2)

    def test_it_can_be_sent_to_workers(self) -> None:
        padding = pickle.loads(pickle.dumps(Padding(pad_token=4)))  # noqa: S301  just made
        assert padding([{"input_ids": [1]}, {"input_ids": [1, 2]}])["input_ids"].tolist() == [[1, 4], [1, 2]]
        data = [{"input_ids": list(range(1, 2 + n % 5))} for n in range(16)]
        made = [Batches(data, Job(global_batch=4), Strategy(), collate=padding, workers=n) for n in (0, 1)]
        for one, other in zip(*made, strict=True):
            assert lists(one) == lists(other)

    @given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), multiple=st.integers(1, 5))
    @settings(max_examples=40, deadline=None)
    def test_unpadded_it_is_what_it_was(self, lengths: list[int], multiple: int) -> None:
        samples = [[10 * row + token for token in range(length)] for row, length in enumerate(lengths)]
        for side in ("left", "right"):
            batch = pad([{"input_ids": ids} for ids in samples], multiple=multiple, side=side)  # type: ignore[arg-type]
            width = batch["input_ids"].shape[1]
            assert width % multiple == 0
            assert max(lengths) <= width < max(lengths) + multiple
            for row, ids in enumerate(samples):
                assert batch["input_ids"][row][batch["attention_mask"][row] == 1].tolist() == ids
                learned = batch["labels"][row][batch["labels"][row] != -100].tolist()
                assert learned == (ids[1:] if side == "left" else ids)

    @pytest.mark.parametrize(
        ("sample", "text"),
        [
            ([1, 2], "row 1: a sample without input_ids .list"),
            ({"text": "a"}, "row 1: a sample without input_ids .the keys text"),
            ({"input_ids": "abc"}, "row 1: 'input_ids' is no number"),
            ({"input_ids": [0.5]}, "row 1: input_ids of shape .1. and dtype torch.float32"),
            ({"input_ids": [[1, 2]]}, r"row 1: input_ids of shape .1, 2."),
            ({"input_ids": [[1], [1, 2]]}, "lists of different lengths"),
            ({"input_ids": [1], "text": "a"}, "row 1: 'text' is no number"),
            ({"input_ids": [1], "id": 3}, "row 1 is another kind of sample than row 0"),
            ({"input_ids": [1, 2], "attention_mask": [1]}, "row 1 is another kind"),
            ({"input_ids": [1], "prompt_length": 2}, "row 1: prompt_length 2 for 1 tokens"),
            ({"input_ids": [1], "completion_mask": [1, 0]}, "row 1: completion_mask of shape .2. for 1 tokens"),
            ({"input_ids": [1], "labels": 3, "prompt_length": 1}, "row 1: prompt_length 1 for 1 tokens and labels"),
        ],
    )
    def test_wrong_samples(self, sample: Any, text: str) -> None:
        with pytest.raises(DataError, match=text):
            pad([{"input_ids": [1, 2, 3]}, sample])

    def test_columns_that_do_not_fit(self) -> None:
        with pytest.raises(DataError, match=r"row 1: attention_mask has shape .1. for 2 tokens"):
            pad([{"input_ids": [1], "attention_mask": [1]}, {"input_ids": [1, 2], "attention_mask": [1]}])
        with pytest.raises(DataError, match=r"'extra' has shape .3. in row 0 and .2. in row 1"):
            pad([{"input_ids": [1], "extra": [1, 2, 3]}, {"input_ids": [1], "extra": [1, 2]}])
        with pytest.raises(DataError, match=r"row 0: speaker has shape .2. for 1 tokens"):
            pad([{"input_ids": [1], "speaker": [1, 2]}], per_token=["speaker"])

    @pytest.mark.parametrize("options", [{"multiple": 0}, {"multiple": True}, {"side": "top"}])
    def test_wrong_options(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=next(iter(options))):
            Padding(**options)


class TestStacking:
    def test_pairs_mappings_and_arrays(self) -> None:
        inputs, targets = stack([([0.5, 1.0], 1), ([2.0, 3.0], 0)])
        assert (inputs.dtype, inputs.tolist(), targets.tolist()) == (torch.float32, [[0.5, 1.0], [2.0, 3.0]], [1, 0])
        inputs, targets = stack([[torch.ones(2), 1], [torch.zeros(2), 0]])
        assert (inputs.shape, targets.shape) == ((2, 2), (2,))
        assert stack([np.ones(3), np.ones(3)]).dtype == torch.float64
        assert stack([{"a": {"b": [1, 2]}}] * 3)["a"]["b"].tolist() == [[1, 2]] * 3

    def test_different_lengths_ask_for_padding(self) -> None:
        with pytest.raises(DataError, match="rows 0 and 1 have different shapes") as caught:
            stack([{"input_ids": [1, 2]}, {"input_ids": [1]}])
        assert "collate=Padding()" in caught.value.fix
