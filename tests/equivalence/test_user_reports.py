"""What users of other frameworks reported about losses, gradients and clipping; each test names its report."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import ConfigError, UnsupportedCombination
from meshwright.measure.equality.records import Run, join
from meshwright.measure.equality.tolerance import distance
from meshwright.runtime import Engine
from meshwright.spec import Strategy
from tests.harness.cases import (
    STEPS,
    Case,
    assert_equal,
    build_engine,
    check,
    make_optimizer,
    run_case,
    run_engine,
    train,
    train_many,
)
from tests.harness.every import some
from tests.harness.models import VALID_TOKENS, builder, loss_of
from tests.harness.plain import run_plain
from tests.harness.ranks import run_one, run_ranks

STAGES = (0, 1, 2, 3)


def one_batch(case: Case) -> Run:
    """The case's global batch in one piece, in plain PyTorch, from the same initial weights."""
    reference = run_one(run_case, case.reference)
    return run_one(run_plain, case, reference.initial, True)


def check_against_one_batch(case: Case) -> None:
    plain = one_batch(case)
    assert_equal(case, train(case), plain)


@pytest.mark.parametrize("zero", STAGES)
def test_D1_unequal_microbatches_weigh_by_their_tokens(zero: int) -> None:
    """Mean of means: microbatches of 11, 101, 7 and 64 tokens must count as 183 tokens, not as four quarters."""
    case = Case(world=2, accumulation=2, zero=zero)
    plain = one_batch(case)
    assert [step.weight for step in plain.steps] == [sum(VALID_TOKENS)] * STEPS
    check_against_one_batch(case)


@pytest.mark.parametrize(("world", "zero"), some([(2, 3), (3, 1), (3, 2), (4, 0)], [(4, 3)]))
def test_D2_ranks_with_few_tokens_weigh_little(world: int, zero: int) -> None:
    """Mean per rank, then mean over ranks: the gradient must be the sum over all tokens divided by their number."""
    check_against_one_batch(Case(world=world, zero=zero))


@pytest.mark.parametrize("zero", STAGES)
def test_D13_clipping_happens_once_over_all_microbatches(zero: int) -> None:
    """Clipped per microbatch, or not at all: with accumulation 4 and clip 0.1 the step is that of one clipped batch."""
    case = Case(world=2, zero=zero, accumulation=4, clip=0.1)
    plain = one_batch(case)
    assert all(step.grad_norm > 0.1 and step.clipped_norm == pytest.approx(0.1, rel=1e-5) for step in plain.steps)
    check_against_one_batch(case)


def test_D14_bf16_gradient_norm_is_equal_for_all_stages() -> None:
    """ZeRO-0 in bf16 divided gradients by 65536 and never zeroed them: three steps, one norm for all stages.

    With a learning rate of 0 all have the same weights, so only the order of float32 sums may differ.
    """
    case = Case(world=2, accumulation=2, dtype="float32", compute="bfloat16", source="module", rate=0.0)
    norms = {zero: norms_of(replace(case, zero=zero)) for zero in STAGES}
    alone = [step.grad_norm for step in run_one(run_case, case.reference).steps]
    exact = [step.grad_norm for step in run_one(run_case, replace(case, dtype="float64", compute="").reference).steps]
    for zero in STAGES:
        assert norms[zero] == pytest.approx(alone, rel=1e-5), f"ZeRO-{zero}"
        assert norms[zero] == pytest.approx(exact, rel=0.05), f"ZeRO-{zero}"


def norms_of(case: Case) -> list[float]:
    norms = [[step.grad_norm for step in run.steps] for run in train(case)]
    assert all(other == norms[0] for other in norms), "ranks report different norms"
    return norms[0]


@pytest.mark.parametrize(
    ("accumulation", "microbatch", "zero"),
    some([(1, 8, 3), *((4, 2, zero) for zero in STAGES)], [(1, 8, zero) for zero in STAGES]),
)
def test_D16_norm_before_and_after_clipping_do_not_depend_on_the_strategy(
    accumulation: int, microbatch: int, zero: int
) -> None:
    """One number for every stage and accumulation, with a clip far above it; and both norms with one below it."""
    case = Case(world=2, zero=zero, accumulation=accumulation, microbatch=microbatch, valid="all", rate=0.0, clip=1e9)
    one = Case(world=1, accumulation=8, valid="all", rate=0.0)
    wanted = [step.grad_norm for step in run_one(run_case, one).steps]
    clips = (1e9, 0.05)
    for [run, _], clip in zip(train_many([replace(case, clip=clip) for clip in clips]), clips, strict=True):
        assert [step.grad_norm for step in run.steps] == pytest.approx(wanted, rel=1e-12)
        clipped = [n * min(1.0, clip / (n + 1e-6)) for n in wanted]  # as torch.nn.utils.clip_grad_norm_ has it
        assert [step.clipped_norm for step in run.steps] == pytest.approx(clipped, rel=1e-12)


