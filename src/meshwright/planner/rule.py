"""The rule of choice: fixed, stated in every plan, the same for everyone."""

from __future__ import annotations

from functools import cached_property
from typing import get_args

from msgspec import Struct

from meshwright.cost.pricer import Pricer
from meshwright.planner.objective import Objective
from meshwright.spec import Cluster, Cost, Strategy
from meshwright.spec.strategy import Schedule

__all__ = ["POLICIES", "RULE", "Candidate", "leanness", "rule_of"]

RULE = (
    "Of all strategies that fit into memory take the one with {objective}. Recompute and offload only what must be. Of "
    "equals take the fewer devices, then the lower ZeRO stage, the larger shard group, the least recomputation, the "
    "least memory, and then the plainer one: smaller tp, cp, ep and pp, the earlier schedule."
)

#: Recompute policies, the least recomputation first.
POLICIES = ("none", "selective", "full")
_SCHEDULES = ("single", "1f1b", *(name for name in get_args(Schedule) if name not in ("single", "1f1b")))
_GATHERS = ("none", "unit", "chunk", "step")
_REDUCES = ("end", "microbatch", "window")


def rule_of(objective: Objective) -> str:
    """The rule with an objective, in words."""
    return RULE.format(objective=objective.text)


class Candidate(Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """A strategy with its price, which is worked out as far as it is asked for.

    `pricer` knows the cluster it is priced on: all nodes, or those that are not left out.
    """

    strategy: Strategy
    pricer: Pricer
    executable: bool

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.pricer.step_s(self.strategy)

    @property
    def total_bytes(self) -> int:
        """What the rank that needs most takes of its device."""
        return self.pricer.memory(self.strategy).worst.total_bytes

    @cached_property
    def cost(self) -> Cost:
        """The whole price: bytes by category, collectives, seconds by term."""
        return self.pricer.price(self.strategy)

    @property
    def cluster(self) -> Cluster:
        """The nodes it was priced on."""
        return self.pricer.cluster

    def key(self, objective: Objective) -> tuple[object, ...]:
        """What the rule compares: of two candidates the one with the smaller key is better, and no two are equal."""
        s = self.strategy
        tiers = (s.offload.optimizer, s.offload.parameters, s.offload.activations)
        return (
            *objective.value(s.world_size, self.step_s),
            s.world_size,
            sum(tier != "device" for tier in tiers),
            s.zero,
            -s.shard,
            POLICIES.index(s.recompute),
            s.recompute_blocks or 2**31,
            self.total_bytes,
            (s.tp, s.cp, s.ep, s.pp),
            _SCHEDULES.index(s.schedule),
            s.virtual_stages,
            s.sequence_parallel,
            -s.microbatch,
            s.prefetch,
            _GATHERS.index(s.gather),
            _REDUCES.index(s.reduce),
            str(s),
        )


def leanness(strategy: Strategy) -> tuple[int, ...]:
    """Of strategies of one schedule the one with the least keeps least."""
    tiers = strategy.offload.activations, strategy.offload.optimizer, strategy.offload.parameters
    return (
        *(tier == "device" for tier in tiers),
        -strategy.zero,
        -strategy.shard,
        strategy.reduce == "window",
        strategy.gather != "unit",
        strategy.prefetch,
    )
