"""The sampling options of all request slots, as one tensor on the device. Sampling then reads only device state, so a
CUDA graph can capture it. A request slot is a request's index in the tensors of device state.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sidestream.config import SAMPLING_OPTIONS, SamplingParams
from sidestream.types import SamplingSpec

COLUMNS: Mapping[str, int] = {
    name: column for column, name in enumerate((*SAMPLING_OPTIONS, "penalised", "seed", "prompt_len"))
}
"""Column of each sampling option in `SamplingTensors.numbers`, and of three other numbers that sampling needs."""

_MASK = (1 << 64) - 1
# The constants of splitmix64, a hash function.
GOLDEN, MULTIPLIER_1, MULTIPLIER_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, slots=True, eq=False)
class SamplingTensors:
    """One row of numbers for each request slot, with one column for each name in `COLUMNS`.

    numbers   int64 `[rows, len(COLUMNS)]`. An option that takes whole numbers is stored as an int64, any other option
              as the bits of a float64. Temperature is 0 for every greedy request
    """

    numbers: Tensor

    @classmethod
    def greedy(cls, rows: int, device: torch.device) -> SamplingTensors:
        """Rows with the options of greedy sampling."""
        spec = SamplingParams(temperature=0).spec(seed=0, eos_ids=())
        return cls(torch.tensor([sampling_row(spec, prompt_len=0)] * rows).to(device))

    def __getitem__(self, option: str) -> Tensor:
        """One option's column, `[rows]`: int64 if it takes whole numbers, else float64."""
        whole = SAMPLING_OPTIONS[option].kind is int
        return (self.numbers if whole else self.numbers.view(torch.float64))[:, COLUMNS[option]]

    @property
    def penalised(self) -> Tensor:
        """Bool `[rows]`: whether the request has a penalty, so that sampling depends on earlier tokens."""
        return self.numbers[:, COLUMNS["penalised"]] != 0

    @property
    def seed(self) -> Tensor:
        """int64 `[rows]`: a hash of the request's seed, from which its random numbers are made."""
        return self.numbers[:, COLUMNS["seed"]]

    @property
    def prompt_len(self) -> Tensor:
        """int64 `[rows]`: number of prompt tokens of the row."""
        return self.numbers[:, COLUMNS["prompt_len"]]


def sampling_row(spec: SamplingSpec, *, prompt_len: int) -> tuple[int, ...]:
    """The numbers of one request slot, in the order of `COLUMNS`."""
    options = {**spec.options, "temperature": 0.0} if spec.greedy else spec.options
    return (
        *(
            int(options[name]) if option.kind is int else _bits(options[name])
            for name, option in SAMPLING_OPTIONS.items()
        ),
        _bits(spec.penalised),  # True has bits that are not 0, whether they are read as an int64 or as a float64
        _signed(_mix(spec.seed & _MASK)),
        prompt_len,
    )


def uniforms(seeds: Tensor, output_indices: Tensor) -> Tensor:
    """One random number for each sampled token, float64 `[R]`: a multiple of 2**-53 in [0, 1).

    seeds            hashed seeds (`SamplingTensors.seed`), int64 `[R]`
    output_indices   index of the sampled token among the request's outputs, int64 `[R]`

    The number is a hash of seed and index by splitmix64 (Steele et al. 2014). The seed is hashed before the index is
    added, so neighbouring seeds do not share a sequence.
    """
    value = seeds + output_indices * _signed(GOLDEN) + _signed(GOLDEN)
    value = (value ^ _shifted_right(value, 30)) * _signed(MULTIPLIER_1)
    value = (value ^ _shifted_right(value, 27)) * _signed(MULTIPLIER_2)
    value = value ^ _shifted_right(value, 31)
    return _shifted_right(value, 11).to(torch.float64) * 2.0**-53


def _bits(value: float) -> int:
    return int.from_bytes(struct.pack("<d", value), "little", signed=True)


def _mix(value: int) -> int:
    value = (value + GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * MULTIPLIER_1) & _MASK
    value = ((value ^ (value >> 27)) * MULTIPLIER_2) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    """The signed 64-bit number with the same bits."""
    return value - (1 << 64) if value >> 63 else value


def _shifted_right(value: Tensor, bits: int) -> Tensor:
    """A logical shift to the right: zeros come in from the left."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
