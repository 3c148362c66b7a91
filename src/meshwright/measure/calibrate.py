"""calibrate: measures this machine, all of its devices at once, and says what it found as a Cluster."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.errors import ConfigError, RankFailure
from meshwright.measure.fits import bandwidth, efficiency, fit_link, peaks
from meshwright.measure.local_ranks import LocalRanks
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
    the median of several rounds. The collectives of tensor parallelism are those of ZeRO (all-reduce, all-gather,
    reduce-scatter, each waited for), so that one link fitted to them prices both.

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
    progress("starting", 0, 1)
    with tempfile.TemporaryDirectory(prefix="meshwright-calibrate-") as scratch, LocalRanks(Path(scratch)) as started:
        names = [f"rank-{rank}" for rank in range(ranks)]
        for rank, name in enumerate(names):
            arguments = [str(rank), str(ranks), scratch, str(rounds), kind]
            started.start(name, "meshwright.measure.probe_rank", arguments, LOCAL_RANK=str(rank))
        ended = started.follow(_TIMEOUT_S, tick=lambda: _tell(started.out_path(names[0]), progress))
        if ended is not None:
            log = started.log(ended.name)
            raise RankFailure(
                f"rank {names.index(ended.name)} of the measurement "
                + ("was not done in time" if ended.exit_code is None else "failed"),
                why=log.splitlines()[-1] if log else f"exit code {ended.exit_code}",
                fix="try again with fewer ranks (--ranks), or describe the machine in a TOML file",
            )
        return [json.loads((Path(scratch) / f"{name}.json").read_text(encoding="utf-8")) for name in names]


def _tell(out: Path, progress: Progress) -> None:
    """How far rank 0 is, by its last whole line."""
    lines = out.read_text(encoding="utf-8").splitlines()
    if lines and lines[-1].endswith("}"):
        last = json.loads(lines[-1])
        progress(last["what"], last["done"], last["of"])


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
