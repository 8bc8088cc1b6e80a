"""Where a flight leaves what it drew, for the host to read after the flight's fence. Leased by the flight, fenced like all else.

The compute stream writes, the engine thread reads behind the fence; nothing is copied through a queue that bulk transfers use.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sidestream.errors import InvariantError
from sidestream.execute.sample import Drawn
from sidestream.kv.pool import FencedPool, Lease
from sidestream.types import Fence, RowPlan, RowResult, TokenLogprob

MAX_TOP_LOGPROBS = 20


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


class Mailbox:
    """A few slots for the flights that are on their way."""

    def __init__(self, num_slots: int, num_rows: int) -> None:
        self._pool = FencedPool("mailbox", num_slots)
        self._slots = [
            _Slot(
                tokens=np.zeros(num_rows, np.int64),
                finite=np.zeros(num_rows, np.bool_),
                logprobs=np.zeros(num_rows, np.float32),
                top_ids=np.zeros((num_rows, MAX_TOP_LOGPROBS), np.int64),
                top_logprobs=np.zeros((num_rows, MAX_TOP_LOGPROBS), np.float32),
                seconds=np.zeros(1, np.float64),
            )
            for _ in range(num_slots)
        ]

    def address(self) -> Letter:
        """A free slot for a flight about to be launched. Raises PoolExhausted when too many flights are unread."""
        lease = self._pool.take(1)
        return Letter(lease, self._slots[lease.ids[0]])

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

    @staticmethod
    def read(letter: Letter, rows: tuple[RowPlan, ...], top_logprobs: tuple[int, ...], fence: Fence) -> tuple[RowResult, ...]:
        """One result for each row that samples. On the engine thread, behind the flight's fence; ends the lease.

        `top_logprobs` by sampling row: -1 for a row that asked for none.
        """
        if not fence.poll():
            raise InvariantError(f"the mailbox was read before {fence!r}")
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
