"""Who is measured by `bench/tensor_parallel.py`: each builds its model and returns a step, `batch -> loss`.

All start from the same seeded weights, take their data-parallel rank's rows of the same global batch, and use fused
AdamW with the same numbers. DeepSpeed runs in its own environment; nothing else imports it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from side_by_side_model import SEQUENCE, Batch, Step, adamw, logits_of, make_batch, make_model, mean_loss
from torch import nn

__all__ = ["PEERS", "batch_of", "warm"]

#: Sequences a step.
BATCH = 4


def batch_of(number: int) -> Batch:
    """Of a step."""
    return make_batch(number, BATCH)


def warm(*, model: str, **rest: Any) -> None:
    """Import what makes the model."""
    make_model(model)


def _rows(batch: Batch, dp: int, tp: int) -> Batch:
    first, share = dist.get_rank() // tp, BATCH // dp
    inputs, labels = (part[first * share : (first + 1) * share] for part in batch)
    return inputs, labels


def _optimizers(parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """One optimizer for each mesh: fused AdamW takes no mixture of them, nor of them and plain tensors."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [adamw(group) for group in groups.values()]


# ----------------------------------------------------------------------------------------------------------- Meshwright


def meshwright(*, model: str, dp: int, tp: int, sequence_parallel: bool, loss: str, zero: int) -> Step:
    """The engine as it is used, all its checks and statistics on; memory is counted by the bench alone."""
    from meshwright.runtime import Engine
    from meshwright.spec import Job, Strategy

    def summed(outputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
        logits = logits_of(outputs)
        if loss == "gathered":
            logits = logits.whole()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()

    engine = Engine(
        make_model(model),
        summed,
        adamw,
        Job(global_batch=BATCH, sequence=SEQUENCE),
        Strategy(dp=dp, tp=tp, sequence_parallel=sequence_parallel, zero=zero, microbatch=BATCH // dp),
        measure_memory="never",
    )
    return lambda batch: engine.step(batch).loss


# ---------------------------------------------------------------------------------------------------------- plain torch


def plain_torch(*, model: str, dp: int, tp: int, sequence_parallel: bool, loss: str, zero: int) -> Step:
    """`parallelize_module` with the plan that Meshwright follows; over it `replicate` or `fully_shard` where dp > 1."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    made = make_model(model)
    parallelize_module(made, mesh["tp"], _plan(sequence_parallel, divided=loss == "divided"))
    if dp > 1:
        _over_rows(made, mesh["dp"], zero)
    optimizers = _optimizers(made.parameters())
    call: dict[str, Any] = {}
    if sequence_parallel:  # rotary angles are those of whole sequences, the embedding's result is a part of them
        call = {"position_ids": torch.arange(SEQUENCE)[None]}

    def step(batch: Batch) -> torch.Tensor:
        inputs, labels = _rows(batch, dp, tp)
        with loss_parallel() if loss == "divided" else nullcontext():
            found = mean_loss(made(inputs, **call), labels)
            found.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        value = found.detach()
        return value.full_tensor() if isinstance(value, DTensor) else value

    return step


def _plan(sequence_parallel: bool, *, divided: bool) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    stream = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "lm_head": ColwiseParallel(
            input_layouts=stream, output_layouts=Shard(-1) if divided else Replicate(), use_local_output=not divided
        ),
    }
    block = "model.layers.*"
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"{block}.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"{block}.{name}"] = RowwiseParallel(output_layouts=stream)
    if sequence_parallel:
        for name in ("input_layernorm", "post_attention_layernorm"):
            plan[f"{block}.{name}"] = SequenceParallel()
        plan["model.norm"] = SequenceParallel()
        whole, rest = Replicate(), (None, None, None)
        plan[f"{block}.self_attn"] = PrepareModuleInput(
            input_layouts=(stream, *rest), desired_input_layouts=(whole, *rest)
        )
        plan[f"{block}.mlp"] = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(whole,))
    return plan


def _over_rows(model: Any, mesh: Any, zero: int) -> None:
    if zero == 3:
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        from torch.distributed._composable.replicate_with_fsdp import replicate

        for layer in model.model.layers:
            replicate(layer, mesh=mesh)
        replicate(model, mesh=mesh)


# --------------------------------------------------------------------------------------------------------- Transformers


def transformers(*, model: str, dp: int, tp: int, sequence_parallel: bool, loss: str, zero: int) -> Step:
    """`DistributedConfig(tp_size=...)`; it has no sequence parallelism and gathers the logits."""
    import tempfile
    from pathlib import Path

    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig  # type: ignore[attr-defined]  # its __init__ is lazy

    told: list[Any] = [tempfile.mkdtemp(prefix="meshwright-llama-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told)
    if dist.get_rank() == 0:
        make_model("llama").save_pretrained(told[0])
    dist.barrier()
    made: Any = LlamaForCausalLM.from_pretrained(
        told[0], dtype=torch.float32, distributed_config=DistributedConfig(tp_size=tp), use_cache=False
    )
    made.train()
    dist.barrier()
    if dist.get_rank() == 0:
        for path in Path(told[0]).iterdir():
            path.unlink()
        Path(told[0]).rmdir()
    optimizers = _optimizers(made.parameters())

    def step(batch: Batch) -> torch.Tensor:
        inputs, labels = batch
        found = mean_loss(made(inputs), labels)
        found.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return found.detach()

    return step


# ------------------------------------------------------------------------------------------------------------ DeepSpeed


def deepspeed(*, model: str, dp: int, tp: int, sequence_parallel: bool, loss: str, zero: int) -> Step:
    """AutoTP by the engine's own configuration."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # type: ignore[import-not-found]  # in an environment of its own

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    made = make_model(model)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": zero},
        "tensor_parallel": {"autotp_size": tp},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(
        model=made,
        model_parameters=made.parameters(),
        optimizer=adamw,
        config=json.loads(json.dumps(config)),
    )

    def step(batch: Batch) -> torch.Tensor:
        inputs, labels = batch
        found = mean_loss(engine(inputs), labels)
        engine.backward(found)
        engine.step()
        return found.detach()

    return step


PEERS: dict[str, Callable[..., Step]] = {
    "meshwright": meshwright,
    "torch": plain_torch,
    "transformers": transformers,
    "deepspeed": deepspeed,
}
