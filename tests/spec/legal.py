"""Hypothesis strategies for legal nouns."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from meshwright.spec import (
    Change,
    Cluster,
    Constant,
    Cost,
    DecoderShape,
    Device,
    ErrorBar,
    Job,
    Link,
    ModelReference,
    NodeGroup,
    Offload,
    OptimizerSpec,
    Plan,
    Provenance,
    Rejected,
    RunnerUp,
    Strategy,
)
from meshwright.spec.job_file import DataSpec, JobFile, TrainSpec
from meshwright.spec.strategy import MESH_DIMENSIONS

__all__ = ["clusters", "job_files", "jobs", "plans", "shapes", "strategies"]

_SIZES = st.integers(1, 2**40)
_POSITIVE = st.floats(1e-9, 1e12)
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
_PATHS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
_TABLE = st.dictionaries(st.sampled_from(["parameters", "gradients", "logits"]), st.integers(0, 2**50))
_TERMS = st.dictionaries(st.sampled_from(["matrix products", "optimizer"]), _POSITIVE)
# Sampled names are text to the type checker; the nouns know them as literals.
_DTYPES: Any = st.sampled_from(["float64", "float32", "bfloat16", "float16"])
_POLICIES: Any = st.sampled_from(["none", "selective", "full"])


@st.composite
def offloads(draw: st.DrawFn) -> Offload:
    """Any legal offload."""
    optimizer, parameters = draw(st.tuples(*[st.sampled_from(["device", "host", "disk"])] * 2))
    path = draw(_PATHS) if "disk" in (optimizer, parameters) else ""
    activations: Any = draw(st.sampled_from(["device", "host"]))
    return Offload(optimizer=optimizer, parameters=parameters, activations=activations, path=path)


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    """Any legal strategy, executable or not."""
    small = st.integers(1, 6)
    shard, replicas, zero = draw(small), draw(small), draw(st.integers(0, 3))
    pp, tp, cp = draw(st.integers(1, 3)), draw(small), draw(small)
    ranks = shard * replicas * tp * cp
    virtual = draw(st.integers(1, 3))
    table: dict[str, Any] = {"schedule": "single", "virtual_stages": 1}
    if pp > 1:
        flat, deep = ["gpipe", "1f1b", "zb-h1"], ["interleaved-1f1b", "looped-bfs", "interleaved-zb"]
        deep += ["zb-v", "dualpipev"] if virtual == 2 else []
        table = {"schedule": draw(st.sampled_from(deep if virtual > 1 else flat)), "virtual_stages": virtual}
    stages = pp * table["virtual_stages"]
    recompute = draw(_POLICIES)
    gathers = ["auto", "unit", "chunk", "step"] if zero == 3 else ["auto", "none"]
    reduces = ["auto", "microbatch", "window"] if zero >= 2 else ["auto", "end"]
    return Strategy(
        **table,
        dp=shard * replicas,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0])),
        mesh_order=tuple(draw(st.permutations(MESH_DIMENSIONS))),
        sequence_parallel=tp > 1 and draw(st.booleans()),
        zero=zero,
        shard=draw(st.sampled_from([0, shard])) if zero else 0,
        unit_blocks=draw(small),
        prefetch=draw(st.integers(0, 3)) if zero == 3 else 0,
        stages=draw(st.sampled_from([(), tuple(draw(st.lists(small, min_size=stages, max_size=stages)))])),
        microbatch=draw(small),
        recompute=recompute,
        recompute_blocks=draw(st.integers(0, 5)) if recompute != "none" else 0,
        offload=draw(offloads()),
        gather=draw(st.sampled_from(gathers)),
        reduce=draw(st.sampled_from(reduces)),
    )


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Any legal job."""
    pairs: Any = st.sampled_from([("float64", "float32"), ("float32", "bfloat16"), ("float16", "float16")])
    wide, narrow = draw(pairs)
    name: Any = draw(st.sampled_from(["adamw", "sgd"]))
    return Job(
        global_batch=draw(_SIZES),
        sequence=draw(_SIZES),
        param_dtype=wide,
        compute_dtype=narrow,
        reduce_dtype=draw(_DTYPES),
        optimizer=OptimizerSpec(
            name=name,
            learning_rate=draw(_POSITIVE),
            schedule=draw(st.sampled_from(["constant", "linear", "cosine"])),
            warmup_steps=draw(st.integers(0, 100)),
            momentum=draw(st.floats(0, 0.99)) if name == "sgd" else 0.0,
            eps=draw(_POSITIVE),
        ),
        clip_norm=draw(st.floats(0, 1e6)),
        allow_recompute=tuple(draw(st.lists(_POLICIES, min_size=1))),
        stack=draw(st.sampled_from(["eager", "compiled", "fused"])),
        seed=draw(st.integers(0, 2**63 - 1)),
    )


