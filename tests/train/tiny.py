"""A tiny run folder, and one rank of it, for tests."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from meshwright.runtime import StepReport
from meshwright.spec import (
    Cost,
    DecoderShape,
    Job,
    ModelReference,
    OptimizerSpec,
    Plan,
    Provenance,
    Strategy,
    this_machine,
)
from meshwright.spec.files import dump_toml, read_noun, to_table, write_text
from meshwright.spec.job_file import DataSpec, JobFile, TrainSpec
from meshwright.train.folder import RunFolder
from meshwright.train.loop import Trainer

SHAPE = DecoderShape(
    hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
)
OPTIMIZER = OptimizerSpec(learning_rate=3e-3, schedule="cosine", warmup_steps=2)
NO_COST = Cost(at_rest={}, in_step={}, peak_bytes=0, phase="", collectives={}, collective_bytes={})
NO_SOURCE = Provenance(meshwright="", rule="", memory="", cluster="")


def corpus(folder: Path, files: int = 7, size: int = 911) -> Path:
    """Text files of odd sizes; every file another part of one long count."""
    folder.mkdir(parents=True, exist_ok=True)
    text = " ".join(map(str, range(100 * files * size))).encode()
    for index in range(files):
        (folder / f"{index:02d}.txt").write_bytes(text[index * size : (index + 1) * size])
    return folder


def run_folder(
    path: Path,
    strategy: str,
    data: Path,
    *,
    dtype: Any = "float32",
    batch: int = 12,
    shape: DecoderShape = SHAPE,
    **train: Any,
) -> RunFolder:
    """A prepared run folder whose plan is the given strategy."""
    from meshwright.spec import parse_strategy

    folder = RunFolder(path)
    folder.prepare()
    job = Job(
        global_batch=batch,
        sequence=16,
        optimizer=OPTIMIZER,
        clip_norm=1.0,
        seed=3,
        param_dtype=dtype,
        compute_dtype=dtype,
        reduce_dtype=dtype,
    )
    chosen: Strategy = parse_strategy(strategy)
    model = ModelReference(name="decoder", parameters=0, decoder=shape)
    plan = Plan(model=model, cluster=this_machine(), job=job, strategy=chosen, cost=NO_COST, provenance=NO_SOURCE)
    wanted = JobFile(
        model=shape,
        job=job,
        data=DataSpec(path=str(data), validation_every=5),
        train=TrainSpec(**{"out": str(path), **train}),
    )
    write_text(folder.plan, dump_toml(to_table(plan)))
    write_text(folder.job, dump_toml(to_table(wanted)))
    return folder


class Interrupted(Exception):
    """Ends a run in a test as a crash would."""


@dataclass
class RankRun:
    """What one rank did: what it showed, and the samples and windows it read for each step."""

    screen: str = ""
    numbers: dict[int, list[int]] = field(default_factory=dict)
    windows: dict[int, list[bytes]] = field(default_factory=dict)
    interrupted: bool = False


def rank_of(path: Path, resume: Path | None = None, stop_at: int | None = None) -> RankRun:
    """Run one rank of a prepared folder; with `stop_at` it crashes in that step, before anything is saved for it."""
    folder = RunFolder(path)
    plan, job_file = read_noun(Plan, folder.plan), read_noun(JobFile, folder.job)
    trainer = Trainer(folder, plan, job_file.data, job_file.train, resume, torch.device("cpu"))
    done, now = RankRun(), [0]
    window = _recorded(trainer.corpus.train_window, lambda found: done.windows.setdefault(now[0], []).append(found))
    trainer.corpus.train_window = window  # type: ignore[method-assign]
    batch = trainer.samples.batch
    trainer.samples.batch = lambda numbers: (done.numbers.update({now[0]: list(numbers)}), batch(numbers))[1]  # type: ignore[method-assign]

    def begin(step: int) -> None:
        now[0] = step

    def after(_: Trainer, report: StepReport) -> None:
        if report.step == stop_at:
            raise Interrupted

    screen = io.StringIO()
    try:
        trainer.run(begin, after, Console(file=screen, width=200))
    except Interrupted:
        done.interrupted = True
    done.screen = screen.getvalue()
    return done


def _recorded(call: Callable[[int], bytes], note: Callable[[bytes], None]) -> Callable[[int], bytes]:
    def recorded(index: int) -> bytes:
        found = call(index)
        note(found)
        return found

    return recorded


def metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in RunFolder(path).metrics.read_text().splitlines()]
