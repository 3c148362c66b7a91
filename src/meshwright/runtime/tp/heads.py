"""Attention heads: how many a module has, which of them each tensor-parallel rank takes, and what it is told of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwright.errors import UnsupportedCombination
from meshwright.runtime.cuts import Segment, even_segments

__all__ = ["Heads", "find_heads", "tell_heads"]

_SIZE = ("head_dim", "head_size", "attention_head_size", "d_head", "dim_head", "key_value_proj_dim", "v_head_dim")
_QUERIES = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_q_heads", "nhead")
_GROUPS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "num_query_groups")
_RATIO = ("num_key_value_groups", "n_rep", "num_queries_per_kv")
#: Widths of all heads together, by which outputs are split or put together.
_WIDTHS = ("split_size", "embed_dim", "hidden_size", "all_head_size", "inner_dim", "d_model", "n_embd", "dim")


@dataclass(frozen=True)
class Heads:
    """Query heads, key/value heads and channels per head of the whole model, over `ranks` tensor-parallel ranks.

    Every rank takes the same number of query heads. Key/value heads are divided where they can be; where there are
    fewer than ranks, each rank has a copy of the one that its queries need; otherwise every rank has all of them.
    """

    queries: int
    groups: int
    size: int
    ranks: int

    @property
    def local(self) -> int:
        """Query heads of a rank."""
        return self.queries // self.ranks

    @property
    def local_groups(self) -> int:
        """Key/value heads that a rank's attention sees."""
        if self.selects:
            return self.local
        return max(1, self.groups // self.ranks)

    @property
    def selects(self) -> bool:
        """Whether a rank computes all key/value heads and picks one for each of its queries."""
        return self.groups % self.ranks != 0 and self.ranks % self.groups != 0

    def require_divisible(self, name: str, *, separate: bool) -> None:
        """Refuse degrees that do not divide the heads.

        Raises:
            UnsupportedCombination: with the legal degrees.
        """
        legal = [n for n in range(1, self.queries + 1) if self.queries % n == 0 and (separate or self.groups % n == 0)]
        if self.ranks not in legal:
            fused = "" if separate else f" and {self.groups} key/value heads in one fused weight"
            raise UnsupportedCombination(
                f"tp={self.ranks} does not divide the {self.queries} query heads of {name}{fused}",
                why="every rank takes the same number of whole heads",
                fix=f"set tp to one of {', '.join(map(str, legal))}; other ranks can go to dp with zero, or to pp",
            )

    def query_segments(self) -> list[Segment]:
        """Channels of each rank's query heads."""
        return even_segments(self.queries * self.size, self.ranks, step=self.size)

    def group_segments(self, size: int) -> list[Segment]:
        """Channels (`size` for each head) of the key/value heads that each rank holds."""
        if self.selects:
            return [(0, self.groups * size)] * self.ranks
        if self.groups % self.ranks == 0:
            return even_segments(self.groups * size, self.ranks, step=size)
        share = self.ranks // self.groups
        return [(rank // share * size, size) for rank in range(self.ranks)]

    def selected(self, rank: int) -> list[int]:
        """The key/value head of each of a rank's query heads."""
        first, group = rank * self.local, self.queries // self.groups
        return [head // group for head in range(first, first + self.local)]


def find_heads(attention: nn.Module, outputs: Mapping[str, int], ranks: int) -> Heads | None:
    """The heads of a module that computes attention; None where it shows none.

    Args:
        outputs: the channels of its divided projections, by their names in it.
        ranks: over which they are divided.
    """
    config = getattr(attention, "config", None)
    size, queries = _number(attention, _SIZE), _number(attention, _QUERIES)
    if size is None and queries is None:
        return None
    separate = len(outputs) >= 3
    queries = queries or _number(config, _QUERIES)
    if queries is None and separate and size:
        queries = max(outputs.values()) // size
    if size is None and queries:
        size = (_number(attention, _WIDTHS) or max(outputs.values(), default=0)) // queries
    groups = _number(attention, _GROUPS) or _number(config, _GROUPS)
    if groups is None and separate and size:
        groups = min(outputs.values()) // size
    return Heads(queries, groups or queries, size, ranks) if queries and size else None


def tell_heads(attention: Any, heads: Heads, *, config: bool) -> None:
    """Let a module's own code see this rank's heads; `config`: it reads them from there too."""
    _replace(attention, _QUERIES, heads.queries, heads.local)
    _replace(attention, _GROUPS, heads.groups, heads.local_groups)
    for name in _RATIO:
        if hasattr(attention, name):
            setattr(attention, name, heads.local // heads.local_groups)
    _replace(attention, _WIDTHS, heads.queries * heads.size, heads.local * heads.size)
    if config and hasattr(attention, "config"):
        own = copy.copy(attention.config)
        _replace(own, _QUERIES, heads.queries, heads.local)
        _replace(own, _GROUPS, heads.groups, heads.local_groups)
        attention.config = own


def _replace(thing: Any, names: tuple[str, ...], whole: int, local: int) -> None:
    for name in names:
        if getattr(thing, name, None) == whole:
            setattr(thing, name, local)


def _number(thing: Any, names: tuple[str, ...]) -> int | None:
    found = (getattr(thing, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)
