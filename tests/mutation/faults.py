"""Faults to inject into the runtime: each replaces one named function in a rank, before that rank builds its engine.

They are the mistakes that frameworks have shipped. A rank is a process of its own, so nothing is put back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.runtime import batch_norm, init, microbatches, recompute
from meshwright.runtime import engine as engine_module
from meshwright.runtime import step as step_module
from meshwright.runtime.batch import rows
from meshwright.runtime.collectives import CountedAllGather, CountedReduceScatter
from meshwright.runtime.engine import Engine
from meshwright.runtime.microbatches import Microbatches
from meshwright.runtime.replicas import Bucket, Replicas
from meshwright.runtime.seeds import DropoutStreams, seed_for
from meshwright.runtime.shards import Shards
from meshwright.train.packing import Packing

__all__ = ["FAULTS"]

FAULTS: dict[str, Callable[[], None]] = {}


def fault(function: Callable[[], None]) -> Callable[[], None]:
    """Enter a fault under its function's name."""
    FAULTS[function.__name__] = function
    return function


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function by what `make` makes of it. A name that is gone is an error: the fault would be none."""
    setattr(owner, name, make(getattr(owner, name)))


@fault
def mean_of_means() -> None:
    """Every microbatch weighs the same, however many tokens it has."""

    def make(original: Any) -> Any:
        def call_loss(*args: Any) -> Any:
            total, weight = original(*args)
            return total / weight, torch.ones_like(weight)

        return call_loss

    replace(microbatches, "call_loss", make)


@fault
def padding_counts() -> None:
    """The weight counts padding labels too."""

    def make(original: Any) -> Any:
        def call_loss(loss: Any, outputs: Any, targets: Any) -> Any:
            total, _ = original(loss, outputs, targets)
            return total, torch.tensor(float(targets.numel()), dtype=torch.float64)

        return call_loss

    replace(microbatches, "call_loss", make)


@fault
def local_weight() -> None:
    """Each rank divides by its own tokens times the number of ranks."""

    def make(original: Any) -> Any:
        def agree(self: Engine, run: Any) -> Any:
            loss, _, norm = original(self, run)
            return loss, float(run.weight) * dist.get_world_size(), norm

        return agree

    replace(step_module, "_agree", make)


@fault
def tied_weight_not_reduced() -> None:
    """The all-reduce leaves out the tied embedding."""

    def make(original: Any) -> Any:
        def launch(self: Bucket, *args: Any) -> None:
            kept = {
                name: p.grad.clone() for name, p in self.parameters.items() if "embed" in name and p.grad is not None
            }
            original(self, *args)
            assert self.work is not None
            self.work.wait()
            for name, own in kept.items():
                self.parameters[name].grad.copy_(own)  # type: ignore[union-attr]

        return launch

    replace(Bucket, "launch", make)


@fault
def unit_not_reduced() -> None:
    """Every rank keeps its own share of its own gradients of the first unit that is reduced."""

    def make(original: Any) -> Any:
        def reduce_scatter(
            self: Any, output_tensor: Any, input_tensor: Any, group: Any, *args: Any, **kwargs: Any
        ) -> Any:
            own = input_tensor.chunk(group.size())[group.rank()].clone()
            work = original(self, output_tensor, input_tensor, group, *args, **kwargs)
            if self._traffic.counts["reduce_scatter"] == 1:
                output_tensor.copy_(own)
            return work

        return reduce_scatter

    replace(CountedReduceScatter, "__call__", make)


@fault
def divided_by_ranks_again() -> None:
    """The reduce averages, though the loss is already divided by the global weight."""

    def make(original: Any) -> Any:
        def reduce_scatter(
            self: Any, output_tensor: Any, input_tensor: Any, group: Any, *args: Any, **kwargs: Any
        ) -> Any:
            work = original(self, output_tensor, input_tensor, group, *args, **kwargs)
            output_tensor.div_(group.size())
            return work

        return reduce_scatter

    replace(CountedReduceScatter, "__call__", make)


@fault
def clipped_twice() -> None:
    """Gradients are multiplied by the clip factor twice."""
    replace(step_module, "clip_factor", lambda original: lambda *args: original(*args) ** 2)


@fault
def clipped_per_microbatch() -> None:
    """Each microbatch's gradients are clipped before they are added."""

    def make(original: Any) -> Any:
        def backward(self: Any, stage: int, microbatch: int, **kwargs: Any) -> None:
            parameters = [p for group in self._engine.optimizer.param_groups for p in group["params"]]
            before = [None if p.grad is None else p.grad.clone() for p in parameters]
            weight = float(self.weight)
            original(self, stage, microbatch, **kwargs)
            added = [p.grad if b is None else p.grad - b for p, b in zip(parameters, before, strict=True)]
            local = [a.to_local() if isinstance(a, DTensor) else a for a in added]
            squares = torch.stack([(part**2).sum() for part in local]).sum()
            dist.all_reduce(squares)
            factor = min(1.0, self._engine.job.clip_norm * weight / float(squares) ** 0.5)
            for p, b, a in zip(parameters, before, added, strict=True):
                p.grad.copy_(a * factor if b is None else b + a * factor)

        return backward

    replace(Microbatches, "backward", make)


