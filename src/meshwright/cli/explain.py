"""`meshwright explain`: what a plan or a model would do, told without running it; what is asked is one of its modes."""

from __future__ import annotations

from typing import Any

import click

__all__ = ["explain"]

_WHAT = (
    "MODEL is a known model (llama-3-70b), a config.json or its folder, package.module:function, file.py:function, or "
    "a job file (JOB.toml) for the built-in decoder."
)
_SHARDING = "How tensor parallelism divides MODEL: what is split how, what is whole and why, the bytes of each rank."
_ANNOTATE = "Say how modules are divided ('layers.*.mlp.up=colwise'); as Engine(sharding=...)."
_SEQUENCE = "Cut activations between divided matrices along the tokens."


@click.command(epilog=_WHAT)
@click.argument("model", required=False)
@click.option("--sharding", "mode", flag_value="sharding", help=_SHARDING)
@click.option("--tp", type=int, metavar="N", help="Tensor-parallel ranks.")
@click.option("--annotate", multiple=True, metavar="PATTERN=STYLE", help=_ANNOTATE)
@click.option("--sequence-parallel", is_flag=True, help=_SEQUENCE)
@click.option("--dtype", default="float32", show_default=True, help="Of the stored parameters.")
@click.option("--json", is_flag=True, help="Print all of it as JSON, shapes of every rank included.")
@click.pass_context
def explain(
    context: click.Context,
    model: str | None,
    mode: str | None,
    tp: int | None,
    annotate: tuple[str, ...],
    sequence_parallel: bool,
    dtype: str,
    json: bool,
) -> None:
    """What would be done, without doing it: how a model is divided over tensor-parallel ranks."""
    from meshwright.cli.annotations import read_annotations
    from meshwright.errors import ConfigError

    if model is None and mode is None:
        click.echo(context.get_help())
        raise click.exceptions.Exit(2)
    if model is None:
        raise ConfigError(
            f"--{mode} of what?",
            why="no model is named",
            fix=f"for example: meshwright explain --{mode} llama-3-8b --tp 4",
        )
    if mode is None:
        raise ConfigError(
            f"what is to be explained of {model}?",
            why="a mode says so",
            fix=f"add --sharding: meshwright explain --sharding {model} --tp 4",
        )
    if tp is None:
        raise ConfigError(
            "--tp is missing", why="how a model is divided depends on the number of ranks", fix="add for example --tp 4"
        )
    annotations = read_annotations("--annotate", annotate)
    _explain_sharding(model, tp, annotations, sequence_parallel=sequence_parallel, dtype=dtype, json=json)


def _explain_sharding(
    model: str, tp: int, annotations: dict[str, str], *, sequence_parallel: bool, dtype: str, json: bool
) -> None:
    from meshwright.measure.sharding import explain_sharding

    job_file = model.lower().endswith(".toml")
    found = explain_sharding(
        _built_in(model) if job_file else model,
        tp,
        annotations=annotations,
        sequence_parallel=sequence_parallel,
        dtype=dtype,
        name=model if job_file else "",
    )
    if json:
        import sys
        from json import dumps

        from meshwright.report.sharding_view import sharding_table

        sys.stdout.write(dumps(sharding_table(found), indent=2) + "\n")
        return
    from rich.console import Console

    from meshwright.report.sharding_view import sharding_view

    Console().print(sharding_view(found))


def _built_in(job_file: str) -> Any:
    """A function that builds the decoder of a job file."""
    from meshwright.models import Decoder
    from meshwright.spec.job_file import read_job
    from meshwright.train.model import decoder_config

    config = decoder_config(read_job(job_file).model)
    return lambda: Decoder(config)
