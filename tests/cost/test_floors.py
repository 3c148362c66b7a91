"""Floors of a search: below the price for strategies of every kind, on accelerators and on CPUs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from meshwright.cost.floors import Floors
from meshwright.cost.held_floor import in_flight
from meshwright.cost.pricer import Pricer
from meshwright.errors import MeshwrightError
from meshwright.schedule import compute_orders
from meshwright.spec import Job
from meshwright.spec.catalogue import find_model
from meshwright.spec.clusters import parse_cluster
from meshwright.spec.job import Dtype
from tests.cost.test_prices import drawn


@pytest.mark.parametrize(
    ("name", "machines", "dtype"),
    [
        ("llama-3-8b", "8xA100-80GB:64", "bfloat16"),
        ("mixtral-8x7b", "8xH100-80GB:64", "bfloat16"),
        ("gpt2", "8xCPU:8", "float32"),
    ],
)
def test_floors_lie_below_prices(name: str, machines: str, dtype: Dtype) -> None:
    draw = random.Random(machines)
    job = Job(global_batch=64, sequence=1024, compute_dtype=dtype)
    pricer = Pricer(find_model(name), parse_cluster(machines), job)
    floors, seen = Floors(pricer), 0
    while seen < 80:
        strategy = drawn(draw, experts=name.startswith("mixtral"))
        try:
            if strategy is None:
                continue
            settled = pricer.settled(strategy)
            step_s, memory = pricer.step_s(settled), pricer.memory(settled)
        except MeshwrightError:
            continue
        seen += 1
        assert floors.mesh_s(strategy) <= step_s, str(settled)
        assert floors.recomputed_mesh_s(strategy) <= step_s, str(settled)
        assert floors.schedule_s(strategy) <= step_s, str(settled)
        assert floors.strategy_s(strategy) <= step_s, str(settled)
        assert floors.work_s(strategy) <= strategy.world_size * step_s, str(settled)
        assert floors.bytes(strategy) <= memory.worst.total_bytes, str(settled)
        for policy in ("selective", "full"):  # the settled strategy recomputes as much, or less
            lean = replace(strategy, recompute=policy, recompute_blocks=0)
            if strategy.recompute in ("none", policy):
                assert floors.least_bytes(lean) <= memory.worst.total_bytes, str(settled)
                assert floors.microbatch_bytes(lean, policy) <= memory.worst.total_bytes, str(settled)


@pytest.mark.parametrize(
    "schedule", ["1f1b", "zb-h1", "zb-v", "dualpipev", "interleaved-1f1b", "interleaved-zb", "gpipe"]
)
def test_as_many_microbatches_are_in_flight_as_the_orders_hold(schedule: str) -> None:
    for ranks in (2, 3, 4):
        for microbatches in (ranks, 2 * ranks, 4 * ranks):
            virtual = 1 if schedule in ("1f1b", "zb-h1", "gpipe") else 2
            try:
                orders = compute_orders(schedule, ranks=ranks, microbatches=microbatches, virtual_stages=virtual)
            except MeshwrightError:
                continue
            for rank in (0, ranks - 1):
                told = in_flight(schedule, ranks, microbatches, virtual, rank)
                held: dict[int, int] = {}
                most = 0
                for action in orders[rank]:
                    if action.kind == "forward":
                        held[action.stage] = held.get(action.stage, 0) + 1
                        if all(held.get(stage, 0) >= count for stage, count in told.items()):
                            most = max(most, sum(told.values()))
                    elif action.kind != "backward-weight":
                        held[action.stage] -= 1
                assert most == sum(told.values()), (ranks, microbatches, rank, told)
