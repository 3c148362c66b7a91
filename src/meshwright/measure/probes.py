"""What one rank measures while the other ranks of its machine do the same: products, attention, memory, messages, disk.

Every probe takes a few hundredths of a second and is repeated by rounds, so that a burst of other work spoils a round
and not a figure.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.measure._torch import TorchDispatchMode

__all__ = ["Sizes", "probes"]

#: Seconds and what was done in them, by the name of a cell: each probe fills some.
Cells = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured; `tiny` is for tests of the machinery."""

    products: tuple[tuple[int, int, int], ...]
    attention: tuple[tuple[int, int, int, int], ...]
    tokens: int
    channels: int
    large_bytes: int
    messages: tuple[int, ...]
    disk_bytes: int
    dtypes: tuple[str, ...]
    budget_s: float = 0.02

    @classmethod
    def of(cls, kind: str, *, tiny: bool = False) -> Sizes:
        """Those for a device kind: products (rows, inner, columns), attention (batch, heads, sequence, channels)."""
        if tiny:
            return cls(
                products=((32, 16, 32), (32, 64, 32)),
                attention=((1, 1, 32, 16),),
                tokens=32,
                channels=32,
                large_bytes=2**20,
                messages=(256, 4096, 16384, 65536, 2**18),
                disk_bytes=2**20,
                dtypes=("float32",),
                budget_s=0.001,
            )
        if kind == "cpu":
            return cls(
                products=((512, 64, 512), (512, 128, 384), (512, 256, 768), (256, 512, 512), (512, 1024, 1024)),
                attention=((2, 4, 128, 64), (2, 4, 512, 64), (1, 4, 1024, 64)),
                tokens=512,
                channels=512,
                large_bytes=64 * 2**20,
                messages=(2**10, 2**14, 2**17, 2**20, 2**22, 2**24),
                disk_bytes=128 * 2**20,
                dtypes=("float32", "bfloat16"),
            )
        return cls(
            products=((4096, 256, 4096), (4096, 1024, 4096), (8192, 4096, 4096), (8192, 8192, 8192)),
            attention=((4, 32, 2048, 128), (1, 32, 8192, 128)),
            tokens=8192,
            channels=4096,
            large_bytes=2**30,
            messages=(2**12, 2**16, 2**20, 2**23, 2**26, 2**28),
            disk_bytes=256 * 2**20,
            dtypes=("bfloat16", "float16", "float32"),
        )


class _Clock:
    """Seconds of a call: the mean of as many as fit into the budget.

    On a CPU they are those of this process's own work, so that other work on the machine does not count; on an
    accelerator those until its queue is empty.
    """

    def __init__(self, device: torch.device, budget_s: float) -> None:
        self._device, self._budget_s = device, budget_s

    def now(self) -> float:
        """Seconds of work until now."""
        if self._device.type == "cpu":
            return time.process_time()
        torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def __call__(self, run: Callable[[], Any]) -> float:
        run()
        begin = self.now()
        run()
        once = max(self.now() - begin, 1e-6)
        count = max(1, min(2000, int(self._budget_s / once)))
        begin = self.now()
        for _ in range(count):
            run()
        return (self.now() - begin) / count


