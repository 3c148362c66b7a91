"""Prices of strategies of every kind, and how stages are cut (`test_floors.py` has the floors)."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from meshwright.cost.floors import Floors
from meshwright.cost.pricer import Pricer
from meshwright.errors import MeshwrightError
from meshwright.spec import Job, Offload, Strategy
from meshwright.spec.catalogue import find_model
from meshwright.spec.clusters import parse_cluster

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "interleaved-zb", "zb-v", "dualpipev")


def drawn(draw: random.Random, experts: bool) -> Strategy | None:
    """A random strategy, None where the draw is no legal one."""
    pp = draw.choice([1, 1, 2, 3, 4])
    options: dict[str, Any] = {
        "dp": draw.choice([1, 2, 4, 8]),
        "tp": draw.choice([1, 2, 4, 8]),
        "cp": draw.choice([1, 1, 2]),
        "ep": draw.choice([1, 2, 4]) if experts else 1,
        "pp": pp,
        "microbatch": draw.choice([1, 2]),
        "zero": draw.randrange(4),
        "recompute": draw.choice(["none", "selective", "full"]),
    }
    options["sequence_parallel"] = options["tp"] > 1 and draw.random() < 0.5
    if pp > 1:
        options["schedule"] = draw.choice(SCHEDULES)
        looped = options["schedule"] in ("interleaved-1f1b", "looped-bfs", "interleaved-zb")
        options["virtual_stages"] = 2 if looped or options["schedule"] in ("zb-v", "dualpipev") else 1
    if options["zero"] == 3:
        options["prefetch"] = draw.randrange(2)
        options["gather"] = draw.choice(["unit", "step", "chunk"]) if pp > 1 else "unit"
    if options["zero"]:
        options["shard"] = draw.choice([1, options["dp"]])
    if options["recompute"] != "none":
        options["recompute_blocks"] = draw.choice([0, 3])
    if draw.random() < 0.2:
        options["offload"] = Offload(optimizer=draw.choice(["device", "host"]), activations="host")
    try:
        return Strategy(**options)
    except MeshwrightError:
        return None


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b", "gpt2-xl"])
def test_terms_add_up_to_the_step(name: str) -> None:
    draw = random.Random(name)
    cluster = parse_cluster("8xA100-80GB:64")
    pricer = Pricer(find_model(name), cluster, Job(global_batch=64, sequence=1024, compute_dtype="bfloat16"))
    seen = 0
    while seen < 80:
        strategy = drawn(draw, experts=name.startswith("mixtral"))
        try:
            if strategy is None:
                continue
            cost = pricer.price(pricer.settled(strategy))
        except MeshwrightError:
            continue
        seen += 1
        assert sum(cost.terms.values()) == pytest.approx(cost.step_s, rel=1e-9), str(strategy)


def test_more_data_parallel_ranks_do_not_raise_a_mesh_floor() -> None:
    pricer = Pricer(
        find_model("llama-3-8b"),
        parse_cluster("8xH100-80GB:8"),
        Job(global_batch=96, sequence=4096, compute_dtype="bfloat16"),
    )
    floors = Floors(pricer)
    found = [floors.mesh_s(Strategy(dp=dp, pp=2, schedule="1f1b")) for dp in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)]
    assert found == sorted(found, reverse=True)


def test_stages_are_cut_so_that_the_head_is_counted() -> None:
    pricer = Pricer(
        find_model("llama-3-8b"),
        parse_cluster("8xH100-80GB:1"),
        Job(global_batch=32, sequence=4096, compute_dtype="bfloat16"),
    )
    even = Strategy(dp=1, pp=8, schedule="1f1b", stages=(4,) * 8)
    settled = pricer.settled(replace(even, stages=()))
    assert sum(settled.stages) == 32
    assert settled.stages[-1] < 4
    assert pricer.step_s(settled) < pricer.step_s(even)
