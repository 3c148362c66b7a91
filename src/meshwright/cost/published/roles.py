"""Which rows count for what: those not to be trusted, and the files that constants were fitted on."""

from __future__ import annotations

from meshwright.cost.published.rows import PublishedRow

__all__ = ["distrust", "fitted"]

_BIGSCIENCE, _MOSAIC = "bigscience_megatron_deepspeed", "mosaicml_llm_foundry_mpt"
_TORCHTITAN, _BRIDGE = "torchtitan_llama3", "nvidia_megatron_bridge"
_REPEAT = "the same run as another row"
_SIBLINGS = "12-20% slower than runs of nearly the same setup in the same document"
_ODD = "out of line with the rows beside it, which differ in one setting"
#: By file and row: why its figures are not to be compared. Found in the tables alone, never by an error of ours.
_ROWS: dict[tuple[str, int], str] = {
    **dict.fromkeys(((_BIGSCIENCE, index) for index in (*range(10, 17), 21)), _REPEAT),
    **dict.fromkeys(((_BIGSCIENCE, index) for index in (43, 45, 61, 76)), _SIBLINGS),
    (_BIGSCIENCE, 30): "its flops and its seconds contradict each other",
    **dict.fromkeys(((_BIGSCIENCE, index) for index in (31, 32)), "its two columns look swapped in the document"),
    ("nanotron_ultrascale_best", 0): "a utilisation of 5%, a quarter of that of half as many nodes",
    **dict.fromkeys(((_MOSAIC, index) for index in (20, 79, 119, 120, 139, 178)), _ODD),
    (_TORCHTITAN, 6): _ODD,
    **dict.fromkeys(
        ((_BRIDGE, index) for index in (82, 83)), "its layout does not go with the layouts of the same run elsewhere"
    ),
    **dict.fromkeys((("litgpt_tinyllama", index) for index in range(4)), "neither device nor microbatch are published"),
}
_FITTED = {_MOSAIC, _TORCHTITAN}


def distrust(row: PublishedRow) -> str:
    """Why a row's figures are not to be compared, "" where they are. A column `distrust` in the table counts too."""
    told = row.text("distrust") or _ROWS.get((row.file, row.index), "")
    if told:
        return told
    source, device = row.text("source"), row.text("gpu_type")
    if "bigscience" in source and "V100" in device:
        return "its authors say that these figures vary by 40% with the load of the network"
    if "torchtitan" in source and "rowwise" in row.text("precision"):
        return "8-bit products scaled by row ran slower than 16-bit ones, with kernels of that month"
    one_node = device.startswith("a100_40gb") and row.text("gpus") == "8"
    if "llm-foundry" in source and one_node and row.text("model") == "MPT 13b":
        return "one node is 15% slower than two and more: its memory is too small for the model"
    return ""


def fitted(row: PublishedRow) -> bool:
    """Whether constants of the cost model were fitted with this row; all others check them."""
    return row.file in _FITTED and (row.file == _MOSAIC or "8B" in row.text("model"))
