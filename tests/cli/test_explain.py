"""`meshwright explain --sharding`: what is split how, what is whole and why, whose bytes; one error for a mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import meshwright
from meshwright import ConfigError, Engine, Job, Sharded, Strategy, explain_sharding
from meshwright.cli import app
from meshwright.errors import UnsupportedCombination
from tests.harness.ranks import run_ranks

OWN = Path(__file__).with_name("own_models.py")
BOTH = ("--annotate", "layers.*.up=colwise", "--annotate", "layers.*.down=rowwise")
PAIR = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
SIZES = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 23}
LLAMA = {"model_type": "llama", "num_hidden_layers": 3, "vocab_size": 101, **SIZES}


def explain(*arguments: str, columns: int = 100) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["explain", *arguments])


def shown(*arguments: str, columns: int = 100) -> str:
    done = explain(*arguments, columns=columns)
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= columns
    return done.output


def row(found: Sharded, name: str) -> Any:
    (one,) = [entry for entry in found.modules if entry.name == name]
    return one


def told(found: Sharded, name: str) -> str:
    return "; ".join(row(found, name).notes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a `config.json` of each family that is asked for."""
    tables: dict[str, dict[str, Any]] = {
        "llama": LLAMA,
        "bert": {"model_type": "bert", "hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 48},
        "t5": {"model_type": "t5", "d_model": 24, "d_kv": 6, "num_heads": 4, "d_ff": 48, "num_layers": 2},
        "bloom": {"model_type": "bloom", "hidden_size": 24, "n_head": 4, "n_layer": 2},
        "gpt2": {"model_type": "gpt2", "n_embd": 24, "n_head": 6, "n_layer": 3, "vocab_size": 101},
        "unheard": {"model_type": "unheard_of"},
        "kindless": {"hidden_size": 24},
        "refused": {"model_type": "llama", "hidden_size": "many"},
        "part": {"model_type": "emu3_text_model", "architectures": ["NoSuchModel"]},
    }
    for name, table in tables.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(table), encoding="utf-8")
    (tmp_path / "empty").mkdir()
    return tmp_path


# --- what is shown ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 100, 160])
def test_a_large_model_is_told_without_memory_for_it(columns: int) -> None:
    text = shown("--sharding", "llama-3-70b", "--tp", "16", columns=columns)
    for part in (
        "LlamaForCausalLM of Llama 3 70B: 70,553,706,496 parameters",
        "x80",
        "28672x8192",
        "1792x8192",
        "published",
        "completed",
        "a rank: 4,494,729,216 parameters, 16.7 GiB",
        "whole on every rank: 1,318,912 parameters, 0.0019% of the model",
        "in all",
    ):
        assert part in text, part
    joined = " ".join(text.replace("│", " ").split())
    if columns < 130:  # else it lies beside its module, over several lines
        assert "8 key/value heads over 16 ranks: each held by 2; its gradient is summed over tp" in joined
        assert "norm: every rank needs all of it" in joined


def test_a_model_of_one_s_own_with_annotations() -> None:
    text = shown("--sharding", f"{OWN}:build", "--tp", "2", *BOTH)
    for part in ("(the model itself)", "layers.*.up x5", "you", "12x10, others differ", "uneven: 12, 11"):
        assert part in text, part
    assert "Ranks that hold unequally much" in text
    assert "5 all-reduces" in text


def test_the_numbers_as_json(folder: Path) -> None:
    found = json.loads(shown("--sharding", str(folder / "llama"), "--tp", "3", "--json", columns=1000))
    assert found["tp"] == 3
    assert found["parameters"] == sum(p.numel() for p in explained_llama().parameters())
    (keys,) = [entry for entry in found["modules"] if entry["name"].endswith("k_proj")]
    assert keys["count"] == 3
    assert found["largest_rank_bytes"] == max(found["rank_bytes"])
    assert sum(entry["whole_bytes"] for entry in found["modules"]) == found["whole_bytes"]
    for rank in range(3):
        assert sum(entry["rank_bytes"][rank] for entry in found["modules"]) == found["rank_bytes"][rank]


