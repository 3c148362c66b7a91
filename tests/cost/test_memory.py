"""Memory by the design's table: published closed forms and counted reports as oracles."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from meshwright.cost import CATEGORIES, StepMemory, framework_bytes
from meshwright.errors import ConfigError
from meshwright.planner import make_plan
from meshwright.spec import (
    BlockSpec,
    Cluster,
    DecoderShape,
    Device,
    Job,
    Layout,
    ModelSpec,
    NodeGroup,
    OptimizerSpec,
    Strategy,
    describe,
    parse_strategy,
)
from meshwright.spec.families import read_config
from meshwright.spec.job import Dtype
from tests.cost.cores import price
from tests.cost.flat import flat_model
from tests.spec.families.tiny_experts import WITH_EXPERTS

SHAPE = DecoderShape(num_hidden_layers=5, hidden_size=48, intermediate_size=100, vocab_size=101)
RANKS = [2, 3, 4, 8]


def at_loss(model: ModelSpec, job: Job, strategy: Strategy) -> tuple[int, int, int]:
    """States at the moment of the last microbatch's loss: stored with optimizer, gathered, gradients."""
    memory = StepMemory(model, job, strategy).ranks[0]
    moment = [moment for moment in memory.moments() if moment.phase == "loss"][-1]
    return memory.parameters + memory.optimizer, moment.gathered, moment.gradients


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("reduced", ["float32", "bfloat16"])
def test_A2_states_are_the_published_multiples_of_the_parameters(ranks: int, reduced: Dtype) -> None:
    """Rajbhandari et al. 2020 (ZeRO), section 3: Adam, bf16 compute, float32 master weights: 16, 4+12/N, 2+14/N, 16/N
    bytes per parameter with 2-byte gradients. Ours keeps reduced gradients in the stored dtype, float32: 2 more."""
    unit = 24 * 1000
    model = flat_model(root=unit, layer=unit, layers=3)
    psi = model.parameters
    job = Job(global_batch=2 * ranks, compute_dtype="bfloat16", reduce_dtype=reduced)
    gradient = 4 if reduced == "float32" else 2

    def states(zero: int) -> int:
        return sum(at_loss(model, job, Strategy(dp=ranks, zero=zero)))

    assert states(0) == (16 + 2) * psi
    assert states(1) == (2 + gradient) * psi + 12 * psi // ranks
    assert states(2) == 2 * psi + (14 + 2) * psi // ranks
    assert states(3) == (14 + 2) * psi // ranks
    if reduced == "bfloat16":
        assert states(1) == 4 * psi + 12 * psi // ranks  # the published figure itself


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_A10_whole_gradients_take_4_bytes_a_parameter_on_every_rank_and_reduced_ones_a_share(ranks: int) -> None:
    """Reported: gradients that accumulate without a reduce cost 1024 KiB for 262,144 parameters, whatever the ranks."""
    model = flat_model(root=65536, layer=65536, layers=3)
    job = Job(global_batch=4 * ranks, compute_dtype="bfloat16", reduce_dtype="float32")
    whole = at_loss(model, job, Strategy(dp=ranks, zero=1))[2]
    assert whole == 1024 * 1024
    for zero in (2, 3):
        assert at_loss(model, job, Strategy(dp=ranks, zero=zero))[2] == 1024 * 1024 // ranks


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard", [2, 4])
def test_the_table_of_the_design(compute: Dtype, shard: int) -> None:
    model = flat_model(root=4000, layer=8000, layers=5)
    p, c, unit = model.parameters, 2 if compute == "bfloat16" else 4, 8000
    job = Job(global_batch=8, compute_dtype=compute)
    copies = c * p if c < 4 else 0

    whole = price(model, job, Strategy(dp=4))
    assert whole.at_rest == dict.fromkeys(CATEGORIES, 0) | {"parameters": 4 * p, "optimizer": 8 * p}
    assert at_loss(model, job, Strategy(dp=4)) == (12 * p, copies, 4 * p)
    for zero in (1, 2, 3):
        strategy = Strategy(dp=4, zero=zero, shard=shard)
        assert price(model, job, strategy).at_rest["parameters"] == 4 * p // shard
        assert price(model, job, strategy).at_rest["optimizer"] == 8 * p // shard
        gathered, gradients = at_loss(model, job, strategy)[1:]
        assert gathered == (c * p if zero < 3 else 0)
        assert gradients == (4 * p if zero == 1 else 4 * p // shard)
        memory = StepMemory(model, job, strategy).ranks[0]
        if zero >= 2:  # one unit whole besides the reduced shares, at most with its reduce's output
            most = max(moment.gradients for moment in memory.moments())
            assert 4 * p // shard + 4 * unit <= most <= 4 * p // shard + 4 * unit + 4 * unit // shard
        if zero == 3:
            for prefetch in (0, 1, 2):
                ahead = StepMemory(model, job, Strategy(dp=4, zero=3, shard=shard, prefetch=prefetch)).ranks[0]
                assert max(m.gathered for m in ahead.moments()) == c * (4000 + (1 + prefetch) * unit)


def test_a_single_microbatch_of_zero_1_never_holds_whole_gradients() -> None:
    model = flat_model(root=4000, layer=8000, layers=5)
    one, several = Job(global_batch=2), Job(global_batch=4)
    most = max(moment.gradients for moment in StepMemory(model, one, Strategy(dp=2, zero=1)).ranks[0].moments())
    assert most < 4 * model.parameters
    assert most == max(moment.gradients for moment in StepMemory(model, one, Strategy(dp=2, zero=2)).ranks[0].moments())
    assert (
        max(m.gradients for m in StepMemory(model, several, Strategy(dp=2, zero=1)).ranks[0].moments())
        >= 4 * model.parameters
    )


@pytest.mark.parametrize("ranks", [2, 3, 5, 7, 16])
def test_shares_are_those_of_torch_chunk_and_padding_is_told_apart(ranks: int) -> None:
    model = describe(SHAPE, sequence=8, compute_dtype="float32")
    expected = sum(torch.empty(shape).chunk(ranks)[0].numel() for block in model.blocks for shape in block.tensors)
    job = Job(global_batch=ranks, sequence=8)
    cost = price(model, job, Strategy(dp=ranks, zero=3))
    assert cost.at_rest["parameters"] == 4 * expected
    assert cost.padding_bytes == 12 * (ranks * expected - model.parameters) // ranks
    assert (cost.padding_bytes == 0) == (ranks * expected == model.parameters)


def test_a_block_without_tensors_is_one_flat_tensor() -> None:
    block = BlockSpec(
        name="b", kind="layer", parameters=10, forward_flops=0, moved_bytes=0, saved_bytes={"none": 0}, output_bytes=0
    )
    assert block.share(4) == 3


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_divides_is_reported_apart_from_what_does_not(zero: int) -> None:
    model = describe(SHAPE, sequence=8, compute_dtype="float32")
    cost = price(model, Job(global_batch=8, sequence=8), Strategy(dp=4, zero=zero, microbatch=1))
    assert all(0 <= cost.divided[name] <= cost.in_step[name] for name in CATEGORIES)
    assert (sum(cost.divided.values()) > 0) == (zero > 0)
    assert cost.divided["activations"] == cost.divided["logits"] == cost.divided["gathered"] == 0
    assert cost.peak_bytes == sum(cost.in_step.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_recompute_and_smaller_microbatches_need_less(zero: int, dtype: Dtype) -> None:
    model = describe(DecoderShape(), sequence=256, compute_dtype=dtype)
    job = Job(global_batch=32, compute_dtype=dtype)

    def peak(**changes: object) -> int:
        return price(model, job, Strategy(**{"dp": 2, "zero": zero, "microbatch": 4, **changes})).peak_bytes  # type: ignore[arg-type]

    assert peak() > peak(recompute="selective") > peak(recompute="full")
    assert peak() > peak(recompute="full", recompute_blocks=1) > peak(recompute="full", recompute_blocks=3)
    assert peak(microbatch=8) > peak() > peak(microbatch=1)
    if zero:
        assert peak(dp=4) < peak()


def test_logits_are_a_category_of_their_own() -> None:
    wide = DecoderShape(vocab_size=50000, hidden_size=48, intermediate_size=64)
    model = describe(wide, sequence=64, compute_dtype="bfloat16")
    cost = price(model, Job(global_batch=4, sequence=64, compute_dtype="bfloat16"), Strategy(microbatch=4))
    assert cost.phase == "loss"
    # Logits in bfloat16, log-probabilities in float32, labels.
    assert cost.in_step["logits"] == 4 * 64 * (50000 * (2 + 4) + 8)


@pytest.mark.parametrize(("optimizer", "tensors"), [("adamw", 2), ("sgd", 0)])
def test_states_of_the_optimizer_follow_its_kind(optimizer: str, tensors: int) -> None:
    model = flat_model(root=4, layer=8, layers=2)
    spec = OptimizerSpec(name=optimizer)  # type: ignore[arg-type]  # one of the two names
    assert price(model, Job(optimizer=spec), Strategy()).at_rest["optimizer"] == 4 * tensors * 20
    momentum = OptimizerSpec(name="sgd", momentum=0.9)
    assert price(model, Job(optimizer=momentum), Strategy()).at_rest["optimizer"] == 4 * 20


def test_a_global_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="global_batch=7"):
        price(flat_model(root=4, layer=8, layers=2), Job(global_batch=7), Strategy(dp=2))


def test_A6_gathering_ahead_eats_what_zero_3_saves_and_it_is_not_chosen_for_nothing() -> None:
    """Reported: ZeRO-3 needed more than ZeRO-2. Every unit that is gathered ahead takes back a part of the saving."""
    shape = DecoderShape(num_hidden_layers=3)
    model = describe(shape, sequence=64, compute_dtype="float32")
    job = Job(global_batch=8, sequence=64)
    two = price(model, job, Strategy(dp=2, zero=2))
    three = [price(model, job, Strategy(dp=2, zero=3, prefetch=ahead)) for ahead in range(3)]
    saved = [two.peak_bytes - cost.peak_bytes for cost in three]
    assert saved[0] > saved[1] > saved[2]
    assert all(sum(cost.collectives.values()) > sum(two.collectives.values()) for cost in three)
    device = Device(name="d", memory_bytes=2 * (framework_bytes("cpu") + two.peak_bytes))
    cluster = Cluster(name="c", nodes=(NodeGroup(devices=2, device=device),))
    assert make_plan(shape, cluster, job, executable=True).strategy.zero < 3


def _long(**changes: object) -> ModelSpec:
    """3 dense layers and 14 with experts, every size odd."""
    table = {**WITH_EXPERTS["deepseek_v3"], "num_hidden_layers": 17, "first_k_dense_replace": 3, **changes}
    return read_config(table).at(Layout(sequence=24))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "split", ["dp=2", "dp=3 pp=2 schedule=1f1b", "dp=2 pp=2 schedule=zb-v", "dp=2 pp=3 schedule=zb-h1"]
)
def test_the_peak_is_the_largest_of_all_moments(zero: int, recompute: str, split: str) -> None:
    """It is looked for at the ends of runs of layers that are alike."""
    model, job = _long(), Job(global_batch=12, sequence=24, compute_dtype="bfloat16")
    for blocks, prefetch, more in product((0, 6), (0, 1, 3), ("", "unit_blocks=2", "reduce=window", "gather=step")):
        words = f"{split} zero={zero} recompute={recompute} recompute_blocks={blocks} prefetch={prefetch} {more}"
        try:
            strategy = parse_strategy(words)
        except ConfigError:
            continue
        for rank in StepMemory(model, job, strategy).ranks:
            moments = list(rank.moments())
            assert rank.peak in moments
            assert rank.peak.total == max(moment.total for moment in moments), words
