"""The lattice of what pipelining is combined with, the short list of it, and what all of both have in common."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

from meshwright.errors import UnsupportedCombination
from meshwright.schedule import compute_orders
from tests.harness.cases import Case
from tests.harness.pairwise import Row, pairwise

__all__ = ["FACTORS", "LAYOUTS", "SCHEDULES", "WHOLE", "allowed", "as_case", "defined", "groups", "lattice"]

#: Pipeline, tensor-parallel and data-parallel ranks.
LAYOUTS = ((2, 1, 2), (2, 2, 1), (3, 1, 1), (2, 1, 1), (4, 1, 1))
#: Those of `make test-all` alone.
LARGE = ((2, 2, 2), (3, 1, 2), (2, 1, 3), (2, 1, 4), (4, 2, 1), (4, 1, 2), (3, 2, 1))
#: With the number of stages a rank.
SCHEDULES = (
    *(("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("zb-v", 2), ("dualpipev", 2)),
    *(("interleaved-1f1b", 2), ("looped-bfs", 2), ("looped-bfs", 3), ("interleaved-zb", 2)),
)
FACTORS: dict[str, tuple[Any, ...]] = {
    "layout": LAYOUTS,
    "schedule": SCHEDULES,
    "zero": (3, 2, 1, 0),
    "gather": ("unit", "step", "chunk", "none"),
    "reduce": ("microbatch", "window", "end"),
    "microbatches": ("more", "fewer", "odd"),
    "recompute": ("none", "selective", "full", "first"),
    "uneven": (False, True),
    "tied": (True, False),
    "clip": (0.1, 0.0),
    "model": ("decoder", "llama", "gpt2-12", "mlp"),
    "optimizer": ("sgd", "adamw", "adamw-default-eps"),
    "dtype": ("float64", "float32"),
    "valid": ("unequal", "all"),
    "prefetch": (0, 1),
    "unit_blocks": (1, 2),
    "sequence_parallel": (False, True),
    "source": ("builder", "module"),
    "scope": ("global", "local"),
    "microbatch": (1, 2),
}
#: What is taken from row to row in turn in the whole lattice.
TURNS = ("microbatches", "recompute", "uneven", "tied", "clip", "model", "prefetch", "unit_blocks")
WHOLE = FACTORS | {"layout": LAYOUTS + LARGE, "shard": (0, 2)}


def count_of(microbatches: str, pp: int) -> int:
    """Microbatches of a data-parallel rank: twice as many as ranks (what DualPipeV needs), one more, or too few."""
    return {"more": 2 * pp, "odd": 2 * pp + 1, "fewer": pp - 1}[microbatches]


@cache
def defined(schedule: tuple[str, int], pp: int, microbatches: int) -> bool:
    """Whether a schedule takes so many microbatches."""
    try:
        compute_orders(schedule[0], ranks=pp, microbatches=microbatches, virtual_stages=schedule[1])
    except UnsupportedCombination:
        return False
    return True


def allowed(row: Row) -> bool:
    """Whether a combination is legal; a part of one may still become legal."""
    layout, zero, model = row.get("layout"), row.get("zero"), row.get("model")
    if layout is not None:
        pp, tp, dp = layout
        counts = [row["microbatches"]] if "microbatches" in row else ["more", "fewer", "odd"]
        if "schedule" in row and not any(defined(row["schedule"], pp, count_of(count, pp)) for count in counts):
            return False
        if (row.get("sequence_parallel") and tp == 1) or (tp > 1 and model == "mlp"):
            return False
        if (zero and dp == 1) or (row.get("shard") and dp != 4):
            return False
    if model == "mlp" and row.get("sequence_parallel"):
        return False
    if zero is None:
        return True
    if (row.get("prefetch") and zero != 3) or (row.get("shard") and not zero):
        return False
    if "gather" in row and (row["gather"] == "none") == (zero == 3):
        return False
    return "reduce" not in row or (row["reduce"] == "end") == (zero < 2)


def as_case(row: Row) -> Case:
    """The case of a combination."""
    row = dict(row)
    pp, tp, dp = row.pop("layout")
    name, virtual = row.pop("schedule")
    stages = pp * virtual
    layers = 5 if stages < 5 else 2 * (stages // 2) + 1
    if row.pop("uneven"):
        row["stages"] = (layers - stages + 1, *(1,) * (stages - 1))
    if row["recompute"] == "first":
        row |= {"recompute": "full", "recompute_blocks": 2}
    row["accumulation"] = count_of(row.pop("microbatches"), pp)
    place = {"world": pp * tp * dp, "pp": pp, "tp": tp, "schedule": name, "virtual_stages": virtual, "layers": layers}
    return Case(**place, **row)


@cache
def groups() -> dict[str, tuple[Case, ...]]:
    """Cases that together have every pair of levels, put together by their ranks."""
    found: dict[str, list[Case]] = {}
    for case in (as_case(row) for row in pairwise(FACTORS, allowed)):
        found.setdefault(f"pp{case.pp}-tp{case.tp}-dp{case.dp}", []).append(case)
    few = 4  # a test is short enough to be looked at alone
    return {
        f"{name}-{start // few}": tuple(cases[start : start + few])
        for name, cases in found.items()
        for start in range(0, len(cases), few)
    }


def lattice() -> dict[str, tuple[Case, ...]]:
    """Every layout, schedule, ZeRO stage, gather, reduce and shard group, with four combinations of the rest."""
    names = ("layout", "schedule", "zero", "gather", "reduce", "shard")
    rest = [dict(zip(TURNS, levels, strict=True)) for levels in product(*(WHOLE[name] for name in TURNS))]
    fixed = {"optimizer": "sgd", "dtype": "float64", "valid": "unequal", "source": "builder", "scope": "global"}
    found, turn = {}, 0
    for levels in product(*(WHOLE[name] for name in names)):
        row = dict(zip(names, levels, strict=True))
        if not allowed(row):
            continue
        cases: list[Case] = []
        while len(cases) < 4:
            turn += 1
            whole = row | fixed | {"microbatch": 1, "sequence_parallel": False} | rest[turn * 61 % len(rest)]
            if row["layout"][1] > 1:
                whole["sequence_parallel"] = turn % 2 == 0
            if allowed(whole):
                cases.append(as_case(whole))
        found["-".join(str(level) for level in levels)] = tuple(cases)
    return found
