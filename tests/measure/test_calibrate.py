"""Calibration: the machinery with tiny sizes, the constants from made-up seconds, and the file that is kept."""

import dataclasses
import logging
import math
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshwright.cli import app
from meshwright.errors import ConfigError, RankFailure
from meshwright.measure import calibrate as calibrate_module
from meshwright.measure.calibrate import calibrate
from meshwright.measure.fits import bandwidth, efficiency, fit_latency, fit_link, peaks
from meshwright.spec import Cluster, this_machine
from meshwright.spec.clusters import parse_cluster
from meshwright.spec.machine import plain_machine
from meshwright.spec.measured import Fingerprint, measurement_path, write_measurement

RATE, HALF, START = 50e9, 12.0, 8e-6
PRODUCTS = [(512, 64, 512), (512, 256, 768), (256, 512, 512), (512, 1024, 1024)]


def made_up_cells() -> dict[str, float]:
    """Seconds of a machine whose constants are known."""
    cells: dict[str, float] = {}
    for m, k, n in PRODUCTS:
        flops = 2 * m * k * n
        backward = (1 + HALF / n) + (1 + HALF / m)
        cells[f"product float32 {m} {k} {n} forward"] = flops * (1 + HALF / k) / RATE + START / 2
        cells[f"product float32 {m} {k} {n} both"] = flops * ((1 + HALF / k) + backward) / RATE + 2 * START
    cells["memory 3000000"] = 3e6 / 12e9
    cells["elements tiny 100 10"] = 10 * START
    cells["layer tiny 100 20"] = 20 * 3 * START
    cells["elements large 6000000 40"] = 6e6 / 9e9 + 40 * START
    pairs = 2 * 4 * 512 * 512 * 64 * 4 / 2
    cells["attention float32 2 4 512 64 forward"] = pairs / 20e9
    cells["attention float32 2 4 512 64 both"] = pairs / 20e9 + 2.5 * pairs / 15e9
    return cells


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


TOLD: list[tuple[str, int, int]] = []


@pytest.fixture(scope="module")
def measured() -> Cluster:
    """This machine measured with tiny sizes; the figures mean nothing. `TOLD` has the progress."""
    return calibrate(tiny=True, progress=lambda what, done, of: TOLD.append((what, done, of)))


# --- from seconds to constants ----------------------------------------------------------------------------------------


def test_constants_of_a_known_device_are_found() -> None:
    found = efficiency(made_up_cells(), source="made up")
    peak = peaks(made_up_cells())["float32"]
    assert found.half_inner == pytest.approx(HALF, rel=1e-6)
    assert found.products["float32"] * peak == pytest.approx(min(RATE, peak), rel=1e-6)
    assert found.attention * peak == pytest.approx(20e9, rel=1e-6)
    assert found.backward_attention * peak == pytest.approx(15e9, rel=1e-6)
    assert found.memory * bandwidth(made_up_cells()) == pytest.approx(9e9, rel=1e-6)
    assert found.kernel_s == pytest.approx(3 * START)


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_latency_and_bandwidth_of_a_known_link_are_found(ranks: int, share: float) -> None:
    cells = {}
    for size in (2**10, 2**14, 2**18, 2**22, 2**26):
        latency, wire = (ranks - 1) * 50e-6, (ranks - 1) / ranks * size / 2e9
        cells[f"collective all_reduce {size}"] = 2 * (latency + wire)
        cells[f"collective all_gather {size}"] = latency + wire / share
    link = fit_link(cells, ranks)
    assert link.latency_s == pytest.approx(50e-6, rel=0.1)
    assert link.bytes_per_s == pytest.approx(2e9, rel=0.02)
    assert (link.collectives or {}).get("all_gather", 1.0) == pytest.approx(share, rel=0.02)
    assert link.efficiency == 1


@pytest.mark.parametrize("rows", [[(1.0, 5.0, 1.0), (1.0, 10.0, 2.5)], [(1.0, 1.0, 3.0), (1.0, 9.0, 2.0)]])
def test_no_constant_is_negative(rows: list[tuple[float, float, float]]) -> None:
    """Seconds that fall with the bytes, or grow faster than they, come from noise."""
    latency, per_byte = fit_latency(rows)
    assert latency >= 0
    assert per_byte > 0
    assert math.isfinite(1 / per_byte)


# --- the machinery ----------------------------------------------------------------------------------------------------


