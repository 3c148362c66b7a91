"""`meshwright plan`: the ranking, the file, the numbers, and one clear error with exit code 2 for a wrong input."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from meshwright.cli import app
from meshwright.planner import make_plan
from meshwright.spec import Cost, Plan, this_machine
from meshwright.spec.files import read_noun
from meshwright.spec.job_file import read_job

TWO_DEVICES = """
format = 1
[cluster]
name = "two cores"
[[cluster.nodes]]
devices = 2
device = { name = "core", memory_bytes = 2147483648 }
[job]
global_batch = 16
[strategy]
zero = 3
"""
#: A small Llama, as Hugging Face writes it.
CONFIG = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
ASKED = ("config.json", "--cluster", "4xA100-80GB", "--global-batch", "8", "--seq", "512")


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "job.toml").write_text(TWO_DEVICES)
    (tmp_path / "broken.toml").write_text("format = 1\n[job\n")
    (tmp_path / "tiny.toml").write_text(TWO_DEVICES.replace("2147483648", "400000000"))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    missing = {key: value for key, value in CONFIG.items() if key not in ("hidden_size", "vocab_size")}
    (tmp_path / "missing-keys.json").write_text(json.dumps({**missing, "hidden_sizes": 256}))
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


# --- job files --------------------------------------------------------------------------------------------------------


def test_the_built_in_job_is_planned_for_this_machine() -> None:
    result = run()
    assert result.exit_code == 0, result.output
    expected = make_plan(read_job().model, this_machine(), read_job().job, executable=True)
    assert str(expected.strategy) in result.output


def test_the_plan_file_reads_back_as_the_plan() -> None:
    result = run("job.toml", "--pin", "microbatch<=4", "--set", "job.global_batch=24", "--out", "out/plan.toml")
    assert result.exit_code == 0, result.output
    assert "written to out/plan.toml" in result.output
    plan = read_noun(Plan, "out/plan.toml")
    assert plan.strategy.zero == 3
    assert plan.strategy.microbatch <= 4
    assert plan.pinned == {"zero": "3", "microbatch": "<=4"}
    assert plan.cluster.name == "two cores"
    assert plan.executable
    assert plan.changes
    job_file = read_job("job.toml", ["job.global_batch=24"])
    assert plan.job == job_file.job
    assert plan.decoder == job_file.model


def test_a_strategy_by_hand_is_taken_whole() -> None:
    result = run("job.toml", "--set", "strategy.zero=1", "--strategy", "dp=2 zero=1 microbatch=2")
    assert result.exit_code == 0, result.output
    assert "Plan  dp=2 zero=1 microbatch=2" in result.output


def test_options_take_the_place_of_the_job_files_values() -> None:
    result = run("job.toml", "--global-batch", "4", "--seq", "128", "--cluster", "2xA100-80GB", "--json")
    assert result.exit_code == 0, result.output
    table = json.loads(result.output)
    assert (table["job"]["global_batch"], table["job"]["sequence"]) == (4, 128)
    assert table["cluster"]["name"] == "2xA100-SXM-80GB"
    assert table["strategy"]["zero"] == 3


def test_a_job_file_is_planned_within_what_train_executes() -> None:
    assert json.loads(run("job.toml", "--json").output)["executable"]
    assert not json.loads(run("job.toml", "--pin", "cp=2", "--any", "--json").output)["executable"]
    refused = run("job.toml", "--pin", "cp=2")
    assert refused.exit_code == 2
    assert "context parallelism (cp=2) is not executable yet" in refused.stderr


# --- models -----------------------------------------------------------------------------------------------------------


def test_a_model_by_its_config_is_ranked_and_explained() -> None:
    result = run(*ASKED, "--top", "3", "--why", "zero=3,tp=1", "--price-per-hour", "2.5")
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    for told in ("The best strategies that fit into", "bottleneck:", "tokens/s", "MFU", "Why not zero=3 tp=1?"):
        assert told in text
    assert "usable, 90%" in text
    assert "What one change would bring" in text
    assert "at 2.5 an hour" in text


def test_json_holds_the_numbers_in_bytes_and_seconds() -> None:
    result = run(*ASKED, "--top", "3", "--why", "zero=3", "--json")
    assert result.exit_code == 0, result.output
    table = json.loads(result.output)
    cost = table["cost"]
    assert sum(cost["terms"].values()) == pytest.approx(cost["step_s"], rel=1e-6)
    assert cost["total_bytes"] == sum(cost["in_step"].values()) + sum(cost["overhead"].values())
    assert table["tokens_per_s"] == pytest.approx(8 * 512 / cost["step_s"])
    assert table["usable_bytes"] == int(0.9 * table["cluster"]["nodes"][0]["device"]["memory_bytes"])
    assert len(table["runner_up"]) == 2
    assert table["bottleneck"]["term"] == max(cost["terms"], key=cost["terms"].get)
    (answer,) = table["why"]
    assert answer["fits"]
    assert sum(answer["more_s"].values()) == pytest.approx(answer["step_s"] - cost["step_s"], rel=1e-6, abs=1e-12)
    assert {*cost} == {entry.name for entry in fields(Cost)}


def test_objectives_and_numbers_of_devices() -> None:
    fewest = json.loads(run(*ASKED, "--objective", "devices", "--json").output)
    assert fewest["devices"] == 1
    two = json.loads(run(*ASKED, "--devices", "2", "--json").output)
    assert two["devices"] <= 2
    cheapest = json.loads(run(*ASKED, "--devices", "auto", "--json").output)
    fastest = json.loads(run(*ASKED, "--json").output)
    assert cheapest["objective"] == "cost"
    assert cheapest["device_s_per_token"] <= min(fastest["device_s_per_token"], two["device_s_per_token"]) * (1 + 1e-9)
    assert fastest["cost"]["step_s"] <= min(found["cost"]["step_s"] for found in (fewest, two, cheapest)) * (1 + 1e-9)


def test_A12_a_plan_from_a_config_needs_no_device_no_weights_and_no_torch(work: Path) -> None:
    """Reported: "the only way to know is to run and see"; right: a dry run from the config file alone."""
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom meshwright.cli import app\n"
        f"result = CliRunner().invoke(app, ['plan', *{list(ASKED)!r}, '--json'])\n"
        "sys.exit(result.output if result.exit_code else bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=work, check=False, timeout=60, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_B5_the_plan_file_is_one_that_train_understands_or_refuses_in_one_message() -> None:
    """Reported: what a tuner found could not be given to the launcher."""
    assert run(*ASKED, "-o", "plan.toml").exit_code == 0
    result = CliRunner().invoke(app, ["train", "--plan", "plan.toml"])
    assert result.exit_code == 2
    assert "meshwright train" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("meshwright: ") == 1


# --- wrong inputs -----------------------------------------------------------------------------------------------------

WRONG_JOB_FILES = [
    (["missing.toml"], "no file missing.toml"),
    (["jop.toml"], "did you mean job.toml?"),
    (["broken.toml"], "broken.toml is not valid TOML"),
    (["job.toml", "--set", "job.global_bach=8"], "unknown key job.global_bach"),
    (["job.toml", "--set", "jobs.global_batch=8"], "unknown key jobs"),
    (["job.toml", "--set", "job.global_batch=eight"], "job.global_batch='eight' is not right"),
    (["job.toml", "--set", "job.global_batch=0"], "job.global_batch=0 is not a positive number"),
    (["job.toml", "--set", "job.global_batch=-8"], "job.global_batch=-8 is not a positive number"),
    (["job.toml", "--pin", "microbatch=3"], "global_batch=16 cannot be split over dp=2 in microbatches of 3"),
    (["job.toml", "--set", "strategy.zero=4"], "zero=4 is not a ZeRO stage"),
    (["job.toml", "--pin", "dp=0"], "dp=0 is not a positive number"),
    (["job.toml", "--pin", "dp=4"], "dp=4 pinned but two cores has 2 devices"),
    (["job.toml", "--pin", "shard=3", "--pin", "dp=2"], "shard=3 does not divide dp=2"),
    (["job.toml", "--pin", "zero=1"], "pins contradicts itself: zero=3 and zero=1"),
    (["job.toml", "--pin", "zero"], "--pin 'zero' is not an assignment"),
    (["tiny.toml", "--strategy", "dp=2 zero=3 microbatch=8"], "nothing fits within the pins"),
    (["job.toml", "--out", "job.toml/plan.toml"], "cannot write job.toml/plan.toml"),
    (["job.toml", "--pin", "zero=3", "--strategy", "dp=2 zero=3"], "--strategy and --pin together"),
]
WRONG_MODELS = [
    (["no-such-model", *ASKED[1:]], "model 'no-such-model' is not in the catalogue"),
    (["lama-3-8b", *ASKED[1:]], "did you mean llama-3-8b?"),
    (["nowhere/config.json", *ASKED[1:]], "nowhere/config.json cannot be read"),
    (["missing-keys.json", *ASKED[1:]], "hidden_size"),
    (["no.such.module:build", *ASKED[1:]], "module no.such.module of no.such.module:build cannot be imported"),
    (["config.json", "--cluster", "4xA100-80GB", "--seq", "512"], "--global-batch missing"),
    (["config.json", "--cluster", "4xA100-80GB"], "--global-batch and --seq missing"),
    ([*ASKED, "--cluster", "8xZ900"], "device 'Z900' is not in the catalogue"),
    ([*ASKED, "--cluster", "8x"], "names no device"),
    ([*ASKED, "--cluster", "H100-80GB:4"], "does not say how many devices a node has"),
    ([*ASKED, "--cluster", "nodes.toml"], "no file nodes.toml"),
    ([*ASKED, "--global-batch", "0"], "job.global_batch=0 is not a positive number"),
    ([*ASKED, "--seq", "0"], "job.sequence=0 is not a positive number"),
    (["gpt2", *ASKED[1:], "--seq", "2048"], "sequences of 2048 tokens are longer than the 1024 positions"),
    ([*ASKED, "--set", "job.sequense=512"], "unknown key job.sequense"),
    ([*ASKED, "--set", "train.steps=5"], "is not about the job"),
    ([*ASKED, "--set", "job.global_batch=16"], "contradicts the 8 that was given before"),
]
WRONG_OPTIONS = [
    (["--pin", "tpp=2"], "unknown key strategy.tpp"),
    (["--pin", "zero=5"], "zero=5 is not a ZeRO stage"),
    (["--pin", "schedule=1f1"], "schedule=1f1 is not known"),
    (["--pin", "tp=2", "--pin", "tp=4"], "--pin contradicts itself: tp=2 and tp=4"),
    (["--pin", "tp=3"], "tp=3 does not divide"),
    (["--pin", "dp=4", "--pin", "tp=2"], "dp=4 tp=2 pinned but 4xA100-SXM-80GB has 4 devices"),
    (["--pin", "pp=5", "--cluster", "8xA100-80GB"], "pp=5 pinned but"),
    (["--pin", "cp=3"], "cp=3 does not divide the sequence of 512 tokens"),
    (["--pin", "ep=2"], "has no experts"),
    (["--strategy", "dp=2 zero=9"], "zero=9 is not a ZeRO stage"),
    (["--strategy", "dp=16"], "pinned but 4xA100-SXM-80GB has 4 devices"),
    (["--why", "zero=7"], "zero=7 is not a ZeRO stage"),
    (["--why", "hybrid"], "--why 'hybrid' is not an assignment"),
    (["--objective", "speed"], "objective=speed is not known"),
    (["--devices", "-3"], "--devices -3 is not a number of devices"),
    (["--devices", "many"], "--devices many is not a number of devices"),
    (["--devices", "5"], "--devices 5, but 4xA100-SXM-80GB has 4"),
    (["--top", "0"], "--top 0 ranks nothing"),
    (["--price-per-hour", "-1"], "--price-per-hour -1 is not a price"),
    (["--out", "config.json/plan.toml"], "cannot write config.json/plan.toml"),
    (["--executable", "--pin", "cp=2"], "context parallelism (cp=2) is not executable yet"),
]


@pytest.mark.parametrize(
    ("arguments", "text"), [*WRONG_JOB_FILES, *WRONG_MODELS, *(([*ASKED, *more], told) for more, told in WRONG_OPTIONS)]
)
def test_wrong_input_is_one_clear_error(arguments: list[str], text: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert text in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("meshwright: ") == 1
