"""Said is done: what is priced is what the engine counts, on real ranks, for three models and many strategies."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from meshwright.measure import trace
from meshwright.spec import Job, Layout, ModelSpec, Strategy, parse_strategy
from tests.cost import counted
from tests.cost.counted import SEQUENCE, build, count, squares
from tests.harness.pairwise import Row, pairwise
from tests.harness.ranks import run_ranks

FACTORS: dict[str, tuple[Any, ...]] = {
    "model": ("llama", "gpt2", "decoder"),
    "world": (2, 3, 4, 1),
    "zero": (3, 2, 1, 0),
    "shard": (0, 2),
    "compute": ("bfloat16", "float32"),
    "recompute": ("none", "selective", "full", "first"),
    "accumulation": (3, 1, 2),
    "microbatch": (1, 2),
    "prefetch": (0, 1),
    "unit_blocks": (1, 2),
    "tied": (True, False),
}


def allowed(row: Row) -> bool:
    """Whether a combination is legal; a part of one may still become legal."""
    world, zero, shard = row.get("world"), row.get("zero"), row.get("shard")
    if shard and ((world and (world % shard or shard >= world)) or zero == 0):
        return False
    return not (row.get("prefetch") and zero is not None and zero != 3)


def strategy_of(row: Row) -> Strategy:
    words = f"dp={row['world']} zero={row['zero']} microbatch={row['microbatch']} prefetch={row['prefetch']}"
    words += f" unit_blocks={row['unit_blocks']}" + (f" shard={row['shard']}" if row["shard"] else "")
    again = row["recompute"]
    words += " recompute=full recompute_blocks=2" if again == "first" else f" recompute={again}"
    return parse_strategy(words)


def described(name: str, tied: bool, compute: str) -> ModelSpec:
    if name in ("unseen", "frozen"):
        example = torch.zeros(2, SEQUENCE, 24)
        targets = torch.zeros(2, SEQUENCE, 7)
        return trace(
            partial(build, name, tied), example, loss=squares, targets=targets, compute_dtype=compute, kernels="cpu"
        )  # type: ignore[arg-type]
    return counted.described(name, tied=tied, layout=Layout(sequence=SEQUENCE, compute_dtype=compute))  # type: ignore[arg-type]


def compare(row: Row) -> None:
    strategy = strategy_of(row)
    job = Job(
        global_batch=row["world"] * row["microbatch"] * row["accumulation"],
        sequence=SEQUENCE,
        compute_dtype=row["compute"],
        reduce_dtype=row.get("reduce", "float32"),
    )
    model = described(row["model"], row["tied"], row["compute"])
    found = run_ranks(row["world"], count, row["model"], row["tied"], job, strategy, timeout_s=120)[0]
    token = 4 * (24 + 7) if row["model"] in ("unseen", "frozen") else 8
    counted.compare(model, job, strategy, found, token_bytes=token)


def named(row: Row) -> str:
    return " ".join(map(str, row.values()))


@pytest.mark.parametrize("row", pairwise(FACTORS, allowed), ids=named)
def test_predicted_memory_and_collectives_are_the_counted_ones(row: Row) -> None:
    compare(row)


@pytest.mark.parametrize(("world", "zero", "compute"), [(1, 0, "float32"), (2, 3, "float32"), (2, 1, "bfloat16")])
def test_B6_a_model_that_nobody_saw_before_is_priced_from_its_trace(world: int, zero: int, compute: str) -> None:
    """Search scripts carried hand-profiled constants of one model. Here nothing is known but the module itself."""
    row = {"model": "unseen", "world": world, "zero": zero, "shard": 0, "compute": compute, "recompute": "none"}
    compare(row | {"accumulation": 2, "microbatch": 2, "prefetch": 0, "unit_blocks": 1, "tied": False})


@pytest.mark.parametrize(
    ("world", "zero", "compute", "accumulation"),
    [
        (3, 0, "bfloat16", 1),
        (2, 2, "bfloat16", 2),
        (3, 3, "float32", 2),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in ((2, 0, "float32", 2), (2, 1, "float32", 1))),
    ],
)
def test_gradients_that_are_sent_in_bfloat16(world: int, zero: int, compute: str, accumulation: int) -> None:
    row = {"model": "llama", "world": world, "zero": zero, "shard": 0, "compute": compute, "recompute": "none"}
    row |= {"accumulation": accumulation, "microbatch": 1, "prefetch": 0, "unit_blocks": 1, "tied": False}
    compare(row | {"reduce": "bfloat16"})


@pytest.mark.parametrize(("world", "zero"), [(1, 0), (2, 3)])
def test_frozen_parameters_have_no_gradients_and_no_states(world: int, zero: int) -> None:
    row = {"model": "frozen", "world": world, "zero": zero, "shard": 0, "compute": "float32", "recompute": "none"}
    compare(row | {"accumulation": 2, "microbatch": 2, "prefetch": 0, "unit_blocks": 1, "tied": False})


@pytest.mark.slow
def test_eight_ranks() -> None:
    row = {"model": "decoder", "world": 8, "zero": 3, "shard": 4, "compute": "bfloat16", "recompute": "selective"}
    compare(row | {"accumulation": 2, "microbatch": 1, "prefetch": 1, "unit_blocks": 2, "tied": True})


def lattice() -> list[Row]:
    """Every model, number of ranks, stage and recompute policy, in both compute dtypes."""
    rows = []
    for model in FACTORS["model"]:
        for world in (1, 2, 3, 4, 5, 8):
            for zero in FACTORS["zero"]:
                for index, again in enumerate(FACTORS["recompute"]):
                    compute = FACTORS["compute"][(index + world + zero) % 2]
                    rest = {"shard": 0, "prefetch": 0, "unit_blocks": 1, "tied": bool(index % 2)}
                    rest |= {"accumulation": 1 + world % 3, "microbatch": 2, "recompute": again}
                    rows.append({"model": model, "world": world, "zero": zero, "compute": compute, **rest})
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("row", lattice(), ids=named)
def test_predicted_is_counted_over_the_lattice(row: Row) -> None:
    compare(row)
