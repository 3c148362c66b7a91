"""PEFT models from builders: adapters begin as peft makes them, the base from files, whatever the layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
    inject_adapter_in_model,
)
from torch import Tensor, nn

from tests.harness.hugging_face import FAMILIES, make_model, rows_of
from tests.harness.ranks import run_ranks
from tests.runtime.warm import differing, hollow, listening, quiet, refused, start, written

LORA: dict[str, Any] = {"r": 5, "target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}
QUERY = "base_model.model.model.layers.{}.self_attn.q_proj"


def adapted(**options: Any) -> nn.Module:
    with quiet():
        model: nn.Module = get_peft_model(hollow("llama")(), LoraConfig(**LORA | options))
    return model


def whole(engine: Any) -> dict[str, Tensor]:
    return {name: engine.read(name) for name in engine.named_parameters()}


def begin(folder: Path | None, **options: Any) -> dict[str, Tensor]:
    return whole(start(lambda: adapted(**options), folder))


def begin_twice(folder: Path) -> list[dict[str, Tensor]]:
    return [whole(start(adapted, folder, zero=zero)) for zero in (0, 3)]


def test_adapters_begin_as_peft_makes_them_and_the_base_from_files(tmp_path: Path) -> None:
    folder = written(tmp_path / "m", "llama")
    with listening() as texts:
        values = begin(folder)
    [text] = texts
    assert "12 of the model's tensors, which keep their initial values" in text
    base = make_model("llama", tied=False, dtype=torch.float32)
    for name, parameter in base.named_parameters():
        places = [f"base_model.model.{name}"]
        module, _, kind = places[0].rpartition(".")
        places += [f"{module}.base_layer.{kind}", f"{module}.original_module.{kind}"]
        places += [f"{module}.modules_to_save.default.{kind}"]
        found = [values[place] for place in places if place in values]
        assert len(found) == (2 if name == "lm_head.weight" else 1)
        assert all(value.equal(parameter) for value in found), name
    bound = 1 / math.sqrt(12)  # kaiming_uniform with a = sqrt(5)
    down = [values[f"{QUERY.format(layer)}.lora_A.default.weight"] for layer in range(5)]
    assert all(0.8 * bound < float(part.abs().max()) <= bound for part in down)
    assert not down[0].equal(down[1])
    assert not any(values[f"{QUERY.format(layer)}.lora_B.default.weight"].any() for layer in range(5))
    assert not values["base_model.model.model.embed_tokens.lora_embedding_A.default"].any()
    assert 0.7 < float(values["base_model.model.model.embed_tokens.lora_embedding_B.default"].std()) < 1.3
    for both in run_ranks(2, begin_twice, folder):
        for again in both:
            assert again.keys() == values.keys()
            assert all(again[name].equal(value) for name, value in values.items())


def test_without_files_the_copy_begins_as_its_original() -> None:
    values = begin(None)
    head = values["base_model.model.lm_head.original_module.weight"]
    assert head.any()
    assert values["base_model.model.lm_head.modules_to_save.default.weight"].equal(head)


def test_other_ways_of_lora() -> None:
    name = QUERY.format(0)
    values = begin(None, init_lora_weights="gaussian")
    assert 0.5 / 5 < float(values[f"{name}.lora_A.default.weight"].std()) < 1.5 / 5
    assert not values[f"{name}.lora_B.default.weight"].any()
    values = begin(None, init_lora_weights=False, target_modules=["q_proj"])
    assert 0.5 / math.sqrt(5) < float(values[f"{name}.lora_B.default.weight"].abs().max()) <= 1 / math.sqrt(5)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"), "init_lora_weights='pissa' computes them"),
        (LoraConfig(target_modules=["q_proj"], use_dora=True), "lora_magnitude_vector.default are not known"),
        (LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 2]), "has no values when the model builder"),
        (IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "they are of peft.tuners.ia3"),
        (AdaLoraConfig(target_modules=["q_proj"], total_step=9), "they are of peft.tuners.adalora"),
        (VeraConfig(target_modules=["q_proj"]), "has no values when the model builder returns"),
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "prompt_encoder.default.embedding are not"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_methods_whose_beginning_is_not_known_are_refused(config: Any, says: str) -> None:
    def build() -> nn.Module:
        with quiet():
            model: nn.Module = get_peft_model(hollow("llama")(), config)
        return model

    text = refused(start, build, None)
    assert says in text
    assert "pass the built model instead of the function" in text


def train_and_export(weights: Path, folder: Path, zero: int) -> dict[str, Tensor]:
    with quiet():
        engine = start(adapted, weights, zero=zero)
    engine.step(rows_of("llama", seed=1, dtype=torch.float32))
    engine.export(folder)
    return whole(engine)


@pytest.mark.parametrize("zero", [0, 3])
def test_adapters_are_exported_as_peft_reads_them(tmp_path: Path, zero: int) -> None:
    weights = written(tmp_path / "m", "llama")
    values = run_ranks(2, train_and_export, weights, tmp_path / "out", zero)[0]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    with quiet():
        base = FAMILIES["llama"][0].from_pretrained(weights)
        model = PeftModel.from_pretrained(base, tmp_path / "out", is_trainable=True)
    assert values[f"{QUERY.format(0)}.lora_B.default.weight"].any(), "it has been trained"
    found = dict(model.named_parameters())
    assert found.keys() == values.keys()
    assert [name for name, value in values.items() if not found[name].equal(value)] == []


def test_adapters_inside_a_model_are_exported_too(tmp_path: Path) -> None:
    weights = written(tmp_path / "m", "llama")

    def build() -> nn.Module:
        config = LoraConfig(r=5, target_modules=["q_proj"], init_lora_weights=False)
        with quiet():
            model: nn.Module = inject_adapter_in_model(config, hollow("llama")())
        return model

    values = whole(start(build, weights))
    start(build, weights).export(tmp_path / "out")
    with quiet():
        base = FAMILIES["llama"][0].from_pretrained(weights)
        found = dict(PeftModel.from_pretrained(base, tmp_path / "out").named_parameters())
    assert all(found[f"base_model.model.{name}"].equal(value) for name, value in values.items())
    assert any("lora_B" in name for name in values)


def test_a_built_model_keeps_its_adapters(tmp_path: Path) -> None:
    """Any method does, when the model has its values: only the base is read."""
    with quiet():
        model = get_peft_model(make_model("llama", tied=False, dtype=torch.float32), LoraConfig(**LORA, use_dora=True))
    wanted = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "base_layer" in name or "lora" not in name:
                parameter.zero_()
    engine = start(model, written(tmp_path / "m", "llama"))
    assert differing(engine, wanted) == []
