"""`meshwright plan`: the best strategy for a job on a machine, and why, without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["plan"]


def plan(
    job: Annotated[
        Path | None,
        typer.Argument(metavar="[JOB.toml]", help="The job file. Without one, the built-in job."),
    ] = None,
    pin: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Fix part of the strategy (zero=3, microbatch<=4).")
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(metavar="'KEY=VALUE ...'", help="The whole strategy by hand ('dp=2 zero=3').")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the job file (job.sequence=512)."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="PLAN.toml", help="Write the plan to this file.")
    ] = None,
) -> None:
    """Plan for this machine (or the job's cluster) and say why."""
    from rich.console import Console

    from meshwright.planner import make_plan, pins_of
    from meshwright.report import plan_view
    from meshwright.spec import parse_assignments, this_machine
    from meshwright.spec.files import dump_toml, to_table, write_text
    from meshwright.spec.job_file import read_job

    job_file = read_job(job, set_ or ())
    pins = [*job_file.pins, *parse_assignments(pin or (), option="--pin", bounds=True)]
    if strategy is not None:
        pins += pins_of(strategy)
    made = make_plan(job_file.model, job_file.cluster or this_machine(), job_file.job, pins)
    screen = Console()
    screen.print(plan_view(made))
    if out is not None:
        write_text(out, dump_toml(to_table(made)))
        screen.print(f"written to {out}")
