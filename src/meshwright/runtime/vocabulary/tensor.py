"""A tensor that shows the shape of whole logits and holds this rank's columns: what it is made of, and gathering it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Self, TypeVar

import torch

from meshwright.errors import ConfigError
from meshwright.runtime._torch import graph_node, storage_key, wrapper_tensor
from meshwright.runtime.vocabulary.columns import Columns, applied, gather_columns, take_columns

__all__ = ["VocabularyTensor", "same_storage"]

T = TypeVar("T")
#: What a view does to the tensor that it is a view of.
View = Callable[[torch.Tensor], torch.Tensor]


class VocabularyTensor(torch.Tensor):
    """The state of `VocabularyLogits`.

    A root is gathered from its local tensor. A view shares memory with what it is a view of, as in plain PyTorch, so
    it is gathered as the same view of the same whole tensor, and what one changes in place the others see.
    """

    _columns: Columns
    _local: torch.Tensor
    _source: tuple[VocabularyTensor, View] | None
    _whole: torch.Tensor | None
    _whole_version: int
    _node: Any

    @classmethod
    def of(cls, local: torch.Tensor, columns: Columns) -> Self:
        """The logits [..., V] of which this rank holds the columns `local` [..., Vl], differentiable.

        Raises:
            ValueError: `local` has another number of columns than this rank is to hold.
        """
        if not local.dim() or local.shape[-1] != columns.width:
            raise ValueError(f"local logits {tuple(local.shape)} are not the {columns.width} columns of this rank")
        if local.dim() > 2 and not same_storage(rows := local.flatten(0, -2), local):
            local = rows.view(local.shape)  # whole logits are contiguous, and local rows have to lie in the same order
        return cls._make(local, columns)

    @classmethod
    def _make(
        cls,
        local: torch.Tensor,
        columns: Columns,
        shown: torch.Tensor | None = None,
        source: tuple[VocabularyTensor, View] | None = None,
    ) -> Self:
        shape = (*local.shape[:-1], columns.vocabulary) if shown is None else shown.shape
        made = wrapper_tensor(cls, shape, None if shown is None else shown.stride(), local)
        made._columns, made._local, made._source = columns, local, source
        made._whole, made._whole_version, made._node = None, 0, None
        made.attach()
        return made

    @property
    def columns(self) -> Columns:
        """How the vocabulary lies over the ranks."""
        return self._columns

    @property
    def local(self) -> torch.Tensor:
        """This rank's columns [..., Vl], plain; its gradient is this rank's part of the whole gradient."""
        self._follow()
        self._root()._settle()
        return self._local

    @property
    def gathered(self) -> bool:
        """Whether the whole tensor is there already."""
        return self._root()._whole is not None

    def whole(self) -> torch.Tensor:
        """The whole logits [..., V], plain and differentiable: gathered once, by all ranks of the group together."""
        self._follow()
        if self._source is not None:
            parent, view = self._source
            whole = parent.whole()
            with torch.set_grad_enabled(self._local.requires_grad):
                return view(whole)
        self._settle()
        known, inference = self._whole, torch.is_inference_mode_enabled()
        if known is not None and (
            inference or not (known.is_inference() or (self._local.requires_grad and not known.requires_grad))
        ):
            return known
        with torch.enable_grad():  # it may be asked for without gradients first, and with them later
            self._whole = gather_columns(self._local, self._columns)
        self._whole_version = _version(self._whole)
        return self._whole

    def root(self, local: torch.Tensor) -> Self:
        """Other logits of the same columns, from a local tensor with memory of its own."""
        return self._make(local, self._columns)

    def derived(self, local: torch.Tensor, model: torch.Tensor, shown: torch.Tensor, view: View) -> Self:
        """What a function of leading dims makes of these logits.

        Args:
            local: what it makes of the local tensor.
            model: the stand-in for these logits.
            shown: what the function makes of it.
            view: the function.
        """
        if same_storage(shown, model):
            return self._make(local, self._columns, shown, (self, view))
        return self.root(local)

    def stand_in(self) -> torch.Tensor:
        """A tensor without data that has the shape and the strides of the whole logits: the same on every rank."""
        return torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")

    def attach(self) -> None:
        """Let gradients of this tensor itself arrive at the local one.

        They are there where it goes into an autograd function of the user's own, which no `__torch_function__` sees.
        """
        if self._local.requires_grad:
            with torch.enable_grad():
                applied(_Shown, self, self._local, self._columns)
        self._node = graph_node(self)

    def _follow(self) -> None:
        """Let gradients of the local tensor arrive at this one, where an autograd function has made it."""
        node = graph_node(self)
        if node is not self._node:
            self._node, self._source, self._whole = node, None, None
            with torch.enable_grad():
                self._local = applied(_Behind, self, self._local)

    def set_requires_grad(self, value: bool) -> Self:
        """As `torch.Tensor.requires_grad_`."""
        if value != self._local.requires_grad:
            self._source = self._whole = None  # from here on gradients end here
            self._local.requires_grad_(value)
            self.attach()
        return self

    def _root(self) -> VocabularyTensor:
        found: VocabularyTensor = self
        while found._source is not None:
            found = found._source[0]
        return found

    def _settle(self) -> None:
        """Bring what was changed in place in the whole tensor, or in a view of it, to the local one."""
        whole, local = self._whole, self._local
        # Tensors of inference mode do not count their changes.
        if whole is None or (not whole.is_inference() and whole._version == self._whole_version):
            return
        ends = local.is_leaf and local.requires_grad  # such a tensor is only changed without gradients
        with torch.set_grad_enabled(whole.requires_grad and not ends):
            local.copy_(take_columns(whole, self._columns))
        self._whole_version = _version(whole)
        self.attach()

    def __copy__(self) -> Self:
        return self._make(self.local, self._columns, self.stand_in(), (self, _itself))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy outside of the graph."""
        if id(self) not in memo:
            copied = self.local.detach().clone().requires_grad_(self.local.requires_grad)
            memo[id(self)] = self.root(copied)
        found: Self = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            f"pickling logits {tuple(self.shape)} that are divided over {len(self._columns.widths)} ranks",
            why="this rank holds only its columns of them, and the group of ranks cannot be written down",
            fix="pickle logits.whole(), which all ranks of the group have to ask for, or logits.local",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's has no types
        """Shape and layout alone: values would have to be gathered."""
        columns = self._columns
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"columns {columns.start} to {columns.start + columns.width} on rank {columns.rank} "
            f"of {len(columns.widths)})"
        )

    def __format__(self, spec: str) -> str:
        return object.__format__(self, spec)


