"""The backward in two halves: what a stage's inputs need first, what its weights need later.

The first half goes from the outputs to the inputs and remembers, at every node of that path from which a weight
branches off, the gradient that arrived there. The second half starts at those nodes, weight by weight, so that what the
first half has computed is not computed again. (After Qi et al., Zero Bubble Pipeline Parallelism, 2024.)
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = ["Deferred", "backward_input"]


@dataclass
class _Branch:
    """Weights that branch off at the same node, and the gradients that arrived there."""

    weights: list[nn.Parameter]
    node: Any
    arrived: tuple[torch.Tensor | None, ...] = ()


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
                kept.append(_Branch(others, branch.node, branch.arrived))
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
    path = _above([get_gradient_edge(tensor).node for tensor in inputs], behind)
    groups: dict[frozenset[Any], list[nn.Parameter]] = defaultdict(list)
    for weight in weights:
        nodes = _reached(accumulators[id(weight)], path, behind)
        if nodes:
            groups[frozenset(nodes)].append(weight)
    # A weight that branches off at several nodes would be reached from one through the others, the path between them
    # included: it gets its gradient at once.
    often = [weight for nodes, group in groups.items() if len(nodes) > 1 for weight in group]
    branches = [_Branch(group, next(iter(nodes))) for nodes, group in groups.items() if len(nodes) == 1]
    handles = []
    for branch in branches:

        def keep(arriving: Any, branch: _Branch = branch) -> None:
            branch.arrived = tuple(arriving)

        handles.append(branch.node.register_prehook(keep))
    try:
        torch.autograd.backward(roots, gradients, retain_graph=True, inputs=[*inputs, *now, *often])
    finally:
        for handle in handles:
            handle.remove()
    return Deferred(branches)


def _run(branch: _Branch, weights: list[nn.Parameter], *, keep: bool) -> None:
    pairs = [
        (GradientEdge(branch.node, n), gradient) for n, gradient in enumerate(branch.arrived) if gradient is not None
    ]
    if pairs:
        edges, gradients = zip(*pairs, strict=True)
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


def _above(nodes: Iterable[Any], behind: dict[Any, list[Any]]) -> set[Any]:
    """Every node from which one of `nodes` is reached, themselves included."""
    found = set(nodes)
    left = list(found)
    while left:
        for node in behind.get(left.pop(), ()):
            if node not in found:
                found.add(node)
                left.append(node)
    return found


def _reached(weight: Any, path: set[Any], behind: dict[Any, list[Any]]) -> list[Any]:
    """The first nodes of the path on the ways from a weight upwards."""
    found: dict[Any, None] = {}
    seen, left = {weight}, [weight]
    while left:
        for node in behind.get(left.pop(), ()):
            if node in path:
                found[node] = None
            elif node not in seen:
                seen.add(node)
                left.append(node)
    return list(found)
