"""The user's own data under ZeRO: however it is padded or packed, the numbers are those of each sequence alone."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright import Batches, Engine, Job, ModelLoss, Packing, Padding, Strategy
from meshwright.measure.equality.float64 import float32_upcasts_stay_float64
from meshwright.measure.equality.tolerance import FLOAT64
from tests.harness.every import some
from tests.harness.hugging_face import make_model
from tests.harness.ranks import run_one, run_ranks

Result = tuple[float, float, dict[str, Tensor]]
#: What computes attention, and what is done with the sequences.
Scene = tuple[str, str]

#: Odd lengths; one is longer than a packed row, two have nothing that a causal model learns.
LENGTHS = (5, 3, 9, 1, 7, 2, 11, 4, 30, 6, 13, 8, 1, 10, 3, 12, 5, 9)
ROW, ROWS = 16, 12


def job(global_batch: int) -> Job:
    return Job(
        global_batch=global_batch, param_dtype="float64", compute_dtype="float64", reduce_dtype="float64", seed=2
    )


def sequences() -> list[dict[str, Any]]:
    """Sequences of all these lengths; every third with an instruction that is not learned."""
    generator = torch.Generator().manual_seed(4)
    found: list[dict[str, Any]] = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(3, 101, (length,), generator=generator).tolist()
        found.append({"input_ids": ids, "prompt_length": length // 2 if number % 3 == 0 else 0})
    return found


def model(name: str, attention: str) -> nn.Module:
    made = make_model(name, tied=name == "gpt2", dtype=torch.float64)
    made.set_attn_implementation(attention)  # type: ignore[operator]
    return made


def one_by_one(name: str, longest: int) -> Result:
    """Each sequence (cut as packing cuts it) by itself: the loss over all labels, their number, the gradients."""
    made = model(name, "eager")
    total, weight = 0.0, 0
    for sequence in sequences():
        for begin in range(0, len(sequence["input_ids"]), longest):
            ids = torch.tensor([sequence["input_ids"][begin : begin + longest]])
            places = torch.arange(begin, begin + ids.shape[1])
            labels = ids.masked_fill(places < sequence["prompt_length"], -100)
            count = int((labels[:, 1:] != -100).sum())
            if count == 0:
                continue
            with float32_upcasts_stay_float64():
                loss = made(input_ids=ids, labels=labels).loss * count
                loss.backward()
            total, weight = total + float(loss.detach()), weight + count
    return total / weight, weight, {k: p.grad / weight for k, p in made.named_parameters() if p.grad is not None}


def data_of(attention: str, how: str) -> tuple[Any, Any]:
    """The sequences as this kind of data, and what collates them."""
    if how.startswith("padded"):
        return sequences(), Padding(multiple=5, side="left" if how == "padded left" else "right")
    attention = {"packed by positions": "positions", "packed with a mask that does nothing": "sdpa"}.get(how, attention)
    return Packing(ROW, attention=attention)(sequences()), None  # type: ignore[arg-type]


def in_scenes(name: str, zero: int, scenes: list[Scene]) -> list[Result]:
    return [by_engine(name, zero, *scene) for scene in scenes]


def by_engine(name: str, zero: int, attention: str, how: str) -> Result:
    """A step over all sequences in one global batch: its loss, weight and whole gradients."""
    dp = torch.distributed.get_world_size()
    rows = ROWS if how.startswith("packed") else len(LENGTHS)
    strategy = Strategy(dp=dp, zero=zero, microbatch=rows // dp)
    data, collate = data_of(attention, how)
    batches = Batches(data, job(rows), strategy, collate=collate)
    assert len(batches) == 1
    engine = Engine(
        model(name, attention),
        ModelLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        job(rows),
        strategy,
        batch_scope="local",
        measure_memory="never",
    )
    seen: dict[str, Tensor] = {}

    def keep(gradients: dict[str, Tensor | None]) -> None:
        found = {key: value for key, value in gradients.items() if value is not None}
        seen.update({k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in found.items()})

    engine.on_gradients = keep
    (batch,) = batches
    if how == "packed without a mask":
        batch = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    with float32_upcasts_stay_float64():
        report = engine.step(batch)
    return report.loss, report.weight, seen


def norm(tensor: Any) -> float:
    return float(torch.linalg.vector_norm(tensor))


def error_of(result: Result, wanted: Result) -> float:
    """The largest error over its tolerance, of the loss and of each gradient (`measure.equality.tolerance`)."""
    return max(errors_of(result, wanted).values())


def errors_of(result: Result, wanted: Result) -> dict[str, float]:
    """By what they are of."""
    (loss, weight, gradients), (right, count, expected) = result, wanted
    assert weight == count, "labels that count"
    assert gradients.keys() == expected.keys()
    whole = norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in expected.values()]))
    bounds = {k: FLOAT64.gradient * norm(g) + FLOAT64.gradient_floor * whole for k, g in expected.items()}
    errors = {k: norm(gradients[k] - g) / bounds[k] for k, g in expected.items()}
    return errors | {"loss": abs(loss - right) / right / FLOAT64.scalar}


def check(name: str, zero: int, dp: int, scenes: list[Scene]) -> None:
    """Every rank has the numbers of each sequence alone, in every scene."""
    found = run_ranks(dp, in_scenes, name, zero, scenes)
    for number, scene in enumerate(scenes):
        wanted = run_one(one_by_one, name, ROW if scene[1].startswith("packed") else 64)
        for results in found:
            for name_of, error in errors_of(results[number], wanted).items():
                assert error <= 1, f"{scene}: error of {name_of}"


@pytest.mark.parametrize(("dp", "zero"), some([(2, 0), (3, 1), (2, 2), (3, 3)], product((2, 3), (0, 1, 2, 3))))
def test_ranks_may_pad_to_their_own_longest(dp: int, zero: int) -> None:
    """Other ranks' lengths, and all padding, change nothing: the loss is over all labels, wherever they stand."""
    check("llama", zero, dp, [("sdpa", "padded"), ("sdpa", "packed")])


def test_padding_everything_together_is_the_same() -> None:
    check("llama", 0, 1, [("sdpa", "padded")])


@pytest.mark.parametrize(("name", "zero"), some([("llama", 3), ("gpt2", 0)], [("llama", 0), ("gpt2", 3)]))
def test_packed_documents_are_alone(name: str, zero: int) -> None:
    """Losses and gradients of rows are those of each document in a run of its own, whatever computes attention."""
    hows = ("packed", "packed by positions", "padded left")
    check(name, zero, 2, [(attention, how) for how in hows for attention in ("sdpa", "eager")])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_attention_across_documents_would_show(name: str) -> None:
    faults = [("sdpa", "packed without a mask"), ("eager", "packed with a mask that does nothing")]
    for result in run_ranks(2, in_scenes, name, 0, faults)[0]:
        assert error_of(result, run_one(one_by_one, name, ROW)) > 1e6
