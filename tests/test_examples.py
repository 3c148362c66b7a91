"""The examples run as they are on two ranks, learn, and leave what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
LOSS = re.compile(r"step \d+ loss ([\d.]+)")


def run(example: str, folder: Path, *arguments: str) -> list[float]:
    """Losses that an example printed, run in a folder of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = next(path for path in EXAMPLES if path.stem == example)
    done = subprocess.run(
        [*command, str(script), *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    losses = [float(loss) for loss in LOSS.findall(done.stdout)]
    assert losses, done.stdout
    assert losses[-1] < losses[0], losses
    return losses


def test_there_are_four_and_they_are_short() -> None:
    assert [path.stem for path in EXAMPLES] == ["finetune", "lora", "plain_loop", "vision"]
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) < 60, path.name


def test_plain_loop(tmp_path: Path) -> None:
    run("plain_loop", tmp_path)
    assert (tmp_path / "checkpoint" / "manifest.json").is_file()


def test_vision(tmp_path: Path) -> None:
    run("vision", tmp_path)


def test_finetune(tmp_path: Path) -> None:
    run("finetune", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "finetuned")
    assert sum(parameter.numel() for parameter in model.parameters()) > 100_000


@pytest.mark.slow
def test_finetune_from_what_it_left(tmp_path: Path) -> None:
    first = run("finetune", tmp_path)
    again = tmp_path / "again"
    again.mkdir()
    assert run("finetune", again, str(tmp_path / "finetuned"))[0] < first[0] / 2


def test_lora(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=256, n_positions=128, n_embd=64, n_layer=4, n_head=4)
    base = transformers.GPT2LMHeadModel(config)
    base.save_pretrained(tmp_path / "base")
    run("lora", tmp_path, str(tmp_path / "base"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 asks transformers 5.24 by a name that is renamed
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    assert any("lora_B" in name and bool(p.any()) for name, p in adapted.named_parameters())
