"""How close is close: every tolerance by which runs are equal, in this one place. None is ever loosened.

In float64 a run equals its reference up to the order of summation. Bounds are relative per tensor, with a floor that
scales with all gradients together: some true gradients are zero (biases of attention keys), and what stands there is
rounding of the others. An optimizer that divides by (a root of) the gradient amplifies that rounding by at most 1/eps.

In float32 that amplification reaches full size: AdamW turns the rounding of a small gradient into a whole step. So with
AdamW in float32, gradients and norms are compared in the first step, where both sides have the same weights, and the
loss in all steps; with SGD everything in all steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.measure.equality.records import Run, Step

__all__ = [
    "ADAMW_DEFAULT_EPS_UPDATE",
    "BF16_RATIO",
    "FLOAT32",
    "FLOAT64",
    "Mismatch",
    "Tolerance",
    "compare",
    "deviations",
    "distance",
    "show",
]

#: bf16: the error of all gradients together against float64, over that of one process in bf16 (mean of five seeds).
BF16_RATIO = 1.1


@dataclass(frozen=True)
class Tolerance:
    """Bounds for one dtype. `scalar` is relative, for loss and norms."""

    scalar: float
    gradient: float
    """Of a tensor's own norm; with `together`, of the norm of all gradients."""
    gradient_floor: float
    """Of the norm of all gradients."""
    update: float
    together: bool = False
    """One bound for all tensors together instead of one for each."""


FLOAT64 = Tolerance(scalar=1e-12, gradient=1e-10, gradient_floor=1e-14, update=1e-9)
FLOAT32 = Tolerance(scalar=1e-5, gradient=1e-5, gradient_floor=0.0, update=1e-5, together=True)
#: AdamW with its default eps of 1e-8: over the norm of all updates together.
ADAMW_DEFAULT_EPS_UPDATE = 1e-6


@dataclass(frozen=True)
class Mismatch:
    """How far one value is from what it should be: `kind` says what sort of value, `name` which, with the step."""

    kind: str
    name: str
    step: int
    error: float
    bound: float

    @property
    def within(self) -> bool:
        """Whether that is within the tolerance; what is not a number is not."""
        return self.error <= self.bound

    def __str__(self) -> str:
        return f"step {self.step} {self.kind} {self.name}: error {self.error:.3g} is above {self.bound:.3g}"


def compare(run: Run, reference: Run, *, dtype: str, optimizer: str, learning_rate: float) -> list[Mismatch]:
    """Every value of a run that differs from the reference by more than the tolerance. Arguments: see `deviations`."""
    found = deviations(run, reference, dtype=dtype, optimizer=optimizer, learning_rate=learning_rate)
    return [deviation for deviation in found if not deviation.within]


def deviations(run: Run, reference: Run, *, dtype: str, optimizer: str, learning_rate: float) -> Iterator[Mismatch]:
    """How far every value of a run is from the reference, those within the tolerance too.

    Args:
        run: what is checked.
        reference: what it is checked against.
        dtype: `float64` or `float32`, the dtype that both ran in.
        optimizer: `sgd` (with momentum), `adamw` (eps 1e-4) or `adamw-default-eps`.
        learning_rate: the optimizer's.
    """
    tolerance = {"float64": FLOAT64, "float32": FLOAT32}[dtype]
    yield from _initial(run, reference)
    if len(run.steps) != len(reference.steps):
        yield Mismatch("steps", "count", 0, math.inf, 0.0)
    amplified = dtype == "float32" and optimizer != "sgd"
    for number, (step, wanted) in enumerate(zip(run.steps, reference.steps, strict=False), 1):
        same_weights = number == 1 or not amplified
        yield from _scalars(step, wanted, number, tolerance, ("grad_norm", "clipped_norm") if same_weights else ())
        if same_weights:
            yield from _gradients(step, wanted, number, tolerance)
        if not amplified:
            yield from _updates(step, wanted, number, tolerance, optimizer, learning_rate)


def show(mismatches: Sequence[Mismatch], most: int = 12) -> str:
    """The first mismatches as text, one a line."""
    lines = [str(mismatch) for mismatch in mismatches[:most]]
    if len(mismatches) > most:
        lines.append(f"and {len(mismatches) - most} more")
    return "\n".join(lines)


