"""`meshwright train` from its options to its summary: plan, check what can be checked, launch, report."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from meshwright.errors import CheckpointError, ConfigError
from meshwright.report import measured_view, plan_view
from meshwright.spec import Plan
from meshwright.spec.files import dump_toml, to_table, write_text
from meshwright.spec.job_file import JobFile, read_job
from meshwright.train.choose import choose_plan, ranks_here
from meshwright.train.data import ByteCorpus
from meshwright.train.folder import RunFolder, free_folder
from meshwright.train.launch import Nodes, launch
from meshwright.train.progress import duration

__all__ = ["TrainOptions", "train_job"]

_BYTE_VALUES = 256
_TEMPERATURE = 0.8
#: Tables of a job file that a plan decides.
_DECIDED = ("model.", "job.")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What `meshwright train` was asked, as on its command line."""

    job: Path | None = None
    plan: Path | None = None
    pins: tuple[str, ...] = ()
    strategy: str | None = None
    sets: tuple[str, ...] = ()
    resume: bool = False
    out: Path | None = None
    nodes: Nodes = field(default_factory=Nodes)


def train_job(options: TrainOptions, console: Console | None = None) -> None:
    """Train a job and show what came of it.

    Raises:
        MeshwrightError: an option, file, corpus, folder or checkpoint cannot be used, nothing fits, or a rank failed.
        KeyboardInterrupt: it was interrupted.
    """
    _Run(options, console or Console()).train()


