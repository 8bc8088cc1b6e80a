"""Types that all rooms share: keys, accesses to memory, the fence protocol, plans of transfers, the tracer protocol.
No tensors, no behaviour.

A plan is a frozen value that describes future work. The scheduler of an engine makes plans; the offload engine executes
them.

The `epoch` of a request is the number of its preemptions. Results of an older epoch are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

BlockId = int
Key = bytes
RequestId = int
DEVICE = "device"
HOST = "host"
"""Names of the two tiers that every engine with offload has. Blocks in host memory can be loaded at once. Blocks in
other tiers, such as disk, are first promoted (read into host memory); `offload.tiers.stack` lists these tiers.
"""


@dataclass(frozen=True, slots=True)
class Access:
    """A byte range `[start, stop)` of a named memory (`"kv"`, `"host"`, …) that work on a stream reads or writes.

    The order checker (`sidestream_order.checker`) finds races with these declarations.
    """

    memory: str
    start: int
    stop: int
    write: bool


Accesses = Callable[[], Sequence[Access]]
"""Returns the accesses of a piece of work. Accesses are passed as a function, because building the list can take longer
than the work itself, and only a tracer needs it.
"""


@dataclass(frozen=True, slots=True)
class Vectors:
    """Consecutive vectors of KV (keys or values of one token in one head), of `elements` numbers each, in two forms:

    plain    numbers of `dtype`; `plain_bytes` for each vector
    packed   `elements` signed bytes, and the float32 with which they are multiplied; `packed_bytes` for each vector
    """

    elements: int
    dtype: str
    plain_bytes: int
    packed_bytes: int


@runtime_checkable
class Fence(Protocol):
    """A position on a stream, like a CUDA event. It is done when all work enqueued on `stream` up to `tick` is done.

    A fence exists only after its event was recorded on the stream.
    """

    @property
    def stream(self) -> str:
        """Name of the stream."""
        ...

    @property
    def tick(self) -> int:
        """Position on the stream; fences of one stream complete in the order of their ticks."""
        ...

    def poll(self) -> bool:
        """Whether the work is done. Never blocks."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """The exception that the fenced work raised, valid once `poll()` is true; None after success."""
        ...


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Copy complete device blocks to the host tier (and from there to disk), after the step that filled them.

    keys     the blocks' keys (block hashes)
    after    fences of that step
    prefix   for each stored sequence, the keys of all blocks up to its last stored block. A block is useless without
             the blocks before it, so the store marks the whole prefix as recently used (LRU)
    superseded  keys of blocks that are worth little once `keys` are stored: they are then evicted first
    returning   keys of blocks that are likely to be reused: of `prefix`, those that a request found in a cache, and of
             `keys`, those of requests that found a third of their prompt. See `OffloadConfig.write_policy`
    """

    keys: tuple[Key, ...]
    block_ids: tuple[BlockId, ...]
    after: tuple[Fence, ...]
    prefix: tuple[Key, ...] = ()
    superseded: tuple[Key, ...] = ()
    returning: frozenset[Key] = frozenset()


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Copy blocks from the host tier into fresh device blocks.

    after      fences of the device blocks' earlier uses; the copy waits for them
    prefetch   no step waits for this load yet, so other loads go first
    num_whole  number of leading blocks that hold recurrent state, or pages of layers with a sliding window. They are
               copied whole, before all other blocks, because their layers are others
    covers     number of tokens that a recurrent state in them must cover; a state of another number of tokens is a
               cache miss
    num_partial  number of blocks after these that the request reads only in layers without a sliding window; the other
               layers are not copied. The last block of a load is always whole
    """

    request_id: RequestId
    epoch: int
    keys: tuple[Key, ...]
    block_ids: tuple[BlockId, ...]
    after: tuple[Fence, ...]
    prefetch: bool = False
    num_whole: int = 0
    covers: int = 0
    num_partial: int = 0


@dataclass(frozen=True, slots=True)
class PromotePlan:
    """Read blocks from disk into the host tier, for a request that waits for them.

    keys   keys of all cached blocks of the request, including blocks that the host tier holds already
    """

    request_id: RequestId
    epoch: int
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class FindPlan:
    """Ask the tiers that other processes write, too, for blocks that no tier is known to hold, for a request that waits
    for the answer.

    keys        keys of the missing blocks, in the order of the request; at least one
    patience_s  longest wait
    """

    request_id: RequestId
    epoch: int
    keys: tuple[Key, ...]
    patience_s: float


TransferPlan = StorePlan | LoadPlan | PromotePlan | FindPlan


@dataclass(frozen=True, slots=True)
class LayerGates:
    """Fences of unfinished loads, by layer: the compute stream waits for them before a step uses the layer's KV.

    by_layer   empty: the step waits for no load
    """

    by_layer: tuple[tuple[Fence, ...], ...] = ()


class Tracer(Protocol):
    """Records all events from which the order checker derives the happens-before order. It changes nothing.

    Devices, channels (queues between threads) and pools call it, from any thread. For each stream, a device calls
    `submitted`, `waited`, `started`, `touched` and `finished` in the stream's order. All host threads share one
    timeline, as if they were one thread, except for threads that called `own_timeline`.
    """

    def own_timeline(self, name: str) -> None:
        """From now on, the calling thread has its own timeline, `name`. Only messages and fences order it with other
        timelines.
        """
        ...

    def joined(self, name: str) -> None:
        """The caller has joined thread `name`: all actions of that thread happened before this call."""
        ...

    def sent(self, channel: str, number: int) -> None:
        """The calling thread is about to put message `number` into a channel."""
        ...

    def received(self, channel: str, number: int) -> None:
        """The calling thread took message `number` from a channel. All actions of the sender before it sent the message
        happened before this call. Earlier messages that were not taken are lost.
        """
        ...

    def submitted(self, fence: Fence, accesses: Accesses, label: str) -> None:
        """The host enqueued work on `fence.stream`, covered by `fence`. Called before the work can start."""
        ...

    def waited(self, stream: str, fence: Fence) -> None:
        """`stream` has waited for `fence`, between two pieces of work or inside a piece of work."""
        ...

    def started(self, fence: Fence) -> None:
        """The work of `fence` began. From here on, it makes the accesses that `submitted` declared."""
        ...

    def touched(self, stream: str, accesses: Accesses) -> None:
        """From here on, the work that runs on `stream` also makes these accesses."""
        ...

    def finished(self, fence: Fence) -> None:
        """The work ended, successfully or with `fence.failure`. Called before any thread can see the fence done."""
        ...

    def observed(self, fence: Fence) -> None:
        """The calling thread saw that `fence` is done."""
        ...

    def host_touched(self, accesses: Accesses, label: str) -> None:
        """The calling thread itself now reads or writes memory that streams use."""
        ...

    def stalled(self, reason: str) -> None:
        """A call blocked the calling thread. `reason` is `"step"` if the engine waits for its own step. By default, the
        checker reports every other reason as a fault.
        """
        ...

    def allocated(self, memory: str, num_bytes: int) -> None:
        """A device made a memory of this size. Called before any access to it."""
        ...

    def backed(self, pool: str, memory: str, block_bytes: int, first: int = 0) -> None:
        """Block `i` of the pool lies in `memory` at `first + i * block_bytes` and has `block_bytes` bytes. If
        `block_bytes` is 0, the bytes from `first` on belong to no pool.

        Called before the pool's first lease (the right to use a block). If a memory has several pools, they call it in
        the order of `first`.
        """
        ...

    def took(self, pool: str, block_ids: Sequence[int], after: Sequence[Fence]) -> None:
        """A lease for writing began: the old contents are invalid. `after`: unfinished fences of earlier uses."""
        ...

    def shared(self, pool: str, block_ids: Sequence[int]) -> None:
        """A lease for reading began."""
        ...

    def released(self, pool: str, block_ids: Sequence[int], after: Sequence[Fence]) -> None:
        """A lease ended. `after`: fences of all its uses, except for uses that the host has seen done."""
        ...

    def published(self, pool: str, block_id: int, key: Key, *, partial: bool = False) -> None:
        """The prefix cache can now find the block under `key`. Its bytes are complete, and do not change until the next
        `took`. `partial`: the layers with a sliding window are missing.
        """
        ...

    def forgot(self, pool: str, block_ids: Sequence[int]) -> None:
        """The blocks lost their keys: the prefix cache cannot find them any more."""
        ...
