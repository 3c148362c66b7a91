"""`meshwright explain`: what a plan or a model would do, told without running it; what is asked is one of its modes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

__all__ = ["explain"]

_WHAT = (
    "MODEL is a known model (llama-3-70b), a config.json or its folder, package.module:function, file.py:function, or "
    "a job file (JOB.toml) for the built-in decoder. PLAN.toml is what meshwright plan -o wrote."
)
_SHARDING = "How tensor parallelism divides MODEL: what is split how, what is whole and why, the bytes of each rank."
_TIMELINE = "The schedule of PLAN.toml, drawn: who does what when, who is idle, what the step's time is made of."
_ANNOTATE = "Say how modules are divided ('layers.*.mlp.up=colwise'); as Engine(sharding=...)."
_SEQUENCE = "Cut activations between divided matrices along the tokens."
_OUT = "With --timeline: write it to a picture (.svg, .png), or a trace for ui.perfetto.dev (.json)."
_MODEL = "With --timeline: the plan's model, where it is neither the built-in decoder nor in the catalogue."
#: Options that belong to one mode.
_ONLY = {"--sharding": ("tp", "annotate", "sequence_parallel", "dtype"), "--timeline": ("model", "out")}


@click.command(epilog=_WHAT)
@click.argument("subject", required=False, metavar="[MODEL|PLAN.toml]")
@click.option("--sharding", "mode", flag_value="sharding", help=_SHARDING)
@click.option("--timeline", "mode", flag_value="timeline", help=_TIMELINE)
@click.option("--tp", type=int, metavar="N", help="Tensor-parallel ranks.")
@click.option("--annotate", multiple=True, metavar="PATTERN=STYLE", help=_ANNOTATE)
@click.option("--sequence-parallel", is_flag=True, help=_SEQUENCE)
@click.option("--dtype", default="float32", show_default=True, help="Of the stored parameters.")
@click.option("--model", metavar="MODEL", help=_MODEL)
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="FILE", help=_OUT)
@click.option("--json", is_flag=True, help="Print all of it as JSON: shapes of every rank, every action's times.")
@click.pass_context
def explain(
    context: click.Context,
    subject: str | None,
    mode: str | None,
    tp: int | None,
    annotate: tuple[str, ...],
    sequence_parallel: bool,
    dtype: str,
    model: str | None,
    out: Path | None,
    json: bool,
) -> None:
    """What would be done, without doing it: how tensor parallelism divides a model, how a pipeline spends its time."""
    if subject is None and mode is None:
        click.echo(context.get_help())
        raise click.exceptions.Exit(2)
    subject, mode = _require_question(subject, mode)
    _require_options_of(mode, context)
    if mode == "timeline":
        from meshwright.cli.timeline import explain_timeline

        explain_timeline(subject, model=model, out=out, json=json)
        return
    from meshwright.cli.annotations import read_annotations
    from meshwright.errors import ConfigError

    if tp is None:
        raise ConfigError(
            "--tp is missing", why="how a model is divided depends on the number of ranks", fix="add for example --tp 4"
        )
    annotations = read_annotations("--annotate", annotate)
    _explain_sharding(subject, tp, annotations, sequence_parallel=sequence_parallel, dtype=dtype, json=json)


def _require_question(subject: str | None, mode: str | None) -> tuple[str, str]:
    """What is asked of what."""
    from meshwright.errors import ConfigError

    if subject is None:
        noun, example = ("model", "llama-3-8b --tp 4") if mode == "sharding" else ("plan", "plan.toml")
        raise ConfigError(
            f"--{mode} of what?",
            why=f"no {noun} is named",
            fix=f"for example: meshwright explain --{mode} {example}",
        )
    if mode is None:
        other = f", or, where it is a plan, --timeline: meshwright explain --timeline {subject}"
        raise ConfigError(
            f"what is to be explained of {subject}?",
            why="a mode says so",
            fix=f"add --sharding: meshwright explain --sharding {subject} --tp 4"
            + (other if subject.lower().endswith(".toml") else ""),
        )
    return subject, mode


def _require_options_of(mode: str, context: click.Context) -> None:
    """Refuse options that belong to another mode, instead of passing over them."""
    from meshwright.errors import ConfigError

    for other, names in _ONLY.items():
        if other == f"--{mode}":
            continue
        for name in names:
            if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
                option = "--" + name.replace("_", "-")
                raise ConfigError(
                    f"{option} with --{mode}", why=f"it belongs to {other}", fix=f"leave {option} out, or use {other}"
                )


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
