"""Conventions: how other stacks hold bytes in memory where they differ from this runtime, each with its source.

A published peak can only be compared with a prediction when it is known what the stack keeps (weights in two dtypes,
whole gradients, logits in float32) and what its figure counts (live tensors, what the allocator reserved, the device).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from meshwright.errors import ConfigError
from meshwright.spec.checks import require_choice
from meshwright.spec.job import Stack
from meshwright.spec.layout import Attention

__all__ = ["CONVENTIONS", "Convention", "StateBytes", "convention", "on_accelerator"]

_GIB = 2**30

Reading = Literal["device", "reserved", "allocated"]
Gradients = Literal["buffers", "made", "used"]
ProductDtype = Literal["", "float8", "float4"]


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes per parameter that a stack holds all through a step.

    `weights` are those that compute reads, whole below ZeRO-3. `gradients` are divided from ZeRO-2 on, `optimizer`
    (float32 weights, moments, and what else is divided with them) from ZeRO-1 on. `life` of the gradients: `buffers`
    that are always there, `made` as the backward goes and dropped after the optimizer, or `used` up at once by an
    optimizer that runs inside the backward.
    """

    weights: float
    gradients: float
    optimizer: float
    life: Gradients = "buffers"

    def __post_init__(self) -> None:
        require_choice("states.life", self.life, get_args(Gradients))
        for name in ("weights", "gradients", "optimizer"):
            if not getattr(self, name) >= 0:
                raise ConfigError(
                    f"states.{name}={getattr(self, name)} is not a number of bytes", fix="give 0 or more bytes"
                )

    @property
    def total(self) -> float:
        """Bytes per parameter of a rank that shards nothing."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True)
class Convention:
    """What a stack does differently from this runtime. What is None is as the job's dtypes and the device say.

    `states` replaces the model states that the job's dtypes imply. `logit_bytes` is the most that is alive per element
    of the logits while the loss runs back. `process_bytes` is what the process takes besides its tensors: context,
    communicators, and flat buckets of a fixed size. `gaps` is the share of its tensors that the caching allocator
    reserves besides. `kept_products` is the share of the outputs of matrix products that selective recompute keeps.
    `keeps_outputs`: a pipeline stage keeps what it has sent until its backward. `reads` says what a published peak
    counts: `allocated` the live tensors, `reserved` those and the gaps, `device` the process too.

    Time: `attention_speed` is what its attention kernel reaches over FlashAttention-2, forward and backward,
    `element_factor` what memory-bound operations move over what is counted, `reduce_bytes` the bytes of a gradient in
    its reduction, `overlap` whether gathers and reductions run beside compute, `tp_overlap` whether tensor-parallel
    communication does, in as many pieces as ranks, `fused_accumulation` whether products add to the gradients of
    earlier microbatches themselves, `cp_balanced` whether context parallelism gives every rank as many unmasked pairs,
    `blocking` whether pipeline ranks wait for each other's messages.
    `product_dtype` is the dtype in which the layers multiply by their weights ("" for the compute dtype); attention and
    everything else stay in the compute dtype, and so does what is kept.

    `source` gives the public origin of each figure; `fitted` names the figures that are fitted to published peaks.
    """

    name: str
    source: str
    stack: Stack = "eager"
    attention: Attention = "flash"
    product_dtype: ProductDtype = ""
    states: StateBytes | None = None
    logit_bytes: float | None = None
    process_bytes: int | None = None
    gaps: float | None = None
    kept_products: float = 1.0
    keeps_outputs: bool = False
    reads: Reading = "device"
    attention_speed: tuple[float, float] = (1.0, 1.0)
    element_factor: tuple[float, float] = (1.0, 1.0)
    reduce_bytes: float | None = None
    overlap: bool = True
    tp_overlap: bool = False
    fused_accumulation: bool = False
    cp_balanced: bool = True
    blocking: bool = False
    fitted: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_choice("convention.stack", self.stack, get_args(Stack))
        require_choice("convention.attention", self.attention, get_args(Attention))
        require_choice("convention.product_dtype", self.product_dtype, get_args(ProductDtype))
        require_choice("convention.reads", self.reads, get_args(Reading))
        if not 0 <= self.kept_products <= 1:
            raise ConfigError(
                f"convention.kept_products={self.kept_products} is not in [0, 1]", fix="give a share of the outputs"
            )

    def without_bytes(self) -> Convention:
        """The same kernels, recompute and reading, with nothing declared of the bytes that this stack holds."""
        return replace(
            self, states=None, logit_bytes=None, process_bytes=None, gaps=None, keeps_outputs=False, fitted=()
        )


#: PyTorch's cross entropy in float32 while it runs back: the log-softmax that was kept, its gradient, and the gradient
#: of what went into it, 4 bytes each (aten: _log_softmax, nll_loss_backward, _log_softmax_backward_data).
_LOSS_BYTES = 12.0
_PLAIN = Convention(name="PyTorch", source="PyTorch 2.13", logit_bytes=_LOSS_BYTES)


def on_accelerator(told: Convention | None) -> Convention:
    """A convention on a device whose memory only tensors share: there a loss's passing tensors count too."""
    if told is None:
        return _PLAIN
    return told if told.logit_bytes is not None else replace(told, logit_bytes=_LOSS_BYTES)