def explained_llama() -> torch.nn.Module:
    import transformers

    config = {key: value for key, value in LLAMA.items() if key != "model_type"}
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))


def test_a_job_file_is_the_built_in_decoder(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        "format = 1\n[model]\nhidden_size = 48\nnum_attention_heads = 6\nnum_key_value_heads = 2\n", encoding="utf-8"
    )
    text = shown("--sharding", str(job), "--tp", "2", "--sequence-parallel")
    assert "Decoder of" in text
    assert "all-gathers" in text


def test_without_anything_asked_the_help_is_shown() -> None:
    done = explain()
    assert done.exit_code == 2
    assert done.output.startswith("Usage: meshwright explain")
    assert "--sharding" in done.output


def test_help_needs_no_torch() -> None:
    program = (
        "import sys; from meshwright.cli import app; app(['explain', '--help'], standalone_mode=False); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False).returncode == 0


# --- what is said of it -----------------------------------------------------------------------------------------------


def test_key_value_heads_in_words() -> None:
    notes = {tp: told(explain_sharding(LLAMA, tp), "model.layers.*.self_attn.k_proj") for tp in (2, 3, 6)}
    assert notes[2] == "1 of 2 key/value heads on each rank"
    assert notes[3].startswith("2 key/value heads over 3 ranks: each has all, and takes those of its queries")
    assert notes[6].startswith("2 key/value heads over 6 ranks: each held by 3")
    assert told(explain_sharding(LLAMA, 2), "model.layers.*.self_attn.q_proj") == "3 of 6 heads on each rank"


def test_a_vocabulary_is_padded_and_a_tied_weight_counted_once() -> None:
    found = explain_sharding({**LLAMA, "tie_word_embeddings": True}, 3)
    assert "101 words, 34 on each rank, 1 of them padding" in told(found, "model.embed_tokens")
    assert "tied to model.embed_tokens.weight" in told(found, "lm_head")
    assert (row(found, "lm_head").whole_bytes, found.padding) == (0, 24)


def test_why_something_is_whole() -> None:
    plain, cut = (explain_sharding(LLAMA, 2, sequence_parallel=sequence) for sequence in (False, True))
    norm = "model.layers.*.input_layernorm"
    assert told(plain, norm) == "norm: every rank needs all of it"
    assert "own tokens, so its gradient is summed over tp" in told(cut, norm)
    assert (plain.shares, cut.shares) == (0, 7)
    own = explain_sharding(f"{OWN}:build", 2, annotations={**PAIR, "head": "replicate"})
    assert told(own, "head") == "as annotated"
    assert told(own, "") == "no plan names it: computed alike on every rank"


def test_blocks_that_differ_are_told_apart() -> None:
    found = explain_sharding(f"{OWN}:mixed", 2, annotations=PAIR)
    assert [entry.name for entry in found.modules if entry.name.endswith("up")] == ["layers.0-1,3.up", "layers.2.up"]


def test_no_rank_is_left_without_a_part() -> None:
    with pytest.raises(UnsupportedCombination, match="tp=30 over the 23 channels"):
        explain_sharding(f"{OWN}:build", 30, annotations=PAIR)


def test_one_rank_holds_all() -> None:
    found = explain_sharding(LLAMA, 1)
    assert found.rank_bytes == (found.whole_bytes,)
    assert found.exchanges == ()


def test_bytes_are_those_of_the_dtype() -> None:
    one, other = (explain_sharding(LLAMA, 2, dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert one.rank_bytes == tuple(2 * size for size in other.rank_bytes)


def test_a_module_is_not_changed() -> None:
    model = explained_llama()
    before = {name: tuple(value.shape) for name, value in model.named_parameters()}
    found = meshwright.explain_sharding(model, 2)
    assert found.model == "LlamaForCausalLM"
    assert before == {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert model.config.num_attention_heads == 6


# --- said is done -----------------------------------------------------------------------------------------------------


def _family(kind: str) -> torch.nn.Module:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    sizes = {key: value for key, value in LLAMA.items() if key != "model_type"}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=24, n_head=6, n_layer=3, vocab_size=101, **tokens)
        )
    if kind == "phi3":
        return transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes, **tokens))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **tokens))


