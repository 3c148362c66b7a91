"""`meshwright plan`: the best strategy for a model on given machines, and why, without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from meshwright.planner import Why
    from meshwright.spec import Plan

__all__ = ["plan"]

_CLUSTER = "Machines: 8xH100-80GB:4 (4 nodes of 8), a TOML file, or 'this'. (default: the job file's, else this)"
_EXECUTABLE = (
    "Only strategies that this version runs, or also those that it prices. (default: the first for a job file)"
)


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A known model (llama-3-70b), a config.json or its folder, package.module:function, or a job file "
            "(JOB.toml). Without one, the built-in job."
        ),
    ] = None,
    cluster: Annotated[str | None, typer.Option(metavar="CLUSTER", help=_CLUSTER, show_default=False)] = None,
    global_batch: Annotated[int | None, typer.Option(help="Sequences per optimizer step.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    pin: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Fix part of the strategy (zero=3, 'pp<=4').")
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(metavar="'KEY=VALUE ...'", help="The whole strategy by hand ('dp=2 zero=3').")
    ] = None,
    why: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE,...", help="Why not this? Its best plan beside the chosen one (zero=3,tp=1)."),
    ] = None,
    objective: Annotated[
        str, typer.Option(help="What is to be least: time (of a step), devices, or cost (device time per token).")
    ] = "time",
    devices: Annotated[
        str | None,
        typer.Option(metavar="auto|N", help="Use at most N devices, or as few as give the best device time per token."),
    ] = None,
    price_per_hour: Annotated[float, typer.Option(help="Of one device, for the cost of a run.")] = 0.0,
    executable: Annotated[bool | None, typer.Option("--executable/--any", help=_EXECUTABLE, show_default=False)] = None,
    top: Annotated[int, typer.Option(help="How many strategies are ranked.")] = 3,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the job (job.compute_dtype=float32)."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON, in bytes and seconds.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="PLAN.toml", help="Write the plan to this file.")
    ] = None,
) -> None:
    """The best strategy for a model on machines that need not be there: ranked, priced, explained."""
    from meshwright.cli.asked import Asked, read_request, require_options

    asked = Asked(
        model=model,
        cluster=cluster,
        global_batch=global_batch,
        sequence=seq,
        pins=tuple(pin or ()),
        strategy=strategy,
        sets=tuple(set_ or ()),
        executable=executable,
    )
    require_options(objective=objective, top=top, price_per_hour=price_per_hour, devices=devices)
    request = read_request(asked, objective=objective, devices=devices)
    from meshwright.planner import parse_why, plan_for, why_not

    others = [parse_why(text) for text in why or ()]
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

    screen = Console()
    screen.print(plan_view(made))
    for answer in answers:
        screen.print(why_view(answer, made))
    if out is not None:
        screen.print(f"written to {out}")
