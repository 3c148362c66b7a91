"""What the sharding of a module means, and why it is so, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwright.runtime.cuts import Cut
from meshwright.runtime.tp.divide import HEAD_AFTER_HEAD, Region, Sharding
from meshwright.runtime.tp.heads import Heads
from meshwright.runtime.tp.plan import Assigned

__all__ = ["Told", "notes_of"]

_SUMMED = "its gradient is summed over tp"
_MOST_LISTED = 8


@dataclass(frozen=True)
class Told:
    """A model and how it is divided."""

    model: nn.Module
    sharding: Sharding
    tp: int
    blocks: tuple[str, ...]
    sequence_parallel: bool

    def region_of(self, name: str) -> Region | None:
        """The region that a module's divided outputs begin."""
        return next((region for region in self.sharding.regions if name in region.columns), None)

    def in_block(self, name: str) -> bool:
        """Whether a module stands in a block."""
        return any(name == block or name.startswith(f"{block}.") for block in self.blocks)


def notes_of(told: Told, name: str, module: nn.Module, entry: Assigned, cuts: Mapping[str, Cut]) -> list[str]:
    """What is to be known of a module that holds parameters."""
    if told.tp == 1:
        return ["one rank: all of it"]
    if entry.style in ("colwise", "gather-output"):
        notes = _columns(told, name, entry.style, cuts)
    elif entry.style in ("rowwise", "split-input"):
        notes = _rows(told, name, entry.style, module, cuts)
    elif entry.style == "vocab":
        notes = _vocabulary(told, name, cuts["weight"], entry.source)
    elif entry.style == "experts":
        count = next(iter(cuts.values())).shape[0]
        notes = [f"every rank has all {count} experts, each divided like an MLP; their results are summed"]
    else:
        notes = [_whole(told, name, module, entry, cuts)]
    widths = told.sharding.widths.get(name, [])
    if len(set(widths)) > 1 and entry.style != "vocab":
        shown = ", ".join(map(str, widths)) if len(widths) <= _MOST_LISTED else f"{max(widths)} to {min(widths)}"
        none = f"; {widths.count(0)} ranks have none of it" if 0 in widths else ""
        notes.append(f"uneven: {shown}{none}")
    if entry.source == "corrected":
        notes.append("the published plan puts its parts together on every rank; here they stay divided")
    return notes


def _columns(told: Told, name: str, style: str, cuts: Mapping[str, Cut]) -> list[str]:
    if style == "gather-output":
        return ["outputs divided, then gathered: what follows is computed alike on every rank"]
    region, cut = told.region_of(name), cuts["weight"]
    parts = len(cut.segments[0])
    heads = region.heads if region is not None else None
    if parts == 2:
        return ["gate and up: each divided by outputs"]
    if heads is None:
        return ["outputs divided"]
    outputs = cut.shape[cut.dim]
    if parts == 3:
        return [f"queries, keys, values: each divided, {_query_heads(heads)}"]
    if outputs == heads.groups * heads.size and heads.groups != heads.queries:
        return [_keys(heads)]
    if outputs == heads.queries * heads.size:
        return [f"{heads.local} of {heads.queries} heads on each rank"]
    if name.rpartition(".")[2] in HEAD_AFTER_HEAD:
        return [f"queries, keys, values head after head: {heads.local} of {heads.queries} heads on each rank"]
    return ["outputs divided"]


def _query_heads(heads: Heads) -> str:
    if heads.groups == heads.queries:
        return f"{heads.local} of {heads.queries} heads on each rank"
    return (
        f"{heads.local} of {heads.queries} query and {heads.local_groups} of {heads.groups} key/value heads on a rank"
    )


def _keys(heads: Heads) -> str:
    whole, ranks = heads.groups, heads.ranks
    named = f"{whole} key/value {'head' if whole == 1 else 'heads'}"
    if heads.selects:
        return f"{named} over {ranks} ranks: each has all, and takes those of its queries; {_SUMMED}"
    if whole % ranks == 0:
        return f"{whole // ranks} of {named} on each rank"
    return f"{named} over {ranks} ranks: each held by {ranks // whole}; {_SUMMED}"


def _rows(told: Told, name: str, style: str, module: Any, cuts: Mapping[str, Cut]) -> list[str]:
    taken = "takes its channels of an input that every rank has" if style == "split-input" else "inputs divided"
    notes = [f"{taken}, results summed over tp"]
    if getattr(module, "bias", None) is not None:
        notes.append("bias whole, added after the sum" + (f"; {_SUMMED}" if cuts["bias"].partial else ""))
    return notes


def _vocabulary(told: Told, name: str, cut: Cut, source: str) -> list[str]:
    rows, length = cut.shape[0], cut.length[0]
    padded = sum(cut.length) - rows
    note = f"{rows:,} words, {length:,} on each rank" + (f", {padded:,} of them padding" if padded else "")
    return [note] if source != "completed" else [note, "no plan names it: divided along the vocabulary all the same"]


def _whole(told: Told, name: str, module: nn.Module, entry: Assigned, cuts: Mapping[str, Cut]) -> str:
    partial = any(cut.partial for cut in cuts.values())
    if not all(cut.replicated for cut in cuts.values()):
        return "has an entry for each head: divided as the heads are" + (f"; {_SUMMED}" if partial else "")
    why = "as annotated" if entry.source == "annotation" else _why_whole(told, name, module, entry)
    if not partial:
        return why
    tokens = told.sequence_parallel and (entry.style == "sequence" or told.in_block(name))
    return f"{why}; each rank uses it for its own {'tokens' if tokens else 'heads'}, so {_SUMMED}"


def _why_whole(told: Told, name: str, module: nn.Module, entry: Assigned) -> str:
    kind = type(module).__name__
    if "norm" in kind.lower() or "norm" in name.rpartition(".")[2].lower():
        return "norm: every rank needs all of it"
    if entry.source in ("published", "known"):
        return "its plan keeps it whole"
    if isinstance(module, nn.Embedding):
        return "embedding that is not of the words: every rank needs all of it"
    return "no plan names it: computed alike on every rank"
