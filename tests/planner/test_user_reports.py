"""What users of other planners met, on paper."""

from __future__ import annotations

import tomllib
from dataclasses import fields, replace

import pytest

from meshwright.cost.pricer import Pricer
from meshwright.planner import make_plan
from meshwright.spec import Cluster, Efficiency, Job, Link, Plan, parse_assignments
from meshwright.spec.clusters import parse_cluster
from meshwright.spec.decoder import described
from meshwright.spec.files import dump_toml, from_table, to_table
from tests.planner.machines import EVEN, SMALL, cluster

JOB = Job(global_batch=8, sequence=64, compute_dtype="bfloat16")


def plan(machines: Cluster, pins: str = "", job: Job = JOB) -> Plan:
    return make_plan(EVEN, machines, job, parse_assignments([pins], option="--pin", bounds=True) if pins else [])


@pytest.mark.parametrize("text", ["8xA100-80GB:2", "4xV100-SXM2-32GB", "8xH100-80GB:2@100Gb"])
def test_B6_every_constant_stands_in_the_plan_with_its_source(text: str) -> None:
    """Reported: hand-profiled numbers in a search script that nobody could redo."""
    made = plan(parse_cluster(text))
    known = {constant.name: constant for constant in made.provenance.constants}
    assert all(constant.source for constant in known.values())
    values = {constant.value for constant in known.values()}
    (group,) = made.cluster.nodes
    reached = group.device.efficiency
    assert reached is not None
    told = [getattr(reached, entry.name) for entry in fields(Efficiency) if entry.name not in ("products", "source")]
    told += [group.device.memory_bytes, group.host_memory_bytes_per_s]
    for link in (group.inside, group.host_link, group.disk, made.cluster.between):
        if link is not None:
            plain = {entry.name: getattr(link, entry.name) for entry in fields(Link)}
            told += [*(plain.pop("collectives") or {}).values(), *plain.values()]
    assert not [value for value in told if value not in values]
    dtype = "bfloat16" if "V100" not in text else "float32"
    assert group.device.peak_flops_per_s[dtype] in values
    assert any(reached.source == constant.source for constant in known.values())


def test_B6_a_plan_file_alone_gives_its_prices_again() -> None:
    made = plan(parse_cluster("8xA100-80GB:2"))
    read = from_table(Plan, tomllib.loads(dump_toml(to_table(made))), "")
    again = Pricer(described(read.decoder), read.cluster, read.job).price(read.strategy)
    assert again == made.cost


def test_H6_reading_and_writing_a_disk_is_a_term_of_seconds() -> None:
    """Reported: "is I/O the bottleneck?"; right: seconds a step from bytes and the disk's bandwidth."""
    job = replace(JOB, global_batch=2)

    def offload_s(factor: float) -> float:
        whole = parse_cluster("2xA100-80GB")
        (group,) = whole.nodes
        assert group.disk is not None
        disk = replace(group.disk, bytes_per_s=1e6 * factor)
        slow = replace(whole, nodes=(replace(group, disk=disk),))
        pins = "offload.optimizer=disk offload.path=/scratch zero=1 dp=2 tp=1 pp=1 cp=1"
        made = plan(slow, pins, job)
        assert made.cost.disk_bytes > 0
        moved = 2 * made.cost.disk_bytes / (disk.bytes_per_s * disk.efficiency)
        assert made.cost.terms["offload"] > 0.5 * moved
        return made.cost.terms["offload"]

    assert offload_s(1) == pytest.approx(2 * offload_s(2), rel=0.05)


def test_M2_more_ranks_than_rows_are_priced_with_empty_shards() -> None:
    """Reported: a crash on 128 GPUs, where a dim of 4 was cut over 8 ranks and more."""
    job = Job(global_batch=128, sequence=64)
    pins = parse_assignments(["zero=3 dp=128 tp=1 pp=1 cp=1 shard=128"], option="--pin")
    made = make_plan(SMALL, cluster(128, 2**30), job, pins)
    assert made.strategy.shard == 128
    assert made.cost.padding_bytes > 0
    assert made.cost.at_rest["parameters"] >= 4 * made.model.parameters / 128


@pytest.mark.parametrize("pins", ["tp=1 pp=1", "tp=2", "pp=2", "cp=2", "tp=2 pp=2", "dp=2", "microbatch=2"])
def test_M4_the_global_batch_is_the_users_whatever_the_degrees(pins: str) -> None:
    """Reported: the global batch changed with the degree of tensor parallelism."""
    strategy = plan(cluster(4, 2**30), pins).strategy
    assert strategy.dp * strategy.microbatch * strategy.microbatches(JOB.global_batch) == JOB.global_batch
