"""Messages between stages: tensors from rank to rank, sent and received while ranks compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.runtime.collectives import Traffic

__all__ = ["Arriving", "Form", "Messages", "broadcast_tensors"]

#: Shape and dtype of a tensor.
Form = tuple[tuple[int, ...], torch.dtype]

_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
#: Numbers that tell the form of one tensor: its dtype, its dims, and their sizes.
_WIDTH = 10


@dataclass
class Arriving:
    """Tensors on their way to this rank."""

    tensors: list[torch.Tensor]
    works: list[dist.Work]

    def wait(self) -> list[torch.Tensor]:
        """They are there."""
        for work in self.works:
            work.wait()
        self.works = []
        return self.tensors


class Messages:
    """Sends and receives of a rank in its pipeline group; a rank does them in the order of its schedule.

    Args:
        group: the ranks of the pipeline, in order.
        device: of the tensors.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, traffic: Traffic) -> None:
        self._group, self._device, self._traffic = group, device, traffic
        self._leaving: dict[int, list[tuple[dist.Work, torch.Tensor]]] = {}

    def tell_forms(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> None:
        """Tell another rank the shapes and dtypes of what it will be sent."""
        self._send(_written([(tuple(t.shape), t.dtype) for t in tensors]).to(self._device), peer, tag)

    def learn_forms(self, count: int, peer: int, tag: int) -> list[Form]:
        """Wait for what another rank tells."""
        told = torch.zeros(count, _WIDTH, dtype=torch.int64, device=self._device)
        dist.recv(told, group=self._group, group_src=peer, tag=tag)
        return _read(told)

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> None:
        """Begin to send; the tensors stay alive until they have left: until the next are sent to the same rank.

        The ones before are waited for, as gloo tells of a send that it is done only to who waits. Ranks receive in the
        order of the schedule, which is free of deadlock even where each send waits for its receive.
        """
        self._wait(peer)
        if any(tensor.numel() for tensor in tensors):
            self._traffic.count("send")
        for number, tensor in enumerate(tensors):
            if tensor.numel():
                self._send(tensor.detach().contiguous(), peer, tag + number)

    def receive(self, forms: Sequence[Form], peer: int, tag: int) -> Arriving:
        """Begin to receive."""
        tensors = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in forms]
        if any(tensor.numel() for tensor in tensors):
            self._traffic.count("receive")
        works = []
        for number, tensor in enumerate(tensors):
            if tensor.numel():
                work = dist.irecv(tensor, group=self._group, group_src=peer, tag=tag + number)
                if work is not None:
                    works.append(work)
        return Arriving(tensors, works)

    def finish(self) -> None:
        """Wait until everything has left."""
        for peer in list(self._leaving):
            self._wait(peer)

    def _wait(self, peer: int) -> None:
        for work, _ in self._leaving.pop(peer, ()):
            work.wait()

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        work = dist.isend(tensor, group=self._group, group_dst=peer, tag=tag)
        if work is not None:
            self._leaving.setdefault(peer, []).append((work, tensor))


def broadcast_tensors(
    tensors: Sequence[torch.Tensor] | None, group: dist.ProcessGroup | None, source: int, device: torch.device
) -> list[torch.Tensor]:
    """Tensors of one rank of a group on all of them; the others give None and need know nothing of them."""
    count = torch.tensor([len(tensors) if tensors is not None else 0], device=device)
    dist.broadcast(count, group=group, group_src=source)
    if not int(count):
        return []
    told = torch.zeros(int(count), _WIDTH, dtype=torch.int64)
    if tensors is not None:
        told = _written([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
    told = told.to(device)
    dist.broadcast(told, group=group, group_src=source)
    found = []
    for number, (shape, dtype) in enumerate(_read(told)):
        given = tensors[number].detach().contiguous() if tensors is not None else None
        tensor = given if given is not None else torch.empty(shape, dtype=dtype, device=device)
        if tensor.numel():
            dist.broadcast(tensor, group=group, group_src=source)
        found.append(tensor)
    return found


def _written(forms: Sequence[Form]) -> torch.Tensor:
    told = torch.zeros(len(forms), _WIDTH, dtype=torch.int64)
    for row, (shape, dtype) in zip(told, forms, strict=True):
        row[0], row[1] = _DTYPES.index(dtype), len(shape)
        row[2 : 2 + len(shape)] = torch.tensor(shape, dtype=torch.int64)
    return told


def _read(told: torch.Tensor) -> list[Form]:
    return [(tuple(row[2 : 2 + row[1]]), _DTYPES[row[0]]) for row in told.tolist()]
