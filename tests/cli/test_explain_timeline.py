"""`meshwright explain --timeline`: a plan's schedule on the screen and in files; one error for a mistake."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from meshwright.cli import app
from meshwright.spec import Plan
from meshwright.spec.files import read_noun

CONFIG = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 31,
    "max_position_embeddings": 128,
}
MACHINES = ("--cluster", "8xH100-80GB", "--global-batch", "8", "--seq", "64")


def run(*arguments: str, columns: int = 120) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, list(arguments))


def explained(*arguments: str, columns: int = 120) -> str:
    done = run("explain", "--timeline", *arguments, columns=columns)
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= columns
    return done.output


def make(*arguments: str, out: str) -> None:
    done = run("plan", *arguments, "-o", out)
    assert done.exit_code == 0, done.output


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a plan for the built-in decoder, one for a known model and one for a model of one's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "job.toml").write_text("format = 1\n[job]\nglobal_batch = 8\n[train]\nsteps = 3\n")
    make("job.toml", *MACHINES, "--strategy", "pp=2 schedule=1f1b dp=2 zero=1", "--any", out="decoder.toml")
    return tmp_path


def test_the_schedule_of_a_plan_is_drawn() -> None:
    text = explained("decoder.toml")
    assert "1f1b: 2 pipeline ranks, 4 microbatches of 1 sequence" in text
    assert text.count("rank 0") == text.count("rank 1") == 1
    assert "F0" in text
    assert "\x1b" not in text
    explained("decoder.toml", columns=24)


def test_a_known_model_needs_no_name_and_one_s_own_needs_it() -> None:
    strategy = ("--strategy", "pp=2 schedule=gpipe")
    make("gpt2", *MACHINES, *strategy, out="gpt2.toml")
    assert "GPT-2 on 8xH100" in explained("gpt2.toml")
    make("config.json", *MACHINES, *strategy, out="own.toml")
    refused = run("explain", "--timeline", "own.toml")
    assert refused.exit_code == 2
    assert "add --model with what the plan was made for" in refused.stderr
    assert "gpipe: 2 pipeline ranks" in explained("own.toml", "--model", "config.json")
    other = run("explain", "--timeline", "own.toml", "--model", "gpt2")
    assert other.exit_code == 2
    assert "but the plan is for" in other.stderr


def test_a_plan_without_pipelining_is_drawn_too() -> None:
    make("job.toml", *MACHINES, "--strategy", "dp=8 zero=3", out="single.toml")
    text = explained("single.toml")
    assert "single: 1 pipeline rank, 1 microbatch of 1 sequence" in text
    assert "all ranks together" not in text


@pytest.mark.parametrize("name", ["out/picture.svg", "picture.PNG", "trace.json"])
def test_pictures_and_traces_are_written(name: str, work: Path) -> None:
    assert f"written to {name}" in explained("decoder.toml", "-o", name)
    data = (work / name).read_bytes()
    if name.endswith("svg"):
        assert ElementTree.fromstring(data).tag.endswith("svg")
    elif name.endswith("PNG"):
        assert data.startswith(b"\x89PNG\r\n")
    else:
        assert json.loads(data)["traceEvents"]
    assert not list(work.rglob("*.tmp"))


def test_json_has_all_of_it(work: Path) -> None:
    table = json.loads(explained("decoder.toml", "--json", "-o", "picture.svg", columns=10**9))
    plan = read_noun(Plan, "decoder.toml")
    assert table["strategy"] == str(plan.strategy)
    assert table["step_s"] == pytest.approx(plan.cost.step_s, rel=1e-9)
    assert {span["kind"] for span in table["spans"]} >= {"forward", "backward", "send", "receive", "after"}
    assert (work / "picture.svg").exists()


def test_no_torch_is_loaded(work: Path) -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom meshwright.cli import app\n"
        "done = CliRunner().invoke(app, ['explain', '--timeline', 'decoder.toml', '-o', 'x.svg'])\n"
        "sys.exit(done.output if done.exit_code else bool({'torch', 'PIL'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=work, check=False, timeout=60, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


WRONG = [
    (["missing.toml"], "no file missing.toml"),
    (["decoders.toml"], "did you mean decoder.toml?"),
    (["job.toml"], "job.toml is a job file, not a plan"),
    (["config.json"], "config.json is not valid TOML"),
    (["picture.bin"], "cannot read picture.bin"),
    (["."], "cannot read ."),
    (["empty.toml"], "empty.toml"),
    (["half.toml"], "half.toml is no plan"),
    (["unknown.toml"], "unknown.toml is no plan: unknown key strategy.tpp"),
    (["decoder.toml", "-o", "picture.gif"], "no picture ends in .gif"),
    (["decoder.toml", "-o", "picture"], "its name has no ending"),
    (["decoder.toml", "-o", "folder.svg"], "it is a folder"),
    (["decoder.toml", "-o", "job.toml/picture.svg"], "cannot write job.toml/picture.svg"),
    (["decoder.toml", "-o", "job.toml/picture.png"], "cannot write job.toml/picture.png"),
    (["decoder.toml", "-o", "job.toml/trace.json"], "cannot write job.toml/trace.json"),
    (["decoder.toml", "--model", "nowhere/config.json"], "nowhere/config.json cannot be read"),
    (["decoder.toml", "--model", "no-such-model"], "model 'no-such-model' is not in the catalogue"),
    (["decoder.toml", "--tp", "2"], "--tp with --timeline"),
    (["decoder.toml", "--sequence-parallel"], "--sequence-parallel with --timeline"),
    ([], "--timeline of what?"),
]


@pytest.mark.parametrize(("arguments", "text"), WRONG)
def test_wrong_input_is_one_clear_error(arguments: list[str], text: str, work: Path) -> None:
    (work / "picture.bin").write_bytes(b"\xff\xd8\xff")
    (work / "empty.toml").write_text("")
    (work / "half.toml").write_text("format = 1\n[strategy]\ndp = 2\n")
    (work / "unknown.toml").write_text((work / "decoder.toml").read_text().replace("\ntp = 1\n", "\ntpp = 1\n"))
    (work / "folder.svg").mkdir()
    done = run("explain", "--timeline", *arguments)
    assert done.exit_code == 2, done.output
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("meshwright: ") == 1
    assert not done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["decoder.toml"], "--timeline decoder.toml"),
        (["--sharding", "gpt2", "--tp", "2", "-o", "x.svg"], "--out with --sharding"),
        (["--sharding", "gpt2", "--tp", "2", "--model", "gpt2"], "--model with --sharding"),
    ],
)
def test_what_is_asked_is_one_of_the_modes(arguments: list[str], text: str) -> None:
    done = run("explain", *arguments)
    assert done.exit_code == 2
    assert text in done.stderr
    assert done.stderr.count("meshwright: ") == 1


def test_a_png_without_pillow_names_the_extra(monkeypatch: pytest.MonkeyPatch, work: Path) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    done = run("explain", "--timeline", "decoder.toml", "-o", "picture.png")
    assert done.exit_code == 2
    assert "pip install 'meshwright[pictures]'" in done.stderr
    assert not (work / "picture.png").exists()