@st.composite
def shapes(draw: st.DrawFn) -> DecoderShape:
    """Any legal decoder."""
    heads, groups = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    size = 2 * draw(st.integers(1, 16))
    given = draw(st.booleans())
    return DecoderShape(
        vocab_size=draw(_SIZES),
        hidden_size=draw(_SIZES) if given else heads * groups * size,
        intermediate_size=draw(_SIZES),
        num_hidden_layers=draw(st.integers(1, 200)),
        num_attention_heads=heads * groups,
        num_key_value_heads=groups,
        head_dim=size if given else 0,
        rope_theta=draw(_POSITIVE),
        initializer_range=draw(st.floats(1e-6, 1)),
        tie_word_embeddings=draw(st.booleans()),
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Any legal cluster."""
    link = st.builds(Link, latency_s=st.floats(0, 1), bytes_per_s=_POSITIVE)
    device = st.builds(
        Device,
        name=_TEXT,
        kind=st.sampled_from(["cpu", "cuda"]),
        memory_bytes=_SIZES,
        memory_bytes_per_s=st.none() | _POSITIVE,
        peak_flops_per_s=st.dictionaries(_DTYPES, _POSITIVE),
    )
    group = st.builds(
        NodeGroup,
        count=st.integers(1, 9),
        devices=st.integers(1, 16),
        device=device,
        host_memory_bytes=st.none() | _SIZES,
        host_memory_bytes_per_s=st.none() | _POSITIVE,
        inside=st.none() | link,
        host_link=st.none() | link,
        disk=st.none() | link,
        disk_bytes=st.none() | _SIZES,
    )
    return Cluster(
        name=draw(_TEXT),
        nodes=tuple(draw(st.lists(group, min_size=1, max_size=3))),
        between=draw(st.none() | link),
        memory_fraction=draw(st.floats(0.01, 1)),
        source=draw(_TEXT),
    )


_COSTS = st.builds(
    Cost,
    at_rest=_TABLE,
    in_step=_TABLE,
    divided=_TABLE,
    padding_bytes=st.integers(0, 2**50),
    peak_bytes=st.integers(0, 2**50),
    phase=_TEXT,
    collectives=_TABLE,
    collective_bytes=_TABLE,
    overhead=_TABLE,
    total_bytes=st.integers(0, 2**50),
    host_bytes=st.integers(0, 2**50),
    disk_bytes=st.integers(0, 2**50),
    step_s=_POSITIVE,
    terms=_TERMS,
    model_flops=_POSITIVE,
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan, whether a planner would make it or not."""
    runner_up = st.builds(
        RunnerUp,
        strategy=_TEXT,
        devices=_SIZES,
        step_s=_POSITIVE,
        terms=_TERMS,
        in_step=_TABLE,
        total_bytes=_SIZES,
        executable=st.booleans(),
        reason=_TEXT,
    )
    rejected = st.lists(st.builds(Rejected, strategy=_TEXT, reason=_TEXT), max_size=2).map(tuple)
    change = st.builds(Change, what=_TEXT, strategy=_TEXT, step_s=_POSITIVE, tokens_per_s=_POSITIVE)
    constants = st.lists(st.builds(Constant, name=_TEXT, value=_POSITIVE, unit=_TEXT, source=_TEXT), max_size=2)
    objective: Any = draw(st.sampled_from(["time", "devices", "cost"]))
    return Plan(
        model=ModelReference(
            name=draw(_TEXT), parameters=draw(_SIZES), source=draw(_TEXT), decoder=draw(st.none() | shapes())
        ),
        cluster=draw(clusters()),
        job=draw(jobs()),
        strategy=draw(strategies()),
        cost=draw(_COSTS),
        objective=objective,
        executable=draw(st.booleans()),
        price_per_hour=draw(_POSITIVE),
        pinned=draw(st.dictionaries(st.sampled_from(["dp", "zero", "offload.path"]), _TEXT)),
        runner_up=tuple(draw(st.lists(runner_up, max_size=2))),
        rejected=draw(rejected),
        left_out=draw(rejected),
        changes=tuple(draw(st.lists(change, max_size=2))),
        searched=draw(_TABLE),
        error_bar=draw(st.builds(ErrorBar, step_time=_POSITIVE, memory=_POSITIVE, source=_TEXT)),
        provenance=draw(
            st.builds(
                Provenance,
                meshwright=_TEXT,
                rule=_TEXT,
                memory=_TEXT,
                time=_TEXT,
                cluster=_TEXT,
                constants=constants.map(tuple),
            )
        ),
    )


@st.composite
def job_files(draw: st.DrawFn) -> JobFile:
    """Any legal job file."""
    pins = st.fixed_dictionaries(
        {}, optional={"dp": st.integers(1, 9), "zero": st.integers(0, 3), "recompute": st.just("full")}
    )
    return JobFile(
        model=draw(shapes()),
        cluster=draw(st.none() | clusters()),
        job=draw(jobs()),
        strategy=draw(pins),
        data=draw(st.builds(DataSpec, path=_TEXT, validation_every=st.integers(2, 99))),
        train=draw(st.builds(TrainSpec, steps=_SIZES, out=_PATHS, prompt=_PATHS, timeout_s=_POSITIVE)),
    )
