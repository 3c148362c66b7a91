"""The search loses nothing: it finds what pricing everything finds; and better machines never make a plan slower."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.pricer import Pricer
from meshwright.errors import ConfigError
from meshwright.planner.exhaustive import exhaustive
from meshwright.planner.objective import find_objective
from meshwright.planner.pins import Pins
from meshwright.planner.search import search
from meshwright.planner.space import Space
from meshwright.spec import Cluster, DecoderShape, Device, Job, Link, NodeGroup, Strategy, parse_assignments
from meshwright.spec.decoder import described

MIB = 2**20


def machines(devices: int, nodes: int, memory_bytes: int, *, between: float = 1e9, peak: float = 1e12) -> Cluster:
    device = Device(
        name="small",
        kind="cpu",
        memory_bytes=memory_bytes,
        memory_bytes_per_s=2e10,
        peak_flops_per_s={"float32": peak},
    )
    group = NodeGroup(count=nodes, devices=devices, device=device, inside=Link(latency_s=1e-6, bytes_per_s=1e10))
    link = Link(latency_s=1e-5, bytes_per_s=between) if nodes > 1 else None
    return Cluster(name="small machines", nodes=(group,), between=link, memory_fraction=1.0)


def space_of(
    shape: DecoderShape, cluster: Cluster, job: Job, *pins: str, executable: bool = False
) -> tuple[Pricer, Space]:
    pricer = Pricer(described(shape), cluster, job)
    return pricer, Space(pricer, Pins(parse_assignments(pins, option="--pin", bounds=True)), executable=executable)


@st.composite
def questions(draw: st.DrawFn) -> tuple[DecoderShape, Cluster, Job]:
    heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    shape = DecoderShape(
        vocab_size=draw(st.sampled_from([101, 1024])),
        hidden_size=heads * draw(st.sampled_from([6, 32])),
        intermediate_size=draw(st.sampled_from([31, 256])),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_attention_heads=heads,
        num_key_value_heads=draw(st.sampled_from([n for n in (1, 2) if heads % n == 0])),
        max_position_embeddings=256,
    )
    nodes = draw(st.sampled_from([1, 1, 2]))
    devices = draw(st.integers(1, 3 if nodes == 1 else 2))
    memory = (300 + draw(st.sampled_from([1, 2, 4, 8, 16, 400]))) * MIB
    between = draw(st.sampled_from([1e7, 1e9]))
    cluster = machines(devices, nodes, memory, between=between, peak=draw(st.sampled_from([1e10, 1e12])))
    job = Job(global_batch=draw(st.sampled_from([1, 2, 3, 4])), sequence=draw(st.sampled_from([64, 256])))
    return shape, cluster, job


@settings(max_examples=30, deadline=None)
@given(
    question=questions(),
    objective=st.sampled_from(["time", "time", "cost", "devices"]),
    executable=st.booleans(),
)
def test_the_search_finds_what_pricing_everything_finds(
    question: tuple[DecoderShape, Cluster, Job], objective: str, executable: bool
) -> None:
    """Executable ones too: data and tensor parallelism, sequences cut and whole."""
    pricer, space = space_of(*question, executable=executable)
    aim = find_objective(objective)
    if objective == "devices":
        space = space.offloading()
    expected = exhaustive(pricer, space, aim)
    try:
        found = search(pricer, space, aim, most=5).fitting
    except ConfigError:
        found = []
    if not expected and objective != "devices":
        expected = exhaustive(pricer, space.offloading(), aim)
    assert [str(one.strategy) for one in found] == [str(one.strategy) for one in expected[:5]]


SHAPE = DecoderShape(
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
JOB = Job(global_batch=8, sequence=256)


def fastest(cluster: Cluster, *, executable: bool = False) -> float:
    pricer, space = space_of(SHAPE, cluster, JOB, executable=executable)
    found = search(pricer, space, find_objective("time"), most=1).fitting
    return found[0].step_s if found else float("inf")


@settings(max_examples=15, deadline=None)
@given(
    memory=st.integers(2, 64),
    between=st.sampled_from([1e7, 1e8, 1e9]),
    more=st.sampled_from(["memory", "memory bandwidth", "peak", "inside", "between"]),
    factor=st.floats(1.1, 8),
    executable=st.booleans(),
)
def test_more_memory_bandwidth_or_peak_never_gives_a_slower_plan(
    memory: int, between: float, more: str, factor: float, executable: bool
) -> None:
    cluster = machines(2, 2, (300 + memory) * MIB, between=between)
    (group,), device, link = cluster.nodes, cluster.nodes[0].device, cluster.between
    assert link is not None
    assert device.memory_bytes_per_s is not None
    assert group.inside is not None
    if more == "memory":
        device = replace(device, memory_bytes=int(device.memory_bytes * factor))
    elif more == "memory bandwidth":
        device = replace(device, memory_bytes_per_s=device.memory_bytes_per_s * factor)
    elif more == "peak":
        device = replace(device, peak_flops_per_s={"float32": device.peak_flops_per_s["float32"] * factor})
    elif more == "inside":
        group = replace(group, inside=replace(group.inside, bytes_per_s=group.inside.bytes_per_s * factor))
    else:
        link = replace(link, bytes_per_s=link.bytes_per_s * factor)
    better = replace(cluster, nodes=(replace(group, device=device),), between=link)
    assert fastest(better, executable=executable) <= fastest(cluster, executable=executable) * (1 + 1e-9)


def test_tensor_parallelism_is_chosen_where_it_runs() -> None:
    """There is one sequence a step, so that data parallelism has no use for the second device."""
    job = replace(JOB, global_batch=1)
    pricer, space = space_of(SHAPE, machines(2, 1, 340 * MIB), job, executable=True)
    found = search(pricer, space, find_objective("time"), most=50).fitting
    assert found[0].strategy.tp == 2
    assert all(one.executable and one.strategy.cp == 1 for one in found)
    assert {one.strategy.sequence_parallel for one in found if one.strategy.tp == 2} == {True, False}
    assert {one.strategy.tp for one in found} == {1, 2}


def test_the_same_question_has_the_same_answer_whatever_the_hash_seed() -> None:
    code = (
        "from tests.planner.test_properties import SHAPE, JOB, machines, space_of, find_objective, search\n"
        "pricer, space = space_of(SHAPE, machines(2, 2, 310 * 2**20), JOB)\n"
        "print(*(one.strategy for one in search(pricer, space, find_objective('time')).fitting), sep='\\n')\n"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(texts) == 1
    assert texts.pop().strip()


SOME_PINS = [
    *("dp=2", "tp=2", "pp=2", "pp<=2", "zero=1", "zero>=2", "schedule=1f1b", "microbatch<=2", "recompute=full"),
    *("sequence_parallel=false", "shard=2", "virtual_stages=2", "prefetch=1", "offload.optimizer=host"),
]


@settings(max_examples=15, deadline=None)
@given(
    pins=st.lists(
        st.sampled_from(SOME_PINS),
        max_size=3,
        unique_by=lambda pin: pin.replace("<", "=").replace(">", "=").split("=")[0],
    )
)
def test_pins_are_kept_or_refused(pins: list[str]) -> None:
    cluster = machines(2, 2, 400 * MIB)
    kept = parse_assignments(pins, option="--pin", bounds=True)
    try:
        pricer, space = space_of(SHAPE, cluster, JOB, *pins)
        found = search(pricer, space, find_objective("time"), most=3).fitting
    except ConfigError:
        return
    for candidate in found:
        for pin in kept:
            value: object = candidate.strategy
            for part in pin.key.split("."):
                value = getattr(value, part)
            assert pin.allows(value), f"{candidate.strategy} does not keep {pin}"
        assert Strategy(**{name: getattr(candidate.strategy, name) for name in vars(candidate.strategy)})
