"""Is the planner's choice the fastest? All strategies that run today, measured in turns, beside what the planner says.

`python bench/choice.py` takes three shapes of the built-in decoder on 2 ranks (`--ranks 4` on more), measures every
strategy in several rounds of random order, then those that may be the best in more rounds, and writes
`bench/results/choice.json`. `python bench/choice.py --markdown` renders that file.

Rounds make pairs: a ratio of two strategies is that of their medians over the same rounds, its interval a bootstrap
over rounds. The choice counts as right when it is within 5% of the fastest, or its interval reaches 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import time
from dataclasses import replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

from choice_ranks import Ranks

import meshwright
from meshwright.cost.pricer import Pricer
from meshwright.errors import UnsupportedCombination
from meshwright.planner.meshes import divisors
from meshwright.spec import Cluster, DecoderShape, Job, Layout, Strategy, is_executable, this_machine
from meshwright.spec.clusters import parse_cluster
from meshwright.spec.decoder import described
from meshwright.spec.files import to_table
from meshwright.spec.job import Recompute
from meshwright.spec.text import parse_strategy
from meshwright.spec.values import show_value

RESULTS = Path(__file__).parent / "results" / "choice.json"
WITHIN = 1.05
DRAWS = 2000
#: Who may be the best after the first rounds: all that are so near to it.
NEAR = 1.2
#: Name, what it is, model and job. A step takes 50 to 300 ms on two cores.
SHAPES: dict[str, tuple[DecoderShape, Job]] = {
    "square": (
        DecoderShape(
            hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4
        ),
        Job(global_batch=8, sequence=64),
    ),
    "wide and short": (
        DecoderShape(
            hidden_size=512, intermediate_size=1408, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8
        ),
        Job(global_batch=8, sequence=32),
    ),
    "deep and narrow": (
        DecoderShape(
            hidden_size=96, intermediate_size=256, num_hidden_layers=10, num_attention_heads=3, num_key_value_heads=3
        ),
        Job(global_batch=8, sequence=256),
    ),
}
Times = dict[str, list[float]]


def degrees(shape: DecoderShape, ranks: int) -> list[int]:
    """Tensor-parallel degrees that divide the ranks and the model."""
    found = []
    for tp in divisors(ranks):
        with contextlib.suppress(UnsupportedCombination):
            described(shape).at(Layout(sequence=1, tp=tp))
            found.append(tp)
    return found


def strategies(shape: DecoderShape, job: Job, ranks: int) -> list[Strategy]:
    """Every strategy on these ranks that this version runs: dp, tp, ZeRO, shard group, microbatch, recompute, prefetch,
    and whether sequences are cut."""
    found = []
    kinds: tuple[Recompute, ...] = ("none", "selective", "full")
    for tp in degrees(shape, ranks):
        dp = ranks // tp
        cuts = (False, True) if tp > 1 and job.sequence % tp == 0 else (False,)
        shards = {zero: divisors(dp)[1:] if zero else [1] for zero in range(4)}
        ways = [(z, shard, ahead) for z in shards for shard in shards[z] for ahead in ((0, 1) if z == 3 else (0,))]
        for microbatch, recompute, cut, (zero, shard, prefetch) in product(
            divisors(job.global_batch // dp), kinds, cuts, ways
        ):
            found.append(
                Strategy(
                    dp=dp,
                    tp=tp,
                    sequence_parallel=cut,
                    zero=zero,
                    shard=shard,
                    microbatch=microbatch,
                    recompute=recompute,
                    prefetch=prefetch,
                )
            )
    return [strategy for strategy in found if is_executable(strategy, job)]


def choose(shape: DecoderShape, job: Job, cluster: Cluster, ranks: int) -> Strategy:
    """What the planner takes of those that use all ranks."""
    meshes = [f"dp={ranks // tp} tp={tp}" for tp in degrees(shape, ranks)]
    plans = [meshwright.plan(shape, cluster, job=job, pins=mesh, executable=True) for mesh in meshes]
    return min(plans, key=lambda plan: plan.cost.step_s).strategy


def text(strategy: Strategy) -> str:
    """The text form, with what is not the default."""
    usual = Strategy()
    names = (
        *("dp", "tp", "sequence_parallel", "zero", "shard", "microbatch"),
        *("recompute", "recompute_blocks", "unit_blocks", "prefetch"),
    )
    given = {name: getattr(strategy, name) for name in names}
    if strategy.shard == strategy.dp:
        del given["shard"]
    return " ".join(
        f"{name}={show_value(value)}"
        for name, value in given.items()
        if name in ("dp", "zero", "microbatch", "recompute") or value != getattr(usual, name)
    )


def machine(path: str, ranks: int) -> Cluster:
    """The cluster to plan for: this machine as it was measured, its cores shared where there are more ranks."""
    found = parse_cluster(path) if path else this_machine()
    (group,) = found.nodes
    if ranks <= group.devices:
        return found
    share = group.devices / ranks
    device = group.device
    rates = {dtype: peak * share for dtype, peak in device.peak_flops_per_s.items()}
    bandwidth = device.memory_bytes_per_s * share if device.memory_bytes_per_s else None
    inside = replace(group.inside, bytes_per_s=group.inside.bytes_per_s * share) if group.inside else None
    slow = replace(device, peak_flops_per_s=rates, memory_bytes_per_s=bandwidth, memory_bytes=device.memory_bytes // 2)
    return replace(found, nodes=(replace(group, devices=ranks, device=slow, inside=inside),))


def measure(ranks: Ranks, shape: DecoderShape, job: Job, names: list[str], rounds: int, more: int, seed: int) -> Times:
    """Seconds by strategy, one figure a round; those near the best have `more` rounds behind the first ones."""
    ranks.ask({"do": "model", "model": to_table(shape), "job": to_table(job)})
    order, times = random.Random(seed), {name: list[float]() for name in names}
    begun = time.monotonic()
    for number in range(rounds + more):
        near = names
        if number >= rounds:
            middle = {name: statistics.median(times[name][:rounds]) for name in names}
            best = min(middle.values())
            near = [name for name in names if middle[name] <= NEAR * best or name == names[0]]
        turn = order.sample(near, len(near))
        for name in turn:
            answers = ranks.ask({"do": "steps", "strategy": name, "count": 1})
            times[name].append(max(max(answer) for answer in answers))
        passed = time.monotonic() - begun
        print(f"  round {number + 1} of {rounds + more}: {len(turn)} strategies, {passed:.0f} s", file=sys.stderr)
    return times


def ratio(times: Times, chosen: str, best: str, seed: int) -> tuple[float, float, float]:
    """Median of the chosen over that of the best, and the bounds between which 95% of its bootstrap over rounds lie."""
    pairs = list(zip(times[chosen], times[best], strict=False))  # those of a round; a few may have had more rounds
    draw = random.Random(seed)

    def of(sample: list[tuple[float, float]]) -> float:
        return statistics.median(one for one, _ in sample) / statistics.median(other for _, other in sample)

    drawn = sorted(of(draw.choices(pairs, k=len(pairs))) for _ in range(DRAWS))
    return of(pairs), drawn[int(0.025 * DRAWS)], drawn[int(0.975 * DRAWS) - 1]


def concordance(pairs: list[tuple[float, float]], apart: float = 1.05) -> float:
    """Of pairs of strategies that differ by more than 5% measured, the share that the prediction orders alike."""
    alike = counted = 0
    for index, (said, was) in enumerate(pairs):
        for other_said, other_was in pairs[index + 1 :]:
            if max(was, other_was) > apart * min(was, other_was):
                counted += 1
                alike += (said - other_said) * (was - other_was) > 0
    return alike / counted if counted else 1.0


def rank_correlation(pairs: list[tuple[float, float]]) -> float:
    """Spearman's."""
    said, was = ([sorted(column).index(value) for value in column] for column in zip(*pairs, strict=True))
    return statistics.correlation(said, was) if len(set(said)) > 1 and len(set(was)) > 1 else 1.0


