"""`meshwright accuracy`: predicted beside published, for every row of tables of measurements."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["accuracy"]

_CALIBRATE = "Rows of each file and stack that fix its software constants first."


@click.command(epilog="TABLE.csv are tables of published runs, or folders of them.")
@click.argument("tables", nargs=-1, required=True, metavar="TABLE.csv...", type=click.Path(path_type=Path))
@click.option("--calibrate-on", type=int, default=0, show_default=True, metavar="N", help=_CALIBRATE)
@click.option("--json", is_flag=True, help="Print the numbers as JSON.")
def accuracy(tables: tuple[Path, ...], calibrate_on: int, json: bool) -> None:
    """Price every row that can be priced, and say how far off time and memory are."""
    from rich.console import Console

    from meshwright.cost.published import accuracy as price_tables

    with Console(stderr=True).status("pricing every row ..."):
        found = price_tables(list(tables), calibrate_on=calibrate_on)
    if json:
        import sys
        from json import dumps

        from meshwright.cost.published import accuracy_table

        sys.stdout.write(dumps(accuracy_table(found), indent=2) + "\n")
        return
    from meshwright.report.accuracy_view import accuracy_view

    Console().print(accuracy_view(found))
