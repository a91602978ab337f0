"""Pseudo-random numbers as a hash of integers, equal in every process, on every machine and with every library version.
SplitMix (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195).

In: integers, or arrays of them. Out: well-mixed 64-bit numbers. Does not import torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_STEP = np.uint64(0x9E3779B97F4A7C15)


def sequence(first: int, count: int) -> np.ndarray:
    """Return the random numbers of the `count` integers from `first`: uint64 [count]."""
    with np.errstate(over="ignore"):
        return _finished(np.arange(first, first + count, dtype=np.uint64) * _STEP)


def mixed(*numbers: Any) -> np.ndarray:
    """Hash several numbers to one, elementwise for arrays: uint64. Inputs are taken modulo 2^64."""
    with np.errstate(over="ignore"):
        state: Any = _STEP
        for number in numbers:
            one = np.uint64(number % 2**64) if isinstance(number, int) else np.asarray(number).astype(np.uint64)
            state = _finished(np.asarray(state + one + _STEP))
    return state


def _finished(state: np.ndarray) -> np.ndarray:
    """SplitMix's finalizer; overflow is intended."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
