"""Wrong models, inputs and layouts: one error each, which says what to do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshwright
from meshwright.errors import ConfigError, UnsupportedCombination
from meshwright.measure import trace
from meshwright.spec.layout import Layout
from tests.harness.models import MLP

X = torch.zeros(2, 7, MLP.INPUTS)
SOURCE = """
from torch import nn
def build(): return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
def wants(width): return nn.Linear(width, width)
def nothing(): pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working folder, which is not on the search path."""
    (tmp_path / "some_models.py").write_text(SOURCE)
    (tmp_path / "broken_models.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "some_models", raising=False)
    return "some_models"


def test_a_function_is_found_by_its_name(module: str) -> None:
    before = list(sys.path)
    spec = meshwright.trace(f"{module}:build", torch.zeros(1, 4))
    assert spec.parameters == 40
    assert sys.path == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("some_models", "does not name a function"),
        ("some_models:biuld", "has no function biuld"),
        ("no_models_here:build", "cannot be imported"),
        ("broken_models:build", "no_such_package"),
        ("some_models:wants", "wants arguments"),
        ("some_models:nothing", "returned a NoneType"),
    ],
)
def test_a_name_that_builds_no_model_is_refused(module: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        trace(text, torch.zeros(1, 4))
    assert caught.value.fix


def _lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))


CASES: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "no parameters": (nn.ReLU(), X, {}, "has no parameters"),
    "no module": (42, X, {}, "a model of type int"),
    "no shapes yet": (_lazy, X, {}, "has no shape yet"),
    "whole numbers only": (nn.ParameterList([nn.Parameter(torch.ones(3).long(), False)]), X, {}, "dtype"),
    "no tensors": (MLP(), {"inputs": 3}, {}, "hold no tensor"),
    "no sequences": (MLP(), X[:0], {}, "hold no sequence"),
    "wrong width": (MLP(), X[..., :4], {}, "does not run on the example inputs"),
    "wrong name": (MLP(), {"ids": X}, {}, "unexpected keyword argument 'ids'"),
    "too many": (MLP(), (X, X), {}, "positional arguments"),
    "unknown kernels": (MLP(), X, {"kernels": "gpu"}, "kernels='gpu'"),
    "unknown block": (MLP(), X, {"blocks": ["layers.9"]}, "layers.9"),
    "another sequence": (MLP(), X, {"layout": Layout(sequence=8)}, "sequences of 8 tokens"),
    "two dtypes": (MLP(), X, {"layout": Layout(sequence=7), "compute_dtype": "float16"}, "compute_dtype=float16"),
    "bad loss": (MLP(), X, {"loss": lambda outputs, targets: outputs.sum()}, "the loss returned a "),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_described_is_refused_with_a_remedy(case: str) -> None:
    model, inputs, options, said = CASES[case]
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")) as caught:
        trace(model, inputs, **options)
    assert caught.value.fix


@pytest.mark.parametrize("change", [{"tp": 2}, {"cp": 7}, {"ep": 2}, {"stack": "fused"}])
def test_a_trace_knows_no_splitting(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedCombination, match="traced model"):
        trace(MLP(), X, layout=Layout(sequence=7, **change))
