"""How rows draw, where the device finds it: so the next draw is made from device state alone, and may be
captured (P1).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from sidestream.types import SamplingSpec


class Rule(IntEnum):
    """The numbers of a row, in their order; see `Rules`."""

    TEMPERATURE = 0
    TOP_K = 1
    TOP_P = 2
    MIN_P = 3
    REPETITION = 4
    PRESENCE = 5
    FREQUENCY = 6
    SEED = 7
    PROMPT_LEN = 8


_MASK = (1 << 64) - 1
# Of splitmix64.
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """Of each row, `[rows]` each: columns of `numbers`, int64 `[rows, len(Rule)]`, some of which hold the bits of
    float64.

    temperature                         float64; 0: the likeliest token
    top_k                               int64; 0: all
    top_p, min_p                        float64; 1 and 0: all
    repetition, presence, frequency     float64, penalties; 1, 0 and 0: none
    seed                                int64, hashed
    prompt_len                          int64: tokens of the row that are no outputs
    """

    numbers: Tensor

    @classmethod
    def of_nobody(cls, rows: int, device: torch.device) -> Rules:
        """All of them take the likeliest token."""
        nobody = SamplingSpec(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, {}, 0, 0, (), -1)
        return cls(torch.tensor([rule_of(nobody, prompt_len=0)] * rows).to(device))

    @property
    def temperature(self) -> Tensor:
        """See the class; so are those below."""
        return self._real(Rule.TEMPERATURE)

    @property
    def top_k(self) -> Tensor:
        """Tokens that are kept."""
        return self.numbers[:, Rule.TOP_K]

    @property
    def top_p(self) -> Tensor:
        """Mass that is kept."""
        return self._real(Rule.TOP_P)

    @property
    def min_p(self) -> Tensor:
        """Share of the likeliest that is kept."""
        return self._real(Rule.MIN_P)

    @property
    def repetition(self) -> Tensor:
        """Divides what is positive and multiplies what is not."""
        return self._real(Rule.REPETITION)

    @property
    def presence(self) -> Tensor:
        """Subtracted once."""
        return self._real(Rule.PRESENCE)

    @property
    def frequency(self) -> Tensor:
        """Subtracted each time."""
        return self._real(Rule.FREQUENCY)

    @property
    def seed(self) -> Tensor:
        """Where a row's random numbers begin."""
        return self.numbers[:, Rule.SEED]

    @property
    def prompt_len(self) -> Tensor:
        """What positions of outputs are counted from."""
        return self.numbers[:, Rule.PROMPT_LEN]

    @property
    def penalised(self) -> Tensor:
        """Bool: whether a draw depends on the tokens before it."""
        return (self.repetition != 1) | (self.presence != 0) | (self.frequency != 0)

    def _real(self, column: int) -> Tensor:
        return self.numbers.view(torch.float64)[:, column]


def rule_of(spec: SamplingSpec, *, prompt_len: int) -> tuple[int, ...]:
    """A row's numbers."""
    return (
        _bits(0.0 if spec.greedy else spec.temperature),
        spec.top_k,
        *map(_bits, (spec.top_p, spec.min_p, spec.repetition_penalty, spec.presence_penalty, spec.frequency_penalty)),
        _signed(_mix(spec.seed & _MASK)),
        prompt_len,
    )


def uniforms(seeds: Tensor, output_indices: Tensor) -> Tensor:
    """The random numbers of draws, in [0, 1), multiples of 2**-53: float64 `[R]`, by hashed seed (`Rules.seed`) and
    number of the output, int64 `[R]`.

    Hash of both by splitmix64 (Steele et al. 2014). The seed is hashed before the index is added, so neighbouring seeds
    do not run along the same sequence.
    """
    value = seeds + output_indices * _signed(GOLDEN) + _signed(GOLDEN)
    value = (value ^ _shifted(value, 30)) * _signed(FIRST)
    value = (value ^ _shifted(value, 27)) * _signed(SECOND)
    value = value ^ _shifted(value, 31)
    return _shifted(value, 11).to(torch.float64) * 2.0**-53


def _bits(value: float) -> int:
    return int.from_bytes(struct.pack("<d", value), "little", signed=True)


def _mix(value: int) -> int:
    value = (value + GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * FIRST) & _MASK
    value = ((value ^ (value >> 27)) * SECOND) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    """The number of the same 64 bits as a tensor of int64 holds it, which wraps as well."""
    return value - (1 << 64) if value >> 63 else value


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Shifted right, with zeros from the left."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
