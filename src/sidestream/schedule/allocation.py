"""Finds the blocks that a waiting request need not compute, on the device and in tiers. Allocates request slots and
device blocks to requests: at admission, and when decoding needs more blocks. Releases them when a request ends or is
preempted.

The reused blocks are the first blocks of the request, without a gap. A model with recurrent state also needs a
checkpoint (a kept state) at the end of these blocks, on the device or in a tier. So blocks after the last checkpoint
are not reused (hazard H15).

In layers with a sliding window, the request attends only to the last blocks before its first computed token. Blocks
before these may be partial: loaded without the layers with a window. A partial block that such a layer would attend to
is not reused, nor are the blocks after it on the device; those that a tier holds are loaded instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sidestream.schedule.limits import Limits
from sidestream.schedule.prefix_cache import PrefixCache, TierLoads, TierView
from sidestream.schedule.request import Request, RequestStates
from sidestream.schedule.states import Source, StateCache
from sidestream.schedule.windows import WindowCache
from sidestream.types import StateIds
from sidestream_kv.kv.pool import FencedPool
from sidestream_kv.types import BlockId, Fence, Key


@dataclass(frozen=True, slots=True)
class Reuse:
    """The blocks that a request may reuse. The first blocks are on the device, the others in tiers.

    hits         blocks on the device
    num_blocks   number of all reused blocks
    keys         keys of the blocks to load from tiers: the parts of the checkpoint or of pages, if they are not on the
                 device, then blocks of KV
    sources      the tier of each of `keys`
    num_joinable number of leading blocks that were found, including blocks after the last checkpoint. A running request
                 may be computing the block after them
    num_partial  number of blocks to load without the layers with a sliding window; they come first
    """

    hits: Sequence[BlockId]
    num_blocks: int
    keys: Sequence[Key]
    sources: Sequence[Source]
    num_joinable: int
    num_partial: int = 0

    @property
    def num_loads(self) -> int:
        """Number of reused blocks in tiers."""
        return self.num_blocks - len(self.hits)

    @property
    def num_parts(self) -> int:
        """Number of parts of the checkpoint or of pages to load from tiers; 0: they are on the device."""
        return len(self.keys) - self.num_loads


@dataclass(eq=False)
class ReuseFinder:
    """Looks for reusable blocks on the device and in tiers. Changes nothing."""

    _limits: Limits
    _prefix_cache: PrefixCache
    _tiers: TierLoads
    _states: StateCache | None
    _windows: WindowCache | None

    def find(self, request: Request, wanted: Sequence[Key]) -> Reuse:
        """Find all blocks that the request could reuse, also in tiers that are slower than host memory."""
        return self._of_device_and(wanted, request, lambda keys: self._tiers.locate(request, keys))

    def loadable(self, request: Request, wanted: Sequence[Key], reuse: Reuse) -> Reuse:
        """The part of `reuse` that needs no promotion: blocks on the device, and blocks in host memory if loading them
        is expected to be faster than computing them.
        """

        def locate_in_host(keys: Sequence[Key]) -> Sequence[Source]:
            sources = self._tiers.locate(request, keys)
            return sources[: self._tiers.num_in_host(sources)]

        num_joinable = reuse.num_joinable
        if self._tiers.num_in_host(reuse.sources) < len(reuse.sources):
            # perhaps a shorter run is completely in host memory
            reuse = self._of_device_and(wanted, request, locate_in_host)
        if reuse.keys:
            alone = self._find(wanted, reuse.hits, lambda keys: ())
            # rule: blocks-in-host-memory-are-reused
            if not self._tiers.is_worth_loading(
                reuse.sources, num_blocks=reuse.num_blocks - alone.num_blocks, num_partial=reuse.num_partial
            ):
                reuse = alone
        has_parts = self._states is not None or self._windows is not None
        return replace(reuse, num_joinable=num_joinable) if has_parts else reuse

    def _of_device_and(
        self, wanted: Sequence[Key], request: Request, locate: Callable[[Sequence[Key]], Sequence[Source]]
    ) -> Reuse:
        """All blocks that the request may reuse if `locate` finds those in tiers, and at most as many of these as it
        may load.
        """
        hits = self._prefix_cache.on_device(wanted)
        behind = request.may_load(len(wanted) - len(hits), self._limits.block_tokens)  # rule: request-bounds-its-loads
        return self._find(wanted[: len(hits) + behind], hits, locate)

    def _find(
        self,
        wanted: Sequence[Key],
        hits: Sequence[BlockId],
        locate: Callable[[Sequence[Key]], Sequence[Source]],
    ) -> Reuse:
        """All blocks that may be reused, if `hits` are on the device and `locate` finds the others."""
        reuse = self._within(wanted, hits, locate)
        num_joinable = reuse.num_joinable
        while (hits := self._usable(wanted, reuse, locate)) != reuse.hits:
            reuse = replace(self._within(wanted, hits, locate), num_joinable=num_joinable)
        return reuse

    def _usable(
        self, wanted: Sequence[Key], reuse: Reuse, locate: Callable[[Sequence[Key]], Sequence[Source]]
    ) -> Sequence[BlockId]:
        """The blocks on the device that the request may use: all, or those before a partial block. If no tier continues
        these, their window ends earlier, too, and may reach further partial blocks.
        """
        hits, end = reuse.hits, reuse.num_blocks
        while (count := self._prefix_cache.num_usable(hits, end)) < len(hits):
            hits = hits[:count]
            if locate(wanted[count : count + 1]):
                break
            end = count
        return hits

    def _within(
        self,
        wanted: Sequence[Key],
        hits: Sequence[BlockId],
        locate: Callable[[Sequence[Key]], Sequence[Source]],
    ) -> Reuse:
        """Reduce the found blocks (on the device and in tiers) to the blocks before the last checkpoint, or to those
        whose window is complete.
        """
        sources = locate(wanted[len(hits) :])
        known = count = len(hits) + len(sources)
        part_keys: Sequence[Key] = ()
        part_sources: Sequence[Source] = ()
        if self._states is not None:
            count, part_sources = self._states.reach(wanted, known, locate)
            if part_sources:
                part_keys = self._states.part_keys(wanted[count - 1])
        if self._windows is not None:
            count, part_keys, part_sources = self._windows.reach(wanted, known, locate)
        loads = slice(len(hits), max(len(hits), count))
        keys = (*part_keys, *wanted[loads])
        num_partial = max(0, self._limits.blocks_before_window(count) - len(hits))
        sources = (*part_sources, *sources[: loads.stop - loads.start])
        return Reuse(hits[:count], count, keys, sources, known, num_partial)


@dataclass(eq=False)
class Allocator:
    """Takes and releases the leases of request slots and blocks. No other part of the scheduler does this.

    Invariants:
    - A request has a slot and blocks exactly while it runs.
    - A request is admitted only with blocks for all its tokens (hazard H26).
    - A release never waits. The slot and the blocks are reused only after the fence of the request's last step, and the
      blocks only after the transfers in flight, too (hazards H3, H10, H16).
    """

    _limits: Limits
    _blocks: FencedPool
    _slots: FencedPool
    _prefix_cache: PrefixCache
    _tiers: TierView
    _states: StateCache | None
    _windows: WindowCache | None

    @property
    def has_free_slot(self) -> bool:
        """Whether one more request may run."""
        return self._slots.num_available > 0

    @property
    def is_settling(self) -> bool:
        """Whether some released blocks become available only when a transfer in flight ends."""
        return self._blocks.is_settling

    def has_blocks(self, count: int) -> bool:
        """Whether `count` blocks are free or may be evicted."""
        return self._blocks.num_available >= count

    def fits(self, request: Request, reuse: Reuse, *, num_running: int, preempted: Sequence[Request] = ()) -> bool:
        """Whether enough blocks are available for the tokens that the waiting request does not reuse and one more
        token, with one block left for each running request.

        preempted  running requests whose blocks count as available, as if they were preempted; also blocks that other
                   requests share
        """
        hits = reuse.hits
        needed = self._limits.num_blocks(len(request.tokens) + 1) - len(hits)
        # rule: hits-are-not-free-blocks
        available = self._blocks.num_available - sum(self._blocks.is_cached(block) for block in hits)
        available += sum(len(other.blocks.ids) for other in preempted if other.blocks is not None)
        if self._windows is not None:
            # rule: admission-needs-room-for-pages
            needed += self._windows.blocks_at_admission(request, preempted=preempted)
            available += sum(self._windows.held_blocks(other) for other in preempted)
        if self._states is not None and not preempted:
            key = _last_key(request, reuse.num_blocks)
            if not self._states.has_room(key, loads=reuse.num_parts > 0):  # rule: admission-needs-a-state
                return False
        return needed + num_running - len(preempted) <= available

    def start(self, request: Request, reuse: Reuse) -> tuple[Sequence[BlockId], tuple[Fence, ...]]:
        """Give the request a slot, the blocks that it reuses, and new blocks for its other tokens.

        Returns those new blocks that a load from tiers will fill, and the fences of the last uses of all new blocks.
        The load and the first step must wait for these fences.
        """
        hits, windows = reuse.hits, self._windows
        states: RequestStates | None = None
        after: tuple[Fence, ...] = ()
        if self._states is not None:  # before blocks are taken: that may evict a block and its checkpoint
            stop, loads = reuse.num_blocks * self._limits.block_tokens, reuse.num_parts > 0
            key = _last_key(request, reuse.num_blocks)
            states, after = self._states.start(key, stop=stop, loads=loads, turns=request.turns)
            request.turns = states.turns
        blocks = self._blocks.share(hits)  # rule: hits-are-leased-before-others-are-evicted
        # rule: pages-are-leased-before-others-are-evicted
        pages = None if windows is None else windows.start(request, reuse.num_blocks)
        # rule: admission-takes-its-blocks
        fresh = self._blocks.take(self._limits.num_blocks(len(request.tokens)) - len(hits))
        blocks.extend(fresh)
        request.slot, request.blocks, request.states = self._slots.take(1), blocks, states
        request.slot_id = request.slot.ids[0]
        self._prefix_cache.add_pending(request, request.keys[len(hits) :])
        loaded = fresh.ids[: reuse.num_loads]
        if self._states is not None and states is not None and reuse.num_parts:
            loaded = [*self._states.block_ids(states), *loaded]
        if pages is not None:
            loaded = [*pages.ids, *loaded]
            after = (*after, *pages.after)  # rule: fresh-page-waits-for-its-last-use
        # rule: fresh-state-waits-for-its-last-use
        return loaded, (*fresh.after, *after)

    def plan_states(
        self, request: Request, start: int, stop: int, *, checkpoint: bool
    ) -> tuple[StateIds | None, tuple[Fence, ...]]:
        """The states that a row over `[start, stop)` reads and writes (None: the model has no recurrent state), and the
        fences for which its step must wait.

        checkpoint   write a checkpoint at `stop`, which is the end of a block
        """
        if self._states is None or request.states is None:
            return None, ()
        return self._states.plan(
            request.states, start, stop, checkpoint=checkpoint and self._limits.prefix_cache and request.shares
        )

    def plan_decode_states(self, request: Request) -> tuple[StateIds | None, tuple[Fence, ...]]:
        """The same for the request's next decode row."""
        if self._states is None or request.states is None:
            return None, ()
        return self._states.plan_decode(
            request.states,
            request.launched_len,
            in_flight=request.drafts_in_flight,
            checkpoint=self._limits.prefix_cache and request.shares,
        )

    def missing_blocks(self, request: Request, length: int) -> int:
        """Number of blocks to add until the request's blocks and pages hold `length` tokens; 0: none."""
        assert request.blocks is not None
        missing = max(0, self._limits.num_blocks(length) - len(request.blocks.ids))
        return missing if self._windows is None else missing + max(0, self._windows.missing(request, length))

    def grow(self, request: Request, length: int) -> Sequence[Fence]:
        """Make the blocks and pages of a running request hold `length` tokens. Returns the fences of the last uses of
        added blocks, for which the next step must wait.
        """
        assert request.blocks is not None
        fresh = self._blocks.take(max(0, self._limits.num_blocks(length) - len(request.blocks.ids)))
        request.blocks.extend(fresh)
        if self._windows is None:
            return fresh.after
        return *fresh.after, *self._windows.grow(request, max(0, self._windows.missing(request, length)))

    def grow_by_one(self, requests: Sequence[Request]) -> Sequence[Fence] | None:
        """Extend the block tables of running requests by one block each. Returns the fences of the last uses of added
        blocks, for which the next step must wait. None, and nothing has changed: there are too few blocks, or some of
        the requests need pages, too.
        """
        leases = [request.blocks for request in requests if request.blocks is not None]
        full = [lease for lease, one in zip(leases, requests, strict=True) if len(lease.ids) == len(one.block_table)]
        if self._windows is not None or not self.has_blocks(len(full)):
            return None
        fresh = self._blocks.take(len(full))
        for lease in full:
            lease.extend(fresh.split(1))
        for lease, request in zip(leases, requests, strict=True):
            request.block_table = (*request.block_table, lease.ids[len(request.block_table)])
        return fresh.after

    def extend_block_table(self, request: Request, length: int) -> None:
        """Extend `request.block_table` to cover `length` tokens. It stays the same object if it already covers them."""
        assert request.blocks is not None
        if len(request.block_table) < (count := self._limits.num_blocks(length)):
            request.block_table = tuple(request.blocks.ids[:count])
            if self._windows is not None:
                request.window_table = self._windows.table(request, count)

    def release(self, request: Request) -> None:
        """Release the slot and the blocks at once, if the request is running. Published blocks stay findable."""
        if request.slot is None or request.blocks is None:
            return
        after = () if request.last_fence is None else (request.last_fence,)
        count = request.published_blocks
        stores = request.may_store(count, self._limits.block_tokens) == count
        request.slot.release(after=after)  # rule: slot-release-waits-for-the-last-step
        request.blocks.release(after=after, until=self._tiers.transfers_fence())  # rule: blocks-are-released
        if self._states is not None and request.states is not None:
            self._states.release(request.states, after, stores=stores)
            request.states = None
        if self._windows is not None:
            self._windows.release(request, after, stores=stores)
        request.slot = request.blocks = None
        request.block_table = ()
        self._prefix_cache.drop_pending(request, request.keys)  # rule: ended-request-completes-no-blocks


def _last_key(request: Request, num_blocks: int) -> Key | None:
    """The key of the request's last reused block; None: no block is reused."""
    return request.keys[num_blocks - 1] if num_blocks else None
