"""What a command line asks a plan for: a model in any of its forms, machines, a job and pins."""

from __future__ import annotations

from dataclasses import replace

from msgspec import Struct

from meshwright.cli.models import find_described
from meshwright.errors import ConfigError
from meshwright.planner import Question, ask, pins_of
from meshwright.planner.objective import find_objective
from meshwright.spec import Assignment, Cluster, DecoderShape, Job, job_for, parse_assignments, this_machine
from meshwright.spec.clusters import parse_cluster
from meshwright.spec.decoder import described
from meshwright.spec.families import Described

__all__ = ["Asked", "Request", "read_request", "require_options"]


class Asked(Struct, frozen=True, kw_only=True):
    """The options of `meshwright plan`, as they were written."""

    model: str | None
    cluster: str | None
    global_batch: int | None
    sequence: int | None
    pins: tuple[str, ...]
    strategy: str | None
    sets: tuple[str, ...]
    executable: bool | None


class Request(Struct, frozen=True, kw_only=True):
    """What they mean. `shape` is that of the built-in decoder, where the model is that one."""

    question: Question
    shape: DecoderShape | None


def require_options(*, objective: str, top: int, price_per_hour: float, devices: str | None) -> None:
    """Refuse options that cannot be right whatever the model.

    Raises:
        ConfigError: the objective is unknown, or a number is out of range.
    """
    find_objective(objective)
    if top < 1:
        raise ConfigError(f"--top {top} ranks nothing", why="it is how many strategies are shown", fix="give 1 or more")
    if not 0 <= price_per_hour < float("inf"):
        raise ConfigError(
            f"--price-per-hour {price_per_hour:g} is not a price",
            fix="give what one device costs an hour, or leave it out",
        )
    if devices is not None and devices != "auto" and not (devices.isdecimal() and int(devices) > 0):
        raise ConfigError(
            f"--devices {devices} is not a number of devices", fix="give 1 or more, or auto, or leave it out"
        )


def read_request(asked: Asked, *, objective: str, devices: str | None) -> Request:
    """The question that the options ask.

    Raises:
        ConfigError: a file, name, key or value cannot be right, or options contradict each other.
    """
    if asked.model is None or asked.model.lower().endswith(".toml"):
        model, cluster, job, pins, shape = _from_job_file(asked)
    else:
        model, cluster, job, pins, shape = _from_model(asked)
    if asked.pins and asked.strategy is not None:
        raise ConfigError(
            "--strategy and --pin together",
            why="--strategy decides the whole strategy, --pin a part of it",
            fix="use only --strategy or only --pin",
        )
    pins = [*pins, *parse_assignments(asked.pins, option="--pin", bounds=True)]
    if asked.strategy is not None:
        pins += pins_of(asked.strategy)
    wanted = find_objective(objective).name
    if devices == "auto" and wanted == "time":
        wanted = "cost"
    elif devices is not None and devices != "auto":
        cluster = _at_most(cluster, int(devices))
    executable = asked.executable if asked.executable is not None else shape is not None and asked.strategy is None
    question = ask(model, cluster, job, pins, objective=wanted, executable=executable)
    return Request(question=question, shape=shape)


_Parts = tuple[Described, Cluster, Job, list[Assignment], DecoderShape | None]


def _from_job_file(asked: Asked) -> _Parts:
    """The built-in decoder of a job file (or the built-in job), with the options in the place of its values."""
    from meshwright.spec.job_file import read_job

    sets = list(asked.sets)
    for key, value in (("job.global_batch", asked.global_batch), ("job.sequence", asked.sequence)):
        if value is not None:
            sets.append(f"{key}={value}")
    file = read_job(asked.model, sets)
    cluster = parse_cluster(asked.cluster) if asked.cluster is not None else file.cluster or this_machine()
    return described(file.model), cluster, file.job, file.pins, file.model


def _from_model(asked: Asked) -> _Parts:
    missing = [
        name for name, value in (("--global-batch", asked.global_batch), ("--seq", asked.sequence)) if value is None
    ]
    if asked.global_batch is None or asked.sequence is None:
        raise ConfigError(
            f"{' and '.join(missing)} missing",
            why="a plan for a model needs the sequences per optimizer step and the tokens of each",
            fix="add for example --global-batch 64 --seq 4096, or give a job file",
        )
    cluster = parse_cluster(asked.cluster) if asked.cluster is not None else this_machine()
    job = job_for(cluster, global_batch=asked.global_batch, sequence=asked.sequence, changes=asked.sets)
    return find_described(str(asked.model), job.sequence), cluster, job, [], None


def _at_most(cluster: Cluster, devices: int) -> Cluster:
    """The first nodes of a cluster, with so many devices.

    Raises:
        ConfigError: it has fewer.
    """
    if devices > cluster.devices:
        raise ConfigError(
            f"--devices {devices}, but {cluster.name} has {cluster.devices}",
            why="a rank needs a device of its own",
            fix=f"give at most {cluster.devices}, or a larger --cluster",
        )
    nodes, left = [], devices
    for group in cluster.nodes:
        whole = min(group.count, left // group.devices)
        if whole:
            nodes.append(replace(group, count=whole))
            left -= whole * group.devices
        if 0 < left < group.devices and whole < group.count:
            nodes.append(replace(group, count=1, devices=left))
            left = 0
        if not left:
            break
    return replace(cluster, name=f"{devices} devices of {cluster.name}", nodes=tuple(nodes))
