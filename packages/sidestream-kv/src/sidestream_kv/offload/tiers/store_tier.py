"""A tier in a store that several engines share, over a network: values by name, each a header and a block. `redis` and
`mooncake` are such stores; a new one implements `ValueStore`.

The index knows only what this engine has written or found. `find` asks the store for other blocks; the offload worker
calls it for requests whose blocks no tier is known to hold. A value is named by model, layout, rank and key, so what is
under a name is always the same KV, whichever engine wrote it, or it fails its verification (`tiers.entry_format`).

    PREFIX:DIGEST:RANK-of-SIZE:KEY      digest of model and layout, and key, in hexadecimal

**A serial is a time**: an engine numbers its writes from the nanosecond in which it opened the tier. So the serials of
two engines differ, and a deletion never hits a value that another engine has written since.

**After a failure, the store is left alone** for `PAUSE_S`: every call fails at once, and counts as a miss. So a store
that stalls delays requests by its timeout once in that time, and not by one timeout for each block.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from sidestream_kv.config import OffloadConfig, parse_bytes, unknown_name
from sidestream_kv.errors import ConfigError, TierCorrupt, TierError, TierFull
from sidestream_kv.kv.layout import BlockLayout
from sidestream_kv.offload.tiers.base import Block, TierContext
from sidestream_kv.offload.tiers.entry_format import HEADER_BYTES, EntryFormat
from sidestream_kv.offload.tiers.index import Entry, TierIndex, WriteGrant
from sidestream_kv.types import Key

PAUSE_S = 5.0
# A search stops after so many blocks if the first of them is absent: most prompts are not in the store.
_PROBE = 32

_log = logging.getLogger(__name__)


class ValueStore(Protocol):
    """A store of values by name. Calls come from several threads, and each may block, but only for a limited time.

    They raise TierFull (no space) or TierError, whose text has neither a password nor a key of the user's.
    """

    def heads(self, names: Sequence[str]) -> Sequence[bytes | None]:
        """The first HEADER_BYTES of each value; empty: a value that was not looked at; None: absent."""
        ...

    def get(self, name: str, head: bytearray, block: memoryview) -> int:
        """Copy a value into `head` and, after it, `block`. Returns the number of bytes of the value, which may differ
        from the room for it; -1: absent.
        """
        ...

    def put(self, name: str, head: bytes, block: memoryview) -> None:
        """Store a value, whole or not at all."""
        ...

    def delete(self, values: Sequence[tuple[str, bytes]]) -> None:
        """Delete each named value that begins with these bytes, if the store can tell."""
        ...

    def close(self) -> None:
        """End the connections. Idempotent."""
        ...


class StoreTier:
    """The tier. `capacity_bytes`: bytes of values that this engine keeps track of; beyond, it deletes the least
    recently used ones from the store.
    """

    def __init__(self, store: ValueStore, context: TierContext, *, name: str, prefix: str, capacity_bytes: int) -> None:
        self._store = store
        self._name = name
        self._format = EntryFormat(context)
        self._names = [
            f"{prefix}:{self._format.identity.hex()}:{rank}-of-{context.num_ranks}:"
            for rank in range(context.num_ranks)
        ]
        self._own = self._names[context.rank]
        self._resumes_s = 0.0
        self._reason = ""
        self._closed = False
        self._index = TierIndex(
            name=name,
            max_entries=max(1, capacity_bytes // value_bytes(context.layout)),
            entry_bytes=self._format.value_bytes,
            next_serial=time.time_ns(),
            tracer=context.tracer,
        )

    @property
    def index(self) -> TierIndex:
        """The keys that this engine knows to be in the store."""
        return self._index

    def find(self, keys: Sequence[Key]) -> Sequence[Entry]:
        """The entries of those `keys` that are in the store, on every rank. Looks at headers only; a read verifies the
        block.
        """
        found = self._find(keys[:_PROBE])
        if found and found[0].key == keys[0]:
            found += self._find(keys[_PROBE:])
        return found

    def _find(self, keys: Sequence[Key]) -> list[Entry]:
        if not keys:
            return []
        with self._calling():
            heads = self._store.heads([prefix + key.hex() for prefix in self._names for key in keys])
        ranks = [heads[first : first + len(keys)] for first in range(0, len(heads), len(keys))]
        entries = [[self._format.entry(key, head) for key, head in zip(keys, of, strict=True)] for of in ranks]
        # rule: value-is-found-on-every-rank
        return [each[0] for each in zip(*entries, strict=True) if each[0] is not None and None not in each]

    def delete(self, entries: Sequence[Entry]) -> None:
        """Delete these values of this rank, unless another engine has written them again since."""
        with self._calling():
            self._store.delete([self._named(entry) for entry in entries])

    def write(self, grant: WriteGrant, payload: Block) -> None:
        """Delete `grant.victim`, then store `payload` as `grant.entry`. See `PersistentTier.write`."""
        block = self._format.view(payload)
        with self._calling():
            if grant.victim is not None:
                self._store.delete([self._named(grant.victim)])
                grant.victim = None
            self._store.put(self._own + grant.entry.key.hex(), self._format.header(grant.entry, block), block)
        grant.written = True  # rule: value-counts-as-written-after-its-write

    def read(self, entry: Entry, out: Block) -> None:
        """Fill `out` with the value under the entry's key, and verify every bit. See `PersistentTier.read`."""
        block, head, name = self._format.view(out), bytearray(HEADER_BYTES), self._own + entry.key.hex()
        with self._calling():
            num_bytes = self._store.get(name, head, block)
        if num_bytes < 0:
            raise TierCorrupt(f"{self._name} has no value {name} any more")
        fault: str | None = f"has {num_bytes} bytes"
        if num_bytes == self._format.value_bytes:
            fault = self._format.fault(entry.key, bytes(head), block)
        if fault is not None:
            with contextlib.suppress(TierError), self._calling():
                self._store.delete([(name, bytes(head[: max(0, num_bytes)]))])
            raise TierCorrupt(f"{self._name} value {name} {fault}: deleted")

    def close(self) -> None:
        """Delete the values of forgotten entries, and end the connections. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(TierError):  # if this fails, the values stay, and engines may find them again
            self.delete(self._index.take_doomed())
        self._store.close()

    def _named(self, entry: Entry) -> tuple[str, bytes]:
        """The name of an entry's value, and the first bytes that only its write has."""
        return self._own + entry.key.hex(), self._format.first_bytes(entry)

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """A call of the store: fails at once shortly after another one has failed."""
        if time.monotonic() < self._resumes_s:  # rule: failed-store-is-left-alone
            raise TierError(f"{self._name} is left alone for {PAUSE_S:g} s, because: {self._reason}")
        try:
            yield
        except TierFull:
            raise
        except TierError as error:
            self._reason = str(error)
            self._resumes_s = time.monotonic() + PAUSE_S
            raise


