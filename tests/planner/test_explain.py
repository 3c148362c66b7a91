"""Explanations: what a step spends its time on, what one change brings, what is short, and why not another way."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cost.pricer import Pricer
from meshwright.errors import ConfigError, InfeasiblePlan
from meshwright.planner import Question, ask, parse_why, plan_for, why_not
from meshwright.planner.explain import bottleneck, differences, show_differences, why_second
from meshwright.planner.larger import smallest_cluster
from meshwright.planner.sources import error_bar
from meshwright.spec import (
    Cluster,
    Cost,
    DecoderShape,
    Job,
    Layout,
    Offload,
    Strategy,
    parse_assignments,
    parse_strategy,
    this_machine,
)
from meshwright.spec.catalogue import find_model, known_model
from meshwright.spec.clusters import parse_cluster
from meshwright.spec.units import show_bytes
from tests.planner.machines import CARD_13B, cluster, cut_down

#: A model of 0.5 billion parameters in few layers, so that few pipelines are possible.
SHAPE = DecoderShape(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=6,
    num_attention_heads=16,
    num_key_value_heads=16,
    max_position_embeddings=2048,
)
JOB = Job(global_batch=8, sequence=2048, compute_dtype="bfloat16")
FOUR = parse_cluster("4xA100-80GB")
TIGHT = cut_down("4xA100-80GB", memory_gib=8)


def question(cluster: Cluster = FOUR, pins: str = "", executable: bool = False) -> Question:
    return ask(SHAPE, cluster, JOB, parse_assignments([pins], option="--pin", bounds=True), executable=executable)


def cost(**terms: float) -> Cost:
    names = {name.replace("_", " "): seconds for name, seconds in terms.items()}
    return Cost(
        at_rest={},
        in_step={},
        peak_bytes=0,
        phase="",
        collectives={},
        collective_bytes={},
        total_bytes=2**30,
        terms=names,
        step_s=sum(terms.values()),
    )


# --- terms ------------------------------------------------------------------------------------------------------------


def test_the_bottleneck_is_the_longest_term_and_the_longest_besides_the_work() -> None:
    found = bottleneck(cost(matrix_products=6.0, attention=1.0, tensor_parallel=2.0, optimizer=1.0))
    assert (found.term, found.share) == ("matrix products", 0.6)
    assert (found.other, found.other_share, found.work) == ("tensor parallel", 0.2, 0.7)
    assert "tensor parallel, 20.0%" in str(found)


def test_differences_are_sorted_and_small_ones_left_out() -> None:
    best = {"matrix products": 6.0, "tensor parallel": 2.0, "optimizer": 1.0}
    other = {"matrix products": 5.9, "pipeline bubble": 3.0, "optimizer": 1.001}
    found = differences(best, other)
    assert [name for name, _ in found] == ["pipeline bubble", "tensor parallel", "matrix products"]
    assert sum(seconds for _, seconds in found) == pytest.approx(0.9, abs=1e-9)
    assert show_differences(best, other, 2) == "pipeline bubble +3.00 s, tensor parallel -2.00 s and 1 smaller"


def test_a_second_says_what_it_loses_by() -> None:
    best, other = cost(matrix_products=1.0), cost(matrix_products=1.0, recompute=0.25)
    assert why_second(best, other, "time", (8, 8)) == "25.0% slower: recompute +250 ms"
    assert why_second(best, other, "devices", (4, 8)).startswith("uses 8 devices instead of 4, 25.0% slower")
    assert why_second(best, replace(best, total_bytes=2**31), "time", (8, 8)) == "as fast, 1.00 GiB more memory"


# --- one change -------------------------------------------------------------------------------------------------------


def test_what_one_change_brings_is_priced() -> None:
    tight = cut_down("2xA100-80GB:2", memory_gib=8)
    asked = question(tight)
    plan = plan_for(asked, with_changes=True)
    found = {change.what: change for change in plan.changes}
    assert set(found) == {
        "25% more device memory",
        "twice the bandwidth between nodes",
        "twice the global batch",
        "half the sequence",
    }
    gains = [change.tokens_per_s for change in plan.changes]
    assert gains == sorted(gains, reverse=True)
    assert found["25% more device memory"].step_s <= plan.cost.step_s * (1 + 1e-9)
    assert found["twice the bandwidth between nodes"].step_s <= plan.cost.step_s * (1 + 1e-9)
    doubled = found["twice the global batch"]
    again = Pricer(asked.model, tight, replace(JOB, global_batch=16)).price(parse_strategy(doubled.strategy))
    assert doubled.step_s == pytest.approx(again.step_s, rel=1e-12)
    assert doubled.tokens_per_s == pytest.approx(16 * 2048 / again.step_s, rel=1e-12)
    assert again.total_bytes <= plan.usable_bytes


# --- how far it may be off --------------------------------------------------------------------------------------------


def test_the_error_bar_is_the_documented_median() -> None:
    """Not below what docs/accuracy.md says of the files that check, and not far above."""
    text = (Path(__file__).parents[2] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    times, memory = text[: text.index("## Peak memory")], text[text.index("## Peak memory") :]
    dense, mixture = (find_model(name).at(Layout(sequence=2048)) for name in ("llama-3-8b", "mixtral-8x7b"))
    bar = error_bar(FOUR, dense, Strategy())
    for section, column, told in ((times, 3, bar.step_time), (memory, 3, bar.memory)):
        row = next(line for line in section.splitlines() if line.startswith("| **all"))
        median = float(row.split("|")[column + 1].strip().rstrip("%")) / 100
        assert median <= told <= median + 0.025
    assert "docs/accuracy.md" in bar.source
    for machines in (cluster(2, 2**30), this_machine()):
        assert error_bar(machines, dense, Strategy()).step_time == 0
        assert error_bar(machines, dense, Strategy()).source
    assert error_bar(FOUR, mixture, Strategy()).step_time > 2 * bar.step_time
    away = Strategy(offload=Offload(optimizer="host"))
    assert error_bar(FOUR, dense, away).step_time > 2 * bar.step_time


# --- nothing fits -----------------------------------------------------------------------------------------------------


def test_B4_nothing_fits_says_what_is_short_by_how_much_and_the_nearest_machines() -> None:
    """Reported: "No optimal configuration found" and no reason. 13B on one 16 GB card, no CPU RAM."""
    job = Job(global_batch=8, sequence=2048, compute_dtype="float16")
    asked = ask(known_model("llama-2-13b"), CARD_13B, job)
    with pytest.raises(InfeasiblePlan) as caught:
        plan_for(asked)
    error = caught.value
    found = re.search(r"the nearest, (.+), is short by (.+)$", error.what)
    assert found is not None
    strategy, short = parse_strategy(found[1]), found[2]
    memory = asked.pricer.memory(strategy)
    missing = [size for size in (memory.short_bytes, memory.host_short_bytes) if size > 0]
    assert missing
    assert all(show_bytes(size) in short for size in missing)
    for name, size in memory.worst.in_step.items():
        assert not size or f"{name} {show_bytes(size)}" in error.why
    assert "90%" in error.why
    grown = smallest_cluster(asked)
    assert grown is not None
    assert grown[0].name in error.fix
    assert Pricer(asked.model, grown[0], job).fits(grown[1])


def test_the_smallest_machines_that_would_do_are_the_smallest() -> None:
    """What is named fits by a whole search, and with one device less nothing does."""
    asked = question(cut_down("1xA100-80GB", memory_gib=6, host_gib=1))
    with pytest.raises(InfeasiblePlan):
        plan_for(asked)
    grown = smallest_cluster(asked)
    assert grown is not None
    devices = grown[0].devices
    assert 1 < devices <= 8
    assert plan_for(replace(asked, cluster=grown[0])).cost.total_bytes <= 0.9 * 6 * 2**30
    group = grown[0].nodes[0]
    fewer = replace(group, devices=devices - 1)
    with pytest.raises(InfeasiblePlan):
        plan_for(replace(asked, cluster=replace(grown[0], nodes=(fewer,))))


def test_a_pin_that_is_in_the_way_is_named() -> None:
    with pytest.raises(InfeasiblePlan) as caught:
        plan_for(question(TIGHT, pins="zero=0 tp=1 pp=1 cp=1 offload.optimizer=device offload.activations=device"))
    assert "within the pins zero=0 tp=1 pp=1" in caught.value.what
    assert "leave the pin zero=0 out" in caught.value.fix
    assert "optimizer" in caught.value.why


# --- why not ----------------------------------------------------------------------------------------------------------


def test_why_takes_commas_and_blanks() -> None:
    for text in ("zero=3,tp=1", "zero=3 tp=1", "zero=3, tp=1"):
        assert [(pin.key, pin.value) for pin in parse_why(text)] == [("zero", 3), ("tp", 1)]
    assert [(pin.key, pin.value) for pin in parse_why("stages=3,2,tp<=2")] == [("stages", [3, 2]), ("tp", 2)]


def test_why_not_says_how_much_slower_through_which_terms() -> None:
    asked = question()
    plan = plan_for(asked)
    answer = why_not(asked, plan, parse_why("zero=3,tp=1"))
    strategy = parse_strategy(answer.strategy)
    assert (strategy.zero, strategy.tp) == (3, 1)
    assert answer.fits
    assert not answer.over
    assert answer.step_s == pytest.approx(asked.pricer.price(strategy).step_s, rel=1e-12)
    assert sum(answer.more_s.values()) == pytest.approx(answer.step_s - plan.cost.step_s, rel=1e-6, abs=1e-9)
    assert answer.slower == pytest.approx(answer.step_s / plan.cost.step_s - 1)
    longest = max(answer.more_s, key=lambda name: abs(answer.more_s[name]))
    assert longest in answer.reason
    assert f"{answer.slower:.1%} slower" in answer.reason


def test_why_not_says_which_bytes_do_not_fit() -> None:
    asked = question(TIGHT)
    plan = plan_for(asked)
    answer = why_not(asked, plan, parse_why("zero=0,tp=1,pp=1"))
    assert not answer.fits
    assert answer.over["device"] == answer.total_bytes - answer.usable_bytes
    assert f"{show_bytes(answer.over['device'])} over on the device" in answer.reason
    assert f"optimizer {show_bytes(answer.in_step['optimizer'])}" in answer.reason
    assert answer.more_bytes["optimizer"] > 0


def test_why_not_hybrid_sharding() -> None:
    """Shard inside a node, replicate across: a question by `shard`."""
    asked = question(parse_cluster("2xA100-80GB:2@100Gb"))
    plan = plan_for(asked)
    answer = why_not(asked, plan, parse_why("zero=3,shard=2,dp=4"))
    assert parse_strategy(answer.strategy).replicas == 2
    assert answer.reason


def test_why_the_chosen_plan() -> None:
    asked = question()
    plan = plan_for(asked)
    assert why_not(asked, plan, parse_why(str(plan.strategy))).reason == "this is the chosen plan"


def test_why_not_beside_the_other_pins() -> None:
    asked = question(pins="pp=2 zero=0")
    answer = why_not(asked, plan_for(asked), parse_why("zero=1"))
    strategy = parse_strategy(answer.strategy)
    assert (strategy.pp, strategy.zero) == (2, 1)


def test_why_not_tells_what_this_version_does_not_execute() -> None:
    asked = question(executable=True)
    plan = plan_for(asked)
    assert plan.executable
    answer = why_not(asked, plan, parse_why("cp=2"))
    assert not answer.executable
    assert "this version does not execute it" in answer.reason


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("zero=4", "zero=4 is not a ZeRO stage"),
        ("tp=7", "tp=7"),
        ("zero=0,shard=2", "shard=2 has no effect with zero=0"),
        ("hybrid=true", "unknown key strategy.hybrid"),
        ("hybrid sharding", "--why 'hybrid' is not an assignment"),
    ],
)
def test_why_something_illegal_is_an_error_that_says_why(text: str, told: str) -> None:
    asked = question()
    plan = plan_for(asked)
    with pytest.raises(ConfigError) as caught:
        why_not(asked, plan, parse_why(text))
    assert told in caught.value.what
