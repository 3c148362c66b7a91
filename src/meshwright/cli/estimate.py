"""`meshwright estimate`: the memory of a strategy for a model on machines, without any of them."""

from __future__ import annotations

import click

from meshwright.collector import collector_paused, collector_spared_at_exit

__all__ = ["estimate"]

_MODEL = (
    "MODEL is a known model (llama-3-70b), a config.json or its folder, package.module:function or file.py:function."
)
_CLUSTER = "Machines: 8xH100-80GB:4 (4 nodes of 8), a TOML file, or 'this'."
_STRATEGY = "The strategy ('dp=8 tp=8 pp=4 schedule=1f1b zero=1')."
_SET = "Change a value of the job (job.compute_dtype=float32)."


@click.command(epilog=_MODEL)
@click.argument("model")
@click.option("--global-batch", type=int, required=True, help="Sequences per optimizer step.")
@click.option("--seq", type=int, required=True, help="Tokens per sequence.")
@click.option("--cluster", default="this", show_default=True, metavar="CLUSTER", help=_CLUSTER)
@click.option("--strategy", default="dp=1", show_default=True, metavar="'KEY=VALUE ...'", help=_STRATEGY)
@click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="A value of the job (job.compute_dtype=float32)."
)
@click.option("--json", is_flag=True, help="Print the numbers as JSON, in bytes.")
@collector_paused()  # also while modules are loaded
def estimate(
    model: str, global_batch: int, seq: int, cluster: str, strategy: str, sets: tuple[str, ...], json: bool
) -> None:
    """The memory of every pipeline rank: by category, at rest and in step, and whether it fits."""
    from meshwright.cli.models import find_described
    from meshwright.cost import estimate as price_memory
    from meshwright.spec import Layout, job_for, parse_strategy
    from meshwright.spec.clusters import parse_cluster

    collector_spared_at_exit()
    machines = parse_cluster(cluster)
    chosen = parse_strategy(strategy)
    job = job_for(machines, global_batch=global_batch, sequence=seq, changes=sets)
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

    Console(emoji=False).print(estimate_view(found))
