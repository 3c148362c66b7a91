"""`meshwright verify`: equal where it is equal, not where it is not, and one message where it cannot be tried."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import meshwright
from meshwright.cli import app
from meshwright.errors import ConfigError, UnsupportedCombination
from meshwright.measure.verify import verify_all
from meshwright.measure.verify.asked import ask_model
from meshwright.measure.verify.subject import Subject, find_subject, load_code
from meshwright.spec.verified import Verified
from tests.measure import verified_models

MINE = Path(verified_models.__file__)
SMALL = {"num_hidden_layers": 3, "pad_token_id": None}


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)], env={"COLUMNS": "160"})


def last(text: str) -> str:
    return text.strip().splitlines()[-1]


# --- equal ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def equal() -> dict[str, list[Verified]]:
    """Models of several kinds, and two of the user's own code under another strategy besides."""
    models: dict[str, Any] = {
        "llama-3-8b": "llama-3-8b",
        "t5": {"model_type": "t5"},
        "vit": {"model_type": "vit", "architectures": ["ViTForImageClassification"]},
        "mixtral": {"model_type": "mixtral", "num_hidden_layers": 3, "quantization_config": {"bits": 4}},
        "texts": {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"], **SMALL},
        "regression": f"{MINE}:regression",
    }
    found = verify_all(list(models.values()), ["dp=2 zero=3 prefetch=1 recompute=full"])
    everything = {name: [one] for name, one in zip(models, found, strict=True)}
    own = {"regression": f"{MINE}:regression", "module": nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 11))}
    found = verify_all(list(own.values()), ["dp=4 zero=2 shard=2 unit_blocks=2 microbatch=2"])
    for name, one in zip(own, found, strict=True):
        everything.setdefault(name, []).append(one)
    return everything


def test_sound_strategies_are_equal(equal: dict[str, list[Verified]]) -> None:
    for name, found in equal.items():
        for one in found:
            assert one.equal, f"{name}: {one}"
            assert 0 < one.largest < 1
            assert len(one.against) == 2
            assert str(one).startswith(f"verified: {one.strategy} on {one.copy}: largest deviation ")
            assert sum(module.parameters for module in one.modules) == one.copy.parameters


def test_a_known_model_is_made_small_and_keeps_its_kind(equal: dict[str, list[Verified]]) -> None:
    first = equal["llama-3-8b"][0].copy
    assert (first.model, first.kind, first.blocks) == ("Llama 3 8B", "LlamaForCausalLM", 5)
    assert {"LlamaDecoderLayer", "LlamaRMSNorm", "LlamaMLP"} <= set(first.classes)
    assert "num_hidden_layers 32 -> 5" in first.changes
    assert "num_key_value_heads 8 -> 2" in first.changes
    assert "num_attention_heads 32 -> 8" in first.changes  # as many heads to a key/value head as there were
    assert "without the first" in first.labels
    names = [module.name for module in equal["llama-3-8b"][0].modules]
    assert names == ["model.embed_tokens", *(f"model.layers.{index}" for index in range(5)), "model.norm", "lm_head"]


def test_what_was_done_to_a_model_is_told(equal: dict[str, list[Verified]]) -> None:
    assert "dropout off" in equal["t5"][0].copy.notes
    assert "unquantised, as training needs it" in equal["mixtral"][0].copy.notes
    assert any("experts" in note for note in equal["mixtral"][0].copy.notes)
    assert equal["texts"][0].copy.labels == "one label per sequence"
    assert equal["regression"][0].copy.changes == ()
    assert equal["regression"][0].copy.notes == ("dropout off",)
    assert equal["module"][0].ranks == 4
    assert equal["module"][0].global_batch == 4 * 2 * 2


def test_tensor_parallelism_is_equal_and_what_it_divides_is_told() -> None:
    over_tp = meshwright.verify("llama-3-8b", "dp=2 tp=2 zero=3 sequence_parallel=true")
    assert over_tp.equal, over_tp
    assert over_tp.ranks == 4
    assert over_tp.copy.divided[1].startswith("colwise (published): model.layers.*.self_attn.q_proj, ")
    assert "sequence (completed): model.norm" in over_tp.copy.divided
    assert "num_attention_heads 32 -> 8" in over_tp.copy.changes


