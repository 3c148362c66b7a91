"""docs/models.md is what its script writes from what was recorded, and names every family that is tested."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.harness.hugging_face import FAMILIES, TIED

ROOT = Path(__file__).parents[1]
RECORD: dict[str, Any] = json.loads((ROOT / "bench" / "results" / "models.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("models_page", ROOT / "scripts" / "models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_was_recorded(script: ModuleType) -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert page == script.render(RECORD), "run python scripts/models.py --render"


def test_every_tested_family_is_on_it_tied_and_untied() -> None:
    found = {(row["family"], row["tied"]) for row in RECORD["rows"]}
    wanted = {(name, tied) for name in FAMILIES for tied in ((False, True) if name in TIED else (None,))}
    assert found == wanted
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    for name, (kind, *_) in FAMILIES.items():
        assert f"| {name} | `{kind.__name__}` |" in page


def test_every_stage_of_zero_was_verified_on_two_and_three_ranks() -> None:
    strategies = {f"dp={dp} zero={zero}" for dp in (2, 3) for zero in (0, 1, 2, 3)}
    for row in RECORD["rows"]:
        assert row["equal"], row
        assert row["strategies"].keys() == strategies
        assert 0 < row["largest"] < 1
    assert all(row["equal"] for row in RECORD["further"])


def test_families_with_a_plan_were_verified_over_tensor_parallel_ranks(script: ModuleType) -> None:
    divided = {name: entry for name, entry in RECORD["tensor"].items() if "kind" in entry}
    assert len(divided) >= 14
    whole, cut = {"dp=2 zero=1 tp=2", "dp=2 zero=3 tp=2"}, "dp=2 zero=3 tp=2 sequence_parallel=true"
    for name, entry in divided.items():
        assert entry["equal"], name
        assert entry["strategies"].keys() | entry["refused"].keys() == {*whole, cut}
        assert whole <= entry["strategies"].keys()
        assert 0 < entry["largest"] < 1
    assert set(RECORD["tensor"]) <= {*script.TENSOR_FAMILIES, *script.WITHOUT_PLAN}


def test_families_without_a_plan_wait_with_the_reason() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    waiting = {name: entry["refused"] for name, entry in RECORD["tensor"].items() if "kind" not in entry}
    assert {"bloom", "mpt", "falcon"} <= waiting.keys()
    for name, refused in waiting.items():
        (told,) = refused.values()
        assert f"- `{name}`: {told['what']}: {told['why']}" in page


def test_what_is_refused_is_told_in_its_own_words() -> None:
    assert "clip" in RECORD["refused"]
    assert all(entry["what"] and entry["why"] for entry in RECORD["refused"].values())


def test_a_family_that_is_not_equal_would_be_seen(script: ModuleType) -> None:
    row = RECORD["rows"][0] | {"equal": False, "largest": 7.0, "worst": "not verified"}
    assert "**not equal** | 7.0e+00 | not verified |" in script.table([row])
