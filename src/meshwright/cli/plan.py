"""`meshwright plan`: the best strategy for a model on given machines, and why, without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshwright.collector import collector_paused, collector_spared_at_exit

if TYPE_CHECKING:
    from meshwright.planner import Why
    from meshwright.spec import Plan

__all__ = ["plan"]

_MODEL = (
    "MODEL is a known model (llama-3-70b), a config.json or its folder, package.module:function, file.py:function, or "
    "a job file (JOB.toml). Without one, the built-in job."
)
_CLUSTER = "Machines: 8xH100-80GB:4 (4 nodes of 8), a TOML file, or 'this'.  [default: the job file's, else this]"
_EXECUTABLE = (
    "Only strategies that this version runs, or also those that it prices.  [default: the first for a job file]"
)
_PIN = "Fix part of the strategy (zero=3, 'pp<=4')."
_WHY = "Why not this? Its best plan beside the chosen one (zero=3,tp=1)."
_OBJECTIVE = "What is to be least: time (of a step), devices, or cost (device time per token)."
_DEVICES = "Use at most N devices, or as few as give the best device time per token."
_SET = "Change a value of the job (job.compute_dtype=float32)."


@click.command(epilog=_MODEL)
@click.argument("model", required=False)
@click.option("--cluster", metavar="CLUSTER", help=_CLUSTER)
@click.option("--global-batch", type=int, help="Sequences per optimizer step.")
@click.option("--seq", type=int, help="Tokens per sequence.")
@click.option("--pin", multiple=True, metavar="KEY=VALUE", help=_PIN)
@click.option("--strategy", metavar="'KEY=VALUE ...'", help="The whole strategy by hand ('dp=2 zero=3').")
@click.option("--why", multiple=True, metavar="KEY=VALUE,...", help=_WHY)
@click.option("--objective", default="time", show_default=True, help=_OBJECTIVE)
@click.option("--devices", metavar="auto|N", help=_DEVICES)
@click.option("--price-per-hour", type=float, default=0.0, help="Of one device, for the cost of a run.")
@click.option("--executable/--any", default=None, help=_EXECUTABLE)
@click.option("--top", type=int, default=3, show_default=True, help="How many strategies are ranked.")
@click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="A value of the job (job.compute_dtype=float32)."
)
@click.option("--json", is_flag=True, help="Print all numbers as JSON, in bytes and seconds.")
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="PLAN.toml", help="Write the plan to this file.")
@collector_paused()  # also while modules are loaded
def plan(
    model: str | None,
    cluster: str | None,
    global_batch: int | None,
    seq: int | None,
    pin: tuple[str, ...],
    strategy: str | None,
    why: tuple[str, ...],
    objective: str,
    devices: str | None,
    price_per_hour: float,
    executable: bool | None,
    top: int,
    sets: tuple[str, ...],
    json: bool,
    out: Path | None,
) -> None:
    """The best strategy for a model on machines that need not be there: ranked, priced, explained."""
    from meshwright.cli.asked import Asked, read_request, require_options

    collector_spared_at_exit()
    asked = Asked(
        model=model,
        cluster=cluster,
        global_batch=global_batch,
        sequence=seq,
        pins=pin,
        strategy=strategy,
        sets=sets,
        executable=executable,
    )
    require_options(objective=objective, top=top, price_per_hour=price_per_hour, devices=devices)
    request = read_request(asked, objective=objective, devices=devices)
    from meshwright.planner import parse_why, plan_for, why_not

    others = [parse_why(text) for text in why]
    made = plan_for(request.question, shape=request.shape, most=top, price_per_hour=price_per_hour, with_changes=True)
    answers = [why_not(request.question, made, other) for other in others]
    _show(made, answers, json=json, out=out)


def _show(made: Plan, answers: list[Why], *, json: bool, out: Path | None) -> None:
    """Write the plan where it is wanted, and print it."""
    if out is not None:
        from meshwright.spec.files import dump_toml, to_table, write_text

        write_text(out, dump_toml(to_table(made)))
    if json:
        import sys
        from json import dumps

        from meshwright.report import plan_table

        sys.stdout.write(dumps(plan_table(made, answers), indent=2) + "\n")
        return
    from rich.console import Console

    from meshwright.report import plan_view, why_view

    screen = Console(emoji=False)
    screen.print(plan_view(made))
    for answer in answers:
        screen.print(why_view(answer, made))
    if out is not None:
        screen.print(f"written to {out}")
