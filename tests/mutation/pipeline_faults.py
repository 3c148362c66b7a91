"""Faults of pipelining, to be injected like those of `faults.py`."""

from __future__ import annotations

from typing import Any

from meshwright.runtime.pp.run import PipelineRun
from meshwright.runtime.pp.staged import StagedZero
from tests.mutation.faults import fault, replace

__all__: list[str] = []


@fault
def microbatch_dropped() -> None:
    """The first microbatch counts in the loss and not in the gradients."""

    def make(original: Any) -> Any:
        def starts(self: PipelineRun, stage: int, microbatch: int, flight: Any) -> Any:
            roots, gradients = original(self, stage, microbatch, flight)
            return roots, [gradient * (microbatch > 0) for gradient in gradients]

        return starts

    replace(PipelineRun, "_starts", make)


@fault
def divided_by_microbatches_again() -> None:
    """Each microbatch's gradient is divided by their number, though the sum is divided by all tokens."""
    replace(
        PipelineRun,
        "_scaled",
        lambda original: lambda self, total: original(self, total) / self._engine.microbatches,
    )


@fault
def tied_stages_not_summed() -> None:
    """The first and the last stage keep their own gradients of a tied weight."""

    def make(original: Any) -> Any:
        def finish(self: StagedZero) -> None:
            self._shared = []
            original(self)

        return finish

    replace(StagedZero, "finish_reduces", make)


@fault
def tied_stages_counted_twice() -> None:
    """The norm counts a tied weight on each stage that has it."""

    def make(original: Any) -> Any:
        def counted(self: StagedZero) -> Any:
            for entry in self._shared:
                entry.first = True
            return original(self)

        return counted

    replace(StagedZero, "counted", make)


@fault
def norm_of_one_stage() -> None:
    """The norm is that of the first rank's stages."""

    def make(original: Any) -> Any:
        return lambda self: original(self) if self.mesh.pp_rank == 0 else {}

    replace(StagedZero, "counted", make)


@fault
def second_copy_stays_old() -> None:
    """Of a tied weight with two stages on one rank only the first stage's is updated."""
    replace(StagedZero, "refresh_copies", lambda original: lambda self: None)
