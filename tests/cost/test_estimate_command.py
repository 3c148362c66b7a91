"""`meshwright estimate`: from a name or a config file and a cluster that is not there, without torch and GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from meshwright.cli import app

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
WATCHED = (
    "import sys, atexit; from meshwright.cli import main; sys.argv = ['meshwright', *sys.argv[1:]]; "
    "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); main()"
)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["estimate", *arguments])


def as_json(*arguments: str) -> dict[str, Any]:
    done = command(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


SIZES = ("--global-batch", "64", "--seq", "2048")
STRATEGY = ("--strategy", "dp=2 tp=2 pp=2 schedule=1f1b zero=1")


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_A12_a_plan_on_paper_needs_no_weights_no_gpu_and_no_torch(config: str) -> None:
    """ "The only way to know is to run and see OOM." Here a config file and a machine that is not there are enough."""
    arguments = ["estimate", config, "--cluster", "8xA100-80GB", *STRATEGY, *SIZES]
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "False", "torch was imported"
    for word in ("6,738,415,616 parameters", "params", "acts", "logits", "other", "fits", "8 of 8 devices"):
        assert word in done.stdout
    assert "\u2588" in done.stdout, "a bar for each rank"


def test_the_numbers_as_json_are_those_of_the_table(config: str) -> None:
    found = as_json(config, "--cluster", "8xA100-80GB", *STRATEGY, *SIZES)
    assert found["fits"]
    assert found["parameters"] == 6_738_415_616
    assert len(found["ranks"]) == 2
    for rank in found["ranks"]:
        assert rank["total_bytes"] == sum(rank["in_step"].values()) + sum(rank["overhead"].values())
    by_name = as_json("llama-2-7b", "--cluster", "8xA100-80GB", *STRATEGY, *SIZES)
    assert [rank["in_step"] for rank in by_name["ranks"]] == [rank["in_step"] for rank in found["ranks"]]


def test_what_does_not_fit_says_by_how_much_and_through_which_category(config: str) -> None:
    done = command(config, "--cluster", "8xT4", "--strategy", "dp=8 zero=0", *SIZES)
    assert done.exit_code == 0
    assert "does not fit" in done.stdout
    assert "short of" in done.stdout
    assert "most of it is optimizer" in done.stdout
    table = as_json(config, "--cluster", "8xT4", "--strategy", "dp=8 zero=0", *SIZES)
    assert not table["fits"]
    assert table["short_bytes"] > 0


def test_activations_are_named_when_they_are_what_is_too_much(config: str) -> None:
    strategy = ("--strategy", "dp=8 zero=3 microbatch=8")
    done = command(config, "--cluster", "8xA100-40GB", *strategy, *SIZES)
    assert "most of it is activations" in done.stdout
    assert "ZeRO does not help" in done.stdout.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("no-such-model", *SIZES), "no-such-model"),
        (("lama-3-70b", "--cluster", "8xH100", *SIZES), "Llama"),
        (("llama-2-7b", "--cluster", "8xH1000", *SIZES), "H1000"),
        (("llama-2-7b", "--cluster", "8xA100", *SIZES), "A100-SXM-40GB"),
        (("llama-2-7b", "--cluster", "nowhere.toml", *SIZES), "nowhere.toml"),
        (("llama-2-7b", "--cluster", "8xH100", "--strategy", "dp=16", *SIZES), "16 ranks"),
        (("llama-2-7b", "--cluster", "8xH100", "--strategy", "tp=3", *SIZES), "tp=3"),
        (("llama-2-7b", "--cluster", "8xH100", "--strategy", "zero=4", *SIZES), "zero=4"),
        (("llama-2-7b", "--cluster", "8xH100", "--strategy", "pp=3 schedule=1f1b stages=1,2,3", *SIZES), "32"),
        (("llama-2-7b", "--cluster", "8xH100", "--global-batch", "0", "--seq", "2048"), "global_batch"),
        (("llama-2-7b", "--cluster", "8xH100", "--strategy", "dp=8", "--global-batch", "9", "--seq", "8"), "8 or 16"),
        (("mixtral-8x7b", "--cluster", "8xH100", "--strategy", "ep=8", *SIZES), "ep=8 does not divide the 1 ranks"),
        (("llama-2-7b", "--cluster", "8xH100", *SIZES, "--set", "train.steps=3"), "train.steps"),
        (("llama-2-7b", "--cluster", "8xH100", *SIZES, "--set", "job.compute_dtype=int8"), "int8"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else "",
)
def test_wrong_inputs_get_one_error_and_exit_2(arguments: tuple[str, ...], told: str) -> None:
    done = command(*arguments)
    assert done.exit_code == 2, done.stdout
    assert "Traceback" not in done.stderr
    assert told in done.stderr
    assert done.stderr.count("meshwright:") == 1
