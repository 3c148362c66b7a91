"""Meshes: every way to lay ranks over mesh dimensions that the model, the machines, the batch and the pins allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from meshwright.errors import ConfigError, UnsupportedCombination
from meshwright.planner.pins import Pins
from meshwright.spec import Cluster, Job, Layout, ModelSpec, Strategy

__all__ = ["Mesh", "MeshClass", "Meshes", "divisors", "nearest_multiples"]

#: Tokens of a sequence that context parallelism leaves each rank at least, unless it is pinned: with fewer a ring does
#: not hide behind the attention it feeds. Where there are fewer sequences than devices it may leave less.
_FEWEST_TOKENS = 8192
_FEWEST_OF_FEW = 1024
#: Microbatches of so many sequences or fewer are all tried; of larger ones those that lie so far apart, unless it is
#: pinned: what a device reaches hardly depends on them any more.
_SMALL_MICROBATCH = 8
_APART = 1.5
#: In how many numbers, and by which factor, meshes differ that are near each other.
_FEW, _FACTOR = 2, 2
#: So many pipeline ranks or fewer are all tried; of larger numbers those that divide the devices or the layers.
_ANY_PP = 16


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def nearest_multiples(step: int, number: int) -> list[int]:
    """The positive multiples of `step` next to `number`, below and above."""
    return sorted({n for n in (number // step * step, -(-number // step) * step) if n > 0})


class Mesh(NamedTuple):
    """The degrees of a strategy, and its microbatch."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    sequence_parallel: bool
    microbatch: int

    @classmethod
    def of(cls, strategy: Strategy) -> Mesh:
        """The mesh of a strategy."""
        return cls(*(getattr(strategy, name) for name in cls._fields))

    def near(self, other: Mesh) -> bool:
        """Whether two meshes differ by a factor of two at most, in two of their numbers at most."""
        pairs = [(a, b) for a, b in zip(self, other, strict=True) if a != b]
        return len(pairs) <= _FEW and all(max(pair) <= _FACTOR * min(pair) for pair in pairs)

    @property
    def ranks(self) -> int:
        """Ranks of the whole mesh."""
        return self.dp * self.tp * self.pp * self.cp


class MeshClass(NamedTuple):
    """Meshes that differ in `dp` alone; `dps` ascend."""

    tp: int
    pp: int
    cp: int
    ep: int
    sequence_parallel: bool
    microbatch: int
    dps: tuple[int, ...]

    def at(self, dp: int) -> Mesh:
        """One of them."""
        return Mesh(dp, self.tp, self.pp, self.cp, self.ep, self.sequence_parallel, self.microbatch)

    @property
    def of_a_replica(self) -> int:
        """Ranks of one data-parallel replica."""
        return self.tp * self.pp * self.cp


