"""D24: dropout over tensor-parallel ranks: equal where activations are, another where they are divided, replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.runtime import Engine, ModelLoss
from meshwright.spec import Job, Strategy
from tests.harness.hugging_face import ROWS, VOCABULARY, rows_of
from tests.harness.ranks import run_ranks

JOB = Job(global_batch=ROWS, param_dtype="float64", compute_dtype="float64", reduce_dtype="float64")
#: What each call of dropout kept, in the order of the calls; and this rank's gradients.
Drawn = tuple[list[Tensor], dict[str, Tensor]]
#: Calls of dropout in a forward: outside of blocks, then in each block those where activations are divided or not.
CALLS = {
    "own": ["outside", *["divided", "replicated"] * 3],
    "gpt2": ["outside", *["divided", "replicated", "replicated"] * 3],
}


class Block(nn.Module):
    """An MLP with dropout between its matrices, and one after them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12)
        self.inside, self.behind = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.behind(self.down(self.inside(torch.sigmoid(self.up(self.norm(x))))))
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.before = nn.Embedding(VOCABULARY, 12), nn.Dropout(0.5)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.before(self.embed(ids))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


def gpt2() -> nn.Module:
    """With all of its dropouts; eager attention calls what is watched here."""
    keys: dict[str, Any] = {"n_embd": 12, "n_layer": 3, "n_head": 6, "n_inner": 24, "vocab_size": VOCABULARY}
    keys |= {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5, "attn_implementation": "eager"}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**keys, bos_token_id=1, eos_token_id=2, use_cache=False))


def drawn(name: str, strategies: list[Strategy]) -> list[Drawn]:
    """One step under each strategy."""
    return [one_step(name, strategy) for strategy in strategies]


def one_step(name: str, strategy: Strategy) -> Drawn:
    torch.manual_seed(5)
    model: nn.Module = (Model() if name == "own" else gpt2()).double()
    engine = Engine(
        model,
        loss if name == "own" else ModelLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        JOB,
        strategy,
        sharding={"layers.*.up": "colwise", "layers.*.down": "rowwise"} if name == "own" else None,
        measure_memory="never",
    )
    masks: list[Tensor] = []
    gradients: dict[str, Tensor] = {}
    dropout = F.dropout

    def watched(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        kept = dropout(torch.ones_like(x), p, training)
        masks.append(kept.detach() != 0)
        return x * kept

    def keep(found: dict[str, Tensor | None]) -> None:
        for key, value in found.items():
            if value is not None:
                gradients[key] = value.to_local().clone() if isinstance(value, DTensor) else value.clone()

    engine.on_gradients = keep
    rows = rows_of("gpt2", seed=1, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", watched)
        engine.step((rows["input_ids"], rows["input_ids"]) if name == "own" else rows)
    return masks, gradients


def alike(first: Tensor, second: Tensor) -> bool:
    """Whether two masks are one; if not, they must have nothing to do with each other."""
    if torch.equal(first, second):
        return True
    assert 0.35 < float((first == second).double().mean()) < 0.65, "masks are partly the same"
    return False


@pytest.mark.parametrize("name", CALLS)
def test_D24_masks_are_equal_where_activations_are_and_different_where_they_are_divided(name: str) -> None:
    """Ranks 0 and 1 compute the same rows, ranks 2 and 3 others."""
    plain = Strategy(dp=2, tp=2, zero=1, microbatch=3)
    cut = Strategy(dp=2, tp=2, zero=1, microbatch=3, sequence_parallel=True)
    found = run_ranks(4, drawn, name, [plain, cut], timeout_s=120)
    for which, equal in ((0, {"outside", "replicated"}), (1, {"outside"})):
        ranks = [strategies[which][0] for strategies in found]
        assert all(len(masks) == len(CALLS[name]) for masks in ranks)
        for call, (kind, *masks) in enumerate(zip(CALLS[name], *ranks, strict=True)):
            for row in (0, 2):
                assert alike(masks[row], masks[row + 1]) == (kind in equal), f"call {call} on ranks {row}, {row + 1}"
            assert not alike(masks[0], masks[2]), f"call {call} on ranks with other rows"
            assert not alike(masks[0], masks[3])
        for masks in ranks:
            for call, mask in enumerate(masks):
                twins = [other for other in range(call) if masks[other].shape == mask.shape]
                assert not any(alike(masks[other], mask) for other in twins), "two calls drew the same"


@pytest.mark.parametrize("name", CALLS)
def test_D24_recompute_draws_the_same_again(name: str) -> None:
    """Gradients are those without recompute, for divided and for cut activations."""
    kinds: tuple[Any, ...] = ("none", "full", "selective")
    for cut in (False, True):
        asked = [Strategy(tp=2, microbatch=6, recompute=kind, sequence_parallel=cut) for kind in kinds]
        for (masks, wanted), *others in run_ranks(2, drawn, name, asked, timeout_s=120):
            for again, gradients in others:
                assert len(again) > len(masks), "nothing was computed twice"
                assert all(torch.equal(one, other) for one, other in zip(masks, again, strict=False))
                replayed = again[len(masks) :]
                assert all(any(torch.equal(one, other) for other in masks) for one in replayed)
                assert gradients.keys() == wanted.keys()
                for key, gradient in wanted.items():
                    torch.testing.assert_close(gradients[key], gradient, rtol=1e-12, atol=1e-14)
