"""This machine as a Cluster, read from the operating system without torch."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.spec.cluster import Cluster, Device, Link, NodeGroup
from meshwright.spec.devices import find_device

__all__ = ["plain_machine", "this_machine"]

#: The catalogue's core of a CPU.
_CPU = "CPU-4GB"
#: What one core draws from memory at most, measured on a core of an EPYC 7003; and the memory bandwidth of a socket of
#: that kind (8 channels of DDR4-3200), which its cores share.
_CORE_BYTES_PER_S = 13e9
_NODE_BYTES_PER_S = 204.8e9
#: gloo between two processes of one machine, measured on two cores of an EPYC 7003 with PyTorch 2.13. A gather or a
#: scatter of a message takes it about as long as an all-reduce, which goes around a ring twice.
_GLOO = Link(
    latency_s=150e-6,
    bytes_per_s=1.3e9,
    efficiency=1.0,
    collectives={"all_gather": 0.45, "reduce_scatter": 0.4},
)
_CPU_SOURCE = (
    "not measured: figures of a usual core (catalogue of devices) and of gloo; `meshwright calibrate` measures"
)

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def this_machine() -> Cluster:
    """The machine this runs on, as `meshwright calibrate` measured it, else with the catalogue's figures.

    A measurement of another machine or of another PyTorch is not used, and a warning says so.

    Raises:
        ConfigError: the operating system tells neither its memory nor its cores.
    """
    from meshwright.spec.measured import kept_measurement

    plain = plain_machine()
    kept, why_not = kept_measurement(plain)
    if why_not:
        import logging  # only here: it takes as long to load as a plan's tables

        logging.getLogger("meshwright").warning("%s; run `meshwright calibrate`", why_not)
    return kept or plain


def plain_machine() -> Cluster:
    """The same without a measurement: its GPUs if `nvidia-smi` lists any, else one device per usable core.

    Raises:
        ConfigError: the operating system tells neither its memory nor its cores.
    """
    memory = _host_memory_bytes()
    gpus = _nvidia_gpus()
    if gpus:
        return Cluster(name="this machine", nodes=(_gpu_node(gpus, memory),))
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Cluster(name="this machine", nodes=(_cpu_node(count, memory),), source=_CPU_SOURCE)


def _cpu_node(count: int, memory_bytes: int) -> NodeGroup:
    """Cores with the catalogue's figures for one, and what two cores of a virtual machine were measured to reach."""
    usual = find_device(_CPU).nodes(1)
    bandwidth = min(_CORE_BYTES_PER_S, _NODE_BYTES_PER_S / count)
    device = replace(
        usual.device,
        name=f"{platform.machine()} core",
        memory_bytes=memory_bytes // count,
        memory_bytes_per_s=bandwidth,
    )
    return NodeGroup(
        devices=count,
        device=device,
        host_memory_bytes=memory_bytes,
        host_memory_bytes_per_s=bandwidth * count,
        inside=_GLOO,
    )


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
    import shutil
    import subprocess  # only here, as most plans are for other machines

    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return []
    rows = [line.rsplit(",", 1) for line in output.splitlines() if "," in line]
    return [(name.strip(), int(mib) * 2**20) for name, mib in rows if mib.strip().isdigit()]
