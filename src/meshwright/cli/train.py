"""`meshwright train`: plan for this machine, say why, train, and show predicted beside measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["train"]

_MACHINES = "Several machines"


def train(
    job: Annotated[
        Path | None,
        typer.Argument(
            metavar="[JOB.toml]", help="The job file. Without one, a small model of this Python's own sources."
        ),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Execute this plan file as it is, without planning.")] = None,
    pin: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Fix part of the strategy (zero=3, microbatch<=4).")
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(metavar="'KEY=VALUE ...'", help="The whole strategy by hand ('dp=2 zero=3').")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the job file (train.steps=100)."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest complete checkpoint in --out.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="The folder of the run, instead of the job file's.")] = None,
    nnodes: Annotated[int, typer.Option(help="Number of machines.", rich_help_panel=_MACHINES)] = 1,
    node_rank: Annotated[
        int | None, typer.Option(help="This machine's number, with --rdzv-backend static.", rich_help_panel=_MACHINES)
    ] = None,
    rdzv_endpoint: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the machines meet.", rich_help_panel=_MACHINES)
    ] = "",
    rdzv_id: Annotated[str, typer.Option(help="The name they meet under.", rich_help_panel=_MACHINES)] = "",
    rdzv_backend: Annotated[
        str, typer.Option(help="torchrun's rendezvous backend.", rich_help_panel=_MACHINES)
    ] = "c10d",
) -> None:
    """Plan for this machine, say why, train, and show predicted beside measured."""
    from meshwright.train.launch import Nodes
    from meshwright.train.run import TrainOptions, train_job

    train_job(
        TrainOptions(
            job=job,
            plan=plan,
            pins=tuple(pin or ()),
            strategy=strategy,
            sets=tuple(set_ or ()),
            resume=resume,
            out=out,
            nodes=Nodes(
                nnodes=nnodes,
                node_rank=node_rank,
                rdzv_endpoint=rdzv_endpoint,
                rdzv_id=rdzv_id,
                rdzv_backend=rdzv_backend,
            ),
        )
    )
