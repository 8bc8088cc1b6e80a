"""Publishes KV events in vLLM's format. The events tell routers which blocks this engine can reuse. docs/kv-events.md
explains the format.

The engine thread calls `flush` after each step: `flush` takes the changes of the key log (the record of blocks that
became or ceased to be reusable) and puts them into a bounded queue. Another thread turns the changes into events, and
passes these to the callbacks and to the sockets (kv_sockets.py). The engine thread never waits for a callback or a
socket.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from sidestream.config import KVEventsConfig
from sidestream_kv.device.channel import Bell
from sidestream_kv.kv.key_log import KeyChange, KeyLog, KeysCleared, KeysRemoved, KeysStored
from sidestream_kv.metrics import Metrics
from sidestream_kv.offload.tiers.stack import kind_of
from sidestream_kv.types import DEVICE, HOST, Key

if TYPE_CHECKING:
    from sidestream.engine.kv_sockets import KVEventSockets

logger = logging.getLogger(__name__)

# The storage media that routers know, by tier. Routers treat an unknown medium as the GPU, so other tiers are sent as
# EXTERNAL.
_MEDIA: Mapping[str, str] = {DEVICE: "GPU", HOST: "CPU", "disk": "DISK"}
_OTHER_MEDIUM = "EXTERNAL"
_HASH_BYTES = 8
# `close` waits at most this long for a callback that blocks.
_CLOSE_S = 5.0


class BlockStored(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Consecutive blocks of one sequence can be reused from `medium`. The fields are vLLM's, in vLLM's order.

    block_hashes       64-bit numbers, the last bytes of the blocks' keys
    parent_block_hash  hash of the block before the first one; None: the sequence begins with the first block, or the
                       medium is not the device
    token_ids          tokens of all the blocks; empty if the medium is not the device
    block_size         tokens of a block
    medium             `"GPU"`: the device, of any kind; `"CPU"`: host memory; `"DISK"`; `"EXTERNAL"`: another tier
    extra_keys         one entry per block: `(cache salt,)` for the sequence's first block, None for later ones. None:
                       the request has no salt, or the sequence's first block is not in this event
    """

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: tuple[tuple[str, ...] | None, ...] | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """These blocks can no longer be reused from `medium`."""

    block_hashes: tuple[int, ...]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """No block can be reused from the device any more. Other events remove the blocks of other tiers."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The events of one or several steps. `ts`: seconds since 1970."""

    ts: float
    events: tuple[KVEvent, ...]
    data_parallel_rank: int | None = None


OnBatch = Callable[[int, KVEventBatch], None]
"""`on_batch(sequence, batch)`; the sequence numbers of batches are consecutive, unless batches were dropped."""


def block_hash(key: Key) -> int:
    """The number that identifies a block in events."""
    return int.from_bytes(key[-_HASH_BYTES:], "big")


def events_of(changes: Iterable[KeyChange], *, block_tokens: int) -> list[KVEvent]:
    """The events for these changes, in order. Consecutive removals from one tier become one event."""
    events: list[KVEvent] = []
    for change in changes:
        match change:
            case KeysStored(tier, keys, parent, token_ids, salt):
                # As in vLLM, only the first block names the salt; the hashes of later blocks depend on its hash.
                salted = salt and parent is None
                salt = salt.encode(errors="backslashreplace").decode()  # MessagePack cannot encode lone surrogates
                events.append(
                    BlockStored(
                        tuple(map(block_hash, keys)),
                        None if parent is None else block_hash(parent),
                        token_ids,
                        block_tokens,
                        None,
                        _MEDIA.get(kind_of(tier), _OTHER_MEDIUM),
                        None,
                        ((salt,), *(None for _ in keys[1:])) if salted else None,
                    )
                )
            case KeysRemoved(tier, keys):
                hashes, medium = tuple(map(block_hash, keys)), _MEDIA.get(kind_of(tier), _OTHER_MEDIUM)
                # rule: removals-are-not-merged-over-a-store
                if events and isinstance(last := events[-1], BlockRemoved) and last.medium == medium:
                    events.pop()
                    hashes = last.block_hashes + hashes
                events.append(BlockRemoved(hashes, medium))
            case KeysCleared():
                events.append(AllBlocksCleared())
    return events


