"""What users of other frameworks reported of tensor parallelism, each as a test. Names begin with the report's row."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.errors import UnsupportedCombination
from meshwright.models import Decoder, DecoderConfig
from meshwright.runtime import Engine
from meshwright.spec import Job, Strategy
from tests.harness.cases import Case, build_engine, check, make_optimizer, real_model, run_case, train
from tests.harness.models import loss_of
from tests.harness.ranks import RankError, run_one, run_ranks

TWO_BY_TWO = Case(world=4, tp=2, accumulation=3, clip=0.1, optimizer="adamw")
WORDS = 101


def engine_of(case: Case, **sizes: Any) -> Engine:
    """The case's engine with another decoder."""
    config = DecoderConfig(
        **{"vocab_size": WORDS, "hidden_size": 12, "intermediate_size": 23, "num_hidden_layers": 2} | sizes
    )
    return Engine(
        lambda: Decoder(config),
        loss_of("decoder"),
        partial(make_optimizer, case),
        case.job,
        case.strategy,
        measure_memory="never",
    )


# --- what is divided --------------------------------------------------------------------------------------------------


def shorter_batches(case: Case) -> list[tuple[float, float]]:
    engine = build_engine(case)
    ids, labels = case.batch(0)
    return [(r.loss, r.grad_norm) for r in engine.steps([(ids[:n], labels[:n]) for n in (8, 7, 5)])]


def test_C8_microbatches_of_unequal_size_weigh_by_their_tokens() -> None:
    case = Case(world=4, tp=2, accumulation=2, microbatch=2)
    whole = run_one(shorter_batches, replace(case, world=1, tp=1, accumulation=4))
    for rank in run_ranks(4, shorter_batches, case):
        assert [*chain(*rank)] == pytest.approx([*chain(*whole)], rel=1e-12)


def test_C10_widths_of_fewer_channels_than_ranks_are_refused() -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 3}
    for text in run_ranks(4, refused, Case(world=4, tp=4), sizes):
        assert "tp=4 over the 3 channels of model.layers.0.mlp" in text
        assert "set tp to 3 or less" in text


def refused(case: Case, sizes: dict[str, Any]) -> str:
    with pytest.raises(UnsupportedCombination) as error:
        engine_of(case, **sizes)
    return str(error.value)


def test_C9_fewer_key_value_heads_than_ranks_are_held_twice() -> None:
    check(Case(world=4, tp=4, model="decoder-16", accumulation=2))


def test_C10_heads_that_do_not_divide_are_refused_with_the_degrees_that_do() -> None:
    for text in run_ranks(4, refused, Case(world=4, tp=4), {"num_attention_heads": 6, "num_key_value_heads": 2}):
        assert "tp=4 does not divide the 6 query heads" in text
        assert "set tp to one of 1, 2, 3, 6" in text


# --- vocabularies that do not divide ----------------------------------------------------------------------------------


def export(case: Case, folder: Path) -> tuple[dict[str, Any], int]:
    engine = build_engine(case)
    engine.step(case.batch(0))
    engine.export(folder)
    local = next(p for name, p in engine.model.named_parameters() if "embed_tokens" in name or "lm_head" in name)
    return {name: engine.read(name) for name in engine.named_parameters()}, local.shape[0]


@pytest.mark.parametrize(("world", "tp"), [(2, 2), (3, 3), (4, 2)])
def test_C12_C13_an_odd_vocabulary_is_padded_inside_and_nowhere_else(world: int, tp: int, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    case = Case(world=world, tp=tp, model="llama", zero=1 if world > tp else 0, source="module")
    values, _ = run_ranks(world, export, case, tmp_path / "model")[0]
    again = LlamaForCausalLM.from_pretrained(tmp_path / "model", torch_dtype=torch.float64)
    assert again.lm_head.weight.shape == (WORDS, 12)
    for name, value in again.named_parameters():
        torch.testing.assert_close(value, values[name], rtol=0, atol=0)


def local_rows(case: Case) -> tuple[int, float]:
    engine = build_engine(case)
    for step in range(2):
        engine.step(case.batch(step))
    head = engine.named_parameters()["lm_head.weight"].detach()
    own = engine._tp.sharding.widths["lm_head"][engine._mesh.tp_rank] if engine._tp is not None else WORDS
    return head.shape[0], float(head[own:].abs().sum())


def test_C13_padding_stays_zero_under_weight_decay() -> None:
    found = run_ranks(3, local_rows, Case(world=3, tp=3, optimizer="adamw"))
    assert found == [(34, 0.0)] * 3


def test_M2_ranks_may_hold_nothing() -> None:
    """A vocabulary of 5 over 4 ranks, and a norm of 12 over 8: parts that are empty."""
    case = Case(world=8, tp=4, zero=3, optimizer="adamw")
    tokens = {
        "vocab_size": 5,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "intermediate_size": 5,
    }
    ranks = run_ranks(8, few_words, case, tokens)
    whole = run_one(few_words, case.reference, tokens)
    for rank in ranks:
        assert [*chain(*rank)] == pytest.approx([*chain(*whole)], rel=1e-10)


def few_words(case: Case, sizes: dict[str, Any]) -> list[tuple[float, float]]:
    engine = engine_of(case, **sizes)
    found = []
    for step in range(3):
        ids, labels = case.batch(step)
        report = engine.step((ids % 5, (labels % 5).where(labels >= 0, labels)))
        found.append((report.loss, report.grad_norm))
    return found


# --- gradients --------------------------------------------------------------------------------------------------------


def norms_after_five_steps(case: Case) -> dict[str, torch.Tensor]:
    engine = build_engine(case)
    for step in range(5):
        engine.step(case.batch(step))
    return {name: p.detach().clone() for name, p in engine.model.named_parameters() if "norm" in name}


def test_D18_norm_weights_are_equal_on_ranks_and_to_one_process_after_five_steps() -> None:
    case = Case(world=2, tp=2, sequence_parallel=True, optimizer="adamw", accumulation=2)
    first, second = run_ranks(2, norms_after_five_steps, case)
    whole = run_one(norms_after_five_steps, case.reference)
    assert len(whole) == 11
    for name, value in whole.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], value, rtol=1e-9, atol=1e-12)


def mixtral(case: Case) -> tuple[float, float, dict[str, torch.Tensor]]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=WORDS,
        hidden_size=12,
        intermediate_size=10,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        num_local_experts=4,
        use_cache=False,
    )
    config._experts_implementation = "eager"  # the others have no float64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = MixtralForCausalLM(config).double()
    engine = Engine(
        model, loss_of("llama"), partial(make_optimizer, case), case.job, case.strategy, measure_memory="never"
    )
    found: dict[str, torch.Tensor] = {}
    engine.on_gradients = lambda gradients: found.update(
        {n: g.clone() for n, g in gradients.items() if g is not None and "gate" in n.split(".")[-2]}
    )
    report = engine.step(replace(case, model="llama").batch(0))
    return report.loss, report.grad_norm, found


