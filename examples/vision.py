"""A vision classifier with batch norms over all ranks. `torchrun --nproc-per-node=2 examples/vision.py`."""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from meshwright import Batches, Engine, Job, MeanLoss, Strategy


class Shapes(Dataset[tuple[torch.Tensor, int]]):
    """Pictures of a bar that lies, stands or goes down, in noise."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        picture, kind = torch.randn(3, 16, 16, generator=generator) * 0.5, index % 3
        place = int(torch.randint(2, 14, (1,), generator=generator))
        bar = torch.eye(16) if kind == 2 else torch.zeros(16, 16)
        if kind < 2:
            bar.select(kind, place).fill_(1.0)
        return picture + bar, kind


def classifier() -> nn.Module:
    def block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

    model = nn.Sequential(block(3, 16), block(16, 32), block(32, 32), nn.Flatten(), nn.Linear(32 * 4, 3))
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def main() -> None:
    job = Job(global_batch=32)
    strategy = Strategy(dp=int(os.environ.get("WORLD_SIZE", "1")), zero=2, microbatch=8)
    engine = Engine(
        classifier(),
        MeanLoss(F.cross_entropy, weight=len),
        lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
        job,
        strategy,
        batch_scope="local",
    )
    loader = DataLoader(Shapes(), shuffle=True, drop_last=True)  # who takes which picture is decided by Batches
    for report in engine.steps(Batches(loader, job, strategy, epochs=4)):
        if engine.rank == 0 and report.step % 8 == 1:
            print(f"step {report.step} loss {report.loss:.3f}")
    loss = engine.evaluate(Batches(Shapes(), job, strategy, shuffle=False))
    if engine.rank == 0:
        print(f"loss over all pictures {loss:.3f}")


if __name__ == "__main__":
    main()
