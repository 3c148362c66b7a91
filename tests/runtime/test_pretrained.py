"""Weight files as initial values: the same under every layout, matched by name, refused in one voice."""

from __future__ import annotations

import json
import os
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn

from meshwright.models import token_loss
from meshwright.runtime import weight_files
from tests.harness.hugging_face import FAMILIES, TIED, make_model, rows_of
from tests.harness.ranks import run_ranks
from tests.runtime.warm import changed, differing, hollow, listening, quiet, refused, start, written

CASES = [(name, at % 2 == 0 and name in TIED) for at, name in enumerate(FAMILIES)]
#: Zero and shard group for each number of ranks.
LAYOUTS = {2: ((0, 0), (1, 0), (2, 0), (3, 0)), 3: ((0, 0), (1, 0), (2, 0), (3, 0)), 4: ((3, 2), (1, 2))}


# ------------------------------------------------------------------------------------------------------- equal values


def families_begin_and_end(folder: Path) -> list[str]:
    """Each family under ZeRO-2 or 3 from a builder; what differs from the model that wrote the files. Written again."""
    wrong = []
    for at, (name, tied) in enumerate(CASES):
        with listening() as texts:
            engine = start(hollow(name, tied=tied), folder / name, zero=3 - at % 2)
        wrong += [
            f"{name} {key}" for key in differing(engine, make_model(name, tied=tied, dtype=torch.float32))
        ] + texts
        engine.export(folder / "again" / name, max_shard_bytes=20_000 if at % 3 else 2**30)
    return wrong


def test_families_begin_with_their_files_and_are_loaded_by_from_pretrained(tmp_path: Path) -> None:
    for at, (name, tied) in enumerate(CASES):
        written(tmp_path / name, name, tied=tied, files=1 + at % 2)
    assert run_ranks(2, families_begin_and_end, tmp_path, timeout_s=120) == [[], []]
    for at, (name, tied) in enumerate(CASES):
        again, wanted = tmp_path / "again" / name, make_model(name, tied=tied, dtype=torch.float32)
        with quiet():
            found, said = FAMILIES[name][0].from_pretrained(again, output_loading_info=True)
        assert not any(said.values()), name
        states = found.state_dict()
        assert [key for key, value in wanted.state_dict().items() if not states[key].equal(value)] == []
        config = json.loads((again / "config.json").read_text())
        assert (config["architectures"], config["dtype"]) == ([type(wanted).__name__], "float32")
        assert (again / "model.safetensors.index.json").exists() == bool(at % 3)


def layouts_begin(folder: Path) -> list[str]:
    """From a builder and from a model with other values, from one file and several, tied and not, as bfloat16."""
    wrong = []
    for zero, shard in LAYOUTS[dist.get_world_size()]:
        for tied in (False, True):
            model = make_model("llama", tied=tied, dtype=torch.bfloat16).float()
            other = make_model("llama", tied=tied, dtype=torch.float32)
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.fill_(7.0 + dist.get_rank())
            for source in (hollow("llama", tied=tied), other):
                engine = start(source, folder / str(tied), zero=zero, **({"shard": shard} if shard else {}))
                wrong += [f"zero={zero} tied={tied} {key}" for key in differing(engine, model)]
                wrong += [
                    f"{key} is {p.dtype}" for key, p in engine.named_parameters().items() if p.dtype != torch.float32
                ]
    return wrong


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_every_layout_reads_the_same_values(tmp_path: Path, ranks: int) -> None:
    for tied in (False, True):
        written(tmp_path / str(tied), "llama", tied=tied, files=1 if tied else 3, dtype=torch.bfloat16)
    assert run_ranks(ranks, layouts_begin, tmp_path) == [[]] * ranks


def first_steps(folder: Path) -> list[float]:
    batch = rows_of("llama", seed=1, dtype=torch.float32)
    return [start(hollow("llama"), folder, zero=zero).step(batch).loss for zero in (0, 3)]


