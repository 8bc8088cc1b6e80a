"""Plans prefill rows: the next chunk of each running request whose prompt is not completely computed."""

from __future__ import annotations

from sidestream.schedule.allocation import Allocator
from sidestream.schedule.chunking import chunk_stop, reusable_tokens
from sidestream.schedule.limits import Limits
from sidestream.schedule.request import Request, State
from sidestream.schedule.step_builder import StepBuilder
from sidestream.schedule.tiers import TierView
from sidestream.types import RowPlan, RowStart, StateIds


class PrefillPlanner:
    """Adds a request's next chunk to a step.

    Invariants:
    - Where outputs are bitwise equal (`tail_apart`), a chunk is never cut to fit the budget, because its shape affects
      the rounding of the result: a chunk that does not fit waits. Elsewhere it is cut at a block border, so that the
      waiting prompts fill the step.
    - No chunk is planned before all copies of the request's load were submitted, so that the step can wait for their
      fences (hazard H5).
    - A token is sampled only after the chunk that ends at the last known token (hazard H25).
    """

    def __init__(self, limits: Limits, *, tiers: TierView, allocator: Allocator) -> None:
        self._limits = limits
        self._tiers = tiers
        self._allocator = allocator

    def plan(self, request: Request, step: StepBuilder) -> None:
        """Add the request's next chunk, if it has one and the step has room for it."""
        if not request.in_prefill or request.state is not State.RUNNING or request.loading:  # rule: prefill-is-possible
            return
        if request.arriving:
            if self._tiers.seconds_left(request.id, request.epoch, step_s=step.step_s) > step.lead_s:
                step.arriving.append(request)  # otherwise all rows of the step would wait for the load of this one
                return
            request.arriving = False
        self._add_chunk(request, step)

    def plan_arriving(self, step: StepBuilder) -> None:
        """If the step is empty because all its requests wait for long loads, add the first of these requests: there is
        no other row to delay.
        """
        if step.arriving and step.is_empty:
            request = step.arriving[0]
            request.arriving = False
            self.plan(request, step)

    def _add_chunk(self, request: Request, step: StepBuilder) -> None:
        start, known, limits = request.launched_len, request.prefill_end, self._limits
        stop = chunk_stop(
            start,
            known,
            chunk_tokens=limits.chunk_tokens,
            block_tokens=limits.block_tokens,
            tail_apart=limits.tail_apart or request.states is not None,
        )
        if request.states is not None:
            stop = self._cut_for_state(request, start, stop)
        if stop - start > step.prefill_budget:
            stop = (start + step.prefill_budget) // limits.block_tokens * limits.block_tokens
            if limits.tail_apart or request.states is not None or stop <= start:
                return
        step.prefill_budget -= stop - start
        states = self._allocator.plan_states(
            request, start, stop, step, checkpoint=self._wants_checkpoint(request, stop)
        )
        # rule: only-the-last-chunk-samples
        step.prefills.append(self._row(request, start, stop, states, samples=stop == known))

    def _cut_for_state(self, request: Request, start: int, stop: int) -> int:
        """The end of the chunk `[start, stop)`: `stop`, or an earlier position at which to make a checkpoint (a
        recurrent state that is kept for reuse).
        """
        size = self._limits.block_tokens
        branch, interval = request.branch_blocks * size, self._limits.state_interval * size
        wanted = [branch] if start < branch else []
        if interval:
            wanted.append((start // interval + 1) * interval)
        return min([stop, *wanted])

    def _wants_checkpoint(self, request: Request, stop: int) -> bool:
        """Whether to make a checkpoint at `stop`. True at the last block border of the prompt, where earlier prompts
        branch off, and at the configured interval.
        """
        size = self._limits.block_tokens
        interval = self._limits.state_interval * size
        return stop > 0 and (
            stop == reusable_tokens(request.prefill_end, size)
            or stop == request.branch_blocks * size
            or (interval > 0 and stop % interval == 0)
        )

    def _row(self, request: Request, start: int, stop: int, states: StateIds | None, *, samples: bool) -> RowPlan:
        assert request.slot is not None
        begin, tokens, outputs = None, tuple(request.tokens[start:stop]), request.launched_outputs
        if not request.begun:
            begin = RowStart(request.sampling, request.prompt, tuple(request.tokens[len(request.prompt) :]))
            request.begun = True
        self._allocator.extend_table(request, stop)
        row = RowPlan(
            request.id,
            request.slot.ids[0],
            request.epoch,
            start,
            stop,
            tokens,
            request.table,
            samples,
            outputs,
            begin,
            states=states,
        )
        request.launched_len = stop
        request.launched_outputs += samples
        return row
