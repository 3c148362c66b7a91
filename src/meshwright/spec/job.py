"""Job: what is to be computed in one optimizer step, whatever the strategy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from meshwright.errors import ConfigError
from meshwright.spec.checks import require_choice, require_types

__all__ = ["DTYPE_BYTES", "Dtype", "Job", "OptimizerSpec", "Recompute"]

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
Recompute = Literal["none", "selective", "full"]
Stack = Literal["eager", "compiled", "fused"]
OptimizerName = Literal["adamw", "sgd"]
Decay = Literal["constant", "linear", "cosine"]

#: Bytes of one element.
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

_STATE_TENSORS = {"adamw": 2, "sgd": 0}


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """The optimizer of a job: `adamw` (two states per parameter) or `sgd` (one with momentum, none without).

    `schedule` shapes the learning rate over optimizer steps after `warmup_steps` of linear warm-up: `constant`,
    `linear` or `cosine` decay to `min_learning_rate` at the last step.
    """

    name: OptimizerName = "adamw"
    learning_rate: float = 1e-3
    min_learning_rate: float = 0.0
    schedule: Decay = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.0

    def __post_init__(self) -> None:
        require_types(self, "optimizer.")
        require_choice("optimizer.name", self.name, get_args(OptimizerName))
        require_choice("optimizer.schedule", self.schedule, get_args(Decay))
        for name in ("learning_rate", "min_learning_rate", "warmup_steps", "weight_decay", "momentum"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError(
                    f"optimizer.{name}={value} is not a number of 0 or more", fix=f"set optimizer.{name} to 0 or more"
                )
        if not self.eps > 0:
            raise ConfigError(
                f"optimizer.eps={self.eps} is not above 0", fix="set optimizer.eps to a small positive number"
            )
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ConfigError(f"optimizer.{name}={value} is not in [0, 1)", fix=f"set optimizer.{name} below 1")
        if self.name == "adamw" and self.momentum:
            raise ConfigError(
                f"optimizer.momentum={self.momentum} has no effect with adamw",
                fix="use optimizer.beta1, or optimizer.name=sgd",
            )

    @property
    def state_tensors(self) -> int:
        """State tensors per parameter, each of the parameter's stored dtype."""
        return _STATE_TENSORS[self.name] + (1 if self.momentum else 0)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training job: sizes in sequences and tokens, dtypes, optimizer, what the planner may use, seed.

    `global_batch` is the number of sequences per optimizer step over all ranks; microbatch and accumulation are
    derived from it. `clip_norm` is the largest global gradient norm, 0 for no clipping. `allow_recompute` lists the
    recompute policies the planner may choose from. `expert_imbalance` is the load of the busiest rank's experts over
    the mean: 1 where routing is balanced.
    """

    global_batch: int = 8
    sequence: int = 256
    param_dtype: Dtype = "float32"
    compute_dtype: Dtype = "float32"
    reduce_dtype: Dtype = "float32"
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    clip_norm: float = 0.0
    allow_recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    stack: Stack = "eager"
    expert_imbalance: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_types(self, "job.")
        for name in ("param_dtype", "compute_dtype", "reduce_dtype"):
            require_choice(f"job.{name}", getattr(self, name), get_args(Dtype))
        require_choice("job.stack", self.stack, get_args(Stack))
        for policy in self.allow_recompute:
            require_choice("job.allow_recompute", policy, get_args(Recompute))
        for name in ("global_batch", "sequence"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"job.{name}={value} is not a positive number", fix=f"set job.{name} to 1 or more")
        if not 0 <= self.clip_norm < float("inf"):
            raise ConfigError(
                f"job.clip_norm={self.clip_norm} is not a norm",
                fix="set job.clip_norm to a positive number, or 0 for no clipping",
            )
        if not 1 <= self.expert_imbalance < float("inf"):
            raise ConfigError(
                f"job.expert_imbalance={self.expert_imbalance} is below 1",
                why="it is the busiest rank's load over the mean",
                fix="set it to 1 where routing is balanced, or more",
            )
        if not self.allow_recompute:
            raise ConfigError("job.allow_recompute is empty", fix='list at least "none"')
        if DTYPE_BYTES[self.compute_dtype] > DTYPE_BYTES[self.param_dtype]:
            raise ConfigError(
                f"job.compute_dtype={self.compute_dtype} is wider than job.param_dtype={self.param_dtype}",
                why="parameters would gain digits that they do not store",
                fix=f"set job.param_dtype={self.compute_dtype}, or a narrower compute_dtype",
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"job.seed={self.seed} is out of range", fix="use a seed from 0 to 2^63-1")
