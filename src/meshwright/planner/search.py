"""The search: of all machines, or of some of their nodes, and with what may leave the devices where nothing fits."""

from __future__ import annotations

from meshwright.cost.pricer import Pricer
from meshwright.errors import ConfigError
from meshwright.planner.branches import Branches
from meshwright.planner.nodes import parts
from meshwright.planner.objective import Objective
from meshwright.planner.result import Counts, Result
from meshwright.planner.space import Space
from meshwright.spec import require_executable

__all__ = ["Counts", "Result", "search"]


def search(pricer: Pricer, space: Space, objective: Objective, *, most: int = 10) -> Result:
    """The best strategies of a space.

    Args:
        most: how many are wanted: those that come first are certain to be the best, in this order.

    Raises:
        ConfigError: no strategy within the pins is legal; the text is that of one of them.
        UnsupportedCombination: none of the legal ones is executable by this version, where only such are wanted.
    """
    whole, *smaller = parts(pricer.cluster, pricer.job)
    result = _on_all(pricer if whole == pricer.cluster else pricer.on(whole), space, objective, most)
    for cluster in smaller:
        try:
            found = _on_all(pricer.on(cluster), space, objective, most)
        except ConfigError:  # the pins ask for more than these nodes have
            continue
        result.fitting += found.fitting
        result.short += found.short
        result.counts = result.counts.plus(found.counts)
    result.fitting.sort(key=lambda candidate: candidate.key(objective))
    del result.fitting[most:]
    if result.fitting or result.short:
        return result
    raise _why_nothing(space)


def _on_all(pricer: Pricer, space: Space, objective: Objective, most: int) -> Result:
    """The best on one part of the nodes; with what may leave the devices where nothing fits otherwise."""
    if pricer is not space.pricer:
        space = space.on(pricer)
    open_tiers = space.offload_open
    if open_tiers and objective.name == "devices":
        space, open_tiers = space.offloading(), False
    result = Branches(pricer, space, objective, most).run()
    if not result.fitting and result.short and open_tiers:
        wider = Branches(pricer, space.offloading(), objective, most).run()
        wider.short = wider.short or result.short
        return wider
    return result


def _why_nothing(space: Space) -> ConfigError:
    if space.executable:
        for mesh in (group.at(dp) for group in space.classes() for dp in group.dps):
            for strategy in space.legal(mesh):
                try:
                    require_executable(strategy, space.job)
                except ConfigError as error:
                    return error
    return space.illegal or space.nothing_matches()
