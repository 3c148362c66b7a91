"""The catalogue of known devices: their figures, the nodes they usually stand in, and forgiving names for them."""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError
from meshwright.spec.cluster import Device, Efficiency, Link, NodeGroup

__all__ = ["KnownDevice", "find_device", "known_devices"]

_DATA = Path(__file__).with_name("devices.toml")
_FORMS = {"sxm": "SXM", "pcie": "PCIe", "nvl": "NVL"}
#: Words that vendors and drivers put around a name and that decide nothing.
_NOISE = re.compile("nvidia|amd|instinct|tesla|geforce|quadro|gpu|gcd|cores?|tensor|ac|oam|dgx|hgx|nvl72|hbm[0-9]e?")
_MEMORY = re.compile(r"[0-9]{1,5}(g|gb|gib)")


@dataclass(frozen=True, kw_only=True)
class _Node:
    source: str
    devices: int
    host_memory_gb: float
    host_memory_gb_per_s: float
    disk_gb: float
    disk_gb_per_s: float
    host_link_gb_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class KnownDevice:
    """One entry of the catalogue; `devices.toml` explains the figures. Bandwidths are in 10^9 bytes per second."""

    chip: str
    memory: str
    memory_gib: float
    memory_gb_per_s: float
    tflops: dict[str, float]
    link: str
    link_gb_per_s: float
    most: int
    network_gb_per_s: float
    node: _Node
    source: str
    latency_us: dict[str, float]
    efficiency: Efficiency
    form: str = ""
    kind: str = "cuda"
    dies: int = 1
    rack: bool = False
    also: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The full name, such as `H100-SXM-80GB`; `find_device` reads it."""
        return "-".join(part for part in (self.chip.replace(" ", ""), self.form, self.memory) if part)

    @property
    def device(self) -> Device:
        """The noun: one device as PyTorch sees it."""
        return Device(
            name=self.name,
            kind=self.kind,
            memory_bytes=int(self.memory_gib * 2**30),
            memory_bytes_per_s=self.memory_gb_per_s * 1e9,
            peak_flops_per_s={dtype: figure * 1e12 for dtype, figure in self.tflops.items()},
            efficiency=self.efficiency,
        )

    @property
    def network(self) -> Link:
        """Its typical network between nodes, per device and direction."""
        return self._link("network", self.network_gb_per_s)

    def nodes(self, modules: int, count: int = 1) -> NodeGroup:
        """`count` nodes of `modules` modules each: as many devices, or twice as many where a module holds two.

        A node with fewer devices than the usual one has its share of the host's memory, bandwidth and disk.

        Raises:
            ConfigError: no node has so many of these devices.
        """
        most = self.most // self.dies
        if modules > most:
            nodes = -(-modules * count // most)
            raise ConfigError(
                f"{modules}x{self.name}: a node with {modules} of them is not known",
                why=f"one node has at most {most}",
                fix=f"write the number of nodes after a colon, {most}x{self.name}:{nodes}, or describe it in TOML",
            )
        devices = modules * self.dies
        share = min(1.0, devices / self.node.devices)
        host_link = self.node.host_link_gb_per_s
        return NodeGroup(
            count=count,
            devices=devices,
            device=self.device,
            host_memory_bytes=int(self.node.host_memory_gb * 1e9 * share),
            host_memory_bytes_per_s=self.node.host_memory_gb_per_s * 1e9 * share,
            inside=self._link(self.link, self.link_gb_per_s),
            host_link=None if host_link is None else self._link("pcie", host_link),
            disk=self._link("disk", self.node.disk_gb_per_s * share),
            disk_bytes=int(self.node.disk_gb * 1e9 * share),
        )

    def _link(self, kind: str, gb_per_s: float) -> Link:
        return Link(latency_s=self.latency_us[kind] / 1e6, bytes_per_s=gb_per_s * 1e9)


@dataclass
class _Asked:
    """What a name says: the chip, and form and memory where it names them."""

    chip: str = ""
    forms: set[str] = field(default_factory=set)
    memories: set[str] = field(default_factory=set)


@lru_cache(maxsize=1)
def known_devices() -> tuple[KnownDevice, ...]:
    """All devices of the catalogue."""
    table = tomllib.loads(_DATA.read_text(encoding="utf-8"))
    nodes = {name: _Node(**entry) for name, entry in table["node"].items()}
    reached = {name: _efficiency(entry) for name, entry in table["efficiency"].items()}
    latency_us = table["latency_us"]
    return tuple(
        KnownDevice(
            **{
                **entry,
                "node": nodes[entry["node"]],
                "efficiency": reached[entry["efficiency"]],
                "latency_us": latency_us,
            }
        )
        for entry in table["device"]
    )


def _efficiency(entry: dict[str, Any]) -> Efficiency:
    rest = {key: value for key, value in entry.items() if key != "kernel_us"}
    return Efficiency(**rest, kernel_s=entry["kernel_us"] / 1e6)


def find_device(text: str) -> KnownDevice:
    """The device that a name means: `H100-80GB`, `a100-sxm4-40gb`, `NVIDIA A100-SXM4-80GB`, `rtx4090`, `4090`.

    Where a device comes on a board of its own (SXM) and as a card, the board is meant unless the name says PCIe or NVL.

    Raises:
        ConfigError: unknown (the nearest name is given), or known in several sizes (all are given).
    """
    asked = _read(text)
    of_chip = [entry for entry in known_devices() if asked.chip and asked.chip in _spellings(entry)]
    if not of_chip:
        raise _unknown(text, asked)
    found = [entry for entry in of_chip if asked.forms <= {_form(entry)} and asked.memories <= _sizes(entry)]
    if not asked.forms:
        found = [entry for entry in found if entry.form == "SXM"] or found
    if not found:
        raise ConfigError(
            f"device {text!r} is not in the catalogue",
            why=f"{of_chip[0].chip} is known as {_names(of_chip)}",
            fix="name one of these, or describe the device in a TOML file",
        )
    if len(found) > 1:
        raise ConfigError(
            f"device {text!r} can mean {_names(found, ' or ')}",
            why="they differ in memory",
            fix=f"write {found[0].name} or {found[1].name}",
        )
    return found[0]


def _read(text: str) -> _Asked:
    asked, chip = _Asked(), []
    glued = re.sub(r"(sxm[0-9]?|pci-?e|nvl(?!72)(?![a-z]))", r" \1 ", text.lower())
    for word in re.split(r"[\s\-_/,.()]+", re.sub(r"([0-9])\s+(gi?b)\b", r"\1\2", glued)):
        form = word.replace("pci-e", "pcie").rstrip("0123456789") if word.startswith(("sxm", "pci")) else word
        if form in _FORMS:
            asked.forms.add(_FORMS[form])
        elif _MEMORY.fullmatch(word):
            asked.memories.add(re.sub("[^0-9]", "", word))
        elif not _NOISE.fullmatch(word):
            chip.append(word)
    asked.chip = "".join(chip)
    return asked


def _spellings(entry: KnownDevice) -> set[str]:
    plain = entry.chip.lower().replace(" ", "")
    return {plain, plain.removeprefix("rtx")}


def _form(entry: KnownDevice) -> str:
    """Its form; where there is only one, it need not be part of the name."""
    return entry.form or ("PCIe" if entry.link == "pcie" else "SXM")


def _sizes(entry: KnownDevice) -> set[str]:
    """The sizes by which a device is known, in GB; for two dies also that of the module."""
    size = entry.memory.removesuffix("GB")
    return {size, str(int(size) * entry.dies), *(name.removesuffix("GB") for name in entry.also)}


def _names(entries: list[KnownDevice], joint: str = ", ") -> str:
    return joint.join(entry.name for entry in entries)


def _unknown(text: str, asked: _Asked) -> ConfigError:
    spellings = {spelling: entry for entry in reversed(known_devices()) for spelling in _spellings(entry)}
    near = difflib.get_close_matches(asked.chip, spellings, n=1, cutoff=0.5)
    chips = ", ".join(dict.fromkeys(entry.chip for entry in known_devices()))
    return ConfigError(
        f"device {text!r} is not in the catalogue",
        why=f"known are {chips}",
        fix=(f"did you mean {spellings[near[0]].name}? Or " if near else "") + "describe the device in a TOML file",
    )
