"""Strategy: everything the runtime must know to run a model on its ranks, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from meshwright.errors import ConfigError
from meshwright.spec.checks import require_choice, require_types
from meshwright.spec.job import Recompute
from meshwright.spec.values import show_value

__all__ = ["MESH_DIMENSIONS", "Offload", "Strategy", "even_layers"]

Tier = Literal["device", "host", "disk"]
Gather = Literal["auto", "none", "unit", "chunk", "step"]
Reduce = Literal["auto", "microbatch", "window", "end"]
Schedule = Literal[
    "single", "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "interleaved-zb", "zb-v", "dualpipev"
]
#: Fields with words for values; a search builds hundreds of strategies.
_CHOICES = {
    "schedule": get_args(Schedule),
    "recompute": get_args(Recompute),
    "gather": get_args(Gather),
    "reduce": get_args(Reduce),
}

#: Mesh dimensions, outermost (slowest link) first: the default order over ranks.
MESH_DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_SINGLE_STAGE_SCHEDULES = ("single",)
_LOOPED_SCHEDULES = ("interleaved-1f1b", "looped-bfs", "interleaved-zb")
#: Two stages a rank by definition: the pipeline runs down the ranks and up again.
_V_SCHEDULES = ("zb-v", "dualpipev")


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Where model states and activations rest: the memory tier of each, and the folder of the disk tier."""

    optimizer: Tier = "device"
    parameters: Tier = "device"
    activations: Literal["device", "host"] = "device"
    path: str = ""

    def __post_init__(self) -> None:
        for name, choices in (("optimizer", Tier), ("parameters", Tier), ("activations", Literal["device", "host"])):
            require_choice(f"offload.{name}", getattr(self, name), get_args(choices))
        on_disk = "disk" in (self.optimizer, self.parameters)
        if on_disk and not self.path:
            raise ConfigError(
                "offload to disk without a folder",
                why="offload.optimizer or offload.parameters is 'disk', but offload.path is empty",
                fix="set offload.path to a folder on a fast local disk",
            )
        if self.path and not on_disk:
            raise ConfigError(
                f"offload.path={self.path} has no effect",
                why="neither offload.optimizer nor offload.parameters is 'disk'",
                fix="remove offload.path, or set offload.optimizer=disk",
            )


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One complete parallel strategy. Values left at their "derive it" default are resolved when it is built.

    Degrees (`dp tp pp cp ep`) count ranks along each kind of parallelism; the world size is `dp * tp * pp * cp`
    (experts are laid over ranks of the other dimensions). `shard` is the size of the ZeRO shard group: the ranks over
    which states are sharded; 0 means all of `dp`. `unit_blocks` is how many consecutive blocks ZeRO gathers at once,
    `prefetch` how many units are gathered ahead. `virtual_stages` is how many stages each pipeline rank holds; it is 2
    for zb-v and dualpipev. `microbatch` counts sequences. `recompute_blocks` is how many of the first blocks recompute;
    0 means all.

    Raises:
        ConfigError: the combination is illegal, or an option has no effect.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    mesh_order: tuple[str, ...] = MESH_DIMENSIONS
    sequence_parallel: bool = False
    zero: int = 0
    shard: int = 0
    unit_blocks: int = 1
    prefetch: int = 0
    schedule: Schedule = "single"
    virtual_stages: int = 1
    stages: tuple[int, ...] = ()
    microbatch: int = 1
    recompute: Recompute = "none"
    recompute_blocks: int = 0
    offload: Offload = Offload()
    gather: Gather = "auto"
    reduce: Reduce = "auto"

    def __post_init__(self) -> None:
        require_types(self)
        for name, known in _CHOICES.items():
            require_choice(name, getattr(self, name), known)
        self._check_degrees()
        self._check_zero()
        self._check_pipeline()
        self._check_recompute()
        if self.sequence_parallel and self.tp == 1:
            raise ConfigError(
                "sequence_parallel=true has no effect with tp=1",
                why="sequence parallelism shards activations over the tp dimension",
                fix="set tp above 1, or leave sequence_parallel out",
            )

    @property
    def world_size(self) -> int:
        """Ranks that run this strategy."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def replicas(self) -> int:
        """Shard groups that hold the same shards (hybrid sharding when above 1 and `shard` above 1)."""
        return self.dp // self.shard

    def place(self, rank: int) -> dict[str, int]:
        """A rank's coordinate along each mesh dimension."""
        sizes = {"pp": self.pp, "dp_replicate": self.replicas, "dp_shard": self.shard, "cp": self.cp, "tp": self.tp}
        found = {}
        for name in reversed(self.mesh_order):
            rank, found[name] = divmod(rank, sizes[name])
        return found

    def data_rank(self, rank: int) -> int:
        """Which data-parallel rank a rank is: those with the same number compute the same rows."""
        place = self.place(rank)
        outer, inner = (name for name in self.mesh_order if name.startswith("dp_"))
        return place[outer] * (self.shard if inner == "dp_shard" else self.replicas) + place[inner]

    def microbatches(self, global_batch: int) -> int:
        """Microbatches per optimizer step and data-parallel rank for a global batch of `global_batch` sequences.

        Raises:
            ConfigError: the global batch does not divide; the text names the nearest that do.
        """
        per_pass = self.dp * self.microbatch
        if global_batch < 1 or global_batch % per_pass:
            below, above = global_batch // per_pass * per_pass, -(-max(global_batch, 1) // per_pass) * per_pass
            nearest = " or ".join(str(n) for n in sorted({below, above}) if n > 0)
            raise ConfigError(
                f"global_batch={global_batch} cannot be split over dp={self.dp} into microbatches of {self.microbatch}",
                why=f"global_batch = dp x microbatch x accumulation, and {self.dp} x {self.microbatch} = {per_pass} "
                f"does not divide {global_batch}",
                fix=f"set global_batch to {nearest}, or change dp or microbatch",
            )
        return global_batch // per_pass

    def __str__(self) -> str:
        """The text form: `dp=2 zero=3 ...`, only what differs from the defaults (`dp` and `zero` always)."""
        words = [f"dp={self.dp}", f"zero={self.zero}"]
        default = {f.name: f.default for f in fields(Strategy)}
        derived = {"shard": self.dp if self.zero else 1, "gather": _gather(self.zero), "reduce": _reduce(self.zero)}
        for name in default:
            value = getattr(self, name)
            if name in ("dp", "zero", "offload") or value in (default[name], derived.get(name)):
                continue
            words.append(f"{name}={show_value(value)}")
        for entry in fields(Offload):
            value = getattr(self.offload, entry.name)
            if value != entry.default:
                words.append(f"offload.{entry.name}={show_value(value)}")
        return " ".join(words)

    def _check_degrees(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep", "unit_blocks", "virtual_stages", "microbatch"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}={value} is not a positive number", fix=f"set {name} to 1 or more")
        for name in ("prefetch", "recompute_blocks", "shard"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"{name}={value} is negative", fix=f"set {name} to 0 or more")
        of_a_stage = self.dp * self.tp * self.cp
        if of_a_stage % self.ep:
            raise ConfigError(
                f"ep={self.ep} does not divide the {of_a_stage} ranks of a pipeline stage",
                why="experts are laid over the dp x tp x cp ranks of a stage",
                fix=f"set dp to a multiple of {self.ep}, or ep to a number that divides dp x tp x cp",
            )
        if sorted(self.mesh_order) != sorted(MESH_DIMENSIONS):
            raise ConfigError(
                f"mesh_order={','.join(self.mesh_order)} is not an order of the mesh dimensions",
                why=f"each of {', '.join(MESH_DIMENSIONS)} must appear exactly once",
                fix="list all of them, outermost (slowest link) first",
            )

    def _check_zero(self) -> None:
        if self.zero not in (0, 1, 2, 3):
            raise ConfigError(
                f"zero={self.zero} is not a ZeRO stage",
                why="the stages are 0 (nothing sharded), 1 (optimizer), 2 (and gradients), 3 (and parameters)",
                fix="set zero to 0, 1, 2 or 3",
            )
        _resolve(self, "shard", 0, self.dp if self.zero else 1)
        if self.zero == 0 and self.shard != 1:
            raise ConfigError(
                f"shard={self.shard} has no effect with zero=0",
                why="ZeRO-0 shards nothing",
                fix="set zero to 1, 2 or 3, or leave shard out",
            )
        if self.dp % self.shard:
            legal = ", ".join(str(n) for n in range(1, self.dp + 1) if self.dp % n == 0)
            raise ConfigError(
                f"shard={self.shard} does not divide dp={self.dp}",
                why="data-parallel ranks are split into equal shard groups",
                fix=f"set shard to one of {legal}",
            )
        if self.prefetch and self.zero != 3:
            raise ConfigError(
                f"prefetch={self.prefetch} has no effect with zero={self.zero}",
                why="only ZeRO-3 gathers units again and again, so only there can they be gathered ahead",
                fix="set zero=3, or leave prefetch out",
            )
        _resolve(self, "gather", "auto", _gather(self.zero))
        _resolve(self, "reduce", "auto", _reduce(self.zero))
        if (self.zero == 3) == (self.gather == "none"):
            raise ConfigError(
                f"gather={self.gather} contradicts zero={self.zero}",
                why="ZeRO-3 gathers parameters per unit, chunk or step; the stages below gather them once a step",
                fix="leave gather out",
            )
        if self.zero in (2, 3) and self.reduce == "end":
            raise ConfigError(
                f"zero={self.zero} with reduce=end is not ZeRO-{self.zero}",
                why="reducing only at the end keeps whole gradients through the step, which is what ZeRO-1 does",
                fix="set zero=1, or leave reduce out",
            )
        if self.zero in (0, 1) and self.reduce != "end":
            raise ConfigError(
                f"zero={self.zero} with reduce={self.reduce} keeps whole gradients and reduces them more than once",
                why="below ZeRO-2 an early reduce costs communication and saves nothing",
                fix="set zero=2, or leave reduce out",
            )

    def _check_pipeline(self) -> None:
        single = self.schedule in _SINGLE_STAGE_SCHEDULES
        if self.pp == 1 and not single:
            raise ConfigError(
                f"schedule={self.schedule} has no effect with pp=1",
                why="a pipeline schedule orders the work of several stages",
                fix="set pp above 1, or leave schedule out",
            )
        if self.pp > 1 and single:
            raise ConfigError(
                f"pp={self.pp} needs a pipeline schedule",
                why="schedule=single is the schedule of one stage",
                fix="set schedule to 1f1b, or another of gpipe, zb-h1, zb-v, dualpipev, "
                + ", ".join(_LOOPED_SCHEDULES),
            )
        if self.schedule in _V_SCHEDULES:
            _resolve(self, "virtual_stages", 1, 2)
            if self.virtual_stages != 2:
                raise ConfigError(
                    f"virtual_stages={self.virtual_stages} with schedule={self.schedule}",
                    why=f"{self.schedule} has two stages a rank by definition",
                    fix=f"leave virtual_stages out, or use schedule={' or '.join(_LOOPED_SCHEDULES)}",
                )
        elif self.virtual_stages > 1 and self.schedule not in _LOOPED_SCHEDULES:
            raise ConfigError(
                f"virtual_stages={self.virtual_stages} has no effect with schedule={self.schedule}",
                fix=f"use schedule={' or '.join(_LOOPED_SCHEDULES)}, or leave virtual_stages out",
            )
        if self.stages and (len(self.stages) != self.pp * self.virtual_stages or min(self.stages) < 1):
            raise ConfigError(
                f"stages={','.join(map(str, self.stages))} are not the {self.pp * self.virtual_stages} stages needed",
                why="pp x virtual_stages stages each need their number of blocks, at least one",
                fix="list one positive number of blocks per stage, or leave stages out",
            )

    def _check_recompute(self) -> None:
        if self.recompute_blocks and self.recompute == "none":
            raise ConfigError(
                f"recompute_blocks={self.recompute_blocks} has no effect with recompute=none",
                fix="set recompute=full or recompute=selective, or leave recompute_blocks out",
            )


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage, as even as can be; what is over goes to the middle, away from embedding and head."""
    base, over = divmod(layers, stages)
    middle = sorted(range(stages), key=lambda stage: (abs(2 * stage - (stages - 1)), stage))
    more = set(middle[:over])
    return tuple(base + (stage in more) for stage in range(stages))


def _gather(zero: int) -> str:
    return "unit" if zero == 3 else "none"


def _reduce(zero: int) -> str:
    return "microbatch" if zero >= 2 else "end"


def _resolve(strategy: Strategy, name: str, sentinel: object, value: object) -> None:
    """Replace the "derive it" default of a field of a frozen dataclass while it is being built."""
    if getattr(strategy, name) == sentinel:
        object.__setattr__(strategy, name, value)
