"""Known models: their names, and their sizes against Hugging Face's classes built from the same keys."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.initialization import no_init_weights

from meshwright.errors import ConfigError
from meshwright.spec import Layout
from meshwright.spec.catalogue import KnownModel, find_model, known_model, known_models, named_model

MODELS = known_models()
SHORT = Layout(sequence=64, compute_dtype="bfloat16")


def unlike(models: tuple[KnownModel, ...]) -> list[KnownModel]:
    """Those that differ in more than the number of positions, which has no parameters where positions are rotated."""
    found: dict[str, KnownModel] = {}
    for model in models:
        shape = {key: value for key, value in model.table.items() if key != "max_position_embeddings"}
        found.setdefault(json.dumps(shape, sort_keys=True), model)
    return list(found.values())


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", unlike(MODELS), ids=lambda model: model.name)
def test_parameters_are_those_of_hugging_faces_class(model: KnownModel) -> None:
    settings = {key: value for key, value in model.table.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(model.table["model_type"], **settings)
    with torch.device("meta"), no_init_weights():
        made = transformers.AutoModelForCausalLM.from_config(config)
    made.tie_weights()
    assert sum(parameter.numel() for parameter in made.parameters()) == model.parameters


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_description_has_as_many(model: KnownModel) -> None:
    spec = model.described.at(SHORT)
    assert (spec.name, spec.parameters) == (model.name, model.parameters)
    assert model.repository in spec.source


@pytest.mark.parametrize("name", ["GPT-3 175B", *(f"Megatron GPT {size}" for size in ("22B", "175B", "530B", "1T"))])
def test_gpt_sizes_follow_megatrons_count(name: str) -> None:
    """12 L h^2 (1 + 13 / 12h + (V + s) / 12 L h), Narayanan et al. 2021 (arXiv 2104.04473), eq. 2.

    It leaves out the last norm, of 2h.
    """
    table = named_model(name).table
    layers, hidden = table["n_layer"], table["n_embd"]
    counted = 12 * layers * hidden**2 + 13 * layers * hidden + (table["vocab_size"] + table["n_positions"]) * hidden
    assert named_model(name).parameters == counted + 2 * hidden


WANTED = """
llama-2-7b llama-2-13b llama-2-70b llama-3-8b llama-3-70b llama-3.1-8b llama-3.1-70b llama-3.1-405b llama-3.2-1b
llama-3.2-3b mistral-7b mixtral-8x7b mixtral-8x22b qwen2.5-0.5b qwen2.5-1.5b qwen2.5-3b qwen2.5-7b qwen2.5-14b
qwen2.5-32b qwen2.5-72b qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-8b qwen3-14b qwen3-32b qwen3-30b-a3b qwen3-235b-a22b
gemma-2-2b gemma-2-9b gemma-2-27b gpt2 gpt2-medium gpt2-large gpt2-xl gpt-3-175b megatron-gpt-22b megatron-gpt-175b
megatron-gpt-530b megatron-gpt-1t bloom-176b mpt-7b mpt-30b mpt-70b internlm-7b internlm-20b deepseek-v2-lite
deepseek-v2 deepseek-v3
"""


def test_the_catalogue_holds_what_it_should() -> None:
    wanted = WANTED.split()
    assert len({named_model(name).name for name in wanted}) == len(wanted)


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llama-3-70b", "Llama 3 70B"),
        ("Llama3-70B", "Llama 3 70B"),
        ("meta-llama/Meta-Llama-3-70B", "Llama 3 70B"),
        ("llama 3.1 405b instruct", "Llama 3.1 405B"),
        ("llama3.1:8b", "Llama 3.1 8B"),
        ("Llama-2-7b-chat-hf", "Llama 2 7B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral 7B v0.3"),
        ("mistral 7b", "Mistral 7B v0.1"),
        ("Mixtral-8x7B-Instruct-v0.1", "Mixtral 8x7B"),
        ("Qwen/Qwen2.5-72B-Instruct", "Qwen2.5 72B"),
        ("qwen 3 30b a3b", "Qwen3 30B A3B"),
        ("google/gemma-2-27b-it", "Gemma 2 27B"),
        ("gpt2", "GPT-2"),
        ("GPT-2 XL", "GPT-2 XL"),
        ("openai-community/gpt2-medium", "GPT-2 medium"),
        ("gpt3", "GPT-3 175B"),
        ("megatron 530b", "Megatron GPT 530B"),
        ("bigscience/bloom", "BLOOM 176B"),
        ("mosaicml/mpt-30b", "MPT 30B"),
        ("internlm-20b", "InternLM 20B"),
        ("deepseek-ai/DeepSeek-V3-Base", "DeepSeek V3"),
        ("DeepSeek-V2-Lite-Chat", "DeepSeek V2 Lite"),
    ],
)
def test_names_are_forgiving(text: str, name: str) -> None:
    assert named_model(text).name == name
    assert known_model(text).name == name


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_spelling_leads_back_to_its_model(model: KnownModel) -> None:
    for spelling in (
        model.name,
        model.name.lower().replace(" ", "-"),
        model.name.upper().replace(" ", "_"),
        *model.also,
    ):
        assert named_model(spelling) == model


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("llama-70b", ["Llama 2 70B", "Llama 3 70B", "Llama 3.1 70B", "llama-2-70b"]),
        ("qwen2.5", ["Qwen2.5 0.5B", "Qwen2.5 72B"]),
        ("lama-3-70b", ["did you mean llama-3-70b"]),
        ("llama-3-71b", ["did you mean llama-3-70b"]),
        ("gemma-27b", ["did you mean gemma-2-27b"]),
        ("Qwen2.5-Coder-7B", ["Qwen2.5 7B"]),
        ("gpt4", ["GPT-3 175B"]),
        ("phi-4", ["Llama", "DeepSeek", "config.json"]),
        ("", ["Llama", "config.json"]),
        ("-", ["config.json"]),
    ],
)
def test_a_name_that_is_none_is_refused_with_what_is_near(text: str, named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        find_model(text)
    assert [word for word in named if word not in str(caught.value)] == [], str(caught.value)
    assert caught.value.fix


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=30) | st.from_regex(r"(llama|qwen|gpt)-?[0-9.]{0,4}[- ]?[0-9a-z]{0,5}", fullmatch=True))
def test_any_text_is_a_model_or_one_error(text: str) -> None:
    try:
        model = find_model(text)
    except ConfigError:
        return
    assert model.name


# --- finding ----------------------------------------------------------------------------------------------------------

CONFIG = {
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "vocab_size": 101,
}


def test_a_model_is_found_by_path_folder_table_or_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    wanted = find_model(CONFIG).at(SHORT).blocks
    monkeypatch.chdir(tmp_path)
    for source in (folder, str(folder), f"{folder}/", folder / "config.json", "mine", "./mine", "mine/config.json"):
        found = find_model(source)
        assert (found.name, found.at(SHORT).blocks) == ("mine", wanted)
    assert find_model("llama-3-8b").name == "Llama 3 8B"


def test_a_folder_of_one_s_own_comes_before_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_model("gpt2").at(SHORT).parameters == 124439808
    (tmp_path / "gpt2").mkdir()
    assert find_model("gpt2").at(SHORT).parameters == 124439808  # no config.json in it
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(CONFIG))
    assert find_model("gpt2").at(SHORT).parameters != 124439808


@pytest.mark.parametrize("source", ["no/such/config.json", "./nowhere", "~nobody/x.json", Path("nowhere"), {}])
def test_a_path_that_leads_nowhere_is_refused_as_one(source: str | Path | dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        find_model(source)
    assert "catalogue" not in str(caught.value)


def test_a_model_is_found_without_torch() -> None:
    code = (
        "import sys, json\n"
        "from meshwright.spec.catalogue import find_model\n"
        "find_model('llama-3-70b')\n"
        "print(json.dumps(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == []
