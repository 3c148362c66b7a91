"""The command line: `meshwright`, one file per command. Nothing here imports torch; commands do so when they run."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from meshwright._version import __version__
from meshwright.cli.accuracy import accuracy
from meshwright.cli.calibrate import calibrate
from meshwright.cli.estimate import estimate
from meshwright.cli.generate import generate
from meshwright.cli.plan import plan
from meshwright.cli.train import train
from meshwright.errors import MeshwrightError, RankFailure

__all__ = ["app", "main"]

INTERRUPTED = 130


class _Commands(TyperGroup):
    """Turns every error made on purpose into one message and an exit code: 2 for a mistake, 1 for a failed rank."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MeshwrightError as error:
            print(f"meshwright: {error}", file=sys.stderr)
            raise typer.Exit(1 if isinstance(error, RankFailure) else 2) from None
        except KeyboardInterrupt:
            print("meshwright: interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Commands,
    name="meshwright",
    help="Finds the fastest parallel strategy for a PyTorch model on your machines, says why, and trains with it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(plan)
app.command()(estimate)
app.command()(generate)
app.command()(calibrate)
app.command()(accuracy)


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", is_eager=True, help="Show the version.")) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; does not return."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
