"""Counter-based random numbers: a function of (seed, position, purpose) and of nothing else."""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

# Philox4x32-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


class Purpose(enum.IntEnum):
    """What a number is for: each use has a stream of its own."""

    SAMPLE = 0


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Four 32-bit words for each counter and key; all are arrays of one shape that hold 32-bit values."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (right >> _WORD) ^ c1 ^ k0, right & _LOW, (left >> _WORD) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: list[int], positions: list[int], purpose: Purpose) -> npt.NDArray[np.float64]:
    """A number of 53 bits in [0, 1) for each pair of a 64-bit seed and a position."""
    seed = np.array(seeds, dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    counter = (position & _LOW, position >> _WORD, np.full_like(seed, purpose), np.zeros_like(seed))
    high, low, _, _ = philox4x32(counter, (seed & _LOW, seed >> _WORD))
    bits = ((high << _WORD) | low) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
