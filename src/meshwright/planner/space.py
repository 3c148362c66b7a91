"""The space of a search: every legal strategy within the pins, for each number of data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.errors import ConfigError
from meshwright.planner.pins import Pins
from meshwright.spec import Cluster, Job, ModelSpec, Strategy

__all__ = ["Shape", "Space", "divisors", "nearest_multiples"]


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def nearest_multiples(step: int, number: int) -> list[int]:
    """The positive multiples of `step` next to `number`, below and above."""
    return sorted({n for n in (number // step * step, -(-number // step) * step) if n > 0})


@dataclass(frozen=True)
class Shape:
    """A legal strategy and how many of its first blocks may recompute (`recompute=full` leaves the choice open)."""

    strategy: Strategy
    blocks: tuple[int, ...]


class Space:
    """Legal strategies for a model, a cluster and a job within pins.

    Raises:
        ConfigError: a pinned value is illegal by itself, needs more ranks than there are devices, or does not divide
            the global batch.
    """

    def __init__(self, model: ModelSpec, cluster: Cluster, job: Job, pins: Pins) -> None:
        self.model, self.cluster, self.job, self.pins = model, cluster, job, pins
        for key in ("dp", "zero", "microbatch", "tp", "pp", "cp", "ep"):
            value = pins.exact(key)
            if value is not None and (value < 1 or key == "zero"):
                Strategy(**{key: value})  # says what is wrong with it
        if pins.exact("recompute") is not None:
            Strategy(recompute=pins.exact("recompute"))
        self._fixed = pins.fixed()
        self._check_layers()
        #: Ranks along the other mesh dimensions.
        self.others = self._fixed.get("tp", 1) * self._fixed.get("pp", 1) * self._fixed.get("cp", 1)
        self.most = cluster.devices // self.others
        self._wanted = self._ranks()
        #: Data-parallel degrees to try, most ranks first; and those that the global batch rules out.
        self.degrees = [dp for dp in self._wanted if self._microbatches(dp)]
        self.undivided = [dp for dp in self._wanted if job.global_batch % dp]
        if not self.degrees:
            raise self._batch_error()

    def at(self, dp: int) -> tuple[list[Shape], ConfigError | None]:
        """The legal strategies with `dp`, and why one of the others is not.

        ZeRO over shard groups of one rank shards nothing, so it is left out where anything else is possible.
        """
        found: list[Shape] = []
        error: ConfigError | None = None
        for choice in self._choices(dp):
            try:
                strategy = Strategy(**self._fixed, **choice)
            except ConfigError as reason:
                error = reason  # the last one belongs to the highest ZeRO stage, which has the fewest conditions
                continue
            blocks = self._blocks(strategy)
            if blocks:
                found.append(Shape(strategy, blocks))
        real = [shape for shape in found if shape.strategy.zero == 0 or shape.strategy.shard > 1]
        return real or found, error

    def _choices(self, dp: int) -> Iterator[dict[str, Any]]:
        pins = self.pins
        for zero in pins.options("zero", range(4)):
            for shard in self._shards(dp, zero):
                for recompute in self._policies():
                    for microbatch in self._microbatches(dp):
                        yield {
                            "dp": dp,
                            "zero": zero,
                            "shard": shard,
                            "microbatch": microbatch,
                            "recompute": recompute,
                            "recompute_blocks": pins.exact("recompute_blocks") or 0,
                        }

    def _ranks(self) -> list[int]:
        exact = self.pins.exact("dp")
        wanted = [exact] if exact is not None else [n for n in range(self.most, 0, -1) if self.pins.allows("dp", n)]
        if wanted and wanted[0] <= self.most:
            return wanted
        devices, name = self.cluster.devices, self.cluster.name
        shown = self.pins.show("dp", "tp", "pp", "cp")
        dimensions = f", and tp, pp and cp take {self.others} ranks each time" if self.others > 1 else ""
        raise ConfigError(
            f"{shown} pinned but {name} has {devices} device{'s' if devices > 1 else ''}",
            why=f"every rank needs a device of its own{dimensions}",
            fix=f"pin dp={self.most} or fewer, or leave dp out" if self.most else "pin fewer ranks",
        )

    def _microbatches(self, dp: int) -> list[int]:
        if self.job.global_batch % dp:
            return []
        share = divisors(self.job.global_batch // dp)
        return [size for size in self.pins.options("microbatch", share) if size in share]

    def _shards(self, dp: int, zero: int) -> list[int]:
        if self.pins.exact("shard") == 0:
            return [dp if zero else 1]
        return self.pins.options("shard", divisors(dp) if zero else [1])

    def _policies(self) -> list[str]:
        pinned, allowed = self.pins.exact("recompute"), self.job.allow_recompute
        if pinned is not None and pinned not in allowed:
            raise ConfigError(
                f"recompute={pinned} pinned but job.allow_recompute={','.join(allowed)}",
                why="the job does not allow it",
                fix=f"add {pinned} to job.allow_recompute, or leave the pin out",
            )
        return self.pins.options("recompute", allowed)

    def _blocks(self, strategy: Strategy) -> tuple[int, ...]:
        """Numbers of first blocks that may recompute; 0 stands for all of them."""
        layers = len(self.model.layers)
        pinned = self.pins.exact("recompute_blocks")
        if pinned is not None:
            return (pinned,)
        if strategy.recompute == "none":
            return (0,) if self.pins.allows("recompute_blocks", 0) else ()
        allowed = [n for n in range(1, layers + 1) if self.pins.allows("recompute_blocks", n)]
        if strategy.recompute == "selective":
            allowed = allowed[-1:]
        return tuple(n if n < layers else 0 for n in allowed)

    def _check_layers(self) -> None:
        layers = len(self.model.layers)
        blocks, stages = self.pins.exact("recompute_blocks") or 0, self._fixed.get("stages", ())
        if blocks > layers:
            raise ConfigError(
                f"recompute_blocks={blocks} pinned but the model has {layers} blocks",
                fix=f"pin recompute_blocks={layers} or fewer; 0 means all",
            )
        if stages and sum(stages) != layers:
            raise ConfigError(
                f"stages={','.join(map(str, stages))} pinned but the model has {layers} blocks",
                why=f"the stages hold {sum(stages)} blocks together",
                fix="make the stages hold all blocks, or leave stages out",
            )

    def _batch_error(self) -> ConfigError:
        """Nothing divides the global batch: which number came from where, and what would do."""
        batch, dp = self.job.global_batch, self._wanted[0]
        pinned = self.pins.exact("microbatch")
        origin = (
            "pinned"
            if self.pins.of("dp")
            else f"derived from the {self.cluster.devices} devices of {self.cluster.name}"
        )
        if pinned is None and batch % dp == 0:
            return ConfigError(
                f"{self.pins.show('microbatch')} pinned, which no microbatch satisfies",
                why=f"each of dp={dp} ranks ({origin}) gets {batch // dp} of global_batch={batch} sequences; "
                f"its microbatch can be {', '.join(map(str, divisors(batch // dp)))}",
                fix="change the pin, or job.global_batch",
            )
        step = dp * (pinned or 1)
        microbatch = f"microbatch={pinned} (pinned)" if pinned else "microbatch (derived)"
        sizes = " or ".join(map(str, nearest_multiples(step, batch)))
        ranks = [n for n in divisors(batch) if n <= self.most and n != dp and (batch // n) % (pinned or 1) == 0]
        other = f", or pin dp to {' or '.join(map(str, ranks))}" if ranks else ""
        if pinned is not None and batch % dp == 0:
            other += f", or pin microbatch to {' or '.join(map(str, divisors(batch // dp)[:4]))}"
        return ConfigError(
            f"global_batch={batch} cannot be split over dp={dp}" + (f" in microbatches of {pinned}" if pinned else ""),
            why=f"global_batch (from the job) = dp={dp} ({origin}) x {microbatch} x accumulation (derived), "
            f"and {batch} is not a multiple of {step}",
            fix=f"set job.global_batch to {sizes}{other}",
        )
