"""Structured output between the forward pass of a step and its sampler: writes the token masks of the step's rows, and
follows the committed tokens through the grammars. Engine thread only.

Jump-ahead: what a grammar leaves no choice about is put on the device with the sampling of step N, and drafted by step
N + 1 behind the tokens that step N draws. Such drafts are verified like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from sidestream.grammar import TokenGrammar
from sidestream.runner.executor import Executor, LaunchedStep
from sidestream.schedule.request import Request
from sidestream.schedule.scheduler import RowOutput, Scheduler
from sidestream.types import NO_TOKEN_LEFT, Forced
from sidestream_kv.types import Fence, RequestId


class Complete(NamedTuple):
    """An answer that ends because of its grammar, behind its last token."""

    request_id: RequestId
    finish_reason: str
    error: str | None = None


class _MaskedRow(NamedTuple):
    """A sampling row with a grammar.

    number   its index among the sampling rows
    first    its first row of logits
    drafts   number of its drafts
    stop     upper bound of its tokens with KV, as planned
    begins   whether it is a chunk of a prompt, after which its slot has no forced tokens yet
    rest     what its grammar forced, as far as it has not drawn it; it drafts the beginning
    """

    number: int
    first: int
    slot: int
    request: Request
    grammar: TokenGrammar
    drafts: int
    stop: int
    begins: bool
    rest: tuple[int, ...]

    @property
    def known(self) -> tuple[int, ...]:
        """Its drafts, if the host knows them; else empty."""
        return self.rest[: self.drafts] if len(self.rest) >= self.drafts else ()

    @property
    def is_forced(self) -> bool:
        """Whether its drafts were planned as forced ones, or are."""
        return self.drafts > 0 and (bool(self.known) or self.request.forced.end > self.stop - self.drafts)


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
        """Enqueue the sampling of an unsampled step, after the commit of the step before it. If a row with a grammar
        has drafts that only the device knows, blocks until the forward pass has ended, because its masks need them.
        """
        masked = [*self._masked_rows(step)]
        drafts: list[list[int]] = []
        if any(row.drafts and not row.known for row in masked):
            self._wait_for(step.fence)  # rule: masks-of-drafts-wait-for-their-pass
            drafts = self._executor.drafts_of(step)
        rows = [row.first + place for row in masked for place in range(1 + row.drafts)]
        masks, first = self._executor.open_masks(len(rows)), 0
        for row in masked:
            own = row.known if row.known or not row.drafts else drafts[row.number][: row.drafts]
            row.grammar.fill(masks[first : first + 1 + row.drafts], own)
            first += 1 + row.drafts
        forced = {row.request.id: bool(row.known) for row in masked if row.is_forced}
        return self._executor.sample(step, rows, self._look_ahead(masked), forced)

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
            if not result.finite and self._is_stuck(request, grammar):
                grammar.failure = NO_TOKEN_LEFT
            if grammar.failure is not None and reason != "length":  # rule: answer-that-left-its-grammar-is-an-error
                followed[-1] = request, result, count, None
                endings.append(Complete(request.id, "error", grammar.failure))
            elif length and (reason is None or length < count):  # rule: complete-answer-ends
                # Without drafts, there would be no token behind the end of the grammar.
                followed[-1] = request, result, length, None
                endings.append(Complete(request.id, "stop"))
        return followed, endings

    def _is_stuck(self, request: Request, grammar: TokenGrammar) -> bool:
        """Whether no token may come next."""
        mask = np.zeros((1, self._executor.mask_words), np.int32)
        grammar.fill(mask, ())
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")
        if request.num_outputs < request.sampling.min_tokens:
            allowed[[*request.sampling.forbidden_until_min]] = 0
        return not allowed.any()

    def _look_ahead(self, masked: Sequence[_MaskedRow]) -> dict[int, Forced]:
        """What the grammars force from now on, by request slot, for slots where something changes."""
        found, most = dict[int, Forced](), self._executor.most_forced
        for row in masked if most else ():
            request = row.request
            tokens = row.grammar.forced(row.rest, most) if request.max_drafts else ()
            is_there = len(tokens) > 0 and tokens == row.rest and not row.begins
            if not is_there and (tokens or request.forced.tokens):
                found[row.slot] = request.forced = Forced(len(request.tokens), tokens)
        return found

    def _masked_rows(self, step: LaunchedStep) -> Iterator[_MaskedRow]:
        """The sampling rows with a grammar. Rows of requests that have ended have none. Rows of preempted requests have
        masks for nothing: their results are dropped.
        """
        at, columns = 0, step.batch.columns
        rows = zip(columns.request_id, columns.slot, columns.drafts, columns.stop, columns.tokens, strict=True)
        for number, (request_id, slot, drafts, stop, chunk) in enumerate(compress(rows, columns.samples)):
            request = self._scheduler.get(request_id)
            if request is not None and (grammar := request.grammar) is not None:
                rest, begins = request.forced.after(request.tokens), chunk is not None
                yield _MaskedRow(number, at, slot, request, grammar, drafts, stop, begins, rest)
            at += 1 + drafts
