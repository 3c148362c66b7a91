"""Sends and receives: from the compute order of each rank to an order in which no rank waits for ever.

All ranks are run on one clock, on which every compute action takes one tick. What an action makes is sent at the tick
at which it ends, and received at that same tick on the other rank, before what starts then. That is one order of
everything in which a send and its receive stand side by side, and each rank's list is its part of it. So even where a
send waits for its receive (rendezvous), no circle of waiting ranks can form.
"""

from __future__ import annotations

from meshwright.errors import PlanError
from meshwright.schedule.action import new_action
from meshwright.schedule.orders import Orders

__all__ = ["with_transfers"]


def with_transfers(name: str, orders: Orders, stage_ranks: tuple[int, ...], microbatches: int) -> Orders:
    """The orders with a send and a receive wherever neighbouring stages lie on different ranks.

    Raises:
        PlanError: the orders cannot run: ranks wait for each other, or for what no rank makes.
    """
    last, m = len(stage_ranks) - 1, microbatches
    # By stage and microbatch: whether what its forward and its backward need is there.
    ready_forward = bytearray(b"\1" * m + bytes(last * m))
    ready_backward = bytearray(bytes(last * m) + b"\1" * m)
    placed: Orders = [[] for _ in orders]
    position = [0] * len(orders)
    idle = bytearray(b"\1" * len(orders))
    # Ranks that may start an action at this tick.
    free = list(range(len(orders)))
    while free:
        started = []
        for rank in free:
            if not idle[rank] or position[rank] == len(orders[rank]):
                continue
            action = orders[rank][position[rank]]
            kind, stage, microbatch, _, _, _ = action
            if kind == "forward":
                ready = ready_forward[stage * m + microbatch]
            else:
                ready = kind == "backward-weight" or ready_backward[stage * m + microbatch]
            if ready:
                idle[rank] = 0
                position[rank] += 1
                placed[rank].append(action)
                started.append(rank)
        free = started.copy()
        for rank in started:
            idle[rank] = 1
            kind, stage, microbatch, _, _, _ = orders[rank][position[rank] - 1]
            if kind == "forward":
                if stage == last:
                    continue
                other, there = stage + 1, ready_forward
            elif kind == "backward-weight" or stage == 0:
                continue
            else:
                other, there = stage - 1, ready_backward
            there[other * m + microbatch] = 1
            peer = stage_ranks[other]
            if peer != rank:
                placed[rank].append(new_action(("send", stage, microbatch, None, peer, other)))
                placed[peer].append(new_action(("receive", other, microbatch, None, rank, stage)))
                if idle[peer]:
                    free.append(peer)
    _refuse_stuck(name, orders, position)
    return placed


def _refuse_stuck(name: str, orders: Orders, position: list[int]) -> None:
    for rank, actions in enumerate(orders):
        if position[rank] < len(actions):
            action = actions[position[rank]]
            raise PlanError(
                f"schedule {name} cannot run: rank {rank} waits for ever at {action.kind} of microbatch "
                f"{action.microbatch} on stage {action.stage}",
                why="the stage before (or behind) it never runs that microbatch, or waits for this rank itself",
                fix="let each stage run a microbatch after the stage it gets it from",
            )
