"""Recurrent states of running requests, and checkpoints: states that are kept, so that later requests can start from
them. A state covers the tokens from which it was computed.

A request owns one state. Each step of the request reads and overwrites this state. A step that makes a checkpoint
instead writes its result to a new state, the checkpoint; the next step reads the checkpoint, and writes the request's
own state again. So a checkpoint costs no copy, and no step overwrites it.

    step ends at token   25     32 (checkpoint)   33            34
    reads                own    own               checkpoint    own
    writes               own    checkpoint        own           own
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Protocol

from sidestream.errors import InvariantError
from sidestream.schedule.limits import Limits, reusable_tokens
from sidestream.schedule.request import RequestStates, Turn, Turns
from sidestream.types import StateIds
from sidestream_kv.kv.pool import FencedPool, Lease
from sidestream_kv.kv.state_layout import StateRegion
from sidestream_kv.types import BlockId, Fence, Key, StorePlan

# Makes the keys of a checkpoint's parts differ from the keys of blocks. The number of the part is added in the last
# bytes, which are zero here.
_PART = int.from_bytes(b"sidestream-st\0\0\0", "big")

# Number of checkpoints at the ends of prompts and answers that are remembered, to know which a later turn supersedes.
_NUM_REMEMBERED = 1 << 14

Source = str
"""Name of the tier that holds a block, such as host or disk."""

BEGINS = -1
"""Stands for the id of the state to read, if the sequence begins and has no state yet."""


def part_keys(key: Key, num_parts: int) -> list[Key]:
    """Keys of the parts of the checkpoint `key`: tiers store a checkpoint in parts of one block each."""
    number = int.from_bytes(key, "big") ^ _PART
    return [(number ^ part).to_bytes(len(key), "big") for part in range(num_parts)]


class TierUses(Protocol):
    """The part of the tiers' interface that a StateCache calls."""

    def transfers_fence(self) -> Fence | None:
        """A fence that is done when all transfers submitted so far have released their device blocks. None: they all
        have released them already.
        """
        ...


