"""Reuse: which blocks a waiting request need not compute, and where they are.

A request continues from the end of a run of leading blocks. A model with recurrent state also needs a checkpoint at
that end: the run is shortened to the last block that has one, on the device or in a tier (H15).
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
    """What a request may reuse. Its first blocks are on the device, the rest is in tiers.

    hits         blocks on the device
    num_blocks   all reused blocks
    keys         of what is in tiers: the parts of the checkpoint, if it is not on the device, then blocks
    sources      the tier of each of `keys`
    num_joinable length of the run behind which a running request may compute the same: for a model with recurrent state
                 it may be longer than `num_blocks`, because blocks were found without a checkpoint at their end
    """

    hits: Sequence[BlockId]
    num_blocks: int
    keys: Sequence[Key]
    sources: Sequence[Source]
    num_joinable: int

    @property
    def num_loads(self) -> int:
        """Reused blocks that are in tiers."""
        return self.num_blocks - len(self.hits)

    @property
    def num_state_parts(self) -> int:
        """Parts of the checkpoint that are in tiers; 0: it is on the device."""
        return len(self.keys) - self.num_loads


class ReuseFinder:
    """Looks for reusable blocks on the device and in tiers. Changes nothing."""

    def __init__(self, *, prefix_cache: PrefixCache, tiers: TierLoads, states: StateCache | None) -> None:
        self._prefix_cache = prefix_cache
        self._tiers = tiers
        self._states = states

    def find(self, request: Request, wanted: Sequence[Key]) -> Reuse:
        """The most that the request could reuse, also from tiers that are slower than host memory."""
        hits = self._prefix_cache.on_device(wanted)
        return self._within(request, wanted, hits, self._tiers.locate(request, wanted[len(hits) :]), host_only=False)

    def loadable(self, request: Request, wanted: Sequence[Key], reuse: Reuse) -> Reuse:
        """The part of `reuse` that can start now: from host memory, if loading is expected to be worth it; else what is
        on the device.
        """
        hits, count = reuse.hits, self._tiers.num_in_host(reuse.sources)
        if self._states is None:
            num_loads = count if self._tiers.is_worth_loading(reuse.sources[:count]) else 0
            found = len(hits) + num_loads
            return Reuse(hits, found, reuse.keys[:num_loads], reuse.sources[:num_loads], found)
        if count < len(reuse.sources):  # a shorter run may be in host memory as a whole
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
        """What can be reused of a run of blocks on the device and in tiers."""
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
