"""Larger machines: the smallest on which anything of a question fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.cost.floors import Floors
from meshwright.errors import MeshwrightError
from meshwright.planner.question import Question
from meshwright.planner.rule import Candidate
from meshwright.planner.space import Space
from meshwright.spec import Cluster, Strategy, is_executable
from meshwright.spec.devices import KnownDevice, find_device, known_devices

__all__ = ["closest", "larger_device", "roomy", "smallest_cluster"]

#: Clusters are not enlarged beyond this many devices.
_MOST_DEVICES = 65_536
_CLOSEST = 8
#: Of the strategies whose bound on memory fits so many are looked at in full, the lowest bounds first.
_TRIED = 32


def roomy(question: Question) -> Strategy | None:
    """A strategy that fits, found among those of each mesh that keep least; None where none of them does.

    States and activations leave the devices only where they must.
    """
    try:
        spaces = [question.space] + ([question.space.offloading()] if question.space.offload_open else [])
        return next((found for space in spaces if (found := _in_space(question, space)) is not None), None)
    except MeshwrightError:
        return None


def _in_space(question: Question, space: Space) -> Strategy | None:
    pricer, floors = question.pricer, Floors(question.pricer)
    bounds = ((floors.bytes(s), str(s), s) for s in _leanest(question, space))
    lean = sorted(bound for bound in bounds if bound[0] <= pricer.budget_bytes(bound[2]))
    for _, _, strategy in lean[:_TRIED]:
        try:
            settled = space.settled(strategy)
            if pricer.fits(settled):
                return settled
        except MeshwrightError:
            continue
    return None


def _leanest(question: Question, space: Space) -> Iterator[Strategy]:
    """The strategy that keeps least of every class of meshes, on the most ranks."""
    for group in space.classes():
        least = space.leanest(group.at(group.dps[-1]))
        if least is not None and (not question.executable or is_executable(least, question.job)):
            yield least


def closest(question: Question) -> list[Candidate]:
    """A few strategies that are short of least, without offload; none of them fits where nothing does."""
    pricer, space, found = question.pricer, question.space, list[Candidate]()
    floors = Floors(pricer)
    for strategy in sorted(_leanest(question, space), key=lambda s: (floors.bytes(s), str(s)))[:_CLOSEST]:
        try:
            executable = is_executable(strategy, question.job)
            found.append(Candidate(strategy=space.settled(strategy), pricer=pricer, executable=executable))
        except MeshwrightError:
            continue
    return found


def smallest_cluster(question: Question) -> tuple[Cluster, Strategy] | None:
    """The same devices, more of them: doubled until something fits, then halved in to the fewest; and a strategy."""
    size, unit = _unit(question.cluster)
    low = size
    high, found = size, None
    while found is None:
        high *= 2
        if high * unit > _MOST_DEVICES:
            return None
        found = _tried(question, high)
    while high - low > 1:
        middle = (low + high) // 2
        other = _tried(question, middle)
        low, high, found = (low, middle, other) if other is not None else (middle, high, found)
    return found


def _tried(question: Question, size: int) -> tuple[Cluster, Strategy] | None:
    cluster = _grown(question.cluster, size)
    strategy = roomy(replace(question, cluster=cluster)) if cluster is not None else None
    return (cluster, strategy) if cluster is not None and strategy is not None else None


def _unit(cluster: Cluster) -> tuple[int, int]:
    """How large a cluster is, in what it grows by, and how many devices that is: devices of one node, or nodes."""
    if len(cluster.nodes) == 1 and cluster.nodes[0].count == 1:
        return cluster.nodes[0].devices, 1
    return sum(group.count for group in cluster.nodes), max(group.devices for group in cluster.nodes)


def _grown(cluster: Cluster, size: int) -> Cluster | None:
    """A cluster of `size` nodes like the last of this one; of one node alone, of `size` devices like its own."""
    last = cluster.nodes[-1]
    if len(cluster.nodes) == 1 and last.count == 1:
        return _of_devices(cluster, size)
    more = size - sum(group.count for group in cluster.nodes[:-1])
    nodes = (*cluster.nodes[:-1], replace(last, count=more))
    shown = f"{size} nodes like those of {cluster.name}"
    if len(nodes) == 1 and ":" in cluster.name:
        head, _, tail = cluster.name.partition(":")
        _, at, network = tail.partition("@")
        shown = f"{head}:{size}{at}{network}"
    return replace(cluster, name=shown, nodes=nodes)


def _of_devices(cluster: Cluster, devices: int) -> Cluster | None:
    """So many devices: in one node as far as the catalogue knows one, then in full nodes; None where they do not
    fill them."""
    group = cluster.nodes[0]
    try:
        known = find_device(group.device.name)
    except MeshwrightError:
        most = max(8, group.devices)
        if devices <= most:
            return replace(cluster, name=f"{devices} such devices", nodes=(replace(group, devices=devices),))
        nodes = -(-devices // most)
        return replace(
            cluster, name=f"{nodes} nodes of {most} such devices", nodes=(replace(group, devices=most, count=nodes),)
        )
    usual = max(known.node.devices, group.devices)
    if known.dies > 1:
        devices = -(-devices // known.dies) * known.dies
    nodes = -(-devices // usual)
    per_node = devices if nodes == 1 else usual
    modules = max(1, per_node // known.dies)
    name = f"{modules}x{known.name}" + (f":{nodes}" if nodes > 1 else "")
    try:
        grown = known.nodes(modules, nodes)
    except MeshwrightError:
        return None
    host = group.host_memory_bytes
    grown = replace(
        grown,
        device=group.device,
        host_memory_bytes=None if host is None else host * grown.devices // group.devices,
    )
    return replace(cluster, name=name, nodes=(grown,), between=known.network if nodes > 1 else None)


def larger_device(question: Question, close: Candidate) -> KnownDevice | None:
    """The device of the catalogue with the least memory with which, in the same number, something fits."""
    cluster = question.cluster
    least, kind = close.cost.total_bytes / cluster.memory_fraction, cluster.device_kind
    enough = [entry for entry in known_devices() if entry.kind == kind and entry.device.memory_bytes >= least]
    for entry in sorted(enough, key=lambda entry: (entry.memory_gib, entry.name)):
        nodes = tuple(replace(group, device=entry.device) for group in cluster.nodes)
        if roomy(replace(question, cluster=replace(cluster, nodes=nodes))) is not None:
            return entry
    return None
