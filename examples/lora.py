"""Adapters (LoRA) of the peft library on a frozen model. `torchrun --nproc-per-node=2 examples/lora.py [FOLDER]`.

FOLDER is what `save_pretrained` wrote, or a download of a model; without it a small model begins from random values.
"""

import os
import sys
from pathlib import Path

import peft
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

from meshwright import Batches, Engine, Job, ModelLoss, Packing, Strategy

FOLDER = sys.argv[1] if len(sys.argv) > 1 else None
TINY = GPT2Config(vocab_size=256, n_positions=128, n_embd=64, n_layer=4, n_head=4)
ADAPTERS = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)


def model() -> nn.Module:
    config = AutoConfig.from_pretrained(FOLDER) if FOLDER else TINY
    return peft.get_peft_model(AutoModelForCausalLM.from_config(config), ADAPTERS)


def documents() -> list[list[int]]:
    """The lines of this file, as bytes."""
    return [list(line.encode()) for line in Path(__file__).open() if line.strip()]


def main() -> None:
    job = Job(global_batch=8, clip_norm=1.0)
    strategy = Strategy(dp=int(os.environ.get("WORLD_SIZE", "1")), zero=3, microbatch=2)
    engine = Engine(
        model,
        ModelLoss(),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        job,
        strategy,
        batch_scope="local",
        weights=FOLDER,
    )
    packed = Packing(64)(documents())  # whole lines in rows of 64 bytes; no line sees another
    for report in engine.steps(Batches(packed, job, strategy, epochs=8)):
        if engine.rank == 0 and report.step % 10 == 1:
            print(f"step {report.step} loss {report.loss:.3f}")
    engine.export("adapters")  # peft.PeftModel.from_pretrained(base, "adapters")


if __name__ == "__main__":
    main()
