"""What a plan works out from what it holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.errors import ConfigError
from meshwright.spec import Cost, DecoderShape, Job, ModelReference, Plan, Provenance, Strategy
from meshwright.spec.clusters import parse_cluster
from meshwright.spec.units import show_seconds

COST = Cost(
    at_rest={},
    in_step={},
    peak_bytes=0,
    phase="",
    collectives={},
    collective_bytes={},
    step_s=2.0,
    model_flops=4e15,
)
PLAN = Plan(
    model=ModelReference(name="m", parameters=1),
    cluster=parse_cluster("8xA100-80GB"),
    job=Job(global_batch=16, sequence=1000, compute_dtype="bfloat16"),
    strategy=Strategy(dp=8),
    cost=COST,
    provenance=Provenance(meshwright="", rule="", memory="", cluster=""),
)


def test_rates_follow_from_the_step() -> None:
    assert PLAN.tokens_per_s == 8000
    # 312 TFLOP/s is the A100's published dense bf16 peak.
    assert PLAN.mfu == pytest.approx(4e15 / 2 / (8 * 312e12))


def test_of_unequal_nodes_those_with_the_most_memory_are_counted_first() -> None:
    large, small = parse_cluster("8xA100-80GB").nodes[0], parse_cluster("8xV100-SXM2-32GB").nodes[0]
    job = replace(PLAN.job, compute_dtype="float16")
    mixed = replace(PLAN, cluster=replace(PLAN.cluster, nodes=(small, large)), job=job)
    assert mixed.usable_bytes == int(0.9 * large.device.memory_bytes)
    assert mixed.peak_flops_per_s == 8 * large.device.peak_flops_per_s["float16"]
    both = replace(mixed, strategy=Strategy(dp=12))
    assert both.usable_bytes == int(0.9 * small.device.memory_bytes)
    expected = 8 * large.device.peak_flops_per_s["float16"] + 4 * small.device.peak_flops_per_s["float16"]
    assert both.peak_flops_per_s == expected


def test_without_a_known_peak_there_is_no_mfu() -> None:
    (group,) = PLAN.cluster.nodes
    unknown = replace(group, device=replace(group.device, peak_flops_per_s={}))
    assert replace(PLAN, cluster=replace(PLAN.cluster, nodes=(unknown,))).mfu is None


def test_only_a_plan_of_the_built_in_decoder_has_its_shape() -> None:
    with pytest.raises(ConfigError, match="the plan is for m"):
        _ = PLAN.decoder
    shape = DecoderShape()
    assert replace(PLAN, model=replace(PLAN.model, decoder=shape)).decoder == shape


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1234.5, "1,234 s"),
        (12.34, "12.3 s"),
        (1.234, "1.23 s"),
        (0.0421, "42.1 ms"),
        (0.0002, "200 us"),
        (4e-7, "0.4 us"),
        (1e-17, "0 s"),
        (0.0, "0 s"),
    ],
)
def test_seconds_as_people_read_them(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text
