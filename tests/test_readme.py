"""What the README shows is what runs."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

import torch
from torch import nn

from tests.harness.ranks import run_ranks

README = Path(__file__).parents[1] / "README.md"


def snippet() -> str:
    found = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))


def run_snippet(folder: Path, code: str) -> list[float]:
    os.chdir(folder)
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(32, 5, generator=generator), torch.randint(3, (32,), generator=generator)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(code, {"build_model": build_model, "dataset": list(zip(inputs, targets, strict=True))})  # noqa: S102  (it is the README)
    return [float(line) for line in shown.getvalue().split()]


def test_the_way_to_ones_own_model_is_ten_lines() -> None:
    script = [line for line in snippet().splitlines() if line.strip()]
    assert len(script) + len(("pip install .", "torchrun --nproc-per-node=2 script.py")) <= 10


def test_the_python_example_trains_and_saves(tmp_path: Path) -> None:
    first, second = run_ranks(2, run_snippet, tmp_path, snippet())
    assert first == second
    assert len(first) == 4
    assert first[-1] < first[0]
    assert (tmp_path / "checkpoint" / "manifest.json").exists()
