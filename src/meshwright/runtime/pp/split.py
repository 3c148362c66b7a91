"""The backward in two halves: what a stage's inputs need first, what its weights need later.

The first half goes from the outputs to the inputs and remembers, at every node of that path from which a weight
branches off, the gradient that arrived there. The second half starts at those nodes, weight by weight, so that what the
first half has computed is not computed again; what the nodes between them had saved is let go. (After Qi et al., Zero
Bubble Pipeline Parallelism, 2024.)
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.runtime._torch import let_go, order_of

__all__ = ["Deferred", "backward_input"]


@dataclass
class _Branch:
    """Weights that branch off at one place: a node of the path, or roots that lead to no input.

    Attributes:
        node: of the path; None for roots.
        starts: where their backward starts, and with which gradients: the roots, or what arrived at the node.
    """

    weights: list[nn.Parameter]
    node: Any
    starts: list[tuple[GradientEdge, torch.Tensor]]


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
                kept.append(_Branch(others, branch.node, branch.starts))
            else:  # what it holds is not needed for those that follow
                branch.node, branch.starts = None, []
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
        now: weights that get theirs at once, as do those of `weights` that are used in several places.
    """
    accumulators = {id(weight): get_gradient_edge(weight).node for weight in weights}
    behind = _behind([edge.node for edge in roots])
    path = _above([get_gradient_edge(tensor).node for tensor in (*inputs, *now)], behind)
    apart = defaultdict(list)
    for edge, gradient in zip(roots, gradients, strict=True):
        if edge.node not in path:
            apart[edge.node].append((edge, gradient))
    groups: dict[frozenset[Any], list[nn.Parameter]] = defaultdict(list)
    for weight in weights:
        above = _above([accumulators[id(weight)]], behind, path)
        groups[frozenset(above & (path | apart.keys()))].append(weight)
    # A weight that branches off in several places would be reached from one through the others, with the path between
    # them: it gets its gradient at once.
    often = [weight for places, group in groups.items() if len(places) > 1 for weight in group]
    branches = [
        _Branch(group, None if place in apart else place, list(apart.get(place, ())))
        for place, group in ((next(iter(places)), group) for places, group in groups.items() if len(places) == 1)
    ]
    # Nodes run in the order of their numbers, the last made first: at one of them all with higher numbers have run.
    kept = {branch.node for branch in branches}
    passing = deque(sorted((node for node in path if node not in kept), key=order_of, reverse=True))
    handles = [b.node.register_prehook(partial(_keep, b, passing)) for b in branches if b.node is not None]
    try:
        if path or often:
            torch.autograd.backward(roots, gradients, retain_graph=True, inputs=[*inputs, *now, *often])
    finally:
        for handle in handles:
            handle.remove()
    for node in passing:
        let_go(node)
    return Deferred(branches)


def _keep(branch: _Branch, passing: deque[Any], arriving: Sequence[torch.Tensor | None]) -> None:
    found = ((GradientEdge(branch.node, number), gradient) for number, gradient in enumerate(arriving))
    branch.starts = [(edge, gradient) for edge, gradient in found if gradient is not None]
    while passing and order_of(passing[0]) > order_of(branch.node):
        let_go(passing.popleft())


def _run(branch: _Branch, weights: list[nn.Parameter], *, keep: bool) -> None:
    if branch.starts:
        edges, gradients = zip(*branch.starts, strict=True)
        torch.autograd.backward(edges, gradients, retain_graph=keep, inputs=weights)


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