def one_shape(name: str, ranks: Ranks, world: int, cluster: Cluster, asked: argparse.Namespace) -> dict[str, Any]:
    """Plan, measure and compare one shape."""
    shape, job = SHAPES[name]
    chosen = text(choose(shape, job, cluster, world))
    names = list(dict.fromkeys([chosen, *(text(strategy) for strategy in strategies(shape, job, world))]))
    pricer = Pricer(described(shape), cluster, job)
    times = measure(ranks, shape, job, names, asked.rounds, asked.more, asked.seed)
    first = {name: statistics.median(times[name][: asked.rounds]) for name in names}
    finalists = [name for name in names if len(times[name]) > asked.rounds] or names
    best = min(finalists, key=lambda name: statistics.median(times[name]))
    middle, low, high = ratio(times, chosen, best, asked.seed)
    pairs = [(pricer.step_s(parse_strategy(name)), first[name]) for name in names]
    rows = [
        {
            "strategy": name,
            "predicted_s": said,
            "measured_s": statistics.median(times[name]),
            "rounds": len(times[name]),
            "terms": pricer.time(parse_strategy(name)).terms,
        }
        for name, (said, _) in zip(names, pairs, strict=True)
    ]
    return {
        "model": to_table(shape),
        "job": {"global_batch": job.global_batch, "sequence": job.sequence},
        "strategies": sorted(rows, key=lambda row: row["measured_s"]),
        "chosen": chosen,
        "best": best,
        "ratio": middle,
        "interval": [low, high],
        "right": middle <= WITHIN or low <= 1,
        "rank_correlation": rank_correlation(pairs),
        "concordance": concordance(pairs),
    }


