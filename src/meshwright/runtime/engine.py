"""Engine: the one object that a training script needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwright.errors import ConfigError
from meshwright.runtime.batch import rows, split, to_device
from meshwright.runtime.build import build
from meshwright.runtime.evaluation import evaluate_engine
from meshwright.runtime.export import export_model, read_tensor
from meshwright.runtime.factories import make_optimizer, make_scheduler
from meshwright.runtime.loss import LossFunction
from meshwright.runtime.loss_scale import LossScale
from meshwright.runtime.memory import bytes_of, state_storages
from meshwright.runtime.model_loss import ModelLoss, bind_loss
from meshwright.runtime.ranks import global_rank, host_group, join_ranks, local_device
from meshwright.runtime.report import StepReport
from meshwright.runtime.resume import load_engine, save_engine
from meshwright.runtime.same_batch import SameBatch
from meshwright.runtime.step import take_step
from meshwright.runtime.trace import Tracer
from meshwright.runtime.uneven import share_of, together, wrong_rows
from meshwright.schedule import Schedule, Timeline, make_schedule, single_stage
from meshwright.spec import Job, Strategy, require_executable

__all__ = ["Engine"]

_LOG = logging.getLogger("meshwright")


class Engine:
    """Trains a model by a strategy. Every rank builds one; together they take the steps of one process.

    Args:
        model: a module with real values (rank 0's are used), or a function that builds one: then no rank ever holds it
            whole, and initial values come from its init functions (`_init_weights(module)` or `reset_parameters()`),
            the seed and the module's name only, or from `weights`; what a constructor writes into them is not kept.
        loss: `(outputs, targets) -> (sum, weight)`, a `MeanLoss`, or a `ModelLoss`: the one that the model returns.
        optimizer: `parameters -> torch.optim.Optimizer`; called once, after sharding.
        job: global batch, dtypes, clipping, seed.
        strategy: how to run it; must be executable by this version.
        batch_scope: `"global"`: each rank is handed the whole global batch and takes its rows; `"local"`: each rank is
            handed its own rows, those of rank r being the r-th of dp equal parts of the global batch.
        scheduler: `optimizer -> LRScheduler`, stepped once for each optimizer step that is not skipped.
        blocks: names of the model's blocks in order, where they are not the children of a list module.
        device: this rank's device; its accelerator where there is one, by default.
        weights: safetensors (a file or a Hugging Face folder) with initial values. Each rank reads only its own slices;
            what they do not hold is named in the log and begins as without them.
        example: a batch as steps take them, of any number of rows, by which pipeline parallelism cuts the model: its
            forward is gone through once without computing. Not needed for Hugging Face models, nor for what takes
            tokens alone.
        sharding: how tensor parallelism divides modules, by name patterns (`*`: one part of a name): `colwise`,
            `rowwise`, `vocab`, `sequence`, `replicate` or `gather-output`; the rest as the model's own plan has it.
        measure_memory: count memory in the `"first"` two steps, in `"every"` step (slower), or `"never"`.

    Raises:
        ConfigError: the model, loss, optimizer, number of ranks or weights do not fit the job and strategy.
        CheckpointError: the weights cannot be read.
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
        weights: str | Path | None = None,
        sharding: Mapping[str, str] | None = None,
        example: Any = None,
        measure_memory: Literal["first", "every", "never"] = "first",
    ) -> None:
        require_executable(strategy, job)
        _require("batch_scope", batch_scope, ("global", "local"))
        _require("measure_memory", measure_memory, ("first", "every", "never"))
        self.job, self.strategy = job, strategy
        self.batch_scope = batch_scope
        self.device = local_device(device)
        join_ranks(self.device)
        #: This process's number among all; 0 is the one that prints.
        self.rank = global_rank()
        self._host_group = host_group(self.device)
        self.microbatches = strategy.microbatches(job.global_batch)
        built = build(
            model,
            job,
            strategy,
            self.device,
            blocks,
            self._host_group,
            weights,
            sharding,
            example,
            isinstance(loss, ModelLoss),
        )
        self.model, self._zero, self._dropout, self._traffic = built.model, built.zero, built.dropout, built.traffic
        self._pipeline = built.pipeline
        self._coupled, self._inside = built.coupled, False
        self._mesh, self._tp, self._shared = built.mesh, built.tp, SameBatch(built.mesh, self.device)
        #: Data-parallel ranks, and which of them this one is: what a sampler of local batches has to know.
        self.data_ranks, self.data_rank = built.mesh.dp, built.mesh.dp_rank
        self._loss_tried = False
        self._loss, self._own_loss = loss, bind_loss(loss, self.model)
        self._scale = LossScale(dynamic=job.compute_dtype == "float16")
        self.optimizer = make_optimizer(optimizer, self._trained(), strategy)
        self.scheduler = make_scheduler(scheduler, self.optimizer)
        self.schedule = self._make_schedule()
        self.steps_done = 0
        self.skipped_steps = 0
        self.samples_seen = 0
        self.unused_parameters: list[str] = []
        #: Called once a step with the reduced gradients (`parameter.grad` by global name), before they are clipped.
        self.on_gradients: Callable[[dict[str, torch.Tensor | None]], None] | None = None
        self._broken = False
        self._tracer: Tracer | None = None
        self._schedule_ended_s = 0.0
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
        mine = self._my_rows(self._shared.of(batch))
        return take_step(self, mine, rows(mine))

    def trace(self, batch: Any) -> tuple[StepReport, Timeline]:
        """As `step`, and when each rank of this one's pipeline did what; all ranks call it.

        On an accelerator every action is waited for, so such a step is slower than others.
        """
        self._tracer = tracer = Tracer(self._mesh)
        self._traffic.watch = tracer.collective
        try:
            report = self.step(batch)
        finally:
            self._tracer, self._traffic.watch = None, None
        return report, tracer.finish(self._schedule_ended_s)

    def steps(self, batches: Iterable[Any]) -> Iterator[StepReport]:
        """A step for each batch, until every rank has run out; the last ones may be shorter than the others.

        With `batch_scope="local"` ranks may be handed different numbers of batches, of any number of rows up to their
        share: what a rank lacks has no weight, so that losses and gradients are those of the rows that there are.

        Raises:
            ConfigError: a batch has more rows than a step takes, or some rank was handed no batch at all.
        """
        share, whole = self.job.global_batch // self.strategy.dp, self.batch_scope == "global"
        most = self.job.global_batch if whole else share
        for batch, count in together(
            batches, self._shared, self.device, least=most if self._coupled else 0, same=whole
        ):
            if count > most:
                raise wrong_rows(count, f"at most {most}", self.job, self.strategy, self.batch_scope)
            if whole and count:
                batch, count = share_of(batch, share, self._mesh.dp_rank)
            yield take_step(self, to_device(batch, self.device), count)

    def evaluate(self, batches: Iterable[Any]) -> float:
        """The loss over batches without training: all sums over the global weight.

        Ranks may be handed different numbers of batches with `batch_scope="local"`, or none.
        """
        return evaluate_engine(self, batches)

    @contextmanager
    def inference(self) -> Iterator[nn.Module]:
        """The model ready to be called outside of a step, in evaluation mode and without gradients.

        All ranks enter and leave together. Between, each calls the model, or parts of it, as often as it likes
        (`model.generate(...)`, say): under ZeRO-3 ranks that wait, or are done, help gathering what the others need.
        Calling `engine.model` without it would compute in another dtype, or leave parameters gathered.
        """
        if self._inside:
            yield self.model
            return
        self._require_whole()
        modes = {module: module.training for module in self.model.modules()}
        loose = {} if self._pipeline is None else {name: self._computed(name) for name in self._pipeline.points.loose}
        self.model.eval()
        self._zero.begin_evaluation()
        self._inside, reachable = True, True
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                if self._tp is not None:
                    stack.enter_context(self._tp.whole())
                if self._pipeline is not None:
                    stack.enter_context(self._pipeline.together(loose))
                yield self.model
        except BaseException as error:
            reachable = isinstance(error, Exception)  # interrupted, it waits for nobody
            raise
        finally:
            self._inside = False
            self._zero.end_evaluation(help_others=reachable)
            for module, mode in modes.items():
                module.training = mode
            self._traffic.take()

    def save(self, folder: str | Path, extra: dict[str, Any] | None = None) -> None:
        """Write a checkpoint that any strategy can load: weights, optimizer states, counters, learning rates.

        Args:
            folder: where; must not exist yet. Written aside and renamed when complete.
            extra: a JSON-able mapping of the caller's, returned by `load`.

        Raises:
            CheckpointError: it cannot be written.
        """
        self._require_whole()
        save_engine(self, Path(folder), extra or {})

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint, written by any strategy on any number of ranks.

        Returns:
            The `extra` mapping that was saved.

        Raises:
            CheckpointError: the folder is no complete checkpoint, or one of another model.
        """
        return load_engine(self, Path(folder))

    def export(self, folder: str | Path, *, max_shard_bytes: int = 5 * 2**30, dtype: torch.dtype | None = None) -> None:
        """Write the model for other tools: safetensors that `from_pretrained(folder)` loads; all ranks call it.

        Frozen weights and persistent buffers are in it, a tied weight once. Of a PEFT model only the adapters are
        written, for `PeftModel.from_pretrained(base, folder)`. The first rank writes, holding one tensor at a time.

        Args:
            folder: where; must not exist yet. Written aside and renamed when complete.
            max_shard_bytes: where one file would be larger, there are several and an index.
            dtype: of the parameters in the files; `job.param_dtype` where None.

        Raises:
            CheckpointError: it cannot be written.
        """
        self._require_whole()
        place, group = Path(folder), self._host_group
        export_model(self.model, self._zero, place, max_shard_bytes=max_shard_bytes, dtype=dtype, group=group)

    def read(self, name: str) -> torch.Tensor:
        """A whole parameter or buffer as it is stored, by its global name, on every rank; all call it.

        Raises:
            ConfigError: the model has none of that name.
        """
        self._require_whole()
        return read_tensor(self.model, self._zero, name)

    def bytes_at_rest(self) -> dict[str, int]:
        """Bytes this rank holds between steps, by category; each storage once."""
        return {kind: bytes_of(storages) for kind, storages in state_storages(self.model, self.optimizer).items()}

    def _computed(self, name: str) -> torch.Tensor:
        """A whole parameter as forwards compute with it."""
        whole = self.read(name)
        return whole.to(getattr(torch, self.job.compute_dtype)) if whole.is_floating_point() else whole

    def _trained(self) -> list[nn.Parameter]:
        """What the optimizer is built over, in the model's order; a rank whose stages are frozen has an empty one."""
        own = {id(parameter) for parameter in self._zero.stored.values()}
        found = [parameter for parameter in self.model.parameters() if parameter.requires_grad and id(parameter) in own]
        return found or [nn.Parameter(torch.zeros(0, device=self.device))]

    def _make_schedule(self) -> Schedule:
        strategy = self.strategy
        if self._pipeline is None:
            return single_stage(
                zero=strategy.zero,
                shard=strategy.shard,
                dp=strategy.dp,
                microbatches=self.microbatches,
                units=len(self._zero.units),
            )
        return make_schedule(
            strategy.schedule,
            ranks=strategy.pp,
            virtual_stages=strategy.virtual_stages,
            microbatches=self.microbatches,
            units=self._pipeline.unit_counts(self._zero),
            zero=strategy.zero,
            shard=strategy.shard,
            dp=strategy.dp,
            gather=strategy.gather,
            reduce=strategy.reduce,
        )

    def _my_rows(self, batch: Any) -> Any:
        found, share = rows(batch), self.job.global_batch // self.strategy.dp
        expected = self.job.global_batch if self.batch_scope == "global" else share
        if found != expected:
            raise wrong_rows(found, f"expected {expected}", self.job, self.strategy, self.batch_scope)
        if self.batch_scope == "global":
            batch = split(batch, self._mesh.dp_rank * share, (self._mesh.dp_rank + 1) * share)
        return to_device(batch, self.device)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's stored parameters by global name (tied ones once): DTensors where they are sharded."""
        return dict(self._zero.stored)

    def _require_whole(self) -> None:
        if self._broken:
            raise ConfigError(
                "a step of this engine has failed before",
                why="it left gradients or parameters half done, on this rank or on others",
                fix="build a new Engine on all ranks and load the last checkpoint",
            )


def _require(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(
            f"{name}={value!r} is not known", why=f"it is one of {', '.join(choices)}", fix="use one of them"
        )