class _Run:
    """One call of `meshwright train` on this machine."""

    def __init__(self, options: TrainOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._begun = time.perf_counter()

    def train(self) -> None:
        job_file = self._read_job()
        folder = RunFolder(Path(job_file.train.out))
        checkpoint = self._newest(folder) if self._options.resume else None
        if checkpoint is None:
            folder = self._free(folder)
        corpus = _corpus(job_file)
        plan = self._choose(job_file, folder if checkpoint is not None else None)
        job_file = replace(
            job_file, model=plan.decoder, job=plan.job, train=replace(job_file.train, out=str(folder.path))
        )
        _require_bytes(plan)
        if job_file.train.trace:
            _require_writable(Path(job_file.train.trace))
        if checkpoint is not None and self._finished(checkpoint, plan, job_file, corpus):
            return
        folder.prepare()
        write_text(folder.plan, dump_toml(to_table(plan)))
        write_text(folder.job, dump_toml(to_table(job_file)))
        self._show_start(plan, job_file, folder, corpus, checkpoint)
        arguments = [str(folder.path.absolute()), *([str(checkpoint.absolute())] if checkpoint is not None else [])]
        folder.result.unlink(missing_ok=True)
        try:
            leads = launch(
                arguments,
                ranks=ranks_here(plan.strategy, self._options.nodes),
                nodes=self._options.nodes,
                logs=folder.logs,
                resume=f"go on from the last checkpoint with: meshwright train --resume --out {folder.path}",
            )
        finally:
            # A rank that was killed has left the cursor hidden.
            self._console.show_cursor(True)
        if leads:
            self._show_end(plan, job_file, folder)

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _read_job(self) -> JobFile:
        """The job file; when a run is resumed without one, the run's own."""
        options = self._options
        path = options.job
        if path is None and options.resume and options.out is not None:
            own = RunFolder(options.out).job
            path = own if own.exists() else None
        job_file = read_job(path, options.sets)
        if options.out is None:
            return job_file
        return replace(job_file, train=replace(job_file.train, out=str(options.out)))

    def _choose(self, job_file: JobFile, resumed: RunFolder | None) -> Plan:
        options = self._options
        plan = choose_plan(
            job_file,
            plan=options.plan,
            pins=options.pins,
            strategy=options.strategy,
            nodes=options.nodes,
            earlier=resumed.plan if resumed is not None and resumed.plan.exists() else None,
            say=self._say,
        )
        # Without a job file the built-in one gives only data and steps; values set by hand must not be lost in silence.
        told = options.job is not None or any(word.startswith(_DECIDED) for word in options.sets)
        if options.plan is not None and told and (plan.model.decoder, plan.job) != (job_file.model, job_file.job):
            raise ConfigError(
                f"plan {options.plan} is for another job than {options.job or '--set ' + ' '.join(options.sets)}",
                why="its [model] or [job] differs, and so would its memory",
                fix="plan anew without --plan, or leave the model and the job to the plan",
            )
        if options.plan is not None and options.job is None:
            self._say("the plan says model and job; text and steps are those of the built-in job (--set, JOB.toml)")
        return plan

    def _free(self, wanted: RunFolder) -> RunFolder:
        folder = free_folder(wanted.path)
        if folder != wanted:
            self._say(f"{wanted.path} holds checkpoints of an earlier run, so this one goes to {folder.path}")
        return folder

    def _newest(self, folder: RunFolder) -> Path:
        """The checkpoint to go on from; what is passed over is named, and what dead saves left is removed."""
        from meshwright.runtime.checkpoint import newest, remove_stale

        found, skipped = newest(folder.checkpoints)
        if found is None:
            listed = "; ".join(f"{path.name}: {why}" for path, why in skipped)
            raise CheckpointError(
                f"{folder.checkpoints} holds no complete checkpoint to go on from",
                why=listed or "no checkpoint was written there",
                fix="start a new run without --resume, or give the run's folder with --out",
            )
        for path, why in skipped:
            self._say(f"skipped {path}: {why}")
        remove_stale(folder.checkpoints)
        return found

    def _finished(self, checkpoint: Path, plan: Plan, job_file: JobFile, corpus: ByteCorpus) -> bool:
        """Whether nothing is left to do; refuses a checkpoint of another run.

        Raises:
            CheckpointError: the checkpoint is of another model, optimizer or order of samples.
        """
        from meshwright.runtime.checkpoint import read_manifest
        from meshwright.train.model import saved_extra
        from meshwright.train.same_run import describe_run, require_same_run

        require_same_run(checkpoint, saved_extra(checkpoint), describe_run(plan, job_file.data, corpus))
        done = int(read_manifest(checkpoint)["engine"]["steps_done"])
        if done < job_file.train.steps:
            return False
        self._say(f"the run is finished: {checkpoint} is from step {done} of train.steps={job_file.train.steps}")
        self._say("to train longer, raise it: --set train.steps=N")
        return True

    def _show_start(
        self, plan: Plan, job_file: JobFile, folder: RunFolder, corpus: ByteCorpus, checkpoint: Path | None
    ) -> None:
        self._console.print(plan_view(plan))
        self._say(
            f"corpus: {corpus.name}, {len(corpus.files):,} files, {corpus.bytes:,} bytes; "
            f"{corpus.train_windows:,} samples to train on, {corpus.validation_windows:,} for validation"
        )
        if not corpus.validation_windows:
            self._say("no validation: the corpus has fewer samples than data.validation_every")
        if checkpoint is not None:
            self._say(f"going on from {checkpoint}")
        steps, ranks = job_file.train.steps, plan.strategy.world_size
        self._say(f"{steps:,} steps, written to {folder.path}; starting {ranks} rank{'s' if ranks > 1 else ''} ...")

    def _show_end(self, plan: Plan, job_file: JobFile, folder: RunFolder) -> None:
        from meshwright.train.generate import generate_text

        result: dict[str, Any] = folder.read_result()
        checkpoint = folder.checkpoints / result["checkpoint"]
        self._console.print(measured_view(plan.cost.in_step, result["in_step_bytes"]))
        train = job_file.train
        if train.generate_tokens:
            text = generate_text(
                checkpoint, train.prompt, tokens=train.generate_tokens, temperature=_TEMPERATURE, seed=plan.job.seed
            )
            self._say("sample\n" + _indented(train.prompt + text) + "\n")
        if result["validation_loss"] is not None:
            self._say(f"validation loss {result['validation_loss']:.2f} nats per byte")
        tokens = result["steps_taken"] * plan.job.global_batch * plan.job.sequence
        self._say(
            f"{result['steps_taken']:,} steps in {duration(result['seconds'])}, "
            f"{tokens / result['seconds']:,.0f} tokens/s; {duration(time.perf_counter() - self._begun)} in all"
        )
        if result["skipped_steps"]:
            self._say(f"{result['skipped_steps']} steps were skipped: their gradients were not finite")
        self._say(f"checkpoint {checkpoint}")
        if train.trace:
            self._say(f"trace {train.trace}: open it at ui.perfetto.dev")
        self._say(f"try: meshwright generate {folder.path} --prompt 'def '")


def _corpus(job_file: JobFile) -> ByteCorpus:
    data = job_file.data
    return ByteCorpus(data.path, sequence=job_file.job.sequence, validation_every=data.validation_every)


def _require_bytes(plan: Plan) -> None:
    vocabulary = plan.decoder.vocab_size
    if vocabulary < _BYTE_VALUES:
        raise ConfigError(
            f"model.vocab_size={vocabulary} is too small for text",
            why=f"the trainer's tokens are bytes, which have {_BYTE_VALUES} values",
            fix=f"set model.vocab_size to {_BYTE_VALUES} or more",
        )


def _require_writable(path: Path) -> None:
    """Refuse a trace that could not be written, before any step is taken."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(
            f"the trace {path} cannot be written", why=error.strerror or str(error), fix="give another --trace FILE"
        ) from error


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
