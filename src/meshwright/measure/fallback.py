"""Fallbacks: a block that cannot run without data is measured on real tensors, or counted from its shapes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from meshwright.measure._torch import NEEDS_DATA, FakeTensorMode
from meshwright.measure.kernels import Kernels, use_kernels
from meshwright.measure.recorder import Recorder, Tally
from meshwright.measure.stand_in import Held, as_for_training, held_parameters, stand_ins
from meshwright.measure.values import TensorForm
from meshwright.measure.walk import BlockFailed, Kept, Output, Record, measure_call
from meshwright.runtime.tensors import find_tensors, map_values
from meshwright.spec.layout import Layout
from meshwright.spec.model import Product

__all__ = ["REAL_BYTES", "filled", "measure_alone", "needs_data", "reason_of"]

#: Parameters of a module that is run on real tensors take no more than this.
REAL_BYTES = 2 * 2**30


def needs_data(error: BaseException | None) -> bool:
    """Whether an error says that an operation cannot run without the data of its tensors."""
    return isinstance(error, NEEDS_DATA) or any(word in str(error).lower() for word in ("fake", "meta tensor", "numpy"))


def reason_of(error: BaseException | None) -> str:
    """The first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".strip(": ")


def filled(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A real tensor of this shape: a buffer's own values where it has some, else such as weights usually have."""
    if dtype is None and not tensor.is_meta and type(tensor) is torch.Tensor:
        return tensor.detach().to("cpu", copy=True)
    made = torch.ones(tensor.shape, dtype=dtype or tensor.dtype)
    if tensor.dim() >= 2 and made.is_floating_point():
        made.normal_(std=1 / math.sqrt(tensor.shape[-1]))
    return made


def measure_alone(block: nn.Module, failure: BlockFailed, layout: Layout, *, cast: bool, kernels: Kernels) -> Record:
    """Measure a block that failed in a walk: without data where it was not tried, else on real tensors, else by shapes.

    Raises:
        Exception: whatever the block raises that has nothing to do with missing data.
    """
    cause = failure.__cause__
    if cause is None:
        try:
            return _run(block, failure, layout, cast=cast, kernels=kernels, real=False)
        except Exception as error:
            if not needs_data(error):
                raise
            cause = error
    reason = reason_of(cause)
    dtype = getattr(torch, layout.compute_dtype)
    size = sum(math.prod(parameter.shape) for parameter in held_parameters(block)) * dtype.itemsize
    if size > REAL_BYTES:
        how = f"counted from the shapes of parameters, being too large ({size / 2**30:.1f} GiB) to run ({reason})"
        return dataclasses.replace(_by_shapes(block, failure), how=how)
    try:
        record = _run(block, failure, layout, cast=cast, kernels=kernels, real=True)
    except Exception as error:
        how = f"counted from the shapes of parameters, as it does not run on random values ({reason_of(error)})"
        return dataclasses.replace(_by_shapes(block, failure), how=how)
    return dataclasses.replace(record, how=f"measured on random values ({reason})")


def _run(block: nn.Module, failure: BlockFailed, layout: Layout, *, cast: bool, kernels: Kernels, real: bool) -> Record:
    dtype = getattr(torch, layout.compute_dtype) if cast else None
    copies: dict[int, torch.Tensor] = {}

    def again(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = TensorForm.of(tensor).make(filled=real)
        return copies[id(tensor)]

    def make(tensor: torch.Tensor, is_parameter: bool) -> torch.Tensor:
        wanted = (dtype if tensor.is_floating_point() else None) or tensor.dtype if is_parameter else None
        if real:
            return filled(tensor, wanted)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted or tensor.dtype)

    with ExitStack() as stack:
        stack.enter_context(as_for_training(block))
        stack.enter_context(_same_random_values() if real else FakeTensorMode(allow_non_fake_inputs=True))
        known = stack.enter_context(stand_ins(block, held_parameters(block), make))
        args, kwargs = map_values(again, failure.args_), map_values(again, failure.kwargs)
        recorder = Recorder({key: held is not None and held.trained for key, held in known.items()})
        stack.enter_context(use_kernels(kernels, layout.attention, recorder, fake=not real))
        stack.enter_context(recorder.watch())
        return measure_call(block.forward, args, kwargs, recorder)


@contextmanager
def _same_random_values() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _by_shapes(block: nn.Module, failure: BlockFailed) -> Record:
    """As if every matrix were a linear layer that each row of the first input passes, its inputs and outputs kept."""
    inputs = find_tensors((failure.args_, failure.kwargs))
    stream = next((tensor for tensor in inputs if tensor.is_floating_point()), inputs[0])
    rows, itemsize = stream.numel() // max(1, stream.shape[-1]), stream.element_size()
    tally, kept_bytes, made_bytes = Tally(), 0, 0
    for parameter in held_parameters(block):
        products, read, written = _linear(parameter)
        tally.forward_flops += 2 * rows * products
        tally.backward_flops += (4 if parameter.trained else 2) * rows * products
        tally.moved_bytes += itemsize * (math.prod(parameter.shape) + rows * (read + written))
        tally.kernels += 1
        tally.backward_kernels += 2 if products else 1
        if products:
            tally.work.append(Product(rows, read, written, weighted=parameter.trained))
        else:
            tally.element_bytes += itemsize * (math.prod(parameter.shape) + rows * (read + written))
            tally.backward_element_bytes += itemsize * rows * (2 * read + written)
        kept_bytes += rows * itemsize * (read + written)
        made_bytes += rows * itemsize * (written if products else 0)
    places = frozenset(range(len(inputs)))
    form = TensorForm.of(stream)._replace(requires_grad=True)
    return Record(
        tally=tally,
        kept={
            "none": Kept(places, frozenset(), kept_bytes),
            "selective": Kept(places, frozenset(), made_bytes),
            "full": Kept(places, frozenset(), 0),
        },
        again_bytes={"none": 0, "selective": kept_bytes - made_bytes, "full": kept_bytes},
        outputs=Output(form, None),
        made={0: form},
    )


def _linear(parameter: Held) -> tuple[int, int, int]:
    """Multiply-adds per row, and channels that are read and written per row."""
    shape = parameter.shape
    if len(shape) < 2:
        return 0, math.prod(shape), math.prod(shape)
    return math.prod(shape), math.prod(shape[1:]), shape[0]
