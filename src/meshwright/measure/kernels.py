"""Kernels: what an accelerator would run where a tensor on the CPU takes another way."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.measure.recorder import Recorder
from meshwright.measure.work import above_the_diagonal, attention_work, grouped_work
from meshwright.runtime.recompute import KEPT_BY_SELECTIVE
from meshwright.spec.layout import Attention

__all__ = ["Kernels", "use_kernels"]

_KEEPS_GROUPED = torch.ops.aten._grouped_mm.default in KEPT_BY_SELECTIVE

Kernels = Literal["accelerator", "cpu"]


@contextlib.contextmanager
def use_kernels(
    kernels: Kernels, attention: Attention, recorder: Recorder, *, fake: bool, positions_given: bool = False
) -> Iterator[None]:
    """Inside, models without data take the way that they take with data on an accelerator; with `cpu`, on a CPU.

    Fused attention on an accelerator takes any head sizes, and drops probabilities without storing them; the CPU's
    kernel does neither and falls back to all S x S scores. Dropout there keeps a mask of one byte per element; on the
    CPU one in the dtype of the data. Real tensors always take PyTorch's own way. `causal_flops` is counted here.

    Transformers looks into positions for packed sequences, and cannot rule them out without data; unless positions are
    `positions_given`, there are none. The CPU's own recurrent kernel is not taken: nothing says what it keeps.
    """
    there = fake and kernels == "accelerator"
    replaced: list[tuple[Any, str, Any]] = [
        (F, "scaled_dot_product_attention", _attend(recorder, fused=there and attention == "flash"))
    ]
    if there:
        replaced.append((F, "dropout", _drop(F.dropout)))
    if fake:
        replaced.append((F, "grouped_mm", _group(recorder)))
    masks = sys.modules.get("transformers.masking_utils")
    if fake and not positions_given and hasattr(masks, "find_packed_sequence_indices"):
        replaced.append((masks, "find_packed_sequence_indices", lambda position_ids: None))
    before = [(home, name, getattr(home, name)) for home, name, _ in replaced]
    for home, name, instead in replaced:
        setattr(home, name, instead)
    try:
        with contextlib.ExitStack() as stack:
            if attention == "math":
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if fake:
                stack.enter_context(_without_onednn())
            yield
    finally:
        for home, name, original in before:
            setattr(home, name, original)


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.set_flags(
        _enabled=False, _fp32_precision=None
    )  # `flags()` sets other options too, and one of them warns
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=before, _fp32_precision=None)


def _attend(recorder: Recorder, *, fused: bool) -> Callable[..., torch.Tensor]:
    real = F.scaled_dot_product_attention

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        if is_causal:
            recorder.tally.causal_flops += above_the_diagonal(query, key, value)
        if fused:
            return _applied(_Fused, query, key, value, attn_mask, is_causal, recorder)
        return real(query, key, value, attn_mask, dropout_p, is_causal, **options)

    return attend


def _group(recorder: Recorder) -> Callable[..., torch.Tensor]:
    def multiply(x: torch.Tensor, y: torch.Tensor, *, offs: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
        return _applied(_Grouped, x, y, offs, recorder)

    return multiply


def _applied(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*args)
    return result


def _drop(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def drop(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if training and 0 < p < 1 and not inplace and input.is_floating_point():
            return torch.native_dropout(input, p, True)[0]
        return real(input, p, training, inplace)

    return drop


class _Fused(torch.autograd.Function):
    """A fused attention kernel on tensors without data: it keeps q, k, v, the mask, the output and its row sums."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        is_causal: bool,
        recorder: Recorder,
    ) -> torch.Tensor:
        # Kernels lay their output out as the queries are: with [B, S, N, D] in memory, heads merge without a copy.
        strides = query.stride()
        layout = sorted(range(len(strides)), key=lambda dim: -strides[dim])
        shape = (*query.shape[:-1], value.shape[-1])
        out = torch.empty_permuted(shape, layout, dtype=query.dtype, device=query.device)
        wide = torch.promote_types(query.dtype, torch.float32)
        row_sums = query.new_empty(query.shape[:-1], dtype=wide)
        ctx.save_for_backward(query, key, value, mask, out, row_sums)
        ctx.recorder = recorder
        read = [query, key, value, *([] if mask is None else [mask])]
        ctx.work = attention_work(query, key, value, causal=is_causal)
        recorder.note_kernel(read, [out, row_sums], ctx.work, product=True)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        ctx.recorder.note_backward(ctx.work.backward_flops, 1)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None, None


class _Grouped(torch.autograd.Function):
    """Products of groups of rows, each with its own matrix: [T, K] x [G, K, N] -> [T, N]. It keeps all its inputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, ends: Any, recorder: Recorder) -> torch.Tensor:
        out = x.new_empty(*x.shape[:-1], y.shape[-1])
        ctx.save_for_backward(x, y, ends)
        ctx.recorder, ctx.work = recorder, grouped_work(x, y)
        read = [x, y, *([] if ends is None else [ends])]
        recorder.note_kernel(read, [out], ctx.work, product=_KEEPS_GROUPED, weight=y)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, y, _ = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        ctx.recorder.note_backward(ctx.work.flops * sum(wanted), sum(wanted))
        made = (torch.empty_like(tensor) if needed else None for tensor, needed in zip((x, y), wanted, strict=True))
        return *made, None, None
