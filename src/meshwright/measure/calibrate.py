"""calibrate: measures this machine, all of its devices at once, and says what it found as a Cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.errors import ConfigError, RankFailure
from meshwright.measure.fits import bandwidth, efficiency, fit_link, peaks
from meshwright.spec import Cluster, Link, NodeGroup
from meshwright.spec.machine import plain_machine

__all__ = ["calibrate"]

_ROUNDS = 5
_TIMEOUT_S = 240.0
#: An answer of a disk or of a copy to the device, where it was not measured.
_DISK_LATENCY_S = 100e-6

#: What is measured now, how many probes are done, and of how many.
Progress = Callable[[str, int, int], None]


def calibrate(*, ranks: int = 0, tiny: bool = False, progress: Progress | None = None) -> Cluster:
    """Measure this machine: products, attention, memory, starting an operation, collectives, links and disk.

    One process with one thread runs on each device, as in training, and all measure at the same time. Every figure is
    the median of several rounds.

    Args:
        ranks: processes; 0 for one on every device.
        tiny: sizes that take a moment and tell nothing, to try the machinery.
        progress: called while it measures.

    Raises:
        ConfigError: there are not so many devices.
        RankFailure: a process ended with an error; the text is its own.
    """
    plain = plain_machine()
    (group,) = plain.nodes
    if not 0 <= ranks <= group.devices:
        raise ConfigError(
            f"--ranks {ranks} on a machine with {group.devices} devices",
            why="a rank has one device",
            fix=f"give 1 to {group.devices}, or leave it out for all",
        )
    ranks = ranks or group.devices
    answers = _run(ranks, 1 if tiny else _ROUNDS, "tiny" if tiny else "full", progress or (lambda *_: None))
    return _cluster(plain, group, ranks, answers)


def _run(ranks: int, rounds: int, kind: str, progress: Progress) -> list[dict[str, Any]]:
    """Start the ranks, follow rank 0, and read what each has found."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    progress("starting", 0, 1)
    with tempfile.TemporaryDirectory(prefix="meshwright-calibrate-") as scratch:
        folder = Path(scratch)
        processes = []
        try:
            for rank in range(ranks):
                arguments = [str(rank), str(ranks), scratch, str(rounds), kind]
                with (folder / f"rank-{rank}.log").open("w") as log, (folder / f"rank-{rank}.out").open("w") as out:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, "-m", "meshwright.measure.probe_rank", *arguments],
                            stdout=out,
                            stderr=log,
                            env={**environment, "LOCAL_RANK": str(rank)},
                        )
                    )
            _follow(processes, folder, progress)
            return [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _follow(processes: list[subprocess.Popen[bytes]], folder: Path, progress: Progress) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while any(process.poll() is None for process in processes):
        failed = next((rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)), None)
        if failed is not None or time.monotonic() > deadline:
            break
        lines = (folder / "rank-0.out").read_text(encoding="utf-8").splitlines()
        if lines:
            last = json.loads(lines[-1]) if lines[-1].endswith("}") else None
            if last is not None:
                progress(last["what"], last["done"], last["of"])
        time.sleep(0.1)
    for rank, process in enumerate(processes):
        if process.poll() != 0:
            log = (folder / f"rank-{rank}.log").read_text(encoding="utf-8", errors="replace").strip()
            raise RankFailure(
                f"rank {rank} of the measurement {'was not done in time' if process.poll() is None else 'failed'}",
                why=log.splitlines()[-1] if log else f"exit code {process.poll()}",
                fix="try again with fewer ranks (--ranks), or describe the machine in a TOML file",
            )


def _cluster(plain: Cluster, group: NodeGroup, ranks: int, answers: list[dict[str, Any]]) -> Cluster:
    """What was measured in place of the catalogue's figures."""
    facts = answers[0]["facts"]
    cells = {
        name: median(answer["cells"][name] for answer in answers if name in answer["cells"])
        for name in answers[0]["cells"]
    }
    cpu = facts["kind"] == "cpu"
    how = f"measured by meshwright calibrate on {date.today().isoformat()}, {ranks} at once, PyTorch {facts['torch']}"
    reached = efficiency(cells, multiprocessors=facts["multiprocessors"], source=how)
    measured, moved = peaks(cells), bandwidth(cells)
    device = replace(group.device, memory_bytes_per_s=moved, efficiency=reached, peak_flops_per_s=measured)
    if not cpu and group.device.peak_flops_per_s:
        # A known accelerator keeps its official peaks, of which the measurement is a share: MFU stays comparable.
        device = replace(device, **_against_official(group, device.peak_flops_per_s, moved, reached))
    node = replace(
        group,
        device=device,
        inside=fit_link(cells, ranks) if ranks > 1 else group.inside,
        disk=Link(latency_s=_DISK_LATENCY_S, bytes_per_s=bandwidth(cells, "disk write"), efficiency=1.0),
        disk_bytes=_free_bytes(),
    )
    if cpu:
        node = replace(node, host_memory_bytes_per_s=moved * ranks)
    else:
        copied = min(bandwidth(cells, "to host"), max(bandwidth(cells, "to device"), 1.0))
        node = replace(node, host_link=Link(latency_s=cells["to device 4"], bytes_per_s=copied, efficiency=1.0))
    note = "" if ranks == group.devices else f"; {ranks} of {group.devices} devices were measured"
    return replace(plain, nodes=(node,), source=how + note)


def _against_official(group: NodeGroup, measured: dict[str, float], moved: float, reached: Any) -> dict[str, Any]:
    official = dict(group.device.peak_flops_per_s)
    first = next(iter(measured))
    scale = {dtype: rate / official[dtype] for dtype, rate in measured.items() if dtype in official}
    if first not in scale:
        return {}
    memory = group.device.memory_bytes_per_s or moved
    usual = group.device.efficiency
    shares = dict(usual.products) if usual is not None else {}
    shares |= {dtype: min(1.0, reached.products[dtype] * factor) for dtype, factor in scale.items()}
    return {
        "peak_flops_per_s": official,
        "memory_bytes_per_s": memory,
        "efficiency": replace(
            reached,
            products=shares,
            attention=min(1.0, reached.attention * scale[first]),
            backward_attention=min(1.0, reached.backward_attention * scale[first]),
            memory=min(1.0, reached.memory * moved / memory),
        ),
    }


def _free_bytes() -> int:
    import shutil

    return shutil.disk_usage(tempfile.gettempdir()).free
