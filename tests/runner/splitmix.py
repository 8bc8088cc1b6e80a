"""Reference of `uniforms`: random numbers of samples, one by one, with integers of any size."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def uniform(seed: int, output_index: int) -> float:
    """That of one draw: splitmix64 (Steele et al. 2014) of the hashed seed, so many steps on."""
    return (_mix(_mix(seed & _MASK) + output_index * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
