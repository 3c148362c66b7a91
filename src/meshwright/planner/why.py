"""Why not another way: the best strategy within what a person has in mind, beside the chosen one."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from meshwright.cost import CATEGORIES
from meshwright.planner.explain import show_differences
from meshwright.planner.pins import Pins
from meshwright.planner.question import Question, shortage, usable_bytes
from meshwright.planner.rule import Candidate
from meshwright.planner.short import nearest, show_shares
from meshwright.spec import Assignment, Offload, Plan, parse_assignments
from meshwright.spec.units import show_bytes, show_seconds

__all__ = ["Why", "parse_why", "why_not"]

_COMMA = re.compile(r",(?=\s*[A-Za-z_][\w.\-]*\s*(?:<=|>=|=))")
_TIERS = ("offload.optimizer", "offload.parameters", "offload.activations")


@dataclass(frozen=True, kw_only=True)
class Why:
    """An answer: the best strategy within what was `asked`, in text form, and what it costs against the chosen one.

    `kept` are the pins of the plan that hold here too. `over` maps what is too small (`device`, `host memory`, `disk`)
    to the bytes that are short, and is empty where it fits. `more_bytes` maps a category of memory to the bytes that it
    takes more (negative: less) than the chosen plan, `more_s` a term to the seconds. `slower` is the share by which its
    step is longer (negative: shorter).
    """

    asked: str
    strategy: str
    fits: bool
    executable: bool
    step_s: float
    slower: float
    total_bytes: int
    usable_bytes: int
    over: dict[str, int] = field(default_factory=dict)
    in_step: dict[str, int] = field(default_factory=dict)
    more_bytes: dict[str, int] = field(default_factory=dict)
    more_s: dict[str, float] = field(default_factory=dict)
    reason: str
    kept: str = ""


def parse_why(text: str) -> list[Assignment]:
    """A partial strategy from its text form; commas may stand for blanks between its words: `zero=3,tp=1`.

    Raises:
        ConfigError: it cannot be read.
    """
    return parse_assignments([_COMMA.sub(" ", text)], option="--why", bounds=True)


def why_not(question: Question, plan: Plan, asked: list[Assignment]) -> Why:
    """The best strategy within `asked`, whether this version executes it or not, beside the chosen one.

    Other pins of the question hold, save those of the fields that are asked about; what the chosen plan keeps on the
    devices stays there, unless offload is asked about.

    Raises:
        ConfigError: no such strategy is legal for the model, the cluster and the job; the text says why.
    """
    names = {pin.key for pin in asked}
    kept = [pin for key in question.pins.keys if key not in names for pin in question.pins.of(key)]
    pinned = " ".join(map(str, kept))
    if plan.strategy.offload == Offload() and not any(key.startswith("offload.") for key in names):
        named = {pin.key for pin in kept}
        kept += [Assignment(tier, "=", "device") for tier in _TIERS if tier not in named]
    other = replace(question, pins=Pins([*kept, *asked]), executable=False)
    result = other.answer(1)
    found = result.fitting[0] if result.fitting else nearest(other, result)
    return replace(_beside(other, plan, found, " ".join(map(str, asked))), kept=pinned)


def _beside(question: Question, plan: Plan, found: Candidate, asked: str) -> Why:
    cost, chosen = found.cost, plan.cost
    over = shortage(found)
    slower = cost.step_s / chosen.step_s - 1 if chosen.step_s else 0.0
    more = {name: cost.in_step.get(name, 0) - chosen.in_step.get(name, 0) for name in CATEGORIES}
    seconds = {name: cost.terms.get(name, 0.0) - chosen.terms.get(name, 0.0) for name in {**chosen.terms, **cost.terms}}
    return Why(
        asked=asked,
        strategy=str(found.strategy),
        fits=not over,
        executable=found.executable,
        step_s=cost.step_s,
        slower=slower,
        total_bytes=cost.total_bytes,
        usable_bytes=usable_bytes(found),
        over=over,
        in_step=cost.in_step,
        more_bytes={name: size for name, size in more.items() if size},
        more_s={name: difference for name, difference in seconds.items() if difference},
        reason=_reason(question, plan, found, over, slower),
    )


def _reason(question: Question, plan: Plan, found: Candidate, over: dict[str, int], slower: float) -> str:
    if found.strategy == plan.strategy:
        return "this is the chosen plan"
    cost, usable = found.cost, usable_bytes(found)
    if over:
        short = " and ".join(f"{show_bytes(size)} over on the {tier}" for tier, size in over.items())
        needed = f"{show_bytes(cost.total_bytes)} of {show_bytes(usable)} usable"
        fits = f"does not fit: {needed}, {short} ({show_shares(cost)})"
    else:
        fits = f"fits: {show_bytes(cost.total_bytes)} of {show_bytes(usable)} usable"
    terms = show_differences(plan.cost.terms, cost.terms)
    if abs(slower) < 0.0005:
        pace = "as fast as the chosen plan"
    else:
        word = "slower" if slower > 0 else "faster"
        pace = f"{abs(slower):.1%} {word} than the chosen plan ({show_seconds(cost.step_s)}" + (
            f": {terms})" if terms else ")"
        )
    runs = ""
    if not found.executable:
        runs = "; this version does not execute it"
    if slower < -0.0005 and not over and plan.objective == "time":
        runs += "; the chosen plan is kept to the pins" + (" and to what this version executes" if runs else "")
    return f"{fits}; {pace}{runs}"
