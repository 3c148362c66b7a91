"""Pipeline parallelism beside others: step time and memory of the engine, of `torch.distributed.pipelining`, DeepSpeed.

`python bench/pipeline.py [--deepspeed PYTHON]`: as `side_by_side.py` has it. Where data-parallel ranks share the work,
bare pipelining has FSDP2 over each stage. DeepSpeed needs an environment that has it (0.19) beside PyTorch.

`python bench/pipeline.py --bubble`: every schedule over blocks that sleep for a known time, its measured step beside
the step that is simulated for the same schedule and the same durations.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

from choice_ranks import Ranks
from side_by_side import RANK, Case, add_arguments, compare

MICROBATCHES, STEPS = 8, 3
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "interleaved-zb", "zb-v", "dualpipev")
ONE_STAGE = ("gpipe", "1f1b", "zb-h1")
#: Of a stage's time for one microbatch, what each half of the backward takes for one second of forward.
HALVES = {"forward": 1.0, "backward-input": 1.2, "backward-weight": 0.8}


def _cases(*, tiny: bool) -> Iterator[Case]:
    for pp, dp, zero, schedule in (
        (2, 1, 0, "gpipe"),
        (2, 1, 0, "1f1b"),
        (4, 1, 0, "gpipe"),
        (4, 1, 0, "1f1b"),
        (2, 2, 1, "gpipe"),
        (2, 2, 1, "1f1b"),
        (2, 2, 2, "1f1b"),
        (2, 2, 3, "1f1b"),
    ):
        name = f"pp={pp}{f' dp={dp} zero={zero}' if dp > 1 else ''} {schedule}"
        peers = ("torch", "deepspeed") if schedule == "1f1b" and zero < 2 else ("torch",)
        given = {"pp": pp, "dp": dp, "zero": zero, "schedule": schedule, "tiny": tiny}
        yield Case(name, pp * dp, peers, given)


def bubbles(sleep_s: float, schedules: tuple[str, ...]) -> Iterator[str]:
    """A row for each schedule and number of ranks.

    Args:
        sleep_s: a stage's forward of one microbatch.
    """
    yield f"{'':<26} {'simulated':>10} {'measured':>10} {'ratio':>7}   {'as slept':>8}"
    for pp in (2, 4):
        with Ranks(pp, script=RANK) as ranks:
            for schedule in schedules:
                virtual = 1 if schedule in ONE_STAGE else 2
                given: dict[str, Any] = {
                    "strategy": f"pp={pp} schedule={schedule} virtual_stages={virtual}",
                    "microbatches": MICROBATCHES,
                    "seconds": {kind: sleep_s / virtual * share for kind, share in HALVES.items()},
                    "steps": STEPS,
                }
                order = {"do": "call", "module": "pipeline_bubble", "function": "measure", "arguments": given}
                answers = ranks.ask(order)
                taken = statistics.median(map(max, zip(*(answer["taken_s"] for answer in answers), strict=True)))
                simulated = answers[0]["simulated_s"]
                slept = statistics.mean(answer["slept"] for answer in answers)
                yield (
                    f"pp={pp} {schedule:<21} {simulated:>8.3f} s {taken:>8.3f} s {taken / simulated:>7.3f}   "
                    f"{taken / simulated / slept:>8.3f}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--tiny", action="store_true", help="blocks so small that only overhead takes time")
    parser.add_argument("--bubble", action="store_true", help="measured against simulated, over blocks that sleep")
    parser.add_argument("--sleep", type=float, default=0.1, metavar="S", help="a rank's forward of one microbatch")
    parser.add_argument("--schedule", choices=SCHEDULES, help="this one's bubble alone")
    chosen = parser.parse_args()
    if not chosen.bubble:
        compare(list(_cases(tiny=chosen.tiny)), "pipeline_peers", chosen)
        return
    for line in bubbles(chosen.sleep, (chosen.schedule,) if chosen.schedule else SCHEDULES):
        print(line, flush=True)


if __name__ == "__main__":
    main()
