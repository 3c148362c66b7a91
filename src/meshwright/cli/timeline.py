"""The schedule of a plan file on the command line: which plan, for which model, shown or written where."""

from __future__ import annotations

import sys
from pathlib import Path

from meshwright.cli.models import find_described
from meshwright.cost.simulated import simulated_step
from meshwright.errors import ConfigError
from meshwright.report.timeline import require_output, timeline_table, timeline_view, write_timeline
from meshwright.spec import Plan
from meshwright.spec.catalogue import known_model
from meshwright.spec.decoder import described
from meshwright.spec.families import Described
from meshwright.spec.files import read_noun

__all__ = ["explain_timeline"]

_JOB_TABLES = ("data", "train")


def explain_timeline(path: str, *, model: str | None, out: Path | None, json: bool) -> None:
    """Draw the schedule of a plan's best strategy.

    Args:
        path: the plan file.
        model: the plan's model as `meshwright plan` takes it, where its name is not enough.
        out: a picture or a trace, by its ending.
        json: print figures and spans instead of the drawing.

    Raises:
        ConfigError: the file is no plan, its model is not known, or the output cannot be written.
    """
    if out is not None:
        require_output(out)
    plan = _read_plan(path)
    found = simulated_step(plan, _model_of(plan, model))
    if out is not None:
        write_timeline(out, found, plan)
    if json:
        from json import dumps

        sys.stdout.write(dumps(timeline_table(found, plan)) + "\n")
        return
    from rich.console import Console

    screen = Console(emoji=False, highlight=False)
    screen.print(timeline_view(found, plan))
    if out is not None:
        screen.print(f"written to {out}", markup=False)


def _read_plan(path: str) -> Plan:
    try:
        return read_noun(Plan, path)
    except ConfigError as error:
        table = error.what.removeprefix("unknown key ")
        if table in _JOB_TABLES:
            raise ConfigError(
                f"{path} is a job file, not a plan",
                why=f"it has a [{table}] table",
                fix=f"plan it first: meshwright plan {path} -o plan.toml",
            ) from error
        if path in error.what:
            raise
        raise ConfigError(
            f"{path} is no plan: {error.what}",
            why=error.why,
            fix="give a file that `meshwright plan ... -o plan.toml` wrote",
        ) from error


def _model_of(plan: Plan, named: str | None) -> Described:
    """The plan's model: as it is named, the built-in decoder, or that of the catalogue with its name."""
    if named is not None:
        return find_described(named, plan.job.sequence)
    if plan.model.decoder is not None:
        return described(plan.model.decoder)
    try:
        return known_model(plan.model.name)
    except ConfigError as error:
        raise ConfigError(
            f"what are the layers of {plan.model.name}?",
            why="a plan keeps the name of its model, and the catalogue has none of this name",
            fix="add --model with what the plan was made for: a config.json, or package.module:function",
        ) from error
