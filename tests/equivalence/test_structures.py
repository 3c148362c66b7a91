"""Any module (outputs, inputs, frozen, shared, repeated, unused weights) as in one process, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright import ConfigError, MeanLoss, RankFailure
from meshwright.runtime import Engine, global_rank
from meshwright.spec import Job, Strategy
from tests.equivalence.structures import CASES, Case, Model, loss
from tests.harness.every import every
from tests.harness.ranks import run_one, run_ranks

JOB = {"param_dtype": "float64", "compute_dtype": "float64", "reduce_dtype": "float64"}
Steps = list[tuple[float, dict[str, Tensor]]]


def built(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return CASES[name].model().double()


def engine(model: nn.Module, rule: Any, global_batch: int, **layout: Any) -> Engine:
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    job = Job(global_batch=global_batch, **JOB)
    return Engine(model, rule, lambda p: torch.optim.SGD(p, lr=0.1), job, Strategy(dp=ranks, **layout))


def train(made: Engine, batches: list[Any]) -> Steps:
    found: Steps = []

    def keep(gradients: dict[str, Tensor | None]) -> None:
        kept = {key: value for key, value in gradients.items() if value is not None}
        found.append((0.0, {k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in kept.items()}))

    made.on_gradients = keep
    losses = [made.step(batch).loss for batch in batches]
    return [(loss, gradients) for loss, (_, gradients) in zip(losses, found, strict=True)]


def by_engine(name: str, zero: int, recompute: str) -> Steps:
    case: Case = CASES[name]
    made = engine(built(name), loss, 6, zero=zero, recompute=recompute)
    return train(made, [case.rows(6, seed) for seed in (1, 2)])


def in_one_piece(name: str) -> Steps:
    case, model, steps = CASES[name], built(name), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in (1, 2):
        optimizer.zero_grad()
        batch = case.rows(6, seed)
        if isinstance(batch, dict):
            outputs, targets = model(**{key: value for key, value in batch.items() if key != "labels"}), batch
        else:
            inputs, targets = batch
            outputs = (
                model(**inputs)
                if isinstance(inputs, dict)
                else model(*(inputs if isinstance(inputs, tuple) else (inputs,)))
            )
        total, weight = loss(outputs, targets)
        (total / weight).backward()
        steps.append(
            (
                float(total.detach()) / weight,
                {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None},
            )
        )
        optimizer.step()
    return steps


def same(found: Steps, wanted: Steps) -> None:
    for (value, gradients), (right, expected) in zip(found, wanted, strict=True):
        assert gradients.keys() == expected.keys()
        floor = 1e-14 * float(torch.stack([g.norm() for g in expected.values()]).norm())
        for name, gradient in expected.items():
            assert float((gradients[name] - gradient).norm()) <= 1e-10 * float(gradient.norm()) + floor, name
        assert value == pytest.approx(right, rel=1e-12)


IN_TURN = (("none", 2, 0), ("none", 3, 1), ("full", 2, 2), ("none", 3, 3), ("full", 2, 3))
SPREAD = {(name, *IN_TURN[index % 5]) for index, name in enumerate(CASES)} | {(name, "none", 3, 3) for name in CASES}
BOTH = [(name, recompute) for name in CASES for recompute in ("none", "full")]


@pytest.mark.parametrize(("name", "recompute", "world", "zero"), every(BOTH, sorted(SPREAD)))
def test_models_of_any_structure(name: str, recompute: str, world: int, zero: int) -> None:
    wanted = run_one(in_one_piece, name)
    assert "never.weight" not in wanted[0][1]
    assert "blocks.0.frozen.weight" not in wanted[0][1]
    for steps in run_ranks(world, by_engine, name, zero, recompute):
        same(steps, wanted)


def mixed(zero: int) -> tuple[Steps, set[str]]:
    """A model whose second half is bfloat16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9).bfloat16(), nn.Linear(9, 7).bfloat16())
    made = engine(model, CLASSIFY, 6, zero=zero)
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(6, 6, generator=generator).double(), torch.randint(0, 7, (6,), generator=generator)
    return train(made, [batch, batch]), {str(p.dtype) for p in made.model.parameters()}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_weights_of_several_dtypes_are_stored_in_one(zero: int) -> None:
    wanted, _ = run_one(mixed, 0)
    for steps, dtypes in run_ranks(2, mixed, zero):
        same(steps, wanted)
        assert dtypes == {"torch.float64"}


