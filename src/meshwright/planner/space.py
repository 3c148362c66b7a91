"""The space of a search: every legal strategy within the pins, mesh by mesh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import product
from typing import Any, NamedTuple

from msgspec import Struct

from meshwright.cost.pricer import Pricer
from meshwright.errors import ConfigError
from meshwright.planner.meshes import Mesh, MeshClass, Meshes, divisors
from meshwright.planner.pins import Pins
from meshwright.planner.rule import POLICIES
from meshwright.spec import Offload, Strategy, is_executable
from meshwright.spec.strategy import MESH_DIMENSIONS

__all__ = ["Shape", "Space"]

#: Up to so many data-parallel ranks every divisor is tried as a shard group, beyond only all of them and whole nodes.
_SMALL = 8
_MOST_VIRTUAL = 8
_FEW_LAYERS, _PARTS = 16, 8
_MOST_DIVIDING = 2
_LOOPED = ("interleaved-1f1b", "interleaved-zb", "looped-bfs")
_TWO_A_RANK = ("zb-v", "dualpipev")
_PLAIN = ("1f1b", "zb-h1", "gpipe")
_PLAIN_STRATEGY = Strategy()
#: What is tried where nothing fits on the devices, the least first. The disk needs a folder, so that it is only pinned.
_OFFLOADS = (
    Offload(optimizer="host"),
    Offload(activations="host"),
    Offload(optimizer="host", parameters="host"),
    Offload(optimizer="host", activations="host"),
    Offload(optimizer="host", parameters="host", activations="host"),
)


class Shape(NamedTuple):
    """Strategies that differ in how they recompute, when they gather and reduce, and in what they offload: the search
    takes the best of them. `variants` are those without recomputation, or with the least that is allowed."""

    mesh: Mesh
    schedule: str
    virtual_stages: int
    zero: int
    shard: int
    variants: tuple[Strategy, ...]


class Recompute(Struct, frozen=True):
    """A recompute policy and how many of the first blocks may recompute, the fewest first; 0 stands for all."""

    policy: str
    blocks: tuple[int, ...]


class Space:
    """Legal strategies within pins, for the model, cluster and job of a Pricer.

    Args:
        pricer: knows the model, the cluster and the job.
        pins: what is decided.
        executable: only what this version executes.
        offload: whether states and activations may leave the devices though that is not pinned.

    Raises:
        ConfigError: a pin is illegal, or asks for what the model, the cluster or the batch does not allow.
        UnsupportedCombination: the model cannot be divided as pinned.
    """

    def __init__(self, pricer: Pricer, pins: Pins, *, executable: bool = False, offload: bool = False) -> None:
        self.pricer, self.pins, self.executable, self.offload = pricer, pins, executable, offload
        self.cluster, self.job = pricer.cluster, pricer.job
        for key in ("zero", "recompute", "schedule"):
            if pins.exact(key) is not None:
                _refuse(key, pins.exact(key))
        self._fixed = pins.fixed()
        self._stages = pins.listed("stages", int)
        self.meshes = Meshes(pricer.described.at, self.cluster, self.job, pins, executable=executable)
        self.layers = len(self.meshes.model.layers)
        self._check_layers()
        self.recomputes = self._recomputes()
        self._offloads = self._offload_ways()
        self._zero_ways: dict[tuple[int, int, int, bool], dict[tuple[int, int], list[dict[str, Any]]]] = {}
        self._lean_ways: dict[tuple[int, int, int, bool], dict[str, Any] | None] = {}
        self._lean: Strategy | None = None
        self._schedule_ways: dict[int, list[tuple[str, int]]] = {}
        #: Why something within the pins is illegal, where nothing else is legal.
        self.illegal: ConfigError | None = None

    def on(self, pricer: Pricer) -> Space:
        """The same pins on other machines."""
        return Space(pricer, self.pins, executable=self.executable, offload=self.offload)

    def offloading(self) -> Space:
        """The same with what may leave the devices."""
        return Space(self.pricer, self.pins, executable=self.executable, offload=True)

    @property
    def offload_open(self) -> bool:
        """Whether offload is neither pinned nor searched yet."""
        return not self.offload and not any(key.startswith("offload.") for key in self.pins.keys)

    def classes(self) -> Iterator[MeshClass]:
        """Every class of meshes."""
        return self.meshes.classes()

    def schedules(self, mesh: Mesh) -> Iterator[list[Shape]]:
        """Every shape on a mesh, those of one schedule together."""
        base: Strategy | None = None
        for schedule, virtual in self._schedules(mesh):
            base = base or self._base(mesh, schedule, virtual)
            found = []
            for (zero, shard), ways in self._sharded(mesh).items():
                made = (
                    like(base, **way, schedule=schedule, virtual_stages=virtual, offload=offload)
                    for offload in self._offloads
                    for way in ways
                )
                variants = tuple(s for s in made if not self.executable or is_executable(s, self.job))
                if variants:
                    found.append(Shape(mesh, schedule, virtual, zero, shard, variants))
            if found:
                yield found

    def legal(self, mesh: Mesh) -> Iterator[Strategy]:
        """Strategies of a mesh, whether this version executes them or not."""
        for schedule, virtual in self._schedules(mesh):
            for ways in self._sharded(mesh).values():
                for way, offload in product(ways, self._offloads):
                    yield like(self._base(mesh, schedule, virtual), **way, offload=offload)

    def recomputing(self, strategy: Strategy, recompute: Recompute, blocks: int) -> Strategy:
        """A strategy with another way to recompute."""
        if strategy.recompute == recompute.policy and strategy.recompute_blocks == blocks:
            return strategy
        return like(strategy, recompute=recompute.policy, recompute_blocks=blocks)

    def settled(self, strategy: Strategy) -> Strategy:
        """With its stages cut, unless they are pinned."""
        return strategy if self._stages is not None else self.pricer.settled(strategy)

    def unsettled(self, strategy: Strategy) -> Strategy:
        """With its stages open again, unless they are pinned."""
        return strategy if self._stages is not None or not strategy.stages else like(strategy, stages=())

    def leanest(self, mesh: Mesh) -> Strategy | None:
        """The strategy of a mesh that keeps least: where its bound on memory is too much, that of all others is."""
        schedules, way = self._schedules(mesh), self._leanest_way(mesh)
        if not schedules or way is None:
            return None
        schedule, virtual = next((entry for entry in schedules if entry[0] == "1f1b"), schedules[0])
        if self._lean is None:
            most = self.recomputes[-1]
            base = self._base(mesh, schedule, virtual)
            self._lean = like(base, recompute=most.policy, recompute_blocks=most.blocks[-1], offload=self._offloads[-1])
        return like(self._lean, **mesh._asdict(), **way, schedule=schedule, virtual_stages=virtual)

    def sharded(self, lean: Strategy) -> list[Strategy]:
        """A strategy with every other way to shard and to offload."""
        ways = (way for found in self._sharded(Mesh.of(lean)).values() for way in found)
        return [like(lean, **way, offload=offload) for way, offload in product(ways, self._offloads)]

    def plain(self, mesh: Mesh) -> Strategy:
        """A mesh as bounds take it: a strategy of which the rest is not looked at."""
        return like(_PLAIN_STRATEGY, **mesh._asdict())

    # --- what a strategy is made of -----------------------------------------------------------------------------------

    def _base(self, mesh: Mesh, schedule: str, virtual: int) -> Strategy:
        """A legal strategy on a mesh, checked in full."""
        least = self.recomputes[0]
        return Strategy(
            dp=mesh.dp,
            tp=mesh.tp,
            pp=mesh.pp,
            cp=mesh.cp,
            ep=mesh.ep,
            sequence_parallel=mesh.sequence_parallel,
            microbatch=mesh.microbatch,
            schedule=schedule,  # type: ignore[arg-type]  # one of the known schedules
            virtual_stages=virtual,
            stages=self._stages or (),
            recompute=least.policy,  # type: ignore[arg-type]  # one of the three policies
            recompute_blocks=least.blocks[0],
            **self._fixed,
        )

    def _sharded(self, mesh: Mesh) -> dict[tuple[int, int], list[dict[str, Any]]]:
        """By ZeRO stage and shard group: when to gather and reduce."""
        key = (mesh.dp, mesh.cp, self._node_group(mesh), mesh.pp > 1)
        if key not in self._zero_ways:
            self._zero_ways[key] = self._make_sharded(*key)
        return self._zero_ways[key]

    def _leanest_way(self, mesh: Mesh) -> dict[str, Any] | None:
        """Of these ways the one that keeps least."""
        key = (mesh.dp, mesh.cp, self._node_group(mesh), mesh.pp > 1)
        if key not in self._lean_ways:
            ways = (way for found in self._sharded(mesh).values() for way in found)
            self._lean_ways[key] = max(ways, key=_thrift, default=None)
        return self._lean_ways[key]

    def _make_sharded(
        self, dp: int, cp: int, inside: int, pipelined: bool
    ) -> dict[tuple[int, int], list[dict[str, Any]]]:
        pins, found = self.pins, dict[tuple[int, int], list[dict[str, Any]]]()
        for zero in pins.options("zero", range(4)):
            # ZeRO-3 that gathers once a step is ZeRO-2. A chunk is that too where a rank has one stage, and an action
            # where schedules alternate stages. Both are only pinned.
            reduces = ("microbatch", "window") if pipelined else ("microbatch",)
            for shard in self._shards(dp, zero, inside):
                for gather in pins.options("gather", ("unit",) if zero == 3 else ("none",)):
                    for reduce in pins.options("reduce", reduces if zero >= 2 else ("end",)):
                        # What is gathered a chunk or a step at a time is always gathered ahead.
                        ahead = (0,) if zero < 3 else (0, 1) if gather in ("unit", "auto") else (1,)
                        for prefetch in pins.open_options("prefetch", ahead):
                            way = {"zero": zero, "shard": shard, "gather": gather, "reduce": reduce}
                            try:
                                made = Strategy(dp=dp, prefetch=prefetch, **way)
                            except ConfigError as error:
                                self.illegal = error
                                continue
                            way |= {"shard": made.shard, "gather": made.gather, "reduce": made.reduce}
                            found.setdefault((zero, made.shard), []).append(way | {"prefetch": prefetch})
        # ZeRO over one rank shards nothing: it is left out where anything else is possible.
        real = {key: ways for key, ways in found.items() if key[0] == 0 or key[1] * cp > 1}
        return real or found

    def _shards(self, dp: int, zero: int, inside: int) -> list[int]:
        pinned = self.pins.exact("shard")
        if pinned == 0 or zero == 0:
            return [pinned or 1] if zero == 0 else [dp]
        usual = divisors(dp) if dp <= _SMALL else [n for n in (inside, dp) if n and dp % n == 0]
        return self.pins.open_options("shard", sorted(set(usual), reverse=True))

    def _node_group(self, mesh: Mesh) -> int:
        """Data-parallel ranks that lie on one node, where whole groups of them fill it; else 0."""
        node = min(group.devices for group in self.cluster.nodes)
        order = self._fixed.get("mesh_order", MESH_DIMENSIONS)
        sizes = {"tp": mesh.tp, "cp": mesh.cp, "pp": mesh.pp}
        nearer = 1
        for name in reversed(order):
            if name == "dp_shard":
                break
            nearer *= sizes.get(name, 1)
        return node // nearer if node % nearer == 0 and 1 < node // nearer < mesh.dp else 0

    def _schedules(self, mesh: Mesh) -> list[tuple[str, int]]:
        """Schedules and stages a rank for a mesh."""
        count = self.job.global_batch // (mesh.dp * mesh.microbatch)
        if mesh.pp not in self._schedule_ways:
            self._schedule_ways[mesh.pp] = list(self._make_schedules(mesh.pp))
        ways = [(name, v) for name, v in self._schedule_ways[mesh.pp] if _defined(name, mesh.pp, count, v)]
        if self.pins.exact("schedule") is not None:
            return ways
        return [(name, v) for name, v in ways if _worth(name, mesh.pp, count)]

    def _make_schedules(self, pp: int) -> Iterator[tuple[str, int]]:
        names = ("single",) if pp == 1 else (*_PLAIN, *_TWO_A_RANK, *_LOOPED)
        for name in self.pins.options("schedule", names):
            for virtual in self._virtual(name, pp):
                try:
                    made = Strategy(pp=pp, schedule=name, virtual_stages=virtual, stages=self._stages or ())
                except ConfigError as error:
                    self.illegal = error
                    continue
                if pp * made.virtual_stages <= self.layers:
                    yield name, made.virtual_stages
                elif self.pins.of("virtual_stages") or self.pins.of("schedule"):
                    self.illegal = _too_many_stages(pp, made.virtual_stages, self.layers)

    def _virtual(self, name: str, pp: int) -> list[int]:
        """Stages a rank: 2, and the most of those that layers divide into evenly, or do with embedding and head as a
        layer each."""
        usual = [2] if name in _TWO_A_RANK else [1]
        if name in _LOOPED:
            usual = [
                v
                for v in range(2, min(_MOST_VIRTUAL, self.layers // pp) + 1)
                if v == 2 or self.layers % (pp * v) == 0 or (self.layers + 2) % (pp * v) == 0
            ]
            usual = usual[:1] + usual[1:][-_MOST_DIVIDING:]
        return self.pins.open_options("virtual_stages", usual or [2])

    def _offload_ways(self) -> tuple[Offload, ...]:
        tiers = {f.name: self.pins.exact(f"offload.{f.name}") for f in fields(Offload)}
        given = {name: value for name, value in tiers.items() if value is not None}
        if given:
            return (Offload(**given),)
        return (Offload(), *_OFFLOADS) if self.offload else (Offload(),)

    def _recomputes(self) -> tuple[Recompute, ...]:
        """Policies, the least recomputation first.

        Raises:
            ConfigError: the job does not allow what is pinned, or there is none.
        """
        pinned, allowed = self.pins.exact("recompute"), self.job.allow_recompute
        if pinned is not None and pinned not in allowed:
            raise ConfigError(
                f"recompute={pinned} pinned but job.allow_recompute={','.join(allowed)}",
                why="the job does not allow it",
                fix=f"add {pinned} to job.allow_recompute, or leave the pin out",
            )
        found = [Recompute(policy, self._blocks(policy)) for policy in POLICIES if policy in allowed]
        found = [entry for entry in found if entry.blocks and (pinned is None or entry.policy == pinned)]
        if not found:
            policy = pinned or allowed[0]
            blocks = self.pins.exact("recompute_blocks") or 0
            Strategy(recompute=policy, recompute_blocks=blocks)  # says what is wrong
            raise self.nothing_matches()
        return tuple(found)

    def _blocks(self, policy: str) -> tuple[int, ...]:
        """Numbers of first blocks that may recompute, 0 for all of them; of many layers every eighth is tried."""
        pinned = self.pins.exact("recompute_blocks")
        if policy == "none":
            return (0,) if self.pins.allows("recompute_blocks", 0) else ()
        if pinned is not None:
            return (pinned,)
        step = 1 if self.layers <= _FEW_LAYERS else -(-self.layers // _PARTS)
        counts = [*range(step, self.layers, step), self.layers]
        allowed = [n for n in counts if self.pins.allows("recompute_blocks", n)]
        if policy == "selective":
            allowed = allowed[-1:]
        return tuple(n if n < self.layers else 0 for n in allowed)

    def _check_layers(self) -> None:
        blocks, stages = self.pins.exact("recompute_blocks") or 0, self._stages
        if blocks > self.layers:
            raise ConfigError(
                f"recompute_blocks={blocks} pinned but the model has {self.layers} blocks",
                fix=f"pin recompute_blocks={self.layers} or fewer; 0 means all",
            )
        if stages and sum(stages) != self.layers:
            raise ConfigError(
                f"stages={','.join(map(str, stages))} pinned but the model has {self.layers} blocks",
                why=f"the stages hold {sum(stages)} blocks together",
                fix="make the stages hold all blocks, or leave stages out",
            )

    def nothing_matches(self) -> ConfigError:
        """No value is left that the pins allow."""
        return ConfigError(
            f"no strategy satisfies {self.pins.show(*self.pins.keys)}",
            why="the pins leave no value to choose",
            fix="leave one of them out",
        )


def _thrift(way: dict[str, Any]) -> tuple[int, int, int, bool]:
    """More for a way to shard that keeps less."""
    return way["zero"], way["shard"], -way["prefetch"], way["gather"] == "unit"


def like(strategy: Strategy, **changes: Any) -> Strategy:
    """A strategy with other values that are known to be legal beside the rest: `replace` without its checks, which
    would cost a search more than its bounds do."""
    made = object.__new__(Strategy)
    object.__setattr__(made, "__dict__", strategy.__dict__ | changes)
    return made


def _defined(schedule: str, ranks: int, microbatches: int, virtual: int) -> bool:
    """Whether a schedule is defined for so many microbatches (`schedule.compute_orders` refuses the others)."""
    if schedule == "dualpipev":
        return microbatches >= 2 * ranks
    if schedule == "interleaved-1f1b" or (schedule == "interleaved-zb" and virtual > 1):
        return microbatches % max(1, microbatches // ranks) == 0
    return True


def _worth(schedule: str, ranks: int, microbatches: int) -> bool:
    """Whether a schedule is tried unpinned: those that hold all microbatches at once are no faster than 1F1B, and only
    where microbatches are few they hold no more."""
    return schedule not in ("gpipe", "looped-bfs") or microbatches <= 2 * ranks


def _too_many_stages(pp: int, virtual: int, layers: int) -> ConfigError:
    return ConfigError(
        f"pp={pp} x virtual_stages={virtual} make {pp * virtual} stages for {layers} layers",
        why="every stage needs a layer",
        fix=f"pin pp x virtual_stages to {layers} or less",
    )


def _refuse(key: str, value: Any) -> None:
    """Say what is wrong with one value of a field, if anything is."""
    if key == "schedule" and value != "single":
        virtual = 2 if value in _TWO_A_RANK else 1
        Strategy(pp=2, schedule=value, virtual_stages=virtual)
    elif key != "schedule":
        Strategy(**{key: value})
