"""The sources of published rows, one function each: what the row says, and what its stack adds to that."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from meshwright.cost.published.flops import COUNTINGS
from meshwright.cost.published.further import deepspeed_azure, fms_fsdp, megatron_bridge
from meshwright.cost.published.generic import generic_setup
from meshwright.cost.published.rows import PublishedRow, Unpriced
from meshwright.cost.published.setups import Run, Setup, read_run
from meshwright.errors import MeshwrightError
from meshwright.spec import BlockSpec, Job, Layout, ModelSpec, Offload
from meshwright.spec.catalogue import find_model
from meshwright.spec.conventions import Convention, StateBytes, convention
from meshwright.spec.families import Described, read_config

__all__ = ["setup_of"]


def setup_of(row: PublishedRow) -> Setup:
    """What a row ran: by the function of its source, or as tables of any other source are read.

    Raises:
        Unpriced: something decisive was not published, or is not described here.
    """
    origin = f"{row.text('source')} {row.file}".lower().replace("_", "-")
    read = next((read for mark, read in _SOURCES.items() if mark in origin), generic_setup)
    try:
        return read(row)
    except MeshwrightError as error:
        raise Unpriced(error.what) from error


def _sizes(row: PublishedRow, **columns: str) -> dict[str, Any]:
    """Keys of a `config.json` from the columns of a row."""
    return {key: row.count(column) for key, column in columns.items()}


#: The document's words: "all NHEADS=64 (above too)", but 96 in the models of hidden size 14400 ("NHIDDEN was fixed").
_HEADS, _HEADS_AT, _FIXED_HIDDEN = 64, {14400: 96}, {"Choosing the fastest 3D Topology": 14400}
#: Its first tables: the runs above them have a global batch of 2048, and "200B" is the model of the section before.
_FIXED_BATCH, _HANGING = 2048, "dealing with JZ hanging on the large model"
_LARGEST = {"layers": "80", "hidden": "14400", "heads": "96"}
#: Nodes of Jean Zay: 8 A100 and four Omni-Path ports of 100 Gb/s (bigscience, train/tr11-176B-ml/README.md).
_JEAN_ZAY = "4x100Gb"
#: Sections before the one that changed the formula of its TFLOP/s.
_OLDER = ("fp16", "bf16", _HANGING, *_FIXED_HIDDEN, "tile and wave quantization")


def _bigscience(row: PublishedRow) -> Setup:
    """Megatron-DeepSpeed. Since 2022-02-28 (section Rebalancing layers) with the optimizer for bf16."""
    if "A100" not in row.text("gpu_type"):
        raise Unpriced("sizes of the models on V100 are not published")
    if row.section == _HANGING:
        row = replace(row, cells=dict(row.cells) | {"tp": "8", "pp": "10", "micro_batch": "1", **_LARGEST})
    run = read_run(row, global_batch=_FIXED_BATCH)
    run.network = _JEAN_ZAY
    if not row.text("global_batch"):
        run.assumed = [f"global batch {run.global_batch}, by the text around the table"]
    hidden = row.count("hidden", _FIXED_HIDDEN.get(row.section))
    sizes = {
        "n_embd": hidden,
        "n_layer": row.count("layers", 0) or _tweaked(row, hidden, run.options["pp"]),
        "n_head": row.count("heads", _HEADS_AT.get(hidden, _HEADS)),
        "vocab_size": row.count("vocab"),
    }
    for column, key in (("layers", "n_layer"), ("hidden", "n_embd"), ("heads", "n_head")):
        if not row.text(column):
            run.assumed.append(f"{column} {sizes[key]}, by the text around the table")
    table = {"model_type": "gpt2", "activation_function": "gelu", "n_positions": run.sequence}
    told = convention(f"Megatron-DeepSpeed {'bf16' if row.section == 'Rebalancing layers' else 'fp16'}")
    counting = COUNTINGS["layers" if row.section in _OLDER else "megatron"]
    return run.setup(read_config(table | sizes, name=row.text("model")), told, counting=counting)


def _tweaked(row: PublishedRow, hidden: int, stages: int) -> int:
    """Layers by the published size: "the number of layers had to be tweaked to fit PP"."""
    size = row.number("params_b")
    if size is None:
        raise Unpriced("neither layers nor parameters are published")
    outside = row.count("vocab") * hidden
    return max(1, round((size * 1e9 - outside) / (12 * hidden**2 * stages))) * stages


#: The network of InternEvo's nodes, which its document tells for its first tables.
_ROCE = "4x100Gb"


def _internevo(row: PublishedRow) -> Setup:
    """InternEvo: `zero1` in the notes is the shard group, -1 for all ranks; `micro_num` the microbatches."""
    run = read_run(row)
    group, count = (re.search(rf"{word}=? ?([0-9]+)", row.text("notes")) for word in ("zero1", "micro_num"))
    if group and run.options["zero"]:
        run.options["shard"] = min(int(group[1]), run.options["dp"])
    if count and not row.text("global_batch"):
        run.global_batch = run.options["dp"] * run.options["microbatch"] * int(count[1])
        run.assumed.clear()
    run.network = _ROCE
    return run.setup(find_model(row.text("model")), convention("InternEvo"), counting=COUNTINGS["megatron"])


#: nanotron scripts/scaling_benchmarks.py, by billions of parameters: layers, hidden, intermediate, tied embeddings.
_NANOTRON_SIZES = {"1.34": (16, 2048, 8192, True), "3.57": (28, 3072, 8192, True), "8.86": (32, 4096, 14336, False)}
_NANOTRON_VOCABULARY = 131072
_NANOTRON_HEADS = 32


def _nanotron(row: PublishedRow) -> Setup:
    """nanotron: sequence parallelism wherever there is tensor parallelism, stages cut by cost with the head counted."""
    size = row.text("params_b")
    if size not in _NANOTRON_SIZES:
        raise Unpriced(f"sizes of the model of {size} billion parameters are not published")
    layers, hidden, inner, tied = _NANOTRON_SIZES[size]
    run = read_run(row)
    run.options["sequence_parallel"] = run.options["tp"] > 1
    if run.options["pp"] > 1:
        costs = [4 * hidden**2 + 3 * hidden * inner] * layers
        run.options["stages"] = _filled(run.options["pp"], costs, _NANOTRON_VOCABULARY * hidden)
    table = {
        "model_type": "llama",
        "vocab_size": _NANOTRON_VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": _NANOTRON_HEADS,
        "num_key_value_heads": _NANOTRON_HEADS,
        "tie_word_embeddings": tied,
    }
    told = convention("nanotron")
    described = _OpenGate(described=read_config(table, name=row.text("model")), inner=inner)
    return run.setup(described, told, plain=replace(told.without_bytes(), stack="eager"))


@dataclass(frozen=True, kw_only=True)
class _OpenGate:
    """A model whose kernels are fused but for the MLP's gate, which then keeps its activated half too (nanotron
    models/llama.py, GLUActivation). Eager kernels keep it anyway. Satisfies `Described`."""

    described: Described
    inner: int

    @property
    def name(self) -> str:
        """The model's name."""
        return self.described.name

    def at(self, layout: Layout) -> ModelSpec:
        """The model as one rank sees it."""
        model = self.described.at(layout)
        more = 0 if layout.stack == "eager" else layout.tokens * self.inner // layout.tp * layout.compute_bytes
        return replace(model, blocks=tuple(_with_more(block, more) for block in model.blocks))


