"""The text form: one parser for `--strategy`, `--pin` and `--set`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import ConfigError
from meshwright.spec import Assignment, Job, Offload, OptimizerSpec, Strategy, parse_assignments, parse_strategy
from meshwright.spec.values import parse_value, show_value

VALUES = st.one_of(
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
)


def parsed(*words: str) -> list[Assignment]:
    return parse_assignments(words, option="--pin", bounds=True)


@settings(deadline=None)
@given(VALUES | st.lists(VALUES, max_size=3))
def test_a_shown_value_reads_back(value: Any) -> None:
    read = parse_value(show_value(value))
    assert read == value
    assert type(read) is type(value)
    (assignment,) = parsed(f"key = {show_value(value)}  ")
    assert assignment.value == value


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["dp=2 zero = 3"], ["dp=2", "zero=3"]),
        (["dp <= 2", "  zero>=1 "], ["dp<=2", "zero>=1"]),
        (["stages=2,3 dp=1"], ["stages=2,3", "dp=1"]),
        (["stages = [2, 3] dp=1"], ["stages=2,3", "dp=1"]),
        (['offload.path="/a = b" dp=1'], ['offload.path="/a = b"', "dp=1"]),
        (["offload.path='C:\\temp'"], ['offload.path="C:\\\\temp"']),
        (["sequence_parallel=true"], ["sequence_parallel=true"]),
        ([""], []),
    ],
)
def test_words_become_assignments(words: list[str], expected: list[str]) -> None:
    assert [str(entry) for entry in parsed(*words)] == expected


@pytest.mark.parametrize("word", ["dp", "dp=", "=2", "2", "dp==2", "dp<2", "dp<=x", "zero<=true", "dp=2 rest"])
def test_what_is_no_assignment_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="--pin"):
        parsed(word)


def test_a_strategy_shows_what_differs_from_the_defaults() -> None:
    assert str(Strategy()) == "dp=1 zero=0"
    assert str(Strategy(dp=4, zero=3, shard=4)) == "dp=4 zero=3"
    assert str(Strategy(dp=4, zero=1, shard=1)) == "dp=4 zero=1 shard=1"
    assert str(Strategy(stages=(4,))) == "dp=1 zero=0 stages=[4]"
    on_disk = Strategy(offload=Offload(optimizer="disk", path="true"))
    assert str(on_disk) == 'dp=1 zero=0 offload.optimizer=disk offload.path="true"'
    assert parse_strategy(str(on_disk)) == on_disk


@pytest.mark.parametrize(
    ("noun", "values", "what"),
    [
        (Strategy, {"recompute": "half"}, "recompute=half is not known"),
        (Strategy, {"pp": 2, "schedule": "1f1"}, "schedule=1f1 is not known"),
        (Strategy, {"gather": "units"}, "gather=units is not known"),
        (Strategy, {"reduce": "ends"}, "reduce=ends is not known"),
        (Offload, {"optimizer": "hosts"}, "offload.optimizer=hosts is not known"),
        (Job, {"compute_dtype": "bf16"}, "job.compute_dtype=bf16 is not known"),
        (Job, {"stack": "compile"}, "job.stack=compile is not known"),
        (Job, {"allow_recompute": ("some",)}, "job.allow_recompute=some is not known"),
        (OptimizerSpec, {"name": "adam"}, "optimizer.name=adam is not known"),
        (OptimizerSpec, {"schedule": "cosin"}, "optimizer.schedule=cosin is not known"),
    ],
)
def test_names_are_checked_also_where_no_file_was_read(noun: Any, values: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        noun(**values)
    assert caught.value.what == what
    assert caught.value.fix
