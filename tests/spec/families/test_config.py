"""Reading a `config.json`: what is understood, and one clear line for what is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import ConfigError
from meshwright.spec import Layout
from meshwright.spec.families import read_config
from tests.spec.families.tiny import FAMILIES, WITH_KERNEL

LLAMA = WITH_KERNEL["llama"]


def parameters(table: dict[str, Any]) -> int:
    return read_config(table).at(Layout(sequence=8)).parameters


def refusal(table: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_config(table, name="mine")
    assert "\n" not in caught.value.what
    return caught.value


def test_a_path_a_folder_and_a_table_are_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    layout = Layout(sequence=8)
    models = [read_config(source) for source in (folder, folder / "config.json", str(folder))]
    assert {model.name for model in models} == {"some-model"}
    assert all(model.at(layout).blocks == read_config(LLAMA).at(layout).blocks for model in models)
    assert read_config(LLAMA).name == "llama"
    assert read_config(folder, name="other").name == "other"


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path)
    broken = tmp_path / "config.json"
    broken.write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_config(broken)
    broken.write_text("[]")
    with pytest.raises(ConfigError, match="not a table"):
        read_config(broken)
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not JSON"):
        read_config(broken)


def test_an_unknown_model_type_names_the_nearest() -> None:
    error = refusal({**LLAMA, "model_type": "lama"})
    assert "lama is not known" in error.what
    assert "did you mean llama?" in error.fix
    assert "gpt_neox" in error.why
    assert "model_type" in refusal({"hidden_size": 8}).what


def test_a_multimodal_wrapper_is_named() -> None:
    wrapper = {"model_type": "mllama", "text_config": {**LLAMA, "model_type": "mllama_text_model"}, "vision_config": {}}
    assert "mllama wraps a language model (mllama_text_model)" in refusal(wrapper).what


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_configs", [{"attention": {"no_op": True}}]),
        ("num_local_experts", 8),
        ("moe_intermediate_size", 64),
        ("partial_rotary_factors", 0.5),
        ("kv_lora_rank", 16),
        ("layer_types", ["full_attention"] * 3),
        ("use_mup", True),
    ],
)
def test_a_key_that_may_change_the_shape_is_never_ignored(key: str, value: Any) -> None:
    assert key in refusal({**LLAMA, key: value}).what


def test_a_misspelt_key_names_the_nearest() -> None:
    table = {**LLAMA, "num_key_value_head": 3}
    error = refusal(table)
    assert "num_key_value_head is not understood" in error.what
    assert "num_key_value_heads" in error.fix


@pytest.mark.parametrize(
    "harmless",
    [
        {"torch_dtype": "bfloat16", "transformers_version": "4.40.0", "use_cache": True, "bos_token_id": 1},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "rope_theta": 500000.0, "rms_norm_eps": 1e-5},
        {"auto_map": {"AutoModelForCausalLM": "modeling_x.Y"}, "_name_or_path": "here"},
        {"moe_layers": None, "use_mup": False},
    ],
)
def test_keys_that_change_nothing_or_are_off(harmless: dict[str, Any]) -> None:
    assert parameters({**LLAMA, **harmless}) == parameters(LLAMA)


def test_quantised_weights_are_counted_unquantised_and_said_so() -> None:
    table = {**LLAMA, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}
    model = read_config(table).at(Layout(sequence=8))
    assert model.parameters == parameters(LLAMA)
    assert "quantised weights (fp8) are counted unquantised" in model.source
    assert "quantised" not in read_config(LLAMA).at(Layout(sequence=8)).source


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": "24"}, "hidden_size='24'"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"hidden_size": True}, "hidden_size=True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"vocab_size": -1}, "vocab_size=-1"),
        ({"num_key_value_heads": 4}, "num_key_value_heads=4 does not divide num_attention_heads=6"),
        ({"num_attention_heads": 5, "num_key_value_heads": 1}, "num_attention_heads=5 does not divide hidden_size=24"),
        ({"hidden_act": "gegelu"}, "'gegelu' is not known"),
        ({"attention_bias": "yes"}, "attention_bias='yes'"),
        ({"attention_dropout": 1.5}, "attention_dropout=1.5"),
        ({"architectures": ["LlamaForQuestionAnswering"]}, "LlamaForQuestionAnswering"),
        ({"architectures": ["LlavaForCausalLM"]}, "LlavaForCausalLM"),
    ],
)
def test_values_that_cannot_be_right(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config({**LLAMA, **change}).at(Layout(sequence=8))
    assert said in caught.value.what


def test_two_names_of_one_size_that_contradict() -> None:
    assert "they name one thing" in refusal({**FAMILIES["gpt2"], "hidden_size": 30}).why


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mpt", {"no_bias": False}),
        ("mpt", {"expansion_ratio": 8}),
        ("mpt", {"attn_config": {"alibi": False}}),
        ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}),
        ("mpt", {"attn_config": {"kv_n_heads": 2}}),
        ("gpt2", {"add_cross_attention": True}),
        ("gemma", {"use_bidirectional_attention": True}),
        ("gemma3", {"layer_types": ["full_attention"]}),
        ("gemma3", {"layer_types": ["linear_attention"] * 3}),
        ("gpt_neox", {"rotary_pct": 2.0}),
    ],
)
def test_what_a_class_cannot_do_is_refused(name: str, change: dict[str, Any]) -> None:
    refusal({**FAMILIES[name], **change})


def test_defaults_are_those_of_the_classes() -> None:
    """Facts from the configurations' own pages: a bare model_type is the first model of its family."""
    assert parameters({"model_type": "llama"}) == 6_738_415_616  # Llama 7B
    assert parameters({"model_type": "gpt2"}) == 124_439_808  # GPT-2 small
    assert parameters({"model_type": "opt"}) == 125_239_296  # OPT 125M
    assert parameters({"model_type": "gpt_neox"}) == 20_554_567_680  # GPT-NeoX 20B, with transformers' vocabulary


def test_reading_a_config_needs_no_torch() -> None:
    code = (
        "import sys; from meshwright.spec.families import read_config; from meshwright.spec.layout import Layout;"
        "read_config({'model_type': 'llama'}).at(Layout(sequence=8));"
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_sizes_that_a_file_leaves_to_its_class_are_told() -> None:
    whole = read_config(LLAMA).at(Layout(sequence=8)).source
    assert "not in the file" not in whole
    for key in ("num_hidden_layers", "intermediate_size", "vocab_size"):
        table = {name: value for name, value in LLAMA.items() if name != key}
        told = read_config(table).at(Layout(sequence=8)).source
        assert f"not in the file, so as its class has it: {key}=" in told


def test_absurd_files_are_one_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="is not JSON"):
        read_config(tmp_path)
    assert "num_hidden_layers=10000000" in refusal(LLAMA | {"num_hidden_layers": 10_000_000}).what
