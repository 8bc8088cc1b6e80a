"""Reuse: finds the blocks that a waiting request need not compute, on the device and in tiers.

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
from sidestream.schedule.prefix_cache import PrefixCache
from sidestream.schedule.request import Request
from sidestream.schedule.states import Source, StateCache
from sidestream.schedule.tiers import TierLoads
from sidestream_kv.types import BlockId, Key


@dataclass(frozen=True, slots=True)
class Reuse:
    """The blocks that a request may reuse. The first blocks are on the device, the others in tiers.

    hits         blocks on the device
    num_blocks   number of all reused blocks
    keys         keys of the blocks to load from tiers: the parts of the checkpoint, if it is not on the device, then
                 blocks of KV
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
    def num_state_parts(self) -> int:
        """Number of parts of the checkpoint to load from tiers; 0: the checkpoint is on the device."""
        return len(self.keys) - self.num_loads


class ReuseFinder:
    """Looks for reusable blocks on the device and in tiers. Changes nothing."""

    def __init__(
        self, limits: Limits, *, prefix_cache: PrefixCache, tiers: TierLoads, states: StateCache | None
    ) -> None:
        self._limits = limits
        self._prefix_cache = prefix_cache
        self._tiers = tiers
        self._states = states

    def find(self, request: Request, wanted: Sequence[Key]) -> Reuse:
        """Find all blocks that the request could reuse, also in tiers that are slower than host memory."""
        return self._find(wanted, self._prefix_cache.on_device(wanted), lambda keys: self._tiers.locate(request, keys))

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
            reuse = self._find(wanted, self._prefix_cache.on_device(wanted), locate_in_host)
        if reuse.keys:
            alone = self._find(wanted, reuse.hits, lambda keys: ())
            # rule: blocks-in-host-memory-are-reused
            if not self._tiers.is_worth_loading(
                reuse.sources, num_blocks=reuse.num_blocks - alone.num_blocks, num_partial=reuse.num_partial
            ):
                reuse = alone
        return reuse if self._states is None else replace(reuse, num_joinable=num_joinable)

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
        """Reduce the found blocks (on the device and in tiers) to the blocks before the last checkpoint."""
        sources = locate(wanted[len(hits) :])
        known = count = len(hits) + len(sources)
        state_keys: Sequence[Key] = ()
        state_sources: Sequence[Source] = ()
        if self._states is not None:
            count, state_sources = self._states.reach(wanted, known, locate)
            if state_sources:
                state_keys = self._states.part_keys(wanted[count - 1])
        loads = slice(len(hits), max(len(hits), count))
        keys = (*state_keys, *wanted[loads])
        num_partial = max(0, self._limits.blocks_before_window(count) - len(hits))
        sources = (*state_sources, *sources[: loads.stop - loads.start])
        return Reuse(hits[:count], count, keys, sources, known, num_partial)
