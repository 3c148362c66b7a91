"""Cluster: the machines a job may use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.errors import ConfigError

__all__ = ["Cluster", "Device", "Efficiency", "Link", "NodeGroup"]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What a device reaches of its peaks.

    `products` maps a dtype to the share of its peak that a large matrix product reaches; a product over k inner
    channels reaches k / (k + `half_inner`) of that. Its output is cut into tiles of twice `tile` by `tile`, of which
    `multiprocessors` are worked on at once (0: not known, none are lost). `attention` and `backward_attention` are the
    shares of the peak that an attention kernel reaches, over the pairs it does not skip. `memory` is the share of the
    memory bandwidth that memory-bound operations reach, `kernel_s` what starting one operation takes. `contention` is
    how long compute is held up by a collective beside it, over what the collective's bytes take on the link in a node.

    `source` says where the figures come from, or which fit made them.
    """

    products: dict[str, float]
    half_inner: float = 0.0
    tile: int = 128
    multiprocessors: int = 0
    attention: float
    backward_attention: float
    memory: float
    kernel_s: float
    contention: float = 0.5
    source: str = ""

    def __post_init__(self) -> None:
        shares = {"attention": self.attention, "backward_attention": self.backward_attention, "memory": self.memory}
        shares |= {f"products.{dtype}": share for dtype, share in self.products.items()}
        for name, share in shares.items():
            if not 0 < share <= 1:
                raise ConfigError(
                    f"efficiency.{name}={share} is not in (0, 1]", fix="give the share of the peak that is reached"
                )
        for name in ("half_inner", "kernel_s", "multiprocessors", "contention"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"efficiency.{name}={getattr(self, name)} is negative", fix="give 0 or more")
        if self.tile < 1:
            raise ConfigError(
                f"efficiency.tile={self.tile} is not positive", fix="give the rows of a tile, such as 128"
            )


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device: the place of one rank. On a CPU machine a device is one core with its share of the host memory.

    `kind` is torch's device type. `memory_bytes` is what PyTorch sees. `peak_flops_per_s` maps a dtype to the peak of
    dense matrix products (float32 products with TensorFloat-32 stand under `tf32`, 8-bit and 4-bit ones under `float8`
    and `float4`); what is not known is left out, never guessed. `efficiency` is what it reaches of that, where it was
    measured or fitted.
    """

    name: str
    kind: str = "cpu"
    memory_bytes: int
    memory_bytes_per_s: float | None = None
    peak_flops_per_s: dict[str, float] = field(default_factory=dict)
    efficiency: Efficiency | None = None

    def __post_init__(self) -> None:
        if self.memory_bytes < 1:
            raise ConfigError(
                f"device {self.name}: memory_bytes={self.memory_bytes} is not positive",
                fix="give the memory of one device in bytes",
            )
        rates = {"memory_bytes_per_s": self.memory_bytes_per_s}
        rates |= {f"peak_flops_per_s.{dtype}": peak for dtype, peak in self.peak_flops_per_s.items()}
        _require_positive(f"device {self.name}", rates)


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link tier: latency of one message and bandwidth per device and direction, of which `efficiency` is reached.

    `collectives` maps a kind of collective to the share that it reaches where that is another (a library that does not
    go around a ring).
    """

    latency_s: float
    bytes_per_s: float
    efficiency: float = 0.8
    collectives: dict[str, float] | None = None

    def __post_init__(self) -> None:
        shares = {"efficiency": self.efficiency}
        shares |= {f"collectives.{kind}": share for kind, share in (self.collectives or {}).items()}
        for name, share in shares.items():
            if 0 < share <= 1:
                continue
            raise ConfigError(
                f"link with {name}={share}",
                why="it is the share of the bandwidth that collectives reach",
                fix="give a number above 0, at most 1 (1 where the bandwidth was measured)",
            )
        if not (0 <= self.latency_s < math.inf and 0 < self.bytes_per_s < math.inf):
            raise ConfigError(
                f"link with latency_s={self.latency_s}, bytes_per_s={self.bytes_per_s}",
                why="a link has a latency of 0 or more and a positive bandwidth",
                fix="give seconds and bytes per second",
            )


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """`count` equal nodes of `devices` devices each, with the host's memory and links where they are known.

    `host_memory_bytes`, its bandwidth and the disk are those of the node, shared by its devices; `inside` joins its
    devices, `host_link` joins each device with the host's memory.
    """

    count: int = 1
    devices: int
    device: Device
    host_memory_bytes: int | None = None
    host_memory_bytes_per_s: float | None = None
    inside: Link | None = None
    host_link: Link | None = None
    disk: Link | None = None
    disk_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("count", "devices"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"nodes.{name}={getattr(self, name)} is not positive", fix=f"set nodes.{name} to 1 or more"
                )
        names = ("host_memory_bytes", "host_memory_bytes_per_s", "disk_bytes")
        _require_positive("nodes", {name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All nodes, and the link between them. `memory_fraction` is how much of a device's memory a plan may use.

    `source` says where the figures come from.
    """

    name: str
    nodes: tuple[NodeGroup, ...]
    between: Link | None = None
    memory_fraction: float = 0.9
    source: str = ""

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ConfigError(f"cluster {self.name} has no nodes", fix="list at least one [[cluster.nodes]]")
        if not 0 < self.memory_fraction <= 1:
            raise ConfigError(
                f"cluster.memory_fraction={self.memory_fraction} is not in (0, 1]", fix="use a fraction such as 0.9"
            )

    @property
    def devices(self) -> int:
        """Devices in all nodes: the most ranks there can be."""
        return sum(group.count * group.devices for group in self.nodes)

    @property
    def inventory(self) -> str:
        """How many of which device: `16 x H100-SXM-80GB, 8 x A100-SXM-80GB`."""
        counts: dict[str, int] = {}
        for group in self.nodes:
            counts[group.device.name] = counts.get(group.device.name, 0) + group.count * group.devices
        return ", ".join(f"{count} x {name}" for name, count in counts.items())

    @property
    def device_kind(self) -> str:
        """torch's device type of the first node's devices."""
        return self.nodes[0].device.kind

    @property
    def usable_bytes(self) -> int:
        """Bytes a plan may use on the smallest device."""
        return int(min(group.device.memory_bytes for group in self.nodes) * self.memory_fraction)


def _require_positive(where: str, figures: Mapping[str, float | None]) -> None:
    for name, figure in figures.items():
        if figure is not None and not 0 < figure < math.inf:
            raise ConfigError(
                f"{where}: {name}={figure} is not a positive number", fix=f"leave {name} out where it is not known"
            )
