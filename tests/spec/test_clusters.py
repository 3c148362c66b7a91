"""Clusters from one line of text, from a file, and this machine; the catalogue of devices."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.errors import ConfigError
from meshwright.spec import Cluster, this_machine
from meshwright.spec.clusters import cluster_from_table, parse_cluster
from meshwright.spec.devices import KnownDevice, find_device, known_devices
from meshwright.spec.files import dump_toml, from_table, to_table
from meshwright.spec.machine import _gpu_node

DEVICES = {entry.name: entry for entry in known_devices()}

# --- the text form ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "nodes"),
    [
        ("8xH100-80GB:4", "8xH100-SXM-80GB:4", (4, 8)),
        ("8xh100-80gb:4", "8xH100-SXM-80GB:4", (4, 8)),
        ("8 x H100 : 4", "8xH100-SXM-80GB:4", (4, 8)),
        ("8xH100", "8xH100-SXM-80GB", (1, 8)),
        ("h100", "H100-SXM-80GB", (1, 1)),
        ("H100-80GB", "H100-SXM-80GB", (1, 1)),
        ("H100-SXM", "H100-SXM-80GB", (1, 1)),
        ("4xH100 PCIe:2", "4xH100-PCIe-80GB:2", (2, 4)),
        ("8xh100nvl", "8xH100-NVL-94GB", (1, 8)),
        ("A100-SXM4-80GB", "A100-SXM-80GB", (1, 1)),
        ("8xA100-40G:2", "8xA100-SXM-40GB:2", (2, 8)),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB", (1, 1)),
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB", (1, 1)),
        ("Tesla V100-SXM2-32GB", "V100-SXM-32GB", (1, 1)),
        ("rtx4090", "RTX4090-24GB", (1, 1)),
        ("2x NVIDIA GeForce RTX 4090", "2xRTX4090-24GB", (1, 2)),
        ("4090", "RTX4090-24GB", (1, 1)),
        ("NVIDIA B300 SXM6 AC", "B300-288GB", (1, 1)),
        ("8xB200-192GB", "8xB200-180GB", (1, 8)),
        ("8xMI300X:2", "8xMI300X-192GB:2", (2, 8)),
        ("72xGB200-NVL72:2", "72xGB200-186GB:2", (2, 72)),
        ("64xcpu:2", "64xCPU-4GB:2", (2, 64)),
    ],
)
def test_names_are_forgiving(text: str, name: str, nodes: tuple[int, int]) -> None:
    cluster = parse_cluster(text)
    (group,) = cluster.nodes
    assert (cluster.name, (group.count, group.devices)) == (name, nodes)
    assert cluster.devices == nodes[0] * nodes[1]
    assert (cluster.between is None) == (nodes[0] == 1)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(DEVICES)), st.integers(1, 8), st.integers(1, 2000), st.sampled_from(["", "@8x400Gb"]))
def test_a_cluster_is_the_same_by_its_name_and_after_toml(name: str, modules: int, count: int, network: str) -> None:
    modules = min(modules, DEVICES[name].most // DEVICES[name].dies)
    cluster = parse_cluster(f"{modules}x{name}:{count}{network if count > 1 else ''}")
    assert parse_cluster(cluster.name) == cluster
    assert from_table(Cluster, tomllib.loads(dump_toml(to_table(cluster))), "") == cluster


def test_a_module_of_two_dies_is_two_devices() -> None:
    """PyTorch sees the two dies of an MI250X as two devices, each with half of its 128 GB."""
    cluster = parse_cluster("4xMI250X-128GB:2")
    (group,) = cluster.nodes
    assert (group.devices, cluster.devices) == (8, 16)
    assert group.device.memory_bytes <= 64 * 2**30
    assert group.device.kind == "cuda"


def test_the_network_of_a_node_is_shared_by_its_devices() -> None:
    usual = parse_cluster("8xA100-80GB:16").between
    slow = parse_cluster("8xA100-80GB:16@100Gb").between
    ports = parse_cluster("8xA100-80GB:16@4x100Gb").between
    in_bytes = parse_cluster("8xA100-80GB:16@12.5GB/s").between
    assert usual is not None
    assert slow is not None
    assert ports is not None
    assert usual.bytes_per_s == 25e9  # NVIDIA DGX A100: 200 Gb/s for each GPU
    assert slow.bytes_per_s == 100e9 / 8 / 8
    assert ports.bytes_per_s == 4 * slow.bytes_per_s
    assert in_bytes == slow


def test_the_links_of_a_rack_join_all_its_trays() -> None:
    trays, racks = parse_cluster("4xGB200:18"), parse_cluster("4xGB200:36")
    assert trays.between == trays.nodes[0].inside
    assert racks.between is not None
    assert racks.between.bytes_per_s == 50e9


def test_a_smaller_node_has_its_share_of_the_host() -> None:
    whole, part = parse_cluster("8xH100").nodes[0], parse_cluster("2xH100").nodes[0]
    assert whole.host_memory_bytes == 2_000_000_000_000
    assert part.host_memory_bytes == whole.host_memory_bytes // 4
    assert whole.disk is not None
    assert part.disk is not None
    assert part.disk.bytes_per_s == whole.disk.bytes_per_s / 4
    assert part.host_link == whole.host_link  # each device has its own


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("8xA100", ["A100-SXM-40GB", "A100-SXM-80GB"]),
        ("V100", ["V100-SXM-16GB", "V100-SXM-32GB"]),
        ("A100-PCIe", ["A100-PCIe-40GB", "A100-PCIe-80GB"]),
        ("H100:16", ["8xH100-SXM-80GB:16", "16xH100-SXM-80GB"]),
        ("H1000", ["H100-SXM-80GB"]),
        ("8xL40:2", ["L40S-48GB"]),
        ("rtx 4080", ["RTX4090-24GB"]),
        ("H100-64GB", ["H100-SXM-80GB", "H100-NVL-94GB"]),
        ("16xH100:2", ["8xH100-SXM-80GB:4"]),
        ("", ["8xH100-80GB:4"]),
        ("8x", ["8xH100-80GB:4"]),
        ("TPU v5p", ["MI300X"]),
        ("0xH100", ["'0'"]),
        ("8xH100:0", ["'0'"]),
        ("8xH100:", ["nodes"]),
        ("8xH100:-1", ["'-1'"]),
        ("8xH100:4:2", ["'4:2'"]),
        ("8xH100:1.5", ["'1.5'"]),
        ("9999999999xH100", ["9999999999"]),
        ("-8xH100", ["-8"]),
        ("8xH100:4@", ["@100Gb"]),
        ("8xH100:4@fast", ["fast"]),
        ("8xH100:4@0Gb", ["0Gb"]),
        ("8xH100@100Gb", ["one node"]),
        ("machines.yaml", ["TOML"]),
        ("no/such.toml", ["no/such.toml"]),
        ("this machin", ["this"]),
        ("\n", ["names no device"]),
    ],
)
def test_a_wrong_text_is_refused_with_what_to_write(text: str, named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cluster(text)
    assert [word for word in named if word not in str(caught.value)] == [], str(caught.value)
    assert caught.value.fix


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=20) | st.from_regex(r"[0-9]{0,3}x?[AH]100[-:@0-9A-Za-z]{0,12}", fullmatch=True))
def test_any_text_is_a_cluster_or_one_error(text: str) -> None:
    try:
        cluster = parse_cluster(text)
    except ConfigError:
        return
    assert cluster.devices >= 1


# --- files ------------------------------------------------------------------------------------------------------------

UNEQUAL = """
format = 1
[[nodes]]
count = 2
devices = 8
device = "A100-80GB"
[[nodes]]
count = 3
devices = 4
device = "V100-32GB"
host_memory_bytes = 256000000000
"""


def test_a_file_may_name_unequal_nodes(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(UNEQUAL)
    cluster = parse_cluster(path)
    big, small = cluster.nodes
    assert (cluster.name, cluster.devices) == ("lab", 28)
    assert (big.device, big.inside) == (find_device("A100-80GB").device, find_device("A100-80GB").nodes(8).inside)
    assert small.device.name == "V100-SXM-32GB"
    assert small.host_memory_bytes == 256_000_000_000
    assert cluster.between == find_device("V100-32GB").network  # the slower of both
    assert "V100" in cluster.source


def test_a_file_may_hold_a_whole_cluster_in_a_table_of_its_own(tmp_path: Path) -> None:
    cluster = parse_cluster("8xH100-80GB:4")
    path = tmp_path / "job.toml"
    path.write_text(dump_toml({"format": 1, "cluster": to_table(cluster), "job": {"global_batch": 4}}))
    assert parse_cluster(str(path)) == cluster


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[[nodes]]\ndevices = 8\ndevice = 'H100'\n", "format"),
        ("format = 1\n", "[[nodes]]"),
        ("format = 1\nnodes = 3\n", "nodes"),
        ("format = 1\nnodes = []\n", "has no nodes"),
        ("format = 1\n[[nodes]]\ndevices = 8\ndevice = 'A100'\n", "A100-SXM-40GB"),
        ("format = 1\n[[nodes]]\ndevices = 9\ndevice = 'H100'\n", "at most 8"),
        ("format = 1\n[[nodes]]\ndevices = 0\ndevice = 'H100'\n", "nodes.devices=0"),
        ("format = 1\n[[nodes]]\ndevices = 'x'\ndevice = 'H100'\n", "devices"),
        ("format = 1\n[[nodes]]\ndevice = 'H100'\ncount = 0\n", "nodes.count=0"),
        ("format = 1\n[[nodes]]\ndevice = 'H100'\nhost_memory_bytes = -1\n", "host_memory_bytes=-1"),
        ("format = 1\n[[nodes]]\ndevice = 'H100'\nhost_memry_bytes = 1\n", "host_memory_bytes"),
        ("format = 1\n[[nodes]]\ndevice = 3\ndevices = 1\n", "device"),
        ("format = 1\n[[nodes]]\ndevice = 'H100'\ninside = {latency_s = nan, bytes_per_s = 1.0}\n", "latency_s"),
        ("format = 1\n[cluster]\nname = 'x'\n", "nodes"),
        ("format = 1\ncluster = 3\n", "cluster"),
        ("format = [", "TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse_cluster(path)
    assert named in str(caught.value), str(caught.value)


def test_a_peak_that_is_no_number_is_refused() -> None:
    table = to_table(parse_cluster("8xH100"))
    table["nodes"][0]["device"]["peak_flops_per_s"]["bfloat16"] = -1.0
    with pytest.raises(ConfigError, match=r"peak_flops_per_s\.bfloat16=-1"):
        cluster_from_table(table)


def test_this_is_this_machine() -> None:
    assert parse_cluster("this") == this_machine()
    assert parse_cluster(" This machine ") == this_machine()


def test_the_gpus_that_a_driver_names_have_the_figures_of_the_catalogue() -> None:
    """nvidia-smi tells a GPU's whole memory, PyTorch sees less of it."""
    known = find_device("A100-SXM-80GB").nodes(8)
    node = _gpu_node([("NVIDIA A100-SXM4-80GB", 81920 * 2**20)] * 8, 2**40)
    assert (node.devices, node.device.name) == (8, "NVIDIA A100-SXM4-80GB")
    assert (node.device.memory_bytes, node.inside) == (known.device.memory_bytes, known.inside)
    assert node.device.peak_flops_per_s == known.device.peak_flops_per_s
    assert node.host_memory_bytes == 2**40


