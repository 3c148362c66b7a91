"""Which plan `meshwright train` executes: a plan file's, that of the run it resumes, or the planner's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.planner import make_plan, pins_of
from meshwright.planner.pins import Pins
from meshwright.spec import (
    Assignment,
    Cluster,
    Plan,
    Strategy,
    describe,
    parse_assignments,
    require_executable,
    this_machine,
)
from meshwright.spec.files import read_noun
from meshwright.spec.job_file import JobFile
from meshwright.train.launch import Nodes

__all__ = ["choose_plan", "ranks_here", "require_runnable"]

#: Strategies that are shown, the chosen one included.
_RANKED = 5


def choose_plan(
    job_file: JobFile,
    *,
    plan: Path | None,
    pins: Sequence[str],
    strategy: str | None,
    nodes: Nodes,
    earlier: Path | None,
    say: Callable[[str], None],
) -> Plan:
    """The plan to execute.

    Args:
        job_file: the job.
        plan: a plan file to execute as it is.
        pins: words of the text form that narrow the choice, besides those of the job file.
        strategy: a whole strategy in text form.
        nodes: the machines.
        earlier: the plan file of a run that is resumed: its strategy is kept where nothing else is asked and it fits.
        say: shows a line.

    Raises:
        ConfigError: options contradict each other, or a plan does not fit this machine.
        UnsupportedCombination: the strategy or job is not executable by this version.
        InfeasiblePlan: nothing fits.
    """
    asked = {"--plan": plan is not None, "--strategy": strategy is not None, "--pin": bool(pins)}
    named = [name for name, there in asked.items() if there]
    if len(named) > 1:
        raise ConfigError(
            f"{' and '.join(named)} together",
            why="--plan and --strategy decide the whole strategy, --pin a part of it",
            fix=f"use only {' or only '.join(named)}",
        )
    if plan is not None:
        return _as_it_is(plan, nodes)
    wanted = [*job_file.pins, *parse_assignments(pins, option="--pin", bounds=True)]
    if strategy is not None:
        wanted += pins_of(strategy)
    cluster = _cluster(job_file, nodes, wanted, say)
    if strategy is None and earlier is not None and not pins:
        kept = _kept(earlier, job_file, cluster, say)
        if kept is not None:
            return kept
    chosen = make_plan(job_file.model, cluster, job_file.job, wanted, executable=True, most=_RANKED)
    require_runnable(chosen.strategy, cluster, nodes)
    return chosen


def ranks_here(strategy: Strategy, nodes: Nodes) -> int:
    """Ranks on each machine.

    Raises:
        ConfigError: the ranks do not spread evenly over the machines.
    """
    ranks, rest = divmod(strategy.world_size, nodes.nnodes)
    if rest:
        raise ConfigError(
            f"{strategy.world_size} ranks do not spread evenly over --nnodes {nodes.nnodes}",
            why="every machine runs the same number of ranks",
            fix=f"pin dp to a multiple of {nodes.nnodes}",
        )
    return ranks


def require_runnable(strategy: Strategy, cluster: Cluster, nodes: Nodes) -> None:
    """Refuse a strategy that needs more devices on this machine than the cluster says it has.

    Raises:
        ConfigError: with both numbers.
    """
    ranks = ranks_here(strategy, nodes)
    devices = max(group.devices for group in cluster.nodes)
    if ranks > devices:
        raise ConfigError(
            f"strategy {strategy} needs {ranks} ranks on this machine, which has {devices} devices",
            why="a rank has one device",
            fix=f"use at most {devices * nodes.nnodes} ranks, or more machines with --nnodes",
        )


def _cluster(job_file: JobFile, nodes: Nodes, wanted: Sequence[Assignment], say: Callable[[str], None]) -> Cluster:
    """The cluster that the job file describes; else as many machines like this one as take part, whose cores are shared
    where more ranks than cores are pinned.

    Raises:
        ConfigError: the job file describes accelerators that this machine does not have.
    """
    here = this_machine()
    told = job_file.cluster
    if told is not None:
        # Ranks on CPUs may share cores; what has no device cannot run at all.
        devices = max(group.devices for group in told.nodes)
        if told.device_kind not in ("cpu", here.device_kind) or (told.device_kind != "cpu" and devices > here.devices):
            raise ConfigError(
                f"cluster {told.name} has {devices} devices of kind {told.device_kind} on a machine, "
                f"and this machine has {here.devices} of kind {here.device_kind}",
                why="train runs on the machine it is called on",
                fix="leave [cluster] out to train here, or use `meshwright plan` to plan for other machines",
            )
        return told
    pinned = Pins(wanted)
    ranks = math.prod(max(1, pinned.exact(degree) or 1) for degree in ("dp", "tp", "pp", "cp"))
    cores = here.devices
    here = _sharing(here, -(-ranks // nodes.nnodes))
    if here.devices > cores:
        say(f"{here.devices} ranks share the {cores} cores of this machine: they take turns, and are slow")
    if nodes.nnodes == 1:
        return here
    (group,) = here.nodes
    return replace(here, name=f"{nodes.nnodes} machines like this one", nodes=(replace(group, count=nodes.nnodes),))


def _sharing(here: Cluster, ranks: int) -> Cluster:
    """A machine whose cores so many ranks share: parts of a core, with parts of its memory and of its speed."""
    (group,) = here.nodes
    cores, device = group.devices, group.device
    if here.device_kind != "cpu" or ranks <= cores:
        return here
    part = cores / ranks
    speed = device.memory_bytes_per_s
    shared = replace(
        device,
        name=f"{device.name}, shared",
        memory_bytes=device.memory_bytes * cores // ranks,
        memory_bytes_per_s=None if speed is None else speed * part,
        peak_flops_per_s={dtype: rate * part for dtype, rate in device.peak_flops_per_s.items()},
    )
    return replace(here, name=f"{ranks} ranks on this machine", nodes=(replace(group, devices=ranks, device=shared),))


def _as_it_is(path: Path, nodes: Nodes) -> Plan:
    try:
        plan = read_noun(Plan, path)
    except ConfigError as error:
        if error.what.removeprefix("unknown key ") in ("data", "train", "pins"):
            raise ConfigError(
                f"{path} is a job file, not a plan",
                why=f"it has a [{error.what.removeprefix('unknown key ')}] table",
                fix=f"give it without --plan: meshwright train {path}",
            ) from error
        what = error.what if str(path) in error.what else f"plan {path}: {error.what}"
        raise ConfigError(what, why=error.why, fix=error.fix) from error
    require_executable(plan.strategy, plan.job)
    describe(plan.decoder, sequence=plan.job.sequence, compute_dtype=plan.job.compute_dtype)
    plan.strategy.microbatches(plan.job.global_batch)
    here = this_machine()
    if plan.cluster.device_kind != here.device_kind:
        raise ConfigError(
            f"plan {path} is for devices of kind {plan.cluster.device_kind}, and this machine has {here.device_kind}",
            why="its memory and times hold for the devices it was made for",
            fix="plan anew on this machine, without --plan",
        )
    require_runnable(plan.strategy, _sharing(here, -(-plan.strategy.world_size // nodes.nnodes)), nodes)
    return plan


def _kept(path: Path, job_file: JobFile, cluster: Cluster, say: Callable[[str], None]) -> Plan | None:
    """The earlier plan of a resumed run, with today's job, or None where it does not fit any more."""
    try:
        earlier = read_noun(Plan, path)
        if earlier.strategy.world_size > cluster.devices:
            say(f"the run used {earlier.strategy}, more ranks than there are devices now: planning anew")
            return None
        pins = [*job_file.pins, *pins_of(earlier.strategy)]
        plan = make_plan(job_file.model, cluster, job_file.job, pins, executable=True, most=_RANKED)
    except MeshwrightError as error:
        say(f"the plan of the run cannot be kept, planning anew: {error.what}")
        return None
    say(f"keeping the strategy of the run: {plan.strategy}")
    return plan
