"""Why a plan is as it is: its bottleneck, and what the others lose by, term by term."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from meshwright.spec import Cost, Objective
from meshwright.spec.units import show_bytes, show_seconds

__all__ = ["Bottleneck", "bottleneck", "differences", "show_differences", "why_second"]

#: Terms that are useful work: a step is never faster than these on the same devices.
_WORK = ("matrix products", "attention", "memory-bound operations", "logits and loss")
#: Differences of less than this share of a step are not worth a word.
_LEAST = 0.002
_MOST_TERMS = 4


class Bottleneck(NamedTuple):
    """The term that takes most of a step, and the one that takes most besides the model's own work ("" for none).

    `work` is the share of the step that the model's own work takes.
    """

    term: str
    share: float
    other: str
    other_share: float
    work: float

    def __str__(self) -> str:
        text = f"{self.term}, {self.share:.0%} of the step"
        if self.other and self.other != self.term:
            text += f"; most besides the model's own work ({self.work:.0%}): {self.other}, {self.other_share:.1%}"
        return text


def bottleneck(cost: Cost) -> Bottleneck:
    """What a step spends most of its time on."""
    terms, whole = cost.terms, sum(cost.terms.values()) or 1.0
    if not terms:
        return Bottleneck("nothing", 0.0, "", 0.0, 0.0)
    longest = max(terms, key=lambda name: terms[name])
    others = {name: seconds for name, seconds in terms.items() if name not in _WORK and seconds > 0}
    other = max(others, key=lambda name: others[name], default="")
    work = sum(terms.get(name, 0.0) for name in _WORK)
    return Bottleneck(longest, terms[longest] / whole, other, others.get(other, 0.0) / whole, work / whole)


def differences(best: Mapping[str, float], other: Mapping[str, float]) -> list[tuple[str, float]]:
    """Seconds by which each term of another strategy is longer (negative: shorter), the largest first.

    Terms that differ by less than 0.2% of the best step are left out.
    """
    least = _LEAST * sum(best.values())
    found = {name: other.get(name, 0.0) - best.get(name, 0.0) for name in {**best, **other}}
    return sorted(
        ((name, seconds) for name, seconds in found.items() if abs(seconds) > least),
        key=lambda entry: (-abs(entry[1]), entry[0]),
    )


def show_differences(best: Mapping[str, float], other: Mapping[str, float], most: int = _MOST_TERMS) -> str:
    """`tensor parallel +120 ms, recompute -35.0 ms`; how many more there are."""
    found = differences(best, other)
    shown = [f"{name} {'+' if seconds > 0 else '-'}{show_seconds(abs(seconds))}" for name, seconds in found[:most]]
    more = len(found) - most
    return ", ".join(shown) + (f" and {more} smaller" if more > 0 else "")


def why_second(best: Cost, other: Cost, objective: Objective, devices: tuple[int, int]) -> str:
    """What a strategy that fits loses by against the best.

    Args:
        devices: those of the best, and of the other.
    """
    parts = []
    if devices[0] != devices[1] and objective != "time":
        parts.append(f"uses {devices[1]} devices instead of {devices[0]}")
    elif devices[0] != devices[1]:
        parts.append(f"{devices[1]} devices")
    slower = other.step_s / best.step_s - 1 if best.step_s else 0.0
    terms = show_differences(best.terms, other.terms)
    if abs(slower) >= 0.0005:
        parts.append(f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'}")
    elif not parts:
        parts.append("as fast")
    text = ", ".join(parts)
    if terms:
        return f"{text}: {terms}"
    more = other.total_bytes - best.total_bytes
    return f"{text}, {show_bytes(abs(more))} {'more' if more > 0 else 'less'} memory" if more else text
