"""What users of other frameworks reported about weights in files and in memory; each test names its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from meshwright.models import token_loss
from tests.harness.hugging_face import FAMILIES, make_model, rows_of
from tests.harness.ranks import run_ranks
from tests.runtime.warm import differing, hollow, quiet, start, written

STAGES = (0, 1, 2, 3)


def train_and_export(folder: Path) -> dict[str, Tensor]:
    engine = start(make_model("llama", tied=False, dtype=torch.float32), None, zero=3)
    engine.step(rows_of("llama", seed=1, dtype=torch.float32))
    engine.export(folder)
    return {name: engine.read(name) for name in engine.named_parameters()}


def test_G5_weights_exported_under_zero_3_have_all_their_elements(tmp_path: Path) -> None:
    """save_pretrained under ZeRO-3 wrote tensors of shape 0: two ranks, safetensors, plain PyTorch and transformers."""
    values = run_ranks(2, train_and_export, tmp_path / "out")[0]
    fresh = make_model("llama", tied=False, dtype=torch.float32)
    elements = sum(parameter.numel() for parameter in fresh.parameters())
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(value.numel() for value in stored.values()) == elements
    plain = hollow("llama")()
    assert not any(plain.load_state_dict(stored))
    with quiet():
        loaded = FAMILIES["llama"][0].from_pretrained(tmp_path / "out")
    batch = rows_of("llama", seed=2, dtype=torch.float32)
    for model in (plain, loaded):
        assert sum(parameter.numel() for parameter in model.parameters()) == elements
        assert all(parameter.equal(values[name]) for name, parameter in model.named_parameters())
        assert model.eval()(**batch).loss.equal(plain.eval()(**batch).loss)
    assert not plain.lm_head.weight.equal(fresh.lm_head.weight), "it has been trained"


class Frozen(nn.Module):
    """Residual layers of which every other one is frozen, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(5))
        self.leave = nn.Linear(13, 101, bias=False)
        self.register_buffer("seen", torch.zeros(3))
        for layer in self.layers[::2]:
            layer.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += 1
        for layer in self.layers:
            inputs = inputs + torch.tanh(layer(inputs))
        logits: Tensor = self.leave(inputs)
        return logits


def filled(value: float) -> nn.Module:
    torch.manual_seed(5)
    model = Frozen()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(value)
    return model


def freeze_and_save(folder: Path, zero: int) -> tuple[dict[str, Tensor], list[str]]:
    engine = start(filled(0.0), None, zero=zero, loss=token_loss)
    before = {name: engine.read(name) for name in engine.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(6, 7, 13, generator=generator)
    engine.step((inputs, torch.randint(0, 101, (6, 7), generator=generator)))
    engine.save(folder)
    names = (*engine.named_parameters(), "seen")
    values = {name: engine.read(name) for name in names}
    moved = [name for name, value in before.items() if not value.equal(values[name])]
    other = start(filled(30.0), None, zero=zero, loss=token_loss)
    assert set(differing(other, values)) == set(names)
    other.load(folder)
    assert differing(other, values) == []
    return values, moved


@pytest.mark.parametrize("zero", STAGES)
def test_G4_frozen_weights_and_buffers_are_saved_and_loaded(tmp_path: Path, zero: int) -> None:
    """Checkpoints under ZeRO-3 lost what was not trained: half of a model is frozen, saved, and loaded over others."""
    wanted = {f"layers.{layer}.{kind}" for layer in (1, 3) for kind in ("weight", "bias")} | {"leave.weight"}
    for values, moved in run_ranks(2, freeze_and_save, tmp_path / "c", zero):
        assert set(moved) == wanted
        assert values["layers.0.weight"].equal(filled(0.0).get_parameter("layers.0.weight"))
        assert values["seen"].all()


class Rotary(nn.Module):
    """A buffer that is not saved, computed by the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 101)
        self.register_buffer("inv_freq", 1.0 / 10000.0 ** (torch.arange(0, 6, 2) / 6), persistent=False)


def rotary_buffers(folder: Path) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    found = []
    for zero in STAGES:
        engines = start(hollow("llama"), folder, zero=zero), start(Rotary, None, zero=zero, loss=token_loss)
        llama, own = ({name: made.read(name) for name, _ in made.model.named_buffers()} for made in engines)
        found.append((llama, own))
    return found


def test_J4_buffers_that_are_not_saved_are_right_on_every_rank(tmp_path: Path) -> None:
    """RoPE's inv_freq was garbage on all ranks but the first after building on the meta device."""
    wanted = [dict(model.named_buffers()) for model in (make_model("llama", tied=False, dtype=torch.float32), Rotary())]
    assert all(any("inv_freq" in name for name in buffers) for buffers in wanted)
    for stages in run_ranks(2, rotary_buffers, written(tmp_path / "m", "llama")):
        for zero, found in enumerate(stages):
            for buffers, right in zip(found, wanted, strict=True):
                assert buffers.keys() == right.keys()
                assert all(buffers[name].equal(value) for name, value in right.items()), f"ZeRO-{zero}"


def shapes_and_values(folder: Path) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    found = []
    for zero in STAGES:
        engine = start(hollow("llama"), folder, zero=zero)
        shapes = {name: tuple(parameter.shape) for name, parameter in engine.model.named_parameters()}
        found.append((shapes, {name: engine.read(name) for name in shapes}))
    return found


def test_J5_a_sharded_weight_has_its_shape_and_is_read_by_one_call(tmp_path: Path) -> None:
    """`weight.shape` was (0,) under ZeRO-3, and reading a weight took a context of its own."""
    wanted = dict(make_model("llama", tied=False, dtype=torch.float32).named_parameters())
    for stages in run_ranks(2, shapes_and_values, written(tmp_path / "m", "llama")):
        for zero, (shapes, values) in enumerate(stages):
            assert shapes == {name: tuple(parameter.shape) for name, parameter in wanted.items()}, f"ZeRO-{zero}"
            assert all(values[name].equal(parameter) for name, parameter in wanted.items()), f"ZeRO-{zero}"
