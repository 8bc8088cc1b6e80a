"""Shares of the cache for owners of requests, such as the keys of a server. What an owner's requests have left in the
cache beyond its quota is evicted first, whoever needs the room; what nobody needs stays.
"""

from __future__ import annotations

from collections import OrderedDict

from sidestream.engine.parts import Parts
from sidestream.schedule.request import Request
from sidestream_kv.types import Key, StorePlan

_MOST_OWNERS = 4096  # the one that was used longest ago is forgotten


class Quotas:
    """The blocks that requests of each owner have used, in the order of their last use. Engine thread only."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._held: OrderedDict[str, OrderedDict[Key, None]] = OrderedDict()

    def ended(self, request: Request) -> None:
        """Count the blocks of a request that has ended, and demote its owner's oldest ones beyond the quota."""
        cache, scheduler = request.cache, self._parts.scheduler
        if cache is None or cache.quota_tokens is None:
            return
        size = self._parts.layout.block_tokens
        held = self._held.setdefault(cache.owner, OrderedDict())
        self._held.move_to_end(cache.owner)
        if len(self._held) > _MOST_OWNERS:
            self._held.popitem(last=False)
        for key in reversed(request.keys[: request.committed_len // size]):  # a block needs those before it
            held[key] = None
            held.move_to_end(key)
        over = [held.popitem(last=False)[0] for _ in range(len(held) - cache.quota_tokens // size)]
        alone = [key for key in over if not self._num_holders(key)]  # rule: quota-spares-other-owners
        if not alone:
            return
        # The block that is demoted last is evicted first.
        keys = (*scheduler.part_keys(alone), *reversed(alone))
        self._parts.blocks.demote(keys)
        if self._parts.transfers is not None:
            demotion = StorePlan((), (), (), (), superseded=keys)
            self._parts.transfers.submit([demotion])  # rule: kv-beyond-a-quota-goes-first

    def _num_holders(self, key: Key) -> int:
        return sum(key in held for held in self._held.values())
