"""Where a flight leaves what it drew, for the host to read after the flight's fence. Leased by the flight, fenced like all else.

The compute stream writes, the engine thread reads behind the fence; nothing is copied through a queue that bulk transfers use (P5).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sidestream.device.base import Device, Memory, Stream
from sidestream.errors import InvariantError
from sidestream.execute.sample import TOP_LOGPROBS, Drawn
from sidestream.kv.pool import FencedPool, Lease
from sidestream.types import Access, Fence, RowPlan, RowResult, TokenLogprob, Witness

MEMORY = "mailbox"
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class _Field:
    """One array of a slot: by position among the flight's sampling rows, `width` values each, `start` bytes into the slot."""

    start: int
    dtype: type[np.generic]
    width: int


@dataclass(frozen=True, slots=True)
class Letter:
    """One flight's slot; `lease` ends when the flight was read."""

    lease: Lease
    num_bytes: int

    @property
    def start(self) -> int:
        """First byte of the slot."""
        return self.lease.ids[0] * self.num_bytes

    def access(self, *, write: bool) -> Access:
        """The whole slot."""
        return Access(MEMORY, self.start, self.start + self.num_bytes, write)


class Mailbox:
    """A few slots, in host memory that the device writes, for the flights that are on their way."""

    def __init__(self, num_slots: int, num_rows: int, vocab_size: int, device: Device) -> None:
        self._witness: Witness | None = device.witness
        self._pool = FencedPool("mailbox", num_slots, witness=device.witness)
        width = min(TOP_LOGPROBS, vocab_size)
        layout = {
            "tokens": (np.int64, 1),
            "top_ids": (np.int64, width),
            "drawn": (np.float32, 1),
            "top": (np.float32, width),
            "finite": (np.bool_, 1),
        }
        self._fields: dict[str, _Field] = {}
        start = 0
        for name, (dtype, count) in layout.items():  # the 8-byte ones first, so that all are aligned
            self._fields[name] = _Field(start, dtype, count)
            start += np.dtype(dtype).itemsize * count * num_rows
        self._slot_bytes = -(-start // _ALIGNMENT) * _ALIGNMENT
        self._memory: Memory = device.allocate_host(MEMORY, num_slots * self._slot_bytes)
        self._bytes: npt.NDArray[np.uint8] = self._memory.data.numpy()
        if device.witness is not None:
            device.witness.backed(self._pool.name, MEMORY, self._slot_bytes)

    def address(self) -> Letter:
        """A free slot for a flight about to be launched. Raises PoolExhausted when too many flights are unread."""
        return Letter(self._pool.take(1), self._slot_bytes)

    def write(self, letter: Letter, drawn: Drawn, stream: Stream) -> None:
        """Deliver a flight's draws. Inside work of `stream`, the compute stream."""
        values = {"tokens": drawn.tokens, "finite": drawn.finite}
        if drawn.logprobs is not None:
            values |= {"drawn": drawn.logprobs.drawn, "top_ids": drawn.logprobs.top_ids, "top": drawn.logprobs.top}
        for name, tensor in values.items():
            stream.deliver(tensor, self._memory, letter.start + self._fields[name].start)

    def read(self, letter: Letter, rows: tuple[RowPlan, ...], top_logprobs: tuple[int, ...], fence: Fence) -> tuple[RowResult, ...]:
        """One result for each row that samples. On the engine thread, behind the flight's fence; ends the lease.

        `top_logprobs` by sampling row: -1 for a row that asked for none.
        """
        if not fence.poll():
            raise InvariantError(f"the mailbox was read before {fence!r}")
        if self._witness is not None:
            self._witness.host_touched(lambda: [letter.access(write=False)], "read mailbox")
        count = sum(row.samples for row in rows)
        tokens, finite = self._values(letter, "tokens", count), self._values(letter, "finite", count)
        if max(top_logprobs, default=-1) >= 0:
            drawn, top_ids, top = (self._values(letter, name, count) for name in ("drawn", "top_ids", "top"))
        results = []
        for at, wanted in enumerate(top_logprobs):
            token, logprob = int(tokens[at, 0]), None
            if wanted >= 0:
                likeliest = zip(top_ids[at, :wanted].tolist(), top[at, :wanted].tolist(), strict=True)
                logprob = TokenLogprob(token, float(drawn[at, 0]), tuple(likeliest))
            results.append(RowResult(token, logprob, bool(finite[at, 0])))
        letter.lease.release(after=(fence,))
        return tuple(results)

    def _values(self, letter: Letter, name: str, count: int) -> npt.NDArray[np.generic]:
        """A field's values for the first `count` sampling rows, `[count, width]`."""
        field = self._fields[name]
        start = letter.start + field.start
        size = np.dtype(field.dtype).itemsize * field.width * count
        return self._bytes[start : start + size].view(field.dtype).reshape(count, field.width)
