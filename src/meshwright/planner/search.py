"""The search: price every strategy of the space, most ranks first, and keep what fits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate

from meshwright.cost import StepMemory, price
from meshwright.errors import ConfigError
from meshwright.planner.rule import POLICIES, Candidate, rank
from meshwright.planner.space import Shape, Space
from meshwright.spec import Job, ModelSpec, Strategy, is_executable, require_executable

__all__ = ["Result", "search"]


@dataclass
class Result:
    """What a search found. `fitting` is sorted, best first; all have the same number of ranks.

    `short` are the strategies that do not fit, `passed` the smaller numbers of ranks that were not looked at.
    """

    fitting: list[Candidate] = field(default_factory=list)
    short: list[Candidate] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)


def search(model: ModelSpec, job: Job, space: Space, budget_bytes: int) -> Result:
    """Go through a space by the rule.

    Args:
        budget_bytes: what tensors may take on a device.

    Raises:
        ConfigError: no strategy within the pins is legal; the text is that of one of them.
        UnsupportedCombination: none of the legal ones is executable by this version.
    """
    result = Result()
    illegal: ConfigError | None = None
    legal: Strategy | None = None
    for index, dp in enumerate(space.degrees):
        shapes, error = space.at(dp)
        illegal = illegal or error
        legal = legal or next((shape.strategy for shape in shapes), None)
        fitting, short = _price_all(model, job, shapes, budget_bytes)
        result.fitting += fitting
        result.short += short
        if result.fitting:
            result.fitting.sort(key=lambda candidate: candidate.key)
            result.passed = space.degrees[index + 1 :]
            return result
    if legal is None:
        raise illegal or _nothing_matches(space)
    if not result.short:
        require_executable(legal, job)
    return result


def _price_all(
    model: ModelSpec, job: Job, shapes: list[Shape], budget_bytes: int
) -> tuple[list[Candidate], list[Candidate]]:
    """Executable strategies that fit, and some of those that do not: enough to tell how much is short.

    What cannot be the best is not priced: more recomputation where less fits (it has the same collectives), and all but
    the smallest of a way to shard whose states alone do not fit.
    """
    fitting: list[Candidate] = []
    short: list[Candidate] = []
    served: set[tuple[int, int, int]] = set()
    hopeless: set[tuple[int, int]] = set()
    order = sorted(shapes, key=lambda s: (s.strategy.microbatch, POLICIES.index(s.strategy.recompute)))
    for shape in order:
        strategy = shape.strategy
        way, served_by = (strategy.zero, strategy.shard), (strategy.zero, strategy.shard, strategy.microbatch)
        if way in hopeless or served_by in served or not is_executable(strategy, job):
            continue
        if StepMemory(model, job, strategy).floor_bytes > budget_bytes:
            hopeless.add(way)
            smallest = [s for s in order if (s.strategy.zero, s.strategy.shard, s.strategy.microbatch) == served_by][-1]
            short.append(_priced(model, job, smallest.strategy, smallest.blocks[-1]))
            continue
        candidate = _settle(model, job, shape, budget_bytes)
        if candidate.cost.peak_bytes <= budget_bytes:
            served.add(served_by)
            fitting.append(candidate)
        else:
            short.append(candidate)
    return fitting, short


def _nothing_matches(space: Space) -> ConfigError:
    pinned = space.pins.show(*space.pins.keys)
    return ConfigError(
        f"no strategy satisfies {pinned}", why="the pins leave no value to choose", fix="leave one of them out"
    )


def _settle(model: ModelSpec, job: Job, shape: Shape, budget_bytes: int) -> Candidate:
    """Price a strategy; where the number of recomputed blocks is open, with the fewest that fit, else with the most."""

    if len(shape.blocks) == 1:
        return _priced(model, job, shape.strategy, shape.blocks[0])
    for blocks in _worth_trying(model, job, shape, budget_bytes):
        candidate = _priced(model, job, shape.strategy, blocks)
        if candidate.cost.peak_bytes <= budget_bytes:
            return candidate
    return _priced(model, job, shape.strategy, shape.blocks[-1])


def _priced(model: ModelSpec, job: Job, strategy: Strategy, blocks: int) -> Candidate:
    strategy = _with_blocks(strategy, blocks)
    return rank(model, job, strategy, price(model, job, strategy))


def _with_blocks(strategy: Strategy, blocks: int) -> Strategy:
    """The same strategy with another number of recomputed blocks."""
    return strategy if strategy.recompute_blocks == blocks else replace(strategy, recompute_blocks=blocks)


def _worth_trying(model: ModelSpec, job: Job, shape: Shape, budget_bytes: int) -> tuple[int, ...]:
    """The numbers of blocks, ascending, without those under which the moment of the loss does not fit.

    At that moment everything that was kept is there, and each block that recomputes keeps a known amount less.
    """
    layers, batch = model.layers, shape.strategy.microbatch
    memory = StepMemory(model, job, _with_blocks(shape.strategy, shape.blocks[0])).ranks[0]
    held = memory.parameters + memory.optimizer + max(m.total for m in memory.moments() if m.phase == "loss")
    saved = list(accumulate((b.saved_bytes["none"] - b.saved_bytes["full"] for b in layers), initial=0))
    first = saved[shape.blocks[0] or len(layers)]
    return tuple(n for n in shape.blocks if held - batch * (saved[n or len(layers)] - first) <= budget_bytes)
