"""How long planning takes, and how that grows with the machines: whole processes, cold, median of five.

`python bench/planner.py`. With `--galvatron PYTHON`, the Python of an environment in which Hetu-Galvatron is installed,
its search engine plans for the same model and number of devices (`bench/planner_galvatron.py` says how).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from startup import COMMANDS, MOST_S, median_s, plan, run

from meshwright.cost.compute import block_work, speeds
from meshwright.cost.links import Placement, collective_s
from meshwright.spec import Layout, Strategy
from meshwright.spec.catalogue import find_model
from meshwright.spec.clusters import parse_cluster

#: Nodes of 8 H100: from 64 to 16,384 devices.
NODES = (8, 32, 128, 512, 2048)
GLOBAL_BATCH = 16384
#: What Hetu-Galvatron searches too.
PEER_MODEL, PEER_CLUSTER, PEER_BATCH, PEER_SEQUENCE = "llama-2-7b", "8xA100-40GB", 64, 2048


def seconds_of(arguments: list[str]) -> float:
    """The median of five after one that is not counted; infinite where that one took too long."""
    return median_s(arguments) if run(*arguments)[1] < MOST_S else float("inf")


def shown(seconds: float) -> str:
    return f"{seconds:>8.3f} s" if seconds < MOST_S else f"> {MOST_S:>6.0f} s"


def profiles(folder: Path, model: str, cluster: str, sequence: int) -> tuple[int, int]:
    """Write what Hetu-Galvatron 2.4.0 takes for profiles, from our own figures; the model's layers and hidden size.

    Milliseconds of a forward per sequence, MB of parameters (float32) and activations by tensor-parallel degree, GB/s
    of links, and milliseconds of collectives.
    """
    described, machines, mb = find_model(model), parse_cluster(cluster), 2**20
    (group,) = machines.nodes
    if group.inside is None:
        raise SystemExit(f"{cluster} has no link inside its nodes")
    degrees = [n for n in (1, 2, 4, 8) if n <= group.devices]
    at = {n: described.at(Layout(sequence=sequence, compute_dtype="bfloat16", tp=n)) for n in degrees}
    whole, speed = at[1], speeds(group.device, "bfloat16")
    layer, ends = whole.layers[0], [block for block in whole.blocks if block.kind != "layer"]
    rest = sum(block_work(block, 1, speed).all.forward for block in ends)
    time = {
        f"layertype_0_bsz1_seq{sequence}": 1e3 * block_work(layer, 1, speed).all.forward,
        f"layertype_other_0_bsz1_seq{sequence}": 1e3 * rest,
    }
    kept = {n: sum(b.saved_bytes["none"] for b in at[n].blocks if b.kind != "layer") / mb for n in degrees}
    states = {n: 16 * sum(b.parameters for b in at[n].blocks if b.kind != "layer") / mb for n in degrees}
    other = {sequence: {"model_states": states, "activation": kept}}
    activations = {str(n): at[n].layers[0].saved_bytes["none"] / mb for n in degrees}
    of_layer = {
        "parameter_size": 4 * layer.parameters / mb,
        "tp_activation_per_bsz_dict": activations | {"checkpoint": layer.output_bytes / mb},
    }
    memory = {"layertype_0": {sequence: of_layer}, "other_memory_pp_off": other}
    memory |= {"other_memory_pp_on_first": other, "other_memory_pp_on_last": other}
    rate = group.inside.bytes_per_s * group.inside.efficiency
    reduced = {f"allreduce_size_{n}_consec_{near}": rate / 1e9 for n in degrees[1:] for near in (0, 1)}
    sent = {f"pp_size_{n}": rate / 1e9 for n in degrees[1:]}
    strategy = Strategy(dp=group.devices)
    whole_node = Placement(machines, strategy).group("dp")
    collectives = {}
    for n in degrees[1:]:
        ranks = whole_node._replace(size=n, inside=n)
        for size in (2**power for power in range(11)):
            collectives[f"allreduce_size_{n}_{size}MB_time"] = 1e3 * collective_s("all_reduce", size * mb, ranks)
            collectives[f"all2all_size_{n}_{size}MB_time"] = 1e3 * collective_s("all_to_all", size * mb, ranks)
    node = f"1nodes_{group.devices}gpus_per_node.json"
    for name, table in {
        "computation_profiling_bf16_model.json": time,
        "memory_profiling_bf16_model.json": memory,
        f"allreduce_bandwidth_{node}": reduced,
        f"p2p_bandwidth_{node}": sent,
        f"sp_time_{node}": collectives,
        "overlap_coefficient.json": {"overlap_coe": 1.1},
    }.items():
        (folder / name).write_text(json.dumps(table), encoding="utf-8")
    return len(whole.layers), layer.output_bytes // (2 * sequence)


def galvatron(python: Path) -> None:
    """The model on 8 devices of 40 GB: ours, and theirs."""
    ours = seconds_of(plan(PEER_MODEL, PEER_CLUSTER, PEER_BATCH, PEER_SEQUENCE))
    with tempfile.TemporaryDirectory() as scratch:
        layers, hidden = profiles(Path(scratch), PEER_MODEL, PEER_CLUSTER, PEER_SEQUENCE)
        driver = Path(__file__).with_name("planner_galvatron.py")
        numbers = (layers, hidden, PEER_SEQUENCE, PEER_BATCH, 36)
        start = time.perf_counter()
        command = [str(python), str(driver), scratch, *map(str, numbers)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
        theirs = time.perf_counter() - start
    if done.returncode != 0:
        sys.exit(f"Hetu-Galvatron failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    print(f"\n{PEER_MODEL} on {PEER_CLUSTER}, global batch {PEER_BATCH}, sequence {PEER_SEQUENCE}: the whole process")
    print(f"{'meshwright plan':<34} {shown(ours)}")
    print(f"{'Hetu-Galvatron search engine':<34} {theirs:>8.3f} s   {done.stdout.splitlines()[-1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--galvatron", type=Path, metavar="PYTHON")
    asked = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f}")
    print(f"{'command':<34} {'median of 5':>12} {'at most':>9}")
    for name, arguments, most in COMMANDS:
        if name.startswith("plan"):
            print(f"{name:<34} {shown(seconds_of(arguments)):>12} {f'{most:g} s':>9}", flush=True)
    print(f"\nLlama 3 70B on nodes of 8 H100, global batch {GLOBAL_BATCH}, sequence 8192")
    print(f"{'devices':>8} {'median of 5':>12}")
    for nodes in NODES:
        found = seconds_of(plan("llama-3-70b", f"8xH100-80GB:{nodes}", GLOBAL_BATCH, 8192))
        print(f"{8 * nodes:>8,} {shown(found):>12}", flush=True)
    if asked.galvatron is not None:
        galvatron(asked.galvatron)


if __name__ == "__main__":
    main()
