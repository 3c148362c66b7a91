"""Verified: whether a strategy gave the same numbers as one process, and how far off they were at most."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Copy", "ModuleDeviation", "Verified"]


@dataclass(frozen=True, kw_only=True)
class Copy:
    """What was run: a small copy of the user's model, or the model itself where that is small.

    `classes` are the module classes in it, `changes` what was made smaller ("hidden_size 4096 -> 24"), `notes` what
    else was done to it, `labels` what its loss is the mean over, and `divided` what tensor parallelism divides and who
    said so.
    """

    model: str
    kind: str
    parameters: int
    blocks: int
    classes: tuple[str, ...]
    changes: tuple[str, ...]
    notes: tuple[str, ...]
    labels: str
    divided: tuple[str, ...] = ()

    def __str__(self) -> str:
        blocks = f"{self.blocks} blocks, " if self.blocks else ""
        return f"{self.model} ({self.kind}, {blocks}{self.parameters:,} parameters)"


@dataclass(frozen=True, kw_only=True)
class ModuleDeviation:
    """The largest deviations in one block, or one module outside of them, as parts of what is allowed (1 is the bound).

    `update` is that of what an optimizer step changes.
    """

    name: str
    kind: str
    parameters: int
    gradient: float
    update: float


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The comparison of a strategy with one process, in float64: every figure is a part of what is allowed.

    Attributes:
        strategy: in its text form.
        copy: the model that was run.
        ranks: processes that ran it.
        global_batch: sequences of a step.
        loss: largest deviation of the loss, over all steps, optimizers and ranks.
        norm: of the gradient norm, before and after it is clipped.
        modules: gradients and updates, by module.
        against: the largest of all deviations, by what the run was compared with.
        worst: which value that is, in words; `worst_error` and `worst_bound` are its deviation and what is allowed.
        clipped: whether gradients were clipped in every step.
        mismatches: the first values beyond their bound, in words: the earliest step first, tensors before norms.
        beyond: how many are.
        failure: why the ranks did not come to an end where one process did; empty if they did.
        log: then what the first rank that failed wrote.
    """

    strategy: str
    copy: Copy
    ranks: int
    global_batch: int
    loss: float = 0.0
    norm: float = 0.0
    modules: tuple[ModuleDeviation, ...] = ()
    against: dict[str, float]
    worst: str = ""
    worst_error: float = 0.0
    worst_bound: float = 0.0
    clipped: bool = False
    mismatches: tuple[str, ...] = ()
    beyond: int = 0
    failure: str = ""
    log: str = ""

    @property
    def equal(self) -> bool:
        """Whether every value is within its tolerance."""
        return not self.mismatches and not self.failure

    @property
    def largest(self) -> float:
        """The largest deviation, as a part of what is allowed."""
        return max(self.against.values(), default=0.0)

    def __str__(self) -> str:
        """One line: the verdict."""
        what = f"{self.strategy} on {self.copy}"
        if self.failure:
            return f"not verified: {what}: {self.failure}"
        if self.mismatches:
            more = f", and {self.beyond - 1} more" if self.beyond > 1 else ""
            return f"not verified: {what}: {self.mismatches[0]}{more}"
        allowed = f"{self.worst_error:.1e} of {self.worst_bound:.1e} allowed"
        return f"verified: {what}: largest deviation {allowed} ({self.worst})"
