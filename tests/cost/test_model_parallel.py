"""Memory under tensor, sequence, context and expert parallelism, and under recompute with split backwards."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from meshwright.cost import StepMemory
from meshwright.cost.memory import RankMemory
from meshwright.spec import Job, Layout, parse_strategy
from meshwright.spec.families import read_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
JOB = Job(global_batch=16, sequence=256, compute_dtype="bfloat16")


def memory(table: dict[str, Any], text: str, job: Job = JOB) -> tuple[RankMemory, ...]:
    strategy = parse_strategy(text)
    return StepMemory(read_config(table).at(Layout.of(job, strategy)), job, strategy).ranks


def parts(table: dict[str, Any]) -> tuple[int, int]:
    """Elements of the whole model outside its experts, and of its experts."""
    model = read_config(table).at(Layout(sequence=JOB.sequence))
    experts = sum(math.prod(shape) for block in model.blocks for shape in block.experts)
    return model.parameters - experts, experts


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallelism_divides_matrices_and_leaves_norms_whole(tp: int) -> None:
    whole, _ = parts(LLAMA)
    norms = 128 * (2 * 8 + 1)
    (rank,) = memory(LLAMA, f"tp={tp}")
    assert rank.parameters == 4 * ((whole - norms) // tp + norms)


def test_sequence_and_context_parallelism_divide_activations() -> None:
    def activations(text: str, job: Job) -> int:
        return max(moment.activations for moment in memory(LLAMA, text, job)[0].moments())

    for job in (JOB, replace(JOB, stack="fused")):
        alone, tensor = activations("tp=1", job), activations("tp=4", job)
        both, context = activations("tp=4 sequence_parallel=true", job), activations("cp=4", job)
        assert alone > tensor > both >= alone / 4
        assert context == pytest.approx(alone / 4, rel=0.05)
    # Kernels of its own keep the shard and gather again in backward; PyTorch's operations keep what was gathered.
    assert both == pytest.approx(alone / 4, rel=0.05)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_experts_are_laid_over_ranks_and_sharded_over_those_that_hold_the_same(ep: int) -> None:
    """States of experts are divided by dp whatever ep is: by ep as parameters, by dp/ep as shards."""
    dense, experts = parts(MIXTRAL)
    assert experts > dense
    for zero in (1, 3):
        (rank,) = memory(MIXTRAL, f"dp=4 ep={ep} zero={zero}")
        assert rank.optimizer == 8 * (dense // 4 + experts // 4)
        assert rank.parameters == 4 * (dense // 4 + experts // 4)
    (whole,) = memory(MIXTRAL, f"dp=4 ep={ep} zero=0")
    assert whole.parameters == 4 * (dense + experts // ep)
    gathered = max(moment.gathered for moment in memory(MIXTRAL, f"dp=4 ep={ep} zero=1")[0].moments())
    assert gathered == (2 * (dense + experts // ep))


def test_a_recomputed_block_runs_both_halves_of_its_backward_at_once() -> None:
    """Nothing of it waits for the weight half; it would be computed again for that."""
    job = Job(global_batch=8, sequence=256, compute_dtype="bfloat16")
    for schedule in ("zb-h1", "interleaved-zb"):
        text = f"pp=4 schedule={schedule}" + (" virtual_stages=2" if schedule == "interleaved-zb" else "")
        split = max(rank.peak.activations for rank in memory(LLAMA, text, job)[1:3])
        again = max(rank.peak.activations for rank in memory(LLAMA, f"{text} recompute=full", job)[1:3])
        assert again < split / 3


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_every_schedule_ends_with_the_same_gradients(schedule: str) -> None:
    for zero in (0, 1, 2, 3):
        for rank in memory(LLAMA, f"dp=2 pp=4 zero={zero} schedule={schedule}"):
            last = list(rank.moments())[-1]
            assert last.phase == "optimizer"
            assert last.gradients == rank.parameters
            assert last.activations == last.logits == 0


@pytest.mark.parametrize("pipeline", ["pp=1", "pp=4 schedule=1f1b", "pp=4 schedule=gpipe"])
def test_activations_on_the_host_leave_two_layers_on_the_device(pipeline: str) -> None:
    here, away = memory(LLAMA, pipeline), memory(LLAMA, f"{pipeline} offload.activations=host")
    layer = read_config(LLAMA).at(Layout(sequence=256, compute_dtype="bfloat16")).layers[0].saved_bytes["none"]
    for index, (before, after) in enumerate(zip(here, away, strict=True)):
        layers = 8 // len(here)
        flight = {"pp=1": 1, "pp=4 schedule=1f1b": 4 - index, "pp=4 schedule=gpipe": 16}[pipeline]
        assert before.host == 0
        assert after.host == flight * layers * layer
        most = max(moment.activations for moment in after.moments())
        assert most < max(moment.activations for moment in before.moments()) or layers * flight <= 2
        if 0 < index < len(here) - 1:
            assert 2 * layer <= most < 3 * layer
