"""The command line: `meshwright`, one file per command. Nothing here imports torch; commands do so when they run."""

from __future__ import annotations

import sys
from typing import Any

import click

from meshwright._version import __version__
from meshwright.cli.accuracy import accuracy
from meshwright.cli.calibrate import calibrate
from meshwright.cli.estimate import estimate
from meshwright.cli.explain import explain
from meshwright.cli.generate import generate
from meshwright.cli.plan import plan
from meshwright.cli.train import train
from meshwright.cli.verify import verify
from meshwright.errors import MeshwrightError, RankFailure

__all__ = ["app", "main"]

INTERRUPTED = 130


class _Commands(click.Group):
    """Turns every error made on purpose into one message and an exit code: 2 for a mistake, 1 for a failed rank."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MeshwrightError as error:
            print(f"meshwright: {error}", file=sys.stderr)
            raise click.exceptions.Exit(1 if isinstance(error, RankFailure) else 2) from None
        except KeyboardInterrupt:
            print("meshwright: interrupted", file=sys.stderr)
            raise click.exceptions.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            raise click.exceptions.Exit(1) from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=_Commands,
    name="meshwright",
    help="Finds the fastest parallel strategy for a PyTorch model on your machines, says why, and trains with it.",
    context_settings={"max_content_width": 100},
)
@click.version_option(__version__, message="%(version)s", help="Show the version.")
def app() -> None:
    """All commands."""


for command in (train, plan, estimate, explain, verify, generate, calibrate, accuracy):
    app.add_command(command)


def main() -> None:
    """Run the command line; does not return."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
