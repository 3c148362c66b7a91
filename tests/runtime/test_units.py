"""Units: blocks are found in any module; shared parameters bring units together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.models import Decoder, DecoderConfig
from meshwright.runtime.units import find_blocks, make_units


class Stack(nn.Module):
    """An embedding, three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)


def names(model: nn.Module, unit_blocks: int = 1) -> list[list[str]]:
    return [sorted(unit.parameters) for unit in make_units(model, unit_blocks=unit_blocks)]


def test_blocks_are_the_children_of_the_outermost_list() -> None:
    assert [name for name, _ in find_blocks(Stack())] == ["blocks.0", "blocks.1", "blocks.2"]
    decoder = Decoder(DecoderConfig(hidden_size=12, num_attention_heads=6, num_hidden_layers=5))
    assert [name for name, _ in find_blocks(decoder)] == [f"model.layers.{i}" for i in range(5)]
    sequential = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    assert [name for name, _ in find_blocks(sequential)] == ["0", "2"]
    nested = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.Linear(2, 2)])
    assert [name for name, _ in find_blocks(nested)] == ["0.0", "0.1", "1"]


def test_a_model_without_a_list_is_one_root_unit() -> None:
    assert names(nn.Linear(3, 2)) == [["bias", "weight"]]


def test_unit_blocks_groups_consecutive_blocks() -> None:
    found = names(Stack(), unit_blocks=2)
    assert found == [
        ["first.weight", "head.weight"],
        ["blocks.0.bias", "blocks.0.weight", "blocks.1.bias", "blocks.1.weight"],
        ["blocks.2.bias", "blocks.2.weight"],
    ]


def test_a_parameter_tied_between_blocks_joins_their_units() -> None:
    model = Stack()
    model.blocks[2].weight = model.blocks[0].weight
    found = names(model)
    assert ["blocks.0.bias", "blocks.0.weight", "blocks.2.bias"] in found
    assert sum(len(unit) for unit in found) == len(list(model.parameters()))


def test_a_parameter_tied_to_the_rest_brings_its_block_into_the_root_unit() -> None:
    model = Stack()
    model.blocks[1].weight = nn.Parameter(torch.zeros(6, 6))
    model.register_parameter("mirror", model.blocks[1].weight)
    assert names(model)[0] == ["blocks.1.bias", "first.weight", "head.weight", "mirror"]


def test_a_module_that_stands_in_a_list_twice_is_one_block() -> None:
    shared = nn.Linear(4, 4)
    assert [name for name, _ in find_blocks(nn.ModuleList([shared, nn.Linear(4, 4), shared]))] == ["0", "1"]


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="no parameters"):
        make_units(nn.ReLU(), unit_blocks=1)