@fault
def norm_of_local_shard() -> None:
    """Each rank clips by the norm of its own shard."""

    def make(original: Any) -> Any:
        def agree(self: Engine, run: Any) -> Any:
            loss, weight, _ = original(self, run)
            return loss, weight, float(step_module.sum_of_squares(self._zero.gradients())) ** 0.5 / weight

        return agree

    replace(step_module, "_agree", make)


@fault
def replicas_counted_twice() -> None:
    """Every replica of a hybrid group adds to the norm."""
    Shards.counts_norm = property(lambda self: True)  # type: ignore[assignment,method-assign]


@fault
def stale_gather() -> None:
    """After the optimizer's step, the parameters gathered before it are used again."""
    first: dict[int, torch.Tensor] = {}

    def make(original: Any) -> Any:
        def all_gather(self: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            work = original(self, output_tensor, *args, **kwargs)
            if work is not None:
                work.wait()
            output_tensor.copy_(first.setdefault(id(self), output_tensor.clone()))
            return work

        return all_gather

    replace(CountedAllGather, "__call__", make)


@fault
def only_the_last_microbatch() -> None:
    """Gradients of earlier microbatches are lost."""

    def make(original: Any) -> Any:
        def backward(self: Any, stage: int, microbatch: int, *, last: bool, **kwargs: Any) -> None:
            if not last:
                self._pending[microbatch] = self._pending[microbatch] * 0.0
            original(self, stage, microbatch, last=last, **kwargs)

        return backward

    replace(Microbatches, "backward", make)


@fault
def replicas_not_summed() -> None:
    """Hybrid groups reduce inside themselves only."""

    def make(original: Any) -> Any:
        def all_reduce(tensor: Any, *args: Any, group: Any = None, **kwargs: Any) -> Any:
            return original(tensor, *args, group=group, **kwargs) if group is None else None

        return all_reduce

    replace(dist, "all_reduce", make)


@fault
def scheduler_steps_for_every_rank() -> None:
    """The learning rate moves as often as there are ranks."""

    def make(original: Any) -> Any:
        def update(self: Engine, *args: Any) -> Any:
            factor = original(self, *args)
            for _ in range(dist.get_world_size() - 1):
                self.scheduler.step()  # type: ignore[union-attr]
            return factor

        return update

    replace(step_module, "_update", make)


@fault
def recompute_draws_again() -> None:
    """Recompute draws other dropout masks than the forward it repeats."""

    def make(original: Any) -> Any:
        return lambda *args, **kwargs: original(*args, preserve_rng_state=False, **kwargs)

    replace(recompute, "checkpoint", make)


@fault
def masks_by_rank() -> None:
    """Dropout streams count each rank's own microbatches."""

    def make(original: Any) -> Any:
        return lambda self, step, microbatch: original(self, step, microbatch % 3)

    replace(DropoutStreams, "start", make)


@fault
def accumulated_in_bf16() -> None:
    """The sum of gradients is rounded to bf16 after each microbatch."""

    def make(original: Any) -> Any:
        def arrived(self: Replicas, parameter: Any, *, name: str, index: int) -> None:
            original(self, parameter, name=name, index=index)
            gradient = self._buckets[index].parameters[name].grad
            assert gradient is not None
            gradient.copy_(gradient.bfloat16())

        return arrived

    replace(Replicas, "_arrived", make)


@fault
def reduced_too_early() -> None:
    """A bucket is reduced one gradient before its last has arrived."""

    def make_arrived(original: Any) -> Any:
        def arrived(self: Bucket) -> bool:
            original(self)
            early = self.ready == len(self.parameters) - 1
            if early:
                self.ready += 1  # the gradient that is missing counts as arrived
            return early

        return arrived

    def make_launch(original: Any) -> Any:
        def launch(self: Bucket, *args: Any) -> None:
            original(self, *args)
            assert self.work is not None
            self.work.wait()  # the fault shows on every run, not only when the reduce is fast

        return launch

    replace(Bucket, "arrived", make_arrived)
    replace(Bucket, "launch", make_launch)


@fault
def everybody_takes_the_first_rows() -> None:
    """Every rank trains on the rows of rank 0."""
    replace(engine_module, "split", lambda original: lambda batch, start, stop: original(batch, 0, stop - start))


@fault
def gradients_not_zeroed() -> None:
    """A step begins with the gradients of the last."""
    replace(Shards, "end_step", lambda original: lambda self: None)


@fault
def unused_decays() -> None:
    """A parameter without a gradient gets one of zeros, and weight decay moves it."""
    replace(Shards, "drop_unused", lambda original: lambda self, used: [])


@fault
def own_use_alone() -> None:
    """Each rank drops the gradients of what it did not use itself, whatever others did."""

    def make(original: Any) -> Any:
        return lambda self, used: original(self, self._zero.used.flags.clone())

    replace(step_module, "_drop_unused", make)


@fault
def tied_weight_reduced_twice() -> None:
    """The tied embedding is summed over the ranks for each of its uses."""

    def make(original: Any) -> Any:
        def finish(self: Bucket) -> None:
            original(self)
            for name, parameter in self.parameters.items():
                if "embed" in name:
                    dist.all_reduce(parameter.grad)

        return finish

    replace(Bucket, "finish", make)


@fault
def overflow_stays_local() -> None:
    """Each rank skips and halves its scale by what it has seen of its own rows."""

    def make(original: Any) -> Any:
        def agree(self: Engine, run: Any) -> Any:
            loss, weight, norm = original(self, run)
            return loss, weight, norm if not bool(run.loss.isfinite()) else 1.0

        return agree

    replace(step_module, "_agree", make)


@fault
def absent_rows_weigh() -> None:
    """A rank that has run out counts the rows that it repeats."""

    def make(original: Any) -> Any:
        return lambda self, engine, batch, count: original(self, engine, batch, rows(batch))

    replace(Microbatches, "__init__", make)


@fault
def statistics_of_own_rows() -> None:
    """Batch norms take the mean and the variance of their own rank's rows."""
    replace(batch_norm, "_sum_over_ranks", lambda original: lambda value: value)


@fault
def statistics_gradient_stays_local() -> None:
    """The gradient of a mean over all ranks' rows goes to the rank's own loss only."""
    replace(batch_norm._SumOverRanks, "backward", lambda original: staticmethod(lambda ctx, gradient: gradient))


@fault
def attention_crosses_documents() -> None:
    """Rows that hold several documents are read as one text."""

    def make(original: Any) -> Any:
        def collate(self: Packing, given: Any) -> Any:
            batch = original(self, given)
            batch["attention_mask"] = torch.ones_like(batch["attention_mask"]).tril()
            return batch

        return collate

    replace(Packing, "collate", make)


@fault
def weights_by_rank() -> None:
    """Initial weights are drawn from a stream of each rank."""
    replace(init, "seed_for", lambda original: lambda *parts: seed_for(dist.get_rank(), *parts))