@pytest.mark.parametrize(("world", "zero"), [(2, 0), pytest.param(4, 0, marks=pytest.mark.slow)])
def test_D12_D20_the_norm_and_the_experts_gradients_do_not_depend_on_tp(world: int, zero: int) -> None:
    case = Case(world=world, tp=2, zero=zero, accumulation=2)
    loss, norm, routers = run_one(mixtral, case.reference)
    for rank in run_ranks(world, mixtral, case):
        assert rank[:2] == pytest.approx((loss, norm), rel=1e-7)  # Hugging Face's norms compute in float32
        assert set(rank[2]) == set(routers) != set()
        for name, value in routers.items():
            torch.testing.assert_close(rank[2][name], value, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_D21_every_gradient_of_tensor_and_data_parallel_ranks_is_that_of_one(zero: int) -> None:
    check(replace(TWO_BY_TWO, zero=zero, sequence_parallel=zero % 2 == 1))


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_D22_B8_the_loss_does_not_depend_on_how_many_ranks_compute_the_same_rows(tp: int) -> None:
    case = Case(world=4, tp=tp, model="decoder-16", accumulation=4 // (4 // tp))
    loss = run_one(run_case, case.reference).steps[0].loss
    for run in train(case):
        assert run.steps[0].loss == pytest.approx(loss, rel=1e-12)
        assert run.steps[0].weight == train_weight(case)


def train_weight(case: Case) -> float:
    _, labels = case.batch(0)
    return float((labels >= 0).sum())


def test_D25_gradients_are_reduced_in_float32_by_default() -> None:
    job = Job(global_batch=8, sequence=8, compute_dtype="bfloat16")
    assert job.reduce_dtype == "float32"
    case = Case(world=4, tp=2, dtype="float32", compute="bfloat16", zero=2, accumulation=2)
    for dtype in run_ranks(4, gradient_dtype, case):
        assert dtype == "torch.float32"


def gradient_dtype(case: Case) -> str:
    engine = build_engine(case)
    seen: list[str] = []
    engine.on_gradients = lambda gradients: seen.extend(str(g.dtype) for g in gradients.values() if g is not None)
    engine.step(case.batch(0))
    (dtype,) = set(seen)
    return dtype


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_D32_shards_of_divided_weights_are_not_taken_for_replicas(zero: int) -> None:
    check(replace(TWO_BY_TWO, zero=zero, tied=True, source="module"))


# --- checkpoints ------------------------------------------------------------------------------------------------------

#: Ranks, tensor-parallel ranks, ZeRO stage, shard group.
PLACES = [
    (1, 1, 0, 0),
    (4, 2, 3, 0),
    (3, 3, 0, 0),
    (4, 2, 1, 0),
    (6, 3, 2, 0),
    (2, 2, 0, 0),
    (8, 2, 3, 2),
    (2, 1, 3, 0),
]


#: What a rank reports of its steps, and its whole parameters where they begin.
Ran = tuple[list[tuple[float, float]], dict[str, torch.Tensor]]


def steps_from(case: Case, begin: int, source: Path | None, target: Path | None) -> Ran:
    """Steps from `begin` to the third, from a checkpoint or the beginning; one is written before the third."""
    engine = build_engine(case)
    if source is not None:
        engine.load(source)
    found = {name: engine.read(name) for name in engine.named_parameters()} if source is not None else {}
    reports = []
    for step in range(begin, 3):
        if target is not None and step == 2:
            engine.save(target)
            found = {name: engine.read(name) for name in engine.named_parameters()}
        reports.append(engine.step(case.batch(step)))
    return [(r.loss, r.grad_norm) for r in reports], found


def at(place: tuple[int, int, int, int], tied: bool) -> Case:
    world, tp, zero, shard = place
    return Case(world=world, tp=tp, zero=zero, shard=shard, tied=tied, optimizer="adamw", accumulation=4 * tp // world)


def placed(place: tuple[int, int, int, int], tied: bool, *args: Any) -> Ran:
    world = place[0]
    if world == 1:
        return run_one(steps_from, at(place, tied), *args)
    return run_ranks(world, steps_from, at(place, tied), *args)[0]


SLOW = [pytest.param(i, marks=pytest.mark.slow) for i in range(3, len(PLACES))]


@pytest.mark.parametrize("index", [*range(3), *SLOW])
def test_G1_G2_any_layout_continues_from_any_other(index: int, tmp_path: Path) -> None:
    tied = index % 2 == 1
    straight, saved = placed(PLACES[index], tied, 0, None, tmp_path / "saved")
    went_on, loaded = placed(PLACES[(index + 1) % len(PLACES)], tied, 2, tmp_path / "saved", None)
    assert set(loaded) == set(saved) != set()
    for name, value in saved.items():
        assert torch.equal(value, loaded[name]), name
    assert [*chain(*went_on)] == pytest.approx([*straight[2]], rel=1e-10)


# --- data -------------------------------------------------------------------------------------------------------------


def own_batches(case: Case, by_global_rank: bool) -> tuple[list[float], list[str]]:
    """Steps on what a plain sampler over all ranks hands out, or one over the data-parallel ranks."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("meshwright").addHandler(handler)
    engine = build_engine(replace(case, scope="local"))
    rank = torch.distributed.get_rank() if by_global_rank else engine.data_rank
    losses = []
    for step in range(3):
        ids, labels = case.batch(step)
        rows = engine.job.global_batch // engine.data_ranks
        start = rank * rows % engine.job.global_batch
        losses.append(engine.step((ids[start : start + rows], labels[start : start + rows])).loss)
    return losses, told


def test_L1_ranks_of_one_group_use_the_same_batch_whatever_they_are_handed() -> None:
    case = Case(world=4, tp=2, accumulation=2)
    right = run_ranks(4, own_batches, case, False)
    whole = [step.loss for step in run_one(run_case, case.reference).steps]
    assert all(losses == pytest.approx(whole, rel=1e-12) and not told for losses, told in right)
    mixed = run_ranks(4, own_batches, case, True)
    assert all(losses == mixed[0][0] for losses, _ in mixed), "ranks of one group went on with other batches"
    warned = [text for _, told in mixed for text in told]
    assert len(warned) == 2
    assert all("num_replicas=engine.data_ranks, rank=engine.data_rank" in text for text in warned)


def ends_early(case: Case) -> list[float]:
    engine = build_engine(replace(case, scope="local"))
    rows = engine.job.global_batch // engine.data_ranks
    many = 3 if torch.distributed.get_rank() % 2 == 0 else 1
    batches = [tuple(part[:rows] for part in case.batch(step)) for step in range(many)]
    return [report.loss for report in engine.steps(batches)]


def test_L1_batches_end_for_a_group_where_its_first_rank_has_none_left() -> None:
    found = run_ranks(4, ends_early, Case(world=4, tp=2))
    assert [len(losses) for losses in found] == [3] * 4
    assert all(losses == found[0] for losses in found)


def fails_to_load(case: Case) -> None:
    engine = build_engine(replace(case, scope="local"))

    def batches() -> Any:
        yield tuple(part[: engine.job.global_batch // engine.data_ranks] for part in case.batch(0))
        if torch.distributed.get_rank() == 1:
            raise OSError("the disk is gone")

    list(engine.steps(batches()))


def test_L1_a_loader_that_fails_on_one_rank_ends_all() -> None:
    with pytest.raises(RankError, match="the disk is gone"):
        run_ranks(4, fails_to_load, Case(world=4, tp=2), timeout_s=60)


def test_a_strategy_with_tp_is_executable() -> None:
    from meshwright.spec import is_executable

    assert is_executable(Strategy(tp=2, dp=2, zero=3, sequence_parallel=True), Job(global_batch=4, sequence=8))


# --- between steps ---------------------------------------------------------------------------------------------------


def generated(case: Case) -> tuple[list[list[int]], float, str]:
    engine = build_engine(case)
    engine.step(case.batch(0))
    with engine.inference() as model:
        ids = case.batch(1)["input_ids"][:2, :5]
        words = model.generate(ids, max_new_tokens=4 + 2 * engine.data_rank, do_sample=False, use_cache=True)  # type: ignore[operator]
        kind = type(model(ids).logits).__name__
    loss = engine.evaluate([case.batch(1)])
    engine.step(case.batch(1))
    return words[:, :9].tolist(), loss, kind


@pytest.mark.parametrize(("world", "zero"), [(4, 3), pytest.param(2, 0, marks=pytest.mark.slow)])
def test_generation_and_evaluation_between_steps(world: int, zero: int) -> None:
    """Groups generate texts of other lengths; logits are whole there, and the loss is that of one process."""
    case = Case(world=world, tp=2, zero=zero, model="llama")
    words, loss, _ = run_one(generated, case.reference)
    for rank in run_ranks(world, generated, case):
        assert rank[0] == words
        assert rank[1] == pytest.approx(loss, rel=1e-10)
        assert rank[2] == "Tensor"


def with_adapters(case: Case) -> str:
    import warnings

    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # PEFT asks for what Transformers renamed
        model = get_peft_model(real_model(case), LoraConfig(target_modules=["q_proj"]))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedCombination) as error:
        Engine(model, loss_of("llama"), partial(make_optimizer, case), case.job, case.strategy)
    return str(error.value)


def test_adapters_are_refused() -> None:
    for text in run_ranks(2, with_adapters, Case(world=2, tp=2, model="llama")):
        assert "with adapters" in text
