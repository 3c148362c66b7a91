"""Engine: the one object that a training script needs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwright.errors import CheckpointError, ConfigError
from meshwright.runtime.batch import call_model, count_tokens, rows, split, to_device
from meshwright.runtime.build import build
from meshwright.runtime.checkpoint import load_checkpoint, read_manifest, save_checkpoint, stored
from meshwright.runtime.gradients import clip_factor, scale, sum_of_squares
from meshwright.runtime.loss import LossFunction, call_loss
from meshwright.runtime.memory import MemoryMeter, bytes_of, state_storages
from meshwright.runtime.player import play
from meshwright.runtime.ranks import global_rank, host_group, join_ranks, local_device, world_size
from meshwright.runtime.report import StepReport
from meshwright.runtime.seeds import preserved_random_state
from meshwright.runtime.state import allocate_optimizer_states, group_options, named_states, restore_group_options
from meshwright.schedule import single_stage
from meshwright.spec import Job, Strategy, require_executable

__all__ = ["Engine"]

_LOG = logging.getLogger("meshwright")


class Engine:
    """Trains a model by a strategy. Every rank builds one; together they take the steps of one process.

    Args:
        model: a module with real values (rank 0's are used), or a function that builds one: then no rank ever holds it
            whole, and initial values depend on the seed and the module's name only.
        loss: `(outputs, targets) -> (sum, weight)`, or a `MeanLoss`.
        optimizer: `parameters -> torch.optim.Optimizer`; called once, after sharding.
        job: global batch, dtypes, clipping, seed.
        strategy: how to run it; must be executable by this version.
        batch_scope: `"global"`: each rank is handed the whole global batch and takes its rows; `"local"`: each rank is
            handed its own rows, those of rank r being the r-th of dp equal parts of the global batch.
        scheduler: `optimizer -> LRScheduler`, stepped once for each optimizer step that is not skipped.
        blocks: names of the model's blocks in order, where they are not the children of a list module.
        device: this rank's device; its accelerator where there is one, by default.
        measure_memory: count memory in the `"first"` two steps, in `"every"` step (slower), or `"never"`.

    Raises:
        ConfigError: the model, loss, optimizer or number of ranks does not fit the job and strategy.
        UnsupportedCombination: the strategy is legal but not executable yet.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        loss: LossFunction,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        job: Job,
        strategy: Strategy,
        *,
        batch_scope: Literal["global", "local"] = "global",
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        blocks: Sequence[str] | None = None,
        device: torch.device | str | None = None,
        measure_memory: Literal["first", "every", "never"] = "first",
    ) -> None:
        require_executable(strategy, job)
        if batch_scope not in ("global", "local"):
            raise ConfigError(f"batch_scope={batch_scope!r}", why="it is 'global' or 'local'", fix="use one of them")
        self.job, self.strategy = job, strategy
        self.batch_scope = batch_scope
        self.device = torch.device(device) if device is not None else local_device()
        join_ranks(self.device)
        self._host_group = host_group(self.device)
        self.microbatches = strategy.microbatches(job.global_batch)
        built = build(model, job, strategy, self.device, blocks)
        self.model, self._zero, self._dropout, self._traffic = built.model, built.zero, built.dropout, built.traffic
        self._loss = loss
        self.optimizer = _make_optimizer(optimizer, self.model)
        self.scheduler = scheduler(self.optimizer) if scheduler is not None else None
        self.schedule = single_stage(
            zero=strategy.zero,
            shard=strategy.shard,
            dp=strategy.dp,
            microbatches=self.microbatches,
            units=len(self._zero.units),
        )
        self.steps_done = 0
        self.skipped_steps = 0
        self.samples_seen = 0
        self.unused_parameters: list[str] = []
        #: Called once a step with the reduced gradients (`parameter.grad` by global name), before they are clipped.
        self.on_gradients: Callable[[dict[str, torch.Tensor | None]], None] | None = None
        self._measure = measure_memory
        self._measured_steps = 0
        self._peak_bytes: dict[str, int] = {}
        #: The largest bytes of each category at any counted moment of the last measured step.
        self.category_peaks: dict[str, int] = {}

    def step(self, batch: Any) -> StepReport:
        """One optimizer step over one global batch.

        Args:
            batch: a pair `(inputs, targets)` or a mapping, see `batch.call_model`; every tensor's first dim counts
                sequences: `global_batch` of them, or this rank's share with `batch_scope="local"`.

        Raises:
            ConfigError: the batch has another number of sequences, or the loss breaks its contract.
        """
        begin = time.perf_counter()
        mine = self._my_rows(batch)
        self.model.train()
        run = _Microbatches(self, mine)
        measured = self._measure == "every" or (self._measure == "first" and self._measured_steps < 2)
        meter = MemoryMeter(self.model, self.optimizer, self._zero) if measured else None
        if measured and self.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self.device)
        with preserved_random_state(self.device), meter or nullcontext():
            self._zero.begin_step()
            run.meter = meter
            play(self.schedule, 0, run)
            self._dropout.stop()
            self._zero.finish_reduces()
        loss, weight, norm = self._agree(run)
        skipped = not (weight > 0 and torch.isfinite(torch.tensor(norm)))
        factor = 1.0
        if not skipped:
            factor = self._update(weight, norm)
        self._zero.end_step()
        self._note_measurement(meter)
        self.steps_done += 1
        self.skipped_steps += skipped
        self.samples_seen += self.job.global_batch
        return StepReport(
            step=self.steps_done,
            loss=loss,
            weight=weight,
            grad_norm=norm,
            clipped_norm=norm * factor,
            skipped=skipped,
            tokens=count_tokens(mine) * self.strategy.dp,
            step_s=time.perf_counter() - begin,
            peak_bytes=dict(self._peak_bytes),
            collectives=self._traffic.take(),
        )

    def evaluate(self, batches: Iterable[Any]) -> float:
        """The loss over batches without training: all sums over the global weight.

        Ranks may be handed different numbers of batches with `batch_scope="local"`: those that have run out go on
        taking part in gathers until the last one has.
        """
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        was_training = self.model.training
        self.model.eval()
        self._zero.begin_evaluation()
        try:
            with torch.no_grad():
                for batch, counts in self._evaluation_parts(batches):
                    outputs, targets = call_model(self.model, batch)
                    total, weight = call_loss(self._loss, outputs, targets)
                    if counts:
                        totals += torch.stack([total.double(), weight])
        finally:
            self._zero.end_evaluation()
            self.model.train(was_training)
            self._traffic.take()
        if world_size() > 1:
            dist.all_reduce(totals)
        return float(totals[0] / totals[1])

    def save(self, folder: str | Path, extra: dict[str, Any] | None = None) -> None:
        """Write a checkpoint that any strategy can load: weights, optimizer states, counters, learning rates.

        Args:
            folder: where; must not exist yet. Written aside and renamed when complete.
            extra: a JSON-able mapping of the caller's, returned by `load`.

        Raises:
            CheckpointError: it cannot be written.
        """
        manifest = {
            "engine": {
                "steps_done": self.steps_done,
                "skipped_steps": self.skipped_steps,
                "samples_seen": self.samples_seen,
                "seed": self.job.seed,
                "strategy": str(self.strategy),
                "groups": group_options(self.optimizer),
                "scheduler": _scheduler_state(self.scheduler),
            },
            "extra": extra or {},
        }
        save_checkpoint(Path(folder), named_states(self.model, self.optimizer), manifest, group=self._host_group)

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint, written by any strategy on any number of ranks.

        Returns:
            The `extra` mapping that was saved.

        Raises:
            CheckpointError: the folder is no complete checkpoint, or one of another model.
        """
        place = Path(folder)
        engine = read_manifest(place).get("engine")
        if not isinstance(engine, dict):
            raise CheckpointError(f"{place} was not written by Engine.save", fix="give a checkpoint of a training run")
        allocate_optimizer_states(self.model, self.optimizer, stored(place))
        manifest = load_checkpoint(place, named_states(self.model, self.optimizer), group=self._host_group)
        restore_group_options(self.optimizer, engine["groups"])
        if self.scheduler is not None and engine["scheduler"] is not None:
            self.scheduler.load_state_dict(engine["scheduler"])
        self.steps_done, self.skipped_steps = engine["steps_done"], engine["skipped_steps"]
        self.samples_seen = engine["samples_seen"]
        self._measured_steps = 0
        extra: dict[str, Any] = manifest["extra"]
        return extra

    def bytes_at_rest(self) -> dict[str, int]:
        """Bytes this rank holds between steps, by category; each storage once."""
        return {kind: bytes_of(storages) for kind, storages in state_storages(self.model, self.optimizer).items()}

    def _my_rows(self, batch: Any) -> Any:
        found, share = rows(batch), self.job.global_batch // self.strategy.dp
        expected = self.job.global_batch if self.batch_scope == "global" else share
        if found != expected:
            raise ConfigError(
                f"the batch has {found} sequences, expected {expected}",
                why=f"global_batch={self.job.global_batch}, dp={self.strategy.dp}, batch_scope={self.batch_scope!r}",
                fix="make batches of that size, or change job.global_batch",
            )
        if self.batch_scope == "global":
            batch = split(batch, global_rank() * share, (global_rank() + 1) * share)
        return to_device(batch, self.device)

    def _agree(self, run: _Microbatches) -> tuple[float, float, float]:
        """The step's loss, global weight and gradient norm over all ranks, by one small all-reduce."""
        used = self._zero.used.flags
        values = torch.zeros(3 + len(used), dtype=torch.float64, device=self.device)
        values[0], values[1] = run.loss, run.weight
        if self._zero.counts_norm:
            values[2] = sum_of_squares(self._zero.gradients())
        values[3:] = used
        if world_size() > 1:
            self._traffic.count("statistics")
            dist.all_reduce(values)
        self._drop_unused(values[3:])
        loss, weight, squares = values[:3].tolist()
        if weight <= 0:
            return float("nan"), weight, float("nan")
        return loss / weight, weight, squares**0.5 / weight

    def _update(self, weight: float, norm: float) -> float:
        """Divide by the global weight, clip once, step the optimizer; the clip factor."""
        gradients = self._zero.gradients()
        scale(gradients.values(), 1.0 / weight)
        if self.on_gradients is not None:
            self.on_gradients({name: parameter.grad for name, parameter in self.named_parameters().items()})
        factor = clip_factor(norm, self.job.clip_norm)
        scale(gradients.values(), factor)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return factor

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's stored parameters by global name (tied ones once): DTensors where they are sharded."""
        return dict(self._zero.stored)

    def _drop_unused(self, used: torch.Tensor) -> None:
        unused = self._zero.drop_unused(used.cpu())
        if unused and unused != self.unused_parameters and global_rank() == 0:
            _LOG.warning(
                "step %d: %d parameters took no part on any rank and keep no gradient: %s",
                self.steps_done + 1,
                len(unused),
                ", ".join(unused[:8]),
            )
        self.unused_parameters = unused

    def _evaluation_parts(self, batches: Iterable[Any]) -> Iterable[tuple[Any, bool]]:
        """Microbatches to run and whether each counts; every rank runs equally many."""
        size = self.strategy.microbatch
        if self.batch_scope == "global":
            for batch in batches:
                total = rows(batch)
                share = -(-total // self.strategy.dp)
                start = min(global_rank() * share, total)
                stop = min(start + share, total)
                for offset in range(0, share, size):
                    first, last = start + offset, min(start + offset + size, stop)
                    part = split(batch, first, last) if first < last else split(batch, 0, 1)
                    yield to_device(part, self.device), first < last
            return
        yield from self._local_evaluation_parts(batches, size)

    def _local_evaluation_parts(self, batches: Iterable[Any], size: int) -> Iterable[tuple[Any, bool]]:
        own = (split(b, i, min(i + size, rows(b))) for b in batches for i in range(0, rows(b), size))
        latest: Any = None
        while True:
            part = next(own, None)
            waiting = torch.tensor(float(part is not None), device=self.device)
            if world_size() > 1:
                dist.all_reduce(waiting)
            if waiting == 0:
                return
            if part is None and latest is None:
                raise ConfigError(
                    f"rank {global_rank()} was handed no evaluation batch while others were",
                    why="a rank without any batch cannot take part in the others' gathers",
                    fix="hand every rank at least one batch",
                )
            latest = part if part is not None else latest
            yield to_device(latest, self.device), part is not None

    def _note_measurement(self, meter: MemoryMeter | None) -> None:
        if meter is None:
            return
        self._measured_steps += 1
        self._peak_bytes, self.category_peaks = dict(meter.peak), dict(meter.largest)
        if self.device.type != "cpu":
            self._peak_bytes["allocator"] = torch.accelerator.max_memory_allocated(self.device)


class _Microbatches:
    """The engine's model as a playable stage over one step's microbatches."""

    def __init__(self, engine: Engine, batch: Any) -> None:
        self._engine = engine
        self._batch = batch
        self._pending: dict[int, torch.Tensor] = {}
        self.loss = torch.zeros((), dtype=torch.float64, device=engine.device)
        self.weight = torch.zeros((), dtype=torch.float64, device=engine.device)
        self.meter: MemoryMeter | None = None

    def forward(self, microbatch: int, *, release: bool) -> None:
        """Run a microbatch forward and keep its loss for backward."""
        engine, size = self._engine, self._engine.strategy.microbatch
        engine._zero.before_forward(release=release)
        engine._dropout.start(engine.steps_done, global_rank() * engine.microbatches + microbatch)
        part = split(self._batch, microbatch * size, (microbatch + 1) * size)
        outputs, targets = call_model(engine.model, part)
        total, weight = call_loss(engine._loss, outputs, targets)
        self.loss += total.detach().double()
        self.weight += weight
        self._pending[microbatch] = total
        if self.meter is not None:
            self.meter.note()

    def backward(self, microbatch: int, *, reduce: bool, release: bool, last: bool) -> None:
        """Run its backward: gradients of the sum, divided by the global weight once it is known."""
        self._engine._zero.before_backward(reduce=reduce, release=release, last=last)
        self._pending.pop(microbatch).backward()


def _make_optimizer(factory: Any, model: nn.Module) -> Optimizer:
    if isinstance(factory, Optimizer):
        raise ConfigError(
            f"an optimizer that is already built ({type(factory).__name__})",
            why="it holds the parameters from before sharding, so it would train nothing",
            fix="pass a function: optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)",
        )
    if not callable(factory):
        raise ConfigError(
            f"optimizer of type {type(factory).__name__}", fix="pass a function of parameters that returns an optimizer"
        )
    made = factory([parameter for parameter in model.parameters() if parameter.requires_grad])
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"the optimizer function returned a {type(made).__name__}", fix="return a torch.optim.Optimizer"
        )
    return made


def _scheduler_state(scheduler: LRScheduler | None) -> dict[str, Any] | None:
    if scheduler is None:
        return None
    state = scheduler.state_dict()
    return {key: value for key, value in state.items() if isinstance(value, (int, float, str, bool, list))}
