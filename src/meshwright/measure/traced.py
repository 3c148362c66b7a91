"""Trace: any module becomes a ModelSpec by running it on tensors without data, each distinct block once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast, get_args

import torch
from torch import nn

from meshwright.errors import ConfigError, UnsupportedCombination
from meshwright.measure._torch import FakeTensorMode
from meshwright.measure.fallback import REAL_BYTES, filled, measure_alone, needs_data, reason_of
from meshwright.measure.figures import WalkFigures, add_up
from meshwright.measure.inputs import Example
from meshwright.measure.kernels import Kernels, use_kernels
from meshwright.measure.recorder import Recorder
from meshwright.measure.specs import Ownership, block_specs
from meshwright.measure.stand_in import Held, as_for_training, held_parameters, stand_ins
from meshwright.measure.target import ModelLike, load_model
from meshwright.measure.walk import BlockFailed, Record, Walk
from meshwright.runtime.loss import LossFunction, MeanLoss, call_loss
from meshwright.runtime.precision import cast_inputs
from meshwright.runtime.units import Blocks, choose_blocks
from meshwright.spec.job import Dtype
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec

__all__ = ["trace"]


def trace(
    model: ModelLike,
    inputs: Any,
    *,
    loss: LossFunction | None = None,
    targets: Any = None,
    layout: Layout | None = None,
    compute_dtype: Dtype | None = None,
    name: str = "",
    blocks: Sequence[str] | None = None,
    kernels: Kernels = "accelerator",
) -> ModelSpec:
    """Describe any module by running it on tensors without data: nothing is allocated, nothing computed.

    Forward, loss and backward run for two small batches; what does not grow with the batch goes to `fixed_bytes`. Of
    blocks that are alike one is measured for all, so depth costs almost nothing. The module is left as it was.

    Args:
        model: a module; a function without arguments that builds one (its parameters are then never allocated); or
            the name of such a function, `package.module:function`.
        inputs: what the model is called with, for one microbatch: a tensor, a tuple of positional or a mapping of
            keyword arguments. Only shapes count; dim 0 of the first tensor counts sequences, and so does dim 0 of
            every tensor of the same size. (A real `attention_mask` of ones is left out for Transformers' models.)
        loss: as for `Engine`; without it the loss's own memory is not described.
        targets: what the loss compares outputs with; for a mapping of inputs the mapping itself, and `labels` are then
            not passed to the model.
        layout: sequence length, dtype and attention kernel to describe for; by default those of inputs and parameters.
        compute_dtype: short for a layout that differs in nothing else.
        name: the model's name; its class by default.
        blocks: names of the modules that are blocks; by default the children of its outermost lists.
        kernels: `accelerator` describes what attention and dropout do there, `cpu` what they do on a CPU.

    Returns:
        The description. `source` says how each figure was found.

    Raises:
        ConfigError: the model cannot be built or has no parameters, the inputs do not fit its forward, or they do not
            fit the layout.
        UnsupportedCombination: the layout splits layers over ranks, or wants other than eager operations.
    """
    module = load_model(model)
    if kernels not in get_args(Kernels):
        raise ConfigError(f"kernels={kernels!r} is unknown", fix=f"use one of {', '.join(get_args(Kernels))}")
    found = choose_blocks(module, blocks)
    example = Example.of(inputs, targets, with_loss=loss is not None)
    if any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
        example = example.without_idle_mask()
    tracer = _Tracer(
        module=module,
        example=example,
        held=held_parameters(module),
        blocks=found or [("model", module)],
        whole=not found,
        loss=loss,
        kernels=kernels,
    )
    tracer.choose_layout(layout, compute_dtype)
    return tracer.describe(name or type(module).__name__)


@dataclass
class _Tracer:
    """One module, traced for one layout. `whole`: it has no blocks, so all of it is one, which never recomputes."""

    module: nn.Module
    example: Example
    held: list[Held]
    blocks: Blocks
    whole: bool
    loss: LossFunction | None
    kernels: Kernels
    records: dict[Any, Record] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    real: bool = False

    def choose_layout(self, layout: Layout | None, compute_dtype: Dtype | None) -> None:
        """Settle the layout: given, or that of the inputs and parameters."""
        tokens = self.example.tokens
        if layout is None:
            self.cast = compute_dtype is not None and _dtype_of(self.held) != compute_dtype
            self.layout = Layout(sequence=tokens, compute_dtype=compute_dtype or _dtype_of(self.held))
            return
        if compute_dtype not in (None, layout.compute_dtype):
            raise ConfigError(
                f"compute_dtype={compute_dtype}, but layout.compute_dtype={layout.compute_dtype}",
                fix="leave compute_dtype out",
            )
        if layout.sequence != tokens:
            raise ConfigError(
                f"the layout has sequences of {layout.sequence} tokens, the example inputs of {tokens}",
                why="a trace describes the shapes it is given",
                fix=f"give inputs of {layout.sequence} tokens, or a layout with sequence={tokens}",
            )
        if layout.model_parallel or layout.sequence_parallel or layout.stack != "eager":
            raise UnsupportedCombination(
                f"a traced model under tp={layout.tp} cp={layout.cp} ep={layout.ep} stack={layout.stack}",
                why="a trace sees whole layers and PyTorch's own operations",
                fix="use tp=1, cp=1, ep=1 and stack=eager, or describe the model by its config.json",
            )
        self.cast = _dtype_of(self.held) != layout.compute_dtype
        self.layout = layout

    def describe(self, name: str) -> ModelSpec:
        """The description, from two batches of 2 and 3 sequences or more."""
        few = max(2, self.example.sequences)
        (first, used), (second, _) = (self._walk_until_done(sequences) for sequences in (few, few + 1))
        ownership = Ownership.of(self.module, self.blocks, self.held, used)
        names = [block for block, _ in self.blocks]
        return ModelSpec(
            name=name,
            layout=self.layout,
            blocks=block_specs(names, ownership, (first, few), (second, few + 1), recompute=not self.whole),
            loss_bytes=max(0, second.loss_bytes - first.loss_bytes),
            loss_element_bytes=max(0, second.loss_element_bytes - first.loss_element_bytes),
            backward_loss_element_bytes=max(0, second.backward_loss_element_bytes - first.backward_loss_element_bytes),
            source="; ".join((f"trace on tensors without data (PyTorch {torch.__version__})", *self.notes)),
        )

    def _walk_until_done(self, sequences: int) -> tuple[WalkFigures, list[set[str]]]:
        """Walk again and again; each time what cannot run without data is measured in another way."""
        example = self.example.resized(sequences)
        while True:
            try:
                return self._walk(example)
            except BlockFailed as failure:
                self._measure(failure)
            except ConfigError:
                raise
            except Exception as error:
                if self.real or not needs_data(error):
                    raise _unfit(self.module, error, "") from error
                self._run_for_real(reason_of(error))

    def _measure(self, failure: BlockFailed) -> None:
        name, block = self.blocks[failure.block]
        cause = failure.__cause__
        if cause is not None and not needs_data(cause):
            raise _unfit(self.module, cause, f" in {name}") from cause
        try:
            record = measure_alone(block, failure, self.layout, cast=self.cast, kernels=self.kernels)
        except Exception as error:
            raise _unfit(self.module, error, f" in {name}") from error
        self.records[failure.signature] = record
        if record.how:
            self.notes[f"{name} ({type(block).__name__}) and its like {record.how}"] = None

    def _run_for_real(self, reason: str) -> None:
        """From now on, what lies outside the blocks runs on real tensors."""
        size = sum(parameter.elements * parameter.dtype.itemsize for parameter in self._outside())
        if size > REAL_BYTES:
            raise ConfigError(
                f"{type(self.module).__name__} needs data outside its blocks",
                why=f"{reason}; its parameters there take {size / 2**30:.1f} GiB, too much to try it on real tensors",
                fix="describe it by its config.json, or give a smaller model of the same kind",
            )
        self.real = True
        self.notes[f"outside the blocks measured on real tensors ({reason})"] = None

    def _outside(self) -> list[Held]:
        """Parameters that hang outside the blocks."""
        inside = {id(module) for _, block in self.blocks for module in block.modules()}
        return [held for held in self.held if any(id(place.module) not in inside for place in held.places)]

    def _walk(self, example: Example) -> tuple[WalkFigures, list[set[str]]]:
        dtype = getattr(torch, self.layout.compute_dtype) if self.cast else None

        def make(tensor: torch.Tensor, is_parameter: bool) -> torch.Tensor:
            wanted = (dtype if tensor.is_floating_point() else None) or tensor.dtype if is_parameter else None
            if self.real:
                return filled(tensor, wanted)
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted or tensor.dtype, device="cpu")

        with ExitStack() as stack:
            stack.enter_context(as_for_training(self.module))
            if self.real:
                stack.enter_context(torch.random.fork_rng(devices=[]))
            else:
                stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
                example = example.without_data()
            held = self._outside() if self.real else self.held
            known = stack.enter_context(stand_ins(self.module, held, make))
            if dtype is not None:
                for handle in cast_inputs([self.module, *(block for _, block in self.blocks)], dtype):
                    stack.callback(handle.remove)
            recorder = Recorder({key: found is not None and found.trained for key, found in known.items()})
            given = "position_ids" in example.kwargs
            stack.enter_context(
                use_kernels(self.kernels, self.layout.attention, recorder, fake=not self.real, positions_given=given)
            )
            walk = Walk(self.module, self.blocks, recorder, self.records, real=self.real)
            walk.run(example.args, example.kwargs, _bound(self.loss, example.targets))
            ends = (walk.segments[0], walk.segments[-1])
            names = [{found.name for key in end.read if (found := known.get(key)) is not None} for end in ends]
            return add_up(walk), names


def _bound(loss: LossFunction | None, targets: Any) -> Callable[[Any], torch.Tensor] | None:
    if loss is None:
        return None
    if isinstance(loss, MeanLoss):  # whether the weight is 0 cannot be asked without data
        return lambda outputs: loss.mean(outputs, targets)
    return lambda outputs: call_loss(loss, outputs, targets)[0]


def _unfit(module: nn.Module, error: BaseException | None, where: str) -> ConfigError:
    return ConfigError(
        f"{type(module).__name__} does not run on the example inputs{where}",
        why=reason_of(error),
        fix="give inputs as its forward takes them: a tensor, a tuple, or a mapping of keyword arguments",
    )


def _dtype_of(held: Sequence[Held]) -> Dtype:
    """The dtype of most floating-point parameters."""
    elements: dict[str, int] = {}
    for parameter in held:
        name = str(parameter.dtype).removeprefix("torch.")
        if name in get_args(Dtype):
            elements[name] = elements.get(name, 0) + torch.Size(parameter.shape).numel()
    if not elements:
        raise ConfigError(
            "the model has no floating-point parameters of a dtype that can be trained",
            fix=f"store some in {', '.join(get_args(Dtype))}",
        )
    return cast(Dtype, max(elements, key=lambda name: elements[name]))
