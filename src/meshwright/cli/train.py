"""`meshwright train`: plan for this machine, say why, train, and show predicted beside measured."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["train"]

_JOB = "JOB.toml is the job file. Without one, a small model of this Python's own sources is trained."
_SET = "Change a value of the job file (train.steps=100)."
_BACKEND = "Several machines: torchrun's rendezvous backend."


@click.command(epilog=_JOB)
@click.argument("job", metavar="[JOB.toml]", required=False, type=click.Path(path_type=Path))
@click.option("--plan", type=click.Path(path_type=Path), help="Execute this plan file as it is, without planning.")
@click.option("--pin", multiple=True, metavar="KEY=VALUE", help="Fix part of the strategy (zero=3, microbatch<=4).")
@click.option("--strategy", metavar="'KEY=VALUE ...'", help="The whole strategy by hand ('dp=2 zero=3').")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help=_SET)
@click.option("--resume", is_flag=True, help="Go on from the newest complete checkpoint in --out.")
@click.option("--out", type=click.Path(path_type=Path), help="The folder of the run, instead of the job file's.")
@click.option("--trace", metavar="FILE", help="Write when ranks did what in one step, for ui.perfetto.dev.")
@click.option("--nnodes", type=int, default=1, show_default=True, help="Several machines: their number.")
@click.option("--node-rank", type=int, help="Several machines: this one's number, with --rdzv-backend static.")
@click.option("--rdzv-endpoint", default="", metavar="HOST:PORT", help="Several machines: where they meet.")
@click.option("--rdzv-id", default="", help="Several machines: the name they meet under.")
@click.option(
    "--rdzv-backend", default="c10d", show_default=True, help="Several machines: torchrun's rendezvous backend."
)
def train(
    job: Path | None,
    plan: Path | None,
    pin: tuple[str, ...],
    strategy: str | None,
    sets: tuple[str, ...],
    resume: bool,
    out: Path | None,
    trace: str | None,
    nnodes: int,
    node_rank: int | None,
    rdzv_endpoint: str,
    rdzv_id: str,
    rdzv_backend: str,
) -> None:
    """Plan for this machine, say why, train, and show predicted beside measured."""
    from json import dumps

    from meshwright.train.launch import Nodes
    from meshwright.train.run import TrainOptions, train_job

    train_job(
        TrainOptions(
            job=job,
            plan=plan,
            pins=pin,
            strategy=strategy,
            sets=(*sets, *(() if trace is None else (f"train.trace={dumps(trace)}",))),
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
