"""Hugging Face families over tensor- and data-parallel ranks: unmodified, padded, as in one process, really divided."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch

from meshwright.measure.equality import Run, compare, join, record, show
from meshwright.runtime import Engine, ModelLoss
from meshwright.spec import Job, Strategy
from tests.harness.divided import DIVIDED, FAST, WHOLE_SEQUENCES, divided_model
from tests.harness.hugging_face import ROWS, rows_of
from tests.harness.ranks import run_one, run_ranks

JOB = Job(global_batch=ROWS, param_dtype="float64", compute_dtype="float64", reduce_dtype="float64", clip_norm=0.5)
RATES = {"sgd": 0.1, "adamw": 0.01}
TP, DP, STEPS, LAYERS = 2, 2, 3, 3
#: Name of a parameter to its size on this rank before ZeRO shards it, and after.
Sizes = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Trained:
    """A family under a strategy."""

    name: str
    tied: bool
    optimizer: str
    strategy: Strategy

    def __str__(self) -> str:
        return f"{self.name}{' tied' if self.tied else ''} {self.optimizer} {self.strategy}"

    @property
    def reference(self) -> Trained:
        return replace(self, strategy=Strategy(microbatch=self.strategy.microbatch))


def listed() -> list[Any]:
    """Every family under every option; of each of some one case is fast, so that all options occur among them."""
    found = []
    for name in DIVIDED:
        options = list(product((False, True), (("sgd", 1), ("adamw", 3)), (False, True), (3, 1)))
        own = [
            Trained(name, tied, optimizer, Strategy(dp=DP, tp=TP, zero=zero, sequence_parallel=cut, microbatch=rows))
            for tied, (optimizer, zero), cut, rows in options
            if not (cut and name in WHOLE_SEQUENCES)
        ]
        first = own[FAST.index(name) * 3 % len(own)] if name in FAST else None
        found += [pytest.param(c, id=str(c), marks=() if c == first else pytest.mark.slow) for c in own]
    return found


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=RATES[name], momentum=0.9)
    return torch.optim.AdamW(parameters, lr=RATES[name], eps=1e-4, weight_decay=0.05)


def run(case: Trained) -> tuple[Run, Sizes]:
    """Three steps, and what this rank holds."""
    engine = Engine(
        divided_model(case.name, tied=case.tied, dtype=torch.float64),
        ModelLoss(),
        lambda parameters: optimizer_of(case.optimizer, parameters),
        JOB,
        case.strategy,
        measure_memory="never",
    )
    sizes = {}
    for name, parameter in engine.model.named_parameters():
        local: Any = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        sizes[name] = (parameter.numel(), local.numel())
    return record(engine, [rows_of(case.name, seed=s, dtype=torch.float64) for s in range(STEPS)], float64=True), sizes


@pytest.mark.parametrize("case", listed())
def test_families_train_as_in_one_process(case: Trained) -> None:
    wanted, whole = run_one(run, case.reference)
    found = run_ranks(TP * DP, run, case, timeout_s=120)
    for joined in join([recorded for recorded, _ in found]):
        assert [step.report for step in joined.steps] == [step.report for step in found[0][0].steps]
        beyond = compare(joined, wanted, dtype="float64", optimizer=case.optimizer, learning_rate=RATES[case.optimizer])
        assert not beyond, show(beyond)
    assert_divided(case, [sizes for _, sizes in found], whole)


def assert_divided(case: Trained, ranks: list[Sizes], whole: Sizes) -> None:
    """Every matrix of attention and MLPs lies half on each tensor-parallel rank, and of it half on each of ZeRO's."""
    matrices = [name for name in whole if is_matrix(name)]
    assert len(matrices) >= 4 * LAYERS  # two of attention at least, and two of the MLP
    for name in matrices:
        total, (first, second) = whole[name][0], (ranks[0][name][0], ranks[1][name][0])
        if case.name == "one_group" and name.endswith(("k_proj.weight", "v_proj.weight")):
            assert first == second == total, name  # each rank's queries need the only key and value
            continue
        assert first + second == total, name
        assert max(first, second) <= 5 / 9 * total, name  # inner sizes are odd: 23, and 9 of experts
        if case.strategy.zero == 3:
            assert all(sizes[name][1] < 0.8 * sizes[name][0] for sizes in ranks), name


def is_matrix(name: str) -> bool:
    """One of attention or of an MLP: what lies in a layer and is neither a bias, a norm nor a router."""
    *_, module, kind = name.split(".")
    inside = any(part.isdigit() for part in name.split("."))
    return inside and kind != "bias" and "norm" not in module and module not in ("ln_1", "ln_2", "gate", "router")
