"""Measurements of the loop: the durations of steps (for planning and metrics), gauges, the results of steps that run
twice for the self-check, and counts of drafts. Engine thread only. Also the history of requests and evictions.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from sidestream.config import GRAMMAR
from sidestream.engine.output_stream import OutputStream
from sidestream.engine.parts import Parts
from sidestream.engine.tier_log import TierLog
from sidestream.runner.executor import LaunchedStep
from sidestream.runner.mailbox import Compared, Delivered
from sidestream.schedule.request import Lookup
from sidestream.types import BatchPlan, RowPlan
from sidestream_kv.kv.pool import FencedPool
from sidestream_kv.metrics import Metrics
from sidestream_kv.offload.tiers.index import TierIndex
from sidestream_kv.types import DEVICE, HOST, Key

logger = logging.getLogger(__name__)

# Minimum number of prompt tokens in a step for a measurement of the prefill rate.
_MEASURED_PREFILL = 64
# The same, for the rate of long prefill, which decides how many prompt tokens a step takes: small steps are slower.
_LONG_PREFILL = 1024
_WEIGHT = 0.2  # of a new measurement in a moving average
# If the host's work for a step takes at least this share of the time between two commits, the time of this work is
# taken as the step's time: in the remaining time the host may have worked for another step.
_HOST_BOUND = 0.5
# Interval between updates of the gauges. People read gauges, so a short interval has no use.
_GAUGE_PERIOD_S = 0.2
# Minimum time between two log lines, and number of rows that a line describes. The metrics count all of them.
_WARNING_PERIOD_S = 1.0
_ROWS_TOLD = 4
# Interval between log lines about rows without drafts.
_DRAFT_LOG_PERIOD_S = 60.0


def step_seconds(interval_s: float, host_s: float, *, before: bool, awaited: bool) -> float | None:
    """Expected time of another step with the same rows; None if it cannot be estimated from this step.

    interval_s  time from the end of the previous step to the end of this step, as the host observed them. Exact only if
                the host waited for both steps
    host_s      time of the host's work for this step: plan, launch and commit
    before      whether the host has waited for the previous step
    awaited     whether the host has waited for this step
    """
    if awaited:
        return interval_s if before else None
    return host_s if host_s >= _HOST_BOUND * interval_s else interval_s


class StepTimes:
    """Measures the times of steps. Call `launched` for each launch. Call `begin_commit`, `end_wait`, `count` and
    `end_commit`, in this order, for each commit. Steps are committed in the order of their launch.
    """

    def __init__(self, parts: Parts) -> None:
        self.last_s = 0.0
        """Duration of the last committed step."""
        self.prefill_rate: float | None = None
        """Moving average of the prompt tokens per second in steps with many of them; None: not measured yet."""
        self._device = parts.device
        self._metrics = parts.metrics
        self._costs = parts.costs
        self._timeline = parts.timeline
        self._last_done_s = 0.0
        self._prepare_s = deque[float]()  # how long the host planned and launched each step in flight
        # The step that is being committed:
        self._prepared_s = self._done_s = self._interval_s = 0.0
        self._waits = 0
        self._was_awaited = self._awaited = False  # whether the host waited for the previous and for this step
        self._wait_began_s: float | None = None  # None: the timeline was not recording

    def lead_s(self) -> float:
        """Seconds until the step in flight is expected to end, if it takes as long as the previous step."""
        return max(0.0, self._last_done_s + self.last_s - self._device.now())

    def launched(self, begin_s: float) -> None:
        """Record the launch of a step whose planning began at `begin_s`."""
        self._prepare_s.append(self._device.now() - begin_s)
        self._record("plan and launch", begin_s)

    def begin_commit(self) -> None:
        """Record that the host begins to wait for the oldest step in flight."""
        self._prepared_s = self._prepare_s.popleft()
        self._waits = self._device.host_waits().get("step", 0)
        self._wait_began_s = self._device.now() if self._recording() else None

    def end_wait(self) -> None:
        """Record that the host has observed the end of the step."""
        self._done_s, self._was_awaited = self._device.now(), self._awaited
        self._awaited = self._device.host_waits().get("step", 0) > self._waits
        if self._wait_began_s is not None:
            self._record("wait for the step", self._wait_began_s)

    def count(self, step: LaunchedStep) -> None:
        """Record the duration of a step that succeeded. The step began at its launch or at the end of the previous
        step, whichever is later.
        """
        now_s = self._device.now()
        seconds = self._interval_s = now_s - max(step.launched_s, self._last_done_s)
        if not step.batch.self_check:
            self.last_s = seconds
        self._last_done_s = now_s
        self._metrics.observe("step_seconds", seconds)
        prefill = step.batch.num_prefill_tokens
        # A short last chunk, or a step that ran twice or waited for a load, tells little about the time of a long
        # prompt.
        if (
            prefill >= _MEASURED_PREFILL
            and not step.gated
            and not step.batch.self_check
            and prefill >= 0.5 * step.batch.num_tokens
        ):
            self._metrics.inc("prefill_measured_tokens_total", prefill)
            self._metrics.inc("prefill_measured_seconds_total", seconds)
            if self._costs is not None:
                self._costs.saw_prefill(prefill, seconds)
        if prefill >= _LONG_PREFILL and seconds > 0 and not step.gated and not step.batch.self_check:
            rate = prefill / seconds
            self.prefill_rate = (
                rate if self.prefill_rate is None else self.prefill_rate + _WEIGHT * (rate - self.prefill_rate)
            )

    def end_commit(self, step: LaunchedStep) -> float | None:
        """Record the end of the commit. Returns the expected time of another step with the same rows; None if it is
        unknown, or if the step had prefill, waited for loads, or ran twice.
        """
        if self._recording():
            self._record("commit", self._done_s, tokens=step.batch.num_tokens)
        if step.gated or step.batch.self_check or step.batch.num_prefill_tokens:
            return None
        host_s = self._prepared_s + self._device.now() - self._done_s
        return step_seconds(self._interval_s, host_s, before=self._was_awaited, awaited=self._awaited)

    def _recording(self) -> bool:
        return self._timeline is not None and time.perf_counter_ns() < self._timeline.until_ns

    def _record(self, name: str, begin_s: float, **args: int) -> None:
        """Record a part of the engine thread's turn that began at `begin_s` and ends now."""
        if self._timeline is not None and (stop_ns := time.perf_counter_ns()) < self._timeline.until_ns:
            elapsed_s = self._device.now() - begin_s
            self._timeline.record("engine", name, stop_ns - int(elapsed_s * 1e9), stop_ns, **args)


