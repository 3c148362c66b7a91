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
    assert setup_of(row(global_batch="", pp="2", dp="4")).assumed == ("global batch 128, enough to fill the pipeline",)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"micro_batch": "", "recompute": "none"}, "micro_batch is not published"),
        ({"seq": ""}, "seq is not published"),
        ({"dp": "4"}, "dp x tp x pp x cp is 4, but it ran on 8 GPUs"),
        ({"gpus": "eight"}, "gpus is 'eight', which is no number"),
        ({"gpus": "8.5"}, "gpus is 8.5, which is no whole number"),
        ({"model": "Llama 9 8B"}, "model 'Llama 9 8B' is not in the catalogue"),
        ({"gpu_type": "a secret GPU"}, "the memory of a secret GPU is not published"),
        ({"source": "a magazine", "model": "a secret"}, "model 'a secret' is not known, and neither layers and hidden"),
        ({"dp": "", "tp": "3"}, "tp x pp x cp is 3, which does not divide the 8 GPUs"),
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
    with pytest.raises(ConfigError, match="has no model and no gpu_type column"):
        read_rows(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rows(tmp_path / "missing.csv")


def test_numbers_are_read_as_tables_write_them() -> None:
    cells = {"gpus": "1,024", "mfu": "45.5%", "tflops_per_gpu": "~ 300", "step_time_s": "n/a", "vocab": "-"}
    found = row(**cells)
    assert found.count("gpus") == 1024
    assert found.number("mfu") == pytest.approx(0.455)
    assert found.number("tflops_per_gpu") == 300
    assert found.number("step_time_s") is None
    assert found.count("vocab", 7) == 7
    with pytest.raises(Unpriced, match="which is no number"):
        row(mfu="inf").number("mfu")


def test_columns_may_be_missing_and_stand_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("\ufeffGPU_Type ,gpus,Model,seq\nH100,8,Llama 3 8B,8192\n", encoding="utf-8")
    (found,) = read_rows(path)
    assert (found.text("gpu_type"), found.count("gpus"), found.text("notes")) == ("H100", 8, "")
