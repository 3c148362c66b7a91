"""`meshwright estimate`: the memory of a strategy for a model on machines, without any of them."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["estimate"]


def estimate(
    model: Annotated[
        str, typer.Argument(help="A known model (llama-3-70b), a config.json, or package.module:function.")
    ],
    global_batch: Annotated[int, typer.Option(help="Sequences per optimizer step.")],
    seq: Annotated[int, typer.Option(help="Tokens per sequence.")],
    cluster: Annotated[
        str, typer.Option(metavar="CLUSTER", help="Machines: 8xH100-80GB:4 (4 nodes of 8), a TOML file, or 'this'.")
    ] = "this",
    strategy: Annotated[
        str, typer.Option(metavar="'KEY=VALUE ...'", help="The strategy ('dp=8 tp=8 pp=4 schedule=1f1b zero=1').")
    ] = "dp=1",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the job (job.compute_dtype=float32)."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON, in bytes.")] = False,
) -> None:
    """The memory of every pipeline rank: by category, at rest and in step, and whether it fits."""
    from meshwright.cli.models import find_described
    from meshwright.cost import estimate as price_memory
    from meshwright.spec import Layout, job_for, parse_strategy
    from meshwright.spec.clusters import parse_cluster

    machines = parse_cluster(cluster)
    chosen = parse_strategy(strategy)
    job = job_for(machines, global_batch=global_batch, sequence=seq, changes=set_ or ())
    described = find_described(model, job.sequence)
    whole = described.at(Layout(sequence=job.sequence, compute_dtype=job.compute_dtype)).parameters
    found = price_memory(described.at(Layout.of(job, chosen)), machines, job, chosen, model_parameters=whole)
    if json:
        import sys
        from dataclasses import asdict
        from json import dumps

        table = asdict(found) | {"fits": found.fits, "short_bytes": found.short_bytes, "worst_rank": found.worst.rank}
        sys.stdout.write(dumps(table, indent=2) + "\n")
        return
    from rich.console import Console

    from meshwright.report import estimate_view

    Console().print(estimate_view(found))
