"""Hugging Face models, unmodified, with their own losses: as one process on the whole batch, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.measure.equality.float64 import float32_upcasts_stay_float64
from meshwright.runtime import Engine, ModelLoss
from meshwright.spec import Job, Strategy
from tests.harness.every import every
from tests.harness.hugging_face import FAMILIES, ROWS, TIED, make_model, rows_of
from tests.harness.ranks import run_one, run_ranks

Result = tuple[float, dict[str, Tensor]]
JOB = Job(global_batch=ROWS, param_dtype="float64", compute_dtype="float64", reduce_dtype="float64")
CASES = [(name, tied) for name in FAMILIES for tied in ((False, True) if name in TIED else (False,))]
#: Every family under one layout in turn, and one under all of them.
LAYOUTS = ((2, 3), (3, 1), (2, 0), (3, 2))
LAID_OUT = [(*case, *LAYOUTS[index % len(LAYOUTS)]) for index, case in enumerate(CASES)]
LAID_OUT += [("llama", True, *layout) for layout in LAYOUTS if ("llama", True, *layout) not in LAID_OUT]


def by_engine(name: str, tied: bool, zero: int) -> list[Result]:
    """Loss and whole gradients of two steps."""
    ranks = torch.distributed.get_world_size()
    made = Engine(
        make_model(name, tied=tied, dtype=torch.float64),
        ModelLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        JOB,
        Strategy(dp=ranks, zero=zero, microbatch=1),
        measure_memory="never",
    )
    seen: dict[str, Tensor] = {}

    def keep(gradients: dict[str, Tensor | None]) -> None:
        found = {key: value for key, value in gradients.items() if value is not None}
        seen.update({k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in found.items()})

    made.on_gradients, steps = keep, []
    for seed in (1, 2):
        seen.clear()
        with float32_upcasts_stay_float64():
            report = made.step(rows_of(name, seed=seed, dtype=torch.float64))
        steps.append((report.loss, dict(seen)))
    return steps


def in_one_piece(name: str, tied: bool) -> list[Result]:
    """The same by the model's own mean over the whole batch."""
    model = make_model(name, tied=tied, dtype=torch.float64)
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1), []
    for seed in (1, 2):
        optimizer.zero_grad()
        with float32_upcasts_stay_float64():
            loss = model(**rows_of(name, seed=seed, dtype=torch.float64)).loss
            loss.backward()
        steps.append(
            (float(loss.detach()), {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None})
        )
        optimizer.step()
    return steps


def norm(tensor: Any) -> float:
    return float(torch.linalg.vector_norm(tensor))


@pytest.mark.parametrize(("name", "tied", "world", "zero"), every(CASES, LAID_OUT))
def test_families_train_as_in_one_process(name: str, tied: bool, world: int, zero: int) -> None:
    wanted = run_one(in_one_piece, name, tied)
    for steps in run_ranks(world, by_engine, name, tied, zero):
        for (loss, gradients), (right, expected) in zip(steps, wanted, strict=True):
            assert loss == pytest.approx(right, rel=1e-12)
            assert gradients.keys() == expected.keys()
            whole = norm(torch.stack([torch.linalg.vector_norm(g) for g in expected.values()]))
            for key, gradient in expected.items():
                assert norm(gradients[key] - gradient) <= 1e-10 * norm(gradient) + 1e-14 * whole, key