def _run(kind: str, sequence_parallel: bool) -> tuple[dict[str, int], int]:
    def of_own_logits(outputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, float]:
        return outputs.logits.local.square().sum(), float(labels.numel())  # without collectives of its own

    of_own_logits.additive = True  # type: ignore[attr-defined]  # what a loss says of itself
    job = Job(global_batch=2, sequence=8)
    strategy = Strategy(tp=2, microbatch=2, sequence_parallel=sequence_parallel)
    engine = Engine(lambda: _family(kind), of_own_logits, lambda p: torch.optim.SGD(p, lr=1e-3), job, strategy)
    held = sum(parameter.numel() * parameter.element_size() for parameter in engine.model.parameters())
    ids = torch.randint(101, (2, 8), generator=torch.Generator().manual_seed(3))
    for _ in range(2):  # the first step looks at more
        report = engine.step(({"input_ids": ids}, ids))
    return report.collectives, held


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi3"])
def test_the_collectives_and_bytes_that_are_told_are_those_of_a_step(kind: str, sequence_parallel: bool) -> None:
    found = explain_sharding(lambda: _family(kind), 2, sequence_parallel=sequence_parallel)
    expected = {"tp_all_reduce": int(found.shares > 0)}
    for place in found.exchanges:
        for kinds in (place.forward, place.backward):
            for name, count in kinds.items():
                key = f"tp_{name.replace('-', '_')}"
                expected[key] = expected.get(key, 0) + count * place.count
    for rank, (collectives, held) in enumerate(run_ranks(2, _run, kind, sequence_parallel)):
        assert {key: count for key, count in collectives.items() if key.startswith("tp_")} == expected
        assert held == found.rank_bytes[rank]


# --- mistakes ---------------------------------------------------------------------------------------------------------