def _with_more(block: BlockSpec, more: int) -> BlockSpec:
    if block.kind != "layer":
        return block
    saved = block.saved_bytes | {"none": block.saved_bytes["none"] + more}
    alive = {policy: size + more for policy, size in block.alive_bytes.items()}
    return replace(block, saved_bytes=saved, alive_bytes=alive)


def _filled(stages: int, layers: list[int], head: int) -> tuple[int, ...]:
    """Layers per stage: one is full when the cost so far passes its share of the whole (nanotron models/base.py)."""
    whole, passed, held = sum(layers) + head, 0, [0]
    for cost in layers:
        held[-1] += 1
        passed += cost
        if passed > whole * len(held) / stages and len(held) < stages:
            held.append(0)
    return tuple(held)


def _torchtitan(row: PublishedRow) -> Setup:
    """torchtitan: FSDP2 gathers one unit ahead. Under pipelining it holds what ZeRO-1 holds: PyTorch's stages keep
    parameters and gradients whole through the step."""
    told = convention("torchtitan 2024-12" if "202412" in row.text("source") else "torchtitan 2025-06")
    told = replace(told, stack="compiled" if row.has("compile") else "eager")
    piped = row.count("pp", 1) > 1
    run = read_run(row, zero=1 if piped else 3)
    run.options["prefetch"] = 0 if piped else 1
    run.options["sequence_parallel"] = run.options["tp"] > 1
    return run.setup(find_model(row.text("model")), told)


#: The techniques of torchtune's ladder; each row adds one to those before it.
_LADDER = (
    "baseline",
    "+packed dataset",
    "+compile",
    "+chunked CE",
    "+activation checkpointing",
    "+fuse optimizer in backward",
    "+activation offloading",
    "+8-bit AdamW",
)
#: Weights and gradients of 8 billion parameters in bf16 are 15 GiB, kept activations of 4096 tokens as much again.
_WITHOUT_GB = 30
#: Eight chunks: logits and their gradients in bf16, and one chunk in float32.
_CHUNKED_LOSS = 2 + 2 + 4 / 8


