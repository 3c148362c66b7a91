"""Weights in and out of Hugging Face Llama folders, and every way in which such a folder can be wrong."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from meshwright.models import Decoder, load_llama, read_llama_config, save_llama
from tests.models.tiny import SIZES, hugging_face, ids_for, off, scrambled, small

WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"
Q_PROJ = "model.layers.3.self_attn.q_proj.weight"


def edit_config(folder: Path, **changes: Any) -> None:
    table = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps(table))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


# --- both directions, through real files ------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("sizes", SIZES)
def test_hugging_face_reads_what_we_save(tmp_path: Path, sizes: str, tied: bool) -> None:
    ours = scrambled(small(sizes, tie_word_embeddings=tied))
    save_llama(ours, tmp_path / "new" / "folder")
    load: Any = LlamaForCausalLM.from_pretrained
    theirs, info = load(tmp_path / "new" / "folder", output_loading_info=True)
    assert not any(info.values())
    ids = ids_for(ours.config)
    assert off(theirs(ids).logits, ours(ids)) <= 1e-5
    assert theirs.config.max_position_embeddings == ours.config.max_position_embeddings
    assert theirs.config.tie_word_embeddings == tied
    assert theirs.config.bos_token_id is theirs.config.eos_token_id is None


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shard", ["1GB", "3KB"], ids=["one file", "sharded"])
@pytest.mark.parametrize("sizes", SIZES)
def test_we_read_what_hugging_face_saves(tmp_path: Path, sizes: str, shard: str, tied: bool) -> None:
    source = scrambled(small(sizes, tie_word_embeddings=tied))
    theirs = hugging_face(source)
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / INDEX).is_file() == (shard == "3KB")
    config = read_llama_config(tmp_path)
    assert config == source.config
    ours = Decoder(config)
    load_llama(ours, tmp_path)
    for name, wanted in source.state_dict().items():
        assert torch.equal(ours.state_dict()[name], wanted), name
    ids = ids_for(config)
    assert off(ours(ids), theirs(ids).logits) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtype_is_kept_on_save_and_the_models_own_on_load(tmp_path: Path, dtype: torch.dtype) -> None:
    ours = scrambled(small()).to(dtype)
    save_llama(ours, tmp_path)
    assert {tensor.dtype for tensor in load_file(tmp_path / WEIGHTS).values()} == {dtype}
    assert LlamaForCausalLM.from_pretrained(tmp_path).dtype == dtype
    wide = Decoder(ours.config).double()
    load_llama(wide, str(tmp_path))
    assert all(torch.equal(a, b.double()) for a, b in zip(wide.parameters(), ours.parameters(), strict=True))


def test_save_replaces_and_leaves_only_readable_files(tmp_path: Path) -> None:
    save_llama(scrambled(small(), seed=1), tmp_path)
    second = scrambled(small(tie_word_embeddings=True), seed=2)
    save_llama(second, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {WEIGHTS, CONFIG}
    (tmp_path / "plain").touch()
    plain = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {plain}
    assert "lm_head.weight" not in load_file(tmp_path / WEIGHTS)
    assert read_llama_config(tmp_path) == second.config


def test_save_reports_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(OSError, match="taken"):
        save_llama(Decoder(small()), tmp_path / "taken")
    (tmp_path / (WEIGHTS + ".tmp")).mkdir()
    with pytest.raises(OSError, match=WEIGHTS):
        save_llama(Decoder(small()), tmp_path)


def test_heads_that_do_not_divide_hidden_come_back(tmp_path: Path) -> None:
    ours = scrambled(small(hidden_size=10, head_dim=4))
    save_llama(ours, tmp_path)
    assert read_llama_config(tmp_path) == ours.config
    again = Decoder(ours.config)
    load_llama(again, tmp_path)
    ids = ids_for(ours.config)
    assert torch.equal(again(ids), ours(ids))


def test_a_mapping_loads(tmp_path: Path) -> None:
    for tied in (False, True):
        source = scrambled(small(tie_word_embeddings=tied))
        ours = Decoder(source.config)
        state = source.state_dict()
        state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(1)  # in files of older transformers
        load_llama(ours, state)  # a tied state dict names lm_head.weight too
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), source.parameters(), strict=True))
        assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied


def test_configs_of_transformers_4_are_read(tmp_path: Path) -> None:
    """Rope base at the top, no head_dim, null rope_scaling, no num_key_value_heads: as Llama 1 and 2 have it."""
    save_llama(scrambled(small("every head its own key")), tmp_path)
    table = json.loads((tmp_path / CONFIG).read_text())
    for key in ("rope_parameters", "head_dim", "num_key_value_heads", "dtype"):
        del table[key]
    (tmp_path / CONFIG).write_text(json.dumps(table | {"rope_scaling": None}))
    assert read_llama_config(tmp_path) == small("every head its own key")
    for key in ("rope_theta", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"):
        del table[key]
    (tmp_path / CONFIG).write_text(json.dumps(table))
    bare = read_llama_config(tmp_path)
    assert (bare.rope_theta, bare.rms_norm_eps, bare.max_position_embeddings) == (10000.0, 1e-6, 2048)


def test_a_shorter_window_may_load_the_same_weights(tmp_path: Path) -> None:
    save_llama(scrambled(small()), tmp_path)
    load_llama(Decoder(small(max_position_embeddings=16, initializer_range=0.5)), tmp_path)


# --- wrong folders ----------------------------------------------------------------------------------------------------


def to_index(folder: Path, weight_map: object) -> None:
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


WRONG_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / CONFIG).unlink(), r"config\.json cannot be read \(No such file"),
    "config not JSON": (lambda folder: (folder / CONFIG).write_text("{"), r"config\.json is not JSON"),
    "config not an object": (lambda folder: (folder / CONFIG).write_text("[]"), "holds no JSON object"),
    "config without sizes": (lambda folder: (folder / CONFIG).write_text("{}"), "lacks vocab_size, hidden_size"),
    "size that cannot be": (lambda folder: edit_config(folder, hidden_size=0), r"config\.json: hidden_size = 0"),
    "other family": (lambda folder: edit_config(folder, model_type="qwen2"), "model_type = 'qwen2'"),
    "biases": (lambda folder: edit_config(folder, attention_bias=True), "attention_bias = True"),
    "other activation": (lambda folder: edit_config(folder, hidden_act="gelu"), "hidden_act = 'gelu'"),
    "scaled rope": (
        lambda folder: edit_config(folder, rope_parameters={"rope_type": "llama3", "rope_theta": 500.0}),
        "scaled rotary frequencies",
    ),
    "scaled rope of version 4": (
        lambda folder: edit_config(folder, rope_parameters=None, rope_scaling={"type": "linear", "factor": 2.0}),
        "scaled rotary frequencies",
    ),
    "rope not an object": (lambda folder: edit_config(folder, rope_parameters=[1]), r"rope_parameters = \[1\]"),
    "other heads, same shapes": (
        lambda folder: edit_config(folder, num_attention_heads=3, num_key_value_heads=1, head_dim=4),
        r"num_attention_heads \(3 there, 6 in the model\)",
    ),
    "other eps": (lambda folder: edit_config(folder, rms_norm_eps=1e-6), r"rms_norm_eps \(1e-06 there, 0.01"),
    "other vocabulary": (lambda folder: edit_config(folder, vocab_size=99), r"vocab_size \(99 there, 101"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), f"neither {WEIGHTS} nor"),
    "cut short": (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100]),
        r"model\.safetensors cannot be read",
    ),
    "empty file": (lambda folder: (folder / WEIGHTS).write_bytes(b""), r"model\.safetensors cannot be read"),
    "missing name": (lambda folder: edit_weights(folder, lambda state: state.pop(Q_PROJ)), f"lacks {Q_PROJ}"),
    "missing names": (lambda folder: edit_weights(folder, dict.clear), r"lacks model\.embed_.* and 45 more"),
    "unexpected name": (
        lambda folder: edit_weights(folder, lambda state: state.update({"extra.bias": torch.zeros(2)})),
        r"has extra\.bias, which the model has no place for",
    ),
    "other shape": (
        lambda folder: edit_weights(folder, lambda state: state.update({Q_PROJ: torch.zeros(12, 11)})),
        rf"{Q_PROJ} \(\[12, 11\] there, \[12, 12\] in the model\)",
    ),
    "transposed to one row": (
        lambda folder: edit_weights(folder, lambda state: state.update({"model.norm.weight": torch.ones(1, 12)})),
        r"model\.norm\.weight \(\[1, 12\] there, \[12\] in the model\)",
    ),
    "whole numbers": (
        lambda folder: edit_weights(folder, lambda s: s.update({Q_PROJ: torch.zeros(12, 12, dtype=torch.int8)})),
        "Quantised weights",
    ),
    "tied there, not here": (
        lambda folder: edit_weights(folder, lambda state: state.pop("lm_head.weight")),
        "embedding is tied and the model's is not",
    ),
    "index without a map": (lambda folder: to_index(folder, None), "has no weight_map"),
    "absent shard": (lambda folder: to_index(folder, {Q_PROJ: "b.safetensors"}), r"b\.safetensors cannot be read"),
    "shard outside": (lambda folder: to_index(folder, {Q_PROJ: "../a.safetensors"}), "outside its folder"),
    "shard without a name": (lambda folder: to_index(folder, {"x": "a.safetensors"}), "names x, which no shard holds"),
}


@pytest.mark.parametrize("case", WRONG_FOLDERS)
def test_a_wrong_folder_is_refused_and_the_model_untouched(tmp_path: Path, case: str) -> None:
    spoil, text = WRONG_FOLDERS[case]
    save_llama(scrambled(small(), seed=1), tmp_path)
    spoil(tmp_path)
    model, same = scrambled(small(), seed=2), scrambled(small(), seed=2)
    with pytest.raises(ValueError, match=text):
        load_llama(model, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))


def test_an_absent_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        load_llama(Decoder(small()), tmp_path / "nowhere")


def test_a_tied_model_refuses_a_head_of_its_own(tmp_path: Path) -> None:
    save_llama(scrambled(small()), tmp_path)
    with pytest.raises(ValueError, match=r"differs from model\.embed_tokens\.weight"):
        load_llama(Decoder(small(tie_word_embeddings=True)), tmp_path)


def test_meta_parameters_can_neither_be_loaded_nor_saved(tmp_path: Path) -> None:
    with torch.device("meta"):
        hollow = Decoder(small())
    with pytest.raises(ValueError, match="no values in model"):
        save_llama(hollow, tmp_path)
    with pytest.raises(ValueError, match="no values in model"):
        load_llama(hollow, scrambled(small()).state_dict())