def encode(batch: KVEventBatch, *, encoding: str) -> bytes:
    """The batch as MessagePack: an array of `ts`, events and rank.

    encoding   `"map"`: an event is a map of its fields, with its class name as `type`; `"array"`: an array of its class
               name and its fields
    """
    if encoding == "map":
        return msgspec.msgpack.encode(batch)
    return msgspec.msgpack.encode((batch.ts, [_as_array(event) for event in batch.events], batch.data_parallel_rank))


def _as_array(event: KVEvent) -> Sequence[object]:
    fields = msgspec.structs.astuple(event)
    if isinstance(event, BlockStored) and event.extra_keys is None:
        fields = fields[:-1]
    return (type(event).__name__, *fields)


class KVEvents:
    """Publishes the changes of an engine's key log, see the module's docstring.

    At most `config.buffer_batches` batches are queued. If the thread does not keep up, further batches are dropped and
    counted in `kv_event_batches_total`. Their sequence numbers are missing, and the next batch begins with
    AllBlocksCleared, so that no router keeps a block whose removal it has missed.
    """

    def __init__(
        self,
        config: KVEventsConfig,
        *,
        log: KeyLog,
        block_tokens: int,
        metrics: Metrics,
        sockets: KVEventSockets | None = None,
    ) -> None:
        """`sockets`: closed by `close`; None: only callbacks receive events."""
        self.log = log
        self._config = config
        self._block_tokens = block_tokens
        self._metrics = metrics
        self._sockets = sockets
        self._callbacks: list[OnBatch] = []
        self._queue: deque[tuple[int, float, list[KeyChange]]] = deque()
        self._sequence = 0  # of the next batch
        # Whether the next batch begins with AllBlocksCleared. The first batch does, too: routers may still know the
        # blocks of an earlier engine at this address.
        self._behind = True
        self._bell = Bell()
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. Without it, `flush` publishes on the calling thread."""
        self._thread = threading.Thread(target=self._run, name="sidestream-kv-events", daemon=True)
        self._thread.start()

    def subscribe(self, on_batch: OnBatch) -> None:
        """Call `on_batch` for every batch from now on, on the thread that publishes events. A callback that raises is
        not called again. Callable from any thread.
        """
        self._callbacks.append(on_batch)

    def flush(self) -> None:
        """Queue the changes since the last call. Never blocks. Call it on the engine thread or, after the engine thread
        has ended, on the thread that closes the engine.
        """
        changes = self.log.drain()
        if not changes:
            return
        sequence = self._sequence
        self._sequence += 1
        if len(self._queue) >= self._config.buffer_batches:
            self._behind = True
            self._metrics.inc("kv_event_batches_total", 1, "dropped")
            return
        if self._behind:
            self._behind = False
            changes.insert(0, KeysCleared())
        self._queue.append((sequence, time.time(), changes))
        if self._thread is None:
            self._publish_queued()
        else:
            self._bell.ring()

    def close(self) -> None:
        """Publish the remaining changes, end the thread and close the sockets. Call it after the last transfer."""
        self.flush()
        self._closing = True
        self._bell.ring()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                logger.warning("a callback of KV events did not return: the sockets of KV events stay open")
                return
        if self._sockets is not None:
            self._sockets.close()

    def _run(self) -> None:
        while not self._closing:
            self._bell.wait()
            self._publish_queued()

    def _publish_queued(self) -> None:
        while self._queue:
            sequence, ts, changes = self._queue.popleft()
            batch = KVEventBatch(ts, tuple(events_of(changes, block_tokens=self._block_tokens)), 0)
            if self._sockets is not None:
                self._sockets.send(sequence, encode(batch, encoding=self._config.encoding))
            for on_batch in list(self._callbacks):
                try:
                    on_batch(sequence, batch)
                except Exception:
                    logger.exception("a callback of KV events failed and is not called again")
                    self._callbacks.remove(on_batch)
            self._metrics.inc("kv_event_batches_total", 1, "published")
