"""What became of drafts, for metrics and the log. Engine thread only."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping

from sidestream.execute.executor import LaunchedStep
from sidestream.execute.mailbox import Delivered
from sidestream.metrics import Metrics

logger = logging.getLogger(__name__)

# How often the log says that requests go without drafts.
_PERIOD_S = 60.0


class DraftTally:
    """Counts drafts and rows without any. `proposer` as the metrics name it; `clock` in seconds."""

    def __init__(self, metrics: Metrics, proposer: str, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._proposer = proposer
        self._clock = clock
        self._undrafted: Counter[str] = Counter()
        self._since_s = clock()

    def count(self, step: LaunchedStep, delivered: Delivered) -> None:
        """A step that drafted, or began where only the device knows, was read."""
        metrics, proposer, drafts = self._metrics, self._proposer, step.drafts
        lengths: Counter[float] = Counter(
            len(result.token_ids) for result in itertools.compress(delivered.rows, drafts)
        )
        metrics.inc("draft_tokens_total", sum(drafts), proposer)
        accepted = sum((length - 1) * rows for length, rows in lengths.items() if length)
        metrics.inc("accepted_tokens_total", accepted, proposer)
        metrics.observe_all("accept_length", lengths, proposer)
        if (
            delivered.draft_s is not None and delivered.verify_s is not None and not step.gated
        ):  # else loads were waited for meanwhile
            metrics.observe("draft_seconds", delivered.draft_s, proposer)
            metrics.observe("verify_seconds", delivered.verify_s, proposer)

    def count_undrafted(self, undrafted: Mapping[str, int]) -> None:
        """Rows go without drafts, so many for each reason; says so now and then, if it is more than an answer's end or
        a measurement.
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
                "in %.0f s, requests went %d steps without drafts: %d because too few were right for what they cost, %d because others would "
                "have waited for them too long, %d for lack of blocks",
                now_s - self._since_s,
                chance + others + blocks,
                chance,
                others,
                blocks,
            )
        self._undrafted, self._since_s = Counter(), now_s