def test_gpus_that_are_not_in_the_catalogue_have_what_the_driver_tells() -> None:
    node = _gpu_node([("NVIDIA GeForce GTX 970", 4 * 2**30), ("NVIDIA GeForce GTX 980", 5 * 2**30)], 2**34)
    assert (node.devices, node.device.memory_bytes) == (2, 4 * 2**30)
    assert (node.device.peak_flops_per_s, node.inside) == ({}, None)


# --- the catalogue ----------------------------------------------------------------------------------------------------

WANTED = (
    "V100-16GB V100-32GB A100-40GB A100-80GB A100-PCIe-40GB A100-PCIe-80GB A800 H100-SXM H100-PCIe H100-NVL H800 "
    "H20 H200 B200 B300 GB200 GB300 MI250X MI300X L4 L40S A10G T4 RTX-3090 RTX-4090 RTX-5090 cpu"
)


@pytest.mark.parametrize("text", WANTED.split())
def test_every_wanted_device_is_known(text: str) -> None:
    assert find_device(text)


@pytest.mark.parametrize("entry", known_devices(), ids=lambda entry: entry.name)
def test_an_entry_is_whole_and_plausible(entry: KnownDevice) -> None:
    device = entry.device
    (group,) = parse_cluster(entry.name).nodes
    sold = int(entry.memory.removesuffix("GB"))
    assert 0.9 < device.memory_bytes / (sold * 1e9) < 1.08  # vendors call 2^30 and 10^9 bytes GB
    assert entry.source
    assert entry.node.source
    assert group.inside is not None
    assert group.disk is not None
    assert group.host_memory_bytes is not None
    assert group.host_memory_bytes_per_s is not None
    assert (group.host_link is None) == (entry.kind == "cpu")
    assert set(device.peak_flops_per_s) <= {"float64", "float32", "tf32", "float16", "bfloat16", "float8", "float4"}
    peaks = device.peak_flops_per_s
    assert peaks.get("float8", 2 * peaks.get("float16", 0)) == pytest.approx(2 * peaks.get("float16", 0), rel=0.02)
    assert peaks.get("bfloat16", peaks.get("float16")) == peaks.get("float16")
    assert ("bfloat16" in peaks) == (not entry.chip.startswith(("V100", "T4", "CPU")))


