"""Losses for `test_vocabulary.py`, as people write them: of logits [B, T, V] and labels [B, T]."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.loss.loss_utils import ForCausalLMLoss

from meshwright.models.decoder import token_loss

__all__ = ["DIVIDED", "GATHERED", "Loss", "sure"]

#: `(logits, labels, scale) -> scalar`; `scale` is a parameter of one element.
Loss = Callable[[Any, Tensor, Tensor], Any]

#: Losses that never gather.
DIVIDED: dict[str, Loss] = {}
#: Losses that do.
GATHERED: dict[str, Loss] = {}


def divided(loss: Loss) -> Loss:
    DIVIDED[loss.__name__] = loss
    return loss


def gathered(loss: Loss) -> Loss:
    GATHERED[loss.__name__] = loss
    return loss


def sure(labels: Tensor) -> Tensor:
    """Labels without ignored ones."""
    return labels.clamp(min=0)


# ------------------------------------------------------------------------------------------------------------- divided


@divided
def mean(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


@divided
def total(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    return F.cross_entropy(input=logits.flatten(0, 1), target=labels.flatten(), reduction="sum", ignore_index=-100)


@divided
def each(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    rows = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="none")
    return (rows * torch.arange(len(rows), dtype=rows.dtype)).sum()


@divided
def module(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    ignored = int(labels.max())
    return nn.CrossEntropyLoss(ignore_index=ignored)(logits.unflatten(1, (-1, 1)).flatten(0, 2), sure(labels).flatten())


@divided
def one_row(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    return sum(F.cross_entropy(row, label) for row, label in zip(logits[0], sure(labels)[0], strict=True))


@divided
def built_in(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    summed, weight = token_loss(logits, labels)
    return summed / weight


@divided
def hugging_face(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    return ForCausalLMLoss(logits, labels, vocab_size=logits.shape[-1])


@divided
def hugging_face_items(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    return ForCausalLMLoss(logits, labels, vocab_size=logits.shape[-1], num_items_in_batch=torch.tensor(7))


@divided
def shifted(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    kept = logits[..., :-1, :].contiguous()
    return F.cross_entropy(kept.view(-1, kept.size(-1)), labels[..., 1:].contiguous().view(-1))


@divided
def sliced(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    kept = logits[:, :-1][:, 1:, : logits.shape[-1]]
    return F.cross_entropy(kept.flatten(0, 1), labels[:, 1:-1].flatten())


@divided
def masked(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    return F.cross_entropy(logits[labels >= 0], labels[labels >= 0], reduction="sum")


@divided
def chosen(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    rows, places = torch.tensor([0, 1, 0]), torch.tensor([2, 1, 2])
    picked = F.cross_entropy(logits[rows, places], sure(labels)[rows, places])
    return picked + F.cross_entropy(logits[:, [1, 0], :].flatten(0, 1), sure(labels)[:, [1, 0]].flatten())


@divided
def last_token(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    last = F.cross_entropy(logits[:, -1], sure(labels)[:, -1]) + F.cross_entropy(
        logits[0][None, 1], sure(labels)[0, 1:2]
    )
    return last + F.cross_entropy(logits.select(1, torch.tensor(0).item()), sure(labels)[:, 0])


@divided
def parts(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    pairs = [*zip(logits.split(2, dim=1), labels.split(2, dim=1), strict=True)]
    pairs += zip(torch.chunk(logits, 2), torch.chunk(labels, 2), strict=True)
    pairs += [(logits.narrow(1, 0, 2), labels.narrow(1, 0, 2))]
    pairs += [(logits.index_select(0, torch.tensor([1])), labels[1:])]
    return sum(F.cross_entropy(x.reshape(-1, x.shape[-1]), sure(y).reshape(-1), reduction="sum") for x, y in pairs)


@divided
def turned(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    by_token = logits.transpose(0, 1).unsqueeze(0).squeeze(0).permute(0, 1, 2).movedim(0, 1).swapaxes(0, 1)
    return F.cross_entropy(by_token.contiguous().view(-1, logits.size(-1)), labels.T.reshape(-1), reduction="sum")


@divided
def soft_capped(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    logits = torch.tanh(logits / 3.0) * 3.0
    return mean(logits, labels, scale)


@divided
def scaled(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    logits = 0.25 * (1.5 - logits) / torch.tensor(2.0) - logits + logits * 2
    return mean(logits.clamp(min=-50).mul(scale).double(), labels, scale)


@divided
def in_place(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    flat = logits.view(-1, logits.shape[-1])
    logits /= 0.7
    logits.mul_(scale)
    return mean(logits, labels, scale) + F.cross_entropy(flat[:3], sure(labels).flatten()[:3])


@divided
def log_probabilities(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    logs = F.log_softmax(logits, dim=-1).view(-1, logits.shape[-1])
    return F.nll_loss(logs, labels.flatten(), ignore_index=-100) + nn.NLLLoss(reduction="sum")(logs, labels.flatten())


@divided
def picked(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    logs = torch.log_softmax(logits * scale, -1).gather(dim=-1, index=sure(labels).unsqueeze(-1)).squeeze(-1)
    kept = (labels >= 0).double()
    return -(logs * kept).sum() / kept.sum()


@divided
def z_loss(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    log_z = torch.logsumexp(logits, dim=-1)
    own = torch.gather(logits, 2, sure(labels)[..., None])[..., 0]
    return (log_z - own).mean() + 1e-2 * logits.logsumexp([-1], keepdim=True).square().mean()


@divided
def totals(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    return (logits * 0).sum() + logits.tanh().mean() + logits.square().sum() * torch.zeros_like(labels).sum()


@divided
def tensors_like_it(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    assert torch.zeros_like(logits).shape == logits.shape
    assert labels.unsqueeze(-1).expand_as(logits).shape == logits.shape
    assert logits.new_zeros(2, 3).dtype == logits.dtype == torch.result_type(logits, 1.0)
    return mean(logits, labels, scale)


@divided
def copied(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    other = copy.copy({"logits": logits})["logits"].clone()
    return mean(other, labels, scale) + mean(copy.deepcopy(logits.detach()), labels, scale).detach()


@divided
def hooked(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    logits = logits * 1.0
    if logits.requires_grad:
        logits.register_hook(lambda gradient: gradient * 3)
        logits.register_hook(lambda gradient: None)
    return mean(logits, labels, scale)


class _Doubled(torch.autograd.Function):
    """Gives the logits back as they are, and doubles their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@divided
