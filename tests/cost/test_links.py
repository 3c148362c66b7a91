"""Collectives by the place of their ranks: closed forms, placement, and what must never happen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cost.links import Group, Placement, collective_s
from meshwright.spec import Link, Strategy
from meshwright.spec.clusters import parse_cluster

FAST = Link(latency_s=2e-6, bytes_per_s=300e9, efficiency=0.8)
SLOW = Link(latency_s=5e-6, bytes_per_s=25e9, efficiency=0.8)
MIB = 2**20


def group(size: int, nodes: int = 1) -> Group:
    return Group(size=size, inside=size // nodes, nodes=nodes, within=FAST, between=SLOW)


@pytest.mark.parametrize(("kind", "passes"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_ring_on_one_node(kind: str, passes: int, size: int) -> None:
    # Thakur et al. 2005: (n-1) steps of latency and of 1/n of the message, twice for an all-reduce.
    expected = passes * (size - 1) * (2e-6 + 64 * MIB / size / (300e9 * 0.8))
    assert collective_s(kind, 64 * MIB, group(size)) == pytest.approx(expected)  # type: ignore[arg-type]


def test_over_nodes_every_rank_drives_its_share_of_the_network() -> None:
    # 4 nodes of 8: a node takes in 3/4 of the message through 8 network ports, a fifth longer for two doublings.
    over = collective_s("all_gather", 1e9, group(32, nodes=4))
    alone = collective_s("all_gather", 1e9, group(4, nodes=4))
    moved = 0.75 * 1e9 / (25e9 * 0.8)
    assert alone == pytest.approx(moved * 1.2, rel=0.01)
    assert over == pytest.approx(moved * 1.2 / 8, rel=0.02)


def test_an_exchange_sends_what_other_nodes_need_over_the_network() -> None:
    spread = collective_s("all_to_all", 1e9, group(32, nodes=4))
    assert spread == pytest.approx((32 - 8) / 32 * 1e9 / (25e9 * 0.8), rel=0.01)


def test_one_rank_needs_no_collective() -> None:
    assert collective_s("all_reduce", 1e9, group(1)) == 0


def test_a_node_is_never_slower_than_two() -> None:
    for kind in ("all_gather", "all_reduce", "all_to_all"):
        assert collective_s(kind, 1e8, group(8)) < collective_s(kind, 1e8, group(8, nodes=2))


def test_tensor_parallel_ranks_share_a_node_and_replicas_lie_apart() -> None:
    cluster = parse_cluster("8xH100-80GB:4")
    placed = Placement(cluster, Strategy(dp=2, tp=8, pp=2, schedule="1f1b", zero=1))
    assert placed.group("tp")[:3] == (8, 8, 1)
    assert placed.group("dp_shard")[:3] == (2, 1, 2)
    assert placed.group("pp")[:3] == (2, 1, 2)
    hybrid = Placement(cluster, Strategy(dp=32, zero=3, shard=8))
    assert hybrid.group("zero")[:3] == (8, 8, 1)
    assert hybrid.group("dp_replicate")[:3] == (4, 1, 4)
    assert hybrid.group("reduced")[:3] == (32, 8, 4)


def test_an_order_of_dimensions_moves_ranks_apart() -> None:
    cluster = parse_cluster("8xH100-80GB:2")
    order = ("tp", "pp", "dp_replicate", "dp_shard", "cp")
    spread = Placement(cluster, Strategy(dp=8, tp=2, zero=1, mesh_order=order))
    assert spread.group("tp")[:3] == (2, 1, 2)
    assert spread.group("zero")[:3] == (8, 8, 1)


def test_a_pipeline_over_unequal_nodes_has_its_own_device_on_each_stage() -> None:
    fast, slow = parse_cluster("8xH100-80GB").nodes[0], parse_cluster("8xA100-80GB").nodes[0]
    cluster = replace(parse_cluster("8xH100-80GB:2"), nodes=(fast, slow))
    placed = Placement(cluster, Strategy(dp=1, tp=8, pp=2, schedule="1f1b"))
    assert [placed.devices(stage).name for stage in range(2)] == ["H100-SXM-80GB", "A100-SXM-80GB"]
    across = Placement(cluster, Strategy(dp=16))
    assert across.devices(0).name == "A100-SXM-80GB"  # the slowest one sets the pace
