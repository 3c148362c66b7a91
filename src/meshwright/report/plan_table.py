"""A plan as numbers, for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from meshwright.planner.explain import bottleneck, differences
from meshwright.planner.why import Why
from meshwright.spec import Plan

__all__ = ["plan_table"]


def plan_table(plan: Plan, answers: Sequence[Why] = ()) -> dict[str, Any]:
    """Everything that a plan says, in bytes, seconds and shares, ready for JSON.

    Besides the plan's own fields: `strategy_text`, `devices`, `tokens_per_s`, `mfu` and `usable_bytes` of the chosen
    strategy, its `bottleneck`, `difference_s` by term of each runner-up, and `why`, the answers to `--why`.
    """
    found = asdict(plan)
    for row, other in zip(found["runner_up"], plan.runner_up, strict=True):
        row["tokens_per_s"] = plan.tokens / other.step_s if other.step_s else 0.0
        row["difference_s"] = dict(differences(plan.cost.terms, other.terms))
    return found | {
        "strategy_text": str(plan.strategy),
        "devices": plan.strategy.world_size,
        "tokens_per_s": plan.tokens_per_s,
        "device_s_per_token": plan.strategy.world_size * plan.cost.step_s / plan.tokens,
        "mfu": plan.mfu,
        "usable_bytes": plan.usable_bytes,
        "bottleneck": bottleneck(plan.cost)._asdict(),
        "why": [asdict(answer) for answer in answers],
    }
