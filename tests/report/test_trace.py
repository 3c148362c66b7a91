"""Traces of timelines: JSON that a viewer of trace events reads."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from meshwright.errors import ConfigError
from meshwright.report.trace import trace_events, write_trace
from meshwright.schedule import Timeline
from tests.report.timelines import STRATEGIES, step


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_span_is_an_event_and_threads_do_not_overlap(strategy: str) -> None:
    timeline = step(strategy).timeline
    events = json.loads(json.dumps(trace_events([timeline])))["traceEvents"]
    assert all({"name", "ph", "ts", "dur", "pid", "tid"} <= set(event) for event in events)
    spans = [event for event in events if event["ph"] == "X"]
    expected = sorted((one.rank, one.start_s * 1e6, one.length_s * 1e6) for one in timeline)
    assert sorted((event["pid"], event["ts"], event["dur"]) for event in spans) == expected
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in spans:
        threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for lane in threads.values():
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(sorted(lane)))
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert named == set(threads)


def test_simulated_and_executed_stand_side_by_side(tmp_path: Path) -> None:
    """A process for each pipeline rank; in each the threads of both, also where one has more ranks."""
    simulated = step("pp=3 schedule=1f1b dp=2 zero=1").timeline
    slower = tuple(
        tuple(one._replace(start_s=1.5 * one.start_s, end_s=1.5 * one.end_s) for one in spans)
        for spans in simulated.ranks[:2]
    )
    write_trace(tmp_path / "traces" / "run.json", [simulated, Timeline("executed", slower)])
    events = json.loads((tmp_path / "traces" / "run.json").read_text(encoding="utf-8"))["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {rank: f"pipeline rank {rank}" for rank in range(3)}
    for rank in range(3):
        names = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == rank]
        expected = ["simulated", "simulated messages", "simulated collectives"]
        if rank < 2:
            expected += ["executed", "executed messages", "executed collectives"]
        assert [name for name in names if not name[-1].isdigit()] == expected
    forward = [e for e in events if e["name"] == "forward 3" and e["pid"] == 1]
    assert [e["args"] for e in forward] == [{"stage": 1, "microbatch": 3}] * 2
    assert forward[1]["ts"] == pytest.approx(1.5 * forward[0]["ts"])
    assert len({e["tid"] for e in forward}) == 2


def test_nothing_is_a_trace_too() -> None:
    assert trace_events([])["traceEvents"] == []
    assert {event["ph"] for event in trace_events([Timeline("executed", ((),))])["traceEvents"]} == {"M"}


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        write_trace(tmp_path / "file" / "run.json", [])
