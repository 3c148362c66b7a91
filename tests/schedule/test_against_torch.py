"""Every schedule's compute order, action by action, against the one PyTorch makes for the same numbers.

GPipe and 1F1B: what PyTorch really runs, recorded by a stage that only notes what is asked of it (the order that 2.13
states for 1F1B in `pipeline_order` skips the first microbatch of the last stage; its step does not). The others: their
`pipeline_order`, with the pairs of DualPipeV one after the other.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining.stage import _PipelineStageBase

from meshwright.errors import UnsupportedCombination
from meshwright.schedule import compute_orders, parse_schedule

LETTERS = {"forward": "F", "backward": "B", "backward-input": "I", "backward-weight": "W"}


class Stage(_PipelineStageBase):
    """A stage without module or process group; it notes the order of forwards and backwards."""

    def __init__(self, index: int, stages: int, ranks: int, rank: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, ranks, rank
        self.submod, self.has_backward, self.seen = None, True, []

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.seen.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.seen.append(f"{self.stage_index}B{microbatch}")

    def no_messages(self, microbatch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_messages

    def perform_reduce_grad(self, scale: int) -> None: ...

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any: ...

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any: ...

    def _create_grad_recv_info(self, *args: Any, **kwargs: Any) -> Any: ...


def run_by_torch(kind: type, ranks: int, microbatches: int) -> list[list[str]]:
    """What each rank of a one-stage-a-rank schedule really does."""
    orders = []
    for rank in range(ranks):
        stage = Stage(rank, ranks, ranks, rank)
        schedule = kind(stage, microbatches)
        schedule._initialize_stage = lambda *args: None
        schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
        orders.append(stage.seen)
    return orders


def stated_by_torch(kind: type, ranks: int, virtual: int, microbatches: int) -> list[list[str]]:
    """The compute order a schedule of several stages a rank states, without its pauses."""
    stages = [Stage(index * ranks, ranks * virtual, ranks, 0) for index in range(virtual)]
    schedule = kind(stages, microbatches)
    return [
        [str(leaf) for action in order if action is not None for leaf in (action.sub_actions or (action,))]
        for _, order in sorted(schedule.pipeline_order.items())
    ]


def ours(name: str, ranks: int, virtual: int, microbatches: int) -> list[list[str]]:
    orders = compute_orders(name, ranks=ranks, microbatches=microbatches, virtual_stages=virtual)
    return [[f"{a.stage}{LETTERS[a.kind]}{a.microbatch}" for a in order] for order in orders]


@pytest.mark.parametrize(
    ("ranks", "microbatches"), [(1, 1), (1, 4), (2, 2), (2, 7), (3, 3), (4, 4), (4, 9), (5, 11), (8, 16)]
)
def test_one_stage_a_rank_runs_what_torch_runs(ranks: int, microbatches: int) -> None:
    assert ours("gpipe", ranks, 1, microbatches) == run_by_torch(theirs.ScheduleGPipe, ranks, microbatches)
    assert ours("1f1b", ranks, 1, microbatches) == run_by_torch(theirs.Schedule1F1B, ranks, microbatches)


LOOPED = {
    "interleaved-1f1b": theirs.ScheduleInterleaved1F1B,
    "looped-bfs": theirs.ScheduleLoopedBFS,
    "interleaved-zb": theirs.ScheduleInterleavedZeroBubble,
}


@pytest.mark.parametrize("name", LOOPED)
@pytest.mark.parametrize(
    ("ranks", "virtual", "microbatches"),
    [(1, 2, 3), (2, 1, 4), (2, 2, 4), (3, 2, 6), (3, 4, 2), (4, 2, 10), (4, 3, 8), (4, 2, 3), (5, 2, 15)],
)
def test_several_stages_a_rank_are_ordered_as_by_torch(name: str, ranks: int, virtual: int, microbatches: int) -> None:
    assert ours(name, ranks, virtual, microbatches) == stated_by_torch(LOOPED[name], ranks, virtual, microbatches)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "interleaved-zb"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 5), (3, 11), (4, 9)])
def test_what_torch_refuses_is_refused(name: str, ranks: int, microbatches: int) -> None:
    with pytest.raises(ValueError, match="multiple of the number of rounds"):
        stated_by_torch(LOOPED[name], ranks, 3, microbatches)
    with pytest.raises(UnsupportedCombination, match="equal rounds"):
        ours(name, ranks, 3, microbatches)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 4), (3, 6), (4, 8), (4, 12), (6, 18)])
def test_zb_h1_is_the_zero_bubble_schedule_with_one_stage_a_rank(ranks: int, microbatches: int) -> None:
    wanted = stated_by_torch(theirs.ScheduleInterleavedZeroBubble, ranks, 1, microbatches)
    assert ours("zb-h1", ranks, 1, microbatches) == wanted


@pytest.mark.parametrize(
    ("ranks", "microbatches"), [(1, 1), (1, 2), (2, 1), (2, 3), (2, 4), (3, 5), (4, 8), (4, 3), (5, 13), (6, 24)]
)
def test_zb_v_is_ordered_as_by_torch(ranks: int, microbatches: int) -> None:
    assert ours("zb-v", ranks, 2, microbatches) == stated_by_torch(theirs.ScheduleZBVZeroBubble, ranks, 2, microbatches)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 4), (2, 7), (3, 6), (3, 8), (4, 8), (5, 12), (8, 20)])
def test_dualpipev_is_ordered_as_by_torch(ranks: int, microbatches: int) -> None:
    assert ours("dualpipev", ranks, 2, microbatches) == stated_by_torch(
        theirs.ScheduleDualPipeV, ranks, 2, microbatches
    )


@pytest.mark.parametrize(
    ("kind", "virtual"), [(theirs.ScheduleDualPipeV, 2), (theirs.ScheduleInterleavedZeroBubble, 3)]
)
def test_a_csv_written_by_torch_is_read(kind: type, virtual: int, tmp_path: Any) -> None:
    stages = [Stage(index * 2, 2 * virtual, 2, 0) for index in range(virtual)]
    schedule = kind(stages, 6)
    schedule._dump_csv(tmp_path / "theirs.csv", format="compute_only")
    orders, stage_ranks, microbatches = parse_schedule((tmp_path / "theirs.csv").read_text(), name="theirs")
    assert microbatches == 6
    assert dict(enumerate(stage_ranks)) == schedule.stage_index_to_group_rank
    assert [[f"{a.stage}{LETTERS[a.kind]}{a.microbatch}" for a in order] for order in orders] == stated_by_torch(
        kind, 2, virtual, 6
    )
