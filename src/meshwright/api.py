"""The Python face: where a model, machines and a job become a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import ConfigError
from meshwright.planner import make_plan
from meshwright.spec import Cluster, DecoderShape, Job, Plan, parse_assignments, this_machine
from meshwright.spec.files import from_table

__all__ = ["plan"]


def plan(
    model: DecoderShape | Mapping[str, Any],
    *,
    cluster: Cluster | None = None,
    job: Job | None = None,
    pins: str = "",
) -> Plan:
    """Choose the strategy for a model on a cluster. Imports no torch.

    Args:
        model: the shape of the built-in decoder, or a mapping with the keys of `DecoderShape` (those of a Llama
            `config.json` that decide its shape).
        cluster: the machines; this machine by default.
        job: global batch, sequence, dtypes, optimizer; the defaults of `Job` by default.
        pins: what must hold, in the text form: `"zero=3 microbatch<=4"`.

    Raises:
        ConfigError: a pin, key or value cannot be right.
        InfeasiblePlan: nothing within the pins fits; the text says what is short and by how much.
    """
    if not isinstance(model, (DecoderShape, Mapping)):
        raise ConfigError(
            f"plan() cannot plan a {type(model).__name__} yet",
            why="it plans the built-in decoder, given as a DecoderShape or a mapping with its keys",
            fix="write a Strategy for your own module and hand both to Engine; meshwright.trace() describes its costs",
        )
    shape = model if isinstance(model, DecoderShape) else from_table(DecoderShape, dict(model), "model")
    assignments = parse_assignments([pins], option="pins", bounds=True)
    return make_plan(shape, cluster or this_machine(), job or Job(), assignments)
