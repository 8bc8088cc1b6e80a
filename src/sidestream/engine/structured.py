"""Structured output between the forward pass of a step and its sampler: writes the token masks of the step's rows, and
follows the committed tokens through the grammars. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sidestream.grammar import TokenGrammar
from sidestream.runner.executor import Executor, LaunchedStep
from sidestream.schedule.scheduler import RowOutput, Scheduler
from sidestream_kv.types import Fence, RequestId


class Complete(NamedTuple):
    """An answer that ends because of its grammar, behind its last token."""

    request_id: RequestId
    finish_reason: str
    error: str | None = None


class StructuredSampler:
    """Samples steps whose rows need token masks.

    Invariant: a mask is made of all tokens before it, so a step is sampled after the commit of the step before it. The
    device runs the step's forward pass meanwhile.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, wait_for: Callable[[Fence], None]) -> None:
        """`wait_for` blocks until a step has ended."""
        self._scheduler = scheduler
        self._executor = executor
        self._wait_for = wait_for

    def sample(self, step: LaunchedStep) -> LaunchedStep:
        """Enqueue the sampling of an unsampled step, after the commit of the step before it. Blocks until the forward
        pass has ended if a row with a grammar has drafts: its masks need the drafts, which only the device knows.
        """
        masked = [(row, *found) for row, found in enumerate(self._sampling_rows(step)) if found[1] is not None]
        drafts: list[list[int]] = []
        if any(count for *_, count in masked):
            self._wait_for(step.fence)  # rule: masks-of-drafts-wait-for-their-pass
            drafts = self._executor.drafts_of(step)
        rows = [at + place for _, at, _, count in masked for place in range(1 + count)]
        masks, first = self._executor.open_masks(len(rows)), 0
        for row, _, grammar, count in masked:
            assert grammar is not None
            grammar.fill(masks[first : first + 1 + count], drafts[row][:count] if count else ())
            first += 1 + count
        return self._executor.sample(step, rows)

    def follow(self, outputs: Sequence[RowOutput]) -> tuple[list[RowOutput], list[Complete]]:
        """Follow committed tokens. Returns the outputs, and the answers that end because of their grammar: it is
        complete, or it cannot be followed any further.
        """
        followed: list[RowOutput] = []
        endings: list[Complete] = []
        for output in outputs:
            request, result, count, reason = output
            followed.append(output)
            if (grammar := request.grammar) is None:
                continue
            # rule: committed-tokens-advance-the-grammar
            length = next((at for at, token in enumerate(result.token_ids[:count], 1) if grammar.advance((token,))), 0)
            if grammar.failure is not None and reason != "length":  # rule: answer-that-left-its-grammar-is-an-error
                followed[-1] = request, result, count, None
                endings.append(Complete(request.id, "error", grammar.failure))
            elif length and (reason is None or length < count):  # rule: complete-answer-ends
                # Without drafts, there would be no token behind the end of the grammar.
                followed[-1] = request, result, length, None
                endings.append(Complete(request.id, "stop"))
        return followed, endings

    def _sampling_rows(self, step: LaunchedStep) -> list[tuple[int, TokenGrammar | None, int]]:
        """For each sampling row: its first row of logits, its grammar, and the number of its drafts. Rows of requests
        that have ended have no grammar. Rows of preempted requests have masks for nothing: their results are dropped.
        """
        found, at, columns = [], 0, step.batch.columns
        for request_id, samples, drafts in zip(columns.request_id, columns.samples, columns.drafts, strict=True):
            if samples:
                request = self._scheduler.get(request_id)
                found.append((at, None if request is None else request.grammar, drafts))
                at += 1 + drafts
        return found