def test_annotations_divide_what_has_no_plan() -> None:
    both = ("--sharding", "blocks.*.linear1=colwise", "--sharding", "blocks.*.linear2=rowwise")
    done = command(f"{MINE}:build", "--strategy", "tp=2", *both)
    assert done.exit_code == 0, done.output
    assert "divided colwise (annotation): blocks.*.linear1" in done.stdout
    assert last(done.stdout).startswith("verified: dp=1 zero=0 tp=2 on ")


def test_the_command_says_so(tmp_path: Path) -> None:
    table = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "resid_pdrop": 0.1}
    (tmp_path / "config.json").write_text(json.dumps(table))
    done = command(tmp_path, "--strategy", "dp=2 zero=1")
    assert done.exit_code == 0, done.output
    assert last(done.stdout).startswith(f"verified: dp=2 zero=1 on {tmp_path.name} (GPT2LMHeadModel, 2 blocks, ")
    assert "transformer.h.1" in done.stdout
    assert "made smaller: n_head 12 -> 3, n_embd 768 -> 12" in done.stdout


# --- not equal --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wrong() -> dict[str, Verified]:
    names = ("contrastive", "Failing", "Dying")
    found = verify_all([f"{MINE}:{name}" for name in names], ["dp=2 zero=3"])
    return dict(zip(names, found, strict=True))


def test_a_wrong_gradient_is_found_in_its_module() -> None:
    done = command(f"{MINE}:faulty", "--strategy", "dp=2 zero=2", "--json")
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    assert not found["equal"]
    assert found["mismatches"][0].startswith("gradient of blocks.1.bias, step 1 of ")
    assert found["verdict"].startswith("not verified: dp=2 zero=2 on ")
    worst = max(found["modules"], key=lambda module: float(module["gradient"]))
    assert (worst["name"], worst["kind"]) == ("blocks.1", "Faulty")
    assert worst["gradient"] > 1


def test_a_loss_that_does_not_add_up_is_not_that_of_the_whole_batch(wrong: dict[str, Verified]) -> None:
    engine, plain = wrong["contrastive"].against.values()
    assert engine < 1 < plain
    assert str(wrong["contrastive"]).startswith("not verified: ")
    assert "the whole batch" in wrong["contrastive"].mismatches[0]


def test_a_rank_that_fails_alone_is_not_equal(wrong: dict[str, Verified]) -> None:
    assert str(wrong["Failing"]).endswith("rank 1 of 2 raised ValueError: only here")
    assert "only here" in wrong["Failing"].log
    assert str(wrong["Dying"]).endswith("rank 1 of 2 was ended by SIGKILL")
    assert not wrong["Failing"].equal
    assert not wrong["Dying"].equal


def test_the_screen_shows_what_is_beyond(wrong: dict[str, Verified], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, told in (("contrastive", "does not add up over sequences"), ("Failing", "only here")):
        monkeypatch.setattr("meshwright.measure.verify.verify", lambda *_, name=name, **__: wrong[name])
        done = command(f"{MINE}:{name}", "--strategy", "dp=2 zero=3")
        assert done.exit_code == 1
        assert told in done.stdout
        assert last(done.stdout) == str(wrong[name])


# --- not tried --------------------------------------------------------------------------------------------------------


def refused(arguments: Sequence[str | Path], *told: str) -> None:
    done = command(*arguments)
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("meshwright: ")
    assert done.stderr.count("meshwright: ") == 1
    for text in told:
        assert text in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("llama-9-8b", "--strategy", "dp=2"), "not in the catalogue"),
        (("llama-3-8b", "--strategy", "dp=8 tp=2"), "for example dp=4 tp=2"),
        (("llama-3-8b", "--strategy", "dp=2 tp=8"), "a smaller dp and tp"),
        (("llama-3-8b", "--strategy", "tp=2", "--sharding", "up"), "--sharding 'up' is no annotation"),
        (("llama-3-8b", "--strategy", "cp=2"), "is not executable yet"),
        (("llama-3-8b", "--strategy", "dp=64 zero=3"), "at most 8"),
        (("llama-3-8b", "--strategy", "dp=2 zeros=3"), "unknown key"),
        (("llama-3-8b", "--strategy", "two ranks"), "is not an assignment"),
        (("llama-3-8b", "--strategy", "dp=2", "--seq", "3"), "sequences of 3"),
        (("no/such/config.json", "--strategy", "dp=2"), "cannot be read"),
        ((MINE, "--strategy", "dp=2"), "is a file, not a function in it"),
        ((MINE.parent, "--strategy", "dp=2"), "has no config.json"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(arguments: tuple[str | Path, ...], told: str) -> None:
    refused(arguments, told)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Raising", ("fails in one process", "ValueError: no such luck")),
        ("normed", ("has batch norms (1)",)),
    ],
)
def test_what_one_process_or_the_engine_refuses_is_told(name: str, told: tuple[str, ...]) -> None:
    refused((f"{MINE}:{name}", "--strategy", "dp=2"), *told)