OWN_BUILD = f"{OWN}:build"
QKV = tuple(f"--annotate=*.{name}=colwise" for name in "qkv")
MISTAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no mode": (("llama-3-8b",), ("what is to be explained of llama-3-8b", "--sharding")),
    "no model": (("--sharding",), ("no model is named",)),
    "no degree": (("--sharding", "llama-3-8b"), ("--tp is missing",)),
    "an unknown model": (("--sharding", "llama-9-8b", "--tp", "2"), ("llama-9-8b", "did you mean llama-3-8b")),
    "tp=0": (("--sharding", OWN_BUILD, "--tp", "0"), ("tp=0 is not a positive number",)),
    "tp=7 of 8 heads": (
        ("--sharding", f"{OWN}:eight_heads", "--tp", "7", *QKV, "--annotate", "*.o=rowwise"),
        ("tp=7 does not divide the 8 query heads", "1, 2, 4, 8"),
    ),
    "tp is no number": (("--sharding", OWN_BUILD, "--tp", "two"), ("'two' is not a valid integer",)),
    "an unknown style": (
        ("--sharding", OWN_BUILD, "--tp", "2", "--annotate", "layers.*.up=columns"),
        ("'columns'", "colwise, rowwise"),
    ),
    "a pattern of nothing": (
        ("--sharding", OWN_BUILD, "--tp", "2", "--annotate", "layer.*.up=colwise"),
        ("no module is named layer.*.up", "there are layers.*.up"),
    ),
    "no =": (("--sharding", OWN_BUILD, "--tp", "2", "--annotate", "layers.*.up"), ("PATTERN=STYLE",)),
    "two styles": (
        ("--sharding", OWN_BUILD, "--tp", "2", *BOTH, "--annotate", "layers.*.up=rowwise"),
        ("layers.*.up is both colwise and rowwise",),
    ),
    "bert has no plan": (
        ("--sharding", "bert", "--tp", "2"),
        ('"bert.encoder.layer.*.intermediate.dense": "colwise"', '"bert.encoder.layer.*.output.dense": "rowwise"'),
    ),
    "t5 has no plan": (
        ("--sharding", "t5", "--tp", "2"),
        ('"encoder.block.*.layer.*.DenseReluDense.wi": "colwise"',),
    ),
    "bloom has no plan": (
        ("--sharding", "bloom", "--tp", "2"),
        ('"transformer.h.*.mlp.dense_h_to_4h": "colwise"',),
    ),
    "a module without a plan": (("--sharding", OWN_BUILD, "--tp", "2"), ('"layers.*.up": "colwise"',)),
    "no such file": (("--sharding", "nothing.py:build", "--tp", "2"), ("there is no file nothing.py",)),
    "no such config": (("--sharding", "./nothing/config.json", "--tp", "2"), ("cannot be read",)),
    "a folder without config.json": (("--sharding", "empty", "--tp", "2"), ("empty",)),
    "a file without a function": (("--sharding", str(OWN), "--tp", "2"), ("is a file, not a function in it",)),
    "no such function": (("--sharding", f"{OWN}:built", "--tp", "2"), ("has no function built", "build")),
    "an unknown model_type": (("--sharding", "unheard", "--tp", "2"), ("unheard_of", "not known to Transformers")),
    "no model_type": (("--sharding", "kindless", "--tp", "2"), ("no model_type",)),
    "a config that is refused": (("--sharding", "refused", "--tp", "2"), ("refused by LlamaConfig", "hidden_size")),
    "a part of a model": (("--sharding", "part", "--tp", "2"), ("has no model for a Emu3TextConfig",)),
    "colwise without rowwise": (
        ("--sharding", OWN_BUILD, "--tp", "2", BOTH[0], BOTH[1]),
        ("layers.0.up are colwise", "nothing beside", "rowwise"),
    ),
    "a divided norm": (
        ("--sharding", OWN_BUILD, "--tp", "2", *BOTH, "--annotate", "layers.*.norm=colwise"),
        ("a LayerNorm is not divided",),
    ),
    "the vocabulary of a norm": (
        ("--sharding", OWN_BUILD, "--tp", "2", *BOTH, "--annotate", "layers.*.norm=vocab"),
        ("a LayerNorm has no vocabulary",),
    ),
    "a divided block": (
        ("--sharding", OWN_BUILD, "--tp", "2", *BOTH, "--annotate", "layers.*=rowwise"),
        ("a Mlp is not divided",),
    ),
    "a function that raises": (("--sharding", f"{OWN}:fails", "--tp", "2"), ("RuntimeError: no such table",)),
    "a function of something else": (("--sharding", f"{OWN}:number", "--tp", "2"), ("returned a int",)),
    "an unknown dtype": (("--sharding", OWN_BUILD, "--tp", "2", "--dtype", "float8"), ("float64, float32",)),
    "sequences of one rank": (
        ("--sharding", OWN_BUILD, "--tp", "1", "--sequence-parallel"),
        ("sequence_parallel=true has no effect with tp=1",),
    ),
    "a missing job file": (("--sharding", "missing.toml", "--tp", "2"), ("missing.toml",)),
}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_error(
    mistake: str, as_json: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    arguments, parts = MISTAKES[mistake]
    if arguments[1:2] and (folder / arguments[1]).is_dir():
        arguments = (arguments[0], f"./{arguments[1]}/", *arguments[2:])
    done = explain(*arguments, *(["--json"] if as_json else []))
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    starts = [line for line in done.stderr.splitlines() if line.startswith(("meshwright: ", "Error: "))]
    assert len(starts) == 1, done.stderr
    for part in parts:
        assert part in done.stderr, done.stderr


def test_python_raises_the_same() -> None:
    with pytest.raises(ConfigError, match="a model of type int"):
        explain_sharding(3, 2)
    with pytest.raises(ConfigError, match="tp='two' is not a whole number"):
        explain_sharding(LLAMA, "two")  # type: ignore[arg-type]  # what is wrong
    with pytest.raises(ConfigError, match="no such table"):
        explain_sharding(f"{OWN}:fails", 2)
