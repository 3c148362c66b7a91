"""Writes docs/how-it-chooses.md: one question, every number of its answer printed by the planner.

`python scripts/how_it_chooses.py` writes the page, `--check` says whether it is up to date.
"""

import io
import sys
import textwrap
from pathlib import Path

from rich.console import Console, Group, RenderableType

from meshwright.planner import ask, parse_why, plan_for, why_not
from meshwright.planner.explain import bottleneck
from meshwright.report.plan_view import changes, memory, times, verdict
from meshwright.report.why_view import ranking
from meshwright.spec import Plan, job_for, parse_strategy
from meshwright.spec.catalogue import known_model
from meshwright.spec.clusters import parse_cluster
from meshwright.spec.units import show_bytes

PAGE = Path(__file__).parents[1] / "docs" / "how-it-chooses.md"
MODEL, CLUSTER, BATCH, SEQUENCE, TOP = "llama-3-8b", "8xA100-80GB:2@100Gb", 64, 8192, 4
WIDTH = 100
WRAP = 120


def printed(*views: RenderableType) -> str:
    """What the command prints, as a block."""
    screen = Console(file=io.StringIO(), width=WIDTH, color_system=None)
    screen.print(Group(*views))
    text: str = screen.file.getvalue()  # type: ignore[attr-defined]  # the file is a StringIO
    lines = [line.rstrip() for line in text.splitlines()]
    return "```\n" + "\n".join(lines).strip("\n") + "\n```"


def prose(text: str) -> str:
    """A paragraph, wrapped."""
    return textwrap.fill(text, WRAP, break_long_words=False, break_on_hyphens=False)


def meaning(plan: Plan) -> str:
    """The chosen strategy in words."""
    s = plan.strategy
    parts = [f"{s.dp} data-parallel ranks"] if s.dp > 1 else []
    parts += [f"tensor parallelism over {s.tp}"] if s.tp > 1 else []
    parts += [f"sequences cut over {s.cp} ranks"] if s.cp > 1 else []
    parts += [f"{s.pp} pipeline ranks ({s.schedule})"] if s.pp > 1 else []
    zero = "nothing sharded" if s.zero == 0 else f"ZeRO-{s.zero} over {s.shard * s.cp} ranks"
    again = "no recompute" if s.recompute == "none" else f"{s.recompute} recompute"
    return f"{', '.join(parts)}; {zero}; {again}; microbatches of {s.microbatch}"


def page() -> str:
    """The whole page."""
    cluster = parse_cluster(CLUSTER)
    job = job_for(cluster, global_batch=BATCH, sequence=SEQUENCE)
    question = ask(known_model(MODEL), cluster, job)
    plan = plan_for(question, most=TOP, with_changes=True)
    answers = {text: why_not(question, plan, parse_why(text)) for text in ("zero=3,tp=1,pp=1", "zero=0,tp=1,pp=1")}
    command = (
        f"meshwright plan {MODEL} --cluster {CLUSTER} --global-batch {BATCH} --seq {SEQUENCE} --top {TOP}"
        + "".join(f" \\\n    --why {text}" for text in answers)
    )
    device = cluster.nodes[0].device
    found, searched = bottleneck(plan.cost), plan.searched
    usable = show_bytes(plan.usable_bytes)
    full, nothing = answers.values()
    over = nothing.over.get("device", 0)
    states = sum(nothing.in_step[name] for name in ("parameters", "gradients", "optimizer"))
    replicas = parse_strategy(full.strategy).replicas
    shared = f" ({replicas} replicas of a shard group)" if replicas > 1 else ""
    parts = [
        "# How it chooses",
        "One question, from the first line to the answer. Every number on this page was printed by a command:",
        f"```\n{command}\n```",
        prose(
            f"{plan.model.name} has {plan.model.parameters:,} parameters; there are {cluster.devices} {device.name} in "
            f"{cluster.nodes[0].count} nodes, joined by a network of 100 Gb/s for each node. A step is {BATCH} "
            f"sequences of {SEQUENCE:,} tokens."
        ),
        "## 1. What is possible",
        prose(
            "A strategy is a mesh (how many ranks along data, tensor, pipeline, context and expert parallelism), a "
            "microbatch, a pipeline schedule, a ZeRO stage with its shard group, and which blocks recompute. What the "
            "model's heads, the sequence, the batch and the number of devices do not divide is left out; so is "
            f"whatever pins exclude. The search opened {searched['meshes']:,} meshes and {searched['strategies']:,} "
            "strategies on them, the most promising first. Each has two bounds that are quick to compute: a time and a "
            f"memory that its price cannot lie below. Only {searched['priced']:,} were priced in full. "
            + (
                "The search ended after so many; by the bounds of what it left, something up to "
                f"{plan.unproven:.0%} better may exist. "
                if plan.unproven
                else "The bounds of everything else were worse than the best that had been found. "
            )
            + "On small spaces the same search is tested against pricing everything."
        ),
        "## 2. What fits",
        prose(
            f"A plan uses at most {cluster.memory_fraction:.0%} of a device's {show_bytes(device.memory_bytes)}: "
            f"{usable}. With nothing sharded, the best strategy that is a single stage without tensor parallelism "
            f"(`{nothing.strategy}`) would need {show_bytes(nothing.total_bytes)}, {show_bytes(over)} too much: "
            f"{show_bytes(states)} of it are parameters, gradients and optimizer states, which every rank would hold "
            f"whole. The chosen plan needs {show_bytes(plan.cost.total_bytes)}:"
        ),
        printed(memory(plan)),
        prose(
            "*Sharded* is what a larger shard group would make smaller. Activations and logits are never part of it."
        ),
        "## 3. What is fastest",
        printed(ranking(plan)),
        prose(f"The first is {meaning(plan)}. Its step is the sum of these terms:"),
        printed(times(plan), verdict(plan)),
        prose(
            "Each matrix product is priced by what the device reaches for its shape, everything else by the bytes it "
            "moves, each collective by the links its ranks lie on; then the schedule is played with these durations, "
            f"so that what overlaps is not counted twice. The model's own work is {found.work:.0%} of the step; "
            f"{found.term} alone, {found.share:.0%}."
        ),
        "## 4. Why not another way",
        prose(
            "Fully sharded data parallelism is what many would try first. The best of it, "
            f"`{full.strategy}`{shared}: {full.reason}."
        ),
        "## 5. What would change it",
        printed(*changes(plan)),
        "## What it rests on",
        prose(
            f"Predicted step times carry an error of {plan.error_bar.step_time:.0%}, memory one of "
            f"{plan.error_bar.memory:.0%}: the median over published measurements. A difference of a few per cent "
            "between two strategies is within that, though the same error mostly falls on both. The "
            f"{len(plan.provenance.constants)} constants behind the prices stand in `plan.toml` (`-o plan.toml`), each "
            "with its source. [How the plan is chosen](planning.md) has the rules; "
            "`python scripts/how_it_chooses.py` makes this page again. Nothing was run for it."
        ),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    made = page()
    if "--check" in sys.argv[1:]:
        current = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        if current != made:
            sys.exit(f"{PAGE.name} is not what the planner prints today: run python scripts/how_it_chooses.py")
        print(f"{PAGE.name} is up to date")
        return
    PAGE.write_text(made, encoding="utf-8")
    print(f"written to {PAGE}")


if __name__ == "__main__":
    main()
