"""A case: one training run of a few steps, its reference in one process, and the worker that runs either."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR

from meshwright.measure.equality.recording import record
from meshwright.measure.equality.records import Run, join
from meshwright.measure.equality.tolerance import Mismatch, compare, show
from meshwright.runtime import Engine
from meshwright.spec import Job, Strategy
from tests.harness.models import builder, loss_of, make_batch
from tests.harness.ranks import run_one, run_ranks

__all__ = [
    "Case",
    "STEPS",
    "assert_equal",
    "build_engine",
    "check",
    "check_many",
    "differences",
    "make_optimizer",
    "real_model",
    "run_case",
    "run_engine",
    "train",
    "train_many",
]

STEPS = 3
SEQUENCE = 53
LEARNING_RATES = {"sgd": 0.1, "adamw": 0.01, "adamw-default-eps": 0.01}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained (model, data, dtypes, optimizer) and how (world to unit_blocks).

    `source`: the Engine gets a `builder`, or a `module` with real values. `dtype` is that of stored parameters,
    `compute` the compute dtype where it differs. `rate` is the learning rate, the optimizer's usual one by default;
    `halving`: a scheduler halves it after each step; `layers` counts blocks, `microbatch` sequences of 53 tokens;
    `world` ranks, of which each `tp` in a row compute the same rows of the same of `pp` stages.
    """

    model: str = "decoder"
    source: str = "builder"
    tied: bool = False
    layers: int = 5
    valid: str = "unequal"
    scope: str = "global"
    dtype: str = "float64"
    compute: str = ""
    optimizer: str = "sgd"
    rate: float | None = None
    halving: bool = False
    clip: float = 0.0
    world: int = 2
    tp: int = 1
    pp: int = 1
    schedule: str = "single"
    virtual_stages: int = 1
    stages: tuple[int, ...] = ()
    sequence_parallel: bool = False
    zero: int = 0
    shard: int = 0
    gather: str = "auto"
    reduce: str = "auto"
    accumulation: int = 1
    microbatch: int = 2
    recompute: str = "none"
    recompute_blocks: int = 0
    prefetch: int = 0
    unit_blocks: int = 1
    seed: int = 0
    steps: int = STEPS

    def __str__(self) -> str:
        """What differs from the defaults, as a test's name."""
        shown = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return " ".join(shown) or "default"

    @property
    def dp(self) -> int:
        """Ranks with other rows."""
        return self.world // (self.tp * self.pp)

    @property
    def microbatches(self) -> int:
        """Microbatches of the global batch, over all ranks."""
        return self.dp * self.accumulation

    @property
    def reference(self) -> Case:
        """The same training in one process with the same microbatches: whole, nothing sharded or computed twice."""
        return replace(
            self,
            world=1,
            tp=1,
            pp=1,
            schedule="single",
            virtual_stages=1,
            stages=(),
            sequence_parallel=False,
            zero=0,
            shard=0,
            gather="auto",
            reduce="auto",
            accumulation=self.microbatches,
            recompute="none",
            recompute_blocks=0,
            prefetch=0,
            unit_blocks=1,
            scope="global",
        )

    @property
    def learning_rate(self) -> float:
        return LEARNING_RATES[self.optimizer] if self.rate is None else self.rate

    @property
    def job(self) -> Job:
        return Job(
            global_batch=self.microbatches * self.microbatch,
            sequence=SEQUENCE,
            param_dtype=self.dtype,
            compute_dtype=self.compute or self.dtype,
            reduce_dtype=self.dtype,
            clip_norm=self.clip,
            seed=self.seed,
        )

    @property
    def strategy(self) -> Strategy:
        return Strategy(
            dp=self.dp,
            tp=self.tp,
            pp=self.pp,
            schedule=self.schedule,
            virtual_stages=self.virtual_stages,
            stages=self.stages,
            gather=self.gather,
            reduce=self.reduce,
            sequence_parallel=self.sequence_parallel,
            zero=self.zero,
            shard=self.shard,
            microbatch=self.microbatch,
            recompute=self.recompute,
            recompute_blocks=self.recompute_blocks,
            prefetch=self.prefetch,
            unit_blocks=self.unit_blocks,
        )

    def batch(self, step: int) -> Any:
        """The global batch of a step, the same on every rank."""
        return make_batch(
            self.model,
            microbatches=self.microbatches,
            microbatch=self.microbatch,
            sequence=SEQUENCE,
            valid=self.valid,
            seed=1000 * self.seed + step,
            dtype=getattr(torch, self.dtype),
        )


