"""What a search hands back."""

from __future__ import annotations

from msgspec import Struct, field

from meshwright.planner.rule import Candidate

__all__ = ["Counts", "Result"]


class Counts(Struct):
    """How many meshes and strategies a search looked at, and how many of these it played in full. `unproven` is the
    share by which something better than the best may exist: 0 where all was looked at that may be better."""

    meshes: int = 0
    strategies: int = 0
    priced: int = 0
    unproven: float = 0.0

    def plus(self, other: Counts) -> Counts:
        """Both together."""
        return Counts(
            self.meshes + other.meshes,
            self.strategies + other.strategies,
            self.priced + other.priced,
            max(self.unproven, other.unproven),
        )


class Result(Struct):
    """What a search found.

    `fitting` is sorted, best first: of every shape (`space.Shape`) the best strategy. `short` are the nearest that do
    not fit, one for each ZeRO stage and kind of mesh that was met.
    """

    fitting: list[Candidate] = []
    short: list[Candidate] = []
    counts: Counts = field(default_factory=Counts)
