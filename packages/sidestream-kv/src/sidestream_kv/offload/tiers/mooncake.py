"""The tier `mooncake`: values in Mooncake Store, memory of several machines under one master. `tiers.store_tier` has
the rest.

The package's calls have timeouts of their own, of up to 30 s. So each call runs on a thread of a pool, and its caller
waits at most `timeout_s`. Values pass through buffers of this module: a call that ends late still owns its buffer, and
never a host slot.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from sidestream_kv.config import OffloadConfig, parse_bytes
from sidestream_kv.errors import ConfigError, TierError, TierFull
from sidestream_kv.offload.tiers.base import TierContext, TierKind
from sidestream_kv.offload.tiers.entry_format import HEADER_BYTES
from sidestream_kv.offload.tiers.store_tier import StoreTier, options_of, value_bytes

NAME = "mooncake"
T = TypeVar("T")
Buffer = npt.NDArray[np.uint8]

_ABSENT, _IN_USE, _NO_ROOM, _WRONG_SIZE = -704, -706, -200, -600
# Calls at the same time: those of the tier's streams, and some that have timed out and go on.
_THREADS = 8


class MooncakeStore:
    """A client of the master at `master`.

    segment_bytes   memory that this process lends to the store
    protocol        `"tcp"` or `"rdma"`
    """

    def __init__(
        self,
        master: str,
        *,
        host: str,
        segment_bytes: int,
        protocol: str,
        devices: str,
        value_bytes: int,
        timeout_s: float,
    ) -> None:
        self._where, self._value_bytes, self._timeout_s = f"mooncake at {master}", value_bytes, timeout_s
        self._store = _package()()
        self._free: list[Buffer] = []
        buffers = _THREADS * value_bytes + (16 << 20)
        status = self._store.setup(host, "P2PHANDSHAKE", segment_bytes, buffers, protocol, devices, master)
        if status:
            raise ConfigError(
                f"{self._where}: setup failed with status {status}: check that its master runs, and the options host, "
                "protocol and devices"
            )
        self._pool = ThreadPoolExecutor(_THREADS, "mooncake")

    def heads(self, names: Sequence[str]) -> Sequence[bytes | None]:
        """Whether the values exist: an empty head for each that does. To read a header takes as long as for a block."""
        found = self._wait(self._pool.submit(self._store.batch_is_exist, list(names)))
        self._check(min(found, default=0))
        return [b"" if each else None for each in found]

    def get(self, name: str, head: bytearray, block: memoryview) -> int:
        """See `ValueStore.get`."""
        with self._buffer() as (buffer, call):
            num_bytes = call(self._store.get_into, name, buffer.ctypes.data, buffer.nbytes)
            if num_bytes == _WRONG_SIZE:
                return call(self._store.get_size, name)
            if num_bytes == _ABSENT:
                return -1
            self._check(num_bytes)
            first = buffer[: min(num_bytes, HEADER_BYTES)]
            head[: len(first)] = first.data
            if num_bytes == self._value_bytes:
                block[:] = buffer[HEADER_BYTES:].data
        return num_bytes

    def put(self, name: str, head: bytes, block: memoryview) -> None:
        """See `ValueStore.put`. A value that another client reads stays: under one name it has the same block."""
        with self._buffer() as (buffer, call):
            buffer[:HEADER_BYTES] = np.frombuffer(head, np.uint8)
            buffer[HEADER_BYTES:] = np.frombuffer(block, np.uint8)
            status = call(self._store.upsert_from, name, buffer.ctypes.data, buffer.nbytes)
        if status == _NO_ROOM:
            raise TierFull(f"{self._where} has no memory left")
        self._check(status, _IN_USE)

    def delete(self, values: Sequence[tuple[str, bytes]]) -> None:
        """See `ValueStore.delete`. The comparison and the deletion are two calls: a value that is written again between
        them is deleted, which costs a hit.
        """
        for name, expected in values:
            with self._buffer() as (buffer, call):
                num_bytes = call(self._store.get_into, name, buffer.ctypes.data, buffer.nbytes)
                if num_bytes == _WRONG_SIZE or bytes(buffer[: len(expected)].data) == expected:
                    self._check(call(self._store.remove, name, True), _ABSENT)

    def close(self) -> None:
        """Leave the store, with the memory that was lent. Waits for calls that have timed out: the package crashes if
        it is closed during a call.
        """
        self._pool.shutdown(cancel_futures=True)  # rule: calls-end-before-the-client
        self._store.close()

    @contextlib.contextmanager
    def _buffer(self) -> Iterator[tuple[Buffer, Callable[..., int]]]:
        """A buffer, and a function that makes a call with it and waits for it. After a timeout, the buffer is in use
        until the call ends.
        """
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = np.empty(self._value_bytes, np.uint8)
            self._store.register_buffer(buffer.ctypes.data, buffer.nbytes)
        last: Future[int] | None = None

        def call(function: Callable[..., int], *given: Any) -> int:
            nonlocal last
            last = self._pool.submit(function, *given)
            return self._wait(last)

        try:
            yield buffer, call
        finally:
            if last is not None:  # at once, unless it has timed out
                last.add_done_callback(lambda _: self._free.append(buffer))  # rule: late-call-keeps-its-buffer

    def _wait(self, future: Future[T]) -> T:
        try:
            return future.result(self._timeout_s)
        except TimeoutError as error:
            raise TierError(f"{self._where} did not answer within {self._timeout_s:g} s") from error

    def _check(self, status: int, *allowed: int) -> None:
        if status < 0 and status not in allowed:
            raise TierError(f"{self._where}: status {status}")


def _package() -> Any:
    os.environ.setdefault("GLOG_minloglevel", "2")  # by default, it logs every call to standard error
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:  # the package, or a library of the system
        raise ConfigError(
            "the tier mooncake needs a package of Mooncake, and libibverbs1 of the system: pip install "
            f"'sidestream-kv[mooncake]' ({error})"
        ) from error
    return MooncakeDistributedStore


def _open(config: OffloadConfig, context: TierContext) -> StoreTier | None:
    names = {"host": "127.0.0.1", "segment": "0", "protocol": "tcp", "devices": "", "prefix": "sidestream"}
    given = options_of(config, NAME, master=None, **names, timeout_s=5.0)
    if given is None:
        return None
    if not isinstance(given["master"], str):
        raise ConfigError("the tier mooncake has no master: give its address, such as 127.0.0.1:50051")
    store = MooncakeStore(
        given["master"],
        host=given["host"],
        segment_bytes=parse_bytes(given["segment"], option="mooncake segment"),
        protocol=given["protocol"],
        devices=given["devices"],
        value_bytes=value_bytes(context.layout),
        timeout_s=given["timeout_s"],
    )
    return StoreTier(store, context, name=NAME, prefix=given["prefix"], capacity_bytes=given["capacity"])


KIND = TierKind(NAME, _open, ranks=True)
