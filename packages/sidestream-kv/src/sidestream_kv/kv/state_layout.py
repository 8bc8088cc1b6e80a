"""Byte layout of recurrent states: one contiguous span for each state, which holds the tensors of all layers with
recurrent state.

A state has a constant size, whatever the length of its sequence. Knows sizes only, never a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from sidestream_kv.kv.layout import DTYPE_BYTES

RESERVED_STATES = 2
"""Number of states that belong to no sequence: a state of zeros, and a scratch state that padding writes."""

_ALIGNMENT = 256
_ELEMENT_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a state.

    layer   number of its layer in the model
    kind    `"conv"` (the last inputs of a convolution) or `"recurrent"`
    index   number of the tensor among those of the same kind in the layer
    shape   shape for one sequence
    dtype   `"float32"`, `"float16"` or `"bfloat16"`
    """

    layer: int
    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor for one sequence."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The tensors of one state, in the order of their bytes; each begins at a multiple of 256 bytes. After them comes
    the number of tokens that the state covers, an int64.

    input_size       number of elements of a layer's input for one token
    input_dtype      dtype of a layer's input
    offsets          first byte of each tensor
    covered_offset   first byte of the number of tokens
    state_bytes      bytes of a whole state
    """

    tensors: tuple[StateTensor, ...]
    input_size: int
    input_dtype: str
    offsets: tuple[int, ...] = field(init=False)
    covered_offset: int = field(init=False)
    state_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        offsets, end = [], 0
        for tensor in self.tensors:
            offsets.append(end)
            end += -(-tensor.num_bytes // _ALIGNMENT) * _ALIGNMENT
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "covered_offset", end)
        object.__setattr__(self, "state_bytes", end + _ALIGNMENT)

    @property
    def layers(self) -> Sequence[int]:
        """The layers with recurrent state, in order."""
        return sorted({tensor.layer for tensor in self.tensors})

    def draft_bytes(self, num_slots: int, max_drafts: int) -> int:
        """Bytes of the memory that keeps the layers' inputs of draft tokens. The next step replays the accepted ones to
        update the states.
        """
        return len(self.layers) * num_slots * max_drafts * self.input_size * DTYPE_BYTES[self.input_dtype]

    def describe(self) -> dict[str, str]:
        """The layout as plain values, for keys, directories and messages."""
        return {
            f"layer {tensor.layer} {tensor.kind} {tensor.index}": f"{'x'.join(map(str, tensor.shape))} {tensor.dtype}"
            for tensor in self.tensors
        }


@dataclass(frozen=True, slots=True)
class StateRegion:
    """The part of the block pool's memory that holds recurrent states, after the blocks. A state takes whole blocks, so
    that stores and loads copy it like KV blocks. The end of its last block may be unused.

    num_blocks         number of blocks before the region: the blocks of the pool, and the scratch block if there is
                       one. For alignment, some unused blocks may follow
    num_states         number of states that requests can lease; the reserved states follow them
    blocks_per_state   number of blocks that one state takes
    first_block        number of the first block of state 0
    """

    layout: StateLayout
    block_bytes: int
    num_blocks: int
    num_states: int
    blocks_per_state: int = field(init=False)
    first_block: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks_per_state", blocks_per_state(self.layout, self.block_bytes))
        aligned = _blocks_of_alignment(self.block_bytes)
        object.__setattr__(self, "first_block", -(-self.num_blocks // aligned) * aligned)

    @property
    def state_bytes(self) -> int:
        """Bytes from the start of one state to the start of the next."""
        return self.blocks_per_state * self.block_bytes

    @property
    def first_byte(self) -> int:
        """First byte of the region."""
        return self.first_block * self.block_bytes

    @property
    def stop_byte(self) -> int:
        """End of the region, and of the memory."""
        return self.first_byte + (self.num_states + RESERVED_STATES) * self.state_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the reserved states, and of the blocks that are unused for alignment."""
        return RESERVED_STATES * self.state_bytes + (self.first_block - self.num_blocks) * self.block_bytes

    def block_ids(self, state_id: int) -> range:
        """Ids of the blocks that a state takes."""
        first = self.first_block + state_id * self.blocks_per_state
        return range(first, first + self.blocks_per_state)

    @property
    def zero(self) -> int:
        """The reserved state of zeros, with which sequences begin."""
        return self.num_states

    @property
    def scratch(self) -> int:
        """The reserved state that padding and rows without a checkpoint write."""
        return self.num_states + 1

    def span(self, state_id: int) -> tuple[int, int]:
        """Byte range of a state in the memory."""
        start = self.first_byte + state_id * self.state_bytes
        return start, start + self.state_bytes


def blocks_per_state(layout: StateLayout, block_bytes: int) -> int:
    """Whole blocks that one state takes, so that every state is aligned."""
    aligned = _blocks_of_alignment(block_bytes)
    return -(-layout.state_bytes // (block_bytes * aligned)) * aligned


def _blocks_of_alignment(block_bytes: int) -> int:
    """The smallest number of blocks whose bytes are a multiple of the alignment of every element type."""
    return _ELEMENT_ALIGNMENT // math.gcd(_ELEMENT_ALIGNMENT, block_bytes)
