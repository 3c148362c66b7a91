"""Walk: one forward and backward of a model, every distinct block measured once, the rest of it piece by piece."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.errors import MeshwrightError
from meshwright.measure._torch import node_number
from meshwright.measure.recorder import Recorder, Tally
from meshwright.measure.signature import Signatures
from meshwright.measure.values import (
    Storages,
    TensorForm,
    bytes_of,
    storages_of,
)
from meshwright.runtime.tensors import find_tensors, map_values

__all__ = ["POLICIES", "BlockFailed", "Call", "Kept", "Output", "Record", "Walk", "measure_call"]

POLICIES = ("none", "selective", "full")


class Kept(NamedTuple):
    """What one call of a block keeps for backward: which of its inputs and outputs (by place), and bytes besides."""

    inputs: frozenset[int]
    outputs: frozenset[int]
    inner_bytes: int


class Output(NamedTuple):
    """An output of a block: its form, and the input whose memory it shares, if any."""

    form: TensorForm
    of_input: int | None


@dataclass(frozen=True)
class Record:
    """A measured call: its tally, what is kept under each policy, what more is alive in its backward, its outputs.

    `outputs` is what the block returned, an `Output` in the place of each tensor; `made` are those that are new, by
    place.
    """

    tally: Tally
    kept: dict[str, Kept]
    again_bytes: dict[str, int]
    outputs: Any
    made: dict[int, TensorForm]
    how: str = ""


@dataclass(frozen=True)
class Call:
    """A call of block number `block`: its record and the storages of its inputs and outputs, by place."""

    block: int
    record: Record
    inputs: list[int]
    outputs: list[int]
    storages: Storages


class BlockFailed(Exception):
    """A block could not be measured in this walk."""

    def __init__(self, block: int, signature: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(block)
        self.block, self.signature, self.args_, self.kwargs = block, signature, args, kwargs


@dataclass
class Walk:
    """Runs a model with its blocks replaced by what they return.

    `records` maps signatures to measured calls and is filled; walks of one model may share it. A walk over `real`
    tensors measures no blocks, and its blocks return random values. After `run`, `calls` are
    the calls of blocks in order and `segments` what was done before each of them and after the last: one more than
    there are calls. `outputs` are the model's tensors, `loss` is what the loss did; `entering` what enters the
    first block to be computed on; `used` are storages that something reads.
    """

    model: nn.Module
    blocks: Sequence[tuple[str, nn.Module]]
    recorder: Recorder
    records: dict[Any, Record]
    real: bool = False
    signatures: Signatures = field(default_factory=Signatures)
    calls: list[Call] = field(default_factory=list)
    segments: list[Tally] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    loss: Tally = field(default_factory=Tally)
    roots: list[torch.Tensor] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    entering: list[torch.Tensor] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    inside: bool = False

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[[Any], torch.Tensor] | None) -> Any:
        """Run forward, loss and backward.

        Returns:
            What the model returned.

        Raises:
            BlockFailed: a block raised, or was not measured before. Whatever the model raises outside its blocks.
        """
        with torch.enable_grad(), self._blocks_replaced(), self.recorder.watch():
            self._next_segment()
            self.segments[0].made = {}
            outputs = self.model(*args, **kwargs)
            self.outputs = find_tensors(outputs)
            self.used.update(_keys(self.outputs), *(segment.read for segment in self.segments))
            ends = self.outputs
            self.recorder.tally = Tally()
            after = node_number()
            if loss is not None:
                self.recorder.tally = self.loss
                ends = [loss(outputs)]
            self.roots.extend(tensor for tensor in ends if tensor.grad_fn is not None)

            def segment(number: int) -> Tally:
                return self.segments[bisect_right(self.starts, number) - 1]

            with self.recorder.in_backward(segment, lambda number: self.loss if number >= after else segment(number)):
                _backward(self.roots)
        return outputs

    @contextlib.contextmanager
    def _blocks_replaced(self) -> Iterator[None]:
        before = [(block, vars(block).get("forward")) for _, block in self.blocks]
        for index, (_, block) in enumerate(self.blocks):
            block.forward = self._replaced(index, block, block.forward)
        try:
            yield
        finally:
            for block, forward in before:
                del block.forward
                if forward is not None:
                    block.forward = forward

    def _replaced(self, index: int, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if self.inside:  # a block within a block belongs to the outer one
                return forward(*args, **kwargs)
            signature = self.signatures.of(block, index, args, kwargs)
            if signature not in self.records:
                if self.real:
                    raise BlockFailed(index, signature, args, kwargs)
                self.inside = True
                try:
                    self.records[signature] = measure_call(forward, args, kwargs, self.recorder)
                except MeshwrightError:
                    raise
                except Exception as error:
                    raise BlockFailed(index, signature, args, kwargs) from error
                finally:
                    self.inside = False
            return self._answer(index, self.records[signature], find_tensors((args, kwargs)))

        return called

    def _answer(self, index: int, record: Record, inputs: list[torch.Tensor]) -> Any:
        self.roots.extend(tensor for tensor in inputs if tensor.grad_fn is not None)
        if not self.calls:
            self.entering = _entering(inputs)
        outputs: list[torch.Tensor] = []

        def make(output: Output) -> torch.Tensor:
            if output.of_input is not None and TensorForm.of(inputs[output.of_input]) == output.form:
                outputs.append(inputs[output.of_input])
            else:
                outputs.append(output.form.make(filled=self.real))
            return outputs[-1]

        self.recorder.tally = Tally()  # making what the block returned is no work of the model
        answer = map_values(make, record.outputs, Output)
        found = storages_of([*inputs, *outputs])
        self.used.update(_keys(inputs))
        self.calls.append(Call(index, record, _keys(inputs), _keys(outputs), found))
        self._next_segment()
        return answer

    def _next_segment(self) -> None:
        self.recorder.tally = Tally()
        with torch.enable_grad():
            self.starts.append(node_number())
        self.segments.append(Tally())
        self.recorder.tally = self.segments[-1]


def _keys(tensors: list[torch.Tensor]) -> list[int]:
    return [next(iter(storages_of([tensor])), 0) for tensor in tensors]


def _entering(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    trained = [tensor for tensor in inputs if tensor.requires_grad]
    return trained or [tensor for tensor in inputs if tensor.is_floating_point()][:1]


def _backward(roots: list[torch.Tensor]) -> None:
    different = list({id(tensor): tensor for tensor in roots}.values())
    if different:
        torch.autograd.backward(different, [torch.ones_like(t) for t in different])


def measure_call(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], recorder: Recorder
) -> Record:
    """Run a block's forward and backward on its own, from copies of its inputs without their history."""
    copies: dict[int, torch.Tensor] = {}

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad)
        return copies[id(tensor)]

    args, kwargs = map_values(leaf, args), map_values(leaf, kwargs)
    tally = Tally()
    recorder.tally = tally
    returned = forward(*args, **kwargs)
    inputs, outputs = find_tensors((args, kwargs)), find_tensors(returned)
    roots = [tensor for tensor in outputs if tensor.grad_fn is not None]
    with recorder.in_backward(lambda number: tally):
        _backward(roots)
    given = recorder.activations(inputs)
    kept: dict[str, Storages] = {policy: {} for policy in POLICIES}
    alive = kept
    if roots:  # without gradient nothing is kept, and checkpoint has nothing to compute again
        kept = {"none": tally.kept, "selective": given | tally.products, "full": given}
        # A second forward uses up what selective recompute kept; what is not kept for backward is then gone.
        again = given | tally.kept
        alive = {"none": tally.kept, "selective": again | tally.unasked, "full": again}
    input_keys, output_keys = _keys(inputs), _keys(outputs)

    def form(tensor: torch.Tensor) -> Output:
        key = _keys([tensor])[0]
        meta = TensorForm.of(tensor.detach())._replace(requires_grad=tensor.requires_grad)
        return Output(meta, input_keys.index(key) if key in input_keys else None)

    made = {place: form(tensor).form for place, tensor in enumerate(outputs) if output_keys[place] not in input_keys}
    return Record(
        tally=tally,
        kept={policy: _places(storages, input_keys, output_keys) for policy, storages in kept.items()},
        again_bytes={policy: bytes_of(alive[policy]) - bytes_of(kept[policy]) for policy in POLICIES},
        outputs=map_values(form, returned),
        made=made,
    )


def _places(storages: Storages, inputs: list[int], outputs: list[int]) -> Kept:
    inner = {key: held for key, held in storages.items() if key not in inputs and key not in outputs}
    return Kept(
        frozenset(inputs.index(key) for key in storages if key in inputs),
        frozenset(outputs.index(key) for key in storages if key in outputs and key not in inputs),
        bytes_of(inner),
    )
