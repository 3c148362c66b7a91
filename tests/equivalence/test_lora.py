"""Adapters of the peft library on frozen Hugging Face models: as in one process, nothing held for what is frozen."""

from __future__ import annotations

import warnings
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from meshwright.measure.equality.float64 import float32_upcasts_stay_float64
from meshwright.runtime import Engine, ModelLoss
from meshwright.spec import Job, Strategy
from tests.equivalence.test_structures import Steps, same, train
from tests.harness.every import every
from tests.harness.hugging_face import ROWS, make_model, rows_of
from tests.harness.ranks import run_one, run_ranks

#: Name, family, what else is trained, and the adapters.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    "head saved": ("llama", {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]}),
    "embedding and head saved": (
        "llama",
        {"target_modules": "all-linear", "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "gpt2, biases": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "lora_only"}),
    "weights decomposed": ("llama", {"target_modules": ["q_proj"], "use_dora": True}),
}


def adapted(kind: str) -> nn.Module:
    family, keys = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        base = make_model(family, tied=False, dtype=torch.float64)
        config = peft.LoraConfig(
            r=2, lora_alpha=4, lora_dropout=0.0, init_lora_weights=False, task_type="CAUSAL_LM", **keys
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 asks transformers 5.24 by a name that is renamed
            model: nn.Module = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    return model.double()


def engine(kind: str, zero: int) -> Engine:
    ranks = torch.distributed.get_world_size()
    job = Job(global_batch=ROWS, param_dtype="float64", compute_dtype="float64", reduce_dtype="float64")
    layout = Strategy(dp=ranks, zero=zero, microbatch=ROWS // ranks)
    return Engine(adapted(kind), ModelLoss(), lambda p: torch.optim.AdamW(p, lr=0.1, eps=1e-4), job, layout)


def by_engine(kind: str, zero: int) -> tuple[Steps, dict[str, int], dict[str, int]]:
    made = engine(kind, zero)
    with float32_upcasts_stay_float64():
        steps = train(made, [rows_of(KINDS[kind][0], seed=seed, dtype=torch.float64) for seed in (1, 2)])
    return steps, made.bytes_at_rest(), made.category_peaks


def in_one_piece(kind: str) -> tuple[Steps, int, int]:
    model, steps = adapted(kind), []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, eps=1e-4)
    for seed in (1, 2):
        optimizer.zero_grad()
        with float32_upcasts_stay_float64():
            loss = model(**rows_of(KINDS[kind][0], seed=seed, dtype=torch.float64)).loss
            loss.backward()
        gradients: dict[str, Tensor] = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
        steps.append((float(loss.detach()), gradients))
        optimizer.step()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return steps, trained, sum(p.numel() for p in model.parameters())


CASES = [(kind, *layout) for kind, layout in zip(KINDS, ((2, 3), (3, 1), (3, 3), (2, 2), (2, 3)), strict=True)]


FAST = [*CASES, ("head saved", 2, 0), ("head saved", 2, 3)]


@pytest.mark.parametrize(("kind", "world", "zero"), every([(kind,) for kind in KINDS], FAST))
def test_J1_J2_adapters_and_saved_modules_train_on_a_frozen_model(kind: str, world: int, zero: int) -> None:
    wanted, trained, every = run_one(in_one_piece, kind)
    for steps, rest, peaks in run_ranks(world, by_engine, kind, zero):
        same(steps, wanted)
        parts = world if zero else 1
        slack = 8 * 600  # counters of steps, and what does not divide is padded
        assert rest["optimizer"] <= 2 * 8 * trained // parts + 2 * slack, "no states of what is frozen"
        if zero in (2, 3):
            assert peaks["gradients"] < 8 * every / 2, "no gradients of what is frozen"
