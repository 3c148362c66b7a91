"""Sources whose models are read like those of any table: Megatron-Bridge, fms-fsdp, DeepSpeed on Azure."""

from __future__ import annotations

import re
from dataclasses import replace

from meshwright.cost.published.flops import COUNTINGS
from meshwright.cost.published.generic import generic_setup
from meshwright.cost.published.rows import PublishedRow, Unpriced
from meshwright.cost.published.setups import Setup, fit_stages, read_run
from meshwright.cost.published.shapes import model_of
from meshwright.spec import Offload
from meshwright.spec.conventions import convention
from meshwright.spec.families import DecoderModel

__all__ = ["deepspeed_azure", "fms_fsdp", "megatron_bridge"]


def megatron_bridge(row: PublishedRow) -> Setup:
    """NVIDIA Megatron-Bridge: Megatron Core with its distributed optimizer and sequence parallelism, or its FSDP."""
    if row.has("LoRA"):
        raise Unpriced("low-rank adapters are not described")
    shape = model_of(row)
    run = read_run(row, zero=3 if row.text("zero") == "3" else 1)
    run.assumed += shape.assumed
    tp, ep, ranks = run.options["tp"], row.count("ep", 1), run.gpus // run.options["pp"]
    if ep > 1 and ranks % ep:
        raise Unpriced(f"ep {ep} does not divide the {ranks} ranks of a stage")
    run.options |= {"ep": ep, "sequence_parallel": tp > 1, "prefetch": 1 if run.options["zero"] == 3 else 0}
    fit_stages(run, shape.described)
    if run.options["zero"] == 3:
        run.no_memory = "how many layers offload their activations is not published with the figures"
    return run.setup(shape.described, convention("Megatron Core"), counting=COUNTINGS["bridge"])


def deepspeed_azure(row: PublishedRow) -> Setup:
    """DeepSpeed on Azure: ZeRO-3 with optimizer and activations in host memory; Megatron's GPT kernels."""
    if not row.text("hidden"):
        return generic_setup(row)
    shape = model_of(row)
    run = read_run(row)
    run.assumed += shape.assumed
    run.options |= {"prefetch": 1, "offload": Offload(optimizer="host", activations="host")}
    told = replace(convention("DeepSpeed"), stack="fused", attention="math")
    return run.setup(shape.described, told, counting=COUNTINGS["megatron"])


def fms_fsdp(row: PublishedRow) -> Setup:
    """fms-fsdp: selective means that some of the layers recompute; how many, its two utilisations tell.

    HFU / MFU - 1 is the recomputed part of the forward's third of the flops.
    """
    run = read_run(row)
    run.options["prefetch"] = 1
    if row.has("HSDP"):
        run.options["shard"] = min(8, run.options["dp"])
    shape = model_of(row)
    hardware, model = re.search(r"HFU ([0-9.]+)", row.text("notes")), row.maybe("mfu")
    if row.text("recompute") == "selective" and hardware and model and isinstance(shape.described, DecoderModel):
        layers = len(shape.described.layers)
        count = round(min(1.0, 3 * (float(hardware[1]) / model - 1)) * layers)
        run.options |= {"recompute": "full", "recompute_blocks": count} if 0 < count < layers else {"recompute": "full"}
        run.assumed.append(f"full recompute of {count} of {layers} layers, by HFU over MFU")
    run.no_memory = "" if row.text("recompute") == "none" else "which layers recompute is not published"
    return run.setup(shape.described, convention("fms-fsdp"))
