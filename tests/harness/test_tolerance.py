"""The tolerances catch what they should: each kind of value, by name, just above its bound."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from meshwright.measure.equality.records import Run
from tests.harness.cases import Case, differences, run_case
from tests.harness.ranks import run_one

CASE = Case(world=1, clip=0.1)


def changed() -> Run:
    return deepcopy(run_one(run_case, CASE))


def kinds(run: Run, case: Case = CASE) -> list[tuple[str, str, int]]:
    return [(m.kind, m.name, m.step) for m in differences(case, run, run_one(run_case, CASE))]


def test_a_run_equals_itself() -> None:
    assert kinds(changed()) == []


@pytest.mark.parametrize("name", ["loss", "grad_norm", "clipped_norm"])
def test_scalars(name: str) -> None:
    run = changed()
    value = getattr(run.steps[1], name)
    run.steps[1] = replace(run.steps[1], **{name: value * (1 + 3e-12)})
    assert kinds(run) == [("scalar", name, 2)]
    run.steps[1] = replace(run.steps[1], **{name: value * (1 + 3e-13)})
    assert kinds(run) == []
    run.steps[1] = replace(run.steps[1], **{name: float("nan")})
    assert kinds(run) == [("scalar", name, 2)]


def test_weight() -> None:
    run = changed()
    run.steps[0] = replace(run.steps[0], weight=run.steps[0].weight + 1)
    assert kinds(run) == [("weight", "of the loss", 1)]


def test_gradients_by_tensor() -> None:
    run, name = changed(), "model.layers.2.mlp.up_proj.weight"
    gradient = run.steps[2].gradients[name]
    assert gradient is not None
    run.steps[2].gradients[name] = gradient * (1 + 3e-10)
    assert kinds(run) == [("gradient", name, 3)]
    run.steps[2].gradients[name] = gradient * (1 + 3e-11)
    assert kinds(run) == []
    run.steps[2].gradients[name] = None
    assert kinds(run) == [("gradient", name, 3)]
    del run.steps[2].gradients[name]
    assert kinds(run) == [("gradient missing", name, 3)]


def test_a_zero_gradient_may_be_rounding_of_the_others() -> None:
    run, name = changed(), "model.norm.weight"
    right = deepcopy(run)
    for step in (*run.steps, *right.steps):
        step.gradients[name] = torch.zeros(12, dtype=torch.float64)
    total = sum(float((g**2).sum()) for g in right.steps[0].gradients.values() if g is not None) ** 0.5
    run.steps[0].gradients[name] = torch.tensor([0.9e-14 * total] + [0.0] * 11, dtype=torch.float64)
    assert differences(CASE, run, right) == []
    run.steps[0].gradients[name] = torch.tensor([1.1e-14 * total] + [0.0] * 11, dtype=torch.float64)
    assert [m.name for m in differences(CASE, run, right)] == [name]


def test_updates_by_tensor() -> None:
    run, name = changed(), "lm_head.weight"
    update = run.steps[0].updates[name]
    run.steps[0].updates[name] = update * (1 + 3e-8)
    assert kinds(run) == [("update", name, 1)]
    # AdamW divides by at least eps = 1e-4, so rounding may grow that much.
    assert kinds(run, replace(CASE, optimizer="adamw")) == [("update", name, 1)]
    assert kinds(run, replace(CASE, optimizer="adamw-default-eps")) == []
    run.steps[0].updates[name] = update * 2
    assert [(kind, step) for kind, _, step in kinds(run, replace(CASE, optimizer="adamw-default-eps"))] == [
        ("update", 1)
    ]


def test_initial_weights_to_the_bit() -> None:
    run, name = changed(), "lm_head.weight"
    run.initial[name] = run.initial[name] * (1 + 2.3e-16)
    assert kinds(run) == [("initial", name, 0)]


def test_steps_are_counted() -> None:
    run = changed()
    run.steps.pop()
    assert kinds(run) == [("steps", "count", 0)]


def test_float32_is_compared_together() -> None:
    run, case = changed(), replace(CASE, dtype="float32")
    run.steps[0].gradients = {name: g * (1 + 2e-5) for name, g in run.steps[0].gradients.items() if g is not None}
    assert [(kind, step) for kind, _, step in kinds(run, case)] == [("gradient", 1)]
    run = changed()
    run.steps[1].gradients = {name: g * 2 for name, g in run.steps[1].gradients.items() if g is not None}
    assert [(kind, step) for kind, _, step in kinds(run, case)] == [("gradient", 2)]
    assert kinds(run, replace(case, optimizer="adamw")) == []
