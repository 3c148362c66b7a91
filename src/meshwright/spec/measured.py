"""The measurement of this machine that `meshwright calibrate` keeps: where it lies, and whether it still holds."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.spec.cluster import Cluster
from meshwright.spec.files import Table, dump_toml, from_table, load_toml, require_format, to_table, write_text

__all__ = ["Fingerprint", "kept_measurement", "measurement_path", "measurement_text", "write_measurement"]

#: Memory may differ by so much (a kernel that keeps a little more for itself) and be that of the same machine.
_SAME_MEMORY = 0.02


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What a measurement holds for: the machine and the PyTorch it was made with."""

    processor: str
    devices: int
    device: str
    memory_bytes: int
    torch: str

    @classmethod
    def of(cls, plain: Cluster) -> Fingerprint:
        """That of this machine now; `plain` is what the operating system tells of it."""
        from importlib.metadata import PackageNotFoundError, version  # only here, as it takes a while to load

        (group,) = plain.nodes
        try:
            torch = version("torch")
        except PackageNotFoundError:
            torch = ""
        return cls(
            processor=_processor(),
            devices=group.devices,
            device=group.device.name,
            memory_bytes=group.host_memory_bytes or group.device.memory_bytes,
            torch=torch,
        )

    def difference(self, other: Fingerprint) -> str:
        """The first thing in which `other`, the machine of today, differs; empty where nothing does."""
        for name in ("processor", "device", "devices", "torch"):
            if getattr(self, name) != getattr(other, name):
                return f"it was made with {name} {getattr(self, name)}, now it is {getattr(other, name)}"
        if abs(self.memory_bytes - other.memory_bytes) > _SAME_MEMORY * other.memory_bytes:
            return f"it was made with {self.memory_bytes} bytes of memory, now there are {other.memory_bytes}"
        return ""


def measurement_path() -> Path:
    """The file in the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`).

    Raises:
        ConfigError: there is no home folder.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:
        raise ConfigError("no cache folder", why=str(error), fix="set XDG_CACHE_HOME") from error
    return folder / "meshwright" / "this-machine.toml"


def measurement_text(cluster: Cluster, made_on: Fingerprint) -> str:
    """The file's text. Without its fingerprint it is a cluster file like any other: `--cluster FILE.toml` reads it."""
    from meshwright.spec.plan import PLAN_FORMAT

    table: Table = {"format": PLAN_FORMAT, "fingerprint": to_table(made_on), "cluster": to_table(cluster)}
    return dump_toml(table)


def write_measurement(path: Path, cluster: Cluster, made_on: Fingerprint) -> None:
    """Keep a measurement, whole or not at all.

    Raises:
        ConfigError: the folder cannot be written.
    """
    write_text(path, measurement_text(cluster, made_on))


def kept_measurement(plain: Cluster) -> tuple[Cluster | None, str]:
    """The measurement that is kept for this machine, and why it is not used where there is one that cannot be.

    Args:
        plain: the machine as the operating system tells it.
    """
    try:
        path = measurement_path()
        if not path.exists():
            return None, ""
        table = load_toml(path)
        require_format(table, str(path))
        made_on = from_table(Fingerprint, table.get("fingerprint"), "fingerprint")
        cluster = from_table(Cluster, table.get("cluster"), "cluster")
    except (ConfigError, OSError) as error:
        return None, f"the measurement of this machine cannot be read: {str(error).splitlines()[0]}"
    stale = made_on.difference(Fingerprint.of(plain))
    return (None, f"the measurement in {path} is not used: {stale}") if stale else (cluster, "")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Hardware")))
    return next(names, "") or platform.processor() or platform.machine()
