"""Said is done, action by action: what each rank of a pipeline really does in a step, and in which order.

Modules, gradients, collectives and messages are seen where they happen (hooks, patched functions of torch.distributed),
not noted by the player, and held against the schedule.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshwright.models import Decoder, DecoderConfig
from meshwright.runtime import Engine
from meshwright.schedule import Schedule
from meshwright.spec import Job, parse_strategy
from tests.harness.models import loss_of
from tests.harness.ranks import run_ranks

LAYERS, SEQUENCE, MICROBATCHES = 4, 8, 4
SCHEDULES = (
    "1f1b",
    "gpipe",
    "zb-h1",
    "zb-v",
    "dualpipev",
    "interleaved-1f1b virtual_stages=2",
    "interleaved-zb virtual_stages=2",
    "looped-bfs virtual_stages=2",
)
VARIANTS = ("zero=0", "zero=2", "zero=3")
#: What was seen: "F", "G" (a gradient comes into a stage), "W" (one of its weights gets one), a message, a collective.
Event = tuple[Any, ...]


class Watch:
    """Sees what one rank does in a step."""

    def __init__(self, engine: Engine, lasts: dict[int, int]) -> None:
        self.events: list[Event] = []
        self._lasts, self._microbatch = lasts, -1
        self._known: set[int] = set()
        engine.model.register_forward_pre_hook(self._model, prepend=True)
        for stage, layer in lasts.items():
            module = engine.model.get_submodule(f"model.layers.{layer}")
            module.register_forward_hook(lambda m, args, output, stage=stage: self._layer(stage, output))
            product = module.get_submodule("self_attn.q_proj")  # inside of it weights are whole
            product.register_forward_pre_hook(lambda m, args, stage=stage: self._weight(stage, m.weight))

    def _model(self, module: Any, args: Any) -> None:
        self._microbatch = int(args[0][0, 0])

    def _layer(self, stage: int, output: torch.Tensor) -> None:
        microbatch = self._microbatch
        self.events.append(("F", stage, microbatch))
        output.register_hook(lambda _: self.events.append(("G", stage, microbatch)))

    def _weight(self, stage: int, weight: torch.Tensor) -> None:
        if id(weight) not in self._known:
            self._known.add(id(weight))
            weight.register_hook(lambda _: self.events.append(("W", stage)))

    def patched(self, name: str, kind: str, peer: str = "") -> Any:
        """A function of torch.distributed that tells that it was called."""
        plain = getattr(dist, name)

        def told(*args: Any, **kwargs: Any) -> Any:
            self.events.append((kind, kwargs[peer]) if peer else (kind,))
            return plain(*args, **kwargs)

        return mock.patch.object(dist, name, told)


@cache
def seen(cases: tuple[str, ...]) -> list[dict[str, tuple[list[Event], Schedule, int]]]:
    """What each of four ranks did, and its schedule."""
    return run_ranks(4, _watch_all, cases, timeout_s=240)


def _watch_all(cases: tuple[str, ...]) -> dict[str, tuple[list[Event], Schedule, int]]:
    return {case: _watch(case) for case in cases}


def _watch(case: str) -> tuple[list[Event], Schedule, int]:
    strategy = parse_strategy(f"dp=2 pp=2 {case}")
    config = DecoderConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=SEQUENCE,
    )
    engine = Engine(
        lambda: Decoder(config),
        loss_of("decoder"),
        lambda held: torch.optim.SGD(held, lr=0.1),
        Job(global_batch=2 * MICROBATCHES, sequence=SEQUENCE),
        strategy,
        batch_scope="local",
        measure_memory="never",
    )
    ids = torch.arange(MICROBATCHES)[:, None].expand(-1, SEQUENCE).contiguous()
    engine.step((ids, ids))  # which also tells shapes
    stages = strategy.pp * strategy.virtual_stages
    size, rank = LAYERS // stages, strategy.place(dist.get_rank())["pp"]
    own = [stage for stage in range(stages) if engine.schedule.stage_ranks[stage] == rank]
    watch = Watch(engine, {stage: (stage + 1) * size - 1 for stage in own})
    with ExitStack() as stack:
        stack.enter_context(watch.patched("isend", "send", "group_dst"))
        stack.enter_context(watch.patched("irecv", "receive", "group_src"))
        stack.enter_context(watch.patched("all_gather_single", "gather"))
        stack.enter_context(watch.patched("reduce_scatter_single", "reduce"))
        engine.step((ids, ids))
    return watch.events, engine.schedule, rank


def expected(schedule: Schedule, rank: int) -> list[Event]:
    """What the schedule says of a rank, as `Watch` sees it, without collectives."""
    found: list[Event] = []
    for action in schedule.ranks[rank]:
        kind, stage, microbatch, _, peer, _ = action
        if kind in ("send", "receive"):
            found.append((kind, peer))
        elif kind == "forward":
            found.append(("F", stage, microbatch))
        elif kind == "backward-input":
            found += [("G", stage, microbatch)] if stage else []
        elif kind == "backward-weight":
            found += [("W", stage)] if stage else [("G", stage, microbatch), ("W", stage)]
        elif kind == "backward":
            found += [("G", stage, microbatch), ("W", stage)]
    return found


def hold(case: str, cases: tuple[str, ...]) -> None:
    for ranks in seen(cases):
        events, schedule, rank = ranks[case]
        assert [event for event in events if event[0] not in ("gather", "reduce")] == expected(schedule, rank)
        held_units(events, schedule.exact(), rank)


def held_units(events: list[Event], schedule: Schedule, rank: int) -> None:
    """When a forward has come to the end of a stage, all that earlier actions gather and reduce is done, and what it
    gathers itself; nothing of later ones."""
    counts, ends = {"gather": 0, "reduce": 0}, []
    for event in events:
        if event[0] in counts:
            counts[event[0]] += 1
        elif event[0] == "F":
            ends.append((counts["gather"], counts["reduce"]))
    sharded = any(action.kind == "gather" for action in schedule.ranks[rank])
    told, wanted = {"gather": 0, "reduce": 0}, []
    for action in schedule.ranks[rank]:
        if action.kind in told:
            told[action.kind] += 1
        elif action.kind == "forward":
            wanted.append((told["gather"], told["reduce"] if sharded else 0))
    assert ends == wanted
    assert counts == {"gather": told["gather"], "reduce": told["reduce"] if sharded else 0}


FEW = tuple(f"{variant} schedule={name}" for variant, name in zip(VARIANTS * 3, SCHEDULES, strict=False))
ALL = tuple(f"{variant} schedule={name}" for variant in VARIANTS for name in SCHEDULES)


@pytest.mark.parametrize("case", FEW)
def test_ranks_do_what_their_schedule_says_in_its_order(case: str) -> None:
    hold(case, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL)
def test_every_schedule_is_done_in_its_order_under_every_stage(case: str) -> None:
    hold(case, ALL)
