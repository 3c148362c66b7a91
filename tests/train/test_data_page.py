"""What the page about the user's own data shows is what runs."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any

import torch

from meshwright import Batches, Job, Packing, Strategy
from tests.harness.hugging_face import make_model
from tests.harness.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def run_page(folder: Path, codes: list[str]) -> tuple[list[float], list[int]]:
    """Losses of the training loop, from the beginning and gone on; tokens in a row of the packed batches."""
    os.chdir(folder)
    samples = [{"input_ids": list(range(3, 4 + (5 * number) % 9))} for number in range(24)]
    loop, packing = codes
    longer = loop.replace("epochs=3", "epochs=5").replace('save("checkpoint")', 'save("second")')
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        for code, resume in ((loop, False), (longer, True)):
            names: dict[str, Any] = {"samples": samples, "resume": resume}
            exec(code, names | {"model": make_model("llama", tied=False, dtype=torch.float32)})  # noqa: S102  (the page)
    names = {"documents": samples * 9, "Packing": Packing, "Batches": Batches}
    names |= {"job": Job(global_batch=12), "strategy": Strategy(dp=2)}
    exec(packing, names)  # noqa: S102  (the page)
    return [float(line) for line in shown.getvalue().split()], [
        batch["input_ids"].shape[1] for batch in names["batches"]
    ]


def test_the_page_trains_and_goes_on(tmp_path: Path) -> None:
    (first, rows), (second, _) = run_ranks(2, run_page, tmp_path, snippets())
    assert first == second
    assert len(first) == 6 + 4
    assert first[-1] < first[0]
    assert set(rows) == {16}