def opaque(zero: int) -> str:
    torch.manual_seed(0)
    made = engine(Model("opaque").double(), loss, 6, zero=zero)
    try:
        return str(made.step(CASES["tensor"].rows(6, 1)).skipped)
    except ConfigError as error:
        return str(error)


def test_E6_outputs_that_hooks_do_not_reach_are_refused() -> None:
    assert all("returns tensors inside a Opaque" in text for text in run_ranks(2, opaque, 3))
    assert run_ranks(2, opaque, 0) == ["False", "False"]


# ------------------------------------------------------------------------------------------------------ rows together


class Normalised(nn.Module):
    """Convolutions with batch norms."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3, momentum=momentum), nn.Tanh())
            for _ in range(4)
        )
        self.pool = nn.BatchNorm1d(3, affine=False)
        self.head = nn.Linear(3, 7)

    def forward(self, pictures: Tensor) -> Tensor:
        for block in self.blocks:
            pictures = block(pictures)
        return self.head(self.pool(pictures.mean((2, 3))))


def normalised(momentum: float | None) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Normalised(momentum).double()


def pictures(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(12, 3, 5, 5, generator=generator).double(), torch.randint(0, 7, (12,), generator=generator)


CLASSIFY = MeanLoss(F.cross_entropy, weight=len)


def synchronised(zero: int, momentum: float | None) -> tuple[Steps, dict[str, Tensor], float]:
    made = engine(nn.SyncBatchNorm.convert_sync_batchnorm(normalised(momentum)), CLASSIFY, 12, zero=zero, microbatch=2)
    steps = train(made, [pictures(1), pictures(2)])
    return steps, {k: b.clone() for k, b in made.model.named_buffers()}, made.evaluate([pictures(3)])


def together(ranks: int, momentum: float | None) -> tuple[Steps, dict[str, Tensor], float]:
    """One process takes at once what the ranks take at the same time: their first microbatches, then their second."""
    made = engine(normalised(momentum), CLASSIFY, 12, microbatch=2 * ranks)
    order = torch.arange(12).view(ranks, -1, 2).transpose(0, 1).flatten()
    steps = train(made, [tuple(part[order] for part in pictures(seed)) for seed in (1, 2)])
    return steps, {k: b.clone() for k, b in made.model.named_buffers()}, made.evaluate([pictures(3)])


NORMS = every([(0.1,), (None,)], [(0.1, 2, 0), (None, 3, 1), (0.1, 2, 2), (0.1, 3, 3)])


@pytest.mark.parametrize(("momentum", "world", "zero"), NORMS)
def test_batch_norms_over_the_rows_of_all_ranks(momentum: float | None, world: int, zero: int) -> None:
    wanted, buffers, value = run_one(together, world, momentum)
    for steps, found, evaluated in run_ranks(world, synchronised, zero, momentum):
        same(steps, wanted)
        assert evaluated == pytest.approx(value, rel=1e-12)
        for name, buffer in buffers.items():
            torch.testing.assert_close(found[name], buffer, rtol=1e-12, atol=1e-14)


def uneven_pictures() -> str:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(normalised(0.1))
    made = engine(model, CLASSIFY, 12, microbatch=2)
    made.batch_scope = "local"
    count = 6 if global_rank() == 0 else 5
    with pytest.raises(ConfigError) as caught:
        list(made.steps([tuple(part[:count] for part in pictures(1))]))
    return str(caught.value)


def test_batch_norms_refuse_what_would_change_their_numbers() -> None:
    assert all("1 ranks have less than 6 rows" in text for text in run_ranks(2, uneven_pictures))
    with pytest.raises(ConfigError, match="updates its running statistics twice"):
        engine(normalised(0.1), CLASSIFY, 12, recompute="full")


def contrastive(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    scores = outputs.flatten(1) @ outputs.flatten(1).T
    return F.cross_entropy(scores, torch.arange(len(outputs)), reduction="sum"), len(outputs)


def mean_of_a_microbatch(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs, targets), 1


def with_a_penalty(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs, targets, reduction="sum") + 5.0, len(targets)


def drawing(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(F.dropout(outputs, 0.5), targets, reduction="sum"), len(targets)


def classified() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 6, generator=generator).double(), torch.randint(0, 7, (8,), generator=generator)


@pytest.mark.parametrize(
    ("rule", "says"), [(contrastive, "has the sum"), (mean_of_a_microbatch, "has the"), (with_a_penalty, "has the sum")]
)
def test_losses_that_depend_on_what_is_looked_at_together_are_refused(rule: Any, says: str) -> None:
    torch.manual_seed(0)
    made = engine(nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 7)).double(), rule, 8, microbatch=4)
    before = {name: p.detach().clone() for name, p in made.named_parameters().items()}
    with pytest.raises(ConfigError, match="the loss of two rows has the"):
        made.step(classified())
    assert all(torch.equal(before[name], p) for name, p in made.named_parameters().items())


def test_losses_that_can_be_taken_apart_are_not() -> None:
    torch.manual_seed(0)
    for rule in (drawing, CLASSIFY, MeanLoss(lambda o, t: F.cross_entropy(o, t) + 5.0, weight=len)):
        made = engine(nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 7)).double(), rule, 8, microbatch=4)
        assert not made.step(classified()).skipped


def refused_on_one() -> str:
    """Rank 1 has one row, so it cannot try the loss; it is told."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 7)).double()
    made = engine(model, contrastive, 8, microbatch=4)
    made.batch_scope = "local"
    rows = tuple(part[: 4 if global_rank() == 0 else 1] for part in classified())
    with pytest.raises((ConfigError, RankFailure)) as caught:
        list(made.steps([rows]))
    return str(caught.value)


