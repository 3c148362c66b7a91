"""Predicted peaks beside published ones: medians, rows that ran out of memory, and rows that ran.

`pytest -s` prints every row. What is left out is printed too, with its reason.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

from meshwright.cost.published import Comparison, PublishedRow, Unpriced, compare, median_error, read_rows
from meshwright.spec.conventions import CONVENTIONS
from meshwright.spec.units import show_bytes

DATA = Path(__file__).with_name("data")
#: Tables with published peaks of whole training steps.
PEAKS = (
    "bigscience_megatron_deepspeed",
    "torchtitan_llama3",
    "torchtune_memory",
    "internevo_7b_20b",
    "nanotron_ultrascale_best",
)
BLOG = "hf_fsdp_blog"
FURTHER = "more_rows"


@cache
def compared(table: str) -> tuple[tuple[Comparison, ...], tuple[tuple[PublishedRow, str], ...]]:
    """Rows of a table that can be priced, and the others with the reason."""
    priced, left = [], []
    for row in read_rows(DATA / f"{table}.csv"):
        if row.text("distrust"):
            left.append((row, f"not to be trusted: {row.text('distrust')}"))
            continue
        try:
            priced.append(compare(row))
        except Unpriced as reason:
            left.append((row, f"not priced: {reason}"))
    return tuple(priced), tuple(left)


def with_peaks(*tables: str) -> list[Comparison]:
    return [entry for table in tables for entry in compared(table)[0] if entry.row.peak_bytes]


def ran(*tables: str) -> list[Comparison]:
    return [entry for table in tables for entry in compared(table)[0] if not entry.row.out_of_memory]


def say(*words: str) -> None:
    sys.stdout.write(" ".join(words) + "\n")


def show(entry: Comparison) -> str:
    row, declared, plain = entry.row, entry.error(), entry.error(declared=False)
    named = f"{row.file[:10]:10} {row.index:3} {row.text('model')[:15]:15} {str(entry.setup.strategy)[:76]:76}"
    if row.peak_bytes is None or declared is None or plain is None:
        return f"{named} needs {show_bytes(entry.estimate.worst.total_bytes)}"
    return (
        f"{named} published {show_bytes(row.peak_bytes):>9}  predicted {show_bytes(entry.predicted_bytes):>9} "
        f"{declared:+6.1%}  without convention {show_bytes(entry.plain_bytes):>9} {plain:+6.1%}"
    )


@pytest.mark.parametrize("tables", [PEAKS, (FURTHER,)], ids=["the tables", "rows of no influence"])
def test_median_error_of_published_peaks(tables: tuple[str, ...]) -> None:
    """At most 10% with the bytes of each stack declared, at most 14% without."""
    entries = with_peaks(*tables)
    for entry in entries:
        say(show(entry))
    for table in tables:
        if mine := with_peaks(table):
            told, plain = median_error(mine), median_error(mine, declared=False)
            say(f"{table}: {len(mine)} rows, median error {told:.1%}, without conventions {plain:.1%}")
        for row, reason in compared(table)[1]:
            if row.peak_bytes:
                say(f"{table} {row.index}: {reason}")
    assert len(entries) > 60
    assert median_error(entries) <= 0.10
    assert median_error(entries, declared=False) <= 0.14


@pytest.mark.parametrize("table", PEAKS)
def test_no_stack_is_far_off_with_its_bytes_declared(table: str) -> None:
    assert median_error(with_peaks(table)) <= 0.10


def test_every_row_published_as_out_of_memory_is_called_infeasible() -> None:
    entries = [entry for table in (*PEAKS, BLOG) for entry in compared(table)[0] if entry.row.out_of_memory]
    for entry in entries:
        say(show(entry), "of", show_bytes(entry.estimate.usable_bytes))
    assert len(entries) == 7
    assert not [show(entry) for entry in entries if entry.fits]


def test_at_most_4_percent_of_the_rows_that_ran_are_called_infeasible() -> None:
    """At the line of 90% of the device. Of the rows that are, most were published above that line themselves."""
    entries = ran(*PEAKS, BLOG)
    alarms = [entry for entry in entries if not entry.fits]
    for entry in alarms:
        say(show(entry), "of", show_bytes(entry.estimate.usable_bytes))
    assert len(entries) > 100
    assert len(alarms) <= 0.04 * len(entries)


def test_the_largest_batches_that_fit_nearly_fill_their_device() -> None:
    """Accelerate's FSDP post searched them: each fits, and takes at least 60% of the device."""
    entries = ran(BLOG)
    assert len(entries) == 10
    for entry in entries:
        share = entry.estimate.worst.total_bytes / entry.estimate.device_bytes
        assert 0.60 < share < 1, show(entry)


def test_batches_that_were_tuned_to_fill_a_device_are_predicted_within_it() -> None:
    """llm-foundry's microbatches were tuned per model, sequence and device; peaks were not published."""
    entries = ran("mosaicml_llm_foundry_mpt")
    shares = sorted(entry.estimate.worst.total_bytes / entry.estimate.device_bytes for entry in entries)
    say(f"{len(entries)} rows: median share of the device {shares[len(shares) // 2]:.0%}, largest {shares[-1]:.0%}")
    assert len(entries) > 190
    assert shares[-1] < 1


def test_rows_that_are_left_out_say_why() -> None:
    reasons = {reason for table in (*PEAKS, BLOG) for _, reason in compared(table)[1]}
    for reason in sorted(reasons):
        say(reason)
    assert all(len(reason) > 20 for reason in reasons)


def test_no_constant_belongs_to_a_model_or_a_row() -> None:
    """Figures belong to a stack, and what is fitted says so; every one has a source."""
    for told in CONVENTIONS.values():
        assert len(told.source) > 20
        assert set(told.fitted) <= {"states", "process_bytes", "stack"}
