"""The route: which stage each call of a forward belongs to, and what crosses from each stage to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.errors import ConfigError
from meshwright.runtime.pp.trial import Call, Flow, Value

__all__ = ["Route", "assign", "loose_places", "route", "same_places"]


@dataclass(frozen=True)
class Route:
    """How a forward runs through stages.

    Attributes:
        calls: of points, in order.
        stages: of each call.
        crossing: for each stage what it is handed by the one before: values in order, the same on both sides.
    """

    calls: tuple[Call, ...]
    stages: tuple[int, ...]
    crossing: tuple[tuple[Value, ...], ...]

    def last_call(self, stage: int) -> int:
        """The last call of a stage: after it nothing of the forward matters to it."""
        return max(index for index, own in enumerate(self.stages) if own == stage)


def assign(flow: Flow, sizes: Sequence[int]) -> list[int]:
    """The stage of each call: blocks by the sizes of stages, in the order in which they are first called.

    A call outside of the blocks goes with what it is computed from: the last stage that reaches it. One that no block
    reaches (an embedding) goes with the first stage that it reaches. A block that is called again after blocks of later
    stages runs there, with the same weights.

    Raises:
        ConfigError: the sizes are not those of the blocks that are called.
    """
    order = list(dict.fromkeys(call.point for call in flow.calls if call.block))
    if sum(sizes) != len(order):
        raise ConfigError(
            f"stages of {', '.join(map(str, sizes))} blocks for a forward that calls {len(order)}",
            why="every block that the model's forward calls is on exactly one stage",
            fix="name the blocks that are called (blocks=[...])",
        )
    of_block = dict(zip(order, (stage for stage, size in enumerate(sizes) for _ in range(size)), strict=True))
    stages: list[int | None] = []
    latest = 0
    for call in flow.calls:
        if call.block:
            latest = max(latest, of_block[call.point])
            stages.append(latest)
            continue
        before = [stage for index, _ in call.needs if index >= 0 and (stage := stages[index]) is not None]
        stages.append(max(before) if before else None)
    # What no block reaches: with the first stage it reaches, straight or through others of its kind.
    for index in reversed(range(len(stages))):
        if stages[index] is None:
            reached = [
                stage
                for later, call in enumerate(flow.calls)
                if any(number == index for number, _ in call.needs) and (stage := stages[later]) is not None
            ]
            stages[index] = min(reached, default=len(sizes) - 1)
    return [stage if stage is not None else 0 for stage in stages]


def route(flow: Flow, stages: Sequence[int], count: int) -> Route:
    """What crosses between stages: every value that a later stage needs, handed on by those between.

    Raises:
        ConfigError: a stage needs what a later one makes.
    """
    needed: dict[Value, int] = {}
    for call, stage in zip(flow.calls, stages, strict=True):
        for value in call.needs:
            if value[0] < 0:
                continue
            if stages[value[0]] > stage:
                raise ConfigError(
                    f"{call.point} is on stage {stage} and needs what {flow.calls[value[0]].point} makes on stage "
                    f"{stages[value[0]]}",
                    why="activations go from each stage to the next one only",
                    fix="give an example batch of the kind that steps take (Engine(..., example=batch))",
                )
            needed[value] = max(needed.get(value, 0), stage)
    for value in flow.results:
        if value[0] >= 0:
            needed[value] = count - 1
    crossing = [
        tuple(sorted(v for v, last in needed.items() if stages[v[0]] < stage <= last)) for stage in range(count)
    ]
    return Route(flow.calls, tuple(stages), tuple(crossing))


def loose_places(flow: Flow, stages: Sequence[int], count: int) -> dict[int, tuple[int, ...]]:
    """The stages whose calls each parameter that code between points uses reaches, by the number of its place.

    What is returned belongs to the last stage.
    """
    found: dict[int, set[int]] = {}
    for call, stage in zip(flow.calls, stages, strict=True):
        for index, number in call.needs:
            if index < 0:
                found.setdefault(number, set()).add(stage)
    for index, number in flow.results:
        if index < 0:
            found.setdefault(number, set()).add(count - 1)
    return {number: tuple(sorted(own)) for number, own in found.items()}


def same_places(flow: Flow, places: Mapping[str, tuple[int, ...]]) -> list[int]:
    """The stages of another forward of the same model, whose modules have their places already.

    Args:
        places: the stages of each point's calls, in order.

    Raises:
        ConfigError: it calls other points, or in another number.
    """
    found: dict[str, int] = {}
    stages = []
    for call in flow.calls:
        number = found.get(call.point, 0)
        found[call.point] = number + 1
        if number >= len(places.get(call.point, ())):
            raise ConfigError(
                f"this batch makes the model call {call.point} {number + 1} times",
                why=f"the stages were cut with {len(places.get(call.point, ()))} calls of it",
                fix="give Engine an example batch (example=) that calls every module that any step calls",
            )
        stages.append(places[call.point][number])
    return stages