def distance(tensors: Mapping[str, Tensor | None], reference: Mapping[str, Tensor | None]) -> float:
    """The norm of the difference of all tensors together, in float64; a missing tensor counts as zero."""
    total = 0.0
    for name in tensors.keys() | reference.keys():
        first, second = tensors.get(name), reference.get(name)
        if first is not None and second is not None:
            total += _norm(first.double() - second.double()) ** 2
        else:
            total += sum(_norm(tensor) ** 2 for tensor in (first, second) if tensor is not None)
    return math.sqrt(total)


def _initial(run: Run, reference: Run) -> Iterator[Mismatch]:
    """Initial weights are the same numbers in every layout, to the bit."""
    yield from _names("initial", run.initial, reference.initial, 0)
    for name in sorted(run.initial.keys() & reference.initial.keys()):
        found, wanted = run.initial[name], reference.initial[name]
        if not torch.equal(found, wanted):  # what is not a number is not equal either
            yield Mismatch("initial", name, 0, _norm(found - wanted) or math.nan, 0.0)


def _scalars(step: Step, wanted: Step, number: int, tolerance: Tolerance, norms: tuple[str, ...]) -> Iterator[Mismatch]:
    yield Mismatch("weight", "of the loss", number, abs(step.weight - wanted.weight), 0.0)
    for name in ("loss", *norms):
        value, right = getattr(step, name), getattr(wanted, name)
        yield Mismatch("scalar", name, number, abs(value - right), tolerance.scalar * abs(right))


def _gradients(step: Step, wanted: Step, number: int, tolerance: Tolerance) -> Iterator[Mismatch]:
    yield from _names("gradient", step.gradients, wanted.gradients, number)
    whole = distance(wanted.gradients, {})
    if tolerance.together:
        error, bound = distance(step.gradients, wanted.gradients), tolerance.gradient * whole
        yield Mismatch("gradient", _worst(step.gradients, wanted.gradients), number, error, bound)
    for name in sorted(step.gradients.keys() & wanted.gradients.keys()):
        gradient, right = step.gradients[name], wanted.gradients[name]
        if gradient is None or right is None:
            if gradient is not right:
                yield Mismatch("gradient", name, number, math.inf, 0.0)
            continue
        if not tolerance.together:
            bound = tolerance.gradient * _norm(right) + tolerance.gradient_floor * whole
            yield Mismatch("gradient", name, number, _norm(gradient - right), bound)


def _updates(
    step: Step, wanted: Step, number: int, tolerance: Tolerance, optimizer: str, learning_rate: float
) -> Iterator[Mismatch]:
    yield from _names("update", step.updates, wanted.updates, number)
    if optimizer == "adamw-default-eps" or tolerance.together:
        share = ADAMW_DEFAULT_EPS_UPDATE if optimizer == "adamw-default-eps" else tolerance.update
        error, bound = distance(step.updates, wanted.updates), share * distance(wanted.updates, {})
        yield Mismatch("update", _worst(step.updates, wanted.updates), number, error, bound)
        return
    amplified = learning_rate * tolerance.gradient_floor * distance(wanted.gradients, {})
    amplified /= {"sgd": 1.0, "adamw": 1e-4}[optimizer]
    for name in sorted(step.updates.keys() & wanted.updates.keys()):
        bound = tolerance.update * _norm(wanted.updates[name]) + amplified
        yield Mismatch("update", name, number, _norm(step.updates[name] - wanted.updates[name]), bound)


def _names(kind: str, found: Mapping[str, object], wanted: Mapping[str, object], number: int) -> Iterator[Mismatch]:
    for name in sorted(found.keys() ^ wanted.keys()):
        yield Mismatch(f"{kind} {'unexpected' if name in found else 'missing'}", name, number, math.inf, 0.0)


def _worst(tensors: Mapping[str, Tensor | None], reference: Mapping[str, Tensor | None]) -> str:
    names = sorted(tensors.keys() & reference.keys())
    return max(names, key=lambda name: distance({name: tensors[name]}, {name: reference[name]}), default="all")


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))
