"""Chooses the steps that run twice for the self-check, and reports their differences. Engine thread only."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator

from sidestream.runner.executor import LaunchedStep
from sidestream.runner.mailbox import Compared
from sidestream.types import BatchPlan, RowPlan
from sidestream_kv.metrics import Metrics

logger = logging.getLogger(__name__)

# Minimum time between two log lines, and number of rows that a line describes. The metrics count all of them.
_WARNING_PERIOD_S = 1.0
_ROWS_TOLD = 4


class SelfCheck:
    """Chooses a share of the steps, at random with a fixed seed, so that no pattern of steps escapes.

    share   share of the steps that run twice; 0: none
    clock   function that returns the time in seconds
    """

    def __init__(self, share: float, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._share = share
        self._metrics = metrics
        self._clock = clock
        self._random = random.Random("sidestream self-check of steps")
        self._next_warning_s = 0.0

    def choose(self, batch: BatchPlan) -> BatchPlan:
        """The batch to launch: the given batch, or the same batch to be run twice."""
        if not self._share or self._random.random() >= self._share:
            return batch
        return batch.with_self_check()

    def count(self, step: LaunchedStep, compared: Compared) -> None:
        """Count a committed step that ran twice, and log the rows whose two runs differed."""
        metrics = self._metrics
        metrics.inc("self_check_steps_total")
        metrics.inc("self_check_tokens_total", step.batch.num_tokens)
        metrics.inc("self_check_seconds_total", compared.seconds, "steps")
        if not (any(compared.kv) or any(compared.logits)):
            return
        rows = [
            f"request {row.request_id} at tokens [{row.min_start}, {row.stop}): {parts}"
            for row, parts in _differing(step.batch, compared)
        ]
        metrics.inc("self_check_disagreements_total", len(rows))
        if self._clock() < self._next_warning_s:
            return
        self._next_warning_s = self._clock() + _WARNING_PERIOD_S
        more = f", and {len(rows) - _ROWS_TOLD} more rows" if len(rows) > _ROWS_TOLD else ""
        logger.error(
            "self-check: two runs of step %d (%d rows, %s) differ: %s%s: a race or a hardware error, see "
            "docs/self-check.md",
            step.fence.tick,
            step.batch.num_rows,
            "after loads" if step.gated else "no loads",
            ", ".join(rows[:_ROWS_TOLD]),
            more,
        )


def _differing(batch: BatchPlan, compared: Compared) -> Iterator[tuple[RowPlan, str]]:
    """The rows that differ, and the parts in which they differ."""
    at = 0
    for row, kv in zip(batch.rows, compared.kv, strict=True):
        places = 1 + row.drafts if row.samples else 0
        logits = any(compared.logits[at : at + places])
        at += places
        if kv or logits:
            yield row, " and ".join(part for part, differs in (("KV", kv), ("logits", logits)) if differs)
