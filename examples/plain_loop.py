"""A plain PyTorch script: own model, own data, own loss. `torchrun --nproc-per-node=2 examples/plain_loop.py`."""

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from meshwright import Batches, Engine, Job, MeanLoss, Strategy

BYTES = 256


class Tagger(nn.Module):
    """Guesses the next byte from the bytes so far."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, 64)
        self.layers = nn.ModuleList(nn.GRU(64, 64, batch_first=True) for _ in range(3))  # each one a unit of ZeRO
        self.head = nn.Linear(64, BYTES)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(text)
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        return self.head(hidden)


def samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pieces of this file: 32 bytes, and the 32 that follow each of them."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    return [(text[i : i + 32], text[i + 1 : i + 33]) for i in range(0, len(text) - 33, 8)]


def main() -> None:
    job = Job(global_batch=16, sequence=32, clip_norm=1.0)
    strategy = Strategy(dp=int(os.environ.get("WORLD_SIZE", "1")), zero=3, microbatch=4)
    engine = Engine(
        Tagger,  # no rank ever holds it whole
        MeanLoss(lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()), weight=torch.numel),
        lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        job,
        strategy,
        batch_scope="local",
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40),
    )
    for report in engine.steps(Batches(samples(), job, strategy, epochs=3)):
        if engine.rank == 0 and report.step % 10 == 1:
            print(f"step {report.step} loss {report.loss:.3f} norm {report.grad_norm:.2f} {report.step_s:.3f} s")
    engine.save("checkpoint")


if __name__ == "__main__":
    main()
