"""Plans decode rows: one token for each running request whose prompt is computed, and draft tokens after it."""

from __future__ import annotations

from collections.abc import Sequence

from sidestream.schedule.allocation import Allocator
from sidestream.schedule.limits import Limits
from sidestream.schedule.preemption import Preemption
from sidestream.schedule.request import Request, State
from sidestream.schedule.spec_policy import SpecPolicy
from sidestream.schedule.step_builder import StepBuilder
from sidestream.types import RowPlan


class DecodePlanner:
    """Adds the decode rows of a step. `plan` is hot code: it handles every running request in every step.

    Invariants:
    - A row is planned only if the request's blocks cover every token that it may write (hazard H11).
    - A request may be preempted to get a block for a token of a request of higher rank, but never for drafts.
    - While drafts are in flight, `launched_len` and `launched_outputs` are upper bounds; if `drafts_in_flight` is
      subtracted, they are lower bounds (hazard H19).
    """

    def __init__(self, limits: Limits, *, policy: SpecPolicy, allocator: Allocator, preemption: Preemption) -> None:
        self._limits = limits
        self._policy = policy
        self._allocator = allocator
        self._preemption = preemption

    def plan(self, requests: Sequence[Request], step: StepBuilder) -> None:
        """Add a row for each request that has enough blocks or gets them. In the common case, a row is one token, and
        the request's block table already covers it.
        """
        size, running, new = self._limits.block_tokens, State.RUNNING, tuple.__new__
        plain, drafting = step.plain, step.drafting
        for request, wanted in zip(requests, self._choose_drafts(requests, step), strict=True):
            # rule: preempted-request-is-not-planned
            if request.state is not running:  # it was preempted for an earlier row of this step
                continue
            length, in_flight, table = request.launched_len, request.drafts_in_flight, request.table
            drafts = wanted
            if length + 1 + drafts > len(table) * size:
                room = self._make_room(request, wanted, step)
                if room is None:
                    continue
                drafts, table = room, request.table
            assert request.slot is not None
            states = None if request.states is None else self._allocator.plan_decode_states(request, step)
            outputs, slot, stop = request.launched_outputs, request.slot.ids[0], length + 1 + drafts
            # Same as RowPlan(...), in half the time, because RowPlan.__new__ is not called.
            # rule: decode-row
            row = new(
                RowPlan,
                (
                    request.id,
                    slot,
                    request.epoch,
                    length - in_flight,
                    stop,
                    None,
                    table,
                    True,
                    outputs - in_flight,
                    None,
                    drafts,
                    states,
                ),
            )
            request.launched_len = stop
            request.launched_outputs = outputs + 1 + drafts
            if drafts or in_flight:
                request.drafts_in_flight = in_flight + drafts
                step.speculates = True
            (drafting if drafts else plain).append(row)

    def _choose_drafts(self, requests: Sequence[Request], step: StepBuilder) -> Sequence[int]:
        """Number of drafts for each request."""
        if not (self._policy.max_drafts and requests):
            return [0] * len(requests)
        chosen = self._policy.reuse(len(requests))
        if chosen is None:
            room = [request.max_outputs - request.launched_outputs - 1 for request in requests]
            chosen = self._policy.choose([request.spec_record for request in requests], room)
        step.undrafted.update(chosen.undrafted)
        return chosen.counts

    def _make_room(self, request: Request, wanted: int, step: StepBuilder) -> int | None:
        """Extend the block table to cover one token and `wanted` drafts, or only the token if there are too few blocks.
        Returns the number of drafts; None: there is no block even for the token.
        """
        drafts = wanted
        # rule: drafts-reserve-their-blocks
        if drafts and not self._reserve(request, request.launched_len + 1 + drafts, step, preempting=False):
            drafts = 0
        stop = request.launched_len + 1 + drafts
        # rule: decode-reserves-its-block
        if not (drafts or self._reserve(request, stop, step, preempting=not request.drafts_in_flight)):
            return None
        self._allocator.extend_table(request, stop)
        if drafts < wanted:
            step.undrafted["blocks"] += 1
        return drafts

    def _reserve(self, request: Request, length: int, step: StepBuilder, *, preempting: bool) -> bool:
        """Make the request's blocks cover `length` tokens. Returns False if that is impossible in this step."""
        missing = self._allocator.missing_blocks(request, length)
        if missing <= 0:
            return True
        if not self._allocator.has_blocks(missing) and not (
            preempting and self._preemption.make_room(request, missing)
        ):
            return False
        step.after.extend(self._allocator.grow(request, missing))  # rule: grown-block-waits-for-its-last-use
        return True
