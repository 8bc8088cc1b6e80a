"""The mailbox: host memory to which steps deliver sampled tokens, log-probabilities and accept lengths. Each step
leases one entry.

Kernels on the compute stream write an entry, and the engine thread reads it after the step's fence. The copy engine is
not used, because results would wait there behind bulk transfers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sidestream.errors import InvariantError
from sidestream.runner.sampler import TOP_LOGPROBS, SamplerOutput
from sidestream.runner.second_run import Differences
from sidestream.runner.step_inputs import PromptPart
from sidestream.types import Result, RowResult, TokenLogprob
from sidestream_kv.device.base import Device, Memory, Stream
from sidestream_kv.kv.pool import FencedPool, Lease
from sidestream_kv.types import Access, Fence, Tracer

MEMORY = "mailbox"
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class _Field:
    """One array of an entry, `count` times `width` values. It begins at byte `start` of the entry. `count` is the
    largest number of logits, or of sampling rows, of a step.
    """

    start: int
    dtype: type[np.generic]
    width: int
    count: int


@dataclass(frozen=True, slots=True)
class MailboxEntry:
    """The part of the mailbox's `memory` that one step uses. `lease` ends when the results were read."""

    memory: str
    lease: Lease
    num_bytes: int

    @property
    def start(self) -> int:
        """First byte of the entry."""
        return self.lease.ids[0] * self.num_bytes  # rule: mailbox-entries-do-not-overlap

    def access(self, *, write: bool) -> Access:
        """The whole entry, for the tracer."""
        return Access(self.memory, self.start, self.start + self.num_bytes, write)


class Compared(NamedTuple):
    """The comparison of a step's two runs, see `Differences`.

    kv          for each row, whether its KV differed
    logits      for each row of logits, whether they differed
    seconds     duration of the second run on the device
    """

    kv: tuple[bool, ...]
    logits: tuple[bool, ...]
    seconds: float


class Delivered(NamedTuple):
    """The results of a step.

    rows       one result for each sampling row, in order
    draft_s    duration of drafting; None: the step had no drafts
    verify_s   duration of the forward pass that verified the drafts; None: the step had no drafts
    compared   comparison of the step's two runs; None: it ran once
    """

    rows: Sequence[Result]
    draft_s: float | None = None
    verify_s: float | None = None
    compared: Compared | None = None


