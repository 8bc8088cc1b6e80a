"""Structured output between the forward pass of a step and its sampler: writes the token masks of the step's rows, and
follows the committed tokens through the grammars. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sidestream.grammar import TokenGrammar
from sidestream.runner.executor import Executor, LaunchedStep
from sidestream.schedule.scheduler import RowOutput, Scheduler
from sidestream_kv.types import RequestId


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

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self._scheduler = scheduler
        self._executor = executor

    def sample(self, step: LaunchedStep) -> LaunchedStep:
        """Enqueue the sampling of an unsampled step, after the commit of the step before it. If a row with a grammar
        has drafts, the forward pass must have ended.
        """
        rows: list[int] = []
        grammars: list[tuple[TokenGrammar, list[int]]] = []
        drafts = self._executor.drafts_of(step) if any(step.batch.columns.drafts) else []
        for row, (at, grammar, count) in enumerate(self._sampling_rows(step)):
            if grammar is not None:
                rows += range(at, at + 1 + count)
                grammars.append((grammar, drafts[row][:count] if count else []))
        masks, first = self._executor.open_masks(len(rows)), 0
        for grammar, drafted in grammars:
            stop = first + 1 + len(drafted)
            grammar.fill(masks[first:stop], drafted)
            first = stop
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
