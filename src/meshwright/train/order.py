"""The order of training samples: a pure function of (seed, sample number), the same for every layout of ranks."""

from __future__ import annotations

__all__ = ["SampleOrder", "permuted"]

_MASK = 2**64 - 1
_ROUNDS = 6


class SampleOrder:
    """Which window each sample of a run is: `order(n)` for the global sample number `n`.

    Samples are numbered from 0 over the whole run. Every epoch visits each of `windows` windows once, in an order of
    its own drawn from (seed, epoch). Nothing is stored, so any rank can ask for any sample, and a run that is resumed
    with other ranks goes on with the very sample it stopped before.
    """

    def __init__(self, windows: int, seed: int) -> None:
        self.windows = windows
        self.seed = seed

    def __call__(self, sample: int) -> int:
        epoch, position = divmod(sample, self.windows)
        return permuted(position, self.windows, _mix(_mix(self.seed & _MASK) ^ epoch))


def permuted(position: int, size: int, key: int) -> int:
    """Image of `position` under a permutation of `range(size)` chosen by `key` (64 bits).

    A balanced Feistel network over the smallest even number of bits that holds `size`, applied again while its result
    lies outside the range ("cycle walking", Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002). At most
    four applications on average.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mix(key ^ (right << 8 | turn)) & mask)
        position = left << half | right
        if position < size:
            return position


def _mix(value: int) -> int:
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014): 64 bits in, 64 well mixed bits out."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
