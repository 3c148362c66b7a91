"""What users of other frameworks reported of pipelining, each as a test. Names begin with the report's row."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright import ConfigError
from meshwright.measure.equality import show
from meshwright.measure.equality.tolerance import compare
from meshwright.runtime import Engine
from meshwright.spec import Strategy
from tests.equivalence import test_pipeline_structures as structures
from tests.equivalence.test_user_reports import check_against_one_batch, one_batch
from tests.harness.cases import STEPS, Case, build_engine, check, check_many, make_optimizer, run_case, train
from tests.harness.models import VALID_TOKENS, builder, loss_of
from tests.harness.ranks import run_one, run_ranks

PAIR = Case(pp=2, schedule="1f1b", accumulation=4, microbatch=1)
SQUARE = replace(PAIR, world=4, accumulation=2)

# --- what is cut ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [2, 3])
def test_C1_zero_2_and_3_run_under_pipelining(zero: int) -> None:
    """They died of a parameter that had already been reduced. Here each microbatch is reduced, or each window."""
    one = replace(SQUARE, zero=zero, accumulation=4)
    check_many([one, replace(one, schedule="gpipe", reduce="window")])


def held(case: Case) -> dict[str, int]:
    """What this rank stores, by name."""
    return {name: parameter.numel() for name, parameter in build_engine(case).named_parameters().items()}


@pytest.mark.parametrize("stages", [(), (1, 2, 2, 1)])
def test_C4_no_layer_is_lost(stages: tuple[int, ...]) -> None:
    """30 layers on 4 stages silently became 28: here 6 on 4."""
    case = replace(PAIR, world=4, pp=4, layers=6, stages=stages)
    ranks = run_ranks(4, held, case)
    whole = {name: p.numel() for name, p in builder("decoder", tied=False, layers=6)().named_parameters()}
    assert sum(sum(rank.values()) for rank in ranks) == sum(whole.values())
    assert {**ranks[0], **ranks[1], **ranks[2], **ranks[3]} == whole
    check(case)


def test_C5_options_of_stages_without_effect_are_errors() -> None:
    """A number of layers for the last stage trained only those, without any pipeline."""
    for options in ({"virtual_stages": 2}, {"schedule": "1f1b"}):
        with pytest.raises(ConfigError, match="no effect"):
            Strategy(**options)
    one = Case(world=1, stages=(3,))
    with pytest.raises(ConfigError, match="stages=3 for a model of 5 blocks with pp=1"):
        build_engine(one)


def test_C6_seven_layers_on_two_stages() -> None:
    case = replace(PAIR, layers=7)
    layers = [{name.split(".")[2] for name in rank if ".layers." in name} for rank in run_ranks(2, held, case)]
    assert sorted(map(len, layers)) == [3, 4]
    check(case)


def shorter_batches(case: Case) -> list[tuple[float, float]]:
    engine = build_engine(case)
    ids, labels = case.batch(0)
    return [(r.loss, r.grad_norm) for r in engine.steps([(ids[:n], labels[:n]) for n in (9, 8, 7, 2)])]


def refused(case: Case, rows: int) -> str:
    with pytest.raises(ConfigError) as error:
        build_engine(case).step(tuple(part[:rows] for part in case.batch(0)))
    return str(error.value)


def test_C8_microbatches_of_unequal_size_weigh_by_their_tokens() -> None:
    """8 rows in microbatches of 3: an error before the first step, or 3, 3 and 2 that weigh as rows do."""
    case = replace(PAIR, world=3, pp=3, accumulation=3, microbatch=3, schedule="gpipe")
    assert all("8 sequences, expected 9" in text for text in run_ranks(3, refused, case, 8))
    with pytest.raises(ConfigError, match="set global_batch to 6 or 9"):
        case.strategy.microbatches(8)
    whole = run_one(shorter_batches, case.reference)
    for one in (case, replace(case, schedule="zb-h1"), replace(case, world=2, pp=2, schedule="zb-v", virtual_stages=2)):
        for rank in run_ranks(one.world, shorter_batches, one):
            assert [*chain(*rank)] == pytest.approx([*chain(*whole)], rel=1e-12)


@pytest.mark.parametrize("name", ["keywords", "positional, None", "keyword inputs, boolean", "dataclass", "tuples"])
def test_K1_K2_stages_hand_on_whatever_a_forward_does(name: str) -> None:
    """Stages took tensors alone: no keyword arguments, None, flags, dataclasses, nor masks of integers and booleans."""
    strategy = Strategy(pp=2, schedule="gpipe", microbatch=4)
    wanted = run_one(structures.run, structures.Laid(name, Strategy(microbatch=4)))
    for found in train_structure(name, strategy):
        beyond = compare(found, wanted, dtype="float64", optimizer="sgd", learning_rate=structures.RATE)
        assert not beyond, show(beyond)


def train_structure(name: str, strategy: Strategy) -> Any:
    return structures.join(run_ranks(strategy.world_size, structures.run, structures.Laid(name, strategy)))


# --- losses and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_D1_D4_unequal_microbatches_weigh_by_their_tokens(schedule: str) -> None:
    """Mean of means; and gradients as many times too large as there are tokens."""
    case = replace(PAIR, schedule=schedule, microbatch=2)
    plain = one_batch(case)
    assert [step.weight for step in plain.steps] == [sum(VALID_TOKENS)] * STEPS
    check_against_one_batch(case)


@pytest.mark.parametrize(("zero", "gather"), [(0, "auto"), (3, "unit"), (3, "step")])
def test_D2_ranks_with_few_tokens_weigh_little(zero: int, gather: str) -> None:
    check_against_one_batch(replace(SQUARE, zero=zero, gather=gather, microbatch=2, clip=0.1))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_D5_D6_D9_a_tied_weight_of_two_stages_has_one_gradient(zero: int) -> None:
    """Sums over stages and over data-parallel ranks were mixed, or shards lay at other offsets, or none were summed."""
    case = replace(SQUARE, model="decoder-10", zero=zero, tied=True, clip=0.1, source="module")
    check(case)
    tied = "model.embed_tokens.weight"
    copies = [copy for copy in run_ranks(4, local_after_steps, case, tied) if copy is not None]
    assert len(copies) == 4
    assert torch.equal(copies[0], copies[2])  # the first stage's on the first data-parallel rank, and the last stage's
    assert torch.equal(copies[1], copies[3])


def local_after_steps(case: Case, name: str) -> Tensor | None:
    engine = build_engine(case)
    for number in range(STEPS):
        engine.step(case.batch(number))
    parameter: Any = engine.named_parameters().get(name)
    if parameter is None:
        return None
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.detach().clone()


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipev"])
def test_D9_a_tied_weight_of_two_stages_on_one_rank_is_one(schedule: str) -> None:
    check(replace(SQUARE, zero=3, tied=True, schedule=schedule, virtual_stages=2, accumulation=4, source="module"))


def lengths(case: Case) -> list[tuple[float, float]]:
    engine = build_engine(case)
    batches = [tuple(part[:, :n] for part in case.batch(number)) for number, n in enumerate((53, 17, 29, 53))]
    return [(r.loss, r.grad_norm) for r in (engine.step(batch) for batch in batches)]


def test_D8_sequences_may_have_another_length_in_every_step() -> None:
    """Stages were made anew for another length, and what microbatches had added to gradients was gone."""
    case = replace(PAIR, clip=0.1, valid="all")
    wanted = [*chain(*run_one(lengths, case.reference))]
    for one in (case, replace(case, schedule="zb-v", virtual_stages=2)):
        for rank in run_ranks(2, lengths, one):
            assert [*chain(*rank)] == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("tied", [False, True])
def test_D10_the_norm_is_over_all_stages(tied: bool) -> None:
    check(replace(PAIR, world=3, pp=3, tied=tied, clip=0.1))


@pytest.mark.parametrize(("dtype", "compute"), [("float32", ""), ("float32", "bfloat16")])
def test_D14_narrow_dtypes_cross_stages_as_they_are(dtype: str, compute: str) -> None:
    check(replace(PAIR, dtype=dtype, compute=compute, source="module"))


def test_S1_every_rank_reports_the_loss_of_all_stages_and_rows() -> None:
    """Each rank printed its own: 0.0370, 0.0380, 2.421."""
    case = replace(SQUARE, zero=1)
    wanted = [step.loss for step in run_one(run_case, case.reference).steps]
    for run in train(case):
        assert [step.loss for step in run.steps] == pytest.approx(wanted, rel=1e-12)


# --- checkpoints ------------------------------------------------------------------------------------------------------

#: Strategies of 8 microbatches of one row.
PLACES = [
    replace(PAIR, world=2, accumulation=8),
    Case(world=1, accumulation=8, microbatch=1),
    replace(PAIR, world=4, schedule="zb-v", virtual_stages=2, zero=3, accumulation=4),
    replace(PAIR, world=4, tp=2, zero=0, accumulation=8, schedule="interleaved-1f1b", virtual_stages=2),
    Case(world=2, zero=3, accumulation=4, microbatch=1),
    replace(PAIR, world=3, pp=3, schedule="zb-h1", stages=(1, 3, 1), accumulation=8),
]


def steps_from(case: Case, begin: int, stop: int, source: Path | None, target: Path | None) -> Any:
    engine = build_engine(case)
    if source is not None:
        engine.load(source)
    reports = [engine.step(case.batch(step)) for step in range(begin, stop)]
    if target is not None:
        engine.save(target)
    return [(r.loss, r.grad_norm) for r in reports]


def placed(case: Case, *args: Any) -> Any:
    return run_one(steps_from, case, *args) if case.world == 1 else run_ranks(case.world, steps_from, case, *args)[0]


@pytest.mark.parametrize(
    "index", [*range(3), *(pytest.param(i, marks=pytest.mark.slow) for i in range(3, len(PLACES)))]
)
def test_D21_G2_any_cut_continues_from_any_other(index: int, tmp_path: Path) -> None:
    """Names of a stage's own layers loaded the wrong ones; a tied weight's states were lost."""
    tied = index % 2 == 0
    first, later = (
        replace(PLACES[i % len(PLACES)], tied=tied, optimizer="adamw", clip=0.1) for i in (index, index + 1)
    )
    straight = run_one(steps_from, first.reference, 0, 3, None, None)
    begun = placed(first, 0, 2, None, tmp_path / "saved")
    went_on = placed(later, 2, 3, tmp_path / "saved", None)
    assert [*chain(*begun, *went_on)] == pytest.approx([*chain(*straight)], rel=1e-10)


# --- the optimizer ----------------------------------------------------------------------------------------------------


def moved(case: Case) -> bool:
    """Whether three steps of an engine with an optimizer of its own stages change every weight that it has."""
    engine = Engine(
        builder("decoder", tied=False),
        loss_of("decoder"),
        partial(make_optimizer, case),
        case.job,
        case.strategy,
        measure_memory="never",
    )
    before = {name: p.detach().clone() for name, p in engine.named_parameters().items()}
    for number in range(3):
        engine.step(case.batch(number))
    return all(not torch.equal(before[name], p) for name, p in engine.named_parameters().items())


def test_D29_every_stage_trains_its_own_weights() -> None:
    assert all(run_ranks(2, moved, PAIR))
