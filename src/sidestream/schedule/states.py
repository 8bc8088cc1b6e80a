"""Recurrent states of running requests, and checkpoints of them that later requests start from.

A request owns one state, which each of its steps reads and overwrites. A step that ends where a checkpoint is wanted
writes another state instead, and the step after it reads that one: a checkpoint costs no copy, and nothing ever writes
to it again.

    step ending at   25          32 (checkpoint)      33            34
    reads            own         own                  checkpoint    own
    writes           own         checkpoint           own           own
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Protocol

from sidestream.errors import InvariantError
from sidestream.kv.pool import FencedPool, Lease
from sidestream.kv.state_layout import StateRegion
from sidestream.schedule.limits import Limits
from sidestream.types import BlockId, Fence, Key, StateIds, StorePlan

# Distinguishes the keys of a checkpoint's parts from those of blocks: any constant whose last bytes are zero.
_PART = int.from_bytes(b"sidestream-st\0\0\0", "big")

Source = str
"""Name of the tier that holds a block."""

BEGINS = -1
"""Read by the first row of a sequence: no state."""


def part_keys(key: Key, num_parts: int) -> list[Key]:
    """Keys in the tiers of the parts of the checkpoint `key`."""
    number = int.from_bytes(key, "big") ^ _PART
    return [(number ^ part).to_bytes(len(key), "big") for part in range(num_parts)]


class TierUses(Protocol):
    """The questions about transfers of states."""

    def transfers_fence(self) -> Fence | None:
        """Done when no transfer submitted so far uses device blocks; None: none does now."""
        ...


@dataclass(slots=True)
class RequestStates:
    """The states of one running request.

    own          written by its steps
    source       the checkpoint that its next step reads; None: that step reads `own`
    unpublished  checkpoints of steps in flight, with the tokens that each covers
    read         checkpoints that steps in flight read, with the end of each step
    candidates   written by steps in flight, if they reach the end of a block: one for each such step, in order
    covered      tokens that the state covers after the last planned step, at least
    reached      tokens that it covers after the last committed step
    latest       the last checkpoint that was made while decoding, with its key
    loaded       tokens that the checkpoint covers which it started from, if it came from a tier
    """

    own: Lease
    source: Lease | None
    unpublished: list[tuple[int, Lease]] = field(default_factory=list)
    read: list[tuple[int, Lease]] = field(default_factory=list)
    candidates: list[Lease] = field(default_factory=list)
    covered: int = 0
    reached: int = 0
    latest: tuple[int, Key] | None = None
    loaded: int = -1


class StateCache:
    """Owner of the leases of states, and of the checkpoints' keys.

    Invariants:
    - A checkpoint has the key of the block at whose end it was taken, and is published once the host has seen the fence
      of the step that wrote it (H7, H12).
    - A checkpoint is never written after the step that made it.
    - A checkpoint is made only if a state remains for each request that may still start: it never delays an admission.
    - The state of a row with drafts covers none of them. So after a step with drafts, only the device knows what the
      next step's state covers: that step gets a state more, in which the device writes the checkpoint if its state
      passes the end of a block. The host learns it at commit.
    - While a request decodes, its newest checkpoint replaces the one before, and is stored in tiers when the request
      leaves the device: only the end of a turn is worth keeping.
    """

    def __init__(
        self, limits: Limits, *, region: StateRegion, states: FencedPool, slots: FencedPool, tiers: TierUses
    ) -> None:
        self._limits = limits
        self._region = region
        self._states = states
        self._slots = slots
        self._tiers = tiers
        self._to_store: list[Key] = []

    # ------------------------------------------------------------------ finding

    def part_keys(self, key: Key) -> list[Key]:
        """Keys in the tiers of the parts of the checkpoint `key`: a state takes several blocks there."""
        return part_keys(key, self._region.blocks_per_state)

    def reach(
        self, keys: Sequence[Key], num_blocks: int, locate: Callable[[Sequence[Key]], Sequence[Source]]
    ) -> tuple[int, Sequence[Source]]:
        """The number of leading blocks, at most `num_blocks`, at whose end there is a checkpoint, and the tiers that
        hold its parts; no tiers: it is on the device.
        """
        for count in range(num_blocks, 0, -1):
            if self._states.get(keys[count - 1]) is not None:  # rule: hit-needs-a-state-at-its-end
                return count, ()
            parts = self.part_keys(keys[count - 1])
            sources = locate(parts[:1])
            # rule: hit-needs-all-parts-of-a-state
            if sources and len(sources := locate(parts)) == len(parts):
                return count, sources
        return 0, ()

    # ------------------------------------------------------------------ requests

    def has_room(self, key: Key | None, *, loads: bool) -> bool:
        """Whether a request that starts from the checkpoint `key` gets a state of its own, and one to load the
        checkpoint into if it `loads` it.
        """
        return self._states.num_available > loads + (not loads and self._is_unused(key))

    def start(self, key: Key | None, *, stop: int, loads: bool) -> tuple[RequestStates, tuple[Fence, ...]]:
        """The states of a request that starts from the checkpoint `key`, which covers `stop` tokens, or from nothing.
        `loads`: the checkpoint is loaded from a tier into a state that is taken for it.

        The fences are last uses of the states that the load and the first step write.
        """
        source = None
        if loads:
            source = self._states.take(1)
        elif key is not None:
            state_id = self._states.get(key)
            if state_id is None:
                raise InvariantError("a request starts from a checkpoint that is gone")
            source = self._states.share([state_id])  # rule: request-starts-from-the-checkpoint-that-it-found
        own = self._states.take(1)
        states = RequestStates(own, source, covered=stop, reached=stop)
        if loads and source is not None:
            states.unpublished.append((stop, source))
            states.loaded = stop
            return states, (*own.after, *source.after)
        return states, own.after

    def block_ids(self, states: RequestStates) -> Sequence[BlockId]:
        """The blocks into which the request's checkpoint is loaded."""
        assert states.source is not None
        return self._region.block_ids(states.source.ids[0])

    def plan(
        self, states: RequestStates, start: int, stop: int, *, checkpoint: bool
    ) -> tuple[StateIds, tuple[Fence, ...]]:
        """The states that a step over `[start, stop)` reads and writes; the fences are last uses of what it writes."""
        states.covered = stop
        read = self._read(states, start, stop)
        if not checkpoint or not self._may_checkpoint():
            return StateIds(read, states.own.ids[0]), ()
        made = self._states.take(1)
        states.source = made  # rule: next-step-reads-the-checkpoint
        states.unpublished.append((stop, made))
        return StateIds(read, made.ids[0]), made.after

    def plan_decode(
        self, states: RequestStates, length: int, *, in_flight: int, checkpoint: bool
    ) -> tuple[StateIds, tuple[Fence, ...]]:
        """The states of a decode row whose first token is at `length`, or up to `in_flight` tokens before it."""
        border = (length + 1) // self._limits.block_tokens * self._limits.block_tokens
        covered = states.covered
        if covered == length:  # there were no drafts before, so the host knows what the new state covers
            return self.plan(states, length, length + 1, checkpoint=checkpoint and border == length + 1)
        states.covered = length - in_flight + 1
        read = self._read(states, length, length + 1)
        if not checkpoint or border <= covered or not self._may_checkpoint():
            return StateIds(read, states.own.ids[0]), ()
        candidate = self._states.take(1)
        states.candidates.append(candidate)
        return StateIds(read, states.own.ids[0], candidate.ids[0]), candidate.after

    def _read(self, states: RequestStates, start: int, stop: int) -> int:
        if states.source is None:
            return states.own.ids[0] if start else BEGINS
        source, states.source = states.source, None
        states.read.append((stop, source))
        return source.ids[0]

    def _may_checkpoint(self) -> bool:
        # rule: checkpoint-leaves-a-state-for-each-request
        return self._states.num_available > self._slots.num_available

    def commit(self, states: RequestStates, ids: StateIds, covers: int, committed_len: int) -> None:
        """Take in a step of the request with these states, whose new state covers `covers` tokens. Give back published
        checkpoints that only committed steps read.
        """
        if ids.checkpoint >= 0:
            candidate = states.candidates.pop(0)
            border = covers // self._limits.block_tokens * self._limits.block_tokens
            if border > states.reached:  # rule: candidate-is-a-checkpoint-if-its-border-was-reached
                for checkpoints in (states.unpublished, states.read):
                    checkpoints.append((border, candidate))
                    checkpoints.sort(key=itemgetter(0))
            else:
                candidate.release()  # rule: candidate-that-is-no-checkpoint-is-released
        states.reached = covers
        states.covered = max(states.covered, covers)
        waiting = {id(made) for _, made in states.unpublished}
        while states.read and states.read[0][0] <= committed_len and id(states.read[0][1]) not in waiting:
            # rule: checkpoint-is-released-after-its-transfers
            states.read.pop(0)[1].release(until=self._tiers.transfers_fence())

    def publish(
        self, states: RequestStates, keys: Sequence[Key], complete: int, *, num_prompt_tokens: int
    ) -> list[tuple[Key, BlockId]]:
        """Make checkpoints at the ends of the first `complete` blocks findable. Returns the parts to store."""
        size, stored = self._limits.block_tokens, list[tuple[Key, BlockId]]()
        # rule: checkpoint-is-published-after-its-step
        while states.unpublished and states.unpublished[0][0] <= complete * size:
            stop, made = states.unpublished.pop(0)
            # rule: checkpoint-has-the-key-of-its-last-block
            key, state_id = keys[stop // size - 1], made.ids[0]
            if not self._states.publish(state_id, key) or stop == states.loaded:
                continue
            if stop <= num_prompt_tokens:
                stored += zip(self.part_keys(key), self._region.block_ids(state_id), strict=True)
                continue
            if states.latest is not None and self._states.get(states.latest[1]) == states.latest[0]:
                self._states.forget([states.latest[0]])  # rule: newest-checkpoint-of-an-answer-replaces-the-one-before
            states.latest = (state_id, key)
        return stored

    def release(self, states: RequestStates, after: tuple[Fence, ...]) -> None:
        """Give everything back, after the request's last step. Published checkpoints stay findable; the newest is to be
        stored.
        """
        # A checkpoint in `unpublished` is the request's `source`, or is in `read`.
        leases = [states.own, *(lease for _, lease in states.read)]
        leases += states.candidates  # rule: candidates-are-released-with-their-request
        if states.source is not None:
            leases.append(states.source)
        for lease in leases:
            # rule: states-are-released-after-the-last-step
            lease.release(after=after, until=self._tiers.transfers_fence())
        if states.latest is not None:
            self._to_store.append(states.latest[1])  # rule: newest-checkpoint-is-stored-when-its-request-leaves

    # ------------------------------------------------------------------ stores

    def store_latest(self) -> tuple[StorePlan, Lease] | None:
        """Plan to store the newest checkpoints of requests that have left the device, where it still has them. The
        caller submits the plan, then releases the lease.
        """
        if not self._to_store:
            return None
        found = {key: state_id for key in self._to_store if (state_id := self._states.get(key)) is not None}
        self._to_store.clear()
        if not found:
            return None
        parts = [
            pair
            for key, state_id in found.items()
            for pair in zip(self.part_keys(key), self._region.block_ids(state_id), strict=True)
        ]
        keys, block_ids = zip(*parts, strict=True)
        # No fence to wait for: a checkpoint is findable only after the host saw the end of the step that wrote it.
        return StorePlan(keys, block_ids, (), keys), self._states.share([*found.values()])

    # ------------------------------------------------------------------ forgetting

    def forget(self, keys: Sequence[Key]) -> None:
        """Make the checkpoints with these keys unfindable."""
        self._states.forget([state_id for key in keys if (state_id := self._states.get(key)) is not None])

    def forget_all(self) -> None:
        """Make every checkpoint unfindable."""
        self._states.forget_all()
        self._to_store.clear()

    def _is_unused(self, key: Key | None) -> bool:
        state_id = None if key is None else self._states.get(key)
        return state_id is not None and self._states.is_cached(state_id)
