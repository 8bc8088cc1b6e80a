"""Commit: adds the tokens of a finished step to its requests, and makes their complete blocks findable by other
requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sidestream.schedule.limits import Limits
from sidestream.schedule.prefix_cache import PrefixCache
from sidestream.schedule.request import Request, RequestQueues, State
from sidestream.schedule.spec_policy import SpecPolicy
from sidestream.schedule.states import StateCache
from sidestream.types import BatchPlan, RowResult
from sidestream_kv.types import BlockId, Fence, Key, StorePlan

RowOutput = tuple[Request, RowResult, int, str | None]
"""A request, its result, the number of committed tokens of the result, and the finish reason (None: the request
continues).
"""


@dataclass(frozen=True, slots=True)
class Committed:
    """The effects of one commit.

    outputs      one for each row that sampled and was not dropped, in the order of the batch
    completed    requests that completed blocks in this step, each with the number of all its complete blocks
    fence        the step's fence
    invalidated  keys to remove from all tiers: later logits of their requests were not finite, so their KV may be
                 broken
    """

    outputs: tuple[RowOutput, ...]
    completed: tuple[tuple[Request, int], ...]
    fence: Fence
    invalidated: tuple[Key, ...]


class Committer:
    """Applies the results of steps that have ended. `commit` is hot code: it handles every row of every step.

    Invariants:
    - Rows of finished or preempted requests are dropped (hazard H10).
    - `committed_len` grows by accepted tokens only, never by rejected drafts (hazard H12).
    - Blocks computed before logits that were not finite are not published (hazard H9).
    """

    def __init__(
        self,
        limits: Limits,
        *,
        queues: RequestQueues,
        prefix_cache: PrefixCache,
        policy: SpecPolicy,
        states: StateCache | None = None,
    ) -> None:
        self._limits = limits
        self._states = states
        self._queues = queues
        self._prefix_cache = prefix_cache
        self._policy = policy

    def commit(self, batch: BatchPlan, results: Sequence[RowResult], fence: Fence) -> Committed:
        """Append the step's tokens to its requests. `results`: one for each row that samples, in order."""
        outputs: list[RowOutput] = []
        completed: list[tuple[Request, int]] = []
        drafted: list[tuple[int, int, int]] = []
        invalidated: list[Key] = []
        results_left, requests, size = iter(results), self._queues.unfinished, self._limits.block_tokens
        columns, running = batch.columns, State.RUNNING
        rows = zip(
            columns.request_id,
            columns.epoch,
            columns.stop,
            columns.tokens,
            columns.samples,
            columns.drafts,
            columns.states,
            strict=True,
        )
        for request_id, epoch, stop, tokens, samples, drafts, states in rows:
            result = next(results_left) if samples else None
            request = requests.get(request_id)
            if request is None or request.epoch != epoch or request.state is not running:  # rule: late-results
                continue
            request.stepped = True
            covers = request.committed_len + 1 if tokens is None else stop
            if result is None:
                request.committed_len = stop
            else:
                count, stop_reason = request.append_outputs(result.token_ids)
                outputs.append((request, result, count, stop_reason))
                if tokens is not None:
                    request.committed_len = stop
                else:
                    if drafts:
                        request.settle_drafts(drafts, len(result.token_ids))
                        if result.token_ids:  # else the logits were not finite, and no draft was verified
                            drafted.append((request.spec_record, drafts, len(result.token_ids) - 1))
                    request.committed_len += count  # rule: only-accepted-tokens-are-committed
                if not result.finite:  # rule: blocks-of-non-finite-logits-are-not-published
                    invalidated += self._prefix_cache.invalidate(request)
                    continue
            if states is not None and request.states is not None and self._states is not None:
                self._states.commit(request.states, states, covers, request.committed_len, fence)
            complete = request.committed_len // size  # rule: only-committed-blocks-are-published
            if complete > request.published_blocks:
                completed.append((request, complete))
        if drafted:
            self._policy.record_accepted(*zip(*drafted, strict=True))
        return Committed(tuple(outputs), tuple(completed), fence, tuple(invalidated))

    def publish(self, committed: Committed) -> StorePlan | None:
        """Make completed blocks findable, and plan to store the blocks that were not loaded from a tier.

        Call it before any request of the commit is finished. Separate from `commit`, so that clients get their tokens
        first: publishing a thousand loaded blocks takes half a millisecond.
        """
        stored: list[tuple[Key, BlockId]] = []
        prefix: list[Key] = []
        for request, complete in committed.completed:
            if fresh := self._prefix_cache.publish(request, complete):
                stored.extend(fresh)
                prefix.extend(request.keys[:complete])
        if not stored:
            return None
        keys, block_ids = zip(*stored, strict=True)
        superseded = () if self._states is None else self._states.take_superseded()
        return StorePlan(keys, block_ids, (committed.fence,), tuple(prefix), superseded)
