"""Ranks with unequal numbers of batches and of forwards: no hang, and the numbers of the rows that there are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright import ConfigError, MeanLoss, RankFailure
from meshwright.runtime import Engine, global_rank
from meshwright.spec import Job, Strategy
from tests.harness.every import every
from tests.harness.hugging_face import make_model
from tests.harness.ranks import run_one, run_ranks

FLOAT64 = {"param_dtype": "float64", "compute_dtype": "float64", "reduce_dtype": "float64"}
#: Rows of each batch that each rank is handed, of the 4 that are its share.
HANDED = ((4, 4, 3), (4, 1), (2, 4, 4, 1))
LOSS = MeanLoss(F.cross_entropy, weight=lambda labels: labels.numel())


class Branching(nn.Module):
    """A model with a parameter that rows with a positive first feature use, and none else."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.extra = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = inputs + torch.tanh(block(inputs))
        if bool((inputs[:, 0] > 1e6).any()):
            inputs = self.extra(inputs)
        return self.head(inputs)


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Branching().double()


def rows_for(rank: int, index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + index)
    count = HANDED[rank][index]
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 11, (count,), generator=generator)


def uneven(zero: int) -> tuple[list[tuple[float, float, float]], dict[str, Tensor], int]:
    ranks = torch.distributed.get_world_size()
    engine = Engine(
        model(),
        LOSS,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5),
        Job(global_batch=4 * ranks, **FLOAT64),
        Strategy(dp=ranks, zero=zero, microbatch=2),
        batch_scope="local",
    )
    rank = global_rank()
    reports = [
        (r.loss, r.weight, r.grad_norm) for r in engine.steps(rows_for(rank, i) for i in range(len(HANDED[rank])))
    ]
    return reports, whole(engine), engine.samples_seen


def whole(engine: Engine) -> dict[str, Tensor]:
    found = {name: p.detach() for name, p in engine.named_parameters().items()}
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.clone() for name, p in found.items()}


def one_process(ranks: int) -> tuple[list[tuple[float, float, float]], dict[str, Tensor], int]:
    made, seen = model(), 0
    optimizer, reports = torch.optim.AdamW(made.parameters(), lr=0.1, weight_decay=0.5), []
    for index in range(max(map(len, HANDED[:ranks]))):
        parts = [rows_for(rank, index) for rank in range(ranks) if index < len(HANDED[rank])]
        inputs, labels = (torch.cat(list(tensors)) for tensors in zip(*parts, strict=True))
        optimizer.zero_grad()
        loss = F.cross_entropy(made(inputs), labels)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in made.parameters() if p.grad is not None]).norm()
        reports.append((float(loss.detach()), float(len(labels)), float(norm)))
        optimizer.step()
        seen += len(labels)
    return reports, {name: p.detach() for name, p in made.named_parameters()}, seen


@pytest.mark.parametrize(("world", "zero"), every([()], [(2, 0), (3, 1), (3, 2), (2, 3), (3, 3)]))
def test_steps_over_unequal_numbers_of_batches_and_rows(world: int, zero: int) -> None:
    wanted, weights, samples = run_one(one_process, world)
    for reports, found, seen in run_ranks(world, uneven, zero):
        for name, weight in weights.items():
            difference = float((found[name] - weight).norm() / weight.norm())
            assert difference <= 1e-9, f"weight {name}: error {difference:.3g}"
        assert torch.equal(found["extra.weight"], model().extra.weight), "what no row used is not decayed"
        assert seen == samples
        for report, right in zip(reports, wanted, strict=True):
            assert report == pytest.approx(right, rel=1e-12)


def wrong(handed: int, scope: Any) -> str:
    engine = Engine(
        model(),
        LOSS,
        lambda p: torch.optim.SGD(p, lr=0.1),
        Job(global_batch=4, **FLOAT64),
        Strategy(dp=2),
        batch_scope=scope,
    )
    batches = (
        []
        if handed == 0 and global_rank()
        else [(torch.zeros(handed or 2, 6).double(), torch.zeros(handed or 2).long())]
    )
    with pytest.raises(ConfigError) as caught:
        list(engine.steps(batches))
    return str(caught.value)


