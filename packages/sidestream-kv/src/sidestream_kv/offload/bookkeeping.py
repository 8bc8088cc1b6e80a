"""State that several parts of the offload worker share: switches that the engine sets, jobs that still use device
blocks, and counts of how transfers end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sidestream_kv.metrics import Metrics

logger = logging.getLogger(__name__)

# Minimum time between two logged failures, because a broken tier fails often. The metric transfers_total counts all
# failures.
_WARNING_PERIOD_S = 1.0


@dataclass(slots=True)
class Switches:
    """Values that the engine thread (or the thread that closes the engine) sets, and that the worker reads.

    generation   number of cache resets so far. A transfer that was submitted before the last reset must not make its
                 blocks findable (hazard H8 in docs/glossary.md)
    abandoned    whether the engine is closing: then no transfer begins any more. Never set back to False
    """

    generation: int = 0
    abandoned: bool = False


class UnsettledJobs:
    """Ids of stores and loads that still use device blocks, in the order of submission. Worker thread only."""

    def __init__(self) -> None:
        self._unsettled: dict[int, None] = {}
        self._last = 0  # id of the last job that was received

    def __len__(self) -> int:
        return len(self._unsettled)

    def opened(self, job_ids: Iterable[int], *, last: int) -> None:
        """Add the jobs of one command. `last` is the highest job id of the command."""
        self._unsettled.update(dict.fromkeys(job_ids))
        self._last = last

    def settle(self, job_id: int) -> None:
        """Remove a job that no longer uses device blocks. Raises KeyError if the job is unknown."""
        del self._unsettled[job_id]  # rule: job-settles-once

    def settled_through(self) -> int:
        """The largest id such that this job and all jobs before it no longer use device blocks."""
        return next(iter(self._unsettled), self._last + 1) - 1  # rule: only-settled-jobs-count-as-settled


class TransferLog:
    """Counts how transfers end, and logs failures. Worker thread only."""

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._next_warning_s = 0.0

    def ended(self, kind: str, error: BaseException | None, num_bytes: int, since_s: float) -> bool:
        """Count the end of a transfer that was submitted at `since_s`. Returns whether it succeeded."""
        self._metrics.inc("transfers_total", 1, kind, "done" if error is None else "failed")
        if error is None:
            self._metrics.inc("transfer_bytes_total", num_bytes, kind)
            self._metrics.observe("transfer_seconds", self._clock() - since_s, kind)
        elif self._clock() >= self._next_warning_s:
            self._next_warning_s = self._clock() + _WARNING_PERIOD_S
            logger.warning("%s failed and counts as a cache miss: %s: %s", kind, type(error).__name__, error)
        return error is None

    def tier_works(self, tier: str, works: bool) -> None:
        """Record whether the last write to a persistent tier succeeded."""
        self._metrics.set("tier_works", float(works), tier)

    def left_out(self, kind: str, outcome: str) -> None:
        """Count a transfer that will not be executed, with its outcome: `"skipped"`, `"deferred"` or `"full"`."""
        self._metrics.inc("transfers_total", 1, kind, outcome)
