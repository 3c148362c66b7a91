"""Exhaustive search: the price of every strategy of a small space, for checking the search that leaves most out."""

from __future__ import annotations

from meshwright.cost.pricer import Pricer
from meshwright.errors import ConfigError
from meshwright.planner.objective import Objective
from meshwright.planner.rule import Candidate
from meshwright.planner.space import Space
from meshwright.spec import Strategy, is_executable

__all__ = ["exhaustive"]


def exhaustive(pricer: Pricer, space: Space, objective: Objective) -> list[Candidate]:
    """Of every shape of a space the best strategy that fits, best first: what `search` finds, by pricing everything.

    Nodes are taken as they are; nothing leaves the devices but what the space lets.
    """
    found: list[Candidate] = []
    for group in space.classes():
        for dp in group.dps:
            for shapes in space.schedules(group.at(dp)):
                for shape in shapes:
                    fitting = [one for strategy in shape.variants for one in _recomputed(pricer, space, strategy)]
                    found += sorted(fitting, key=lambda candidate: candidate.key(objective))[:1]
    return sorted(found, key=lambda candidate: candidate.key(objective))


def _recomputed(pricer: Pricer, space: Space, strategy: Strategy) -> list[Candidate]:
    """A strategy with the fewest recomputed blocks that fit: by the first way to recompute, or else by any other."""
    found = []
    for number, entry in enumerate(space.recomputes):
        for blocks in entry.blocks:
            try:
                settled = space.settled(space.recomputing(strategy, entry, blocks))
                fits = pricer.fits(settled)
            except ConfigError:
                break
            if fits:
                executable = is_executable(settled, space.job)
                found.append(Candidate(strategy=settled, pricer=pricer, executable=executable))
                break
        if number == 0 and found:
            return found
    return found
