"""Gradients over the tensor-parallel ranks: shares are summed, and what all ranks hold is looked at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from meshwright.errors import ConfigError
from meshwright.runtime.cuts import Cuts
from meshwright.runtime.tp.communicate import Wire

__all__ = ["compare_copies", "sum_shares"]

#: Gradients of what every rank computes alike differ by rounding at most; shares of heads or tokens by far more.
_ALIKE = 1e-2


def sum_shares(gradients: Mapping[str, torch.Tensor], cuts: Cuts, wire: Wire) -> None:
    """Sum the gradients of copies that are each only a share, in place: norms of heads or of cut sequences, key/value
    heads with fewer than one for each rank.

    One all-reduce for each dtype; copies of different slices lie in it beside each other.
    """
    by_dtype: dict[torch.dtype, list[tuple[torch.Tensor, int, int]]] = {}
    for name, gradient in gradients.items():
        cut = cuts.get(name)
        if cut is not None and cut.partial:
            firsts = sorted({cut.holders(rank)[0] for rank in range(wire.size)})
            entry = (gradient, firsts.index(cut.holders(wire.rank)[0]), len(firsts))
            by_dtype.setdefault(gradient.dtype, []).append(entry)
    for dtype, entries in by_dtype.items():
        flat = torch.zeros(sum(g.numel() * slots for g, _, slots in entries), dtype=dtype, device=entries[0][0].device)
        places, at = [], 0
        for gradient, slot, slots in entries:
            place = flat[at + slot * gradient.numel() : at + (slot + 1) * gradient.numel()].view_as(gradient)
            place.copy_(gradient)
            places.append(place)
            at += slots * gradient.numel()
        wire.traffic.count("tp_all_reduce")
        dist.all_reduce(flat, group=wire.group)
        for (gradient, _, _), place in zip(entries, places, strict=True):
            gradient.copy_(place)


def compare_copies(gradients: Mapping[str, torch.Tensor], cuts: Cuts, wire: Wire) -> ConfigError | None:
    """Before shares are summed, once: whether replicated parameters have the gradients that the plan says.

    Those that every rank computes alike must be equal on all; shares must not. What is wrong, the same on every rank.
    """
    names = [name for name in gradients if name in cuts and cuts[name].replicated]
    norms = torch.zeros(wire.size, len(names), dtype=torch.float64)
    for index, name in enumerate(names):
        norms[wire.rank, index] = torch.linalg.vector_norm(gradients[name].detach(), dtype=torch.float64)
    device = next(iter(gradients.values())).device if gradients else torch.device("cpu")
    norms = norms.to(device)
    dist.all_reduce(norms, group=wire.group)
    found = list(zip(names, norms.amax(0).tolist(), norms.amin(0).tolist(), strict=True))
    for name, high, low in found:
        if not cuts[name].partial and high - low > _ALIKE * high:
            return ConfigError(
                f"the gradient of {name} is another on each tensor-parallel rank (norms {low:.4g} to {high:.4g})",
                why="it stands between divided matrices, and each rank's is the share of its own heads or channels",
                fix=f'annotate its module: sharding={{"{name.rpartition(".")[0]}": "replicated_with_grad_allreduce"}}',
            )
    shares = [(name, high, high == low) for name, high, low in found if cuts[name].partial and high > 0]
    if len({same for _, _, same in shares}) == 2:  # where all are the same, all tokens are
        name, high, _ = next(share for share in shares if share[2])
        return ConfigError(
            f"the gradient of {name} is the same on all tensor-parallel ranks (norm {high:.4g})",
            why="it is taken for the sum of shares, of heads or of tokens, and would be counted once for each rank",
            fix=f'annotate its module: sharding={{"{name.rpartition(".")[0]}": "replicate"}}',
        )
    return None
