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


def test_what_is_refused_is_told_in_its_own_words() -> None:
    assert "clip" in RECORD["refused"]
    assert all(entry["what"] and entry["why"] for entry in RECORD["refused"].values())


def test_a_family_that_is_not_equal_would_be_seen(script: ModuleType) -> None:
    row = RECORD["rows"][0] | {"equal": False, "largest": 7.0, "worst": "not verified"}
    assert "**not equal** | 7.0e+00 | not verified |" in script.table([row])