def probes(device: torch.device, sizes: Sizes, ranks: int) -> list[tuple[str, Callable[[], Cells]]]:
    """The probes of a round, by what they look at; all ranks of a machine call them in the same order.

    A cell's name holds what was done, its value is the seconds: `product float32 512 64 512 forward`.
    """
    clock = _Clock(device, sizes.budget_s)
    found: list[tuple[str, Callable[[], Cells]]] = [
        (f"matrix products, {dtype}", partial(_products, device, sizes, clock, dtype)) for dtype in sizes.dtypes
    ]
    found += [
        ("attention", lambda: _attention(device, sizes, clock)),
        ("memory", lambda: _memory(device, sizes, clock)),
        ("memory-bound operations", lambda: _elements(device, sizes, clock)),
    ]
    if device.type != "cpu":
        found.append(("host link", lambda: _host_link(device, sizes, clock)))
    if ranks > 1:
        found.append(("collectives", lambda: _collectives(device, sizes, ranks)))
    return found


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _products(device: torch.device, sizes: Sizes, clock: _Clock, dtype: str) -> Cells:
    """One product alone (the forward), and with the two of its backward."""
    cells: Cells = {}
    # Where a CPU has no instructions for a dtype one size tells that it is slow.
    few = sizes.products if dtype == sizes.dtypes[0] or device.type != "cpu" else sizes.products[2:3]
    for rows, inner, columns in few:
        x = torch.randn(rows, inner, device=device, dtype=getattr(torch, dtype), requires_grad=True)
        weight = torch.randn(columns, inner, device=device, dtype=x.dtype, requires_grad=True)
        gradient = torch.ones(rows, columns, device=device, dtype=x.dtype)
        cell = f"product {dtype} {rows} {inner} {columns}"
        with torch.no_grad():
            cells[f"{cell} forward"] = clock(partial(F.linear, x, weight))
        cells[f"{cell} both"] = clock(partial(_both, partial(F.linear, x, weight), (x, weight), gradient))
    return cells


def _attention(device: torch.device, sizes: Sizes, clock: _Clock) -> Cells:
    cells: Cells = {}
    for shape in sizes.attention:
        q, k, v = (torch.randn(shape, device=device, dtype=_dtype(device), requires_grad=True) for _ in range(3))
        gradient = torch.ones(shape, device=device, dtype=_dtype(device))
        cell = f"attention {str(_dtype(device)).removeprefix('torch.')} {' '.join(map(str, shape))}"
        attend = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        with torch.no_grad():
            cells[f"{cell} forward"] = clock(attend)
        cells[f"{cell} both"] = clock(partial(_both, attend, (q, k, v), gradient))
    return cells


def _both(forward: Callable[[], Tensor], inputs: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, ...]:
    """A forward and its backward."""
    return torch.autograd.grad(forward(), inputs, gradient)