@pytest.mark.parametrize(
    ("world", "shard", "zero"),
    some(
        [(2, 0, 0), (2, 0, 2), (4, 2, 1), (4, 2, 3)],
        [(world, shard, zero) for world, shard in ((2, 0), (4, 2)) for zero in STAGES],
    ),
)
def test_D26_64_bf16_microbatches_are_summed_in_float32(world: int, shard: int, zero: int) -> None:
    """16-bit accumulation, or partial sums of hybrid groups kept in 16 bit: rounding grew with every microbatch."""
    if shard and zero == 0:
        shard = 0
    case = Case(
        model="mlp",
        source="module",
        dtype="float32",
        compute="bfloat16",
        world=world,
        shard=shard,
        zero=zero,
        accumulation=128 // world,
        microbatch=1,
        steps=1,
    )
    in_float64, in_bf16 = run_one(summed_microbatches, case)
    norm = distance(in_float64, {})
    assert distance(in_bf16, in_float64) > 3e-3 * norm, "accumulating in bf16 would show"
    for rank, run in enumerate(train(case)):
        gradients = run.steps[0].gradients
        found = {name: distance({name: gradients[name]}, {name: right}) / norm for name, right in in_float64.items()}
        assert all(error < 1e-6 for error in found.values()), f"rank {rank}: {found}"


def summed_microbatches(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of each microbatch in bf16, summed in float64, and summed in bf16; over the number of tokens."""
    torch.manual_seed(case.seed)
    model = builder(case.model, tied=case.tied)().bfloat16()
    inputs, labels = case.batch(0)
    wide = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
    narrow = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    weight = 0.0
    for k in range(case.microbatches):
        total, count = loss_of(case.model)(model(inputs[k : k + 1].bfloat16()), labels[k : k + 1])
        weight += float(count)
        total.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            wide[name] += parameter.grad
            narrow[name] += parameter.grad
        model.zero_grad()
    return {n: g / weight for n, g in wide.items()}, {n: g.double() / weight for n, g in narrow.items()}


@pytest.mark.parametrize("zero", [1, 3, *(pytest.param(zero, marks=pytest.mark.slow) for zero in (0, 2))])
def test_D28_the_scheduler_steps_once_for_each_optimizer_step(zero: int) -> None:
    """It stepped once for every process: with a rate that halves, four ranks must make the updates of one."""
    case = Case(world=4, zero=zero, halving=True)
    found = run_ranks(4, run_with_rate, case)
    assert_equal(case, join([run for run, _ in found]), run_one(run_case, case.reference))
    assert {rate for _, rate in found} == {case.learning_rate / 2**STEPS}


def run_with_rate(case: Case) -> tuple[Run, float]:
    engine = build_engine(case)
    return run_engine(engine, case), engine.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("dtype", "zero"),
    some(
        [("float32", 0), ("float64", 1), ("float64", 2), ("float32", 3)],
        [(dtype, zero) for dtype in ("float64", "float32") for zero in STAGES],
    ),
)
def test_D30_the_first_adam_update_is_a_first_update(dtype: str, zero: int) -> None:
    """A step with zero gradients to make room for states counted as a step: the next update was 1.34 times too small.

    AdamW in plain PyTorch, on whole tensors with the engine's own gradients, makes the same update to the bit.
    """
    case = Case(world=3, zero=zero, dtype=dtype, optimizer="adamw-default-eps", steps=1)
    found = run_ranks(3, run_and_count_states, case)
    for run, (_, counts) in zip(join([run for run, _ in found]), found, strict=True):
        plain = run_one(adam_on, case, run.initial, run.steps[0].gradients)
        assert {name: torch.equal(run.steps[0].updates[name], plain[name]) for name in plain} == dict.fromkeys(
            plain, True
        )
        assert counts == {1.0}


def run_and_count_states(case: Case) -> tuple[Run, set[float]]:
    engine = build_engine(case)
    run = run_engine(engine, case)
    return run, {float(state["step"]) for state in engine.optimizer.state.values()}


def adam_on(case: Case, initial: dict[str, Tensor], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first update that the case's optimizer makes to whole parameters with these gradients."""
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in initial.items()}
    for name, parameter in parameters.items():
        parameter.grad = gradients[name]
    make_optimizer(case, parameters.values()).step()
    return {name: parameter.detach() - initial[name] for name, parameter in parameters.items()}


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("world", [1, 2])
def test_E6_a_parameter_that_nothing_uses_is_named_and_left_alone(zero: int, world: int) -> None:
    """An unused Linear stopped the run. It needs no flag: no gradient, no update (not even weight decay), a warning."""
    case = Case(model="mlp-unused", world=world, zero=zero, accumulation=2, optimizer="adamw")
    unused = {"forgotten.weight", "forgotten.bias", "layers.2.weight", "layers.2.bias"}
    found = run_ranks(world, run_and_listen, case)
    joined = join([run for run, _, _ in found])
    assert_equal(case, joined, run_one(run_case, case.reference))
    for rank, (run, (_, named, texts)) in enumerate(zip(joined, found, strict=True)):
        assert set(named) == unused
        assert len(texts) == (rank == 0), "one warning, from one rank"
        assert all(name in text for name in unused for text in texts)
        for step in run.steps:
            assert {name for name, gradient in step.gradients.items() if gradient is None} == unused
            assert not any(step.updates[name].any() for name in unused)


