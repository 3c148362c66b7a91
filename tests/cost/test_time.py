"""The time of a step: closed forms where there are any, and what each term must do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.cost.play import Play
from meshwright.cost.time import StepTime, step_time
from meshwright.spec import (
    AttentionWork,
    BlockSpec,
    Cluster,
    Device,
    Efficiency,
    Job,
    Layout,
    Link,
    ModelSpec,
    NodeGroup,
    Offload,
    Product,
    Strategy,
)
from meshwright.spec.catalogue import find_model
from meshwright.spec.clusters import parse_cluster

GB = 10**9
#: A device that reaches what it says: 100 TFLOP/s, 1 TB/s, no time to start anything.
REACHED = Efficiency(
    products={"bfloat16": 1.0}, attention=1.0, backward_attention=1.0, memory=1.0, kernel_s=0.0, contention=0.0
)
DEVICE = Device(
    name="exact",
    kind="cuda",
    memory_bytes=80 * GB,
    memory_bytes_per_s=1e12,
    peak_flops_per_s={"bfloat16": 1e14},
    efficiency=REACHED,
)
LINK = Link(latency_s=0.0, bytes_per_s=1e11, efficiency=1.0)


def machines(nodes: int = 1, devices: int = 8, between: float = 1e11, **changes: Any) -> Cluster:
    group = NodeGroup(count=nodes, devices=devices, device=replace(DEVICE, **changes), inside=LINK)
    return Cluster(name="exact", nodes=(group,), between=replace(LINK, bytes_per_s=between))


def model(layers: int = 8, *, rows: int = 2048, width: int = 2048, **changes: Any) -> ModelSpec:
    """Layers of one product each; embedding and head cost nothing."""
    product = Product(rows, width, width)
    layer = BlockSpec(
        name="",
        kind="layer",
        parameters=width * width,
        tensors=((width, width),),
        forward_flops=product.flops,
        moved_bytes=0,
        saved_bytes={"none": 0, "selective": 0, "full": 0},
        output_bytes=2 * rows * width,
        products=(product,),
        **changes,
    )
    edge = replace(layer, parameters=0, tensors=(), forward_flops=0, backward_flops=0, products=(), output_bytes=0)
    edge = replace(edge, element_bytes=0, backward_element_bytes=0, attention=())
    blocks = (
        replace(edge, name="embedding", kind="embedding"),
        *(replace(layer, name=f"layers.{index}") for index in range(layers)),
        replace(edge, name="head", kind="head"),
    )
    return ModelSpec(name="plain", layout=Layout(sequence=rows, compute_dtype="bfloat16"), blocks=blocks)


def job(batch: int, **changes: Any) -> Job:
    return Job(global_batch=batch, sequence=2048, compute_dtype="bfloat16", **changes)


#: What starting a collective takes on an accelerator.
CALL_S = 20e-6
PRODUCT_S = 2 * 2048**3 / 1e14  # forward of a layer; its backward takes twice as long


def test_one_device_computes_what_the_roofline_says() -> None:
    found = step_time(model(), machines(), job(4), Strategy(microbatch=1))
    assert found.terms["matrix products"] == pytest.approx(4 * 8 * 3 * PRODUCT_S)
    assert found.step_s == pytest.approx(sum(found.terms.values()))
    assert found.mfu == pytest.approx(4 * 8 * 3 * PRODUCT_S / found.step_s)


def test_a_product_of_little_work_takes_what_its_bytes_take() -> None:
    small = model(layers=1, rows=1)
    found = step_time(small, machines(memory_bytes_per_s=1e9), job(1), Strategy())
    moved = 2 * (2048 * 2048 + 2 * 2048)
    assert found.terms["matrix products"] == pytest.approx(3 * moved / 1e9)


def test_a_bubble_is_that_of_the_closed_form() -> None:
    # (p - 1)(F + B) of equal stages (Narayanan et al. 2021, arXiv 2104.04473, section 2.2), with 2 layers a stage.
    strategy = Strategy(pp=4, schedule="1f1b", microbatch=1)
    found = step_time(model(), machines(), job(16), strategy)
    busy = found.terms["matrix products"] + found.terms["memory-bound operations"]
    assert found.terms["matrix products"] == pytest.approx(16 * 2 * 3 * PRODUCT_S)
    assert found.terms["pipeline bubble"] == pytest.approx(3 * busy / 16)


def test_a_long_step_is_as_long_as_if_every_microbatch_were_played() -> None:
    found = StepTime(model(), machines(), job(256), Strategy(pp=4, schedule="1f1b", zero=1, dp=2))
    assert isinstance(found._play, Play)
    assert found._play.repeated[0] > 0
    assert found._play.makespan_s() == pytest.approx(found.played().makespan_s, rel=1e-9)


def test_recompute_takes_a_forward_more() -> None:
    plain = step_time(model(), machines(), job(4), Strategy(microbatch=1))
    full = step_time(model(), machines(), job(4), Strategy(microbatch=1, recompute="full"))
    half = step_time(model(), machines(), job(4), Strategy(microbatch=1, recompute="full", recompute_blocks=4))
    assert full.terms["recompute"] == pytest.approx(4 * 8 * PRODUCT_S)
    assert half.terms["recompute"] == pytest.approx(2 * 8 * PRODUCT_S)
    assert full.step_s - plain.step_s == pytest.approx(full.terms["recompute"])
    assert full.hfu > full.mfu


def test_gathers_ahead_are_hidden_where_tokens_are_many_and_wait_where_they_are_few() -> None:
    # A unit is hidden if its tokens are at least flops per second over bytes per second (of one microbatch).
    many = model(rows=16384)
    few = model(rows=256)
    strategy = Strategy(dp=8, zero=3, prefetch=1, microbatch=1)
    hidden = step_time(many, machines(), job(8), strategy)
    exposed = step_time(few, machines(), job(8), strategy)
    assert hidden.terms["parameter gathers"] < 0.1 * hidden.step_s
    assert exposed.terms["parameter gathers"] + exposed.terms["gradient reduction"] > 0.5 * exposed.step_s


def test_without_prefetch_compute_waits_for_every_gather() -> None:
    strategy = Strategy(dp=8, zero=3, microbatch=1)
    found = step_time(model(), machines(), job(16), strategy)
    gather = 7 / 8 * 2 * 8 * 2048**2 / 1e11 + 9 * CALL_S  # of 8 layers and the root unit
    assert found.terms["parameter gathers"] == pytest.approx(2 * 2 * gather)  # 2 passes of 2 microbatches


def test_groups_inside_a_node_avoid_the_slow_network() -> None:
    cluster = machines(nodes=4, between=1e9)
    whole = step_time(model(), cluster, job(128), Strategy(dp=32, zero=3, prefetch=1))
    hybrid = step_time(model(), cluster, job(128), Strategy(dp=32, zero=3, shard=8, prefetch=1))
    assert hybrid.step_s < 0.5 * whole.step_s


def test_tensor_parallel_communication_is_its_collectives() -> None:
    tp = find_model("llama-3-8b").at(Layout(sequence=2048, compute_dtype="bfloat16", tp=8))
    found = step_time(tp, machines(), job(1), Strategy(tp=8))
    # Megatron: 2 all-reduces forward and 2 backward a layer, of 2 bytes x tokens x hidden; embedding and head have one.
    one = 2 * 7 / 8 * 2 * 2048 * 4096 / 1e11 + CALL_S
    assert found.terms["tensor parallel"] == pytest.approx((32 * 4 + 2) * one, rel=0.01)


def test_a_second_microbatch_adds_its_gradients_to_the_first() -> None:
    once = step_time(model(), machines(), job(1), Strategy())
    twice = step_time(model(), machines(), job(2), Strategy())
    added = (2 + 2 * 4) * 8 * 2048**2 / 1e12
    assert "memory-bound operations" not in once.terms
    assert twice.terms["memory-bound operations"] == pytest.approx(2 * added)


def test_experts_of_the_busiest_rank_set_the_pace() -> None:
    layers = tuple(
        replace(block, products=tuple(product._replace(experts=True) for product in block.products))
        for block in model().blocks
    )
    routed = replace(model(), blocks=layers)
    even = step_time(routed, machines(), job(1), Strategy())
    uneven = step_time(routed, machines(), job(1, expert_imbalance=1.5), Strategy())
    assert uneven.terms["matrix products"] == pytest.approx(1.5 * even.terms["matrix products"])


def test_attention_counts_the_pairs_that_are_not_masked() -> None:
    work = AttentionWork(flops=4 * 10**12, backward_flops=10**13, causal_flops=2 * 10**12, channels=128)
    found = step_time(model(attention=(work,)), machines(), job(1), Strategy())
    assert found.terms["attention"] == pytest.approx(8 * (2e12 + 5e12) / 1e14)


def test_optimizer_states_on_a_disk_take_their_bytes_over_its_bandwidth() -> None:
    # H6: what is read and written per step, float32 weights and two moments, over the disk's bandwidth.
    disk = Link(latency_s=0.0, bytes_per_s=1e9, efficiency=1.0)
    cluster = machines()
    cluster = replace(cluster, nodes=(replace(cluster.nodes[0], disk=disk, host_link=LINK),))
    found = step_time(model(), cluster, job(1), Strategy(offload=Offload(optimizer="disk", path="/fast")))
    assert found.terms["offload"] == pytest.approx(2 * 12 * 8 * 2048**2 / 1e9, rel=0.01)
    assert "optimizer" not in found.terms


def test_a_slower_stage_of_an_unequal_pipeline_sets_the_pace() -> None:
    fast, slow = machines().nodes[0], machines(peak_flops_per_s={"bfloat16": 5e13}).nodes[0]
    cluster = replace(machines(), nodes=(fast, slow))
    strategy = Strategy(dp=8, pp=2, schedule="1f1b", stages=(4, 4))
    even = step_time(model(), cluster, job(128), strategy)
    apart = step_time(model(), cluster, job(128), replace(strategy, stages=(5, 3)))
    assert even.terms["matrix products"] == pytest.approx(16 * 4 * 3 * 2 * PRODUCT_S)
    assert apart.step_s < even.step_s


@pytest.mark.parametrize("name", ["llama-3-70b", "deepseek-v3", "gpt2"])
def test_no_step_is_faster_than_its_flops(name: str) -> None:
    described = find_model(name)
    cluster = parse_cluster("8xH100-80GB:16")
    strategy = Strategy(dp=128, zero=3, prefetch=1)
    spec = described.at(Layout(sequence=1024, compute_dtype="bfloat16"))
    found = step_time(spec, cluster, Job(global_batch=128, sequence=1024, compute_dtype="bfloat16"), strategy)
    assert 0 < found.mfu < 1
