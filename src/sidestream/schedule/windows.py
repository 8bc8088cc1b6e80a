"""Pages of running requests: the blocks that hold the layers with a sliding window (`WindowedLayers`). A page goes back
to the pool as soon as no later token of its request reads it.

A page has the key of its block, with which its parts' keys are made. Later requests find it until it is evicted. They
need the pages in the window before their first computed token, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sidestream.schedule.limits import Limits, reusable_tokens
from sidestream.schedule.request import Request, WindowPages
from sidestream.schedule.states import Source, TierUses
from sidestream_kv.kv.key_log import DeviceKeyLog
from sidestream_kv.kv.pool import FencedPool, Lease
from sidestream_kv.kv.window_layout import WindowedLayers
from sidestream_kv.types import BlockId, Fence, Key, RequestId, StorePlan

# Makes the keys of a page's parts differ from the keys of blocks. The number of the part is added in the last bytes,
# which are zero here.
_PART = int.from_bytes(b"sidestream-wi\0\0\0", "big")


def page_keys(key: Key, num_parts: int) -> list[Key]:
    """Keys of the parts of the page that belongs to the block `key`."""
    number = int.from_bytes(key, "big") ^ _PART
    return [(number ^ part).to_bytes(len(key), "big") for part in range(num_parts)]


class FreshPages(NamedTuple):
    """New blocks for pages, and the fences of their last uses."""

    ids: tuple[BlockId, ...]
    after: tuple[Fence, ...]


@dataclass(eq=False)
class WindowCache:
    """Owner of the leases of pages, and of the pages' keys.

    Invariants:
    - A running request holds the pages from the window of its first uncommitted token on, and those of its steps in
      flight.
    - A page is released when a commit has moved the window past it, behind the fence of the committed step: steps in
      flight begin after the committed tokens, and do not read it. Transfers in flight keep it, too (hazards H3, H10).
    - Tiers get only the pages in the windows before positions where later prompts probably continue: the end of the
      prompt, the place where it branches from earlier prompts, and the end of the answer. All other pages are evicted
      first.

    _new_tokens   largest number of tokens of one request in a step
    _key_log      see `Scheduler`
    """

    _limits: Limits
    _layers: WindowedLayers
    _blocks: FencedPool
    _tiers: TierUses
    _new_tokens: int
    _key_log: DeviceKeyLog | None
    _running: dict[RequestId, Request] = field(default_factory=dict)
    _to_store: list[Key] = field(default_factory=list)

    # ------------------------------------------------------------------ finding

    def part_keys(self, key: Key) -> list[Key]:
        """Keys of the parts of the page that belongs to the block `key`, on the device and in tiers."""
        return page_keys(key, self._layers.parts)

    def window(self, num_blocks: int) -> range:
        """The blocks whose pages a request needs that continues after `num_blocks` blocks."""
        return range(self._layers.behind(num_blocks * self._limits.block_tokens), num_blocks)

    def on_device(self, key: Key) -> Sequence[BlockId] | None:
        """The parts of a page; None: the device does not hold all of them."""
        ids = self._blocks.match(self.part_keys(key))
        return ids if len(ids) == self._layers.parts else None

    def reach(
        self, keys: Sequence[Key], num_blocks: int, locate: Callable[[Sequence[Key]], Sequence[Source]]
    ) -> tuple[int, list[Key], list[Source]]:
        """How many of the first `num_blocks` blocks a request can reuse: the most whose window is complete, on the
        device or in tiers. Also the keys of the parts to load, and their tiers.
        """
        located: dict[int, Sequence[Source]] = {}

        def is_found(index: int) -> bool:
            if index not in located:
                located[index] = ()
                if self.on_device(keys[index]) is None:
                    located[index] = locate(self.part_keys(keys[index]))
                    # rule: hit-needs-all-parts-of-a-page
                    if len(located[index]) < self._layers.parts:
                        del located[index]
                        return False
            return True

        count = num_blocks
        while count:
            # rule: hit-has-the-pages-of-its-window
            gap = next((index for index in reversed(self.window(count)) if not is_found(index)), None)
            if gap is None:
                break
            count = gap
        loads = [index for index in self.window(count) if located.get(index)]
        return (
            count,
            [part for index in loads for part in self.part_keys(keys[index])],
            [source for index in loads for source in located[index]],
        )

    # ------------------------------------------------------------------ requests

    def blocks_at_admission(self, request: Request, *, preempted: Sequence[Request] = ()) -> int:
        """Number of blocks that must be available for the pages of the waiting request, and for what the pages of
        running requests, but not of `preempted`, may still take while they compute their prompts.
        """
        staying = [other for other in self._running.values() if other.in_prefill and other not in preempted]
        promised = sum(max(0, self._at_most(other) - self.held_blocks(other)) for other in staying)
        return self._at_most(request) + promised

    def start(self, request: Request, num_blocks: int) -> FreshPages:
        """Lease the pages in the window after the request's first `num_blocks` blocks. The request's blocks on the
        device are leased before, and no block was taken since `reach`. Returns the blocks that a load will fill.
        """
        window, parts = self.window(num_blocks), self._layers.parts
        found = [self.on_device(request.keys[index]) for index in window]
        if request.may_store(num_blocks, self._limits.block_tokens) == num_blocks:
            here = [index for index, ids in zip(window, found, strict=True) if ids is not None]
            # rule: pages-where-a-prompt-continues-are-stored
            self._to_store += [part for index in here for part in self.part_keys(request.keys[index])]
        lease = self._blocks.share([block for ids in found if ids is not None for block in ids])
        fresh = self._blocks.take(parts * found.count(None))
        loaded = FreshPages(tuple(fresh.ids), fresh.after)
        lease.extend(fresh)
        taken = iter(loaded.ids)
        held = [block for ids in found for block in (ids or [next(taken) for _ in range(parts)])]
        lease.ids[:] = held  # in the order of the sequence
        request.pages = WindowPages(lease, window.start, [0] * (window.start * parts) + held, window.start, num_blocks)
        self._running[request.id] = request
        return loaded

    def missing(self, request: Request, length: int) -> int:
        """Number of blocks to take until the request's pages hold `length` tokens; 0 or less: none."""
        assert request.pages is not None
        return self._limits.num_blocks(length) * self._layers.parts - len(request.pages.table)

    def grow(self, request: Request, count: int) -> Sequence[Fence]:
        """Add `count` blocks to the request's pages. Returns the fences of their last uses."""
        assert request.pages is not None
        fresh = self._blocks.take(count)
        request.pages.table += fresh.ids
        request.pages.lease.extend(fresh)
        return fresh.after

    def table(self, request: Request, num_blocks: int) -> tuple[BlockId, ...]:
        """The blocks of the pages of the request's first `num_blocks` blocks; those behind the window have new owners,
        and are not read.
        """
        assert request.pages is not None
        return tuple(request.pages.table[: num_blocks * self._layers.parts])

    # ------------------------------------------------------------------ publishing and releasing

    def publish(self, request: Request, complete: int) -> list[tuple[Key, BlockId]]:
        """Make the pages of the first `complete` blocks findable. Returns the parts to store."""
        pages, parts, stored = request.pages, self._layers.parts, list[tuple[Key, BlockId]]()
        assert pages is not None
        for index in range(pages.published, complete):
            block_ids = pages.table[index * parts : (index + 1) * parts]
            for key, block in zip(self.part_keys(request.keys[index]), block_ids, strict=True):
                # rule: page-of-a-window-is-stored
                if not self._blocks.publish(block, key):
                    continue
                if self._key_log is not None:
                    self._key_log.hide(key)  # rule: events-do-not-name-pages
                if index >= pages.found and self._continues(request, index):
                    stored.append((key, block))
        pages.published = max(pages.published, complete)
        return stored

    def trim(self, request: Request, fence: Fence) -> None:
        """Release the pages behind the window of the request's first uncommitted token. Call it when the stores of
        published pages were submitted. `fence`: fence of the committed step on all ranks.
        """
        pages, parts = request.pages, self._layers.parts
        if pages is None or (stop := self._layers.behind(request.committed_len)) <= pages.first:
            return
        for index in range(pages.first, min(stop, len(request.keys))):
            if not self._continues(request, index):
                self._blocks.demote(self.part_keys(request.keys[index]))
        behind = pages.lease.split((stop - pages.first) * parts)
        pages.first = stop
        # rule: page-is-released-behind-its-last-reader
        behind.release(after=(fence,), until=self._tiers.transfers_fence())

    def release(self, request: Request, after: tuple[Fence, ...], *, stores: bool) -> None:
        """Release all pages, with the fence of the request's last step. With `stores`, `store_latest` will store those
        in the window at its end.
        """
        pages = request.pages
        if pages is None:
            return
        # rule: pages-are-released-after-the-last-step
        pages.lease.release(after=after, until=self._tiers.transfers_fence())
        if stores:
            window = self.window(request.published_blocks)
            # rule: pages-at-the-end-are-stored
            self._to_store += [part for index in window for part in self.part_keys(request.keys[index])]
        request.pages = None
        request.window_table = ()
        del self._running[request.id]

    def store_latest(self, after: tuple[Fence, ...]) -> tuple[StorePlan, Lease] | None:
        """Plan to store the pages at the ends of requests that have ended or were preempted, unless they were evicted.
        The caller submits the plan, then releases the lease. `after`: the fence of the last committed step.
        """
        found = {key: block for key in self._to_store if (block := self._blocks.get(key)) is not None}
        self._to_store.clear()
        if not found:
            return None
        keys, block_ids = (*found,), (*found.values(),)
        # rule: store-of-pages-at-the-end-waits-for-every-rank
        return StorePlan(keys, block_ids, after, keys), self._blocks.share(block_ids)

    def forget(self, keys: Sequence[Key]) -> None:
        """Make the pages that belong to these blocks unfindable."""
        parts = (part for key in keys for part in self.part_keys(key))
        self._blocks.forget([block for part in parts if (block := self._blocks.get(part)) is not None])

    def forget_all(self) -> None:
        """Call it when all blocks became unfindable."""
        self._to_store.clear()

    def held_blocks(self, request: Request) -> int:
        """Number of blocks of the request's pages."""
        return 0 if request.pages is None else len(request.pages.lease.ids)

    def _at_most(self, request: Request) -> int:
        """Number of blocks that the request's pages take while its prompt is computed."""
        return self._layers.parts * self._layers.most_pages(len(request.tokens) + 1, self._new_tokens)

    def _continues(self, request: Request, index: int) -> bool:
        """Whether the page of this block is in the window before a place where later prompts probably continue."""
        end = reusable_tokens(request.prefill_end, self._limits.block_tokens) // self._limits.block_tokens
        return any(index in self.window(mark) for mark in (end, request.branch_blocks))
