"""Two ways to the same figures: a family's tape, and the trace of its Hugging Face class."""

from __future__ import annotations

import pytest
import torch

from meshwright.measure import trace
from meshwright.spec import ModelSpec
from meshwright.spec.families import read_config
from meshwright.spec.job import Dtype
from meshwright.spec.layout import Layout
from tests.spec.families.measured import build
from tests.spec.families.tiny import WITH_KERNEL, WITHOUT_KERNEL
from tests.spec.families.tiny_experts import WITH_EXPERTS

#: Positions, masks and statistics of norms that a tape leaves out or takes as wide as an accelerator does.
TOLERANCE = 0.05
TOKENS = 9
TABLES = {**WITH_KERNEL, **WITHOUT_KERNEL, **WITH_EXPERTS}
#: One table of each class, in one dtype or the other; what a class's options change is tested with the families.
CLASSES = [name for name in TABLES if "-" not in name and name != "mistral"]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
CASES = [(name, DTYPES[index % 2]) for index, name in enumerate(CLASSES)]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_familys_tape_and_the_trace_of_its_class_agree(name: str, dtype: Dtype) -> None:
    table, layout = TABLES[name], Layout(sequence=TOKENS, compute_dtype=dtype)
    attention = "eager" if name in WITHOUT_KERNEL else "sdpa"
    model = build(table, attention=attention)
    taped = read_config(table).at(layout)
    traced = trace(model, {"input_ids": torch.ones(2, TOKENS, dtype=torch.int64)}, layout=layout)
    assert "random" not in traced.source
    assert [block.kind for block in traced.blocks] == [block.kind for block in taped.blocks]
    for mine, other in zip(traced.blocks, taped.blocks, strict=True):
        assert sorted(mine.tensors) == sorted(other.tensors), other.name
        for figure in ("parameters", "tied_parameters", "forward_flops", "backward_flops", "output_bytes"):
            assert getattr(mine, figure) == getattr(other, figure), (other.name, figure)
        if other.kind == "layer":
            assert mine.saved_bytes == pytest.approx(other.saved_bytes, rel=TOLERANCE), other.name
            assert mine.alive_bytes == pytest.approx(other.alive_bytes, rel=TOLERANCE), other.name
    assert _kept(traced) == pytest.approx(_kept(taped), rel=TOLERANCE)


def _kept(model: ModelSpec) -> int:
    """Bytes kept for two sequences without recompute."""
    return sum(2 * block.saved_bytes["none"] + block.fixed_bytes for block in model.blocks)
