"""`meshwright calibrate`: measure this machine, so that plans for it stand on what it does and not on what is usual."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["calibrate"]

_OUT = "Also write a cluster file, for --cluster."
_RANKS = "Measure on N devices at once.  [default: on all of them, as training does]"


@click.command
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="FILE.toml", help=_OUT)
@click.option("--ranks", type=int, default=0, metavar="N", help=_RANKS)
@click.option("--force", is_flag=True, help="Measure again although a measurement is kept.")
def calibrate(out: Path | None, ranks: int, force: bool) -> None:
    """Measure this machine in under a minute and keep the figures: `plan`, `train` and `--cluster this` use them."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from meshwright.errors import ConfigError
    from meshwright.report.machine_view import machine_view
    from meshwright.spec.files import write_text
    from meshwright.spec.machine import plain_machine
    from meshwright.spec.measured import Fingerprint, kept_measurement, measurement_path, measurement_text

    screen = Console()
    plain = plain_machine()
    kept, why_not = (None, "") if force else kept_measurement(plain)
    if why_not:
        screen.print(f"{why_not}: measuring again", soft_wrap=True)
    if kept is None:
        from meshwright.measure.calibrate import calibrate as measure

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=screen, transient=True) as bar:
            task = bar.add_task("starting", total=None)
            found = measure(
                ranks=ranks,
                progress=lambda what, done, of: bar.update(task, description=what, completed=done, total=of),
            )
    else:
        found = kept
    screen.print(machine_view(found))
    text = measurement_text(found, Fingerprint.of(plain))
    if kept is not None:
        screen.print(f"kept in {measurement_path()}; --force measures again", soft_wrap=True)
    else:
        try:
            path = measurement_path()
            write_text(path, text)
            screen.print(f"kept in {path}", soft_wrap=True)
        except ConfigError as error:
            screen.print(f"not kept: {error}", soft_wrap=True, markup=False)
            if out is None:
                screen.print("--out FILE.toml writes the figures where you want them", markup=False)
    if out is not None:
        write_text(out, text)
        screen.print(f"written to {out}", soft_wrap=True)
