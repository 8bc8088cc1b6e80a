"""Statistics of speculative decoding, for metrics and the log. Engine thread only."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping

from sidestream.runner.executor import LaunchedStep
from sidestream.runner.mailbox import Delivered
from sidestream_kv.metrics import Metrics

logger = logging.getLogger(__name__)

# Interval between log lines about rows without drafts.
_PERIOD_S = 60.0


class SpecStats:
    """Counts drafts, accepted drafts and rows without drafts.

    proposer  name of the proposer in metrics
    clock     function that returns the time in seconds
    """

    def __init__(self, metrics: Metrics, proposer: str, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._proposer = proposer
        self._clock = clock
        self._undrafted: Counter[str] = Counter()
        self._since_s = clock()

    def count(self, step: LaunchedStep, delivered: Delivered) -> None:
        """Count the drafts of a committed step. Its plan has `BatchPlan.speculates`."""
        metrics, proposer, drafts = self._metrics, self._proposer, step.drafts
        lengths: Counter[float] = Counter(
            len(result.token_ids) for result in itertools.compress(delivered.rows, drafts)
        )
        metrics.inc("draft_tokens_total", sum(drafts), proposer)
        accepted = sum((length - 1) * rows for length, rows in lengths.items() if length)
        metrics.inc("accepted_tokens_total", accepted, proposer)
        metrics.observe_all("accept_length", lengths, proposer)
        if step.gated:
            return  # the step's times include waits for loads
        if delivered.draft_s is not None and delivered.verify_s is not None:
            metrics.observe("draft_seconds", delivered.draft_s, proposer)
            metrics.observe("verify_seconds", delivered.verify_s, proposer)

    def count_undrafted(self, undrafted: Mapping[str, int]) -> None:
        """Count rows without drafts, by reason. Logs a summary once a minute, if drafts were left out for a reason
        other than the end of an answer or a measurement.
        """
        for reason, count in undrafted.items():
            self._metrics.inc("draft_fallbacks_total", count, reason)
            self._undrafted[reason] += count
        now_s = self._clock()
        if now_s - self._since_s < _PERIOD_S:
            return
        chance, others, blocks = (self._undrafted[reason] for reason in ("chance", "others", "blocks"))
        if chance or others or blocks:
            logger.info(
                "in %.0f s, %d rows of steps had no drafts: %d because too few drafts would have been accepted, "
                "%d because drafts would have delayed other requests too much, %d for lack of blocks",
                now_s - self._since_s,
                chance + others + blocks,
                chance,
                others,
                blocks,
            )
        self._undrafted, self._since_s = Counter(), now_s
