"""The loss that a Hugging Face model computes itself: what it weighs by, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.runtime import Engine, ModelLoss
from meshwright.spec import Job, Strategy
from tests.harness.hugging_face import ROWS, make_model, rows_of
from tests.harness.models import MLP
from tests.harness.ranks import run_one, run_ranks

JOB = Job(global_batch=ROWS)


def engine(model: nn.Module, loss: ModelLoss, **changes: Any) -> Engine:
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    strategy = Strategy(dp=ranks, microbatch=1, **changes)
    return Engine(model, loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1), JOB, strategy)


def batch() -> dict[str, Tensor]:
    """Two sequences have no label that counts: their own means are not numbers."""
    found = rows_of("llama", seed=3, dtype=torch.float32)
    found["labels"][[0, 4]] = -100
    return found


def stepped(zero: int) -> tuple[float, float, float, bool]:
    made = engine(make_model("llama", tied=True, dtype=torch.float32), ModelLoss(), zero=zero)
    report = made.step(batch())
    return report.loss, report.weight, made.evaluate([batch()]), report.skipped


def whole() -> tuple[float, int]:
    model = make_model("llama", tied=True, dtype=torch.float32)
    return float(model(**batch()).loss.detach()), int((batch()["labels"][:, 1:] != -100).sum())


@pytest.mark.parametrize("zero", [0, 3])
def test_microbatches_without_labels_add_nothing(zero: int) -> None:
    loss, labels = run_one(whole)
    for found, weight, evaluated, skipped in run_ranks(2, stepped, zero):
        assert found == pytest.approx(loss, rel=1e-5)
        assert (weight, skipped) == (labels, False)
        assert evaluated < found


class Returns(nn.Module):
    """Computes its own loss, and is of no library."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.inner(x)[..., 0] - labels).square().mean()}


def test_any_model_that_returns_a_loss_with_a_weight() -> None:
    made = engine(Returns(), ModelLoss(weight=lambda batch: len(batch["labels"])))
    rows = {"x": torch.randn(ROWS, 3), "labels": torch.randn(ROWS)}
    wanted = float(made.model(**rows)["loss"].detach())
    assert made.step(rows).loss == pytest.approx(wanted, rel=1e-5)


def test_what_it_cannot_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="ModelLoss for a Returns"):
        engine(Returns(), ModelLoss())
    made = engine(make_model("llama", tied=False, dtype=torch.float32), ModelLoss())
    ids = batch()["input_ids"]
    with pytest.raises(ConfigError, match="a batch of type tuple"):
        made.step((ids, ids))
    forgotten = engine(make_model("llama", tied=False, dtype=torch.float32), ModelLoss())
    with pytest.raises(ConfigError, match="a batch without labels"):
        forgotten.step({"input_ids": ids})
    plain = engine(MLP(), ModelLoss(weight=lambda batch: 1))
    with pytest.raises(ConfigError, match="returned no loss"):
        plain.step({"inputs": torch.randn(ROWS, 5, 9)})
