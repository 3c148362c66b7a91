"""Divided modules at work: what is done to their inputs and outputs. Their own code runs on this rank's slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.errors import ConfigError, UnsupportedCombination
from meshwright.runtime.seeds import SplitStreams
from meshwright.runtime.tp.communicate import Wire
from meshwright.runtime.tp.heads import Heads

__all__ = ["Entries", "cut_sequences", "divide_embedding", "divide_head", "leave_rows", "pick_heads", "sum_experts"]


class Entries:
    """The inputs of divided matrices that stand in one module: what several of them take is entered once.

    Under sequence parallelism the whole module sees the gathered sequence where it computes attention (`gathers`):
    its code takes shapes from its input.
    """

    def __init__(self, wire: Wire, streams: SplitStreams, parent: nn.Module, name: str, *, gathers: bool) -> None:
        self._wire, self._streams, self._name, self._gathers = wire, streams, name, gathers
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._open = False
        parent.register_forward_pre_hook(self._begin, with_kwargs=True)
        parent.register_forward_hook(self._end, always_call=True)

    def watch(self, module: nn.Module) -> None:
        """Let a module's input be entered."""
        module.register_forward_pre_hook(self._enter)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._known.clear()
        self._open = True
        if self._gathers and self._wire.cuts_sequences:
            return _replace_stream(args, kwargs, self._entered)
        return None

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._known.clear()
        self._open = False

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        return (self._entered(args[0]), *args[1:])

    def _entered(self, x: torch.Tensor) -> torch.Tensor:
        if id(x) in self._known:
            return self._known[id(x)][1]
        if self._wire.cuts_sequences and x.dim() != 3:
            raise UnsupportedCombination(
                f"sequence parallelism of {self._name}, which takes an input of {x.dim()} dims",
                why="sequences are cut and gathered along the second of batch x tokens x width",
                fix="set sequence_parallel=false",
            )
        self._streams.divide(self._name)
        entered = self._wire.gather(x) if self._wire.cuts_sequences else self._wire.enter(x)
        if self._open:
            self._known[id(x)] = (x, entered)  # the first keeps its identity for as long as it is known
            self._known[id(entered)] = (entered, entered)
        return entered


def leave_rows(module: Any, wire: Wire, streams: SplitStreams, *, widths: list[int], splits: bool) -> None:
    """Let a module whose inputs are divided return the ranks' sum; its bias is added once, after it."""
    transposed = type(module) is not nn.Linear

    def forward(x: torch.Tensor) -> torch.Tensor:
        if splits:
            x = wire.take_columns(x, widths)
        weight = module.weight.t() if transposed else module.weight
        partial = F.linear(x, weight)
        whole = wire.scatter(partial) if wire.cuts_sequences else wire.leave(partial)
        streams.join()
        return whole if module.bias is None else whole + module.bias

    module.forward = forward


def gather_columns(module: nn.Module, wire: Wire, streams: SplitStreams, widths: list[int]) -> None:
    """Let a module whose outputs are divided return all of them."""

    def gathered(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        streams.join()
        return wire.gather_columns(output, widths)

    module.register_forward_hook(gathered)


def pick_heads(module: nn.Module, heads: Heads, rank: int) -> None:
    """Let a projection of all key/value heads return the one of each of this rank's queries."""
    chosen = torch.tensor(heads.selected(rank))

    def picked(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        by_head: torch.Tensor = output.unflatten(-1, (heads.groups, -1))
        return by_head.index_select(-2, chosen.to(output.device)).flatten(-2)

    module.register_forward_hook(picked)


def sum_experts(module: nn.Module, wire: Wire, streams: SplitStreams, name: str) -> None:
    """Experts that are each divided: what has gradients enters, their result is summed."""

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        streams.divide(name)

        def entered(value: Any) -> Any:
            return wire.enter(value) if isinstance(value, torch.Tensor) and value.requires_grad else value

        return tuple(map(entered, args)), {key: entered(value) for key, value in kwargs.items()}

    def end(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        whole = wire.leave(output)
        streams.join()
        return whole

    module.register_forward_pre_hook(begin, with_kwargs=True)
    module.register_forward_hook(end)


def divide_embedding(module: Any, wire: Wire, start: int, size: int) -> None:
    """Rows of a vocabulary that lie on several ranks: each looks its own up, and the results are summed.

    Raises:
        ConfigError: an option that needs the whole matrix.
    """
    for option in ("max_norm", "sparse", "scale_grad_by_freq"):
        if getattr(module, option, None):
            raise ConfigError(
                f"an embedding with {option} under tensor parallelism",
                why="it needs the whole matrix, and each rank has a part of the vocabulary",
                fix='annotate it with sharding={"...": "replicate"}, or leave the option out',
            )
    padding = module.padding_idx
    own: list[torch.Tensor] = []

    def localise(module: Any, args: tuple[Any, ...]) -> Any:
        ids = args[0]
        if padding is not None:  # the index of a row that gets no gradient
            module.padding_idx = padding - start if start <= padding < start + size else None
        here = (ids >= start) & (ids < start + size)
        own[:] = [here]
        return ((ids - start).where(here, 0), *args[1:])

    def summed(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return wire.leave(output * own.pop()[..., None])

    module.register_forward_pre_hook(localise)
    module.register_forward_hook(summed)


def divide_head(
    module: nn.Module, wire: Wire, size: int, result: Callable[[torch.Tensor], Any], *, gathers: bool
) -> None:
    """Logits of this rank's part of a vocabulary: the padding's are cut off, `result` makes something of the rest.

    `gathers`: what comes in is cut along the tokens where sequences are.
    """

    def entered(module: nn.Module, args: tuple[Any, ...]) -> Any:
        x = args[0]
        return (wire.gather(x) if gathers and wire.cuts_sequences else wire.enter(x),)

    def divided(module: nn.Module, args: Any, output: torch.Tensor) -> Any:
        return result(output if output.shape[-1] == size else output.narrow(-1, 0, size))

    module.register_forward_pre_hook(entered)
    module.register_forward_hook(divided)


def cut_sequences(wire: Wire, first: nn.Module, last: nn.Module, *, joins: bool) -> None:
    """Cut activations along the tokens from the first block's input on; `joins`: put them together after the last."""

    def cut(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _replace_stream(args, kwargs, wire.split) if wire.cuts_sequences else None

    def join(module: nn.Module, args: Any, output: Any) -> Any:
        if not wire.cuts_sequences:
            return None
        if isinstance(output, tuple):
            return (wire.join(output[0]), *output[1:])
        return wire.join(output)

    first.register_forward_pre_hook(cut, with_kwargs=True)
    if joins:
        last.register_forward_hook(join)


def _replace_stream(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The residual stream is the first input, or called `hidden_states` or `x`."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = next((name for name in ("hidden_states", "x") if name in kwargs), None)
    if name is None:
        raise ConfigError(
            f"sequence parallelism of a block that is called with {', '.join(kwargs)}",
            why="which of them is cut along the tokens is not known",
            fix="set sequence_parallel=false",
        )
    return args, {**kwargs, name: change(kwargs[name])}
