"""`meshwright estimate package.module:function`: a module that nobody has a config for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from meshwright.cli import app

MODULE = """
import torch
from torch import nn

class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(101, 24)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(24, 3, 60, batch_first=True) for _ in range(5))
        self.head = nn.Linear(24, 101)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def build():
    return Language()

def regression():
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(4)))
    def loss(outputs, targets):
        return (outputs - targets).square().sum(), targets.numel()
    return model, torch.zeros(2, 24), loss, torch.zeros(2, 24)

def no_language():
    return nn.Sequential(nn.Embedding(101, 24), nn.Flatten(), nn.Flatten())

def nothing():
    return 3
"""


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "models_of_mine.py").write_text(MODULE)


def estimate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["estimate", *arguments, "--cluster", "8xA100-80GB", "--global-batch", "8"])


def as_json(*arguments: str) -> dict[str, Any]:
    done = estimate(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_language_model_is_traced_on_ids() -> None:
    found = as_json("models_of_mine:build", "--seq", "32", "--strategy", "dp=8 zero=3 shard=4")
    layer = 4 * 24 * 24 + 4 * 24 + 2 * 24 * 60 + 60 + 24 + 4 * 24
    assert found["parameters"] == 101 * 24 + 5 * layer + 24 * 101 + 101
    (rank,) = found["ranks"]
    assert rank["layers"] == [5]
    assert rank["in_step"]["activations"] > 0
    pipelined = as_json("models_of_mine:build", "--seq", "32", "--strategy", "pp=3 schedule=1f1b")
    assert [rank["layers"] for rank in pipelined["ranks"]] == [[2], [2], [1]]


def test_a_function_may_bring_inputs_and_loss() -> None:
    found = as_json("models_of_mine:regression", "--seq", "1", "--strategy", "dp=2")
    assert found["parameters"] == 4 * (24 * 24 + 24)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("models_of_mine:absent",), "has no function absent"),
        (("not_there:build",), "cannot be imported"),
        (("models_of_mine:nothing",), "returned a int"),
        (("models_of_mine:no_language",), "no logits"),
        (("models_of_mine:build", "--strategy", "tp=2"), "tp"),
    ],
)
def test_what_cannot_be_traced_is_one_error(arguments: tuple[str, ...], told: str) -> None:
    done = estimate(*arguments, "--seq", "32")
    assert done.exit_code == 2, done.output
    assert told in done.output
    assert "Traceback" not in done.output