class Gauges:
    """Updates the metrics of the sizes of queues, pools and tiers, at intervals."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._next_s = 0.0
        self._tiers = TierLog(parts)

    def due_in_s(self) -> float:
        """Seconds until the next update is due."""
        return max(0.0, self._next_s - self._parts.device.now())

    def update(self, *, force: bool = False) -> None:
        """Set the gauges, if an update is due or `force` is set."""
        parts, metrics, now_s = self._parts, self._parts.metrics, self._parts.device.now()
        if now_s < self._next_s and not force:
            return
        self._next_s = now_s + _GAUGE_PERIOD_S
        metrics.set("requests_running", parts.scheduler.num_running)
        metrics.set("requests_waiting", parts.scheduler.num_waiting)
        metrics.set("blocks_free", parts.blocks.num_free)
        metrics.set("blocks_cached", parts.blocks.num_cached)
        metrics.set("blocks_used", parts.blocks.num_used)
        if parts.states is not None:
            for status, count in (
                ("free", parts.states.num_free),
                ("cached", parts.states.num_cached),
                ("used", parts.states.num_used),
            ):
                metrics.set("states", count, status)
        metrics.raise_to("preemptions_total", parts.scheduler.num_preemptions)
        for gauge in parts.tiers.gauges() if parts.tiers is not None else ():
            metrics.set("tier_blocks", gauge.num_blocks, gauge.name)
            metrics.set("tier_bytes", gauge.num_bytes, gauge.name)
            if gauge.ready_bytes is not None:
                metrics.set("tier_ready_bytes", gauge.ready_bytes, gauge.name)
        if now_s >= self._tiers.due_s:
            self._tiers.update(now_s)


class SelfCheck:
    """Chooses the steps that run twice, and reports their differences. They are a share of the steps, at random with a
    fixed seed, so that no pattern of steps escapes.

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


