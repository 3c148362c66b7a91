"""What accumulation costs: gradients that wait between the microbatches of a step."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.runtime import Engine
from meshwright.spec import Job, Strategy
from tests.counting.census import Census
from tests.harness.ranks import run_ranks

STAGES = (0, 1, 2, 3)
WIDTH, BLOCKS = 256, 4
PARAMETERS = BLOCKS * WIDTH * WIDTH
KIB = 1024


def squares(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
    return (outputs.float() - targets).square().sum(), targets.shape[0]


def bytes_between_microbatches(stages: tuple[int, ...], world: int) -> dict[int, int]:
    """Bytes that are there before the third microbatch of a step and were not before it, by ZeRO stage."""
    found = {}
    for zero in stages:
        engine = Engine(
            lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))),
            squares,
            partial(torch.optim.SGD, lr=0.1),
            Job(global_batch=3 * world, compute_dtype="bfloat16"),
            Strategy(dp=world, zero=zero),
            measure_memory="never",
        )
        batch = torch.ones(3 * world, WIDTH), torch.ones(3 * world, WIDTH)
        census = Census(engine)
        census.begin()
        engine.step(batch)
        found[zero] = census.moments["before 2"]
    return found


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_A10_accumulation_keeps_no_whole_gradient_under_zero_2_and_3(world: int) -> None:
    """It kept 4 bytes per parameter (1024 KiB) on every rank, whatever the stage and the number of ranks.

    Here ZeRO-0 and 1 do, as their table says. ZeRO-2 and 3 reduce every microbatch and keep their shard alone. Beside
    gradients there are only the parameters in bf16: in ZeRO-0 to 2 for the whole step, in ZeRO-3 never between.
    """
    assert PARAMETERS == 262_144
    whole, copies = 1024 * KIB, 512 * KIB
    shard = whole // world
    expected = {0: whole + copies, 1: whole + copies, 2: shard + copies, 3: shard}
    if world == 1:
        expected = dict.fromkeys(STAGES, whole + copies)
    for found in run_ranks(world, bytes_between_microbatches, STAGES, world):
        assert found == {zero: pytest.approx(size, abs=2 * KIB) for zero, size in expected.items()}
