"""`meshwright accuracy`: predicted beside published, for every row of tables of measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["accuracy"]


def accuracy(
    tables: Annotated[
        list[Path], typer.Argument(metavar="TABLE.csv...", help="Tables of published runs, or folders of them.")
    ],
    calibrate_on: Annotated[
        int, typer.Option(metavar="N", help="Rows of each file and stack that fix its software constants first.")
    ] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Price every row that can be priced, and say how far off time and memory are."""
    from rich.console import Console

    from meshwright.cost.published import accuracy as price_tables

    with Console(stderr=True).status("pricing every row ..."):
        found = price_tables(tables, calibrate_on=calibrate_on)
    if json:
        import sys
        from json import dumps

        from meshwright.cost.published import accuracy_table

        sys.stdout.write(dumps(accuracy_table(found), indent=2) + "\n")
        return
    from meshwright.report.accuracy_view import accuracy_view

    Console().print(accuracy_view(found))