class SpecStats:
    """Counts drafts, accepted drafts and rows without drafts.

    proposer  name of the proposer in metrics; drafts that a grammar forced count under `GRAMMAR`
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
        metrics, proposer, columns = self._metrics, self._proposer, step.batch.columns
        ids = itertools.compress(columns.request_id, columns.samples)
        rows = [
            (
                GRAMMAR if step.forced.get(request_id) else proposer,
                drafts,
                1 if isinstance(result, int) else len(result.token_ids),
            )
            for request_id, drafts, result in zip(ids, step.drafts, delivered.rows, strict=True)
            if drafts
        ]
        for name in {proposer, GRAMMAR} if step.forced else {proposer}:
            lengths: Counter[float] = Counter(length for by, _, length in rows if by == name)
            metrics.inc("draft_tokens_total", sum(drafts for by, drafts, _ in rows if by == name), name)
            accepted = sum((length - 1) * count for length, count in lengths.items() if length)
            metrics.inc("accepted_tokens_total", accepted, name)
            metrics.observe_all("accept_length", lengths, name)
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
        if now_s - self._since_s < _DRAFT_LOG_PERIOD_S:
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


# Bounds of CacheHistory: about 20 MB of token ids, 7 MB of keys of requests, and 2 MB for each tier.
_MOST_ASKED = 2048
_MOST_TOKENS = 1 << 19
_MOST_KEYS = 1 << 17
_MOST_EVICTED = 1 << 15


class Asked(NamedTuple):
    """A request in the history.

    tokens   prompt and output; empty: forgotten, because later requests took their room
    keys     keys of its first blocks; `num_computed` of these blocks were reused or computed
    cache    its cache salt, and the version of the weights: other pairs share no KV with it
    began_s  time of its first step; None: it had none
    """

    name: str
    tokens: Sequence[int]
    num_prompt: int
    keys: Sequence[Key]
    num_computed: int
    cache: tuple[str, int]
    lookup: Lookup | None
    began_s: float | None
    ended_s: float


class CacheHistory:
    """Which requests have ended and which keys were evicted lately, so that `explain.py` can tell why a prompt was
    computed again. Bounded: the oldest records are dropped.

    The engine thread writes it, and each tier's offload worker its evictions. Any thread may read. A record takes a
    few microseconds for each request and one for each eviction; nothing happens for each token or step.
    """

    def __init__(self, clock: Callable[[], float], *, block_tokens: int) -> None:
        self.since_s = clock()
        self.is_complete = True
        """Whether no request was dropped."""
        self.reset_s = -math.inf
        """Time of the last reset of the cache on the device."""
        self._clock = clock
        self._block_tokens = block_tokens
        self._recent: deque[Asked] = deque()
        self._older: deque[Asked] = deque()  # without tokens
        self._num_tokens = self._num_keys = 0
        self._evicted: dict[str, deque[tuple[float, Sequence[Key]]]] = {}
        self._num_evicted: Counter[str] = Counter()

    @classmethod
    def of_parts(cls, parts: Parts) -> CacheHistory:
        """A history that hears of all evictions of an engine."""
        history = cls(parts.device.now, block_tokens=parts.layout.block_tokens)
        owners: dict[str, FencedPool | TierIndex] = {DEVICE: parts.blocks}
        if parts.tiers is not None:
            owners[HOST] = parts.tiers.host.pool
            owners |= {name: tier.index for name, tier in parts.tiers.persistent.items()}
        for tier, owner in owners.items():
            owner.on_evict += (history.watch(tier),)
        return history

    def watch(self, tier: str) -> Callable[[Sequence[Key]], None]:
        """The function that the owner of the tier's keys calls with evicted ones."""
        self._evicted[tier] = deque()
        return partial(self._add_evicted, tier)

    def _add_evicted(self, tier: str, keys: Sequence[Key]) -> None:
        log, counts = self._evicted[tier], self._num_evicted
        log.append((self._clock(), keys))
        counts[tier] += len(keys)
        while counts[tier] > _MOST_EVICTED and len(log) > 1:
            counts[tier] -= len(log.popleft()[1])

    def ended(self, stream: OutputStream, now_s: float) -> None:
        """Record a sample that has ended."""
        self.remember(self.asked(stream, now_s))

    def remember(self, asked: Asked) -> None:
        """Record a request, and drop the oldest records beyond the bounds."""
        self._recent.append(asked)
        self._num_tokens += len(asked.tokens)
        self._num_keys += len(asked.keys)
        while self._num_tokens > _MOST_TOKENS and len(self._recent) > 1:
            self._forget_tokens()
        while self._num_keys > _MOST_KEYS or len(self._recent) + len(self._older) > _MOST_ASKED:
            if not self._older:
                self._forget_tokens()
            self._num_keys -= len(self._older.popleft().keys)
            self.is_complete = False

    def asked(self, stream: OutputStream, now_s: float) -> Asked:
        """The record of a sample, which has ended or not."""
        request = stream.request
        return Asked(
            request.name,
            request.tokens,
            len(request.prompt),
            request.keys,
            request.committed_len // self._block_tokens,
            (request.cache_salt, request.keys_version),
            request.lookup,
            stream.began_s,
            now_s,
        )

    def reset(self) -> None:
        """Record a reset of the cache, and forget the tokens of all requests."""
        self.reset_s = self._clock()
        while self._recent:
            self._forget_tokens()

    def _forget_tokens(self) -> None:
        asked = self._recent.popleft()
        self._num_tokens -= len(asked.tokens)
        self._older.append(asked._replace(tokens=()))

    # ------------------------------------------------------------------ readers

    def requests(self) -> list[Asked]:
        """The ended requests, from the oldest to the newest."""
        return [*self._older.copy(), *self._recent.copy()]

    def evictions(self, keys: set[Key], *, until_s: float) -> dict[Key, tuple[float, str]]:
        """When and from which tier these keys were evicted last, if that was before `until_s` and is remembered."""
        found: dict[Key, tuple[float, str]] = {}
        for tier, log in self._evicted.items():
            for at_s, evicted in log.copy():
                if at_s <= until_s:
                    for key in keys.intersection(evicted):
                        found[key] = max(found.get(key, (at_s, tier)), (at_s, tier))
        return found