def test_the_first_loss_is_that_of_the_files_model(tmp_path: Path) -> None:
    model = make_model("llama", tied=False, dtype=torch.float32)
    wanted = float(model(**rows_of("llama", seed=1, dtype=torch.float32)).loss.detach())
    for losses in run_ranks(2, first_steps, written(tmp_path / "m", "llama")):
        assert losses == pytest.approx([wanted] * 2, rel=1e-5)


def test_a_file_is_read_as_its_folder(tmp_path: Path) -> None:
    model = make_model("llama", tied=False, dtype=torch.float32)
    one, many = written(tmp_path / "one", "llama"), written(tmp_path / "many", "llama", files=3)
    for place in (one / "model.safetensors", str(one), many / "model.safetensors.index.json", many):
        assert differing(start(hollow("llama"), Path(place)), model) == []


# ------------------------------------------------------------------------------------------------------ names and keys


def test_a_base_models_files_and_a_model_with_a_head(tmp_path: Path) -> None:
    """`h.0...` into `transformer.h.0...` and back."""
    model = make_model("gpt2", tied=True, dtype=torch.float32)
    with quiet():
        model.transformer.save_pretrained(tmp_path / "base")
    assert differing(start(hollow("gpt2", tied=True), tmp_path / "base"), model) == []
    engine = start(lambda: hf.GPT2Model(model.config), written(tmp_path / "whole", "gpt2", tied=True))
    assert differing(engine, model.transformer) == []