def test_batches_that_no_step_can_take_are_refused_on_all_ranks() -> None:
    assert all("at most 2" in text for text in run_ranks(2, wrong, 3, "local"))
    assert all("at most 4" in text for text in run_ranks(2, wrong, 5, "global"))
    assert all("1 ranks were handed no batch" in text for text in run_ranks(2, wrong, 0, "local"))


# ------------------------------------------------------------------------------------------- forwards without training


def prompts(name: str, rank: int, count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [{"input_ids": torch.randint(4, 101, (1, 4 + rank), generator=generator)} for _ in range(count)]


def generated(name: str, zero: int, counts: tuple[int, ...], lengths: tuple[int, ...]) -> list[list[int]]:
    """Each rank generates other numbers of texts, of other lengths; then all train."""
    ranks, rank = torch.distributed.get_world_size(), global_rank()
    engine = Engine(
        make_model(name, tied=True, dtype=torch.float64),
        loss_of_logits,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        Job(global_batch=ranks, **FLOAT64),
        Strategy(dp=ranks, zero=zero, prefetch=int(zero == 3)),
    )
    texts = []
    with engine.inference() as made:
        for prompt in prompts(name, rank, counts[rank]):
            texts.append(made.generate(**prompt, **options(lengths[rank])).flatten().tolist())
    ids = torch.arange(4, 4 + 5 * ranks).view(ranks, 5)
    batch = {"input_ids": ids, "labels": ids}
    engine.step(batch | {"decoder_input_ids": ids} if name == "t5" else batch)
    return texts


def options(length: int) -> dict[str, Any]:
    return {"min_new_tokens": length, "max_new_tokens": length, "do_sample": False, "use_cache": True}


def loss_of_logits(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    logits, labels = outputs.logits.flatten(0, 1), batch["labels"].flatten()
    return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()


def generated_alone(name: str, counts: tuple[int, ...], lengths: tuple[int, ...]) -> list[list[list[int]]]:
    made = make_model(name, tied=True, dtype=torch.float64).eval()
    return [
        [made.generate(**prompt, **options(length)).flatten().tolist() for prompt in prompts(name, rank, count)]
        for rank, (count, length) in enumerate(zip(counts, lengths, strict=True))
    ]


@pytest.mark.parametrize(
    ("name", "zero", "counts", "lengths"),
    [
        ("llama", 3, (3, 1), (2, 9)),
        ("llama", 1, (2, 0), (3, 5)),
        ("t5", 3, (1, 0, 2), (7, 1, 3)),
        ("t5", 2, (2, 1), (3, 5)),
    ],
)
def test_E4_ranks_generate_texts_of_unequal_numbers_and_lengths(
    name: str, zero: int, counts: tuple[int, ...], lengths: tuple[int, ...]
) -> None:
    wanted = run_one(generated_alone, name, counts, lengths)
    assert run_ranks(len(counts), generated, name, zero, counts, lengths) == wanted


def fails_inside(zero: int) -> str:
    ranks = torch.distributed.get_world_size()
    engine = Engine(
        model(),
        LOSS,
        lambda p: torch.optim.SGD(p, lr=0.1),
        Job(global_batch=ranks, **FLOAT64),
        Strategy(dp=ranks, zero=zero),
    )
    said = "nothing"
    try:
        with engine.inference() as made:
            if global_rank() == 0:
                raise ValueError("a mistake between two forwards")
            for _ in range(3):
                made(torch.zeros(2, 6).double())
    except ValueError as error:
        said = str(error)
    return said


def test_E4_a_rank_that_fails_lets_the_others_end() -> None:
    assert run_ranks(2, fails_inside, 3) == ["a mistake between two forwards", "nothing"]


# ------------------------------------------------------------------------------------- parts, mistakes, nested contexts


def parts_then_step(zero: int, together: int, first: str) -> tuple[float, float]:
    """Something odd inside `inference` on rank 0 alone, then a step."""
    ranks, blocks = torch.distributed.get_world_size(), [f"blocks.{index}" for index in range(4)]
    job = Job(global_batch=2 * ranks, **FLOAT64)
    layout = Strategy(dp=ranks, zero=zero, microbatch=2, unit_blocks=together)
    engine = Engine(model(), LOSS, lambda p: torch.optim.SGD(p, lr=0.1), job, layout, blocks=blocks)
    generator = torch.Generator().manual_seed(1)
    rows = (
        torch.randn(2 * ranks, 6, generator=generator).double(),
        torch.randint(0, 11, (2 * ranks,), generator=generator),
    )
    engine.step(rows)
    with contextlib.suppress(ZeroDivisionError), engine.inference() as made:
        if global_rank() == 0 and first == "a block":
            made.blocks[1](rows[0])
        elif global_rank() == 0 and first == "raises":
            with mock.patch.object(made.blocks[2], "forward", side_effect=ZeroDivisionError):
                made(rows[0])
        elif first == "nested":
            engine.evaluate([rows])
            for _ in range(1 + global_rank()):
                made(rows[0])
    report = engine.step(rows)
    return report.loss, report.grad_norm


@pytest.mark.parametrize(
    ("zero", "together", "first"),
    [(3, 2, "a block"), (2, 2, "a block"), (3, 1, "raises"), (2, 1, "raises"), (3, 1, "nested"), (0, 1, "nested")],
)
def test_whatever_was_called_between_steps_the_next_step_is_right(zero: int, together: int, first: str) -> None:
    wanted = run_ranks(2, parts_then_step, 0, 1, "nothing")[0]
    for found in run_ranks(2, parts_then_step, zero, together, first):
        assert found == pytest.approx(wanted, rel=1e-12)


def step_inside() -> str:
    engine = Engine(model(), LOSS, lambda p: torch.optim.SGD(p, lr=0.1), Job(global_batch=4, **FLOAT64), Strategy())
    with engine.inference(), pytest.raises(ConfigError) as caught:
        engine.step((torch.zeros(4, 6).double(), torch.zeros(4).long()))
    engine.step((torch.zeros(4, 6).double(), torch.zeros(4).long()))
    return str(caught.value)


def test_a_step_inside_of_inference_is_refused() -> None:
    assert "a step inside of engine.inference()" in run_one(step_inside)


def failing_batches(where: str) -> list[str]:
    """Rank 1's batches raise: both ranks end, and rank 1 with its own error."""
    said = []
    for zero in (0, 3):
        job = Job(global_batch=4, **FLOAT64)
        engine = Engine(
            model(), LOSS, lambda p: torch.optim.SGD(p, lr=0.1), job, Strategy(dp=2, zero=zero), batch_scope="local"
        )

        def batches() -> Iterator[Any]:
            yield torch.zeros(2, 6).double(), torch.zeros(2).long()
            if global_rank() == 1:
                raise KeyError("a broken sample")
            yield torch.zeros(2, 6).double(), torch.zeros(2).long()

        with pytest.raises((KeyError, RankFailure)) as caught:
            list(engine.steps(batches())) if where == "steps" else engine.evaluate(batches())
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("where", ["steps", "evaluate"])
def test_batches_that_raise_on_one_rank_end_all(where: str) -> None:
    others, own = run_ranks(2, failing_batches, where)
    assert all("failed on 1 other ranks" in text for text in others)
    assert all("a broken sample" in text for text in own)


def other_numbers() -> str:
    job = Job(global_batch=4, **FLOAT64)
    engine = Engine(model(), LOSS, lambda p: torch.optim.SGD(p, lr=0.1), job, Strategy(dp=2))
    whole = torch.zeros(4, 6).double(), torch.zeros(4).long()
    with pytest.raises(ConfigError) as caught:
        list(engine.steps([whole, whole] if global_rank() == 0 else [whole]))
    return str(caught.value)


def test_global_batches_that_differ_between_ranks_are_refused() -> None:
    assert all("other numbers of rows than each other" in text for text in run_ranks(2, other_numbers))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(2))
        self.head = nn.Linear(6, 11)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return self.head(inputs)


def dropped(scope: Any) -> list[float]:
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    torch.manual_seed(0)
    job = Job(global_batch=8, **FLOAT64)
    layout = Strategy(dp=ranks, microbatch=2)
    engine = Engine(Dropping().double(), LOSS, lambda p: torch.optim.SGD(p, lr=0.1), job, layout, batch_scope=scope)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(8, 6, generator=generator).double(), torch.randint(0, 11, (8,), generator=generator)
    return [report.loss for report in engine.steps([rows, tuple(part[:5] for part in rows)])]


def test_dropout_of_short_batches_does_not_depend_on_the_layout() -> None:
    wanted = run_one(dropped, "global")
    for found in run_ranks(2, dropped, "global"):
        assert found == pytest.approx(wanted, rel=1e-12)