@pytest.mark.slow
def test_L2_a_model_without_a_plan_is_refused_with_what_would_do() -> None:
    refused(("bloom-176b", "--strategy", "tp=2"), "it publishes no plan", "sharding=", "or set tp=1")


def test_C10_L2_models_that_ranks_cannot_share_are_refused_with_what_would_do() -> None:
    attention = (
        "transformer.h.*.self_attention.query_key_value=colwise",
        "transformer.h.*.self_attention.dense=rowwise",
    )
    given = [word for text in attention for word in ("--sharding", text)]
    refused(("bloom-176b", "--strategy", "tp=2", *given), "handed alibi", "zero=3")
    with pytest.raises(UnsupportedCombination, match=r"tp=4 does not divide the 6 heads.*\n.*\n.*one of 1, 2, 3, 6;"):
        built({"model_type": "gpt2", "n_head": 6, "n_embd": 48}, tp=4)


def test_annotations_of_another_type_are_refused() -> None:
    with pytest.raises(ConfigError, match="give name patterns and styles"):
        meshwright.verify("llama-3-8b", "tp=2", sharding={"up": 3})  # type: ignore[dict-item]  # as a user's mistake
    with pytest.raises(ConfigError, match="give name patterns and styles"):
        meshwright.verify("llama-3-8b", "tp=2", sharding=["up"])  # type: ignore[arg-type]  # as a user's mistake


def built(model: Any, *, tp: int = 1) -> Subject:
    asked = ask_model(model, Path("unused"))
    load_code(asked)
    return find_subject(asked, depth=3, sequence=17, tp=tp)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (f"{MINE}:large", "parameters"),
        (f"{MINE}:nothing", "returned a int"),
        (f"{MINE}:no_loss", "without a loss"),
        (f"{MINE}:absent", "has no function absent"),
        ("no_such_file.py:build", "there is no file"),
        ({"model_type": "llama", "num_hidden_layers": "many"}, "config.json of llama"),
        ({"model_type": "a_model_of_ours"}, "not known to Transformers"),
        ({"model_type": "clip"}, "several parts"),
    ],
)
def test_models_that_cannot_be_built_are_refused(model: Any, told: str) -> None:
    """By the process that builds them, called here as it calls it."""
    dtype = torch.get_default_dtype()
    try:
        with pytest.raises(ConfigError, match=told):
            built(model)
    finally:
        torch.set_default_dtype(dtype)


def test_a_call_while_a_models_file_is_imported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_VERIFYING", "1")
    with pytest.raises(ConfigError, match="__main__"):
        meshwright.verify("llama-3-8b", "dp=2")


def test_a_builder_that_ranks_cannot_find_is_refused() -> None:
    with pytest.raises(ConfigError, match="<lambda>"):
        meshwright.verify(lambda: nn.Linear(2, 2), "dp=2")
    with pytest.raises(ConfigError, match="a model of type int"):
        meshwright.verify(3, "dp=2")
    with pytest.raises(ConfigError, match="a strategy of type NoneType"):
        meshwright.verify("gpt2", None)  # type: ignore[arg-type]  # as a user's mistake
