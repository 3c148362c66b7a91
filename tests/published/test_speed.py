"""Seconds of a published step: every column by its source's own way of counting, against other columns of its row."""

from __future__ import annotations

import statistics
from functools import cache
from pathlib import Path

import pytest

from meshwright.cost.published import PublishedRow, Unpriced, read_rows, setup_of
from meshwright.cost.published.speed import disagreement, published_steps

DATA = Path(__file__).with_name("data")


@cache
def rows(table: str) -> tuple[PublishedRow, ...]:
    return read_rows(DATA / f"{table}.csv")


def steps(table: str, index: int) -> dict[str, float]:
    return published_steps(setup_of(rows(table)[index]))


def ratios(table: str, one: str, other: str) -> list[float]:
    found = []
    for row in rows(table):
        try:
            told = published_steps(setup_of(row))
        except Unpriced:
            continue
        if one in told and other in told:
            found.append(told[other] / told[one])
    return found


@pytest.mark.parametrize(("index", "seconds"), [(0, 769.99), (1, 844.81), (2, 430.21), (3, 777.09), (4, 853.81)])
def test_bigscience_first_tables_are_of_the_steps_in_its_log(index: int, seconds: float) -> None:
    """The log lines above the tables (tr11-176B-ml/chronicles-prequel.md) print both TFLOPs and seconds."""
    assert steps("bigscience_megatron_deepspeed", index)["tflops_per_gpu"] == pytest.approx(seconds, rel=0.002)


def test_bigscience_tflops_and_seconds_agree_in_both_of_its_formulas() -> None:
    found = ratios("bigscience_megatron_deepspeed", "step_time_s", "tflops_per_gpu")
    assert len(found) > 60
    assert statistics.median(abs(ratio - 1) for ratio in found) < 0.002


def test_mosaic_counts_model_flops_over_all_pairs() -> None:
    found = ratios("mosaicml_llm_foundry_mpt", "tokens_per_s_per_gpu", "tflops_per_gpu")
    assert len(found) > 200
    assert statistics.median(abs(ratio - 1) for ratio in found) < 0.005
    assert max(abs(ratio - 1) for ratio in found) < 0.035  # it counts the table of positions too


@pytest.mark.parametrize("index", [16, 19, 37, 61, 117, 143])
def test_megatron_bridge_counts_causal_attention(index: int) -> None:
    told = steps("nvidia_megatron_bridge", index)
    assert told["tflops_per_gpu"] == pytest.approx(told["tokens_per_s_per_gpu"], rel=0.004)


def test_mfu_and_tflops_of_one_row_are_of_the_same_step() -> None:
    told = steps("ml_engineering_llama8b_zero3_offload", 12)
    assert told["mfu"] == pytest.approx(told["tflops_per_gpu"], rel=0.02)


def test_the_column_to_trust_most_comes_first_and_others_are_held_against_it() -> None:
    setup = setup_of(rows("mosaicml_llm_foundry_mpt")[0])
    assert next(iter(published_steps(setup))) == "step_time_s"
    assert disagreement({"step_time_s": 1.0, "mfu": 1.04}) == ""
    assert disagreement({"step_time_s": 1.0, "mfu": 1.2}) == "mfu says +20%"


def test_a_column_that_cannot_be_read_leaves_the_others() -> None:
    cells = dict(rows("ibm_fms_fsdp")[0].cells) | {"mfu": "high", "tflops_per_gpu": "?"}
    told = published_steps(setup_of(PublishedRow(file="t", index=0, cells=cells | {"recompute": "none"})))
    assert list(told) == ["tokens_per_s_per_gpu"]
