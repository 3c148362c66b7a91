"""Reading published rows: what is missing is said, never guessed in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cost.published import PublishedRow, Unpriced, compare, read_rows, setup_of
from meshwright.errors import ConfigError

ROW = {
    "source": "https://github.com/pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md",
    "model": "Llama 3.1 8B",
    "seq": "8192",
    "global_batch": "16",
    "micro_batch": "2",
    "gpus": "8",
    "gpu_type": "H100 96GB HBM2e 500W",
    "tp": "1",
    "dp": "8",
    "zero": "3",
    "recompute": "selective (torchtitan SAC)",
    "peak_mem_gb": "77.0",
    "notes": "FSDP + torch.compile",
}


def row(**cells: str) -> PublishedRow:
    return PublishedRow(file="table", index=0, cells=ROW | cells)


def test_a_row_becomes_a_model_a_cluster_a_job_and_a_strategy() -> None:
    setup = setup_of(row())
    assert setup.described.name == "Llama 3.1 8B"
    assert (setup.strategy.dp, setup.strategy.zero, setup.strategy.microbatch) == (8, 3, 2)
    assert (setup.job.global_batch, setup.job.sequence) == (16, 8192)
    assert setup.strategy.recompute == "selective"
    assert setup.cluster.devices == 8
    assert setup.cluster.nodes[0].device.memory_bytes == pytest.approx(95 * 2**30, rel=0.01)
    assert setup.convention.stack == "compiled"
    assert setup.assumed == ()
    assert row().peak_bytes == 77 * 2**30


def test_what_was_assumed_is_said() -> None:
    assert setup_of(row(global_batch="")).assumed == ("global batch 16",)
    assert setup_of(row(global_batch="", pp="2", dp="4")).assumed == ("global batch 32, enough to fill the pipeline",)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"micro_batch": ""}, "micro_batch is not published"),
        ({"seq": ""}, "seq is not published"),
        ({"dp": "4"}, "dp x tp x pp x cp is 4, but it ran on 8 GPUs"),
        ({"gpus": "eight"}, "gpus is 'eight', which is no number"),
        ({"gpus": "8.5"}, "gpus is 8.5, which is no whole number"),
        ({"model": "Llama 9 8B"}, "model 'Llama 9 8B' is not in the catalogue"),
        ({"gpu_type": "a secret GPU"}, "the memory of a secret GPU is not published"),
        ({"source": "a magazine"}, "its stack is not described"),
        ({"tp": "3", "gpus": "24"}, "sequence_parallel with tp=3 does not divide the 8192 tokens of a rank"),
    ],
)
def test_a_row_that_cannot_be_priced_says_why(cells: dict[str, str], reason: str) -> None:
    with pytest.raises(Unpriced, match=f"^{reason}"):
        compare(row(**cells))


def test_out_of_memory_is_read_where_tables_write_it() -> None:
    assert row(notes='section "GBS"; OOM; 02-25').out_of_memory
    assert row(micro_batch="OOM at 1").out_of_memory
    assert not row().out_of_memory
    assert row(notes="OOM", peak_mem_gb="80").peak_bytes is None


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n"])
def test_a_file_that_is_no_such_table_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="has no source and no model"):
        read_rows(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rows(tmp_path / "missing.csv")
