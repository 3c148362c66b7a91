"""Timelines on the screen, as pictures and as tables: what is drawn is what was simulated."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
from rich.console import Console

from meshwright.cost.simulated import SimulatedStep, simulated_step
from meshwright.planner import make_plan, pins_of
from meshwright.report.timeline import timeline_table, timeline_view
from meshwright.report.timeline.cells import divided, fullest, marks
from meshwright.report.timeline.picture import draw
from meshwright.report.timeline.png import png
from meshwright.report.timeline.svg import svg
from meshwright.schedule import Span
from meshwright.spec import Plan, job_for
from meshwright.spec.catalogue import find_model
from meshwright.spec.clusters import parse_cluster
from meshwright.spec.units import show_seconds
from tests.report.timelines import STRATEGIES, planned, step

LONG = "pp=4 schedule=1f1b"
DOCS = Path(__file__).parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def shown(found: SimulatedStep, plan: Plan, width: int = 120, *, colours: bool = False) -> str:
    system = "truecolor" if colours else None
    screen = Console(file=io.StringIO(), width=width, color_system=system, force_terminal=colours)  # type: ignore[arg-type]
    screen.print(timeline_view(found, plan))
    return str(screen.file.getvalue())  # type: ignore[attr-defined]  # the file is a StringIO


def rows(text: str, label: str = r"rank \d+ +") -> list[str]:
    """The cells of each rank's row."""
    return [found[1] for found in re.finditer(rf"^{label}(.*?) +[\d.]+%$", text, re.MULTILINE)]


# --- the screen -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [30, 50, 80, 120, 200])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_drawing_stays_inside_and_tells_the_figures(strategy: str, width: int) -> None:
    plan, found = planned(strategy), step(strategy)
    text = shown(found, plan, width)
    assert max(map(len, text.splitlines())) <= width
    flat, timeline = " ".join(text.split()), found.timeline
    assert f"step {show_seconds(timeline.end_s)} = schedule {show_seconds(timeline.makespan_s)}" in flat
    whole = timeline.makespan_s * len(timeline.ranks)
    told = f"bubble {timeline.bubble:.1%}: {show_seconds(sum(timeline.idle_s))} idle of {show_seconds(whole)}"
    assert told in flat
    drawn = re.findall(r" ([\d.]+)%$", text, re.MULTILINE)
    assert drawn == [f"{100 * bubble:.1f}" for bubble in timeline.bubbles]
    assert str(plan.strategy) in flat
    for name in ("pipeline bubble", "parameter gathers"):
        if name in plan.cost.terms:
            assert f"{name} {show_seconds(plan.cost.terms[name])}" in flat


def test_blocks_have_letters_and_microbatches() -> None:
    plan, found = planned(LONG, batch=6), step(LONG, batch=6)
    drawn = rows(shown(found, plan, 200))
    assert len(drawn) == 4
    for row in drawn:
        blocks = re.findall(r"([FB])(\d)", row)
        assert sorted(blocks) == sorted((kind, str(number)) for kind in "FB" for number in range(6))
    assert drawn[0].startswith("F0")
    assert drawn[3].startswith(".")
    assert [kind for kind, _ in groupby(drawn[3].strip(".#-=0123456789"), key="FB".find) if kind >= 0] == [0, 1] * 6


def test_messages_and_collectives_have_a_line_of_their_own() -> None:
    text = shown(step(LONG, batch=6), planned(LONG, batch=6), 200)
    assert re.search(r"^ +[>< x]*>[>< x]*$", text, re.MULTILINE)
    assert "> to a later stage" in text
    assert "g gathers" not in text
    text = shown(step("dp=2 zero=3 prefetch=1", batch=8), planned("dp=2 zero=3 prefetch=1", batch=8), 200)
    assert "r reduces" in text
    assert "later stage" not in text


def test_the_second_stage_of_a_rank_looks_different() -> None:
    strategy = "pp=2 schedule=zb-v"
    text = shown(step(strategy, batch=6), planned(strategy, batch=6), 160)
    first, second = rows(text)
    assert {"F", "f", "W", "i"} <= set(first), "the first stage does all of its backward in the weight half"
    assert {"F", "f", "I", "i"} <= set(second)
    assert "small letters" in text
    assert "paler" in shown(step(strategy, batch=6), planned(strategy, batch=6), 160, colours=True)


