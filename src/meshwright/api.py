"""The Python face: where a model, machines and a job become a plan."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from meshwright.errors import ConfigError
from meshwright.planner import Model, make_plan
from meshwright.planner.objective import find_objective
from meshwright.spec import Cluster, DecoderShape, Job, Plan, job_for, parse_assignments, this_machine
from meshwright.spec.catalogue import find_model
from meshwright.spec.clusters import parse_cluster
from meshwright.spec.families import Described
from meshwright.spec.files import from_table

__all__ = ["plan"]


def plan(
    model: Any,
    cluster: Cluster | str | Path | None = None,
    *,
    global_batch: int | None = None,
    sequence: int | None = None,
    job: Job | None = None,
    pins: str = "",
    objective: str = "time",
    executable: bool = False,
    most: int = 10,
    inputs: Any = None,
    loss: Any = None,
    targets: Any = None,
) -> Plan:
    """Choose the strategy for a model on a cluster. Imports torch only for a model that is a module.

    Args:
        model: a name of the catalogue (`"llama-3-70b"`); the path of a `config.json` or its folder; a mapping with the
            keys of a `config.json`; a `DecoderShape`, or a mapping with its keys (Llama's, without `model_type`), for
            the built-in decoder; an `nn.Module`, or a function without arguments that builds one.
        cluster: the machines, as a noun or in text (`"8xH100-80GB:4"`, a TOML file); this machine by default.
        global_batch: sequences per optimizer step.
        sequence: tokens per sequence.
        job: these two and dtypes, optimizer and kernels; without it accelerators compute in bfloat16, CPUs in float32,
            and what is not given is the default of `Job`.
        pins: what must hold, in the text form: `"zero=3 microbatch<=4"`.
        objective: what the best has least of: `time` of a step, `devices`, or `cost` (device time per token).
        executable: only strategies that this version runs.
        most: strategies that are ranked, the best included.
        inputs: what a module is called with, for one microbatch; without it the module is taken for a language model
            that is called with token ids and returns logits. `loss` and `targets` go with it, as for
            `meshwright.trace`.

    Raises:
        ConfigError: a model, pin, key or value cannot be right.
        UnsupportedCombination: what is pinned cannot be laid over the model, or is not run by this version.
        InfeasiblePlan: nothing within the pins fits; the text says what is short and by how much.
    """
    machines = cluster if isinstance(cluster, Cluster) else parse_cluster(cluster) if cluster else this_machine()
    job = _job(job, machines, global_batch, sequence)
    found = _model(model, job, inputs, loss, targets)
    assignments = parse_assignments([pins], option="pins", bounds=True)
    name = find_objective(objective).name
    return make_plan(
        found, machines, job, assignments, objective=name, executable=executable, most=most, with_changes=True
    )


def _job(job: Job | None, cluster: Cluster, global_batch: int | None, sequence: int | None) -> Job:
    given = {"global_batch": global_batch, "sequence": sequence}
    if job is None:
        usual = Job()
        return job_for(
            cluster,
            global_batch=usual.global_batch if global_batch is None else global_batch,
            sequence=usual.sequence if sequence is None else sequence,
        )
    for name, value in given.items():
        if value is not None and value != getattr(job, name):
            raise ConfigError(
                f"plan() was given {name}={value} and a job with {name}={getattr(job, name)}",
                why="one value is given in two ways",
                fix=f"leave {name} out, or set it in the job",
            )
    return job


def _model(model: Any, job: Job, inputs: Any, loss: Any, targets: Any) -> Model:
    if isinstance(model, DecoderShape):
        return model
    if isinstance(model, Mapping):
        return find_model(model) if "model_type" in model else from_table(DecoderShape, dict(model), "model")
    if isinstance(model, (str, Path)) and not (isinstance(model, str) and ":" in model and not Path(model).exists()):
        return find_model(model)
    if hasattr(model, "at") and hasattr(model, "name") and not _is_module(model):
        return cast(Described, model)
    if isinstance(model, str) or _is_module(model) or callable(model):
        from meshwright.measure import describe_module, named_module
        from meshwright.measure.named import language_model

        if inputs is not None:
            return describe_module(model, inputs, loss=loss, targets=targets)
        return (
            named_module(model, sequence=job.sequence)
            if isinstance(model, str)
            else language_model(model, job.sequence)
        )
    raise ConfigError(
        f"plan() cannot plan a {type(model).__name__}",
        why="it plans a model by name, by its config.json, by its keys, or a module",
        fix="give for example plan('llama-3-8b', '8xH100-80GB', global_batch=64, sequence=8192)",
    )


def _is_module(model: Any) -> bool:
    """Whether it is an `nn.Module`; who has one has imported torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)
