"""A machine's figures on the screen."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.report.style import numbers
from meshwright.spec import Cluster, Device, Link, NodeGroup
from meshwright.spec.units import show_bytes

__all__ = ["machine_view"]


def machine_view(cluster: Cluster) -> RenderableType:
    """What is known of each kind of node of a cluster, and where it comes from."""
    table = numbers(f"{cluster.name}: {cluster.devices} devices")
    table.add_column("", style="dim")
    table.add_column("figure", justify="right")
    table.add_column("of it is reached", justify="right")
    for group in cluster.nodes:
        for row in (*_of_device(group.device), *_of_node(group)):
            table.add_row(*row)
    return Group(table, Text(cluster.source, style="dim"))


def _of_device(device: Device) -> Iterator[tuple[str, str, str]]:
    reached = device.efficiency
    yield f"{device.name}: memory", show_bytes(device.memory_bytes), ""
    shares = reached.products if reached is not None else {}
    for dtype, peak in device.peak_flops_per_s.items():
        yield f"matrix products, {dtype}", f"{peak / 1e9:,.1f} GFLOP/s", _share(shares.get(dtype))
    if device.memory_bytes_per_s is not None:
        rate = f"{device.memory_bytes_per_s / 1e9:,.1f} GB/s"
        yield "memory bandwidth, memory-bound operations", rate, _share(reached.memory if reached else None)
    if reached is not None:
        yield "attention, forward", "", _share(reached.attention)
        yield "attention, backward", "", _share(reached.backward_attention)
        yield "inner dim at which a product is half as fast", f"{reached.half_inner:,.0f}", ""
        yield "starting one operation", _seconds(reached.kernel_s), ""


def _of_node(group: NodeGroup) -> Iterator[tuple[str, str, str]]:
    for name, link in (("link between devices", group.inside), ("link to the host", group.host_link)):
        if link is not None:
            yield f"{name}, latency of a message", _seconds(link.latency_s), ""
            yield f"{name}, bandwidth", f"{link.bytes_per_s / 1e9:,.2f} GB/s", _share(_reached(link))
    if group.disk is not None:
        yield "disk, written", f"{group.disk.bytes_per_s / 1e9:,.2f} GB/s", _share(_reached(group.disk))


def _reached(link: Link) -> float | None:
    return link.efficiency if link.efficiency != 1 else None


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:,.2f} ms"