def _torchtune(row: PublishedRow) -> Setup:
    """torchtune: all in bf16."""
    step = re.search(r"cumulative: ([^;]+);", row.text("notes"))
    if (step and step[1] not in _LADDER) or (not step and row.has("LoRA")):
        raise Unpriced("low-rank adapters and quantised weights are not described")
    if step and step[1] == "baseline":
        raise Unpriced("its sequences are not packed, and their lengths are not published")
    run = read_run(row)
    told = convention("torchtune")
    if step:
        told = _climbed(run, told, _LADDER[: _LADDER.index(step[1]) + 1])
    elif row.has("CPU offload"):
        run.options |= {"offload": Offload(optimizer="host", parameters="host"), "recompute": "full", "prefetch": 1}
        told = replace(told, stack="compiled", states=None, logit_bytes=_CHUNKED_LOSS)
    else:
        run.no_memory = "its optimizer is not published (the recipe's own is a paged 8-bit one)"
        # The recipe recomputes; the peak of the card with more memory is twice as high: only without can it be.
        run.options["recompute"] = "full" if (row.maybe("peak_mem_gb") or 0) < _WITHOUT_GB else "none"
        run.assumed.append(f"recompute={run.options['recompute']}, by its peak")
        told = replace(told, stack="compiled", logit_bytes=_CHUNKED_LOSS)
    job = Job(
        global_batch=run.global_batch,
        sequence=run.sequence,
        param_dtype="bfloat16",
        compute_dtype="bfloat16",
        reduce_dtype="bfloat16",
    )
    # Its states are those of the job's dtypes, and how the loss is cut is in the row: neither is the stack's secret.
    plain = replace(told.without_bytes(), states=told.states, logit_bytes=told.logit_bytes)
    return run.setup(find_model(row.text("model")), told, job=job, plain=plain)


def _climbed(run: Run, told: Convention, steps: tuple[str, ...]) -> Convention:
    """torchtune's convention after some steps of its ladder."""
    run.options["recompute"] = "full" if "+activation checkpointing" in steps else "none"
    told = replace(told, stack="compiled" if "+compile" in steps else "eager")
    if "+chunked CE" in steps:
        told = replace(told, logit_bytes=_CHUNKED_LOSS)
    if "+fuse optimizer in backward" in steps and told.states is not None:
        told = replace(told, states=replace(told.states, life="used"))
    if "+activation offloading" in steps:
        run.options["offload"] = Offload(activations="host")
    if "+8-bit AdamW" in steps:
        run.no_memory = "8-bit optimizers are not described"
    return told


def _foundry(row: PublishedRow) -> Setup:
    run = read_run(row)
    run.options["prefetch"] = 1 if run.options["zero"] == 3 else 0
    sizes = _sizes(row, d_model="hidden", n_layers="layers", n_heads="heads", vocab_size="vocab")
    table = {"model_type": "mpt", "max_seq_len": run.sequence}
    return run.setup(read_config(table | sizes, name=row.text("model")), convention("llm-foundry"))


def _ml_engineering(row: PublishedRow) -> Setup:
    run = read_run(row)
    told, counting = convention("DeepSpeed with Liger kernels"), COUNTINGS["ml-engineering"]
    if row.text("source") == "same":
        run.no_memory = "its loss is not published (two peaks, with and without Liger kernels, in one row)"
    else:
        run.options["offload"] = Offload(optimizer="host")
    plain = replace(told.without_bytes(), logit_bytes=told.logit_bytes)
    return run.setup(find_model(row.text("model")), told, plain=plain, counting=counting)


#: The command in the post reads `--block_size 12`, its last digit cut off: with sequences of 12 tokens the largest
#: batches that fit would be ten times as large, and 128 explains all ten of those that were found.
_BLOG_TOKENS = 128


def _fsdp_blog(row: PublishedRow) -> Setup:
    """The largest batch that fits two cards, or OOM at a batch."""
    batch = re.search(r"[0-9]+", row.text("micro_batch"))
    named = re.match(r"GPT-2 [A-Za-z]+", row.text("model"))
    if not batch or not named:
        raise Unpriced("its model or batch is not published")
    cells = dict(row.cells) | {"micro_batch": batch[0]}
    run = read_run(replace(row, cells=cells), sequence=_BLOG_TOKENS)
    run.row = row
    run.assumed.append(f"sequences of {_BLOG_TOKENS} tokens")
    told = convention("Accelerate 2022")
    if row.has("CPU offload"):  # gradients leave with the parameters, unit by unit
        run.options["offload"] = Offload(optimizer="host", parameters="host")
        told = replace(told, states=StateBytes(weights=4, gradients=4, optimizer=8, life="used"))
    job = Job(global_batch=run.global_batch, sequence=run.sequence)
    return run.setup(find_model(named[0]), told, job=job)


#: By a part of the row's source.
_SOURCES: dict[str, Callable[[PublishedRow], Setup]] = {
    "bigscience": _bigscience,
    "internevo": _internevo,
    "nanotron": _nanotron,
    "torchtitan": _torchtitan,
    "torchtune": _torchtune,
    "llm-foundry": _foundry,
    "fms-fsdp": fms_fsdp,
    "ml-engineering": _ml_engineering,
    "pytorch-fsdp": _fsdp_blog,
    "megatron-bridge": megatron_bridge,
    "deepspeed-azure": deepspeed_azure,
}