class _Shown(torch.autograd.Function):
    """Gives the shown tensor its place in the graph, behind the local one."""

    @staticmethod
    def forward(ctx: Any, shown: torch.Tensor, local: torch.Tensor, columns: Columns) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(shown)
        ctx.columns, ctx.alias, ctx.version = columns, local.detach(), _version(local)
        return shown

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        if gradient is None:
            return None, None, None
        if _version(ctx.alias) != ctx.version:
            raise RuntimeError(
                "logits that are divided over ranks were changed in place through another view after they had been "
                "given to an autograd function. Change a clone() of them."
            )
        own = gradient.local if isinstance(gradient, VocabularyTensor) else take_columns(gradient, ctx.columns)
        return None, own, None


class _Behind(torch.autograd.Function):
    """The local tensor behind a shown one that has its own place in the graph."""

    @staticmethod
    def forward(ctx: Any, shown: VocabularyTensor, local: torch.Tensor) -> torch.Tensor:
        ctx.kind, ctx.columns = type(shown), shown.columns
        return local.clone()  # the function's arguments may have the memory, and no change in place may reach them

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.kind.of(gradient, ctx.columns), None


def same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two plain tensors share memory."""
    return storage_key(one.untyped_storage()) == storage_key(other.untyped_storage())


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _itself(tensor: T) -> T:
    return tensor
