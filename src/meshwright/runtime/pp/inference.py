"""Forwards outside of steps: all ranks of a pipeline run them together, and each point's owner tells the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from meshwright.runtime.pp.messages import broadcast_tensors
from meshwright.runtime.pp.points import Point
from meshwright.runtime.tensors import find_tensors

if TYPE_CHECKING:
    from meshwright.runtime.pp.apply import PipelineParallel

__all__ = ["Together"]


class Together:
    """Decides at each point: who has it runs it, and what others need of it is sent to them.

    Any parts of the model may be called, in any order, as long as all ranks of the pipeline call the same.

    Args:
        pipeline: of the model.
        group: the ranks of the pipeline.
        rank: this one's number among them.
        results: whether all ranks are told what the last points return, not only those that have the loss.
    """

    def __init__(
        self, pipeline: PipelineParallel, group: dist.ProcessGroup | None, rank: int, *, results: bool
    ) -> None:
        self._pipeline, self._group, self._rank, self._results = pipeline, group, rank, results
        self._calls: Counter[str] = Counter()

    def call(self, point: Point, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward comes to a point."""
        places = self._pipeline.assignment.places[point.name]
        stage = places[self._calls[point.name] % len(places)]
        self._calls[point.name] += 1
        owner = self._pipeline.ranks[stage]
        result = run(*args, **kwargs) if owner == self._rank else None
        if not self._pipeline.tells(point.name, results=self._results):
            if owner == self._rank:
                return result
            return self._pipeline.points.pass_by(point, args, kwargs, [])
        if owner == self._rank:
            broadcast_tensors(find_tensors(result), self._group, owner, self._pipeline.device)
            return result
        told = broadcast_tensors(None, self._group, owner, self._pipeline.device)
        return self._pipeline.points.pass_by(point, args, kwargs, told)
