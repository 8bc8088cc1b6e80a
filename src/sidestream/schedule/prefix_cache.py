"""The prefix cache on the device: the keys (block hashes) of requests, the blocks that are findable under keys, and the
keys of blocks that are being computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from sidestream.schedule.limits import Limits, reusable_tokens
from sidestream.schedule.request import Request
from sidestream.schedule.states import StateCache
from sidestream_kv.kv.key_log import DeviceKeyLog
from sidestream_kv.kv.keys import BlockKeys
from sidestream_kv.kv.pool import FencedPool, Lease
from sidestream_kv.types import BlockId, Fence, Key, RequestId, StorePlan


class PrefixCache:
    """Publishes complete blocks under their keys, and finds published blocks.

    Invariants:
    - Only blocks of committed tokens are published, never blocks of a step in flight (hazard H12).
    - A key is pending while a running request loads or computes its block: from the start of the request until it
      publishes the block or releases its blocks. Other requests wait for a pending block instead of computing it too.
    """

    def __init__(
        self,
        limits: Limits,
        blocks: FencedPool,
        keys: BlockKeys,
        states: StateCache | None = None,
        key_log: DeviceKeyLog | None = None,
    ) -> None:
        self.keys_version = 0
        """Version of the keys. It grows when the weights change, because then all keys change."""
        self._limits = limits
        self._blocks = blocks
        self._keys = keys
        self._pending: dict[Key, RequestId] = {}
        self._states = states
        self._key_log = blocks.key_log = key_log
        if states is not None:
            blocks.on_evict = states.forget  # rule: state-is-forgotten-with-its-block

    # ------------------------------------------------------------------ keys

    @property
    def key_root(self) -> Key:
        """Root from which another process derives the same keys (`BlockKeys.from_root`); empty if the prefix cache is
        off.
        """
        return self._keys.root if self._limits.prefix_cache else b""

    def keys_of(self, tokens: Sequence[int] | npt.NDArray[np.int64], *, salt: str = "") -> list[Key]:
        """Keys of the complete blocks of `tokens` in a request with this cache salt. Callable from any thread."""
        keys: list[Key] = []
        if self._limits.prefix_cache:
            self._keys.extend(keys, tokens, salt=salt)
        return keys

    def drop_stale_keys(self, request: Request) -> None:
        """Drop the request's keys if they were made before the last change of the weights."""
        if request.keys_version != self.keys_version:
            request.keys.clear()
            request.keys_version = self.keys_version

    def rekey(self, keys: BlockKeys) -> None:
        """Use `keys` for all blocks from now on. Blocks that were published earlier keep their old keys until
        `forget_all`.
        """
        self._keys = keys
        self.keys_version += 1

    # ------------------------------------------------------------------ finding

    def wanted_keys(self, request: Request) -> list[Key]:
        """Keys of the blocks that the request may reuse instead of computing them."""
        if not self._limits.prefix_cache:
            return []
        self._keys.extend(request.keys, request.tokens, salt=request.cache_salt)
        size = self._limits.block_tokens
        return request.keys[: reusable_tokens(len(request.tokens), size) // size]

    def on_device(self, keys: Sequence[Key]) -> list[BlockId]:
        """Blocks of the longest run of leading `keys` that are on the device. Some may be partial: see `num_usable`."""
        return self._blocks.match(keys)  # rule: blocks-on-the-device-are-reused

    def num_usable(self, hits: Sequence[BlockId], num_blocks: int) -> int:
        """How many of `hits`, the request's first blocks on the device, it may use if it reuses `num_blocks` blocks:
        those before the first partial block to which a layer with a sliding window would attend.
        """
        if not self._limits.window:
            return len(hits)
        first = self._limits.blocks_before_window(num_blocks)
        partial = self._blocks.first_partial(hits[first:])  # rule: hit-is-whole-in-its-window
        return len(hits) if partial is None else first + partial

    @property
    def num_pending(self) -> int:
        """The pending keys: running requests load or compute their blocks."""
        return len(self._pending)

    def is_pending(self, keys: Sequence[Key]) -> bool:
        """Whether a running request loads or computes a block of these keys now."""
        return not self._pending.keys().isdisjoint(keys)

    def add_pending(self, request: Request, keys: Iterable[Key]) -> None:
        """Call it when the request starts. Marks the keys of the blocks that it will load or compute as pending."""
        for key in keys:
            self._pending.setdefault(key, request.id)

    def drop_pending(self, request: Request, keys: Iterable[Key]) -> None:
        """End the pending state of these keys. Call it when the request has published the blocks, or will not complete
        them.
        """
        pending, own = self._pending, request.id
        for key in keys:
            if pending.get(key) == own:
                del pending[key]

    # ------------------------------------------------------------------ publishing and forgetting

    def publish(self, request: Request, complete: int) -> Sequence[tuple[Key, BlockId]]:
        """Make the first `complete` blocks findable, and the checkpoints at their ends. For one request, `complete`
        must grow with every call. Returns the newly published blocks that were not loaded from a tier, including the
        parts of checkpoints.
        """
        assert request.blocks is not None
        if not self._limits.prefix_cache or not request.shares:  # rule: blocks-from-before-a-reset-stay-private
            return ()
        self._keys.extend(request.keys, request.tokens, salt=request.cache_salt)
        first = request.published_blocks
        keys, ids = request.keys[first:complete], request.blocks.ids[first:complete]
        self.drop_pending(request, keys)  # rule: published-block-is-not-pending
        request.published_blocks = complete
        if (found := min(complete, request.found_blocks) - first) > 0:
            partial = min(max(0, request.partial_blocks - first), found)
            # rule: block-without-all-layers-is-published-as-partial
            self._blocks.publish_all(ids[:partial], keys[:partial], partial=True)
            self._blocks.publish_all(ids[partial:found], keys[partial:found])
            keys, ids = keys[found:], ids[found:]
        fresh = [(key, block) for key, block in zip(keys, ids, strict=True) if self._blocks.publish(block, key)]
        if self._key_log is not None:
            self._key_log.sequence(request.keys, request.tokens, first=first, stop=complete, salt=request.cache_salt)
        if request.states is not None and self._states is not None:
            # rule: states-are-published-with-their-blocks
            fresh += self._states.publish(
                request.states,
                request.keys,
                complete,
                num_prompt_tokens=len(request.prompt),
                findable=lambda key: self._blocks.get(key) is not None,
            )
        return fresh

    def invalidate(self, request: Request) -> Sequence[Key]:
        """Make all blocks that the request computed itself unfindable, because its logits are not finite: KV of earlier
        chunks may be broken as well. Of recurrent states, also the checkpoint from which it started. Returns the keys.
        """
        assert request.own_blocks is not None and request.blocks is not None
        own = slice(request.own_blocks, max(request.published_blocks, request.found_blocks))
        keys = request.keys[own]
        # rule: non-finite-logits-invalidate-blocks
        self._blocks.forget(
            [block for key, block in zip(keys, request.blocks.ids[own], strict=False) if self._blocks.get(key) == block]
        )
        if self._states is not None:
            # rule: broken-request-invalidates-its-first-state
            of_states = request.keys[max(0, own.start - 1) : own.stop]
            self._states.forget(of_states)  # rule: broken-request-invalidates-its-states
            keys = [*keys, *(part for key in of_states for part in self._states.part_keys(key))]
        return keys

    def forget_all(self, running: Iterable[Request]) -> None:
        """Make every block unfindable, including the blocks that running requests will complete (hazard H8)."""
        self._blocks.forget_all()  # rule: reset-drops-keys-on-the-device
        if self._states is not None:
            self._states.forget_all()  # rule: reset-drops-keys-of-states
        self._pending.clear()  # rule: reset-ends-joining
        for request in running:  # rule: reset-makes-running-requests-private
            request.shares = False

    def store_again(self, keys: Iterable[Key], after: tuple[Fence, ...]) -> tuple[StorePlan, Lease] | None:
        """Plan to store the blocks of `keys` that are still on the device. The caller submits the plan, then releases
        the lease. `after`: the fence of the last committed step.
        """
        # rule: partial-block-is-not-stored
        found = {
            key: block
            for key in keys
            if (block := self._blocks.get(key)) is not None and not self._blocks.is_partial(block)
        }
        if not found:
            return None
        # A block becomes findable when rank 0 has ended the step that filled it. Other ranks may still run that step,
        # so the store must wait for it.
        plan = StorePlan(  # rule: deferred-store-waits-for-every-rank
            tuple(found), tuple(found.values()), after, tuple(found)
        )
        return plan, self._blocks.share([*found.values()])  # rule: deferred-store-leases-its-blocks
