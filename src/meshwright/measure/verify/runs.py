"""The runs that are compared: on a rank, by the engine in one process, and in plain PyTorch on the whole batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

from meshwright.measure.equality import Run, Step, float32_upcasts_stay_float64, record
from meshwright.measure.verify.asked import job_of
from meshwright.measure.verify.subject import Subject, find_subject
from meshwright.runtime import Engine, ModelLoss
from meshwright.runtime.tp import plan_sharding
from meshwright.runtime.units import find_blocks
from meshwright.spec import Job, Strategy
from meshwright.spec.verified import Copy

__all__ = ["OPTIMIZERS", "RATES", "STEPS", "Facts", "Prepared", "prepare", "run_by_strategy", "run_in_one_process"]

STEPS = 3
#: By the names that the tolerances know them by.
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01, eps=1e-4, weight_decay=0.05),
}
RATES = {"sgd": 0.1, "adamw": 0.01}


@dataclass(frozen=True)
class Facts:
    """What is told of the model that is run, and to which module each of its parameters belongs."""

    copy: Copy
    modules: dict[str, tuple[str, str, int]]
    """By the name of a parameter: the module it is told under, that one's class, and the parameter's size."""
    imported: tuple[str, ...]


@dataclass(frozen=True)
class Prepared:
    """What every process starts from: the same values and the same batches, whatever a builder draws."""

    asked: dict[str, Any]
    strategy: Strategy
    depth: int
    sequence: int
    place: Path
    sharding: Mapping[str, str]

    @property
    def job(self) -> Job:
        return job_of(self.strategy, self.sequence)

    def build(self) -> Subject:
        """The model with values that its builder draws."""
        return find_subject(
            self.asked,
            depth=self.depth,
            sequence=self.sequence,
            tp=self.strategy.tp,
            annotated=bool(self.sharding),
        )

    def subject(self) -> tuple[Subject, list[Any]]:
        """The model with its values, and the batches of all steps."""
        made = self.build()
        kept: Mapping[str, Any] = torch.load(self.place, weights_only=False)
        made.model.load_state_dict(kept["values"])
        return made, kept["batches"]


def prepare(prepared: Prepared, known: Iterable[str], loaded: Callable[[], Iterable[str]]) -> Facts:
    """Build the model once, keep its values and batches, and say what it is.

    Args:
        prepared: where they go.
        known: modules of Python that were loaded before.
        loaded: those that are loaded now.
    """
    made = prepared.build()
    batches = [made.batch(prepared.job.global_batch, seed) for seed in range(STEPS)]
    torch.save({"values": made.model.state_dict(), "batches": batches}, prepared.place)
    model, blocks = made.model, find_blocks(made.model)
    classes = dict.fromkeys(type(module).__name__ for module in model.modules())
    parameters = dict(model.named_parameters())
    fresh = set(loaded()) - set(known)
    copy = Copy(
        model=made.name,
        kind=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in parameters.values()),
        blocks=len(blocks),
        classes=tuple(classes),
        changes=made.changes,
        notes=made.notes,
        labels=made.labels,
        divided=_divided(model, prepared),
    )
    return Facts(
        copy=copy,
        modules={name: (*_module_of(name, model, blocks), value.numel()) for name, value in parameters.items()},
        imported=tuple(sorted(name for name in fresh if name.startswith(("transformers.", "torch.")))),
    )


def _divided(model: nn.Module, prepared: Prepared) -> tuple[str, ...]:
    """What tensor parallelism divides, a line for each style: name patterns in the order of the modules."""
    if prepared.strategy.tp == 1:
        return ()
    found: dict[str, dict[str, None]] = {}
    for name, entry in plan_sharding(model, prepared.sharding).items():
        whole = entry.style == "sequence" and not prepared.strategy.sequence_parallel
        if not whole and not entry.style.startswith("replicate"):
            pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
            found.setdefault(f"{entry.style} ({entry.source})", {})[pattern] = None
    return tuple(f"{style}: {', '.join(names)}" for style, names in found.items())


def _module_of(name: str, model: nn.Module, blocks: Iterable[tuple[str, nn.Module]]) -> tuple[str, str]:
    """The block that a parameter is in, or else the module it hangs in."""
    for block, module in blocks:
        if name.startswith(f"{block}."):
            return block, type(module).__name__
    owner = name.rpartition(".")[0]
    return owner or name, type(model.get_submodule(owner)).__name__


def run_by_strategy(prepared: Prepared, names: Mapping[str, Path]) -> None:
    """This rank's run with each optimizer, written to a file for each."""
    for optimizer, place in names.items():
        torch.save(_by_engine(prepared, prepared.strategy, optimizer, prepared.sharding), place)


def run_in_one_process(prepared: Prepared, engine: Mapping[str, Path], plain: Mapping[str, Path]) -> None:
    """The reference by the engine with the same microbatches, and the one in plain PyTorch."""
    alone = Strategy(dp=1, microbatch=prepared.strategy.microbatch)
    for optimizer in OPTIMIZERS:
        torch.save(_by_engine(prepared, alone, optimizer), engine[optimizer])
        torch.save(_plain(prepared, optimizer), plain[optimizer])


def _by_engine(
    prepared: Prepared, strategy: Strategy, optimizer: str, sharding: Mapping[str, str] | None = None
) -> Run:
    subject, batches = prepared.subject()
    if strategy.stages and sum(strategy.stages) != len(find_blocks(subject.model)):
        strategy = replace(strategy, stages=())  # those of the whole model, and this one is smaller
    engine = Engine(
        subject.model,
        subject.loss,
        OPTIMIZERS[optimizer],
        prepared.job,
        strategy,
        device="cpu",
        sharding=sharding,
        example=batches[0],
        measure_memory="never",
    )
    return record(engine, batches, float64=True)


def _plain(prepared: Prepared, optimizer: str) -> Run:
    """A training loop that shares no code with the runtime: the mean over the whole batch, clipped once, one step."""
    subject, batches = prepared.subject()
    model = subject.model
    parameters = dict(model.named_parameters())
    stepper = OPTIMIZERS[optimizer](model.parameters())
    run = Run({name: parameter.detach().clone() for name, parameter in parameters.items()}, [])
    for batch in batches:
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        with float32_upcasts_stay_float64():
            loss, weight = _mean(subject, batch)
            loss.backward()
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()}
        norm = float(clip_grad_norm_(model.parameters(), prepared.job.clip_norm))
        parts = [parameter.grad.norm() for parameter in parameters.values() if parameter.grad is not None]
        clipped = float(torch.linalg.vector_norm(torch.stack(parts)))
        stepper.step()
        stepper.zero_grad()
        updates = {name: parameter.detach() - before[name] for name, parameter in parameters.items()}
        run.steps.append(Step(loss.item(), weight, norm, clipped, gradients, updates))
    return run


def _mean(subject: Subject, batch: Any) -> tuple[Tensor, float]:
    """The mean loss over a batch, and what it is the mean over; not a number where the model alone knows that."""
    model: Any = subject.model
    if isinstance(subject.loss, ModelLoss):
        return model(**batch).loss, float("nan")
    if isinstance(batch, Mapping):
        outputs, targets = model(**{key: value for key, value in batch.items() if key != "labels"}), batch
    else:
        inputs, targets = batch
        if isinstance(inputs, Mapping):
            outputs = model(**inputs)
        else:
            outputs = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
    total, weight = subject.loss(outputs, targets)
    return total / float(weight), float(weight)
