"""The backward in two halves: what a stage's inputs need first, what its weights need later.

The first half goes from the outputs to the inputs and remembers, at every node of that path from which a weight
branches off, the gradient that arrived there. The second half starts at those nodes, weight by weight, so that what the
first half has computed is not computed again; what the nodes between them had saved is let go. (After Qi et al., Zero
Bubble Pipeline Parallelism, 2024.)
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = ["Deferred", "backward_input"]

#: By the type of a node, where it keeps what it has saved.
_SAVED: dict[type, tuple[str, ...]] = {}


@dataclass
class _Branch:
    """Weights that branch off at the same nodes, and the gradients that arrived at those.

    Attributes:
        roots: beside the nodes: roots of the backward that lead to these weights and to no input, with their gradients.
    """

    weights: list[nn.Parameter]
    nodes: list[Any]
    roots: list[tuple[GradientEdge, torch.Tensor]]
    arrived: dict[int, tuple[torch.Tensor | None, ...]] = field(default_factory=dict)


class Deferred:
    """What is left of a backward: the gradients of weights."""

    def __init__(self, branches: Sequence[_Branch]) -> None:
        self._branches = list(branches)

    def run(self, weights: Iterable[nn.Parameter]) -> None:
        """Add the gradients of some weights, to `.grad`."""
        wanted = {id(weight) for weight in weights}
        kept = []
        for branch in self._branches:
            mine = [weight for weight in branch.weights if id(weight) in wanted]
            others = [weight for weight in branch.weights if id(weight) not in wanted]
            if mine:
                _run(branch, mine, keep=bool(others))
            if others:
                kept.append(_Branch(others, branch.nodes, branch.roots, branch.arrived))
            else:  # what it holds is not needed for those that follow
                branch.nodes, branch.roots, branch.arrived = [], [], {}
        self._branches = kept


def backward_input(
    roots: Sequence[GradientEdge],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[nn.Parameter],
    now: Sequence[nn.Parameter] = (),
) -> Deferred:
    """Add the gradients of `inputs` to their `.grad`; what the weights need is left for later.

    Args:
        roots: where the backward starts, and with which gradients.
        inputs: leaves that need a gradient.
        weights: that may get theirs later.
        now: weights that get theirs at once.
    """
    accumulators = {id(weight): get_gradient_edge(weight).node for weight in weights}
    behind = _behind([edge.node for edge in roots])
    path = _above([get_gradient_edge(tensor).node for tensor in (*inputs, *now)], behind)
    apart = defaultdict(list)
    for edge, gradient in zip(roots, gradients, strict=True):
        if edge.node not in path:
            apart[edge.node].append((edge, gradient))
    groups: dict[tuple[frozenset[Any], frozenset[Any]], list[nn.Parameter]] = defaultdict(list)
    for weight in weights:
        above = _above([accumulators[id(weight)]], behind, path)
        groups[frozenset(above & path), frozenset(above & apart.keys())].append(weight)
    branches = [
        _Branch(group, list(nodes), [start for node in alone for start in apart[node]])
        for (nodes, alone), group in groups.items()
        if nodes or alone
    ]
    # Nodes run in the order of their numbers, the last made first: at one of them all with higher numbers have run.
    passing = deque(sorted(path - _kept(branches, path, behind), key=_number, reverse=True))
    handles = []
    by_node: dict[Any, list[_Branch]] = defaultdict(list)
    for branch in branches:
        for node in branch.nodes:
            by_node[node].append(branch)
    for node, interested in by_node.items():

        def keep(arriving: Any, node: Any = node, interested: list[_Branch] = interested) -> None:
            for branch in interested:
                branch.arrived[id(node)] = tuple(arriving)
            while passing and _number(passing[0]) > _number(node):
                _let_go(passing.popleft())

        handles.append(node.register_prehook(keep))
    try:
        if path:
            torch.autograd.backward(roots, gradients, retain_graph=True, inputs=[*inputs, *now])
    finally:
        for handle in handles:
            handle.remove()
    for node in passing:
        _let_go(node)
    return Deferred(branches)


def _number(node: Any) -> int:
    number: int = node._sequence_nr()
    return number


def _kept(branches: Sequence[_Branch], path: set[Any], behind: dict[Any, list[Any]]) -> set[Any]:
    """Nodes of the path that the weights need: where they branch off, and what lies between two such of one weight."""
    found = {node for branch in branches for node in branch.nodes}
    for branch in branches:
        if len(branch.nodes) > 1:
            found |= _above(branch.nodes, behind) & _below(branch.nodes) & path
    return found


def _let_go(node: Any) -> None:
    """Free what a node has saved for a backward that has been: a hook takes the place of each tensor."""
    kind = type(node)
    if kind not in _SAVED:
        _SAVED[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    for name in _SAVED[kind]:
        with contextlib.suppress(RuntimeError):  # there is none, or it has hooks already
            saved = getattr(node, name)
            for one in saved if isinstance(saved, (tuple, list)) else (saved,):
                one.register_hooks(_nothing, _gone)


def _nothing(tensor: torch.Tensor) -> None:
    """What is kept in place of a tensor."""


def _gone(kept: None) -> torch.Tensor:
    raise RuntimeError("what this needs was let go")  # an internal error: nothing of a second half needs it


def _run(branch: _Branch, weights: list[nn.Parameter], *, keep: bool) -> None:
    edges = [edge for edge, _ in branch.roots]
    gradients: list[torch.Tensor] = [gradient for _, gradient in branch.roots]
    for node in branch.nodes:
        for number, gradient in enumerate(branch.arrived.get(id(node), ())):
            if gradient is not None:
                edges.append(GradientEdge(node, number))
                gradients.append(gradient)
    if not edges:
        return
    handles = []
    if len(branch.nodes) > 1:  # of two such nodes one may lie behind the other: what arrives there is known already
        for node in branch.nodes:
            known = branch.arrived.get(id(node))
            if known is not None:
                handles.append(node.register_prehook(lambda arriving, known=known: known))
    try:
        torch.autograd.backward(edges, gradients, retain_graph=keep, inputs=weights)
    finally:
        for handle in handles:
            handle.remove()


def _behind(roots: Iterable[Any]) -> dict[Any, list[Any]]:
    """For each node of a graph those that lead to it."""
    found: dict[Any, list[Any]] = {}
    left = deque(dict.fromkeys(roots))
    known = set(left)
    while left:
        node = left.popleft()
        for following, _ in node.next_functions:
            if following is None:
                continue
            found.setdefault(following, []).append(node)
            if following not in known:
                known.add(following)
                left.append(following)
    return found


def _above(nodes: Iterable[Any], behind: dict[Any, list[Any]], ends: Container[Any] = ()) -> set[Any]:
    """Every node from which one of `nodes` is reached, themselves included; nothing is looked for above `ends`."""
    found = set(nodes)
    left = [node for node in found if node not in ends]
    while left:
        for node in behind.get(left.pop(), ()):
            if node not in found:
                found.add(node)
                if node not in ends:
                    left.append(node)
    return found


def _below(nodes: Iterable[Any]) -> set[Any]:
    """Every node that is reached from one of `nodes`."""
    found: set[Any] = set()
    left = list(nodes)
    while left:
        for node, _ in left.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                left.append(node)
    return found
