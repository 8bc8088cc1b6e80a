"""Fault injection: a tier whose reads and writes are slow, fail or return wrong bytes, and a stream that is blocked. A
fault is a function that replaces one read or write. Faults run on the tier's threads; any thread may set them. Every
wait has a time limit.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

import numpy as np

from sidestream.errors import TierCorrupt, TierError, TierFull
from sidestream_kv.device.base import Stream
from sidestream_kv.offload.tiers.base import Block, Entry, PersistentTier, TierIndex, TierStreams, WriteGrant
from sidestream_kv.types import Key

# An operation fails if its gate is not opened within this time, so that a faulty test does not hang.
_PATIENCE_S = 30.0

Fault = Callable[[Callable[[], None], Block], None]
"""A function that is called instead of a read or write. It receives the operation, which it may call, and the block of
the operation.
"""


def healthy(proceed: Callable[[], None], block: Block) -> None:
    """Run the operation unchanged."""
    proceed()


def full(proceed: Callable[[], None], block: Block) -> None:
    """Fail as if the medium was full; no byte is written."""
    raise TierFull("injected: no room")


def broken(proceed: Callable[[], None], block: Block) -> None:
    """Fail as if the medium was gone; no byte is read or written."""
    raise TierError("injected: the medium is gone")


def torn(proceed: Callable[[], None], block: Block) -> None:
    """A read that fills its buffer with wrong bytes, detects this, and fails."""
    proceed()
    data = np.frombuffer(block, np.uint8)
    data[: len(data) // 2] ^= 0xA5
    raise TierCorrupt("injected: the entry does not match its checksum")


def lying(proceed: Callable[[], None], block: Block) -> None:
    """A read that flips one bit without an error, which no tier may do. A test uses this fault to prove that its own
    comparison detects a single wrong bit.
    """
    proceed()
    np.frombuffer(block, np.uint8)[0] ^= 1


def slow(gate: threading.Event) -> Fault:
    """Make a fault that starts the operation when `gate` is open."""

    def fault(proceed: Callable[[], None], block: Block) -> None:
        _pass(gate)
        proceed()

    return fault


def late(gate: threading.Event) -> Fault:
    """Make a fault that runs the operation immediately, but returns only when `gate` is open."""

    def fault(proceed: Callable[[], None], block: Block) -> None:
        proceed()
        _pass(gate)

    return fault


def flapping(*faults: Fault) -> Fault:
    """Make a fault that applies the given faults in turn, repeatedly."""
    turns, lock = itertools.cycle(faults), threading.Lock()

    def fault(proceed: Callable[[], None], block: Block) -> None:
        with lock:
            turn = next(turns)
        turn(proceed, block)

    return fault


def failure_of(work: Callable[..., None], *arguments: object) -> Exception | None:
    """The error that a call raises."""
    try:
        work(*arguments)
    except TierError as error:
        return error
    return None


class FaultyTier:
    """Wraps a tier: `on_read` replaces every read, and `on_write` every write. Both may be changed at any time.

    reads, writes   keys of the started operations, in order
    streams         with `batch_bytes`, several blocks are one piece of work, and each has its own fault
    """

    def __init__(
        self,
        inner: PersistentTier,
        *,
        on_read: Fault = healthy,
        on_write: Fault = healthy,
        streams: TierStreams = TierStreams(),  # noqa: B008 - a frozen value
    ) -> None:
        self.streams = streams
        self.on_read = on_read
        self.on_write = on_write
        self.reads: list[Key] = []
        self.writes: list[Key] = []
        self._inner = inner

    @property
    def index(self) -> TierIndex:
        """The inner tier's index."""
        return self._inner.index

    def write(self, grant: WriteGrant, payload: Block) -> None:
        self.writes.append(grant.entry.key)
        self.on_write(lambda: self._inner.write(grant, payload), payload)

    def read(self, entry: Entry, out: Block) -> None:
        self.reads.append(entry.key)
        self.on_read(lambda: self._inner.read(entry, out), out)

    def write_all(self, grants: Sequence[WriteGrant], payloads: Sequence[Block]) -> list[Exception | None]:
        pairs = zip(grants, payloads, strict=True)
        return [failure_of(self.write, grant, payload) for grant, payload in pairs]

    def read_all(self, entries: Sequence[Entry], outs: Sequence[Block]) -> list[Exception | None]:
        return [failure_of(self.read, entry, out) for entry, out in zip(entries, outs, strict=True)]

    def refresh(self) -> None:
        if (refresh := getattr(self._inner, "refresh", None)) is not None:
            refresh()

    def close(self) -> None:
        self._inner.close()


class Hold:
    """Blocks streams until `release`: work that is submitted to them after the construction waits."""

    def __init__(self, *streams: Stream) -> None:
        self._gate = threading.Event()
        for stream in streams:
            stream.submit(lambda: _pass(self._gate), label="held up")

    def release(self) -> None:
        """Unblock the streams. Idempotent."""
        self._gate.set()

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *failure: object) -> None:
        self.release()


def _pass(gate: threading.Event) -> None:
    if not gate.wait(_PATIENCE_S):
        raise TierError(f"injected: the gate was not opened within {_PATIENCE_S:.0f} s")
