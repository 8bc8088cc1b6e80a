"""Reuse: finds the blocks that a waiting request need not compute, on the device and in tiers.

The reused blocks are the first blocks of the request, without a gap. A model with recurrent state also needs a
checkpoint (a kept state) at the end of these blocks, on the device or in a tier. So blocks after the last checkpoint
are not reused (hazard H15).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sidestream.schedule.prefix_cache import PrefixCache
from sidestream.schedule.request import Request
from sidestream.schedule.states import Source, StateCache
from sidestream.schedule.tiers import TierLoads
from sidestream.types import HOST, BlockId, Key


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
    """

    hits: Sequence[BlockId]
    num_blocks: int
    keys: Sequence[Key]
    sources: Sequence[Source]
    num_joinable: int

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

    def __init__(self, *, prefix_cache: PrefixCache, tiers: TierLoads, states: StateCache | None) -> None:
        self._prefix_cache = prefix_cache
        self._tiers = tiers
        self._states = states

    def find(self, request: Request, wanted: Sequence[Key]) -> Reuse:
        """Find all blocks that the request could reuse, also in tiers that are slower than host memory."""
        hits = self._prefix_cache.on_device(wanted)
        return self._within(request, wanted, hits, self._tiers.locate(request, wanted[len(hits) :]), host_only=False)

    def loadable(self, request: Request, wanted: Sequence[Key], reuse: Reuse) -> Reuse:
        """The part of `reuse` that needs no promotion: blocks on the device, and blocks in host memory if loading them
        is expected to be faster than computing them.
        """
        hits, count = reuse.hits, self._tiers.num_in_host(reuse.sources)
        if self._states is None:
            num_loads = count if self._tiers.is_worth_loading(reuse.sources[:count]) else 0
            found = len(hits) + num_loads
            return Reuse(hits, found, reuse.keys[:num_loads], reuse.sources[:num_loads], found)
        if count < len(reuse.sources):  # perhaps a shorter run is completely in host memory
            hits = self._prefix_cache.on_device(wanted)
            sources = self._tiers.locate(request, wanted[len(hits) :])
            sources = sources[: self._tiers.num_in_host(sources)]
            shorter = self._within(request, wanted, hits, sources, host_only=True)
            reuse = replace(shorter, num_joinable=reuse.num_joinable)
        if not reuse.keys:
            return reuse
        hits = self._prefix_cache.on_device(wanted)
        alone, _ = self._states.reach(wanted, len(hits), lambda keys: [])
        if self._tiers.is_worth_loading(reuse.sources, num_blocks=reuse.num_blocks - alone):
            return reuse
        return Reuse(hits[:alone], alone, (), (), reuse.num_joinable)

    def _within(
        self,
        request: Request,
        wanted: Sequence[Key],
        hits: Sequence[BlockId],
        sources: Sequence[Source],
        *,
        host_only: bool,
    ) -> Reuse:
        """Reduce the found blocks (on the device and in tiers) to the blocks before the last checkpoint."""
        known = count = len(hits) + len(sources)
        state_keys: Sequence[Key] = ()
        state_sources: Sequence[Source] = ()
        if self._states is not None:

            def locate(keys: Sequence[Key]) -> Sequence[Source]:
                found = self._tiers.locate(request, keys)
                return [source for source in found if source == HOST] if host_only else found

            count, state_sources = self._states.reach(wanted, known, locate)
            if state_sources:
                state_keys = self._states.part_keys(wanted[count - 1])
        loads = slice(len(hits), max(len(hits), count))
        keys = (*state_keys, *wanted[loads])
        return Reuse(hits[:count], count, keys, (*state_sources, *sources[: loads.stop - loads.start]), known)