def run_and_listen(case: Case) -> tuple[Run, list[str], list[str]]:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("meshwright").addHandler(handler)
    engine = build_engine(case)
    run = run_engine(engine, case)
    return run, engine.unused_parameters, texts


@pytest.mark.parametrize(
    ("world", "shard", "accumulation", "zero"),
    some(
        [*((2, 0, 2, zero) for zero in STAGES), (4, 2, 1, 1), (4, 2, 1, 3)],
        [(*layout, zero) for layout in ((2, 0, 1), (4, 2, 1)) for zero in STAGES],
    ),
)
def test_E6_ranks_may_take_different_branches(world: int, shard: int, accumulation: int, zero: int) -> None:
    """The first half of the batch, so the first half of the ranks, never touches the other branch's weights."""
    case = Case(
        model="mlp-branches",
        world=world,
        shard=shard if zero else 0,
        zero=zero,
        accumulation=accumulation,
        optimizer="adamw",
    )
    check(case)


@pytest.mark.parametrize("zero", STAGES)
def test_E6_a_branch_may_be_taken_in_some_steps_only(zero: int) -> None:
    """What no rank used in one step gets no gradient in it, and an ordinary one in the next."""
    case = Case(model="mlp-branches", world=2, zero=zero, optimizer="adamw")
    reference = run_one(run_one_branch_then_both, case.reference)
    assert [sorted(n for n, g in step.gradients.items() if g is None) for step in reference.steps] == [
        ["high.bias", "high.weight"],
        ["low.bias", "low.weight"],
        [],
    ]
    assert_equal(case, train(case, run_one_branch_then_both), reference)


def run_one_branch_then_both(case: Case) -> Run:
    batches = []
    for number in range(STEPS):
        inputs, labels = case.batch(number)
        if number < 2:
            inputs[:, :, 0] = float(number)
        batches.append((inputs, labels))
    return run_engine(build_engine(case), case, batches)


@pytest.mark.parametrize("zero", STAGES)
def test_a_tied_weight_has_one_gradient(zero: int) -> None:
    """Both uses of a tied weight add to one gradient, counted once in the norm."""
    case = Case(world=3, zero=zero, tied=True, accumulation=2)
    runs = train(case)
    assert_equal(case, runs, one_batch(case))
    assert "lm_head.weight" not in runs[0].initial
    step = runs[0].steps[0]
    assert step.grad_norm == pytest.approx(distance(step.gradients, {}), rel=1e-12)


@pytest.mark.parametrize("zero", STAGES)
def test_D17_the_norm_counts_a_parameter_without_a_gradient_as_zero(zero: int) -> None:
    """The norm stopped at a parameter that got no gradient. It is that of all others, whatever the stage."""
    case = Case(model="mlp-unused", world=3, zero=zero, clip=0.1)
    assert norms_of(case) == pytest.approx(norms_of(case.reference), rel=1e-12)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ({"cp": 2}, "context parallelism"),  # B8: the loss multiplied by cp
    ],
)
def test_B8_layouts_without_a_runtime_are_refused_before_a_wrong_number(layout: dict[str, Any], says: str) -> None:
    """Losses grew by the number of context-parallel ranks, in silence."""
    with pytest.raises(UnsupportedCombination, match=says):
        run_one_engine(Strategy(**layout))


def run_one_engine(strategy: Strategy) -> Engine:
    case = Case()
    return Engine(builder("mlp", tied=False), loss_of("mlp"), sgd, case.job, strategy)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("zero", [0, 3])
def test_B8_the_loss_does_not_depend_on_how_many_ranks_share_the_batch(zero: int) -> None:
    """The same batch on 1, 2 and 3 ranks has one loss."""
    cases = [Case(world=world, zero=zero, accumulation=6 // world) for world in (1, 2, 3)]
    losses = [[step.loss for step in train(case)[0].steps] for case in cases]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert losses[0] == pytest.approx(losses[2], rel=1e-12)


@pytest.mark.parametrize("zero", STAGES)
def test_D29_an_optimizer_from_before_sharding_is_refused_and_one_from_after_moves_weights(zero: int) -> None:
    """An optimizer built before sharding held other tensors: weights never moved, and nothing said so."""
    for moved, texts in run_ranks(2, optimizers, zero):
        assert moved
        assert "already built" in texts[0]
        assert "not this model's" in texts[1]


def optimizers(zero: int) -> tuple[bool, list[str]]:
    case = Case(model="mlp", world=2, zero=zero)
    texts = []
    for early in (True, False):
        model = builder("mlp", tied=False)().to(torch.float64)
        before = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        built = torch.optim.SGD(before, lr=0.1)
        with pytest.raises(ConfigError) as caught:
            Engine(model, loss_of("mlp"), built if early else lambda p, built=built: built, case.job, case.strategy)
        texts.append(str(caught.value))
    engine = build_engine(case)
    first = {name: p.detach().clone() for name, p in engine.named_parameters().items()}
    for number in range(3):
        engine.step(case.batch(number))
    return all(not torch.equal(first[name], p) for name, p in engine.named_parameters().items()), texts