#: Kernels written by hand between operations of PyTorch's own, which are not counted one by one: what memory-bound
#: operations move over what is counted. One fit to the MosaicML llm-foundry rows, for all devices, sizes and stacks.
_BETWEEN_KERNELS = (1.2, 3.6)
#: Attention kernels of cuDNN 9 and FlashAttention-3 on H100 over FlashAttention-2 (Shah et al. 2024, arXiv 2407.08608,
#: figures 5 and 6).
_CUDNN_ATTENTION = (1.5, 1.5)

#: The first FlashAttention: half of the second's speed (Dao 2023, arXiv 2307.08691, abstract).
_FIRST_FLASH = (0.5, 0.5)

_MEGATRON_FP16 = Convention(
    name="Megatron-DeepSpeed fp16",
    source="kernels: Korthikanti et al., arXiv 2205.05198; states: DeepSpeed runtime/zero/stage_1_and_2.py, fp16 "
    "weights and gradients whole, float32 weights, gradients and two moments divided; outputs: DeepSpeed "
    "runtime/pipe/engine.py; reading: nvidia-smi (bigscience, tr11-176B-ml/chronicles-prequel.md); process: a context "
    "of 1.5 GiB (the same document), communicators, and two ZeRO buckets of 5e8 elements",
    stack="fused",
    attention="math",
    states=StateBytes(weights=2, gradients=2, optimizer=16),
    process_bytes=5 * _GIB,
    keeps_outputs=True,
    reads="device",
    fitted=("process_bytes",),
    element_factor=_BETWEEN_KERNELS,
    reduce_bytes=2,
    blocking=True,
)
_MEGATRON_BF16 = replace(
    _MEGATRON_FP16,
    name="Megatron-DeepSpeed bf16",
    source="as with fp16, but gradients are accumulated in float32: 4 bytes a parameter more, not divided (bigscience, "
    "chronicles-prequel.md, Rebalancing layers; DeepSpeed runtime/bf16_optimizer.py)",
    states=StateBytes(weights=2, gradients=6, optimizer=16),
    reduce_bytes=4,
)
_INTERNEVO = Convention(
    name="InternEvo",
    source="InternEvo doc/en/install.md: flash-attention 1.0.5; solver/optimizer/hybrid_zero_optim.py: bf16 "
    "weights and gradients, float32 weights, gradients "
    "and two moments are 20 bytes a parameter; the slope of its published peaks over the number of GPUs is 27, gaps "
    "and flat copies included; logits in float32 (NaiveAMPModel), their gradient in place, and both in bf16",
    stack="fused",
    states=StateBytes(weights=2, gradients=2, optimizer=23),
    logit_bytes=8,
    process_bytes=5 * _GIB,
    gaps=0.0,
    reads="device",
    fitted=("states", "process_bytes"),
    # Norms take float32 inputs (modeling_internlm.py): a cast and a norm move 8 bytes an element more forward, 10 back.
    element_factor=(1.56, 3.9),
    reduce_bytes=2,
    attention_speed=_FIRST_FLASH,
)
_NANOTRON = Convention(
    name="nanotron",
    source="nanotron optim/gradient_accumulator.py (accumulate_grad_in_fp32): bf16 weights and gradients and float32 "
    "gradients whole, float32 weights and two moments divided; models/llama.py: norms, rotation and attention are "
    "kernels of their own; reading: max_memory_allocated (Mem Alloc of its log); that gathered inputs of column "
    "products are kept (stack) is read off its published peaks",
    stack="compiled",
    states=StateBytes(weights=2, gradients=6, optimizer=12),
    reads="allocated",
    fitted=("stack",),
    element_factor=_BETWEEN_KERNELS,
    reduce_bytes=4,
)
_TORCHTITAN_2024 = Convention(
    name="torchtitan 2024-12",
    source="torchtitan train.py of 2024-12: a loss in float32 that is not compiled; parallelize_llama.py: selective "
    "recompute keeps every second matrix product; reading: max_reserved (metrics.py)",
    stack="compiled",
    kept_products=0.5,
    cp_balanced=False,
    reads="reserved",
)
_TORCHTITAN_2025 = replace(
    _TORCHTITAN_2024,
    name="torchtitan 2025-06",
    source="as in 2024-12, with a compiled loss (components/loss.py): logits in bf16 and one float32 tensor",
    logit_bytes=6,
)
_TORCHTUNE = Convention(
    name="torchtune",
    source="torchtune recipes/full_finetune_single_device.py: weights, gradients and two moments in bf16; gradients "
    "are dropped after the optimizer; reading: peak active memory (training/memory.py)",
    states=StateBytes(weights=2, gradients=2, optimizer=4, life="made"),
    reads="allocated",
)
_FOUNDRY = Convention(
    name="llm-foundry",
    source="llm-foundry models/mpt/modeling_mpt.py: a fused cross entropy, of which the bf16 logits and their gradient "
    "are left; flash attention; low-precision LayerNorm",
    stack="fused",
    logit_bytes=4,
    reads="reserved",
    attention_speed=(0.82, 0.44),
    element_factor=_BETWEEN_KERNELS,
)
_FMS = Convention(
    name="fms-fsdp",
    source="fms-fsdp README.md: FSDP with torch.compile",
    stack="compiled",
    reads="reserved",
    reduce_bytes=2,
)
_LIGER = Convention(
    name="DeepSpeed with Liger kernels",
    source="Liger-Kernel ops/fused_linear_cross_entropy.py: logits are made in chunks of about the hidden states' "
    "size; reading: max_memory_reserved",
    stack="fused",
    logit_bytes=0.5,
    reads="reserved",
    attention_speed=_CUDNN_ATTENTION,
)
_MEGATRON_CORE = Convention(
    name="Megatron Core",
    source="Megatron-LM docs, distributed optimizer: bf16 weights and float32 gradients whole, float32 weights and two "
    "moments divided (6 + 12 / d bytes a parameter); fused cross entropy and kernels of Transformer Engine",
    stack="fused",
    states=StateBytes(weights=2, gradients=4, optimizer=12),
    logit_bytes=6,
    reads="reserved",
    attention_speed=_CUDNN_ATTENTION,
    tp_overlap=True,
    fused_accumulation=True,
)
_DEEPSPEED = Convention(
    name="DeepSpeed",
    source="Rajbhandari et al., arXiv 1910.02054, section 3.1: 16-bit weights and gradients, float32 weights and two "
    "moments; models of Hugging Face, so eager kernels",
    stack="eager",
    states=StateBytes(weights=2, gradients=2, optimizer=12),
    reads="reserved",
)
_ACCELERATE = Convention(
    name="Accelerate 2022",
    source="transformers of 2022: GPT-2 attention that stores its scores; reading: whether it ran on the device",
    stack="eager",
    attention="math",
    reads="device",
)

#: Conventions by the stack's name.
CONVENTIONS = {
    entry.name: entry
    for entry in (
        _MEGATRON_FP16,
        _MEGATRON_BF16,
        _INTERNEVO,
        _NANOTRON,
        _TORCHTITAN_2024,
        _TORCHTITAN_2025,
        _TORCHTUNE,
        _FOUNDRY,
        _FMS,
        _LIGER,
        _MEGATRON_CORE,
        _DEEPSPEED,
        _ACCELERATE,
    )
}


def convention(name: str) -> Convention:
    """A stack's convention by name.

    Raises:
        ConfigError: there is none.
    """
    require_choice("convention", name, tuple(CONVENTIONS))
    return CONVENTIONS[name]
