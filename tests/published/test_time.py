"""Predicted step times beside published ones: what the cost model must reach over files that nothing was fitted on.

`meshwright accuracy tests/published/data --calibrate-on 3` prints every row; docs/accuracy.md has them all.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from meshwright.cost.published import Accuracy, PricedRow, Summary, accuracy

DATA = Path(__file__).with_name("data")
#: Files that check, by name; none of their rows has fitted a constant.
CHECKING = (
    "bigscience_megatron_deepspeed",
    "internevo_7b_20b",
    "nanotron_ultrascale_best",
    "nvidia_megatron_bridge",
    "ibm_fms_fsdp",
    "torchtune_memory",
)
FITTED = ("mosaicml_llm_foundry_mpt", "torchtitan_llama3")


@cache
def told() -> Accuracy:
    return accuracy([DATA / f"{name}.csv" for name in (*CHECKING, *FITTED)], calibrate_on=3)


def rows(*files: str) -> tuple[PricedRow, ...]:
    return tuple(row for file in files for row in told().part(file=file))


@cache
def summary(*files: str) -> Summary:
    return told().time(rows(*files))


def test_at_least_80_percent_of_the_dense_rows_are_priced() -> None:
    whole = summary(*CHECKING, *FITTED)
    assert whole.priced >= 0.8 * (whole.priced + whole.rows_skipped)
    assert whole.priced > 370


def test_the_median_error_over_all_checking_files_is_at_most_10_percent() -> None:
    found = summary(*CHECKING).errors
    assert found is not None
    assert found.median_absolute <= 0.10


@pytest.mark.parametrize("file", CHECKING)
def test_and_at_most_14_percent_in_each(file: str) -> None:
    found = summary(file).errors
    assert found is not None
    assert found.median_absolute <= 0.14


@pytest.mark.parametrize("file", CHECKING)
def test_a_constant_utilisation_is_worse_in_every_file(file: str) -> None:
    found = summary(file)
    assert found.errors is not None
    assert found.baseline is not None
    assert found.errors.median_absolute < found.baseline.median_absolute


def test_three_rows_of_a_stack_bring_the_error_to_6_percent() -> None:
    found = summary(*CHECKING).calibrated
    assert found is not None
    assert found.median_absolute <= 0.06
    assert found.rows > 100


def test_runs_are_ranked_as_they_were_measured() -> None:
    found = summary(*CHECKING)
    assert found.pairs > 200
    assert found.concordance is not None
    assert found.concordance >= 0.75
    assert found.calibrated is not None
    assert found.calibrated.concordance is not None
    assert found.calibrated.concordance >= 0.85