def through_a_function(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    return mean(_Doubled.apply(logits * scale), labels, scale) + mean(logits, labels, scale)


# ------------------------------------------------------------------------------------------------------------ gathered


@gathered
def probabilities(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    chosen = F.softmax(logits, dim=-1).gather(-1, sure(labels).unsqueeze(-1))
    return -chosen.log().mean()


@gathered
def one_hot(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    return ((logits - F.one_hot(sure(labels), logits.size(-1))) ** 2).mean()


@gathered
def soft_targets(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    goal = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view(logits.shape).softmax(-1)
    kl = F.kl_div(F.log_softmax(logits, -1), goal, reduction="batchmean")
    return kl + F.cross_entropy(logits.flatten(0, 1), goal.flatten(0, 1))


@gathered
def smoothed(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


@gathered
def weighted(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    weight = torch.linspace(0.1, 2, logits.shape[-1], dtype=logits.dtype)
    return nn.CrossEntropyLoss(weight)(logits.flatten(0, 1), labels.flatten())


@gathered
def with_accuracy(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    with torch.no_grad():
        right = (logits.argmax(-1) == labels).double().mean()
    return mean(logits, labels, scale) + right + logits.topk(2, dim=-1).values.sum()


@gathered
def classes_second(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    return F.cross_entropy(logits.transpose(1, 2), labels)


@gathered
def pieces(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    both = torch.stack([logits, torch.cat([logits[..., :2], logits[..., 2:]], -1)])
    new = (
        logits[..., None].sum() + logits.unsqueeze(-1)[0].mean() + logits.view(-1).std() + logits.split(2, -1)[0].sum()
    )
    return both.sum() + new + torch.einsum("btv,btv->", logits, logits)


@gathered
def banned(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    """In place, in columns: what Chameleon does to its image tokens."""
    flat = logits.view(-1, logits.shape[-1])
    logits[:, :, 1:3] = torch.finfo(logits.dtype).min
    logits[..., 0] *= scale
    kept = torch.where(sure(labels) < 3, -100, labels)
    return F.cross_entropy(flat, kept.flatten()) + F.cross_entropy(logits[0], kept[0])


@gathered
def banned_in_view(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    flat = logits.view(-1, logits.shape[-1])
    part = flat[:, :2]
    part.mul_(scale).clamp_(max=0.5)
    logits.mul_(0.5)
    logits.sub_(logits.clone().logsumexp(-1, keepdim=True))
    return F.nll_loss(flat, labels.flatten()) + part.sum() + mean(logits, labels, scale)


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits, labels)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        logits, labels = ctx.saved_tensors
        chosen = F.one_hot(sure(labels), logits.shape[-1]) * (labels >= 0).unsqueeze(-1)
        return (logits.softmax(-1) * (labels >= 0).unsqueeze(-1) - chosen) * gradient, None


@gathered
def own_function(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    logits = logits * scale
    logits.mul_(1.5)
    loss: Any = _Own.apply(logits, labels)
    return loss


@gathered
def through_a_function_whole(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    logits = _Doubled.apply(logits)
    return probabilities(logits, labels, scale) + mean(logits, labels, scale)


@gathered
def recomputed(logits: Any, labels: Tensor, scale: Tensor) -> Any:
    if not logits.requires_grad:
        return probabilities(logits, labels, scale) * 2 + mean(logits, labels, scale)
    loss: Any = checkpoint(probabilities, logits, labels, scale, use_reentrant=True)
    return loss + checkpoint(
        lambda x: probabilities(x, labels, scale) + mean(x, labels, scale), logits, use_reentrant=False
    )
