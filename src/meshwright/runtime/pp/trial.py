"""The trial: one forward without any computing, to see in which order points are called and what reaches what.

Points return zeros of the right shapes, and every tensor that an operation makes remembers which points' outputs went
into it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.errors import ConfigError
from meshwright.runtime._torch import TorchDispatchMode, storage_key
from meshwright.runtime.batch import call_model
from meshwright.runtime.pp.points import Point, Points, stand_ins
from meshwright.runtime.seeds import preserved_random_state
from meshwright.runtime.tensors import find_tensors, hidden_tensors

__all__ = ["Call", "Flow", "Value", "try_forward"]

#: An output of a point: the number of the call, and which of its tensors. A parameter that code between points
#: uses is (-1, the number of its place).
Value = tuple[int, int]


@dataclass(frozen=True)
class Call:
    """One call of a point in a forward.

    Attributes:
        point: its name.
        block: whether it is a block.
        needs: values that reach what it is called with.
        outputs: how many tensors it returns.
    """

    point: str
    block: bool
    needs: frozenset[Value]
    outputs: int


@dataclass(frozen=True)
class Flow:
    """The calls of a forward in order, and which values reach what the model returns."""

    calls: tuple[Call, ...]
    results: frozenset[Value]


def try_forward(points: Points, batch: Any, *, labels: bool, guessed: bool = False) -> Flow:
    """Go through a model's forward with a batch.

    Args:
        batch: a few rows, as steps take them.
        labels: whether the model is called with labels, to compute its loss.
        guessed: the batch is none of the user's.

    Raises:
        ConfigError: the forward fails when nothing is computed.
    """
    seen = _Seen(points.device)
    loose = {}
    for index, (name, owner) in enumerate(points.places.items()):
        like: torch.Tensor = getattr(owner.module, owner.name)
        loose[name] = torch.zeros((), dtype=like.dtype, device=points.device).expand(like.shape)
        seen.mark(loose[name], frozenset({(-1, index)}))
    try:
        with (
            preserved_random_state(points.device),
            torch.no_grad(),
            points.with_loose(loose),
            points.under(seen),
            seen.mode,
        ):
            outputs, _ = call_model(points.model, batch, labels=labels)
    except ConfigError:
        raise
    except Exception as error:
        at = f" after {seen.calls[-1].point}" if seen.calls else ""
        raise ConfigError(
            f"the forward of a {type(points.model).__name__} cannot be cut into stages: {type(error).__name__}"
            f"{at}: {error}",
            why="it was gone through with zeros in place of what its blocks return",
            fix="give an example of the batches that steps take: Engine(..., example=batch)"
            if guessed
            else "see that the batch is one that steps take, name other blocks (blocks=[...]), or use pp=1",
        ) from error
    seen.require_visible(outputs, "the model returns")
    return Flow(tuple(seen.calls), seen.behind(outputs))


@dataclass
class _Seen:
    """Runs no point; remembers what reaches which storage."""

    device: torch.device
    calls: list[Call] = field(default_factory=list)
    _behind: dict[int, frozenset[Value]] = field(default_factory=dict)
    _made_by: dict[int, Point] = field(default_factory=dict)
    _alive: list[Any] = field(default_factory=list)
    #: What was looked at, which may decide what is called next.
    _read: frozenset[Value] = frozenset()

    @property
    def mode(self) -> TorchDispatchMode:
        return _Watch(self)

    def mark(self, tensor: torch.Tensor, values: frozenset[Value]) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key not in self._behind:
            self._alive.append(storage)
        self._behind[key] = self._behind.get(key, frozenset()) | values

    def behind(self, value: Any) -> frozenset[Value]:
        """The values that went into the tensors of something."""
        sets = [self._behind.get(storage_key(t.untyped_storage()), frozenset()) for t in find_tensors(value)]
        return frozenset().union(*sets)

    def read(self, values: frozenset[Value]) -> None:
        """The forward has looked at numbers that values went into."""
        self._read |= values

    def require_visible(self, value: Any, what: str) -> None:
        """Refuse what points have made where it is not looked for."""
        for kind, tensor in hidden_tensors(value):
            if self.behind(tensor):
                raise _hidden(what, kind)

    def call(self, point: Point, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._read:
            made = [self.calls[index].point for index, _ in self._read if index >= 0]
            raise ConfigError(
                f"the model's forward looks at numbers of what {made[0] if made else 'its parameters'} returns, before "
                f"it calls {point.name}",
                why="stages that have other numbers there would go on in another way",
                fix="do so inside of a block, without .item(), bool() or int() of it outside, or use pp=1",
            )
        self.require_visible((args, kwargs), f"{point.name} is called with")
        needs = self.behind((args, kwargs))
        for tensor, writes in zip(find_tensors((args, kwargs)), point.writes(args, kwargs), strict=True):
            if writes:
                self.write(tensor)
        outputs = stand_ins(point.outline(args, kwargs), [], self.device, whole=True)
        for kind, _ in hidden_tensors(outputs):
            raise _hidden(f"{point.name} returns", kind)
        tensors = find_tensors(outputs)
        index = len(self.calls)
        self.calls.append(Call(point.name, point.block, needs, len(tensors)))
        for number, tensor in enumerate(tensors):
            self.mark(tensor, frozenset({(index, number)}))
            self._made_by[storage_key(tensor.untyped_storage())] = point
        return outputs

    def write(self, tensor: torch.Tensor) -> None:
        """A tensor is written into: its point is told, where it is what one has returned."""
        maker = self._made_by.get(storage_key(tensor.untyped_storage()))
        if maker is not None:
            maker.written = True


def _hidden(what: str, kind: str) -> ConfigError:
    return ConfigError(
        f"{what} tensors inside a {kind}",
        why="they are sent between stages, and are looked for in tuples, lists, mappings and dataclasses only",
        fix=f"make {kind} a dataclass, or use pp=1",
    )


class _Watch(TorchDispatchMode):
    """Hands on, at each operation, what its inputs carry."""

    def __init__(self, seen: _Seen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves its modes without annotations
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        values = self._seen.behind((args, kwargs or {}))
        if values and func is torch.ops.aten._local_scalar_dense.default:
            self._seen.read(values)
        if values:
            written = find_tensors(
                [
                    given
                    for given, argument in zip(args, func._schema.arguments, strict=False)
                    if argument.alias_info is not None and argument.alias_info.is_write
                ]
            )
            for tensor in written:
                self._seen.write(tensor)
            for tensor in (*find_tensors(result), *written):
                self._seen.mark(tensor, values)
        return result