def test_every_figure_of_this_machine_is_measured(measured: Cluster) -> None:
    (group,) = measured.nodes
    plain = plain_machine()
    assert measured.devices == plain.devices
    assert group.device.peak_flops_per_s.keys() == {"float32"}
    assert group.device.memory_bytes_per_s is not None
    assert group.device.efficiency is not None
    assert "measured" in group.device.efficiency.source
    assert "measured" in measured.source
    assert group.disk is not None
    if plain.devices > 1:
        assert group.inside is not None
        assert group.inside != plain.nodes[0].inside
        assert group.inside.efficiency == 1


@pytest.mark.usefixtures("measured")
def test_progress_is_told() -> None:
    assert TOLD[0] == ("starting", 0, 1)
    assert all(0 <= done <= of for _, done, of in TOLD)


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="--ranks 4096 on a machine with"):
        calibrate(ranks=4096, tiny=True)


def test_a_rank_that_fails_is_told_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RankFailure, match="rank 0 of the measurement failed"):
        calibrate(ranks=1, tiny=True)


# --- what is kept -----------------------------------------------------------------------------------------------------


def keep(cluster: Cluster, **changes: object) -> None:
    made_on = dataclasses.replace(Fingerprint.of(plain_machine()), **changes)  # type: ignore[arg-type]  # by name
    write_measurement(measurement_path(), cluster, made_on)


def test_this_machine_is_what_was_measured(measured: Cluster, cache: Path) -> None:
    assert this_machine() == plain_machine()
    keep(measured)
    assert measurement_path() == cache / "meshwright" / "this-machine.toml"
    assert this_machine() == measured
    assert parse_cluster("this") == measured
    assert parse_cluster(str(measurement_path())) == measured


def test_it_is_read_without_torch(measured: Cluster, cache: Path) -> None:
    keep(measured)
    program = (
        "import sys\nfrom meshwright.spec import this_machine\n"
        "print(this_machine().source)\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == measured.source


@pytest.mark.parametrize(
    "change", [{"torch": "1.0"}, {"processor": "another"}, {"devices": 4096}, {"memory_bytes": 2**20}]
)
def test_a_measurement_of_another_machine_is_not_used(
    measured: Cluster, cache: Path, caplog: pytest.LogCaptureFixture, change: dict[str, object]
) -> None:
    keep(measured, **change)
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        assert this_machine() == plain_machine()
    (line,) = caplog.messages
    assert "is not used: it was made with" in line
    assert str(next(iter(change.values()))) in line


@pytest.mark.parametrize("text", ["", "format = 1\n", "this is no TOML", "format = 1\n[fingerprint]\n[cluster]\n"])
def test_a_file_that_is_none_is_not_used(cache: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    path = measurement_path()
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        assert this_machine() == plain_machine()
    assert "cannot be read" in caplog.text


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command measures with tiny sizes."""
    whole = calibrate_module.calibrate
    monkeypatch.setattr(calibrate_module, "calibrate", lambda **given: whole(tiny=True, **given))


@pytest.mark.usefixtures("tiny_command")
def test_the_command_keeps_its_measurement_and_measures_again_only_when_forced(cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "here.toml"
    first = CliRunner().invoke(app, ["calibrate", "--ranks", "1", "--out", str(out)])
    assert first.exit_code == 0, first.output
    kept = measurement_path().read_bytes()
    assert out.read_bytes() == kept
    assert parse_cluster(str(out)) == this_machine()
    again = CliRunner().invoke(app, ["calibrate"])
    assert "--force measures again" in again.output
    assert measurement_path().read_bytes() == kept
    forced = CliRunner().invoke(app, ["calibrate", "--force", "--ranks", "1"])
    assert forced.exit_code == 0, forced.output
    assert measurement_path().read_bytes() != kept


@pytest.mark.usefixtures("tiny_command")
def test_a_cache_folder_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "a file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    done = CliRunner().invoke(app, ["calibrate", "--ranks", "1", "--out", str(tmp_path / "here.toml")])
    assert done.exit_code == 0, done.output
    assert "not kept: cannot write" in done.output
    assert parse_cluster(str(tmp_path / "here.toml")).nodes


def test_wrong_ranks_exit_with_2() -> None:
    done = CliRunner().invoke(app, ["calibrate", "--ranks", "4096"])
    assert done.exit_code == 2
    assert "--ranks 4096 on a machine with" in done.stderr
