"""The player of schedules against closed forms, and its model of messages, collectives and bytes.

Durations are whole numbers and unit counts powers of two, so that every sum is exact and nothing needs a tolerance.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.simulate import Played, simulate
from meshwright.errors import ConfigError
from meshwright.schedule import COMPUTE, SCHEDULES, Action, Schedule, make_schedule
from meshwright.spec import Link

SHAPES = [(1, 3), (2, 2), (2, 9), (3, 6), (4, 4), (4, 12), (5, 20), (8, 16)]
DEEP = [(p, m, v) for p, m in SHAPES for v in (2, 3) if m % p == 0]
#: Forward, input half and weight half of the backward on one stage. The weight half is never the longest.
TIMES = [(1, 1, 1), (2, 3, 1), (5, 4, 4), (3, 4, 2)]
Times = tuple[int, int, int]


def play(name: str, p: int, m: int, times: Times, virtual: int = 1, *, blocking: bool = False) -> Played:
    """A schedule on equal stages with messages that take no time."""
    f, i, w = times
    seconds = {"forward": f, "backward": i + w, "backward-input": i, "backward-weight": w}
    schedule = make_schedule(name, ranks=p, microbatches=m, virtual_stages=virtual)
    return simulate(schedule, lambda kind, stage: float(seconds.get(kind, 0)), blocking=blocking)


def peaks(played: Played) -> list[int]:
    return [rank.peak for rank in played.in_flight]


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("p", "m"), [*SHAPES, (4, 2), (6, 1)])
def test_gpipe_and_1f1b_are_idle_as_the_closed_form_says(p: int, m: int, times: Times) -> None:
    """Idle (p - 1)(F + B) on every rank, bubble (p - 1) / (m + p - 1): arXiv 1811.06965, 2104.04473 section 2.2.1."""
    idle = (p - 1) * sum(times)
    for name in ("gpipe", "1f1b"):
        played = play(name, p, m, times)
        assert played.idle_s == (idle,) * p
        assert played.makespan_s == (m + p - 1) * sum(times)
        assert played.bubble_fraction == pytest.approx((p - 1) / (m + p - 1), rel=1e-12)
    assert peaks(play("gpipe", p, m, times)) == [m] * p
    assert peaks(play("1f1b", p, m, times)) == [min(m, p - rank) for rank in range(p)]


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("p", "m", "v"), DEEP)
def test_interleaved_is_idle_as_the_closed_form_says(p: int, m: int, v: int, times: Times) -> None:
    """Idle (p - 1)(F + B) / v for F and B of all stages of a rank (arXiv 2104.04473, section 2.2.2).

    In flight on rank 0: p + (p - 1) / v microbatches' worth, in stages p v + p - 1 (arXiv 2205.05198, section 4.2.3).
    """
    played = play("interleaved-1f1b", p, m, times, v)
    assert played.idle_s == ((p - 1) * sum(times),) * p
    ahead = [(v - 1) * p + 2 * (p - 1 - rank) + 1 for rank in range(p)]
    assert peaks(played) == [min(m * v, count) for count in ahead]
    assert ahead[0] == p * v + p - 1


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SHAPES if m >= p])
def test_zb_h1_is_idle_as_the_closed_form_says(p: int, m: int, times: Times) -> None:
    """Idle (p - 1)(F + B - 2W), B the whole backward, W its weight half; p in flight: arXiv 2401.10241, section 2."""
    f, i, w = times
    played = play("zb-h1", p, m, times)
    assert played.idle_s == ((p - 1) * (f + (i + w) - 2 * w),) * p
    assert peaks(played) == [p] * p


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SHAPES if m >= 2 * p])
def test_the_others_keep_their_bounds(p: int, m: int, times: Times) -> None:
    """Bounds on idle time and microbatches in flight, in stages; two stages a rank, so F, I and W are those of one.

    ZB-V: no more idle than 1F1B on the whole rank, (p - 1) F where F = I = W (each rank starts later and none pauses),
    and 1F1B's memory, 2p stages (arXiv 2401.10241, section 6). DualPipeV: (p - 1)(F&B + B - 3W) with F&B = F + B
    one after the other, 2p + 1 stages (https://github.com/deepseek-ai/DualPipe). Interleaved zero bubble: no more than
    interleaved. Breadth-first: as interleaved in time, everything in flight (arXiv 2211.05953).
    """
    f, i, w = times
    zb_v, dual = play("zb-v", p, m, times, 2), play("dualpipev", p, m, times, 2)
    assert max(zb_v.idle_s) <= (p - 1) * sum(times)
    assert max(peaks(zb_v)) <= 2 * p
    assert max(dual.idle_s) <= (p - 1) * ((f + i + w) + (i + w) - 3 * w)
    assert max(peaks(dual)) <= 2 * p + 1
    if m % p == 0:
        shorter, longer = play("interleaved-zb", p, m, times, 2), play("interleaved-1f1b", p, m, times, 2)
        assert max(shorter.idle_s) <= max(longer.idle_s)
        assert max(peaks(shorter)) <= max(peaks(longer))
    assert play("looped-bfs", p, m, times, 2).idle_s == ((p - 1) * sum(times),) * p
    assert peaks(play("looped-bfs", p, m, times, 2)) == [2 * m] * p


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 5), (4, 8), (6, 30)])
def test_zb_v_never_pauses_where_all_three_passes_are_equally_long(p: int, m: int) -> None:
    played = play("zb-v", p, m, (1, 1, 1), 2)
    assert played.idle_s == (p - 1,) * p
    for rank in range(p):
        compute = [span for span in played.spans(rank) if span.row == "compute"]
        assert all(span.end_s == after.start_s for span, after in pairwise(compute))


def test_unequal_stages_wait_for_the_slowest() -> None:
    """All stages once, then the slowest for every other microbatch (arXiv 2201.12023)."""
    forward, m = (1.0, 5.0, 2.0), 9
    schedule = make_schedule("gpipe", ranks=3, microbatches=m)
    played = simulate(schedule, lambda kind, stage: forward[stage] * {"forward": 1, "backward": 2}.get(kind, 0))
    assert played.makespan_s == 3 * (sum(forward) + (m - 1) * max(forward))


def test_messages_take_latency_and_bytes_and_queue_on_the_wire() -> None:
    schedule = make_schedule("gpipe", ranks=2, microbatches=3)
    link = Link(latency_s=2.0, bytes_per_s=10.0)
    played = simulate(schedule, {(k, s): 1.0 for k in COMPUTE for s in (0, 1)}, link=link, message_bytes=40.0)
    sends = [span for span in played.spans(0) if span.kind == "send"]
    # Computed at 1, 2, 3; the wire is taken for 4 s each; 2 s more to arrive.
    assert [(span.start_s, span.end_s) for span in sends] == [(1, 7), (5, 11), (9, 15)]
    forwards = [span.start_s for span in played.spans(1) if span.kind == "forward"]
    assert forwards == [7, 11, 15]
    # Last forward ends at 16; three gradients, 1 s apart, on a wire of 4 s; the last arrives at 17 + 2 x 4 + 6.
    assert played.makespan_s == 17 + 8 + 6 + 1
    assert {span.row for span in played.spans(0)} == {"compute", "messages"}


def test_links_and_sizes_may_differ_by_boundary() -> None:
    schedule = make_schedule("1f1b", ranks=3, microbatches=1)
    slow, fast = Link(latency_s=0.0, bytes_per_s=1.0), Link(latency_s=1.0, bytes_per_s=4.0)
    played = simulate(
        schedule,
        lambda kind, stage: 0.0,
        link=lambda source, target: slow if {source, target} == {0, 1} else fast,
        message_bytes=lambda edge: (8.0, 16.0)[edge],
    )
    assert played.makespan_s == 2 * (8 / 1 + 1 + 16 / 4)


def test_blocking_messages_hold_both_ranks() -> None:
    schedule = make_schedule("gpipe", ranks=2, microbatches=2)
    seconds = {(k, s): 1.0 for k in COMPUTE for s in (0, 1)} | {("send", 0): 3.0, ("send", 1): 3.0}
    played = simulate(schedule, seconds, blocking=True)
    # Forward 0-1, message 1-4, forward of both 4-5, message 5-8, forward and backward 8-10, message 10-13, ...
    assert played.makespan_s == 18
    for rank in (0, 1):
        spans = list(played.spans(rank))
        assert all(before.end_s <= after.start_s for before, after in pairwise(spans))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-v", "looped-bfs", "interleaved-zb"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 9), (4, 8), (6, 12)])
def test_messages_meet_where_no_rank_waits_for_them(name: str, p: int, m: int) -> None:
    """Messages are placed where both ranks come to them at once when all passes are equally long."""
    virtual = 2 if name in ("looped-bfs", "interleaved-zb") else 1
    free, held = (play(name, p, m, (1, 1, 1), virtual, blocking=blocking) for blocking in (False, True))
    assert held.makespan_s == free.makespan_s


@given(name=st.sampled_from([n for n in SCHEDULES if n != "single"]), p=st.integers(1, 4), times=st.sampled_from(TIMES))
def test_waiting_for_each_other_is_never_faster(name: str, p: int, times: Times) -> None:
    free, held = (play(name, p, 2 * p, times, blocking=blocking) for blocking in (False, True))
    assert held.makespan_s >= free.makespan_s
    assert held.busy_s == free.busy_s


def zero_3(u: int, m: int = 3) -> Schedule:
    return make_schedule("single", ranks=1, microbatches=m, units=u, zero=3, shard=2, dp=2)


def seconds_of(**seconds: float) -> dict[tuple[str, int], float]:
    return {(kind.replace("_", "-"), 0): value for kind, value in seconds.items()}


@pytest.mark.parametrize("u", [1, 2, 4])
def test_collectives_that_fit_beside_compute_show_only_at_the_ends(u: int) -> None:
    """The first unit's gather before anything, the last unit's reduce after everything."""
    schedule = zero_3(u)
    played = simulate(schedule, seconds_of(forward=8, backward=16, gather=4, reduce=4))
    assert played.makespan_s == 4 / u + 3 * (8 + 16) + 4 / u
    serial = simulate(schedule, seconds_of(forward=8, backward=16, gather=4, reduce=4), overlap=False)
    assert serial.makespan_s == 3 * (4 + 8 + 4 + 16 + 4)


@pytest.mark.parametrize("u", [1, 2, 4])
def test_compute_follows_its_gathers_unit_by_unit(u: int) -> None:
    """It starts when the first unit is there, and has the last unit's share still to do when that one is."""
    table = seconds_of(forward=4, backward=8, gather=40, reduce=16)
    played = simulate(zero_3(u, m=1), table)
    forward, backward = (span for span in played.spans(0) if span.row == "compute")
    assert (forward.start_s, forward.end_s) == (40 / u, 40 + 4 / u)
    assert forward.waits_s == forward.length_s - 4
    assert (backward.start_s, backward.end_s) == (40 + 40 / u if u > 1 else 80, 80 + 8 / u)
    assert played.makespan_s == max(80 + 8 / u + 16 / u, backward.start_s + 8 / u + 16, 80 + 16)


@pytest.mark.parametrize("u", [1, 2, 4])
def test_collectives_longer_than_compute_are_what_the_step_takes(u: int) -> None:
    """Gathers and reduces share one stream: it is never free, but for the start of the last backward's reduce."""
    schedule = zero_3(u, m=2)
    played = simulate(schedule, seconds_of(forward=4, backward=8, gather=100, reduce=100))
    assert played.makespan_s >= 4 * 100 + 2 * 100
    assert played.makespan_s <= 4 * 100 + 2 * 100 + 8 / u


@given(
    name=st.sampled_from(["1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "looped-bfs"]),
    units=st.sampled_from([1, 2, 4]),
    zero=st.integers(1, 3),
    gather=st.sampled_from(["unit", "chunk", "step"]),
    overlap=st.booleans(),
    seconds=st.lists(st.integers(0, 9), min_size=6, max_size=6),
)
def test_units_written_out_take_the_same_time(
    name: str, units: int, zero: int, gather: str, overlap: bool, seconds: list[int]
) -> None:
    schedule = make_schedule(
        name, ranks=2, microbatches=4, units=units, zero=zero, shard=2, dp=2, gather=gather if zero == 3 else "none"
    )
    kinds = ("forward", "backward", "backward-input", "backward-weight", "gather", "reduce")
    table = {kind: float(4 * value) for kind, value in zip(kinds, seconds, strict=True)}

    def durations(kind: str, stage: int) -> float:
        return table.get(kind, 0.0) * (1 + stage % 2)

    short, exact = (simulate(s, durations, overlap=overlap) for s in (schedule, schedule.exact()))
    assert short.makespan_s == exact.makespan_s
    for rank in (0, 1):
        lines = [
            [(s.kind, s.stage, s.microbatch, s.start_s, s.end_s) for s in t.spans(rank) if s.row == "compute"]
            for t in (short, exact)
        ]
        assert lines[0] == lines[1]


@given(
    name=st.sampled_from([n for n in SCHEDULES if n != "single"]),
    p=st.integers(1, 4),
    zero=st.integers(0, 3),
    blocking=st.booleans(),
    overlap=st.booleans(),
    data=st.data(),
)
def test_no_duration_that_grows_makes_anything_earlier(
    name: str, p: int, zero: int, blocking: bool, overlap: bool, data: st.DataObject
) -> None:
    schedule = make_schedule(
        name, ranks=p, microbatches=2 * p, units=2, zero=zero, shard=2 if zero else 1, dp=2
    ).exact()
    stages = len(schedule.stage_ranks)
    kinds = ("forward", "backward", "backward-input", "backward-weight", "send", "gather", "reduce")
    drawn = data.draw(st.lists(st.integers(0, 8), min_size=7 * stages, max_size=7 * stages))
    table = {(kind, s): 2.0 * drawn[k * stages + s] for k, kind in enumerate(kinds) for s in range(stages)}
    grown = data.draw(st.sampled_from(sorted(table)))
    more = table | {grown: table[grown] + 2.0 * data.draw(st.integers(1, 8))}
    link = Link(latency_s=1.0, bytes_per_s=1.0)
    before, after = (
        simulate(schedule, t, link=link, message_bytes=1.0, blocking=blocking, overlap=overlap) for t in (table, more)
    )
    assert before.makespan_s <= after.makespan_s
    for one, other in zip(before.ends_s + before.starts_s, after.ends_s + after.starts_s, strict=True):
        assert all(a <= b for a, b in zip(one, other, strict=True))


def test_bytes_are_held_as_long_as_they_are() -> None:
    """Activations of 10 bytes until the backward ends, 3 of work space in a backward, a unit of 100 while gathered."""

    def held(action: Action) -> tuple[int, int]:
        return {
            "forward": (10, 0),
            "backward": (3, -13),
            "gather": (100, 0),
            "release": (0, -100),
        }.get(action.kind, (0, 0))

    schedule = make_schedule("1f1b", ranks=3, microbatches=5)
    played = simulate(schedule, lambda kind, stage: float(kind in COMPUTE), held_bytes=held)
    assert played.peak_bytes == (33, 23, 13)
    gathered = make_schedule("1f1b", ranks=3, microbatches=5, zero=3, gather="step", shard=2, dp=2)
    assert simulate(gathered, lambda kind, stage: 1.0, held_bytes=held).peak_bytes == (133, 123, 113)


def test_a_stage_gathered_ahead_is_held_twice() -> None:
    """The gather for the backward is issued when the forward starts, which releases what it used at its end."""
    table = seconds_of(forward=10, backward=10, gather=1)
    held = {"gather": (100, 0), "release": (0, -100)}
    for overlap, peak in ((True, 200), (False, 100)):
        played = simulate(zero_3(1, m=1), table, overlap=overlap, held_bytes=lambda a: held.get(a.kind, (0, 0)))
        assert played.peak_bytes == (peak,)


def test_a_missing_duration_is_refused() -> None:
    schedule = make_schedule("gpipe", ranks=2, microbatches=2)
    with pytest.raises(ConfigError, match="duration of backward on stage 1"):
        simulate(schedule, {("forward", 0): 1, ("forward", 1): 1, ("backward", 0): 1})
    with pytest.raises(ConfigError, match="duration of send on stage 1"):
        simulate(schedule, lambda kind, stage: -1.0 if (kind, stage) == ("send", 1) else 1.0)
