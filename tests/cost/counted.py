"""Runs of the engine that are counted, and what the price of their strategy is held against."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from meshwright.cost import StepMemory
from meshwright.cost.communication import count_collectives
from meshwright.models import Decoder, DecoderConfig, token_loss
from meshwright.runtime import Engine
from meshwright.spec import DecoderShape, Job, Layout, ModelSpec, Strategy, describe
from meshwright.spec.families import read_config
from tests.cost.cores import price
from tests.harness.models import loss_of
from tests.harness.patience import patient

__all__ = ["LAYERS", "SEQUENCE", "Counted", "Unseen", "build", "compare", "count", "described", "squares"]

#: Relative: of each category of model states, of saved activations with logits, and of the total.
STATES, ACTIVATIONS, TOTAL = 0.02, 0.05, 0.03
#: A category of which there is next to nothing is held against the total.
NOTHING = 0.002
SEQUENCE = 64
LAYERS = 5
DECODER: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 96,
    "intermediate_size": 250,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 64,
}
LLAMA = DECODER | {"num_attention_heads": 6, "num_key_value_heads": 2, "use_cache": False}
GPT2: dict[str, Any] = {
    "vocab_size": 101,
    "n_positions": 64,
    "n_embd": 96,
    "n_layer": LAYERS,
    "n_head": 6,
    "n_inner": 250,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "use_cache": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


class Counted(NamedTuple):
    """What one rank counted: bytes at the largest moment of a step, collectives of a step, bytes of its buffers, and
    the largest bytes of each category at any moment."""

    peak: dict[str, int]
    collectives: dict[str, int]
    buffers: int
    largest: dict[str, int]


class Unseen(nn.Module):
    """A model of no known family: blocks with a side input, a gate and a norm, between two projections."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(24, 96)
        self.blocks = nn.ModuleList(UnseenBlock() for _ in range(LAYERS))
        self.leave = nn.Linear(96, 7)
        if frozen:
            for block in self.blocks:
                block.up.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(x)
        for block in self.blocks:
            hidden = block(hidden, scale=0.5)
        return self.leave(hidden)


class UnseenBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(96)
        self.up, self.gate, self.down = nn.Linear(96, 250), nn.Linear(96, 250), nn.Linear(250, 96)

    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        y = self.norm(x)
        return x + scale * self.down(torch.tanh(self.up(y)) * torch.sigmoid(self.gate(y)))


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """The loss of the unseen model."""
    return (outputs.float() - targets).square().sum(), targets.numel()


def described(name: str, *, tied: bool, layout: Layout) -> ModelSpec:
    """A model of a known family (or the built-in decoder) as a rank sees it."""
    if name == "decoder":
        shape = DecoderShape(**DECODER, tie_word_embeddings=tied)
        return describe(shape, sequence=SEQUENCE, compute_dtype=layout.compute_dtype, layout=layout)
    table = {"llama": LLAMA, "gpt2": GPT2}[name]
    return read_config({"model_type": name, "tie_word_embeddings": tied, **table}).at(layout)


def build(name: str, tied: bool) -> nn.Module:
    """The model itself."""
    if name in ("unseen", "frozen"):
        return Unseen(frozen=name == "frozen")
    if name == "decoder":
        return Decoder(DecoderConfig(**DECODER, tie_word_embeddings=tied))
    import transformers

    if name == "llama":
        config = transformers.LlamaConfig(**LLAMA, tie_word_embeddings=tied)
        return transformers.LlamaForCausalLM(config)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, tie_word_embeddings=tied))


def count(name: str, tied: bool, job: Job, strategy: Strategy, steps: int = 2) -> Counted:
    """One rank. Of some steps the least is taken: a thread of gloo may hold a buffer a moment longer."""
    loss: Any = {"decoder": token_loss, "unseen": squares, "frozen": squares}.get(name) or loss_of(name)
    engine = Engine(
        lambda: build(name, tied),
        loss,
        lambda held: torch.optim.AdamW(held, fused=True),
        job,
        strategy,
        measure_memory="every",
    )
    shape = (job.global_batch, job.sequence)
    tokens = torch.randint(0, 101, shape, generator=torch.Generator().manual_seed(0))
    batch: Any = (tokens, tokens) if name == "decoder" else {"input_ids": tokens, "labels": tokens}
    if name in ("unseen", "frozen"):
        batch = torch.zeros(*shape, 24), torch.zeros(*shape, 7)
    engine.step(batch)
    reports, largest = [], []
    with patient():
        for _ in range(steps):
            reports.append(engine.step(batch))
            largest.append(engine.category_peaks)
    least = min((report.peak_bytes for report in reports), key=lambda peak: peak["total"])
    every = {kind: min(peaks[kind] for peaks in largest) for kind in largest[0]}
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in engine.model.buffers())
    return Counted(least, reports[-1].collectives, buffers, every)


def compare(
    model: ModelSpec,
    job: Job,
    strategy: Strategy,
    counted: Counted,
    *,
    token_bytes: int = 8,
    activations: float = ACTIVATIONS,
    rank: int = 0,
) -> None:
    """Hold what is predicted of a pipeline rank against what it counted.

    Args:
        token_bytes: what a token of the batch takes.
        activations: how far saved activations may be off, relative.
    """
    peak, collectives, buffers, _ = counted
    step = StepMemory(model, job, strategy)
    memory = step.ranks[rank]
    assert collectives == count_collectives(model, job, strategy, step, rank)[0]
    if strategy.pp == 1:
        assert collectives == price(model, job, strategy).collectives
    counters = 4 * sum(len(block.tensors) for stage in memory.stages for block in stage.blocks)
    assert peak["parameters"] == pytest.approx(memory.parameters + buffers, rel=STATES)
    assert peak["optimizer"] == pytest.approx(memory.optimizer + counters, rel=STATES)
    assert peak["total"] == pytest.approx(memory.peak_bytes + buffers + counters, rel=TOTAL)
    near = [m for m in memory.moments() if m.total >= (1 - TOTAL) * memory.peak.total]
    found = peak["gathered"], peak["gradients"], peak["activations"]
    largest = peak["total"]
    # Of the global batch a microbatch is a view: all of it is alive, and its own rows are priced already.
    batch = token_bytes * SEQUENCE * (job.global_batch - strategy.microbatch)
    for moment in near:
        expected = moment.gathered, moment.gradients, moment.activations + moment.logits + batch
        off = [abs(a - b) for a, b in zip(found, expected, strict=True)]
        limits = [max(STATES * size, NOTHING * largest) for size in expected[:2]]
        if off[0] <= limits[0] and off[1] <= limits[1] and off[2] <= activations * expected[2]:
            return
    shown = "\n".join(f"{m.phase}: {(m.gathered, m.gradients, m.activations + m.logits + batch)}" for m in near)
    raise AssertionError(f"counted (gathered, gradients, activations) {found}; predicted near the peak:\n{shown}")
