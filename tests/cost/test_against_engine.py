"""Said is done: what is priced is what the engine counts, on real ranks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

from meshwright.cost import price
from meshwright.models import Decoder, DecoderConfig, token_loss
from meshwright.runtime import Engine
from meshwright.spec import DecoderShape, Job, Strategy, describe, parse_strategy
from meshwright.spec.job import Dtype
from tests.harness.ranks import run_ranks

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 125,
    "num_hidden_layers": 5,
    "max_position_embeddings": 64,
}
#: Of the total: moments inside a block, and the rows of a batch that a microbatch is a view of, are not priced.
TOLERANCE = 0.02
CASES: list[tuple[str, bool, Dtype]] = [
    ("dp=1 microbatch=4 recompute=full", True, "float32"),
    ("dp=2 microbatch=6", False, "bfloat16"),
    ("dp=2 microbatch=1 recompute=selective", True, "float32"),
    ("dp=2 zero=1 microbatch=2 recompute=full", False, "float32"),
    ("dp=3 zero=1 microbatch=4", True, "bfloat16"),
    ("dp=2 zero=2 microbatch=2", False, "bfloat16"),
    ("dp=2 zero=3 microbatch=2 prefetch=1", True, "float32"),
    ("dp=3 zero=3 microbatch=4 recompute=selective", False, "float32"),
    ("dp=4 zero=3 shard=2 microbatch=1 recompute=full recompute_blocks=2", False, "bfloat16"),
    ("dp=2 zero=3 microbatch=1 unit_blocks=2 recompute=full", False, "float32"),
]


def _count(shape: DecoderShape, job: Job, strategy: Strategy) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """One rank: bytes at the largest moment of the second step, at rest after it, and its collectives."""
    config = DecoderConfig(**{**asdict(shape), "head_dim": shape.head_dim or None})
    engine = Engine(
        lambda: Decoder(config), token_loss, lambda held: torch.optim.AdamW(held, fused=True), job, strategy
    )
    tokens = torch.randint(
        0, shape.vocab_size, (job.global_batch, job.sequence), generator=torch.Generator().manual_seed(0)
    )
    engine.step((tokens, tokens))
    report = engine.step((tokens, tokens))
    return report.peak_bytes, engine.bytes_at_rest(), report.collectives


@pytest.mark.parametrize(("text", "tied", "compute"), CASES)
def test_predicted_memory_and_collectives_are_the_counted_ones(text: str, tied: bool, compute: Dtype) -> None:
    shape, strategy = DecoderShape(**SIZES, tie_word_embeddings=tied), parse_strategy(text)
    job = Job(global_batch=12, sequence=32, compute_dtype=compute)
    cost = price(describe(shape, sequence=32, compute_dtype=compute), job, strategy)
    in_step, at_rest, collectives = run_ranks(strategy.world_size, _count, shape, job, strategy)[0]
    assert in_step["total"] == pytest.approx(cost.peak_bytes, rel=TOLERANCE)
    assert collectives == cost.collectives
    # The frequencies of the rotary embedding, and AdamW's step counter per tensor.
    frequencies, counters = 4 * shape.head_size // 2, 4 * (3 - tied + 9 * shape.num_hidden_layers)
    assert at_rest["parameters"] == cost.at_rest["parameters"] + frequencies
    assert at_rest["optimizer"] == pytest.approx(cost.at_rest["optimizer"] + counters, abs=8 * cost.padding_bytes)
