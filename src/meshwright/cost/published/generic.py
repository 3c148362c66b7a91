"""Rows of any source: what is published is taken, the rest is what such runs usually have; all of that is listed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from meshwright.cost.published.flops import COUNTINGS, Counting
from meshwright.cost.published.machines import machines_of
from meshwright.cost.published.rows import PublishedRow, Unpriced
from meshwright.cost.published.setups import Run, Setup, fit_stages, read_run
from meshwright.cost.published.shapes import model_of
from meshwright.spec import Layout, Offload
from meshwright.spec.conventions import Convention, convention
from meshwright.spec.families import DecoderModel, Described
from meshwright.spec.job import Stack

__all__ = ["generic_setup"]

#: Bytes of model states per parameter in mixed precision, and the share of a device that they may take.
_STATES, _ROOM = 16, 0.7
#: By words in source and notes, the most telling first: the convention whose states a stack has, and its kernels.
_STACKS: tuple[tuple[str, str, Stack], ...] = (
    (r"torchtitan", "torchtitan 2025-06", "compiled"),
    (r"nanotron", "nanotron", "compiled"),
    (r"llm-?foundry|mosaic|composer", "llm-foundry", "fused"),
    (r"torchtune", "torchtune", "eager"),
    (r"megatron-?deepspeed", "Megatron-DeepSpeed bf16", "fused"),
    (r"megatron|nemo|transformer engine|mcore|primus", "Megatron Core", "fused"),
    (r"deepspeed|zero-?offload|zero-?infinity", "DeepSpeed", "eager"),
    (r"fms-?fsdp", "fms-fsdp", "compiled"),
)
_KERNELS: tuple[tuple[str, Stack], ...] = (
    (r"no compile|without compile|not compiled|eager", "eager"),
    (r"compile|inductor|\bjax\b|maxtext|\bxla\b|levanter", "compiled"),
    (r"liger|apex|unsloth|fused|flash ?attn.*rms|triton", "fused"),
    (r"fsdp|ddp|accelerate|transformers|hugging ?face|lightning|pytorch", "eager"),
)
#: FlashAttention is of May 2022 (arXiv 2205.14135); Volta has no kernel of it.
_DATE = re.compile(r"arxiv[: /a-z.]*([0-9]{4})\.[0-9]{4,5}|\b(20(?:19|2[0-9]))\b")
_FLASH = 2206
_SCORES = re.compile(r"without flash|no flash|unfused attention|math attention|naive attention")
_MEGATRON_FLOPS = re.compile(r"megatron.{0,20}(formula|flops)|96 ?\*? ?b ?s ?l ?h|narayanan|2104\.04473")
_HARDWARE = re.compile(r"\bhfu\b|hardware flops|counts? recompute|with recompute|(?:including|includes) recompute")
_CAUSAL = re.compile(r"causal")
_ADAPTERS = re.compile(r"\bq?lora\b|\bpeft\b|adapter", re.IGNORECASE)


def generic_setup(row: PublishedRow) -> Setup:
    """What a row of a source without a function of its own ran.

    Raises:
        Unpriced: something decisive was not published.
    """
    if _ADAPTERS.search(f"{row.text('notes')} {row.text('model')}"):
        raise Unpriced("low-rank adapters and quantised weights are not described")
    if re.search(r"model states only|inference|decode", row.text("notes").lower()):
        raise Unpriced("it is no training step")
    shape = model_of(row)
    run = read_run(row)
    run.assumed += shape.assumed
    words = f"{row.text('source')} {row.file} {row.text('notes')} {row.text('model')}".lower().replace("_", "-")
    told = _stack(run, words)
    _fit_options(run, row, shape.described, words, told)
    counting = _counting(row, words)
    if counting is not COUNTINGS["model"]:
        run.assumed.append(f"flops counted as {counting.source}")
    return _as_it_ran(run, run.setup(shape.described, told, counting=counting))


def _as_it_ran(run: Run, setup: Setup) -> Setup:
    """The setup with recompute where none is published and it does not fit without: the run was measured, so it did.

    With matrix products in 8 bits what is kept for backward may be in 8 bits too, so nothing follows there.
    """
    told = run.row.text("recompute") or run.options["recompute"] != "none" or run.row.out_of_memory
    if told or setup.convention.product_dtype or _fits(setup):
        return setup
    for policy in ("selective", "full"):
        run.options["recompute"] = policy
        tried = run.setup(setup.described, setup.convention, counting=setup.counting)
        if _fits(tried):
            return replace(tried, assumed=(*setup.assumed, f"recompute={policy}: without it, it does not fit"))
    return setup


def _fits(setup: Setup) -> bool:
    found = setup.estimate()
    return found.worst.total_bytes <= found.device_bytes


def _stack(run: Run, words: str) -> Convention:
    """The convention that the words name: its states where the stack is known, its kernels where they are told."""
    named = next(((name, kernels) for pattern, name, kernels in _STACKS if re.search(pattern, words)), None)
    told = next((kernels for pattern, kernels in _KERNELS if re.search(pattern, words)), None)
    if named is None:
        parallel = run.options["tp"] * run.options["pp"] > 1
        stack: Stack = told or ("fused" if parallel else "compiled")
        if told is None:
            run.assumed.append(f"{stack} kernels")
        found = Convention(name="not described", source="words of the table", stack=stack, reads="reserved")
    else:
        found = convention(named[0])
        fused = named[1] == "fused" or (told == "fused" and named[1] == "eager")
        found = replace(found, stack="fused" if fused else told if told in ("compiled", "eager") else named[1])
    dated = _DATE.search(words)
    old = "V100" in run.row.text("gpu_type") or (dated is not None and int(dated[1] or dated[2][2:] + "00") < _FLASH)
    if _SCORES.search(words) or (old and "flash" not in words):
        found = replace(found, attention="math")
        run.assumed.append("attention that stores its scores")
    elif re.search(r"flash", words):
        found = replace(found, attention="flash")
    return found


def _counting(row: PublishedRow, words: str) -> Counting:
    """How its TFLOP/s count, by its words: model flops where nothing is told."""
    if _MEGATRON_FLOPS.search(words):
        return COUNTINGS["megatron"]
    if _CAUSAL.search(words) and row.text("tflops_per_gpu"):
        return COUNTINGS["causal"]
    return COUNTINGS["hardware"] if _HARDWARE.search(words) else COUNTINGS["model"]


def _fit_options(run: Run, row: PublishedRow, described: Described, words: str, told: Convention) -> None:
    options = run.options
    tp, ranks = options["tp"], run.gpus // options["pp"]
    ep = row.count("ep", 1)
    if ep > 1 and isinstance(described, DecoderModel) and described.experts and ranks % ep == 0:
        options["ep"] = ep
    if tp > 1 and "sequence parallel" not in words and told.name.startswith("Megatron-DeepSpeed"):
        options["sequence_parallel"] = False
    elif tp > 1:
        options["sequence_parallel"] = run.sequence // options["cp"] % tp == 0 and "no sequence par" not in words
        if "sequence parallel" not in words and options["sequence_parallel"]:
            run.assumed.append("sequence parallelism")
    if f"zero={options['zero']}" in run.assumed:
        _settle_zero(run, described)
    if options["zero"] == 3:
        options["prefetch"] = 1
        if re.search(r"hsdp|hybrid shard", words) and options["dp"] % 8 == 0:
            options["shard"] = 8
    _offload(options, row.text("zero").lower() + " " + row.text("notes").lower())
    fit_stages(run, described)


def _settle_zero(run: Run, described: Described) -> None:
    """ZeRO-1 under model parallelism; else the lowest stage whose states take no more than most of a device."""
    options = run.options
    if options["pp"] > 1 or options["tp"] > 1 or options["dp"] == 1:
        return
    parameters = described.at(Layout(sequence=run.sequence, compute_dtype="bfloat16")).parameters
    room = _ROOM * machines_of(run.row, run.gpus).cluster.nodes[0].device.memory_bytes
    shares = {0: _STATES, 1: 4 + 12 / options["dp"], 3: _STATES / options["dp"]}
    stage = next((stage for stage, each in shares.items() if each * parameters <= room), 3)
    run.assumed[run.assumed.index(f"zero={options['zero']}")] = f"zero={stage}, by what fits"
    options["zero"] = stage


def _offload(options: dict[str, Any], words: str) -> None:
    if "offload" not in words or re.search(r"no offload|without offload|no cpu.?offload", words):
        return
    parameters = options["zero"] == 3 and re.search(r"param\w*.{0,12}offload|offload\w*.{0,12}param|infinity", words)
    activations = re.search(r"activation\w*.{0,12}offload|offload\w*.{0,12}activation", words)
    optimizer = not activations or re.search(r"optim|adam", words)
    options["offload"] = Offload(
        optimizer="host" if optimizer else "device",
        parameters="host" if parameters else "device",
        activations="host" if activations else "device",
    )
