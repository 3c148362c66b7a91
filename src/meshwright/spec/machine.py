"""This machine as a Cluster, read from the operating system without torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.spec.cluster import Cluster, Device, NodeGroup
from meshwright.spec.devices import find_device

__all__ = ["this_machine"]

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def this_machine() -> Cluster:
    """The machine this runs on: its GPUs if `nvidia-smi` lists any, else one device per usable core.

    Raises:
        ConfigError: the operating system tells neither its memory nor its cores.
    """
    memory = _host_memory_bytes()
    gpus = _nvidia_gpus()
    if gpus:
        return Cluster(name="this machine", nodes=(_gpu_node(gpus, memory),))
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    device = Device(name=f"{platform.machine()} core", kind="cpu", memory_bytes=memory // count)
    return Cluster(name="this machine", nodes=(NodeGroup(devices=count, device=device, host_memory_bytes=memory),))


def _gpu_node(gpus: list[tuple[str, int]], host_memory_bytes: int) -> NodeGroup:
    """What the driver tells; for a GPU of the catalogue also its peaks, bandwidths and links."""
    name, memory_bytes = min(gpus, key=lambda gpu: gpu[1])
    plain = NodeGroup(
        devices=len(gpus),
        device=Device(name=name, kind="cuda", memory_bytes=memory_bytes),
        host_memory_bytes=host_memory_bytes,
    )
    try:
        usual = find_device(name).nodes(len(gpus))
    except ConfigError:
        return plain
    visible = min(memory_bytes, usual.device.memory_bytes)
    device = replace(usual.device, name=name, memory_bytes=visible)
    return replace(plain, device=device, inside=usual.inside, host_link=usual.host_link)


def _host_memory_bytes() -> int:
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError) as error:
        raise ConfigError(
            "the size of this machine's memory is unknown",
            why=str(error),
            fix="describe the machine in the job file under [cluster]",
        ) from error
    for path in _CGROUP_LIMITS:
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            memory = min(memory, int(text))
    return memory


def _nvidia_gpus() -> list[tuple[str, int]]:
    """Name and memory (bytes) of each NVIDIA GPU; empty when there is none or no driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return []
    rows = [line.rsplit(",", 1) for line in output.splitlines() if "," in line]
    return [(name.strip(), int(mib) * 2**20) for name, mib in rows if mib.strip().isdigit()]
