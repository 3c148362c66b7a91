"""A user's own schedule: read from, and written to, a CSV of compute actions.

The format is PyTorch's compute-only one (`_PipelineScheduleRuntime._load_csv`). One line a rank, in order; each cell is
an action, or empty for a pause, which is ignored:

    0F0,0F1,,0B0,0B1
    1F0,1B0,1F1,1B1

A cell is a stage, a letter and a microbatch, both counted from 0: F forward, B backward, I the half of a backward that
gives the gradient of the input, W the half that gives the gradients of the weights. `(0F1;3B0)OVERLAP_F_B` is a forward
and a backward that run side by side; here they stand one after the other. Stages may lie on ranks in any way, each on
one. Messages, gathers and reduces are not written: they are placed as for every other schedule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.schedule.action import Action, Kind, Schedule
from meshwright.schedule.make import assemble
from meshwright.schedule.orders import Orders
from meshwright.schedule.units import Zero

__all__ = ["parse_schedule", "read_schedule", "write_schedule"]

_KINDS: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "backward-input", "W": "backward-weight"}
_LETTERS = {kind: letter for letter, kind in _KINDS.items()}
_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR = re.compile(r"\(([^;]*);([^;]*)\)OVERLAP_F_B")


def read_schedule(
    path: str | Path,
    *,
    units: int | Sequence[int] = 1,
    zero: int = 0,
    shard: int = 1,
    dp: int = 1,
    gather: str = "auto",
    reduce: str = "auto",
    window: int = 0,
) -> Schedule:
    """The schedule of a CSV file, with its messages and units, validated. Its name is that of the file.

    Args:
        path: the file.
        units: as for `make_schedule`, like all that follow.

    Raises:
        ConfigError: the file cannot be read, or a cell is not understood; the text names line and cell.
        PlanError: the schedule cannot run.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the schedule {path} cannot be read", why=str(error), fix="name a CSV file") from error
    orders, stage_ranks, microbatches = parse_schedule(text, name=str(path))
    zero_units = Zero(zero=zero, shard=shard, dp=dp, gather=gather, reduce=reduce, window=window or len(orders))
    return assemble(Path(path).stem, orders, stage_ranks, microbatches=microbatches, units=units, zero=zero_units)


def parse_schedule(text: str, *, name: str) -> tuple[Orders, tuple[int, ...], int]:
    """The compute orders of a CSV's text, the rank of each stage, and the number of microbatches.

    Raises:
        ConfigError: a cell is not understood, a line is empty, or a stage is missing or on two ranks.
    """
    lines = text.rstrip().splitlines()
    orders = [
        [action for number, cell in enumerate(line.split(","), 1) for action in _cell(name, rank, number, cell)]
        for rank, line in enumerate(lines)
    ]
    if not orders or not all(orders):
        empty = next((rank for rank, order in enumerate(orders) if not order), 0)
        raise ConfigError(f"{name}, line {empty + 1}: no action", fix="give one line of actions for every rank")
    found: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for action in order:
            if found.setdefault(action.stage, rank) != rank:
                raise ConfigError(
                    f"{name}: stage {action.stage} is on ranks {found[action.stage]} and {rank}",
                    why="a stage lies on one rank",
                    fix="move its actions to one line",
                )
    if max(found) >= len(found):
        missing = next(stage for stage in range(len(found)) if stage not in found)
        raise ConfigError(f"{name}: stage {missing} has no action", fix="number the stages from 0 without gaps")
    seen = {action.microbatch for order in orders for action in order}
    if max(seen) >= len(seen):
        missing = next(microbatch for microbatch in range(len(seen)) if microbatch not in seen)
        raise ConfigError(f"{name}: microbatch {missing} has no action", fix="number them from 0 without gaps")
    return orders, tuple(found[stage] for stage in range(len(found))), len(seen)


def write_schedule(schedule: Schedule) -> str:
    """A schedule's compute actions as the text of such a CSV."""
    rows = [
        ",".join(f"{a.stage}{_LETTERS[a.kind]}{a.microbatch}" for a in actions if a.kind in _LETTERS)
        for actions in schedule.ranks
    ]
    return "\n".join(rows) + "\n"


def _cell(name: str, rank: int, number: int, cell: str) -> Iterator[Action]:
    cell = cell.strip().strip('"')
    if not cell:
        return
    pair = _PAIR.fullmatch(cell)
    for part in pair.groups() if pair else (cell,):
        match = _CELL.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"{name}, line {rank + 1}, cell {number}: {cell} is not understood",
                why="a cell is a stage, one of F B I W, and a microbatch: 2F0; messages and units are not written",
                fix="write compute actions only",
            )
        stage, letter, microbatch = match.groups()
        yield Action(_KINDS[letter], int(stage), int(microbatch))