class Meshes:
    """The meshes of a search.

    Args:
        describe: the model under a layout, as `Described.at`.
        executable: meshes that this version executes: with tp, sequences are tried cut and whole. (Elsewhere they are
            cut wherever they can be: that keeps less and sends as much.)

    Raises:
        ConfigError: a pinned degree is illegal, needs more ranks than there are devices, or does not divide the
            sequence or the global batch; or the model does not allow it.
    """

    def __init__(
        self,
        describe: Callable[[Layout], ModelSpec],
        cluster: Cluster,
        job: Job,
        pins: Pins,
        *,
        executable: bool = False,
    ) -> None:
        self._describe, self._cluster, self._job, self._pins = describe, cluster, job, pins
        self._executable = executable
        self.model = describe(self._layout())
        for key in ("dp", "tp", "pp", "cp", "ep", "microbatch"):
            value = pins.exact(key)
            if value is not None and value < 1:
                Strategy(**{key: value})  # says what is wrong with it
        self._check_devices()
        self.tps, self.cps, self.pps, self.eps = self._tps(), self._cps(), self._pps(), self._eps()
        self.devices = cluster.devices
        self._least = min(self.tps) * min(self.cps) * min(self.pps)
        self._check_devices(self._least)
        self.most = self.devices // self._least
        self._check_batch()

    def classes(self) -> Iterator[MeshClass]:
        """All of them, in a fixed order. Sequences are cut by context parallelism only where a microbatch is one of
        them, unless one of the two is pinned: half as many of each leave a rank as many tokens and send less."""
        batch, pins = self._job.global_batch, self._pins
        free = bool(pins.of("cp") or pins.of("microbatch"))
        degrees = [dp for dp in divisors(batch) if pins.allows("dp", dp)]
        shares = [(size, [dp for dp in degrees if batch // dp % size == 0]) for size in self._microbatches()]
        for tp in self.tps:
            for cp in self.cps:
                for parallel in self._sequence_parallel(tp, cp):
                    for pp in self.pps:
                        most = self.devices // (tp * cp * pp)
                        for ep in self.eps:
                            for size, dps in shares:
                                if cp > 1 and size > 1 and not free:
                                    continue
                                fit = tuple(dp for dp in dps if dp <= most and dp * tp * cp % ep == 0)
                                if fit:
                                    yield MeshClass(tp, pp, cp, ep, parallel, size, fit)

    def _layout(self, *, tp: int = 1, cp: int = 1, ep: int = 1, sequence_parallel: bool = False) -> Layout:
        job = self._job
        return Layout(
            sequence=job.sequence,
            compute_dtype=job.compute_dtype,
            tp=tp,
            cp=cp,
            ep=ep,
            sequence_parallel=sequence_parallel,
            stack=job.stack,
        )

    def _microbatches(self) -> list[int]:
        sizes = divisors(self._job.global_batch)
        wanted = sizes if self._pins.of("microbatch") else _thinned(sizes)
        return [size for size in self._pins.options("microbatch", wanted) if size in sizes]

    def _sequence_parallel(self, tp: int, cp: int) -> list[bool]:
        """Whether sequences are cut over tp: where the tokens of a rank divide and the model allows it."""
        if not (tp > 1 and self._job.sequence // cp % tp == 0 and self._cuts(tp)):
            return self._pins.options("sequence_parallel", [False])
        return self._pins.options("sequence_parallel", [True, False] if self._executable else [True])

    def _cuts(self, tp: int) -> bool:
        """Whether the model allows it; a pin is taken at its word, and refused by the model."""
        if self._pins.exact("sequence_parallel") is not None:
            return bool(self._pins.exact("sequence_parallel"))
        if self._job.sequence % tp:
            return False
        try:
            self._describe(self._layout(tp=tp, sequence_parallel=True))
        except UnsupportedCombination:
            return False
        return True

    def _tps(self) -> list[int]:
        """tp stays inside a node unless it is pinned beyond."""
        node = max(group.devices for group in self._cluster.nodes)
        bounds = [pin.value for pin in self._pins.of("tp")]
        wanted = range(1, min(self._cluster.devices, max([node, *bounds])) + 1)

        def describe(tp: int) -> ModelSpec:
            """As most meshes with this degree see the model."""
            return self._describe(self._layout(tp=tp, sequence_parallel=self._cuts(tp)))

        return self._legal("tp", wanted, describe)

    def _cps(self) -> list[int]:
        sequence, pinned = self._job.sequence, bool(self._pins.of("cp"))
        few = self._job.global_batch < self._cluster.devices
        fewest = 1 if pinned else _FEWEST_OF_FEW if few else _FEWEST_TOKENS
        wanted = [n for n in divisors(sequence) if n == 1 or (n <= self._cluster.devices and sequence // n >= fewest)]
        first = next((n for n in wanted if n > 1), 1)
        allowed = self._legal("cp", [first], lambda cp: self._describe(self._layout(cp=cp)), quiet=not pinned)
        if self._pins.exact("cp") is not None:
            return allowed
        found = [n for n in wanted if self._pins.allows("cp", n) and (n == 1 or allowed)]
        if not found:
            raise ConfigError(
                f"{self._pins.show('cp')} pinned, which no degree satisfies",
                why=f"context parallelism cuts the {sequence} tokens of a sequence into equal parts",
                fix=f"pin cp to one of {_list(wanted)}, or change job.sequence",
            )
        return found

    def _pps(self) -> list[int]:
        layers = len(self.model.layers)
        devices = self._cluster.devices
        wanted = [n for n in range(1, min(layers, devices) + 1) if n <= _ANY_PP or devices % n == 0 or layers % n == 0]
        if self._pins.of("pp"):
            wanted = list(range(1, min(layers, devices) + 1))
        found = [n for n in self._pins.options("pp", wanted) if n <= layers]
        if not found:
            raise ConfigError(
                f"{self._pins.show('pp')} pinned but {self.model.name} has {layers} layers",
                why="every pipeline stage holds a layer or more",
                fix=f"pin pp={layers} or fewer",
            )
        return found

    def _eps(self) -> list[int]:
        experts = max((shape[0] for block in self.model.layers for shape in block.experts), default=1)
        wanted = [n for n in divisors(experts) if n <= self._cluster.devices]
        # Which degrees divide the experts is known; only a pinned one may be wrong.
        if self._pins.exact("ep") is None and any(self._pins.allows("ep", n) for n in wanted):
            return [n for n in wanted if self._pins.allows("ep", n)]
        return self._legal("ep", wanted, lambda ep: self._describe(self._layout(ep=ep)))

    def _legal(
        self, key: str, wanted: Iterable[int], check: Callable[[int], object], *, quiet: bool = False
    ) -> list[int]:
        """Degrees that the pins and the model allow.

        Raises:
            ConfigError: there are none; the text is the model's about the last one.
        """
        found: list[int] = []
        reason: ConfigError | None = None
        for degree in self._pins.options(key, wanted):
            try:
                if degree > 1:
                    check(degree)
                found.append(degree)
            except ConfigError as error:
                reason = error
        if found or quiet:
            return found
        raise reason or ConfigError(
            f"{self._pins.show(key)} pinned, which no degree of {self._cluster.name} satisfies",
            why=f"{key} can be {_list(list(wanted))}",
            fix="change the pin, or leave it out",
        )

    def _check_devices(self, others: int = 0) -> None:
        """Refuse pins that ask for more ranks than there are devices.

        Args:
            others: ranks along tp, pp and cp at least; 0: what the pins say.
        """
        pins, devices, name = self._pins, self._cluster.devices, self._cluster.name
        lowest = {key: _lowest(pins, key) for key in ("dp", "tp", "pp", "cp")}
        others = max(others, lowest["tp"] * lowest["pp"] * lowest["cp"])
        if lowest["dp"] * others <= devices:
            return
        shown = pins.show("dp", "tp", "pp", "cp")
        most = devices // others
        dimensions = f", and tp, pp and cp take {others} ranks each time" if others > 1 and lowest["dp"] > 1 else ""
        raise ConfigError(
            f"{shown} pinned but {name} has {devices} device{'s' if devices > 1 else ''}",
            why=f"every rank needs a device of its own{dimensions}",
            fix=f"pin dp={most} or fewer, or leave dp out" if most else "pin fewer ranks",
        )

    def _check_batch(self) -> None:
        """Refuse pins under which the global batch cannot be split: which number came from where, what would do."""
        if any(True for _ in self.classes()):
            return
        batch, pins = self._job.global_batch, self._pins
        dp, pinned = pins.exact("dp") or self._derived(), pins.exact("microbatch")
        degrees = [n for n in divisors(batch) if n <= self.most and pins.allows("dp", n)]
        splits = any(batch // n % (pinned or 1) == 0 for n in degrees)
        if splits and (pinned is not None or not pins.of("microbatch")):
            raise self._expert_error()
        origin = "pinned" if pins.of("dp") else f"derived from the {self.devices} devices of {self._cluster.name}"
        if pinned is None and batch % dp == 0:
            raise ConfigError(
                f"{pins.show('microbatch')} pinned, which no microbatch satisfies",
                why=f"each of dp={dp} ranks ({origin}) gets {batch // dp} of global_batch={batch} sequences; "
                f"its microbatch can be {_list(divisors(batch // dp))}",
                fix="change the pin, or job.global_batch",
            )
        step = dp * (pinned or 1)
        microbatch = f"microbatch={pinned} (pinned)" if pinned else "microbatch (derived)"
        sizes = " or ".join(map(str, nearest_multiples(step, batch)))
        ranks = [n for n in divisors(batch) if n <= self.most and n != dp and (batch // n) % (pinned or 1) == 0]
        other = f", or pin dp to {' or '.join(map(str, ranks))}" if ranks else ""
        if pinned is not None and batch % dp == 0:
            other += f", or pin microbatch to {' or '.join(map(str, divisors(batch // dp)[:4]))}"
        raise ConfigError(
            f"global_batch={batch} cannot be split over dp={dp}" + (f" in microbatches of {pinned}" if pinned else ""),
            why=f"global_batch (from the job) = dp={dp} ({origin}) x {microbatch} x accumulation (derived), "
            f"and {batch} is not a multiple of {step}",
            fix=f"set job.global_batch to {sizes}{other}",
        )

    def _derived(self) -> int:
        """The largest data-parallel degree that the devices and the bounds allow."""
        return next((n for n in range(self.most, 0, -1) if self._pins.allows("dp", n)), 1)

    def _expert_error(self) -> ConfigError:
        shown = self._pins.show("dp", "tp", "cp", "ep")
        return ConfigError(
            f"no mesh satisfies {shown}",
            why="experts are laid over the dp x tp x cp ranks of a pipeline stage, which ep has to divide",
            fix="change one of them, or leave it out",
        )


def _thinned(sizes: list[int]) -> list[int]:
    """Of sizes, ascending, all small ones, and of the others each that is enough larger than the one before."""
    kept: list[int] = []
    for size in sizes:
        if size <= _SMALL_MICROBATCH or size >= _APART * kept[-1]:
            kept.append(size)
    return kept


def _lowest(pins: Pins, key: str) -> int:
    exact = pins.exact(key)
    return int(exact) if exact is not None else max([1, *(p.value for p in pins.of(key) if p.operator == ">=")])


def _list(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:12]))
    return shown if len(numbers) <= 12 else f"{shown}, ..."
