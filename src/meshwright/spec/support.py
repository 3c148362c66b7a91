"""What this version executes: one table of what is legal but not executable yet. Later versions empty it."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from meshwright.errors import UnsupportedCombination
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy

__all__ = ["NOT_EXECUTABLE", "is_executable", "require_executable", "unsupported"]


class Limit(Struct, frozen=True, kw_only=True):
    """One row: when it applies, what is not executable yet, and what to do instead."""

    applies: Callable[[Strategy, Job], bool]
    what: Callable[[Strategy, Job], str]
    fix: str


NOT_EXECUTABLE: tuple[Limit, ...] = (
    Limit(
        applies=lambda s, j: s.cp > 1,
        what=lambda s, j: f"context parallelism (cp={s.cp})",
        fix="set cp=1, and recompute=full for long sequences",
    ),
    Limit(
        applies=lambda s, j: s.ep > 1,
        what=lambda s, j: f"expert parallelism (ep={s.ep})",
        fix="set ep=1 and shard with zero=3",
    ),
    Limit(
        applies=lambda s, j: (s.offload.optimizer, s.offload.parameters, s.offload.activations) != ("device",) * 3,
        what=lambda s, j: "offload to host or disk",
        fix="leave offload out, and use zero=3 or recompute=full to save memory",
    ),
    Limit(
        applies=lambda s, j: s.pp == 1 and s.gather in ("chunk", "step"),
        what=lambda s, j: f"gather={s.gather}",
        fix="leave gather out: units are gathered one by one",
    ),
    Limit(
        applies=lambda s, j: s.pp == 1 and s.reduce == "window",
        what=lambda s, j: "reduce=window",
        fix="leave reduce out",
    ),
    Limit(
        applies=lambda s, j: "float16" in (j.param_dtype, j.reduce_dtype),
        what=lambda s, j: "parameters or gradients stored in float16",
        fix="keep param_dtype=float32 and reduce_dtype=float32, and set compute_dtype=float16",
    ),
    Limit(
        applies=lambda s, j: j.param_dtype == "bfloat16",
        what=lambda s, j: "parameters stored in bfloat16",
        fix="keep param_dtype=float32 and set compute_dtype=bfloat16",
    ),
    Limit(
        applies=lambda s, j: j.reduce_dtype not in (j.param_dtype, "bfloat16"),
        what=lambda s, j: f"reduce_dtype={j.reduce_dtype} with param_dtype={j.param_dtype}",
        fix="set reduce_dtype to the dtype of the stored parameters, or to bfloat16",
    ),
    Limit(
        applies=lambda s, j: j.reduce_dtype != j.param_dtype and _sums_in_reduce_dtype(s, j),
        what=lambda s, j: f"reduce_dtype={j.reduce_dtype} with zero={s.zero} and several microbatches",
        fix="set reduce_dtype=float32, or zero=2 without replicas: microbatches are then summed in float32",
    ),
    Limit(
        applies=lambda s, j: j.stack != "eager",
        what=lambda s, j: f"stack={j.stack}",
        fix="set stack=eager",
    ),
)


def _sums_in_reduce_dtype(strategy: Strategy, job: Job) -> bool:
    """Whether gradients of several microbatches would be summed in the dtype they are sent in: rounding would grow."""
    if strategy.zero == 0 or strategy.shard == 1 or job.global_batch == strategy.dp * strategy.microbatch:
        return False
    return strategy.zero == 1 or strategy.replicas > 1


def unsupported(strategy: Strategy, job: Job) -> Limit | None:
    """The first row of the table that applies, or None when this version executes the strategy."""
    return next((row for row in NOT_EXECUTABLE if row.applies(strategy, job)), None)


def is_executable(strategy: Strategy, job: Job) -> bool:
    """Whether this version executes the strategy for the job."""
    return unsupported(strategy, job) is None


def require_executable(strategy: Strategy, job: Job) -> None:
    """Refuse what this version does not execute.

    Raises:
        UnsupportedCombination: naming the first part that is not executable yet and what to use instead.
    """
    row = unsupported(strategy, job)
    if row is not None:
        raise UnsupportedCombination(
            f"{row.what(strategy, job)} is not executable yet",
            why="the strategy is legal and can be written in a plan, but this version has no runtime for it",
            fix=row.fix,
        )
