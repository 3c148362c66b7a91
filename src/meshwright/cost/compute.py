"""Compute: what the operations of a block take on a device, as a roofline with what the device reaches of its peaks.

A matrix product of M x K by K x N takes 2MNK flops over what the device reaches: its share for large products, times
k / (k + half) of the inner dim, times what is left where the last wave of output tiles does not fill the device (NVIDIA
Matrix Multiplication Background User's Guide), but no less than its bytes take. Attention is a share of the peak over
the pairs that are not masked. All other operations are bound by memory. Every operation takes a time to start.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from msgspec import Struct

from meshwright.spec import DTYPE_BYTES, BlockSpec, Device, Efficiency, Product

__all__ = ["BlockWork", "Phases", "Speeds", "block_work", "speeds"]

#: Dims that are no multiple of 64 elements miss the tensor cores' tiles.
_ALIGNMENT = 64
_UNALIGNED = 0.68
_PRODUCT_BYTES = {"float8": 1, "float4": 0.5}
#: With 4 bits some of the layers' products stay wide (NVIDIA, Pretraining LLMs with NVFP4, arXiv 2509.25149).
_WIDE_SHARE = {"float4": 0.15}
#: What an accelerator or a core of a CPU is taken for whose speed nobody has told: an A100, and one core with 8 float32
#: lanes and two multiply-add units at 3 GHz and its share of a server's memory bandwidth.
_ACCELERATOR = (312e12, 1.5e12)
_CORE = (96e9, 10e9)
_REACHED = Efficiency(
    products={"bfloat16": 0.7}, half_inner=90, attention=0.5, backward_attention=0.4, memory=0.85, kernel_s=3.2e-6
)
_REACHED_CORE = Efficiency(
    products={"float32": 0.6}, half_inner=16, attention=0.3, backward_attention=0.25, memory=0.7, kernel_s=5e-6
)


class Phases(Struct, frozen=True, gc=False):
    """Seconds of a forward, and of the halves of a backward: towards the inputs, and towards the weights."""

    forward: float = 0.0
    input: float = 0.0
    weight: float = 0.0

    def times(self, factor: float) -> Phases:
        """All of it `factor` times."""
        return Phases(self.forward * factor, self.input * factor, self.weight * factor)

    def plus(self, other: Phases) -> Phases:
        """Both, one after the other."""
        return Phases(self.forward + other.forward, self.input + other.input, self.weight + other.weight)

    @property
    def backward(self) -> float:
        """Both halves."""
        return self.input + self.weight


class BlockWork(NamedTuple):
    """What a block computes for one microbatch, by what bounds it."""

    products: Phases
    attention: Phases
    memory: Phases

    @property
    def all(self) -> Phases:
        """All of it."""
        return self.products.plus(self.attention).plus(self.memory)


class Speeds(Struct, frozen=True, eq=False):
    """What a device does per second for a job, and what it reaches of that.

    `flops_per_s` is the peak in the compute dtype, `product_flops_per_s` what a large product of a layer reaches,
    `plain_flops_per_s` what one of the head does. `asynchronous`: it runs beside the host that starts its
    operations, as accelerators do. `guessed`: the device does not tell its peak.
    """

    flops_per_s: float
    product_flops_per_s: float
    plain_flops_per_s: float
    product_bytes: float
    itemsize: int
    bytes_per_s: float
    reached: Efficiency
    asynchronous: bool
    attention_factors: tuple[float, float] = (1.0, 1.0)
    guessed: bool = False


def speeds(
    device: Device,
    dtype: str,
    product_dtype: str = "",
    attention_factors: tuple[float, float] = (1.0, 1.0),
) -> Speeds:
    """The speeds of a device that computes in `dtype`, and in `product_dtype` where layers multiply matrices."""
    core = device.kind == "cpu"
    usual_flops, usual_bytes = _CORE if core else _ACCELERATOR
    reached = device.efficiency or (_REACHED_CORE if core else _REACHED)
    peaks = device.peak_flops_per_s
    # A dtype without a path of its own runs as float32 does.
    peak = peaks.get(dtype) or peaks.get("float32") or max(peaks.values(), default=usual_flops)
    plain = product = peak * _share(reached, dtype)
    size = float(DTYPE_BYTES[dtype])
    if product_dtype and product_dtype in peaks:
        narrow = peaks[product_dtype] * _share(reached, product_dtype)
        wide = _WIDE_SHARE.get(product_dtype, 0.0)
        product = 1 / ((1 - wide) / narrow + wide / plain)
        size = _PRODUCT_BYTES.get(product_dtype, size)
    return Speeds(
        flops_per_s=peak,
        product_flops_per_s=product,
        plain_flops_per_s=plain,
        product_bytes=size,
        itemsize=DTYPE_BYTES[dtype],
        bytes_per_s=(device.memory_bytes_per_s or usual_bytes) * reached.memory,
        reached=reached,
        asynchronous=not core,
        attention_factors=attention_factors,
        guessed=not peaks,
    )


def _share(reached: Efficiency, dtype: str) -> float:
    known = reached.products
    return known.get(dtype) or known.get("bfloat16") or known.get("float32") or max(known.values())


def block_work(
    block: BlockSpec,
    microbatch: int,
    speed: Speeds,
    *,
    imbalance: float = 1.0,
    element_factors: tuple[float, float] = (1.0, 1.0),
) -> BlockWork:
    """What a block's compute takes for `microbatch` sequences.

    Args:
        imbalance: rows of the busiest rank's experts over the mean.
        element_factors: what memory-bound operations move over what is counted, forward and backward.
    """
    started, reached = speed.reached.kernel_s, speed.reached
    forward = inward = weight = 0.0
    for product in block.products:
        rows = product.rows * microbatch * (imbalance if product.experts else 1.0)
        one = _product(product, rows, speed, head=block.kind == "head")
        forward, inward, weight = forward + one.forward, inward + one.input, weight + one.weight
    attend = back = 0.0
    for work in block.attention:
        seen = 1 - work.causal_flops / work.flops if work.flops else 0.0
        peak, factors = speed.flops_per_s, speed.attention_factors
        attend += microbatch * work.flops * seen / (peak * factors[0] * reached.attention)
        back += microbatch * work.backward_flops * seen / (peak * factors[1] * reached.backward_attention)
    if not block.products and block.forward_flops:  # known by its flops alone
        known = microbatch / speed.plain_flops_per_s
        forward = (block.forward_flops - block.causal_flops) * known
        backward = block.backward_flops * known * (1 - block.causal_flops / block.forward_flops)
        inward, weight = backward / 2, backward / 2
    moved = (block.element_bytes, block.backward_element_bytes)
    if not block.products and not block.element_bytes:
        moved = (block.moved_bytes - block.weight_bytes, 2 * (block.moved_bytes - block.weight_bytes))
    # The gradient of a vocabulary's matrix is written, and that of a tied one added, once whatever the sequences.
    once = speed.itemsize * (block.parameters * (block.kind == "embedding") + 3 * block.tied_parameters)
    once = min(once, moved[1])
    onward = microbatch * moved[0] * element_factors[0]
    backward_bytes = once + microbatch * (moved[1] - once) * element_factors[1]
    return BlockWork(
        Phases(forward, inward, weight),
        Phases(attend, back, 0.0),
        Phases(
            onward / speed.bytes_per_s + block.kernels * started,
            backward_bytes / speed.bytes_per_s + block.backward_kernels * started,
            0.0,
        ),
    )


def _product(product: Product, rows: float, speed: Speeds, *, head: bool) -> Phases:
    """A product's forward, the gradient of its rows, and that of the other factor."""
    m, k, n, groups = rows / product.groups, product.inner, product.columns, product.groups
    rate = speed.plain_flops_per_s if head else speed.product_flops_per_s
    size = speed.itemsize if head else speed.product_bytes
    args = (groups, rate, size, speed)
    forward, inward, other = _multiply(m, k, n, *args), _multiply(m, n, k, *args), _multiply(k, m, n, *args)
    if size < speed.itemsize:
        # Narrow factors are made first: read for their largest value, read again, written as they are and transposed.
        # Those of weights are made once a step.
        each = groups * (2 * speed.itemsize + 2 * size) / speed.bytes_per_s
        forward, inward = forward + m * k * each, inward + m * n * each
    return Phases(forward, inward, other) if product.weighted else Phases(forward, inward + other, 0.0)


@lru_cache(maxsize=65536)
def _multiply(m: float, k: float, n: float, groups: int, rate: float, size: float, speed: Speeds) -> float:
    """Seconds of `groups` products of m x k by k x n."""
    reached = speed.reached
    share = k / (k + reached.half_inner)
    if speed.asynchronous:
        if k % _ALIGNMENT or n % _ALIGNMENT:
            share *= _UNALIGNED
        share *= _waves(m, n, groups, reached)
    bound = 2 * m * k * n * groups / (rate * share)
    moved = groups * (m * k + k * n + m * n) * size / speed.bytes_per_s
    return max(bound, moved)


def _waves(m: float, n: float, groups: int, reached: Efficiency) -> float:
    """The share of the device that works while the output tiles of a product are made."""
    if not reached.multiprocessors:
        return 1.0
    tile, devices = reached.tile, reached.multiprocessors
    long = 2 * tile if min(m, n) >= 2 * tile else tile  # libraries take tiles of 256 x 128 where they can
    tiles = groups * (-(-m // long)) * (-(-n // tile))
    if tiles < devices:
        return 1.0  # a library splits the inner dim over what would be idle
    return groups * m * n / (-(-tiles // devices) * devices * long * tile)