def test_a_tied_weight_is_read_by_either_name(tmp_path: Path) -> None:
    model = make_model("llama", tied=True, dtype=torch.float32)
    folder = written(tmp_path / "m", "llama", tied=True)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    assert differing(start(hollow("llama", tied=True), changed(folder, rename)), model) == []

    def twice(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"].clone()

    with listening() as texts:
        assert differing(start(hollow("llama", tied=True), changed(folder, twice)), model) == []
    assert texts == []

    def apart(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][5, 3] += 1

    text = refused(start, hollow("llama", tied=True), changed(folder, apart))
    assert "model.embed_tokens.weight and lm_head.weight with different values" in text
    assert "tie_word_embeddings=False" in text


def test_what_transformers_renames_is_renamed(tmp_path: Path) -> None:
    model = make_model("bert", tied=True, dtype=torch.float32)
    folder = written(tmp_path / "m", "bert", tied=True)

    def age(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            old = key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[old] = tensors.pop(key)

    with listening() as texts:
        assert differing(start(hollow("bert", tied=True), changed(folder, age)), model) == []
    assert texts == []


def classifier() -> nn.Module:
    return hf.LlamaForSequenceClassification(hf.LlamaConfig(**FAMILIES["llama"][2], num_labels=3))


def begin_with_a_new_head(folder: Path, zero: int) -> tuple[list[str], list[str], torch.Tensor]:
    with listening() as texts:
        engine = start(classifier, folder, zero=zero)
    model = make_model("llama", tied=False, dtype=torch.float32)
    return texts, differing(engine, dict(model.model.named_parameters(prefix="model"))), engine.read("score.weight")


def test_a_new_head_begins_by_its_init_function_and_is_named_once(tmp_path: Path) -> None:
    folder = written(tmp_path / "m", "llama")
    fresh = start(classifier, None).read("score.weight")
    results = [*run_ranks(2, begin_with_a_new_head, folder, 3), begin_with_a_new_head(folder, 0)]
    for at, (texts, wrong, head) in enumerate(results):
        assert wrong == []
        assert head.equal(fresh)
        assert len(texts) == (0 if at == 1 else 2)
    missing, unknown = results[0][0]
    assert missing.endswith("does not hold 1 of the model's tensors, which keep their initial values: score.weight")
    assert unknown.endswith("holds 1 tensors that the model has no place for: lm_head.weight")


class Half(nn.Module):
    """A layer of which the files hold the weight only, with buffers: one that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("steps", torch.arange(3.0), persistent=False)


def begin_half(folder: Path) -> dict[str, torch.Tensor]:
    engine = start(Half, folder, zero=3, loss=token_loss)
    return {name: engine.read(name) for name in ("layer.weight", "layer.bias", "scale", "steps")}


def test_a_module_may_be_stored_in_part_and_buffers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "half.safetensors"
    stored = {"layer.weight": torch.randn(3, 5), "scale": torch.randn(3), "steps": torch.zeros(3)}
    save_file(stored, path)
    fresh = start(Half, None, loss=token_loss)
    for found in (*run_ranks(2, begin_half, path), begin_half(path)):
        assert found["layer.weight"].equal(stored["layer.weight"])
        assert found["layer.bias"].equal(fresh.read("layer.bias"))
        assert found["scale"].equal(stored["scale"])
        assert found["steps"].equal(torch.arange(3.0))  # the model makes it itself


# ------------------------------------------------------------------------------------------------------------ refusals


class _Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def break_folder(folder: Path, how: str) -> Path:
    """A folder of files that cannot be right."""
    written(folder, "llama", files=3 if "index" in how else 1)
    data, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    shards = sorted(folder.glob("model-*.safetensors"))

    def table(change: Any) -> None:
        found = json.loads(index.read_text())
        change(found)
        index.write_text(json.dumps(found))

    if how == "cut":
        os.truncate(data, data.stat().st_size - 100)
    elif how == "no safetensors":
        data.write_bytes(pickle.dumps(_Evil(folder / "executed")))
    elif how == "index: file missing":
        shards[1].unlink()
    elif how == "index: shard cut":
        os.truncate(shards[1], 50)
    elif how == "index: tensor missing":
        table(lambda found: found["weight_map"].update({"model.extra": shards[0].name}))
    elif how == "index: outside":
        table(lambda found: found["weight_map"].update({"model.extra": "../x.safetensors"}))
    elif how == "index: none":
        index.write_text("[]")
    elif how == "pickles only":
        data.unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Evil(folder / "executed")))
    elif how == "empty":
        for path in folder.iterdir():
            path.unlink()
    elif how == "checkpoint":
        data.rename(folder / "rank-00000.safetensors")
        (folder / "manifest.json").touch()
    elif how == "other names":
        data.rename(folder / "weights.safetensors")
    elif how == "shape":
        changed(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(13)}))
    elif how == "dtype":
        changed(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(12, dtype=torch.int8)}))
    elif how == "another model":
        changed(
            folder, lambda tensors: [tensors.update({f"{i}.x": tensors.pop(k)}) for i, k in enumerate(list(tensors))]
        )
    return folder


BROKEN = {
    "cut": "CheckpointError: .*model.safetensors cannot be read.*it is cut or damaged.*fetch",
    "no safetensors": "CheckpointError: .*model.safetensors cannot be read",
    "index: file missing": "CheckpointError: .*index.json names model-00002-of-0000.*no such file beside it",
    "index: shard cut": "CheckpointError: .*model-00002-of-0000.*cut or damaged",
    "index: tensor missing": "CheckpointError: .*names model.extra.*none of its files holds",
    "index: outside": "CheckpointError: .*points outside its folder.*../x.safetensors",
    "index: none": "CheckpointError: .*is no index.*no weight_map",
    "pickles only": "ConfigError: .*neither model.safetensors nor .*pickles.*convert it once",
    "empty": "ConfigError: .*neither model.safetensors nor .*no file of it is a safetensors file",
    "checkpoint": "ConfigError: .*a checkpoint of Meshwright.*engine.load",
    "other names": "ConfigError: .*it holds weights.safetensors.*give the file itself",
    "shape": "ConfigError: .*other sizes.*model.norm.weight is stored as 13, and model.norm.weight is 12.*config.json",
    "dtype": "ConfigError: .*model.norm.weight is stored in torch.int8, and .* is torch.float32.*convert quantised",
    "another model": "ConfigError: .*holds no weight of this model.*it has 0.x, .*the model has model.embed_tokens",
}


def refusals(folders: list[Path]) -> list[str]:
    return [refused(start, hollow("llama"), folder, zero=3) for folder in folders]


def test_what_cannot_be_read_is_one_error_on_every_rank(tmp_path: Path) -> None:
    folders = [break_folder(tmp_path / str(at), how) for at, how in enumerate(BROKEN)]
    by_rank = run_ranks(2, refusals, folders)
    assert by_rank[0] == by_rank[1] == refusals(folders)
    for (how, wanted), text in zip(BROKEN.items(), by_rank[0], strict=True):
        assert re.match(f"(?s){wanted}", text), how
    assert not list(tmp_path.rglob("executed"))


def test_a_path_that_is_none(tmp_path: Path) -> None:
    assert "no such file or folder" in refused(start, hollow("llama"), tmp_path / "nothing")
    (tmp_path / "model.bin").touch()
    assert "reading one can execute code" in refused(start, hollow("llama"), tmp_path / "model.bin")


def only_one_fails(folder: Path, moment: str) -> tuple[str, float]:
    """The last rank's disk fails, when files are opened or when they are read; a model with values is left alone."""
    if dist.get_rank() == dist.get_world_size() - 1:
        if moment == "open":
            folder = folder / "gone"
        else:

            def fail(*_: Any) -> torch.Tensor:
                raise OSError(5, "Input/output error")

            weight_files.WeightFiles._part = fail  # type: ignore[method-assign]
    model = make_model("llama", tied=False, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    weight = model.model.norm.weight
    return refused(start, model, folder, zero=3), float(weight.detach().sum())


@pytest.mark.parametrize("moment", ["open", "read"])
def test_a_failure_of_one_rank_is_told_by_all(tmp_path: Path, moment: str) -> None:
    (text, untouched), other = run_ranks(2, only_one_fails, written(tmp_path / "m", "llama"), moment)
    if moment == "open":
        assert other == (text, 36.0)
        assert untouched == 36.0
        assert "gone" in text
    else:
        assert other[0] == text
        assert re.match(r"RankFailure: rank 1 on host .*\n  why: OSError: .*Input/output error", text)


MIXTURES: dict[str, Any] = {
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig, {"num_local_experts": 3}),
    "qwen2_moe": (
        hf.Qwen2MoeForCausalLM,
        hf.Qwen2MoeConfig,
        {"num_experts": 3, "moe_intermediate_size": 7, "shared_expert_intermediate_size": 9},
    ),
}


def mixture(name: str) -> nn.Module:
    kind, config, keys = MIXTURES[name]
    torch.manual_seed(5)
    model: nn.Module = kind(config(**FAMILIES["llama"][2] | {"num_hidden_layers": 2} | keys))
    return model


def mixtures_begin(folder: Path) -> list[str]:
    wrong = []
    for name in MIXTURES:
        with listening() as texts:
            engine = start(partial(mixture, name), folder / name, zero=3)
        wrong += differing(engine, mixture(name)) + texts
        engine.export(folder / "again" / name)
    return wrong


def test_what_transformers_merges_is_merged(tmp_path: Path) -> None:
    """The files have a matrix for each expert, the model one for all of a layer."""
    for name in MIXTURES:
        with quiet():
            mixture(name).save_pretrained(tmp_path / name)
        assert any("experts.0." in key for key in load_file(tmp_path / name / "model.safetensors"))
    assert run_ranks(2, mixtures_begin, tmp_path) == [[], []]
    for name, (kind, _, _) in MIXTURES.items():
        with quiet():
            found, said = kind.from_pretrained(tmp_path / "again" / name, output_loading_info=True)
        assert not any(said.values())
        assert all(parameter.equal(found.get_parameter(key)) for key, parameter in mixture(name).named_parameters())

    def lose(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[next(key for key in tensors if "experts.1." in key)]

    text = refused(start, partial(mixture, "mixtral"), changed(tmp_path / "mixtral", lose))
    assert "experts.down_proj cannot be made" in text or "experts.gate_up_proj cannot be made" in text
    assert "save_original_format=False" in text


def test_a_builder_that_loads_weights_is_told_of_the_keyword() -> None:
    def build() -> nn.Module:
        model = nn.Linear(3, 3)
        model.load_state_dict({"weight": torch.zeros(3, 3), "bias": torch.zeros(3)})
        return model

    assert "weights=folder" in refused(start, build, None, loss=token_loss)
