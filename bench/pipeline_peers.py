"""Who is measured by `bench/pipeline.py`: each builds its stages and returns a step, `batch -> loss`.

All start from the same seeded weights, are cut at the same blocks, take their data-parallel rank's rows of the same
global batch in as many microbatches, and use fused AdamW with the same numbers. DeepSpeed runs in its own environment;
nothing else imports it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from side_by_side_model import SEQUENCE, Batch, Step, adamw, make_batch, make_model, mean_loss
from torch import nn

__all__ = ["PEERS", "batch_of", "warm"]

#: Sequences a step, and microbatches of each rank.
BATCH, MICROBATCHES = 16, 8
BLOCKS = 8
#: 20 million parameters.
CHANGED = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_hidden_layers": BLOCKS,
}
TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def batch_of(number: int) -> Batch:
    """Of a step."""
    return make_batch(number, BATCH)


def warm(*, tiny: bool, **rest: Any) -> None:
    """Import what makes the model."""
    _model(tiny)


def _model(tiny: bool) -> Any:
    """The decoder; `tiny`: of a size at which only overhead takes time."""
    return make_model("decoder", **CHANGED | TINY if tiny else CHANGED)


def _rows(batch: Batch, dp: int, number: int) -> Batch:
    share = BATCH // dp
    inputs, labels = (part[number * share : (number + 1) * share] for part in batch)
    return inputs, labels


def _small(step: Step) -> Step:
    """A step of the tiny model, which knows few tokens."""
    return lambda batch: step((batch[0] % TINY["vocab_size"], batch[1] % TINY["vocab_size"]))


# ----------------------------------------------------------------------------------------------------------- Meshwright


def meshwright(*, pp: int, dp: int, zero: int, schedule: str, tiny: bool) -> Step:
    """The engine as it is used, all its checks and statistics on; memory is counted by the bench alone."""
    from meshwright.runtime import Engine
    from meshwright.spec import Job, parse_strategy

    def summed(logits: Any, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()

    microbatch = BATCH // dp // MICROBATCHES
    engine = Engine(
        _model(tiny),
        summed,
        adamw,
        Job(global_batch=BATCH, sequence=SEQUENCE),
        parse_strategy(f"pp={pp} dp={dp} zero={zero} schedule={schedule} microbatch={microbatch}"),
        measure_memory="never",
    )
    return lambda batch: engine.step(batch).loss


# ---------------------------------------------------------------------------------------------------------- plain torch


class _Part(nn.Module):
    """The decoder from one block to another: the embedding before the first, norm and head after the last."""

    def __init__(self, tiny: bool, start: int, stop: int) -> None:
        super().__init__()
        model = _model(tiny)
        self.embedding = model.model.embed_tokens if start == 0 else None
        self.rotary = model.model.rotary_emb
        self.blocks = nn.ModuleList(model.model.layers[start:stop])
        self.ends = nn.Sequential(model.model.norm, model.lm_head) if stop == BLOCKS else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        cos, sin = self.rotary(hidden)
        for block in self.blocks:
            hidden = block(hidden, cos, sin)
        return self.ends(hidden) if self.ends is not None else hidden


def plain_torch(*, pp: int, dp: int, zero: int, schedule: str, tiny: bool) -> Step:
    """`torch.distributed.pipelining` over the same stages.

    Where dp > 1 each block and the stage are FSDP2's, which under pipelining keeps gradients whole until the last
    microbatch whatever it is told, and parameters whole unless it reshards after forward (here for ZeRO-3).
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    mesh = init_device_mesh("cpu", (pp, dp), mesh_dim_names=("pp", "dp"))
    index, number = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    part = _Part(tiny, index * BLOCKS // pp, (index + 1) * BLOCKS // pp)
    if dp > 1:
        for block in part.blocks:
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=zero == 3)
        fully_shard(part, mesh=mesh["dp"], reshard_after_forward=zero == 3)
    stage = PipelineStage(part, index, pp, torch.device("cpu"), group=mesh["pp"].get_group())
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
    player = kind(stage, n_microbatches=MICROBATCHES, loss_fn=mean_loss)
    optimizer = adamw(part.parameters())

    def step(batch: Batch) -> torch.Tensor | None:
        inputs, labels = _rows(batch, dp, number)
        losses: list[torch.Tensor] = []
        last = index == pp - 1
        if last:
            player.step(target=labels, losses=losses)
        else:
            player.step(*((inputs,) if index == 0 else ()))
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean() if last else None

    return step


# ------------------------------------------------------------------------------------------------------------ DeepSpeed


class _Embedding(nn.Module):
    def __init__(self, tiny: bool) -> None:
        super().__init__()
        self.inner = _model(tiny).model.embed_tokens

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.inner(inputs)


class _Block(nn.Module):
    def __init__(self, tiny: bool, index: int) -> None:
        super().__init__()
        body = _model(tiny).model
        self.rotary, self.inner = body.rotary_emb, body.layers[index]

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.inner(hidden, *self.rotary(hidden))


class _Head(nn.Module):
    def __init__(self, tiny: bool) -> None:
        super().__init__()
        model = _model(tiny)
        self.norm, self.inner = model.model.norm, model.lm_head

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.inner(self.norm(hidden))


def deepspeed(*, pp: int, dp: int, zero: int, schedule: str, tiny: bool) -> Step:
    """Its PipelineModule, which has 1F1B, and ZeRO-1 at most."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # type: ignore[import-not-found]  # in an environment of its own
    from deepspeed.pipe import LayerSpec, PipelineModule  # type: ignore[import-not-found]

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    blocks = [LayerSpec(_Block, tiny, index) for index in range(BLOCKS)]
    made = PipelineModule(
        layers=[LayerSpec(_Embedding, tiny), *blocks, LayerSpec(_Head, tiny)],
        num_stages=pp,
        loss_fn=mean_loss,
        partition_method="type:_Block",
        activation_checkpoint_interval=0,
    )
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // dp // MICROBATCHES,
        "gradient_accumulation_steps": MICROBATCHES,
        # By default two buckets of half a billion elements; about one block, as everybody else reduces here.
        "zero_optimization": {"stage": zero, "reduce_bucket_size": 2_000_000},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(
        model=made,
        model_parameters=list(made.parameters()),
        optimizer=adamw,
        config=json.loads(json.dumps(config)),
    )

    def step(batch: Batch) -> torch.Tensor:
        inputs, labels = _rows(batch, dp, engine.grid.get_data_parallel_id())
        parts = zip(inputs.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True)
        loss: torch.Tensor = engine.train_batch(data_iter=iter(list(parts)))
        return loss

    return step


def _contender(make: Callable[..., Step]) -> Callable[..., Step]:
    return lambda *, tiny, **given: _small(make(tiny=True, **given)) if tiny else make(tiny=False, **given)


PEERS: dict[str, Callable[..., Step]] = {
    "meshwright": _contender(meshwright),
    "torch": _contender(plain_torch),
    "deepspeed": _contender(deepspeed),
}