def markdown(path: Path = RESULTS) -> str:
    """The results as tables."""
    found = json.loads(path.read_text(encoding="utf-8"))
    lines = []
    for world, run in sorted(found.items(), key=lambda entry: int(entry[0])):
        lines += [
            f"**{world} ranks on {run['cores']} cores** ({run['date']}; load before the run {run['load']:.1f}):",
            "",
            "| shape | strategies | chosen | best measured | chosen / best (95%) | within 5% or inside "
            "| rank correlation | concordance |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for name, one in run["shapes"].items():
            by_name = {row["strategy"]: row for row in one["strategies"]}
            chosen, best = by_name[one["chosen"]], by_name[one["best"]]
            low, high = one["interval"]
            lines.append(
                f"| {name} | {len(one['strategies'])} | `{one['chosen']}`, predicted {_ms(chosen['predicted_s'])}, "
                f"measured {_ms(chosen['measured_s'])} | `{one['best']}`, {_ms(best['measured_s'])} | "
                f"{one['ratio']:.2f} ({low:.2f} to {high:.2f}) | {'yes' if one['right'] else 'no'} | "
                f"{one['rank_correlation']:.2f} | {one['concordance']:.2f} |"
            )
        lines.append("")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="over all strategies")
    parser.add_argument("--more", type=int, default=15, help="over those that may be the best")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--cluster", default="", help="a cluster file; this machine as measured by default")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--markdown", action="store_true", help="render the results and measure nothing")
    asked = parser.parse_args()
    if asked.markdown:
        if not asked.out.exists():
            sys.exit(f"{asked.out} does not exist: measure first, `python bench/choice.py`")
        print(markdown(asked.out))
        return
    cluster = machine(asked.cluster, asked.ranks)
    load = os.getloadavg()[0]
    print(f"planning for: {cluster.source}; load {load:.1f}", file=sys.stderr)
    with Ranks(asked.ranks) as ranks:
        shapes = {name: one_shape(name, ranks, asked.ranks, cluster, asked) for name in asked.shapes}
    found = json.loads(asked.out.read_text(encoding="utf-8")) if asked.out.exists() else {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    run = {"date": date.today().isoformat(), "load": load, "cores": cores, "machine": cluster.source}
    found[str(asked.ranks)] = {**run, "load_after": os.getloadavg()[0], "shapes": shapes}
    asked.out.parent.mkdir(exist_ok=True)
    asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, one in shapes.items():
        print(f"\n{name}: predicted and measured, fastest first")
        for row in one["strategies"]:
            mark = " <- chosen" if row["strategy"] == one["chosen"] else ""
            print(f"{_ms(row['predicted_s']):>9} {_ms(row['measured_s']):>9}  {row['strategy']}{mark}")
    print("\n" + markdown(asked.out))


if __name__ == "__main__":
    main()