def test_colours_have_no_letters_and_no_colours_no_codes() -> None:
    plan, found = planned(LONG, batch=6), step(LONG, batch=6)
    coloured = shown(found, plan, 200, colours=True)
    assert "\x1b[" in coloured
    assert "48;2;86;180;233m" in coloured  # forward of an even microbatch, as a background
    plain = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert not re.search(r"[FB]\d", plain)
    assert max(map(len, plain.splitlines())) <= 200
    assert "\x1b" not in shown(found, plan)


def test_hundreds_of_microbatches_are_thinned_and_said_so() -> None:
    plan, found = planned(LONG, batch=512), step(LONG, batch=512)
    text = shown(found, plan, 100)
    assert "512 microbatches have no room" in text
    for row, idle, rest in zip(rows(text), found.timeline.idle_s, found.timeline.ranks, strict=True):
        assert not re.search(r"\d", row)
        cell = found.timeline.end_s / len(row)
        assert abs(row.count(".") - idle / cell) <= 2
        forward = sum(span.length_s for span in rest if span.kind == "forward")
        assert abs(row.count("F") - forward / cell) <= 2


def test_of_64_ranks_some_are_shown_and_said_so() -> None:
    plan = planned("pp=64 schedule=1f1b", "8xH100-80GB:8", 64, layers=64)
    found = step("pp=64 schedule=1f1b", "8xH100-80GB:8", 64, layers=64)
    text = shown(found, plan, 100)
    assert "16 of 64 ranks are shown" in text
    labels = re.findall(r"^rank (\d+) ", text, re.MULTILINE)
    assert len(labels) == 16
    assert (labels[0], labels[-1]) == ("0", "63")
    assert len(text.splitlines()) < 40


def test_what_differs_from_the_plan_is_said() -> None:
    plan, found = planned(LONG), step(LONG)
    assert "the search plays" not in shown(found, plan)
    assert "it was made by another version" not in shown(found, plan)
    shortened = SimulatedStep(timeline=found.timeline, priced_s=1.01 * found.priced_s, planned_s=2 * found.planned_s)
    flat = " ".join(shown(shortened, plan).split())
    assert f"it gives this step {show_seconds(1.01 * found.priced_s)}" in flat
    assert f"the plan has {show_seconds(2 * found.planned_s)} for this step: it was made by another version" in flat


# --- cells ------------------------------------------------------------------------------------------------------------


def span(kind: str, start: float, end: float, **more: object) -> Span:
    return Span(0, kind, start, end, 0, 0, **more)  # type: ignore[arg-type]


def test_a_cell_shows_what_takes_most_of_it() -> None:
    first, second = span("forward", 0.0, 1.4), span("backward", 2.6, 4.0)
    assert fullest([first, second], 1.0, 4) == [first, None, None, second]
    assert fullest([first, second], 2.0, 2) == [first, second]
    paused = span("forward", 0.0, 4.0, waits_s=2.0)
    assert fullest([paused], 1.0, 4) == [paused, paused, None, None]


def test_cells_are_divided_as_the_time_is() -> None:
    spans = [span("forward", start, start + 0.1) for start in range(90)]
    spans += [span("backward", start + 0.1, start + 0.4) for start in range(90)]
    found = Counter(one and one.kind for one in divided(sorted(spans, key=lambda one: one.start_s), 1.0, 100))
    assert found["forward"] == pytest.approx(9, abs=1)
    assert found["backward"] == pytest.approx(27, abs=1)
    assert found[None] == pytest.approx(64, abs=1)


def test_marks_say_which_way_messages_go() -> None:
    spans = [
        span("send", 0.5, 1.0, peer=1, peer_stage=1),
        span("send", 2.5, 3.0, peer=1, peer_stage=-1),
        span("send", 4.1, 4.2, peer=1, peer_stage=1),
        span("send", 4.3, 4.4, peer=1, peer_stage=-1),
        span("receive", 5.5, 5.9, peer=1, peer_stage=1),
        span("gather", 6.0, 7.9),
        span("reduce", 7.5, 8.5),
        span("release", 9.0, 9.0),
    ]
    assert "".join(marks(spans, 1.0, 10)) == "> < x grr "


