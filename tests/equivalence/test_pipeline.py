"""Pipelining gives the numbers of one process: loss, norms, each gradient and each update, over three steps.

`make test` takes a short list in which every pair of options occurs together; `make test-all` the whole lattice.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from tests.equivalence.pipelines import FACTORS, SCHEDULES, allowed, as_case, groups, lattice
from tests.harness.cases import Case, check, check_many
from tests.harness.pairwise import feasible_pairs, pairs_of, pairwise


@pytest.mark.parametrize("name", groups())
def test_pairs_of_options(name: str) -> None:
    check_many(groups()[name])


def test_the_short_list_has_every_pair() -> None:
    rows = pairwise(FACTORS, allowed)
    assert {as_case(row) for row in rows} == {case for cases in groups().values() for case in cases}
    assert set().union(*map(pairs_of, rows)) == feasible_pairs(FACTORS, allowed)


#: Three-dimensional: every schedule on 2 x 2 x 2 ranks.
CUBES = [
    Case(
        world=8,
        pp=2,
        tp=2,
        schedule=name,
        virtual_stages=virtual,
        layers=5 if virtual < 3 else 7,
        zero=zero,
        accumulation=4,
        microbatch=1,
        clip=0.1,
        tied=True,
        sequence_parallel=zero % 2 == 1,
    )
    for (name, virtual), zero in product(SCHEDULES, (0, 1, 2, 3))
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CUBES, ids=str)
def test_every_schedule_on_eight_ranks(case: Case) -> None:
    check(case, timeout_s=600)


#: One schedule of each kind: one stage a rank, dealt out in turn, backwards in two halves, laid out as a V.
KINDS = [("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("zb-v", 2)]


@pytest.mark.parametrize(("zero", "tp"), [(3, 1), (0, 2)])
def test_schedules_of_each_kind_on_four_ranks(zero: int, tp: int) -> None:
    one = Case(world=4, pp=2, tp=tp, zero=zero, accumulation=4, microbatch=1, clip=0.1, tied=True)
    check_many([replace(one, schedule=name, virtual_stages=virtual) for name, virtual in KINDS])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "cases"), [pytest.param(name, cases, id=name) for name, cases in lattice().items()])
def test_whole_lattice(name: str, cases: tuple[Case, ...]) -> None:
    check_many(cases, timeout_s=1500)
