"""Recompute (activation checkpointing): a block keeps less for backward and computes the rest again there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.errors import ConfigError
from meshwright.spec import Strategy

__all__ = ["KEPT_BY_SELECTIVE", "apply_recompute"]

_ATEN = torch.ops.aten
#: What selective recompute keeps: the outputs of matrix products and of attention. All else is computed again.
KEPT_BY_SELECTIVE = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
        _ATEN._grouped_mm.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
    }
)


def apply_recompute(blocks: Sequence[tuple[str, nn.Module]], strategy: Strategy) -> list[nn.Module]:
    """Make the first `recompute_blocks` blocks (0: all) recompute, and tell which; random streams are replayed.

    Raises:
        ConfigError: more blocks are asked for than the model has, or it has none.
    """
    if strategy.recompute == "none":
        return []
    if strategy.recompute_blocks > len(blocks) or not blocks:
        raise ConfigError(
            f"recompute={strategy.recompute} for {strategy.recompute_blocks or 'all'} of {len(blocks)} blocks",
            why="blocks are the children of a ModuleList, Sequential or ModuleDict",
            fix="lower recompute_blocks, or pass blocks= to Engine to name them",
        )
    chosen = [block for _, block in blocks[: strategy.recompute_blocks or len(blocks)]]
    for block in chosen:
        block.forward = _recomputed(block.forward, selective=strategy.recompute == "selective")
    return chosen


def _recomputed(forward: Callable[..., Any], *, selective: bool) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    return recomputed


def _keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT_BY_SELECTIVE else CheckpointPolicy.PREFER_RECOMPUTE