# --- pictures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_svg_has_an_element_for_each_action_where_it_belongs(strategy: str) -> None:
    plan, found = planned(strategy), step(strategy)
    root = ElementTree.fromstring(svg(draw(found, plan)))
    assert root.tag == f"{SVG}svg"
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    boxes = [box for box in root.iter(f"{SVG}rect") if box.get("class") not in ("paper", "legend", "idle", "waits")]
    spans = list(found.timeline)
    assert Counter(box.get("class") for box in boxes) == Counter(one.kind for one in spans)
    idle = [box for box in root.iter(f"{SVG}rect") if box.get("class") == "idle"]
    left = float(idle[0].get("x", ""))
    scale = float(idle[0].get("width", "")) / found.timeline.makespan_s
    for box, one in zip(boxes, spans, strict=True):
        x, wide = float(box.get("x", "")), float(box.get("width", ""))
        assert x == pytest.approx(left + one.start_s * scale, abs=0.02)
        assert wide == pytest.approx(max(0.4, one.length_s * scale), abs=0.02)
        assert x + wide <= width
        top = float(idle[one.rank].get("y", ""))
        assert top <= float(box.get("y", "")) < top + 34
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert [text for text in texts if re.fullmatch(r"[\d.]+%", text)] == [f"{b:.1%}" for b in found.timeline.bubbles]
    assert all(0 < float(text.get("y", "")) < height for text in root.iter(f"{SVG}text"))
    assert [one.text for one in root.iter(f"{SVG}title")]


def test_pauses_are_drawn_as_idle() -> None:
    plan, found = planned("dp=1", batch=2), step("dp=1", batch=2)
    (spans,) = found.timeline.ranks
    paused = tuple(one._replace(waits_s=one.length_s / 4) if one.kind == "forward" else one for one in spans)
    timeline = replace(found.timeline, ranks=(paused,))
    shapes = draw(SimulatedStep(timeline=timeline, priced_s=1.0, planned_s=1.0), plan).boxes
    waits = [box for box in shapes if box.kind == "waits"]
    forwards = [box for box in shapes if box.kind == "forward"]
    assert [box.width for box in waits] == pytest.approx([box.width / 4 for box in forwards])


def test_an_svg_escapes_what_a_model_is_called() -> None:
    plan = planned("dp=1")
    named = replace(plan, model=replace(plan.model, name="a<b> & 'c'"))
    root = ElementTree.fromstring(svg(draw(step("dp=1"), named)))
    assert any("a<b> & 'c'" in (text.text or "") for text in root.iter(f"{SVG}text"))


def test_a_png_is_as_large_as_the_picture_and_shows_the_actions() -> None:
    from PIL import Image

    plan, found = planned(LONG, batch=6), step(LONG, batch=6)
    picture = draw(found, plan)
    image = Image.open(io.BytesIO(png(picture)))
    assert image.size == (round(2 * picture.width), round(2 * picture.height))
    for box in picture.boxes:
        if box.kind in ("forward", "backward"):
            inside = (round(2 * box.x + 3), round(2 * box.y + 3))
            assert "#{:02x}{:02x}{:02x}".format(*image.getpixel(inside)) == box.colour  # type: ignore[misc]


def test_a_picture_grows_with_its_actions_up_to_a_limit() -> None:
    few, many = (draw(step(LONG, batch=batch), planned(LONG, batch=batch)) for batch in (6, 512))
    assert few.width < many.width
    assert draw(step(LONG, batch=512), planned(LONG, batch=512), most_width=3000).width == 3000


# --- for other programs -----------------------------------------------------------------------------------------------


def test_the_table_has_every_span_and_the_figures() -> None:
    plan, found = planned(LONG), step(LONG)
    table = timeline_table(found, plan)
    assert len(table["spans"]) == len(list(found.timeline))
    assert table["spans"][0] == next(iter(found.timeline))._asdict()
    assert sum(row["idle_s"] for row in table["ranks"]) == pytest.approx(
        table["bubble"] * table["makespan_s"] * len(table["ranks"])
    )
    assert table["step_s"] == found.timeline.end_s
    assert table["planned_s"] == plan.cost.step_s


def test_the_picture_of_the_documents_is_what_is_drawn_today() -> None:
    """Where it differs: run the two commands above it in docs/planning.md."""
    cluster = parse_cluster("8xA100-80GB:2")
    strategy = "dp=2 tp=2 pp=4 schedule=1f1b zero=1 microbatch=2"
    model, job = find_model("llama-3-8b"), job_for(cluster, global_batch=32, sequence=4096)
    plan = make_plan(model, cluster, job, pins_of(strategy))
    assert (DOCS / "timeline.svg").read_text(encoding="utf-8") == svg(draw(simulated_step(plan, model), plan))
    text = (DOCS / "planning.md").read_text(encoding="utf-8")
    assert f"--strategy '{strategy}' -o plan.toml" in text