def copied(value: memoryview | None, head: bytearray, block: memoryview) -> int:
    """Copy a value that is in memory as a whole; None: it is absent. See `ValueStore.get`."""
    if value is None:
        return -1
    first = value[:HEADER_BYTES]
    head[: len(first)] = first
    if len(value) == HEADER_BYTES + len(block):
        block[:] = value[HEADER_BYTES:]
    return len(value)


def options_of(config: OffloadConfig, name: str, **defaults: Any) -> dict[str, Any] | None:
    """The options of a store's tier, with `defaults` of those that it has besides `capacity`; None: the config has no
    such tier. Raises ConfigError.
    """
    given = config.tiers.get(name)
    if given is None:
        return None
    defaults["capacity"] = "1TiB"
    if (unknown := next((option for option in given if option not in defaults), None)) is not None:
        raise ConfigError(unknown_name(f"option of the tier {name}", unknown, tuple(defaults)))
    options = {**defaults, **given}
    options["capacity"] = parse_bytes(options["capacity"], option=f"{name} capacity")
    options["timeout_s"] = seconds(options["timeout_s"], f"{name} timeout_s")
    return options


def seconds(value: object, option: str) -> float:
    """`value`, a positive number of seconds. Raises ConfigError."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return value
    raise ConfigError(f"{option} is {value!r}: give a positive number of seconds")


def value_bytes(layout: BlockLayout) -> int:
    """Bytes of one block's value."""
    return HEADER_BYTES + layout.block_bytes