def _memory(device: torch.device, sizes: Sizes, clock: _Clock) -> Cells:
    """An add of two large tensors into a third: three times its bytes go through memory."""
    a, b, out = (torch.ones(sizes.large_bytes // 4, device=device) for _ in range(3))
    return {f"memory {3 * sizes.large_bytes}": clock(lambda: torch.add(a, b, out=out))}


def _elements(device: torch.device, sizes: Sizes, clock: _Clock) -> Cells:
    """What stands between the products of a decoder's layer, and the layer, forward and backward: once of a working
    size, once tiny, where only starting operations takes time.

    The cell's name holds the bytes that its operations read and write, and how many they are.
    """
    kind = _dtype(device)
    cells: Cells = {}
    for name, tokens, channels in (("large", sizes.tokens, sizes.channels), ("tiny", 2, 16)):
        x, y = (torch.randn(1, tokens, channels, device=device, dtype=kind, requires_grad=True) for _ in range(2))
        weight = torch.ones(channels, device=device, dtype=kind, requires_grad=True)
        _both_ways(cells, f"elements {name}", partial(_between_products, y=y, weight=weight), [x, y, weight], clock)
    layer = _Layer(32, device, kind)
    x = torch.randn(1, 2, 32, device=device, dtype=kind, requires_grad=True)
    _both_ways(cells, "layer tiny", layer, [x, *layer.parameters()], clock)
    return cells


def _both_ways(cells: Cells, name: str, call: Callable[[Tensor], Tensor], given: list[Tensor], clock: _Clock) -> None:
    gradient = torch.ones_like(given[0])

    def run() -> None:
        torch.autograd.grad(call(given[0]), given, gradient)

    with _Counted() as counted:
        run()
    cells[f"{name} {counted.bytes} {counted.operations}"] = clock(run)


def _between_products(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm, a rotation of pairs, SwiGLU and a residual; [1, tokens, channels] each."""
    turned = _turned(_normed(x, weight) * y)
    return x + F.silu(turned) * y


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * 0.8 + torch.cat((-second, first), dim=-1) * 0.6


class _Layer(nn.Module):
    """A decoder's layer of PyTorch's parts: what starting its operations takes includes modules, views and autograd."""

    def __init__(self, channels: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        square = partial(nn.Linear, channels, channels, bias=False, device=device, dtype=dtype)
        self.qkv = nn.Linear(channels, 3 * channels, bias=False, device=device, dtype=dtype)
        self.out, self.gate, self.up, self.down = (square() for _ in range(4))
        self.before, self.between = (nn.Parameter(torch.ones(channels, device=device, dtype=dtype)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, channels] -> [B, S, channels]."""
        heads = (t.view(*x.shape[:-1], 2, -1).transpose(1, 2) for t in self.qkv(_normed(x, self.before)).chunk(3, -1))
        q, k, v = (_turned(t) for t in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = _normed(x, self.between)
        widened: Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + widened


class _Counted(TorchDispatchMode):
    """Counts operations that touch memory, and the bytes they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's is not annotated
        self.bytes, self.operations = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = list(_tensors(args))
        outputs = list(_tensors(out))
        storages = {tensor.untyped_storage()._cdata for tensor in given}
        if any(tensor.untyped_storage()._cdata not in storages for tensor in outputs):  # a view touches nothing
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in given + outputs)
            self.operations += 1
        return out


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _host_link(device: torch.device, sizes: Sizes, clock: _Clock) -> Cells:
    host = torch.ones(sizes.large_bytes // 4, pin_memory=True)
    there = torch.empty_like(host, device=device)
    small, small_there = host[:1], there[:1]
    return {
        f"to device {sizes.large_bytes}": clock(lambda: there.copy_(host, non_blocking=True)),
        f"to host {sizes.large_bytes}": clock(lambda: host.copy_(there, non_blocking=True)),
        "to device 4": clock(lambda: small_there.copy_(small)),
    }


def _collectives(device: torch.device, sizes: Sizes, ranks: int) -> Cells:
    """The collectives of a step, over the group and with the calls that the runtime uses; messages are whole.

    One at a time, each waited for: so tensor parallelism sends activations, and on a CPU ZeRO its units. The sizes
    reach from the few bytes of a loss to those of a large microbatch's residual stream.
    """
    cells: Cells = {}
    for size in sizes.messages:
        count = max(ranks, size // 4 // ranks * ranks)
        whole = torch.ones(count, device=device)
        part = torch.ones(count // ranks, device=device)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(dist.all_reduce, whole),
            "all_gather": partial(dist.all_gather_single, whole, part),
            "reduce_scatter": partial(dist.reduce_scatter_single, part, whole),
        }
        for kind, call in calls.items():
            cells[f"collective {kind} {4 * count}"] = _together(call, device)
    return cells


def _together(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a collective by the clock: the lower quartile of several, since other work can only delay it."""
    call()
    dist.barrier()
    seconds = []
    for _ in range(8):
        begin = _wall(device)
        call()
        seconds.append(_wall(device) - begin)
    return sorted(seconds)[len(seconds) // 4]


def _wall(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def disk(sizes: Sizes) -> Cells:
    """Write a file into the folder for temporary files, make it safe, read it back past the cache, remove it."""
    data = os.urandom(2**20)
    with tempfile.NamedTemporaryFile(prefix="meshwright-disk-") as file:
        begin = time.perf_counter()
        for _ in range(max(1, sizes.disk_bytes // len(data))):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - begin
        size = file.tell()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begin = time.perf_counter()
        while file.read(len(data)):
            pass
        return {f"disk write {size}": written, f"disk read {size}": time.perf_counter() - begin}
