"""`meshwright verify`: proof that a strategy gives the numbers of one process on the user's own model."""

from __future__ import annotations

import click

__all__ = ["verify"]

_MODEL = (
    "MODEL is a known model (llama-3-70b), a config.json or its folder, package.module:function or file.py:function. "
    "Exit code 0: equal; 1: not equal; 2: it could not be tried."
)
_STRATEGY = "The strategy ('dp=2 zero=3 microbatch=2')."
_SHARDING = (
    "How tensor parallelism divides modules: layers.*.up=colwise (rowwise, vocab, sequence, replicate, gather-output), "
    "repeated. The rest as the model's own plan has it."
)
_TIMEOUT = "Seconds after which it is given up."


@click.command(epilog=_MODEL)
@click.argument("model")
@click.option("--strategy", required=True, metavar="'KEY=VALUE ...'", help=_STRATEGY)
@click.option("--sharding", multiple=True, metavar="PATTERN=STYLE", help=_SHARDING)
@click.option("--seq", type=int, default=17, show_default=True, help="Tokens per sequence.")
@click.option("--timeout", type=float, default=600.0, show_default=True, metavar="SECONDS", help=_TIMEOUT)
@click.option("--json", is_flag=True, help="Print the numbers as JSON.")
def verify(model: str, strategy: str, sharding: tuple[str, ...], seq: int, timeout: float, json: bool) -> None:
    """Run a small copy of a model under a strategy and in one process, in float64, and compare their numbers."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from meshwright.cli.annotations import read_annotations
    from meshwright.errors import RankFailure
    from meshwright.measure.verify import verify as compare

    annotations = read_annotations("--sharding", sharding)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    screen = Console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("starting", total=None)
        try:
            found = compare(
                model,
                strategy,
                sharding=annotations,
                sequence=seq,
                timeout_s=timeout,
                progress=lambda what, done, of: bar.update(task, description=what),
            )
        except RankFailure as error:
            bar.stop()
            print(f"meshwright: {error}\nnot verified: {strategy} on {model}: {error.what}")
            raise click.exceptions.Exit(1) from None
    if json:
        import sys
        from dataclasses import asdict
        from json import dumps

        table = asdict(found) | {"equal": found.equal, "largest": found.largest, "verdict": str(found)}
        sys.stdout.write(dumps(table, indent=2) + "\n")
    else:
        from meshwright.report.verified_view import verified_view

        Console().print(verified_view(found), markup=False)
        print(found)
    if not found.equal:
        raise click.exceptions.Exit(1)