def make_optimizer(case: Case, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The optimizer of a case: `sgd` with momentum, `adamw` with eps 1e-4 and weight decay, or with the default eps."""
    if case.optimizer == "sgd":
        return SGD(parameters, lr=case.learning_rate, momentum=0.9)
    eps = 1e-4 if case.optimizer == "adamw" else 1e-8
    return AdamW(parameters, lr=case.learning_rate, eps=eps, weight_decay=0.05)


def halve(optimizer: Optimizer) -> LRScheduler:
    """The scheduler of a case with `halving`."""
    return StepLR(optimizer, step_size=1, gamma=0.5)


def real_model(case: Case) -> nn.Module:
    """The case's model with real values, the same in every dtype up to rounding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        model = builder(case.model, tied=case.tied, layers=case.layers)()
    for parameter in model.parameters():  # buffers keep their dtype
        parameter.data = parameter.data.to(getattr(torch, case.dtype))
    return model


def build_engine(case: Case) -> Engine:
    """The case's engine on this rank."""
    module = builder(case.model, tied=case.tied, layers=case.layers) if case.source == "builder" else real_model(case)
    return Engine(
        module,
        loss_of(case.model),
        partial(make_optimizer, case),
        case.job,
        case.strategy,
        batch_scope=case.scope,
        scheduler=halve if case.halving else None,
        example=case.batch(0) if case.model.startswith("mlp") else None,
        measure_memory="never",
    )


def run_case(case: Case) -> Run:
    """Runs a case on this rank."""
    return run_engine(build_engine(case), case)


def run_engine(engine: Engine, case: Case, batches: Sequence[Any] = ()) -> Run:
    """The steps of an engine that was built for the case, recorded; on the case's own batches if none are given."""
    given = batches or [case.batch(number) for number in range(case.steps)]
    return record(engine, [_share(batch, case) for batch in given], float64=case.dtype == "float64")


def _share(batch: Any, case: Case) -> Any:
    if case.scope == "global" or case.world == 1:
        return batch
    rows = case.accumulation * case.microbatch
    start = case.strategy.data_rank(torch.distributed.get_rank()) * rows
    cut = slice(start, start + rows)
    return {k: v[cut] for k, v in batch.items()} if isinstance(batch, dict) else tuple(v[cut] for v in batch)


def differences(case: Case, run: Run, reference: Run) -> list[Mismatch]:
    """How a run of the case differs from a reference, beyond the tolerance."""
    return compare(run, reference, dtype=case.dtype, optimizer=case.optimizer, learning_rate=case.learning_rate)


def train(case: Case, run: Callable[[Case], Run] = run_case, *, timeout_s: float = 120.0) -> list[Run]:
    """Runs a case on its ranks; what each rank recorded, tensors put together from all ranks' parts."""
    return join(run_ranks(case.world, run, case, timeout_s=timeout_s))


def train_many(cases: Sequence[Case], *, timeout_s: float = 240.0) -> list[list[Run]]:
    """As `train`, for cases of one world: they run one after the other on the same ranks."""
    by_rank = run_ranks(cases[0].world, _run_cases, list(cases), timeout_s=timeout_s)
    return [join(runs) for runs in zip(*by_rank, strict=True)]


def _run_cases(cases: list[Case]) -> list[Run]:
    runs = []
    for case in cases:
        try:
            runs.append(run_case(case))
        except Exception as error:
            error.add_note(f"in case: {case}")
            raise
    return runs


def check(case: Case, *, timeout_s: float = 120.0) -> Run:
    """Asserts that every rank's run of a case equals the reference; the reference."""
    reference = run_one(run_case, case.reference)
    assert_equal(case, train(case, timeout_s=timeout_s), reference)
    return reference


def check_many(cases: Sequence[Case], *, timeout_s: float = 240.0) -> None:
    """As `check`, for cases of one world: they run one after the other on the same ranks, as references do on one."""
    references = list(dict.fromkeys(case.reference for case in cases))
    known = dict(zip(references, run_one(_run_cases, references, timeout_s=timeout_s), strict=True))
    for case, runs in zip(cases, train_many(cases, timeout_s=timeout_s), strict=True):
        assert_equal(case, runs, known[case.reference])


def assert_equal(case: Case, runs: Sequence[Run], reference: Run) -> None:
    """Fails with the first values that differ, and with what ranks do not report alike."""
    texts = []
    compared: set[int] = set()
    for rank, run in enumerate(runs):
        if [step.report for step in run.steps] != [step.report for step in runs[0].steps]:
            texts.append(f"rank {rank} reports other losses or norms than rank 0")
        if id(run.initial) not in compared:  # ranks of one replica have the same tensors
            compared.add(id(run.initial))
            found = differences(case, run, reference)
            texts += [f"rank {rank}:\n{show(found)}"] if found else []
    assert not texts, f"{case}\n" + "\n".join(texts)
