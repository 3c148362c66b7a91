"""Model states of the ZeRO paper (Rajbhandari et al. 2020, arXiv 1910.02054), Table 1, exactly."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from meshwright.cost import StepMemory
from meshwright.spec import BlockSpec, Job, Layout, ModelSpec, Strategy
from meshwright.spec.conventions import Convention, StateBytes

TABLE = Path(__file__).parent / "data" / "zero_paper_table1_model_states.csv"
ROWS = list(csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines()))
#: fp16 weights and gradients, K = 12 bytes of float32 weights and Adam's two moments.
PAPER = Convention(
    name="ZeRO paper",
    source="arXiv 1910.02054, section 3.1",
    states=StateBytes(weights=2, gradients=2, optimizer=12),
)


def states(parameters: int, zero: int, ranks: int) -> int:
    """Bytes of states between microbatches: nothing else costs anything in this model."""
    layer, layers = parameters // 4, 4
    blocks = tuple(
        BlockSpec(
            name=f"layers.{index}",
            kind="layer",
            parameters=layer,
            tensors=((layer,),),
            forward_flops=0,
            moved_bytes=0,
            saved_bytes={"none": 0},
            output_bytes=0,
        )
        for index in range(layers)
    )
    model = ModelSpec(name="states only", layout=Layout(sequence=1), blocks=blocks)
    job = Job(global_batch=2 * ranks, compute_dtype="float16", reduce_dtype="float16")
    memory = StepMemory(model, job, Strategy(dp=ranks, zero=zero), PAPER).ranks[0]
    end = list(memory.moments())[-1]
    assert end.phase == "optimizer"
    return memory.parameters + memory.optimizer + end.gradients


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['params_b']}B zero={row['zero']} N={row['dp']}")
def test_states_are_those_of_the_table(row: dict[str, str]) -> None:
    parameters, zero, ranks = int(float(row["params_b"]) * 1e9), int(row["zero"]), int(row["dp"])
    formula = {
        1: 4 * parameters + 12 * parameters / ranks,
        2: 2 * parameters + 14 * parameters / ranks,
        3: 16 * parameters / ranks,
    }[zero]
    found = states(parameters, zero, ranks)
    padding = 16 * 4 * ranks  # equal shares of four tensors
    assert formula <= found <= formula + padding
    published = row["peak_mem_gb"]
    digits = len(published.partition(".")[2])
    # The paper prints a figure now rounded, now cut: within one unit of its last digit.
    assert abs(found / 1e9 - float(published)) < 10.0**-digits + 1e-9


def test_the_table_is_whole() -> None:
    assert len(ROWS) == 54
    assert {row["zero"] for row in ROWS} == {"1", "2", "3"}
