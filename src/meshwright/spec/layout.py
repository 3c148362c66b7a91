"""Layout: how one rank sees a model, that is all on which the figures of a block depend besides the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from meshwright.errors import ConfigError
from meshwright.spec.checks import require_choice
from meshwright.spec.job import DTYPE_BYTES, Dtype, Job, Stack
from meshwright.spec.strategy import Strategy

__all__ = ["Attention", "Layout"]

Attention = Literal["flash", "math"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sequence length, dtype, kernels and model-parallel degrees under which a model is described.

    `sequence` counts the tokens of a whole sequence; with context parallelism a rank holds `tokens` of them. `stack`
    says which tensors the kernels keep for backward: `eager` those of PyTorch's own operations, one by one; `compiled`
    and `fused` only what a fused kernel needs (a norm its input, an activation function its input). `attention` is
    `flash` (scores are never stored) or `math` (scores of all S x S pairs are).

    Raises:
        ConfigError: a degree or the sequence is not positive, or a degree does not divide the sequence.
    """

    sequence: int
    compute_dtype: Dtype = "float32"
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    ep: int = 1
    stack: Stack = "eager"
    attention: Attention = "flash"

    def __post_init__(self) -> None:
        require_choice("compute_dtype", self.compute_dtype, get_args(Dtype))
        require_choice("stack", self.stack, get_args(Stack))
        require_choice("attention", self.attention, get_args(Attention))
        for name in ("sequence", "tp", "cp", "ep"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not positive", fix=f"set {name} to 1 or more")
        if self.sequence % self.cp:
            raise ConfigError(
                f"cp={self.cp} does not divide the sequence of {self.sequence} tokens",
                why="context parallelism cuts each sequence into equal parts",
                fix="change cp or job.sequence",
            )
        if self.sequence_parallel and self.tokens % self.tp:
            raise ConfigError(
                f"sequence_parallel with tp={self.tp} does not divide the {self.tokens} tokens of a rank",
                why="sequence parallelism cuts activations between the sharded matrices along the sequence",
                fix="change tp or job.sequence, or leave sequence_parallel out",
            )

    @classmethod
    def of(cls, job: Job, strategy: Strategy, *, attention: Attention = "flash") -> Layout:
        """The layout of a strategy for a job."""
        return cls(
            sequence=job.sequence,
            compute_dtype=job.compute_dtype,
            tp=strategy.tp,
            sequence_parallel=strategy.sequence_parallel,
            cp=strategy.cp,
            ep=strategy.ep,
            stack=job.stack,
            attention=attention,
        )

    @property
    def tokens(self) -> int:
        """Tokens of one sequence on this rank."""
        return self.sequence // self.cp

    @property
    def compute_bytes(self) -> int:
        """Bytes of one element of the compute dtype."""
        return DTYPE_BYTES[self.compute_dtype]

    @property
    def model_parallel(self) -> bool:
        """Whether a rank computes only a part of each layer."""
        return max(self.tp, self.cp, self.ep) > 1