def test_a_loss_that_one_rank_refuses_ends_all() -> None:
    first, second = run_ranks(2, refused_on_one)
    assert "the loss of two rows has the" in first
    assert "failed on 1 other ranks" in second


def test_a_loss_may_say_that_it_is_additive() -> None:
    torch.manual_seed(0)

    def timed(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return F.cross_entropy(outputs, targets, reduction="sum") + 5.0, len(targets)

    timed.additive = True  # type: ignore[attr-defined]
    made = engine(nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 7)).double(), timed, 8, microbatch=4)
    assert not made.step(classified()).skipped


def norm_kinds(kind: str) -> str:
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    torch.manual_seed(0)
    norm = {
        "plain": nn.BatchNorm1d(6),
        "untracked": nn.SyncBatchNorm(6, track_running_stats=False),
        "instance": nn.InstanceNorm1d(6, track_running_stats=True),
        "frozen": nn.BatchNorm1d(6).eval(),
        "narrow": nn.SyncBatchNorm(6),
        "plain, narrow": nn.BatchNorm1d(6),
    }[kind]
    model = nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 7))
    compute = "bfloat16" if "narrow" in kind else "float32"
    recompute = "full" if kind == "frozen" else "none"
    job, layout = Job(global_batch=8, compute_dtype=compute), Strategy(dp=ranks, microbatch=4, recompute=recompute)  # type: ignore[arg-type]
    rows = tuple(part.float() if part.is_floating_point() else part for part in classified())
    try:
        made = Engine(model, CLASSIFY, lambda p: torch.optim.SGD(p, lr=0.1), job, layout)
        return f"{made.step(rows).skipped} {made.evaluate([rows]) > 0}"
    except ConfigError as error:
        return str(error)


def test_kinds_of_norms_on_two_ranks() -> None:
    said = {
        "plain": "SyncBatchNorm.convert_sync_batchnorm",
        "untracked": "keeps no running statistics",
        "instance": "track_running_stats=False",
        "frozen": "False True",
        "narrow": "False True",
    }
    for kind, text in said.items():
        assert all(text in found for found in run_ranks(2, norm_kinds, kind)), kind
    assert run_ranks(1, norm_kinds, "narrow") == ["False True"]
    assert run_one(norm_kinds, "plain, narrow") == "False True"
