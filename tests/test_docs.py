"""The documents know every key."""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import pytest

from meshwright.spec import Cluster, DecoderShape, Device, Job, Link, NodeGroup, Offload, OptimizerSpec, Strategy
from meshwright.spec.files import dump_toml
from meshwright.spec.job_file import DataSpec, TrainSpec

DOCS = Path(__file__).parents[1] / "docs"
JOB_FILE = (DOCS / "job-file.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", JOB_FILE, re.DOTALL | re.MULTILINE)
    assert found is not None, title
    return found[1]


def default_of(entry: Field[Any]) -> Any:
    return entry.default if entry.default is not MISSING else entry.default_factory()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("title", "noun"),
    [
        ("[model]", DecoderShape),
        ("[job]", Job),
        ("[job.optimizer]", OptimizerSpec),
        ("[data]", DataSpec),
        ("[train]", TrainSpec),
    ],
)
def test_every_key_stands_with_its_default(title: str, noun: Any) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^|]*)` \|", section(title), re.MULTILINE))
    expected = {}
    for entry in fields(noun):
        if entry.name != "optimizer":
            value = default_of(entry)
            written = dump_toml({"x": list(value) if isinstance(value, tuple) else value})
            expected[entry.name] = " ".join(written.removeprefix("x = ").split()).replace("[ ", "[").replace(", ]", "]")
    assert rows == expected


@pytest.mark.parametrize(
    ("title", "noun"),
    [
        ("[strategy]", Strategy),
        ("[strategy]", Offload),
        ("[cluster]", Cluster),
        ("[cluster]", NodeGroup),
        ("[cluster]", Device),
        ("[cluster]", Link),
    ],
)
def test_every_key_is_named(title: str, noun: Any) -> None:
    text = section(title)
    missing = [entry.name for entry in fields(noun) if not re.search(rf"\b{entry.name}\b", text)]
    assert not missing


def test_documents_link_to_what_exists() -> None:
    for page in (*DOCS.glob("*.md"), DOCS.parent / "README.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
