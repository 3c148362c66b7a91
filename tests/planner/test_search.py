"""What the search chooses where the right choice is known, and what it refuses. Rows are those of users' reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cost.pricer import Pricer
from meshwright.errors import ConfigError, MeshwrightError, UnsupportedCombination
from meshwright.planner.objective import find_objective
from meshwright.planner.pins import Pins
from meshwright.planner.rule import Candidate
from meshwright.planner.search import Result, search
from meshwright.planner.space import Space
from meshwright.schedule import compute_orders
from meshwright.spec import Cluster, DecoderShape, Job, Link, Strategy, parse_assignments
from meshwright.spec.catalogue import find_model
from meshwright.spec.clusters import parse_cluster
from meshwright.spec.decoder import described
from meshwright.spec.devices import find_device
from meshwright.spec.families import Described
from tests.planner.machines import SMALL, cluster

ODD = DecoderShape(
    vocab_size=101,
    hidden_size=10,
    intermediate_size=31,
    num_hidden_layers=5,
    num_attention_heads=5,
    num_key_value_heads=5,
    max_position_embeddings=64,
)


def asked(model: Described, machines: Cluster, job: Job, *pins: str, objective: str = "time", most: int = 3) -> Result:
    pricer = Pricer(model, machines, job)
    space = Space(pricer, Pins(parse_assignments(pins, option="--pin", bounds=True)))
    return search(pricer, space, find_objective(objective), most=most)


def best(model: Described, machines: Cluster, job: Job, *pins: str, objective: str = "time") -> Candidate:
    return asked(model, machines, job, *pins, objective=objective, most=1).fitting[0]


def accelerated(global_batch: int, sequence: int) -> Job:
    return Job(global_batch=global_batch, sequence=sequence, compute_dtype="bfloat16")


def test_A6_zero_3_takes_more_memory_than_zero_2_where_gathered_units_exceed_the_shards() -> None:
    """Two ranks, few large units, gathered ahead into buffers: ZeRO-2 keeps less, and is chosen where only it fits."""
    shape = replace(SMALL, num_hidden_layers=2, hidden_size=1536, intermediate_size=6144, num_attention_heads=12)
    machines, job = parse_cluster("2xA100-80GB"), accelerated(2, 64)
    pricer = Pricer(described(shape), machines, job)
    bytes_of = {zero: pricer.memory(Strategy(dp=2, zero=zero, prefetch=zero // 3)).worst.total_bytes for zero in (2, 3)}
    assert bytes_of[2] < bytes_of[3]
    (group,) = machines.nodes
    device = replace(group.device, memory_bytes=bytes_of[2])
    tight = replace(machines, nodes=(replace(group, device=device),), memory_fraction=1.0)
    pins = ("dp=2", "zero>=2", "recompute=none", "tp=1", "pp=1", "cp=1", "offload.optimizer=device")
    assert best(described(shape), tight, job, *pins).strategy.zero == 2
    assert not asked(described(shape), tight, job, *pins, "zero=3", "prefetch=1").fitting


def test_B1_slow_links_flip_the_choice() -> None:
    """Fast links everywhere: data parallel with sharding. A slow network: less of it crosses nodes."""
    model, job = find_model("llama-2-13b"), accelerated(64, 4096)
    fast = parse_cluster("8xH100-80GB:2")
    assert fast.between is not None
    slow = replace(fast, between=replace(fast.between, bytes_per_s=0.2e9))
    pins = ("schedule=1f1b", "microbatch=1", "sequence_parallel=true", "pp>=2")
    wide = {
        name: min(
            (
                *asked(model, machines, job, "pp=1", "tp=1", "cp=1", "microbatch=1", "shard=16").fitting,
                *asked(model, machines, job, *pins).fitting,
            ),
            key=lambda candidate: candidate.key(find_objective("time")),
        ).strategy
        for name, machines in (("fast", fast), ("slow", slow))
    }
    assert wide["fast"].pp == 1
    assert wide["slow"].pp > 1


def test_B2_hybrid_sharding_is_offered_on_two_nodes() -> None:
    """2 nodes of 8 with 25 GB/s each: shards inside a node, replicas across, is among what is ranked."""
    model, machines = find_model("llama-2-7b"), parse_cluster("8xA100-80GB:2@25GB")
    found = asked(model, machines, accelerated(32, 2048), "tp=1", "pp=1", "cp=1", "zero>=2", most=6)
    assert (16, 8) in [(one.strategy.dp, one.strategy.shard) for one in found.fitting]


def test_B9_sharding_inside_a_node_is_chosen_where_the_network_is_slow() -> None:
    """Many nodes, and a network too slow to gather over."""
    model, machines = find_model("llama-2-7b"), parse_cluster("8xA100-80GB:8@25GB")
    found = best(model, machines, accelerated(128, 2048), "tp=1", "pp=1", "cp=1", "zero>=2", "microbatch=1")
    assert (found.strategy.dp, found.strategy.shard) == (64, 8)


def test_B10_a_model_that_fits_is_not_sharded_whole() -> None:
    """1B parameters on 4 x 80 GB: DDP or ZeRO-1."""
    found = best(find_model("llama-3.2-1b"), parse_cluster("4xA100-80GB"), accelerated(64, 2048))
    assert found.strategy.zero < 3


def test_C6_layers_that_pp_does_not_divide_are_cut_unevenly() -> None:
    """7 layers on 2 stages: 3 + 4 or 4 + 3."""
    found = best(
        described(replace(SMALL, num_hidden_layers=7)),
        cluster(2, 2**40),
        Job(global_batch=4, sequence=64),
        "pp=2",
        "schedule=1f1b",
    )
    assert sorted(found.strategy.stages or (3, 4)) == [3, 4]


@pytest.mark.parametrize("devices", [3, 5, 6, 7])
def test_M1_any_number_of_devices_and_sizes_that_divide_nothing(devices: int) -> None:
    """Hidden 10, vocabulary 101, 5 layers: every ZeRO stage and pipelines, on as many ranks as there are devices."""
    job = Job(global_batch=2 * devices, sequence=64)
    for zero in range(4):
        found = best(described(ODD), cluster(devices, 2**40), job, f"zero={zero}", f"dp={devices}")
        assert found.strategy.world_size == devices
    if devices <= 5:
        piped = best(described(ODD), cluster(devices, 2**40), job, f"pp={devices}")
        assert piped.strategy.pp == devices
    refused = with_error(described(ODD), cluster(devices, 2**40), job, "tp=2")
    assert isinstance(refused, UnsupportedCombination)
    assert "tp to one of 1" in refused.fix


def test_M4_the_global_batch_is_the_users_whatever_the_strategy() -> None:
    job = Job(global_batch=12, sequence=64)
    for pins in ((), ("tp=2",), ("pp=2",), ("dp=3",)):
        shape = replace(SMALL, intermediate_size=32)
        for candidate in asked(described(shape), cluster(4, 2**40), job, *pins).fitting:
            s = candidate.strategy
            assert s.dp * s.microbatch * s.microbatches(12) == 12


def with_error(model: Described, machines: Cluster, job: Job, *pins: str) -> MeshwrightError:
    with pytest.raises(MeshwrightError) as caught:
        asked(model, machines, job, *pins)
    return caught.value


@pytest.mark.parametrize(
    ("pins", "what"),
    [
        (["cp=3"], "cp=3 does not divide the sequence of 64 tokens"),
        (["tp=4"], "tp=4 does not divide"),
        (["pp=6"], "pp=6 pinned but"),
        (["ep=2"], "ep=2, but"),
        (["tp=2", "pp=2", "cp=2"], "tp=2 pp=2 cp=2 pinned but test machine has 4 devices"),
        (["pp=2", "schedule=single"], "pp=2 needs a pipeline schedule"),
        (["schedule=1f1b", "pp=1"], "schedule=1f1b has no effect with pp=1"),
        (["pp=2", "virtual_stages=3", "schedule=interleaved-1f1b"], "pp=2 x virtual_stages=3 make 6 stages"),
        (["sequence_parallel=true", "tp=1"], "sequence_parallel=true has no effect with tp=1"),
    ],
)
def test_what_a_mesh_cannot_be_is_one_clear_error(pins: list[str], what: str) -> None:
    error = with_error(described(SMALL), cluster(4, 2**40), Job(global_batch=12, sequence=64), *pins)
    assert isinstance(error, ConfigError)
    assert error.what.startswith(what)
    assert error.fix


def test_unknown_objectives_are_refused() -> None:
    with pytest.raises(ConfigError, match="objective=speed"):
        find_objective("speed")


def test_the_fewest_devices_that_fit() -> None:
    model, job = find_model("llama-2-7b"), accelerated(16, 2048)
    found = best(model, parse_cluster("8xA100-80GB"), job, "offload.optimizer=device", objective="devices")
    devices = found.strategy.world_size
    assert 1 < devices < 8
    fewer = replace(
        parse_cluster("8xA100-80GB"), nodes=(replace(parse_cluster("8xA100-80GB").nodes[0], devices=devices - 1),)
    )
    assert not asked(model, fewer, job, "offload.optimizer=device").fitting


def test_offload_is_only_used_where_nothing_fits_without() -> None:
    model, job = find_model("llama-2-7b"), accelerated(8, 1024)
    without = best(model, parse_cluster("8xA100-80GB"), job).strategy
    assert without.offload.optimizer == "device"
    alone = best(model, parse_cluster("1xA100-80GB"), job).strategy
    assert "host" in (alone.offload.optimizer, alone.offload.parameters)


def unequal(slow: str) -> Cluster:
    fast, other = find_device("H100-80GB").nodes(8, 1), find_device(slow).nodes(8, 1)
    network = Link(latency_s=4e-6, bytes_per_s=50e9)
    return Cluster(name="two kinds of nodes", nodes=(other, fast), between=network)


def test_slow_nodes_are_left_out_where_they_hold_up_the_others() -> None:
    model, job = find_model("llama-3.2-1b"), accelerated(32, 2048)
    pins = ("pp=1", "tp=1", "cp=1")
    with_slow = best(model, unequal("V100-32GB"), job, *pins)
    assert [group.device.name for group in with_slow.cluster.nodes] == ["H100-SXM-80GB"]
    equal = best(model, unequal("H100-80GB"), job, *pins)
    assert sum(group.count * group.devices for group in equal.cluster.nodes) == 16


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "interleaved-zb", "dualpipev", "zb-v", "1f1b", "zb-h1"])
def test_only_schedules_that_are_defined_for_the_microbatches_are_tried(schedule: str) -> None:
    for batch in range(1, 13):
        virtual = 1 if schedule in ("1f1b", "zb-h1") else 2
        try:
            compute_orders(schedule, ranks=3, microbatches=batch, virtual_stages=virtual)
            defined = True
        except UnsupportedCombination:
            defined = False
        pricer = Pricer(
            described(replace(SMALL, num_hidden_layers=6)), cluster(3, 2**40), Job(global_batch=batch, sequence=64)
        )
        pins = ("dp=1", "tp=1", "cp=1", "pp=3", "microbatch=1", f"schedule={schedule}", f"virtual_stages={virtual}")
        space = Space(pricer, Pins(parse_assignments(pins, option="--pin")))
        meshes = [group.at(dp) for group in space.classes() for dp in group.dps]
        assert any(True for mesh in meshes for _ in space.schedules(mesh)) == defined


@pytest.mark.parametrize("most_work", [500, 3_000])
@pytest.mark.parametrize(
    ("name", "machines", "batch", "sequence"),
    [("llama-2-13b", "8xA100-40GB:2", 256, 4096), ("llama-3-8b", "8xH100-80GB:4", 256, 8192)],
)
def test_a_search_that_ends_early_is_near_the_best_and_says_how_near(
    name: str, machines: str, batch: int, sequence: int, most_work: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(global_batch=batch, sequence=sequence, compute_dtype="bfloat16")
    whole = asked(find_model(name), parse_cluster(machines), job)
    assert whole.counts.unproven == 0, "this space is searched to its end"
    monkeypatch.setattr("meshwright.planner.branches._MOST_WORK", most_work)
    early = asked(find_model(name), parse_cluster(machines), job)
    assert 0 < early.counts.unproven < 0.25
    assert early.counts.strategies < whole.counts.strategies
    least, found = whole.fitting[0].step_s, early.fitting[0].step_s
    assert (1 - early.counts.unproven) * found <= least <= found <= 1.05 * least


def test_a_search_that_ends_early_goes_on_near_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V3 on 2,048 H800: where the search ends, a microbatch of 2 on the mesh of the best is not looked at."""
    job = Job(global_batch=15360, sequence=4096, compute_dtype="bfloat16")
    machines = parse_cluster("8xH800-80GB:256")
    monkeypatch.setattr("meshwright.planner.branches._MOST_WORK", 18_000)
    found = asked(find_model("deepseek-v3"), machines, job)
    monkeypatch.setattr("meshwright.planner.branches._NEAR", 0.0)
    without = asked(find_model("deepseek-v3"), machines, job)
    assert found.fitting[0].step_s < without.fitting[0].step_s
