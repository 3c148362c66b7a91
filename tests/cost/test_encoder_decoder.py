"""Models that are no decoders: described by their trace, priced like any other."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from meshwright.cost import StepMemory, estimate
from meshwright.measure import trace
from meshwright.spec import Cluster, Device, Job, ModelSpec, NodeGroup, Offload, Strategy

GIB = 2**30
SOURCE, TARGET, VOCABULARY = 4096, 512, 32128


def summed(outputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, Any]:
    logits = outputs.logits.float().flatten(0, -2)
    return torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum"), labels.numel()


def t5_xl() -> ModelSpec:
    """FLAN-T5-XL (google/flan-t5-xl config.json) with a long input, on fake tensors: nothing is allocated."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=2048,
        d_kv=64,
        d_ff=5120,
        num_layers=24,
        num_decoder_layers=24,
        num_heads=32,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        dropout_rate=0.1,
        use_cache=False,
    )
    labels = torch.ones(1, TARGET, dtype=torch.int64)
    inputs = {"input_ids": torch.ones(1, SOURCE, dtype=torch.int64), "decoder_input_ids": labels}
    return trace(
        lambda: transformers.T5ForConditionalGeneration(config),
        inputs,
        loss=summed,
        targets=labels,
        compute_dtype="bfloat16",
        name="FLAN-T5-XL",
    )


def test_A4_activations_of_encoder_and_decoder_are_what_does_not_fit() -> None:
    """3 B parameters, all states on the host: an estimator said 0.25 GB, four cards of 16 GB ran out of memory."""
    model = t5_xl()
    assert 2.78e9 < model.parameters < 2.85e9
    assert len(model.layers) == 48, "blocks of the encoder and of the decoder"
    device = Device(name="16 GB", kind="cuda", memory_bytes=16 * GIB)
    cluster = Cluster(name="four cards", nodes=(NodeGroup(devices=4, device=device, host_memory_bytes=512 * GIB),))
    job = Job(global_batch=4, sequence=SOURCE, compute_dtype="bfloat16")
    strategy = Strategy(dp=4, zero=3, offload=Offload(optimizer="host", parameters="host"))
    found = estimate(model, cluster, job, strategy)
    assert not found.fits
    sizes = found.worst.in_step
    assert max(sizes, key=lambda name: sizes[name]) == "activations"
    assert sizes["parameters"] + sizes["optimizer"] < 0.25e9, "states alone would have fitted"
    moment = StepMemory(model, job, strategy).ranks[0].peak
    encoder = sum(block.saved_bytes["none"] for block in model.layers[:24])
    decoder = sum(block.saved_bytes["none"] for block in model.layers[24:])
    assert encoder > decoder > 0
    assert moment.activations > encoder
