"""`meshwright accuracy`: figures that its rows add up to, files that are refused, rows that are kept apart."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from meshwright.cli import app
from meshwright.cost.published import DRAWS, read_rows, setup_of
from meshwright.cost.published.baseline import MFU, peak
from meshwright.cost.published.calibrate import calibrate
from meshwright.cost.published.flops import model_flops
from meshwright.cost.published.roles import distrust, fitted
from meshwright.cost.published.speed import published_steps

DATA = Path(__file__).with_name("data")
TABLES = tuple(str(DATA / f"{name}.csv") for name in ("internevo_7b_20b", "torchtune_memory", "torchtitan_llama3"))
HEADER = "source,model,seq,gpus,gpu_type,step_time_s,notes\n"


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["accuracy", *arguments])


def as_json(*arguments: str) -> dict[str, Any]:
    done = command(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    return as_json(*TABLES, "--calibrate-on", "3")


def trusted(told: dict[str, Any], key: str) -> list[dict[str, Any]]:
    return [row for row in told["rows"] if row[key] is not None and not row["excluded"] and not row["experts"]]


def test_figures_are_those_of_the_rows(told: dict[str, Any]) -> None:
    for part, key, predicted, published in (
        ("time", "time_error", "predicted_s", "published_s"),
        ("memory", "memory_error", "predicted_bytes", "published_bytes"),
    ):
        rows = trusted(told, key)
        errors = [row[predicted] / row[published] - 1 for row in rows]
        assert told[part]["rows_priced"] == len(rows)
        assert told[part]["median_absolute_error"] == pytest.approx(statistics.median(map(abs, errors)))
        assert told[part]["mean_absolute_error"] == pytest.approx(statistics.fmean(map(abs, errors)))
        assert told[part]["bias"] == pytest.approx(statistics.median(errors))
        assert 0 <= told[part]["concordance"] <= 1
    assert (
        told["time"]["rows_priced"] == told["time"]["checking"]["rows_priced"] + told["time"]["fitted"]["rows_priced"]
    )


def test_terms_add_up_to_the_step(told: dict[str, Any]) -> None:
    for row in trusted(told, "predicted_s"):
        assert sum(row["terms"].values()) == pytest.approx(row["predicted_s"], rel=1e-6)


def test_every_skipped_row_has_a_reason(told: dict[str, Any]) -> None:
    for part in ("time", "memory"):
        skipped = told[part]["skipped"]
        assert len(skipped) == told[part]["rows_skipped"] == sum(told[part]["skipped_reasons"].values())
        assert all(len(entry["reason"]) > 10 for entry in skipped)
    assert any("adapters" in entry["reason"] for entry in told["time"]["skipped"])


def test_rows_not_to_be_trusted_are_in_no_figure(told: dict[str, Any]) -> None:
    apart = [(row["file"], row["row"]) for row in told["rows"] if row["excluded"]]
    assert apart == [("torchtitan_llama3", 6), ("torchtitan_llama3", 14), ("torchtitan_llama3", 15)]
    assert told["time"]["excluded"]["rows_priced"] == 3


def test_rows_whose_errors_fitted_constants_are_told_apart(told: dict[str, Any]) -> None:
    assert {row["file"] for row in told["rows"] if row["fitted"]} == {"torchtitan_llama3"}
    assert told["time"]["by_file"]["internevo_7b_20b"]["calibrated"]["rows_checked"] == 24


def test_calibrated_rows_are_those_that_a_draw_left_out() -> None:
    """The same draws again, from the rows that the command prints."""
    told = as_json(TABLES[0], "--calibrate-on", "3")
    rows = trusted(told, "predicted_s")
    medians = []
    stack = ("internevo_7b_20b", rows[0]["stack"], False)
    for draw in range(DRAWS):
        drawn = random.Random(f"{stack} {draw}").sample(range(len(rows)), 3)
        factors = calibrate([(rows[place]["terms"], rows[place]["published_s"]) for place in drawn])
        left = [row for place, row in enumerate(rows) if place not in drawn]
        errors = [abs(factors.seconds(row["terms"]) / row["published_s"] - 1) for row in left]
        medians.append(statistics.median(errors))
    found = told["time"]["calibrated"]["median_absolute_error"]
    assert found == pytest.approx(statistics.median(medians))
    assert found < told["time"]["median_absolute_error"]


def test_the_same_input_gives_the_same_output() -> None:
    assert as_json(TABLES[0], "--calibrate-on", "3") == as_json(TABLES[0], "--calibrate-on", "3")


def test_the_baseline_is_the_mean_utilisation_of_the_fitted_rows() -> None:
    rows = [
        row for name in ("mosaicml_llm_foundry_mpt", "torchtitan_llama3") for row in read_rows(DATA / f"{name}.csv")
    ]
    shares: dict[str, list[float]] = {}
    for row in rows:
        if not fitted(row) or distrust(row):
            continue
        setup = setup_of(row)
        flops = model_flops(setup.model(whole=True)) * setup.job.global_batch
        (seconds, *_) = published_steps(setup).values()
        share = flops / (seconds * peak(setup) * setup.strategy.world_size)
        shares.setdefault(setup.cluster.nodes[0].device.name, []).append(share)
    assert {name: statistics.fmean(found) for name, found in shares.items()} == pytest.approx(MFU, abs=1e-3)


def test_the_screen_shows_rows_reasons_and_figures() -> None:
    done = command(TABLES[1], "--calibrate-on", "3")
    assert done.exit_code == 0
    for words in (
        "published and predicted",
        "step, s",
        "GiB",
        "skipped: low-rank adapters and quantised weights are not described",
        "assumed in row",
        "Time of a step: errors of the prediction",
        "Beside it, median errors: a constant MFU per device; calibrated on 3 rows",
        "Peak memory: errors of the prediction",
    ):
        assert words in " ".join(done.output.split())


def test_tables_stay_within_80_columns() -> None:
    done = CliRunner().invoke(app, ["accuracy", TABLES[1], "--calibrate-on", "3"], env={"COLUMNS": "80"})
    assert "…" not in done.output.split("Rows not to be trusted")[0]
    assert max(map(len, done.output.splitlines())) <= 80


def test_a_folder_passes_over_files_that_hold_no_runs(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text(HEADER + "x,GPT-2,1024,8,A100-80GB,0.5,eager\n")
    (tmp_path / "links.csv").write_text("source,hardware,busbw_GBps\nx,NVLink,300\n")
    done = command(str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "links.csv passed over: it has no model and no gpu_type column" in done.output
    assert as_json(str(tmp_path))["time"]["rows_priced"] == 1


def test_a_model_with_experts_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(HEADER + "x,GPT-2,1024,8,A100-80GB,0.5,eager\nx,Mixtral 8x7B,4096,64,H100-80GB,9,FSDP\n")
    time = as_json(str(path))["time"]
    assert (time["rows_priced"], time["mixtures"]["rows_priced"]) == (1, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no model and no gpu_type column"),
        ("source,hardware,busbw_GBps\nx,NVLink,300\n", "has no model and no gpu_type column"),
        (HEADER, "has no model and no gpu_type column"),
        (HEADER + "x,GPT-2,1024,8,A100-80GB,,\n", "can be priced"),
        (HEADER + "x,nobody's model,1024,8,A100-80GB,1.0,\n", "can be priced"),
    ],
)
def test_a_table_without_runs_is_one_error(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    done = command(str(path))
    assert done.exit_code == 2
    assert words in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("arguments", [["missing.csv"], ["."], [TABLES[0], "--calibrate-on", "-1"]])
def test_wrong_arguments_are_one_error(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = command(*arguments)
    assert done.exit_code == 2
    assert "Traceback" not in done.output
