"""Recurrent states of a packed batch: where each row's state is read, and where it is written.

A state is never changed in place unless its row owns it alone: a row may read a shared checkpoint and write a state of
its own. Knows nothing of requests or streams; used by the thread, and on the stream, that owns the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from sidestream.device.kinds import on_host
from sidestream.errors import InvariantError
from sidestream.kv.state_layout import RESERVED_STATES, StateLayout, StateTensor

Part = tuple[str, int]
"""Kind and index of a state's tensor in its layer, see `StateTensor`."""


class StatePool:
    """Views of a memory that holds states, by layer.

    The last two states belong to no sequence: `zero`, which is all zeros and is read by rows at position 0, and
    `scratch`, which padding writes.
    """

    def __init__(self, memory: torch.Tensor, layout: StateLayout, *, state_bytes: int | None = None) -> None:
        """memory        uint8; as many whole states as fit
        state_bytes   from one state to the next; None: states lie close together
        """
        self.layout = layout
        self.device = memory.device
        self._state_bytes = state_bytes or layout.state_bytes
        self.num_states = len(memory) // self._state_bytes
        self.zero, self.scratch = self.num_states - RESERVED_STATES, self.num_states - 1
        self._layers: dict[int, dict[Part, torch.Tensor]] = {}
        for tensor, offset in zip(layout.tensors, layout.offsets, strict=True):
            view = self._view(memory[: self.num_states * self._state_bytes], tensor, offset)
            self._layers.setdefault(tensor.layer, {})[tensor.kind, tensor.index] = view
        whole = memory[: self.num_states * self._state_bytes].view(self.num_states, -1)
        self.covered = whole[:, layout.covered_offset : layout.covered_offset + 8].view(torch.int64)[:, 0]
        """int64 [states]: number of tokens that each state covers, written by the step that made it."""
        whole[self.zero].zero_()

    def layer(self, layer: int) -> Mapping[Part, torch.Tensor]:
        """The tensors of all states in one layer: each `[states, *shape]`."""
        return self._layers[layer]

    def batch(
        self,
        reads: torch.Tensor,
        writes: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        kv_lens: torch.Tensor,
        num_decode: int,
        chunk_lens: Sequence[int],
    ) -> StateBatch:
        """The states of a step. B rows.

        reads, writes     int64 [B]; a negative read means that the sequence begins, a negative write padding
        cu_seqlens_q      int64 [B + 1]: start of each row in the packed tokens, and the end of the last row
        kv_lens           int64 [B]: tokens of each row's sequence, including this step's

        On a host, raises InvariantError if a state covers other tokens than those before its row. On a GPU nothing can
        be raised: `StateBatch.finish` makes the row's logits NaN.
        """
        reads = torch.where(reads < 0, self.zero, reads)
        writes = torch.where(writes < 0, self.scratch, writes)
        starts, covered = kv_lens - cu_seqlens_q.diff(), self.covered[reads]
        wrong = covered != starts  # rule: state-covers-what-is-before-its-row
        if on_host(self.device) and bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise InvariantError(
                f"row {row} begins at token {int(starts[row])}, its state {int(reads[row])} covers {int(covered[row])}"
            )
        return StateBatch(self, reads, writes, chunk_lens, num_decode, kv_lens, cu_seqlens_q, wrong)

    def _view(self, memory: torch.Tensor, tensor: StateTensor, offset: int) -> torch.Tensor:
        typed = memory.view(getattr(torch, tensor.dtype))
        size, strides = typed.element_size(), [1]
        for length in reversed(tensor.shape[1:]):
            strides.insert(0, strides[0] * length)
        step = self._state_bytes // size
        place = typed.storage_offset() + offset // size
        return typed.as_strided((self.num_states, *tensor.shape), (step, *strides), place)


@dataclass(frozen=True, slots=True, eq=False)
class StateBatch:
    """The states of one step's rows. B rows, decode rows with one token each first.

    reads, writes   int64 [B]: the state that each row continues from, and the one that it leaves
    chunk_lens      tokens of each row after the decode rows
    num_decode      the first num_decode rows have one token each
    kv_lens         int64 [B]: tokens that each row's new state covers
    cu_seqlens_q    int64 [B + 1]
    wrong           bool [B]: the state that the row reads covers other tokens than those before the row
    """

    pool: StatePool
    reads: torch.Tensor
    writes: torch.Tensor
    chunk_lens: Sequence[int]
    num_decode: int
    kv_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    wrong: torch.Tensor

    def groups(self) -> Iterator[tuple[slice, slice]]:
        """Rows that are computed together, all with as many tokens, and their packed tokens."""
        if self.num_decode:
            yield slice(0, self.num_decode), slice(0, self.num_decode)
        begin = self.num_decode
        for row, length in enumerate(self.chunk_lens, self.num_decode):
            yield slice(row, row + 1), slice(begin, begin + length)
            begin += length

    def finish(self, logits: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        """Note how many tokens the written states cover, after the model. Returns the logits `[N, vocab_size]`, NaN in
        rows whose state was wrong; `logits_indices` int64 [N] are their packed positions.
        """
        self.pool.covered.index_copy_(0, self.writes, self.kv_lens)
        if on_host(self.pool.device):
            return logits
        rows = torch.searchsorted(self.cu_seqlens_q, logits_indices, right=True) - 1
        rows = rows.clamp(max=len(self.wrong) - 1)  # padding, which is in no row
        return logits.masked_fill(self.wrong[rows].unsqueeze(1), float("nan"))
