"""Another stack's bytes: its states by hand, and this runtime's figures untouched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cost import StepMemory, estimate
from meshwright.errors import ConfigError
from meshwright.spec import DecoderShape, Job, Strategy, describe
from meshwright.spec.clusters import parse_cluster
from meshwright.spec.conventions import CONVENTIONS, Convention, StateBytes, convention
from tests.cost.flat import flat_model

PSI = 24 * 1000 * 4


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("stack", "whole", "divided"),
    [("Megatron-DeepSpeed fp16", 4, 16), ("Megatron-DeepSpeed bf16", 8, 16), ("nanotron", 8, 12)],
)
def test_states_are_the_bytes_that_the_stack_declares(stack: str, ranks: int, whole: int, divided: int) -> None:
    """ZeRO-1: weights and gradients whole on every rank, the optimizer's part divided, all through the step."""
    model = flat_model(root=PSI // 4, layer=PSI // 4, layers=3)
    job = Job(global_batch=2 * ranks, compute_dtype="bfloat16")
    memory = StepMemory(model, job, Strategy(dp=ranks, zero=1), convention(stack)).ranks[0]
    for moment in memory.moments():
        states = memory.parameters + memory.optimizer + moment.gradients + moment.gathered
        assert states == whole * PSI + divided * PSI // ranks


def test_gradients_that_the_backward_makes_are_gone_before_it() -> None:
    model = flat_model(root=PSI // 4, layer=PSI // 4, layers=3)
    job = Job(global_batch=1, param_dtype="bfloat16", compute_dtype="bfloat16", reduce_dtype="bfloat16")
    made, used = (
        StepMemory(model, job, Strategy(), replace(convention("torchtune"), states=held)).ranks[0]
        for held in (
            StateBytes(weights=2, gradients=2, optimizer=4, life="made"),
            StateBytes(weights=2, gradients=2, optimizer=4, life="used"),
        )
    )
    by_phase = {moment.phase: moment.gradients for moment in made.moments()}
    assert by_phase["loss"] == 0
    assert by_phase["optimizer"] == 2 * PSI
    assert max(moment.gradients for moment in used.moments()) == 2 * PSI // 4


def test_a_chunked_loss_takes_less_than_one_in_float32() -> None:
    model = describe(DecoderShape(vocab_size=4096), sequence=64, compute_dtype="bfloat16")
    job = Job(global_batch=1, sequence=64, compute_dtype="bfloat16")
    cluster = parse_cluster("A100-80GB")
    elements = 64 * 4096
    for size in (1, 4.5, 12):
        told = Convention(name="a stack", source="this test", logit_bytes=size)
        found = estimate(model, cluster, job, Strategy(), convention=told)
        most = max(moment.logits for moment in StepMemory(model, job, Strategy(), told).ranks[0].moments())
        assert most == int(size * elements)
        assert found.worst.in_step["logits"] <= most


def test_without_a_convention_a_loss_in_float32_counts_on_accelerators_alone() -> None:
    """On CPUs figures are those counted on real ranks; a GPU's memory also holds what passes through a loss."""
    model = describe(DecoderShape(vocab_size=65536, num_hidden_layers=1), sequence=256, compute_dtype="bfloat16")
    job = Job(global_batch=1, sequence=256, compute_dtype="bfloat16")
    here, there = (estimate(model, parse_cluster(text), job, Strategy()).worst for text in ("this", "A100-80GB"))
    plain = StepMemory(model, job, Strategy()).ranks[0].peak
    assert here.in_step["logits"] == plain.logits
    assert there.in_step["logits"] == 12 * 256 * 65536


def test_what_a_stage_has_sent_stays_until_its_backward() -> None:
    model = describe(DecoderShape(num_hidden_layers=4), sequence=64, compute_dtype="bfloat16")
    job = Job(global_batch=8, sequence=64, compute_dtype="bfloat16")
    strategy = Strategy(pp=2, schedule="1f1b")
    told = Convention(name="a stack", source="this test")
    drops, keeps = (
        StepMemory(model, job, strategy, replace(told, keeps_outputs=kept)).ranks[0].peak for kept in (False, True)
    )
    assert keeps.activations - drops.activations == 2 * model.layers[-1].output_bytes  # two microbatches in flight


def test_selective_recompute_may_keep_a_part_of_the_products() -> None:
    model = describe(DecoderShape(num_hidden_layers=2), sequence=64, compute_dtype="bfloat16")
    job = Job(global_batch=2, sequence=64, compute_dtype="bfloat16")  # of the second microbatch all gradients are there
    told = Convention(name="a stack", source="this test")
    kept = [
        StepMemory(model, job, Strategy(recompute="selective"), replace(told, kept_products=share)).ranks[0].peak_bytes
        for share in (0.0, 0.5, 1.0)
    ]
    assert kept[0] < kept[1] < kept[2]


def test_wrong_conventions_are_refused() -> None:
    with pytest.raises(ConfigError, match="convention=nanotorn is not known"):
        convention("nanotorn")
    with pytest.raises(ConfigError, match="kept_products"):
        replace(CONVENTIONS["nanotron"], kept_products=1.5)
    with pytest.raises(ConfigError, match="number of bytes"):
        StateBytes(weights=-1, gradients=2, optimizer=12)
