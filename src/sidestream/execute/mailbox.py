"""Where a flight leaves what it drew, for the host to read after the flight's fence. Leased by the flight, fenced like all else.

The compute stream writes, the engine thread reads behind the fence; nothing is copied through a queue that bulk transfers use.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sidestream.device.base import Device, Memory
from sidestream.errors import InvariantError
from sidestream.execute.sample import Drawn
from sidestream.kv.pool import FencedPool, Lease
from sidestream.types import Access, Fence, RowPlan, RowResult, TokenLogprob, Witness

MAX_TOP_LOGPROBS = 20
MEMORY = "mailbox"
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class _Slot:
    """Arrays of one flight, by position among its sampling rows."""

    tokens: npt.NDArray[np.int64]
    finite: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int64]
    top_logprobs: npt.NDArray[np.float32]
    seconds: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Letter:
    """One flight's slot; `lease` ends when the flight was read."""

    lease: Lease
    slot: _Slot
    num_bytes: int

    def access(self, *, write: bool) -> Access:
        """The whole slot."""
        start = self.lease.ids[0] * self.num_bytes
        return Access(MEMORY, start, start + self.num_bytes, write)


class Mailbox:
    """A few slots, in host memory that the device writes, for the flights that are on their way."""

    def __init__(self, num_slots: int, num_rows: int, device: Device) -> None:
        self._witness: Witness | None = device.witness
        self._pool = FencedPool("mailbox", num_slots, witness=device.witness)
        self._slot_bytes = -(-sum(size for _, size in _fields(num_rows)) // _ALIGNMENT) * _ALIGNMENT
        memory = device.allocate_host(MEMORY, num_slots * self._slot_bytes)
        if device.witness is not None:
            device.witness.backed(self._pool.name, MEMORY, self._slot_bytes)
        self._slots = [_slot(memory, index * self._slot_bytes, num_rows) for index in range(num_slots)]

    def address(self) -> Letter:
        """A free slot for a flight about to be launched. Raises PoolExhausted when too many flights are unread."""
        lease = self._pool.take(1)
        return Letter(lease, self._slots[lease.ids[0]], self._slot_bytes)

    @staticmethod
    def write(letter: Letter, drawn: Drawn) -> None:
        """Deliver a flight's draws. On the compute stream."""
        count = drawn.tokens.shape[0]
        letter.slot.tokens[:count] = drawn.tokens.numpy()
        letter.slot.finite[:count] = drawn.finite.numpy()
        if drawn.logprobs is not None:
            width = drawn.logprobs.top_ids.shape[1]
            letter.slot.logprobs[:count] = drawn.logprobs.drawn.numpy()
            letter.slot.top_ids[:count, :width] = drawn.logprobs.top_ids.numpy()
            letter.slot.top_logprobs[:count, :width] = drawn.logprobs.top.numpy()

    def read(self, letter: Letter, rows: tuple[RowPlan, ...], top_logprobs: tuple[int, ...], fence: Fence) -> tuple[RowResult, ...]:
        """One result for each row that samples. On the engine thread, behind the flight's fence; ends the lease.

        `top_logprobs` by sampling row: -1 for a row that asked for none.
        """
        if not fence.poll():
            raise InvariantError(f"the mailbox was read before {fence!r}")
        if self._witness is not None:
            self._witness.host_touched(lambda: [letter.access(write=False)], "read mailbox")
        sampling = [row for row in rows if row.samples]
        slot = letter.slot
        results = []
        for at, (_, wanted) in enumerate(zip(sampling, top_logprobs, strict=True)):
            token = int(slot.tokens[at])
            logprob = None
            if wanted >= 0:
                top = zip(slot.top_ids[at, :wanted].tolist(), slot.top_logprobs[at, :wanted].tolist(), strict=True)
                logprob = TokenLogprob(token, float(slot.logprobs[at]), tuple(top))
            results.append(RowResult(token, logprob, bool(slot.finite[at])))
        letter.lease.release(after=(fence,))
        return tuple(results)


def _fields(num_rows: int) -> list[tuple[npt.DTypeLike, int]]:
    """Type and bytes of each array of a slot, tokens, top ids, seconds, logprobs, top logprobs, finite; the 8-byte ones first, so that all are aligned."""
    wide = num_rows * MAX_TOP_LOGPROBS
    wide_fields: list[tuple[npt.DTypeLike, int]] = [(np.int64, 8 * num_rows), (np.int64, 8 * wide), (np.float64, 8)]
    return [*wide_fields, (np.float32, 4 * num_rows), (np.float32, 4 * wide), (np.bool_, num_rows)]


def _slot(memory: Memory, start: int, num_rows: int) -> _Slot:
    arrays = []
    for dtype, num_bytes in _fields(num_rows):
        arrays.append(memory.data[start : start + num_bytes].numpy().view(dtype))
        start += num_bytes
    tokens, top_ids, seconds, logprobs, top_logprobs, finite = arrays
    by_row = (num_rows, MAX_TOP_LOGPROBS)
    return _Slot(tokens, finite, logprobs, top_ids.reshape(by_row), top_logprobs.reshape(by_row), seconds)