# Dense bfloat16 products (float16 on V100 and T4) in 10^12 per second, memory bandwidth in 10^9 bytes per second and
# the vendor's "total" of the device's links in the same unit, retyped from the vendors' data sheets. Where a data
# sheet gives only the figure with sparsity, half of it.
SHEETS = {
    "V100-SXM-32GB": (125, 900, 300),
    "T4": (65, 300, 32),
    "A100-SXM-40GB": (312, 1555, 600),
    "A100-SXM-80GB": (312, 2039, 600),
    "A800-SXM": (312, 2039, 400),
    "H100-SXM": (1979 / 2, 3350, 900),
    "H100-PCIe": (1513 / 2, 2000, 128),
    "H800": (1979 / 2, 3350, 400),
    "H200": (1979 / 2, 4800, 900),
    "B200": (4500 / 2, 7700, 1800),
    "GB200": (5000 / 2, 8000, 1800),
    "MI300X": (1307.4, 5300, 896),
    "L4": (242 / 2, 300, 64),
    "RTX4090": (165.2, 1008, 64),
}


@pytest.mark.parametrize("name", SHEETS)
def test_peaks_are_dense_and_bandwidths_per_direction(name: str) -> None:
    flops, memory, total = SHEETS[name]
    known = find_device(name)
    peaks = known.device.peak_flops_per_s
    assert peaks.get("bfloat16", peaks["float16"]) == pytest.approx(flops * 1e12, rel=0.002)
    assert known.device.memory_bytes_per_s == pytest.approx(memory * 1e9, rel=0.005)
    inside = known.nodes(1).inside
    assert inside is not None
    assert inside.bytes_per_s == total * 1e9 / 2


def test_a_cluster_is_read_without_torch() -> None:
    code = (
        "import sys, json\n"
        "from meshwright.spec.clusters import parse_cluster\n"
        "parse_cluster('8xH100-80GB:4')\n"
        "print(json.dumps(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == []
