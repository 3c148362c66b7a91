"""How few attention heads a small copy may have: so that tensor parallelism divides them as it does the model's own."""

from __future__ import annotations

from itertools import product

__all__ = ["few_heads"]

#: Heads of a copy without groups, and of one with a single group; they divide neither 2 nor 4 ranks.
_FEW = 3
#: Query heads to a key/value head at most, where there are several of these.
_MOST_OF_A_GROUP = 8


def few_heads(heads: int, groups: int, tp: int) -> tuple[int, int]:
    """Query heads and key/value heads of a small copy.

    They keep their ratio where it is small, and `tp` ranks divide them, copy key/value heads or pick them as they
    would in the whole model.

    Args:
        heads: of the model; `tp` divides them.
        groups: its key/value heads.
        tp: tensor-parallel ranks.
    """
    if groups == heads:
        few = min(heads, -(-_FEW // tp) * tp)
        return few, few
    ratio = max(1, heads // groups)
    wanted = min(ratio, _MOST_OF_A_GROUP if groups > 1 else _FEW)
    ratios = sorted(range(min(2, ratio), max(ratio, tp) + 1), key=lambda one: (abs(one - wanted), one))
    # Few key/value heads are kept before the ratio is, which only changes where `tp` does not divide the product.
    for few_groups, few in product(range(min(groups, 2), groups + 1), ratios):
        if few_groups * few % tp == 0 and few_groups * few <= heads and _alike(groups, few_groups, tp):
            return few_groups * few, few_groups
    return heads, groups


def _alike(groups: int, few: int, tp: int) -> bool:
    return _way(groups, tp) == _way(few, tp)


def _way(groups: int, tp: int) -> str:
    """How key/value heads lie over the ranks."""
    if groups % tp == 0:
        return "divided"
    return "copied" if tp % groups == 0 else "picked"
