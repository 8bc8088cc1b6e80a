"""A store of values in this process, which several engines can share: with `StoreTier`, a tier without a server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal

from sidestream_kv.offload.tiers.base import TierContext
from sidestream_kv.offload.tiers.entry_format import HEADER_BYTES
from sidestream_kv.offload.tiers.store_tier import StoreTier, copied

Call = Literal["heads", "get", "put", "delete"]


class MemoryStore:
    """The values by name. `on_call` is called first in each call, on its thread: it may wait or raise a TierError.

    calls   the calls, in order
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.calls: list[Call] = []
        self.on_call: Callable[[Call], None] = lambda call: None
        self._lock = threading.Lock()

    def tier(self, context: TierContext, *, capacity_bytes: int = 1 << 30) -> StoreTier:
        """Another engine's tier in this store."""
        return StoreTier(self, context, name="redis", prefix="kv", capacity_bytes=capacity_bytes)

    def heads(self, names: Sequence[str]) -> Sequence[bytes | None]:
        """See `ValueStore.heads`."""
        self._begin("heads")
        with self._lock:
            return [None if (value := self.values.get(name)) is None else value[:HEADER_BYTES] for name in names]

    def get(self, name: str, head: bytearray, block: memoryview) -> int:
        """See `ValueStore.get`."""
        self._begin("get")
        with self._lock:
            value = self.values.get(name)
        return copied(None if value is None else memoryview(value), head, block)

    def put(self, name: str, head: bytes, block: memoryview) -> None:
        """See `ValueStore.put`."""
        self._begin("put")
        with self._lock:
            self.values[name] = head + bytes(block)

    def delete(self, values: Sequence[tuple[str, bytes]]) -> None:
        """See `ValueStore.delete`."""
        self._begin("delete")
        with self._lock:
            for name, head in values:
                if self.values.get(name, b"").startswith(head):
                    self.values.pop(name, None)

    def close(self) -> None:
        """See `ValueStore.close`."""

    def _begin(self, call: Call) -> None:
        self.calls.append(call)
        self.on_call(call)
