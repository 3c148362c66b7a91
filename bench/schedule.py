"""How long it takes to build, validate and play pipeline schedules: the median of five, each in its own process.

`python bench/schedule.py`. Built means with all messages and ZeRO units placed, and validated. Building and playing are
given in seconds of one core, which other work on the machine disturbs less, and both together by the clock.
"""

import statistics
import subprocess
import sys
import time

from meshwright.cost.simulate import simulate
from meshwright.schedule import make_schedule

RUNS = 5
#: Name, ranks, virtual stages, microbatches, ZeRO stage.
CASES = [
    ("1f1b", 64, 1, 512, 0),
    ("interleaved-1f1b", 16, 4, 256, 1),
    ("zb-v", 32, 2, 256, 1),
    ("looped-bfs", 8, 8, 64, 3),
    ("1f1b", 8, 1, 128, 3),
]
SECONDS = {"forward": 1.0, "backward": 2.0, "backward-input": 1.0, "backward-weight": 1.0, "gather": 0.5, "reduce": 0.5}


def measure(case: int) -> None:
    name, ranks, virtual, microbatches, zero = CASES[case]
    shard = 8 if zero else 1
    wall, start = time.perf_counter(), time.process_time()
    schedule = make_schedule(
        name, ranks=ranks, microbatches=microbatches, virtual_stages=virtual, units=4, zero=zero, shard=shard, dp=8
    )
    built = time.process_time()
    simulate(schedule, lambda kind, stage: SECONDS.get(kind, 0.0))
    played = time.process_time()
    print(built - start, played - built, time.perf_counter() - wall, sum(len(line) for line in schedule.ranks))


def main() -> None:
    print(f"{'schedule':<62} {'actions':>8} {'build':>8} {'play':>8} {'clock':>8}")
    for case, (name, ranks, virtual, microbatches, zero) in enumerate(CASES):
        runs = []
        for _ in range(RUNS):
            command = [sys.executable, __file__, str(case)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs.append([float(word) for word in done.stdout.split()])
        build, play, clock, actions = (statistics.median(column) for column in zip(*runs, strict=True))
        text = f"{name}, {ranks} ranks x {virtual} stages x {microbatches} microbatches, zero={zero}"
        print(f"{text:<62} {actions:>8.0f} {build:>6.2f} s {play:>6.2f} s {clock:>6.2f} s")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(int(sys.argv[1]))
    else:
        main()
