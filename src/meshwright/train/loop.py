"""Training on one rank: build the engine, take the steps, evaluate, save, and tell global rank 0's reader about it."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from meshwright.cost.simulated import simulated_step
from meshwright.errors import DataError
from meshwright.models import Decoder, token_loss
from meshwright.report.trace import write_trace
from meshwright.runtime import Engine, StepReport, global_rank, join_ranks, local_device, world_size
from meshwright.spec import Plan
from meshwright.spec.decoder import described
from meshwright.spec.files import read_noun
from meshwright.spec.job_file import DataSpec, JobFile, TrainSpec
from meshwright.train.data import ByteCorpus
from meshwright.train.folder import RunFolder
from meshwright.train.model import decoder_config, saved_extra
from meshwright.train.optim import learning_rate_factor, optimizer_factory, scheduler_factory
from meshwright.train.progress import ProgressView, StepView
from meshwright.train.same_run import describe_run, require_same_run
from meshwright.train.samples import Samples

__all__ = ["Trainer", "train_rank"]

#: Steps before the one that is traced.
_WARM = 2


def train_rank(
    folder: RunFolder,
    *,
    resume: Path | None = None,
    on_begin: Callable[[int], None] = lambda step: None,
    on_step: Callable[[Trainer, StepReport], None] = lambda trainer, report: None,
    console: Console | None = None,
) -> None:
    """Train as this rank of the run that `folder` describes (its plan.toml and job.toml) until its last step.

    Args:
        folder: prepared by the launcher.
        resume: a complete checkpoint to go on from.
        on_begin: called with the number (from 1) of each step before it is taken.
        on_step: called after each step, before it is evaluated or saved.
        console: where global rank 0 shows its progress; standard output by default.

    Raises:
        MeshwrightError: the corpus, the checkpoint or the strategy cannot be used.
    """
    plan = read_noun(Plan, folder.plan)
    job_file = read_noun(JobFile, folder.job)
    device = local_device(plan.cluster.device_kind)
    join_ranks(device, timeout_s=job_file.train.timeout_s)
    trainer = Trainer(folder, plan, job_file.data, job_file.train, resume, device)
    trainer.run(on_begin, on_step, console or Console())
    if dist.is_initialized():
        # No rank leaves before the last has done its part; who is gone early looks like a failure.
        dist.barrier()


class Trainer:
    """One rank of a run."""

    def __init__(
        self, folder: RunFolder, plan: Plan, data: DataSpec, train: TrainSpec, resume: Path | None, device: torch.device
    ) -> None:
        self.folder, self.plan, self.data, self.train = folder, plan, data, train
        job = plan.job
        self.corpus = ByteCorpus(data.path, sequence=job.sequence, validation_every=data.validation_every)
        _require_same_corpus(self.corpus)
        mine = plan.strategy.data_rank(global_rank())  # those that share a model see the same rows
        self.samples = Samples(self.corpus, seed=job.seed, rank=mine, dp=plan.strategy.dp)
        config = decoder_config(plan.decoder)
        self.engine = Engine(
            lambda: Decoder(config),
            token_loss,
            optimizer_factory(job.optimizer),
            job,
            plan.strategy,
            batch_scope="local",
            scheduler=scheduler_factory(job.optimizer, train.steps),
            device=device,
            example=self.samples.batch(range(1)),
        )
        if resume is not None:
            self._load(resume)
        #: The number of the step that is traced: one whose first-time work is done, where there are so many.
        self._trace_step = min(self.engine.steps_done + _WARM + 1, train.steps) if train.trace else 0
        self.validation_loss: float | None = None
        self._last: StepReport | None = None

    def run(
        self, on_begin: Callable[[int], None], on_step: Callable[[Trainer, StepReport], None], console: Console
    ) -> None:
        """Take the steps that are left."""
        leads = global_rank() == 0
        begun = time.perf_counter()
        first = self.engine.steps_done
        if leads:
            self.folder.keep_metrics_until(first)
        quiet = console if leads else Console(quiet=True)
        with (
            open(self.folder.metrics if leads else os.devnull, "a", encoding="utf-8") as metrics,
            ProgressView(self.train.steps, first, quiet) as view,
            _warnings_to(view),
        ):
            while self.engine.steps_done < self.train.steps:
                on_begin(self.engine.steps_done + 1)
                report, line = self._step()
                self._last = report
                on_step(self, report)
                note = self._evaluate(report.step, line)
                # Before the checkpoint: who goes on from it must find the lines of all steps up to it.
                metrics.write(json.dumps(line) + "\n")
                metrics.flush()
                view.step(_view(report, line["tokens_per_s"]))
                if note:
                    view.note(note)
                if report.step == self.train.steps or report.step % self.train.checkpoint_every == 0:
                    self.save()
        peak = self._largest_peak()
        if leads:
            self._write_result(time.perf_counter() - begun, self.engine.steps_done - first, peak)

    def _step(self) -> tuple[StepReport, dict[str, Any]]:
        """One optimizer step: its report and its line of metrics."""
        begun = time.perf_counter()
        engine = self.engine
        learning_rate = engine.optimizer.param_groups[0]["lr"]
        batch = self.samples.batch(self.samples.numbers(engine.samples_seen, engine.job.global_batch))
        report = self._traced(batch) if engine.steps_done + 1 == self._trace_step else engine.step(batch)
        line = {
            "step": report.step,
            "loss": _finite(report.loss),
            "grad_norm": _finite(report.grad_norm),
            "clipped_norm": _finite(report.clipped_norm),
            "learning_rate": learning_rate,
            "tokens": report.tokens,
            "samples_seen": engine.samples_seen,
            "tokens_per_s": report.tokens / (time.perf_counter() - begun),
            "step_s": report.step_s,
            "skipped": report.skipped,
            "memory_bytes": report.peak_bytes,
            "collectives": report.collectives,
        }
        return report, line

    def _traced(self, batch: Any) -> StepReport:
        """A step whose timeline is written beside the simulated one."""
        report, executed = self.engine.trace(batch)
        if global_rank() == 0:
            simulated = simulated_step(self.plan, described(self.plan.decoder)).timeline
            write_trace(Path(self.train.trace), [executed, simulated])
        return report

    def _evaluate(self, step: int, line: dict[str, Any]) -> str:
        """Evaluate where it is due, and note it in the step's line; what to show of it."""
        last = step == self.train.steps
        if not (last or step % self.train.evaluate_every == 0) or not self.corpus.validation_windows:
            return ""
        batches = self.samples.validation(self.train.evaluate_samples, self.plan.strategy.microbatch)
        self.validation_loss = self.engine.evaluate(batches)
        line["validation_loss"] = _finite(self.validation_loss)
        return "" if last else f"step {step}: validation loss {self.validation_loss:.4f}"

    def save(self) -> None:
        """Write a checkpoint of the current step and remove the oldest."""
        self.engine.save(
            self.folder.checkpoint(self.engine.steps_done), describe_run(self.plan, self.data, self.corpus)
        )
        if global_rank() == 0:
            self.folder.prune_checkpoints(self.train.keep_checkpoints)

    def _load(self, checkpoint: Path) -> None:
        """Go on from a checkpoint. What the job says of the optimizer holds from now on, also where it has changed."""
        fresh = [{key: value for key, value in group.items() if key != "params"} for group in self._groups()]
        require_same_run(checkpoint, saved_extra(checkpoint), describe_run(self.plan, self.data, self.corpus))
        self.engine.load(checkpoint)
        scheduler = self.engine.scheduler
        assert scheduler is not None, "the trainer always schedules the learning rate"
        spec = self.plan.job.optimizer
        factor = learning_rate_factor(spec, scheduler.last_epoch, self.train.steps)
        scheduler.base_lrs = [spec.learning_rate for _ in fresh]
        for group, options in zip(self._groups(), fresh, strict=True):
            group.update(options, lr=spec.learning_rate * factor, initial_lr=spec.learning_rate)

    def _groups(self) -> list[dict[str, Any]]:
        return self.engine.optimizer.param_groups

    def _largest_peak(self) -> dict[str, int]:
        """The bytes of the rank that holds most: pipeline ranks differ, and a plan tells of the fullest."""
        mine = self._last.peak_bytes if self._last is not None else {}
        if self.plan.strategy.pp == 1:
            return mine
        found: list[Any] = [None] * world_size()
        dist.all_gather_object(found, mine)
        return max(found, key=lambda peak: peak.get("total", 0))

    def _write_result(self, seconds: float, steps: int, peak: dict[str, int]) -> None:
        engine = self.engine
        self.folder.write_result(
            {
                "steps": engine.steps_done,
                "skipped_steps": engine.skipped_steps,
                "samples_seen": engine.samples_seen,
                "validation_loss": self.validation_loss,
                "checkpoint": self.folder.checkpoint(engine.steps_done).name,
                "seconds": seconds,
                "steps_taken": steps,
                "at_rest_bytes": engine.bytes_at_rest(),
                "in_step_bytes": peak,
                "collectives": self._last.collectives if self._last else {},
            }
        )