@dataclass(eq=False)
class StateCache:
    """Owner of the leases of states, and of the checkpoints' keys.

    Invariants:
    - A checkpoint has the key of the block at whose end it was taken. It is published once the host has seen the fence
      of the step that wrote it (hazards H7 and H12 of docs/glossary.md).
    - Only the step that makes a checkpoint writes to it.
    - A checkpoint is made only if, for each free request slot, a state remains: checkpoints never delay an admission.
    - A state never covers drafts. So after a step with drafts, only the device knows how many tokens the state covers
      after the next step. Therefore the next step gets a candidate: an additional state, to which the device writes a
      checkpoint if the step reaches the end of a block. The host learns at commit whether it did.
    - While a request decodes, each new checkpoint replaces its last one, because only the end of an answer is worth
      keeping. The newest checkpoint is stored in tiers when the request ends or is preempted.
    - A turn of a conversation supersedes the turn before: once the state at the end of its prompt is stored, the states
      at the ends of the earlier prompt and answer are evicted first, in every tier. This does not apply to states where
      prompts branch, nor to turns from which two requests have started. If one request only branches off from an
      earlier prompt, the end of that prompt's answer is evicted early, and its next turn may be computed again.
    """

    _limits: Limits
    _states: FencedPool
    _region: StateRegion
    _slots: FencedPool
    _tiers: TierUses
    _to_store: dict[Key, bool] = field(default_factory=dict)  # and whether its request continued an earlier turn
    _turns: OrderedDict[Key, Turn] = field(default_factory=OrderedDict)  # each checkpoint's turn, oldest first
    _superseded: list[Key] = field(default_factory=list)

    # ------------------------------------------------------------------ finding

    def part_keys(self, key: Key) -> list[Key]:
        """Keys under which the tiers hold the parts of the checkpoint `key`; each part takes one block of a tier."""
        return part_keys(key, self._region.blocks_per_state)

    def reach(
        self, keys: Sequence[Key], num_blocks: int, locate: Callable[[Sequence[Key]], Sequence[Source]]
    ) -> tuple[int, Sequence[Source]]:
        """The last checkpoint in the first `num_blocks` blocks: the number of blocks that it covers (0: there is no
        checkpoint), and the tier of each of its parts (empty: it is on the device).
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
        """Whether there are states for a request that starts from the checkpoint `key`: its own state and, if it
        `loads` the checkpoint from a tier, a state for the checkpoint.
        """
        return self._states.num_available > loads + (not loads and self._is_unused(key))

    def start(
        self, key: Key | None, *, stop: int, loads: bool, turns: Turns | None = None
    ) -> tuple[RequestStates, tuple[Fence, ...]]:
        """Take the states of a request that starts from the checkpoint `key`, which covers `stop` tokens. If `key` is
        None, it starts without a checkpoint. `loads`: the checkpoint is loaded from a tier, into a state that this call
        takes. `turns`: None unless the request was preempted.

        Returns the states, and the fences of their last uses, for which the load and the first step must wait.
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
        if turns is None:
            turns = Turns(None if key is None else self._turns.get(key))
            if turns.earlier is not None:
                turns.earlier.starts += 1
        states = RequestStates(own, source, turns, covered=stop, reached=stop)
        if loads and source is not None:
            states.unpublished.append((stop, source))
            states.loaded = stop
            return states, (*own.after, *source.after)
        return states, own.after

    def block_ids(self, states: RequestStates) -> Sequence[BlockId]:
        """The device blocks to which the request's checkpoint is loaded."""
        assert states.source is not None
        return self._region.block_ids(states.source.ids[0])

    def plan(
        self, states: RequestStates, start: int, stop: int, *, checkpoint: bool
    ) -> tuple[StateIds, tuple[Fence, ...]]:
        """Choose the states that a step over `[start, stop)` reads and writes. Returns the states, and the fences of
        earlier uses of the written state, for which the step must wait.
        """
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
        """Choose the states of a decode row, as `plan` does. The first token of the row is at position `length` or, if
        drafts in flight are rejected, up to `in_flight` positions earlier.
        """
        border = (length + 1) // self._limits.block_tokens * self._limits.block_tokens
        covered = states.covered
        if covered == length:  # no drafts are in flight, so the host knows how many tokens the new state covers
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

    def commit(self, states: RequestStates, ids: StateIds, covers: int, committed_len: int, fence: Fence) -> None:
        """Commit a step of the request that used the states `ids`; its new state covers `covers` tokens. Releases
        published checkpoints that no step in flight reads. `fence`: fence of the step on all ranks; ranks other than 0
        may still run the step.
        """
        if ids.checkpoint >= 0:
            candidate = states.candidates.pop(0)
            border = covers // self._limits.block_tokens * self._limits.block_tokens
            if border > states.reached:  # rule: candidate-is-a-checkpoint-if-its-border-was-reached
                for checkpoints in (states.unpublished, states.read):
                    checkpoints.append((border, candidate))
                    checkpoints.sort(key=itemgetter(0))
            else:
                candidate.release(after=(fence,))  # rule: candidate-that-is-no-checkpoint-is-released
        states.reached = covers
        states.covered = max(states.covered, covers)
        waiting = {id(made) for _, made in states.unpublished}
        while states.read and states.read[0][0] <= committed_len and id(states.read[0][1]) not in waiting:
            # rule: checkpoint-is-released-after-its-transfers
            states.read.pop(0)[1].release(after=(fence,), until=self._tiers.transfers_fence())

    def publish(
        self,
        states: RequestStates,
        keys: Sequence[Key],
        complete: int,
        *,
        num_prompt_tokens: int,
        findable: Callable[[Key], bool],
    ) -> list[tuple[Key, BlockId]]:
        """Make checkpoints at the ends of the first `complete` blocks findable. Returns the parts to store.

        `findable`: whether a block can be found on the device. A block of another request, of which this request has a
        copy, may have been evicted; then a checkpoint at its end is not published.
        """
        size = self._limits.block_tokens
        stored: list[tuple[Key, BlockId]] = []
        # rule: checkpoint-is-published-after-its-step
        while states.unpublished and states.unpublished[0][0] <= complete * size:
            stop, made = states.unpublished.pop(0)
            # rule: checkpoint-has-the-key-of-its-last-block
            key, state_id = keys[stop // size - 1], made.ids[0]
            if not findable(key) or not self._states.publish(state_id, key) or stop == states.loaded:
                continue
            if stop <= num_prompt_tokens:
                if stop == reusable_tokens(num_prompt_tokens, size):
                    self._supersede(states.turns.earlier)
                    self._remember(states.turns.own, key)
                stored += zip(self.part_keys(key), self._region.block_ids(state_id), strict=True)
                continue
            if states.latest is not None and self._states.get(states.latest[1]) == states.latest[0]:
                self._states.forget([states.latest[0]])  # rule: newest-checkpoint-of-an-answer-replaces-the-one-before
            states.latest = (state_id, key)
        return stored

    def release(self, states: RequestStates, after: tuple[Fence, ...], *, stores: bool = True) -> None:
        """Release all states, with the fences of the request's last step. Published checkpoints stay findable. With
        `stores`, `store_latest` will store the request's newest checkpoint.
        """
        # The checkpoints in `unpublished` need no release of their own: each is also the request's `source`, or in
        # `read`.
        leases = [states.own, *(lease for _, lease in states.read)]
        leases += states.candidates  # rule: candidates-are-released-with-their-request
        if states.source is not None:
            leases.append(states.source)
        for lease in leases:
            # rule: states-are-released-after-the-last-step
            lease.release(after=after, until=self._tiers.transfers_fence())
        if states.latest is not None:
            self._remember(states.turns.own, states.latest[1])
            if stores:
                # rule: newest-checkpoint-is-stored-when-its-request-leaves
                self._to_store[states.latest[1]] = states.turns.earlier is not None

    # ------------------------------------------------------------------ stores

    def store_latest(self, after: tuple[Fence, ...]) -> tuple[StorePlan, Lease] | None:
        """Plan to store the newest checkpoint of each request that has ended or was preempted, unless the checkpoint
        was evicted. The caller submits the plan, then releases the lease. `after`: the fence of the last committed
        step.
        """
        if not self._to_store:
            return None
        found = {key: state_id for key in self._to_store if (state_id := self._states.get(key)) is not None}
        returning = frozenset(part for key in found if self._to_store[key] for part in self.part_keys(key))
        self._to_store.clear()
        if not found:
            return None
        parts = [
            pair
            for key, state_id in found.items()
            for pair in zip(self.part_keys(key), self._region.block_ids(state_id), strict=True)
        ]
        keys, block_ids = zip(*parts, strict=True)
        # A checkpoint is findable once rank 0 has ended the step that wrote it. Other ranks may still run that step.
        # rule: store-of-a-newest-checkpoint-waits-for-every-rank
        return StorePlan(keys, block_ids, after, keys, returning=returning), self._states.share([*found.values()])

    # ------------------------------------------------------------------ eviction by value

    def take_superseded(self) -> tuple[Key, ...]:
        """The keys of the parts of all checkpoints that were superseded since the last call."""
        keys = tuple(part for key in self._superseded for part in self.part_keys(key))
        self._superseded.clear()
        return keys

    def _remember(self, turn: Turn, key: Key) -> None:
        """Add the checkpoint to its request's turn."""
        turn.keys.append(key)
        self._turns[key] = turn
        if len(self._turns) > _NUM_REMEMBERED:
            self._turns.popitem(last=False)

    def _supersede(self, turn: Turn | None) -> None:
        """Let the checkpoints of the turn be evicted first, unless two requests have started from it."""
        if turn is None or turn.starts > 1:
            return
        keys = [key for key in turn.keys if self._turns.pop(key, None) is not None]
        self._states.demote(keys)
        self._superseded += keys

    # ------------------------------------------------------------------ forgetting

    def forget(self, keys: Sequence[Key]) -> None:
        """Make the checkpoints with these keys unfindable."""
        self._states.forget([state_id for key in keys if (state_id := self._states.get(key)) is not None])

    def forget_all(self) -> None:
        """Make every checkpoint unfindable."""
        self._states.forget_all()
        self._to_store.clear()
        self._turns.clear()
        self._superseded.clear()

    def _is_unused(self, key: Key | None) -> bool:
        state_id = None if key is None else self._states.get(key)
        return state_id is not None and self._states.is_cached(state_id)
