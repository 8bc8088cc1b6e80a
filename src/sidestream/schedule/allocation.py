"""Allocates request slots and device blocks to requests: at admission, and when decoding needs more blocks. Releases
them when a request ends or is preempted.
"""

from __future__ import annotations

from collections.abc import Sequence

from sidestream.schedule.limits import Limits
from sidestream.schedule.prefix_cache import PrefixCache
from sidestream.schedule.request import Request
from sidestream.schedule.reuse import Reuse
from sidestream.schedule.states import RequestStates, StateCache
from sidestream.schedule.step_builder import StepBuilder
from sidestream.schedule.tiers import TierView
from sidestream.types import StateIds
from sidestream_kv.kv.pool import FencedPool
from sidestream_kv.types import BlockId, Fence, Key


class Allocator:
    """Takes and releases the leases of request slots and blocks. No other part of the scheduler does this.

    Invariants:
    - A request has a slot and blocks exactly while it runs.
    - A request is admitted only with blocks for all its tokens (hazard H26).
    - A release never waits. The slot and the blocks are reused only after the fence of the request's last step, and the
      blocks only after the transfers in flight, too (hazards H3, H10, H16).
    """

    def __init__(
        self,
        limits: Limits,
        *,
        blocks: FencedPool,
        slots: FencedPool,
        prefix_cache: PrefixCache,
        tiers: TierView,
        states: StateCache | None = None,
    ) -> None:
        self._limits = limits
        self._blocks = blocks
        self._slots = slots
        self._prefix_cache = prefix_cache
        self._tiers = tiers
        self._states = states

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
        if self._states is not None and not preempted:
            key = _last_key(request, reuse.num_blocks)
            if not self._states.has_room(key, loads=reuse.num_state_parts > 0):  # rule: admission-needs-a-state
                return False
        return needed + num_running - len(preempted) <= available

    def start(self, request: Request, reuse: Reuse) -> tuple[Sequence[BlockId], tuple[Fence, ...]]:
        """Give the request a slot, the blocks that it reuses, and new blocks for its other tokens.

        Returns those new blocks that a load from tiers will fill, and the fences of the last uses of all new blocks.
        The load and the first step must wait for these fences.
        """
        hits = reuse.hits
        states: RequestStates | None = None
        after: tuple[Fence, ...] = ()
        if self._states is not None:  # first: taking blocks may evict a block, and with it its checkpoint
            stop, loads = reuse.num_blocks * self._limits.block_tokens, reuse.num_state_parts > 0
            key = _last_key(request, reuse.num_blocks)
            states, after = self._states.start(key, stop=stop, loads=loads, turns=request.turns)
            request.turns = states.turns
        blocks = self._blocks.share(hits)  # rule: hits-are-leased-before-others-are-evicted
        fresh = self._blocks.take(self._limits.num_blocks(len(request.tokens)) - len(hits))
        blocks.extend(fresh)
        request.slot, request.blocks, request.states = self._slots.take(1), blocks, states
        self._prefix_cache.add_pending(request, request.keys[len(hits) :])
        loaded = fresh.ids[: reuse.num_loads]
        if self._states is not None and states is not None and reuse.num_state_parts:
            loaded = [*self._states.block_ids(states), *loaded]
        # rule: fresh-state-waits-for-its-last-use
        return loaded, (*fresh.after, *after)

    def plan_states(
        self, request: Request, start: int, stop: int, step: StepBuilder, *, checkpoint: bool
    ) -> StateIds | None:
        """The states that a row over `[start, stop)` reads and writes; None: the model has no recurrent state.

        checkpoint   write a checkpoint at `stop`, which is the end of a block
        """
        if self._states is None or request.states is None:
            return None
        ids, after = self._states.plan(
            request.states, start, stop, checkpoint=checkpoint and self._limits.prefix_cache and request.shares
        )
        step.after.extend(after)  # rule: checkpoint-waits-for-its-last-use
        return ids

    def plan_decode_states(self, request: Request, step: StepBuilder) -> StateIds | None:
        """The states of the request's next decode row; None: the model has no recurrent state."""
        if self._states is None or request.states is None:
            return None
        ids, after = self._states.plan_decode(
            request.states,
            request.launched_len,
            in_flight=request.drafts_in_flight,
            checkpoint=self._limits.prefix_cache and request.shares,
        )
        step.after.extend(after)  # rule: candidate-waits-for-its-last-use
        return ids

    def missing_blocks(self, request: Request, length: int) -> int:
        """Number of blocks to add until the request's blocks hold `length` tokens; 0 or less: none."""
        assert request.blocks is not None
        return self._limits.num_blocks(length) - len(request.blocks.ids)

    def grow(self, request: Request, count: int) -> Sequence[Fence]:
        """Add `count` blocks to a running request. Returns the fences of their last uses, for which the next step must
        wait.
        """
        assert request.blocks is not None
        fresh = self._blocks.take(count)
        request.blocks.extend(fresh)
        return fresh.after

    def extend_table(self, request: Request, length: int) -> None:
        """Extend `request.table` to cover `length` tokens. It stays the same object if it already covers them."""
        assert request.blocks is not None
        if len(request.table) < (count := self._limits.num_blocks(length)):
            request.table = tuple(request.blocks.ids[:count])

    def release(self, request: Request) -> None:
        """Release the slot and the blocks at once, if the request is running. Published blocks stay findable."""
        if request.slot is None or request.blocks is None:
            return
        after = () if request.last_fence is None else (request.last_fence,)
        request.slot.release(after=after)  # rule: slot-release-waits-for-the-last-step
        request.blocks.release(after=after, until=self._tiers.transfers_fence())  # rule: blocks-are-released
        if self._states is not None and request.states is not None:
            self._states.release(request.states, after)
            request.states = None
        request.slot = request.blocks = None
        request.table = ()
        self._prefix_cache.drop_pending(request, request.keys)  # rule: ended-request-completes-no-blocks


def _last_key(request: Request, num_blocks: int) -> Key | None:
    """The key of the request's last reused block; None: no block is reused."""
    return request.keys[num_blocks - 1] if num_blocks else None