def _require_same_corpus(corpus: ByteCorpus) -> None:
    """Refuse ranks that see different files, as hosts with folders of their own can.

    Raises:
        DataError: on every rank, with what differs.
    """
    if world_size() == 1:
        return
    mine = corpus.fingerprint()
    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, mine)
    other = next((rank for rank, prints in enumerate(found) if prints != found[0]), None)
    if other is not None:
        raise DataError(
            f"rank 0 and rank {other} see different text under corpus {corpus.name}",
            why=f"rank 0 has {found[0]['files']} files of {found[0]['bytes']} bytes in all, rank {other} "
            f"{found[other]['files']} of {found[other]['bytes']}, or their names differ",
            fix="give every machine the same files, for example on a shared file system",
        )


def _view(report: StepReport, tokens_per_s: float) -> StepView:
    return StepView(
        step=report.step,
        loss=report.loss,
        grad_norm=report.grad_norm,
        tokens_per_s=tokens_per_s,
        memory_bytes=report.peak_bytes.get("total", 0),
        skipped=report.skipped,
    )


@contextlib.contextmanager
def _warnings_to(view: ProgressView) -> Iterator[None]:
    """Show the runtime's own warnings between the steps; ranks other than 0 show nothing."""

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            view.note(f"warning: {record.getMessage()}")

    logger, notes = logging.getLogger("meshwright"), Notes(logging.WARNING)
    logger.addHandler(notes)
    try:
        yield
    finally:
        logger.removeHandler(notes)


def _finite(value: float) -> float | None:
    """JSON knows no infinities: None instead."""
    return value if math.isfinite(value) else None
