"""Said is done under tensor parallelism: bytes and collectives that the engine counts are those of the price.

Sizes divide by little: vocabulary 101, MLPs 250 wide, 6 query heads to 2 key/value heads (over 3 ranks each picks).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest

from meshwright.spec import Job, Layout, parse_strategy
from tests.cost.counted import SEQUENCE, Counted, compare, count, described
from tests.harness.ranks import run_ranks

#: Relative, of saved activations with logits.
ACTIVATIONS = 0.03
ACCUMULATION = 2
STEPS = 3


class Case(NamedTuple):
    """A strategy for a model."""

    model: str
    words: str
    tied: bool = False
    compute: str = "float32"

    @property
    def world(self) -> int:
        """Ranks."""
        return parse_strategy(self.words).world_size

    @property
    def job(self) -> Job:
        """What they compute."""
        strategy = parse_strategy(self.words)
        sequences = ACCUMULATION * strategy.dp * strategy.microbatch
        return Job(global_batch=sequences, sequence=SEQUENCE, compute_dtype=self.compute)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{self.model} {self.words} {self.compute}" + (" tied" if self.tied else "")


SP = "sequence_parallel=true"
#: Each model, degree, dtype and recompute policy. Those of one model with as many ranks are counted in one launch.
FAST = (
    Case("decoder", "tp=2"),
    Case("decoder", f"tp=2 {SP} recompute=selective", tied=True),
    Case("decoder", f"tp=2 {SP} microbatch=2", compute="bfloat16"),
    Case("gpt2", "tp=2 recompute=selective microbatch=2", tied=True),
    Case("gpt2", f"tp=2 {SP} recompute=full", compute="bfloat16"),
    Case("llama", "tp=3 recompute=selective", compute="bfloat16"),
    Case("llama", f"dp=2 tp=2 zero=1 {SP}", compute="bfloat16"),
    Case("llama", "dp=2 tp=2 zero=3 recompute=full", tied=True),
)
MORE = (
    Case("decoder", "tp=3 recompute=full"),
    Case("decoder", "tp=6"),
    Case("decoder", "dp=2 tp=2 zero=0", tied=True),
    Case("decoder", f"dp=2 tp=2 zero=3 {SP} recompute=selective"),
    Case("llama", "tp=2 recompute=full", tied=True, compute="bfloat16"),
    Case("llama", f"tp=2 {SP} recompute=full microbatch=2"),
    Case("gpt2", f"tp=2 {SP}", tied=True),
    Case("gpt2", "tp=3 microbatch=2", tied=True),
    Case("gpt2", "dp=2 tp=2 zero=2 recompute=full", tied=True),
)


def lattice() -> list[Case]:
    """Every model, degree, ZeRO stage and recompute policy, with and without sequence parallelism."""
    found = []
    for model in ("decoder", "llama", "gpt2"):
        for index, again in enumerate(("none", "selective", "full", "full recompute_blocks=2")):
            for cut in ("", f" {SP}"):
                compute, tied = ("float32", "bfloat16")[(index + len(cut)) % 2], bool(index % 2)
                words = [f"tp=2 recompute={again}{cut} microbatch={1 + index % 2}"]
                words += [f"dp=2 tp=2 zero={zero} recompute={again}{cut}" for zero in range(4)]
                words += [f"dp=2 tp=3 zero={zero} recompute={again}" for zero in (1, 3) if not cut]
                found += [Case(model, each, tied, compute) for each in words]
    found += [Case("decoder", f"tp=6 recompute={again}") for again in ("none", "selective", "full")]
    return [*found, Case("llama", "dp=4 tp=2 zero=3 shard=2"), Case("llama", f"dp=2 tp=4 {SP} zero=2")]


LATTICE = tuple(dict.fromkeys([*MORE, *lattice()]))


@cache
def counted(cases: tuple[Case, ...]) -> list[dict[Case, Counted]]:
    """What each rank counted, of cases of a model with as many ranks."""
    return run_ranks(cases[0].world, _count_all, cases, timeout_s=30.0 * len(cases) + 120)


def _count_all(cases: tuple[Case, ...]) -> dict[Case, Counted]:
    return {case: count(case.model, case.tied, case.job, parse_strategy(case.words), STEPS) for case in cases}


def hold(case: Case, cases: tuple[Case, ...]) -> None:
    ranks = counted(tuple(one for one in cases if (one.world, one.model) == (case.world, case.model)))
    strategy, job = parse_strategy(case.words), case.job
    model = described(case.model, tied=case.tied, layout=Layout.of(job, strategy))
    assert {str(rank[case].collectives) for rank in ranks} == {str(ranks[0][case].collectives)}
    compare(model, job, strategy, ranks[0][case], activations=ACTIVATIONS)


@pytest.mark.parametrize("case", FAST, ids=str)
def test_predicted_memory_and_collectives_are_the_counted_ones(case: Case) -> None:
    hold(case, FAST)


@pytest.mark.slow
@pytest.mark.parametrize("case", LATTICE, ids=str)
def test_predicted_is_counted_over_the_lattice(case: Case) -> None:
    hold(case, LATTICE)