class Mailbox:
    """Owner of the mailbox's entries, in host memory that the device writes."""

    def __init__(
        self,
        num_entries: int,
        num_slots: int,
        vocab_size: int,
        device: Device,
        *,
        max_drafts: int = 0,
        prompt_logits: int = 0,
    ) -> None:
        """Allocates entries for steps of up to `num_slots` rows with up to `max_drafts` drafts each, and with
        log-probabilities of up to `prompt_logits` tokens of prompts.
        """
        self._tracer: Tracer | None = device.tracer
        self._pool = FencedPool("mailbox", num_entries, tracer=device.tracer)
        width = min(TOP_LOGPROBS, vocab_size)
        num_places = num_slots * (1 + max_drafts)
        layout: dict[str, tuple[type[np.generic], int, int]] = {
            "times": (np.int64, 1, 3),
            "second_run": (np.int64, 1, 2),
            "counts": (np.int64, 1, num_slots),
            "tokens": (np.int64, 1, num_places),
            "drafts": (np.int64, max_drafts, num_slots if max_drafts else 0),
            "top_ids": (np.int64, width, num_places),
            "prompt_ranks": (np.int64, 1, prompt_logits),
            "prompt_ids": (np.int64, width, prompt_logits),
            "prompt_drawn": (np.float32, 1, prompt_logits),
            "prompt_top": (np.float32, width, prompt_logits),
            "drawn": (np.float32, 1, num_places),
            "top": (np.float32, width, num_places),
            "finite": (np.bool_, 1, num_places),
            "kv_differs": (np.bool_, 1, num_slots),
            "logits_differ": (np.bool_, 1, num_places),
        }
        self._fields: dict[str, _Field] = {}
        start = 0
        for name, (dtype, width, count) in layout.items():  # 8-byte fields come first, so that every field is aligned
            self._fields[name] = _Field(start, dtype, width, count)
            start += np.dtype(dtype).itemsize * width * count
        self._entry_bytes = -(-start // _ALIGNMENT) * _ALIGNMENT
        self._memory: Memory = device.allocate_host(MEMORY, num_entries * self._entry_bytes)
        self._bytes: npt.NDArray[np.uint8] = self._memory.data.numpy()
        if device.tracer is not None:
            device.tracer.backed(self._pool.name, self._memory.name, self._entry_bytes)

    def take_entry(self) -> MailboxEntry:
        """Lease a free entry for a step that will be launched. Raises PoolExhausted if the results of too many steps
        are unread.
        """
        # rule: mailbox-entry-is-leased-until-read
        return MailboxEntry(self._memory.name, self._pool.take(1), self._entry_bytes)

    def write(
        self,
        start: int | Tensor,
        drawn: SamplerOutput,
        stream: Stream,
        *,
        counts: Tensor | None = None,
        times: Tensor | None = None,
    ) -> None:
        """Deliver a step's sampled tokens and, with drafts, the accept lengths of its sampling rows and
        `Proposed.times`. Called inside work of `stream`, the compute stream. `start`: first byte of the step's entry;
        for captured work, int64 `[1]` on the device. Tokens that a captured step samples at padding are not read.
        """
        values = {"tokens": drawn.tokens, "finite": drawn.finite}  # rule: non-finite-logits-are-reported
        if counts is not None:
            values["counts"] = counts
        if times is not None:
            values["times"] = times
        if drawn.logprobs is not None:
            values |= {"drawn": drawn.logprobs.drawn, "top_ids": drawn.logprobs.top_ids, "top": drawn.logprobs.top}
        self._write_fields(start, values, stream)

    def write_drafts(self, start: int, drafts: Tensor, stream: Stream) -> None:
        """Deliver the drafts of a step's decode rows, `[R, K]`, before it samples. Called inside work of `stream`, the
        compute stream.
        """
        self._write_fields(start, {"drafts": drafts}, stream)

    def read_drafts(self, entry: MailboxEntry, num_rows: int, draft_len: int, fence: Fence) -> list[list[int]]:
        """Read the drafts of a step's decode rows, after the fence of its forward pass. Engine thread only.
        `draft_len`: the K of `write_drafts`, which may be less than the largest number of drafts.
        """
        if not fence.poll():  # rule: drafts-are-read-after-their-pass
            raise InvariantError(f"the drafts were read before {fence!r}")
        if self._tracer is not None:
            self._tracer.host_touched(lambda: [entry.access(write=False)], "read drafts")
        values = self._values(entry, "drafts", num_rows).reshape(-1)[: num_rows * draft_len]
        drafts: list[list[int]] = values.reshape(num_rows, draft_len).tolist()
        return drafts

    def write_prompt(self, start: int, logprobs: Mapping[str, Tensor], stream: Stream) -> None:
        """Deliver log-probabilities of prompts, see `prompt_logprobs`. Called inside work of `stream`, the compute
        stream.
        """
        self._write_fields(start, logprobs, stream)

    def read_prompt(
        self, entry: MailboxEntry, parts: Sequence[PromptPart], fence: Fence
    ) -> Iterator[tuple[PromptPart, list[TokenLogprob]]]:
        """Read log-probabilities of the targets of each part. Engine thread only, after the fence and before `read`."""
        if not fence.poll():  # rule: log-probabilities-are-read-after-their-step
            raise InvariantError(f"log-probabilities of a prompt were read before {fence!r}")
        if self._tracer is not None:
            self._tracer.host_touched(lambda: [entry.access(write=False)], "read log-probabilities of a prompt")
        names = "prompt_drawn", "prompt_ids", "prompt_top", "prompt_ranks"
        count = sum(len(part.targets) for part in parts)
        values = zip(*(self._values(entry, name, count).tolist() for name in names), strict=True)
        for part in parts:
            yield (
                part,
                [
                    TokenLogprob(token, drawn, tuple(zip(ids[: part.top], top[: part.top], strict=True)), rank)
                    for token, ((drawn,), ids, top, (rank,)) in zip(part.targets, values, strict=False)
                ],
            )

    def write_differences(self, start: int, differences: Differences, stream: Stream) -> None:
        """Deliver the comparison of a step's two runs. Called inside work of `stream`, the compute stream."""
        values = {
            "second_run": differences.times,
            "kv_differs": differences.kv,
            "logits_differ": differences.logits,
        }
        self._write_fields(start, {name: tensor for name, tensor in values.items() if len(tensor)}, stream)

    def _write_fields(self, start: int | Tensor, values: Mapping[str, Tensor], stream: Stream) -> None:
        for name, tensor in values.items():
            field = self._fields[name]
            stream.deliver(tensor[: field.count], self._memory, start, further=field.start)

    def read(
        self,
        entry: MailboxEntry,
        drafts: Sequence[int],
        top_logprobs: Sequence[int],
        fence: Fence,
        *,
        compared_rows: int = 0,
        whole: bool = False,
    ) -> Delivered:
        """Read the results of a step, and end the lease. Called on the engine thread, after the step's fence.

        drafts         number of drafts of each sampling row; accept lengths are read only if there are drafts
        top_logprobs   requested number of log-probabilities of each sampling row (-1: none); empty: no row requested
                       any
        compared_rows  number of rows of a step that ran twice; 0: the step ran once
        whole          every result is a `RowResult`
        """
        if not fence.poll():  # rule: mailbox-is-read-after-its-step
            raise InvariantError(f"the mailbox was read before {fence!r}")
        if self._tracer is not None:
            self._tracer.host_touched(lambda: [entry.access(write=False)], "read mailbox")
        count, places = len(drafts), len(drafts) + sum(drafts)
        # rule: token-ids-are-read-whole
        tokens, finite = (
            self._values(entry, "tokens", places)[:, 0].tolist(),
            self._values(entry, "finite", places)[:, 0],
        )
        results: list[Result] = tokens
        # rule: host-reads-accept-lengths
        lengths = self._values(entry, "counts", count)[:, 0].tolist() if places > count else [1] * count
        if whole or places > count or top_logprobs or not finite.all():
            results = [*self._results(entry, drafts, lengths, top_logprobs or [-1] * count, tokens, finite.tolist())]
        draft_s = verify_s = None
        if places > count:
            begun, drafted, verified = self._values(entry, "times", 3)[:, 0].tolist()
            draft_s, verify_s = 1e-9 * (drafted - begun), 1e-9 * (verified - drafted)
        compared = self._compared(entry, compared_rows, places) if compared_rows else None
        entry.lease.release(after=(fence,))  # rule: read-mailbox-entry-is-released
        return Delivered(results, draft_s, verify_s, compared)

    def _compared(self, entry: MailboxEntry, rows: int, places: int) -> Compared:
        begun, ended = self._values(entry, "second_run", 2)[:, 0].tolist()
        kv = self._values(entry, "kv_differs", rows)[:, 0].tolist()
        logits = self._values(entry, "logits_differ", places)[:, 0].tolist()
        return Compared(tuple(kv), tuple(logits), 1e-9 * (ended - begun))

    def _results(
        self,
        entry: MailboxEntry,
        drafts: Sequence[int],
        lengths: Sequence[int],
        top_logprobs: Sequence[int],
        tokens: Sequence[int],
        finite: Sequence[bool],
    ) -> Iterator[RowResult]:
        """The result of each row: its tokens up to the first position whose logits are not finite, with
        log-probabilities.
        """
        at, places = 0, len(tokens)
        for row_drafts, length, wanted in zip(drafts, lengths, top_logprobs, strict=True):
            whole = all(finite[at : at + length])
            drawn = range(at, at + (length if whole else finite[at : at + length].index(False)))
            logprobs = (
                ()
                if wanted < 0
                else tuple(self._logprob(entry, place, tokens[place], wanted, places) for place in drawn)
            )
            yield RowResult(tuple(tokens[drawn.start : drawn.stop]), logprobs, whole)
            at += 1 + row_drafts

    def _logprob(self, entry: MailboxEntry, place: int, token: int, wanted: int, num_places: int) -> TokenLogprob:
        drawn, top_ids, top = (self._values(entry, name, num_places)[place] for name in ("drawn", "top_ids", "top"))
        return TokenLogprob(
            token, float(drawn[0]), tuple(zip(top_ids[:wanted].tolist(), top[:wanted].tolist(), strict=True))
        )

    def _values(self, entry: MailboxEntry, name: str, count: int) -> npt.NDArray[np.generic]:
        """A field's first `count` values, `[count, width]`."""
        field = self._fields[name]
        start = entry.start + field.start
        size = np.dtype(field.dtype).itemsize * field.width * count
        return self._bytes[start : start + size].view(field.dtype).reshape(count, field.width)
