"""job_for: a job for given machines, with the dtypes that suit their devices, from the words of a command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.errors import ConfigError
from meshwright.spec.cluster import Cluster
from meshwright.spec.files import from_table
from meshwright.spec.job import Job
from meshwright.spec.text import apply_assignments, parse_assignments

__all__ = ["job_for"]


def job_for(cluster: Cluster, *, global_batch: int, sequence: int, changes: Sequence[str] = ()) -> Job:
    """A job of `global_batch` sequences of `sequence` tokens.

    On accelerators it computes in bfloat16, or float16 where the device has no bfloat16; on CPUs in float32.

    Args:
        changes: words of the text form with keys `job.*`, such as `["job.compute_dtype=float32"]`.

    Raises:
        ConfigError: a key is unknown, or a value is illegal.
    """
    table: dict[str, Any] = {
        "job": {"global_batch": global_batch, "sequence": sequence, "compute_dtype": _compute_dtype(cluster)}
    }
    assignments = parse_assignments(changes, option="--set")
    for assignment in assignments:
        if not assignment.key.startswith("job."):
            raise ConfigError(
                f"--set {assignment} is not about the job",
                why="only the keys of [job] matter here",
                fix="write for example --set job.compute_dtype=float32",
            )
        given = {"job.global_batch": global_batch, "job.sequence": sequence}.get(assignment.key)
        if given is not None and assignment.value != given:
            raise ConfigError(
                f"--set {assignment} contradicts the {given} that was given before",
                why="one value is given in two ways",
                fix="leave one of them out",
            )
    apply_assignments(table, assignments)
    return from_table(Job, table["job"], "job")


def _compute_dtype(cluster: Cluster) -> str:
    device = cluster.nodes[0].device
    if device.kind == "cpu":
        return "float32"
    known = device.peak_flops_per_s
    return "bfloat16" if not known or "bfloat16" in known else "float16" if "float16" in known else "float32"
