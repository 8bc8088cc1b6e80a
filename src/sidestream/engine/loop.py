"""The loop: plan, hand over transfers, launch a step, commit the one before. Overlap is a property of this file.

One thread, the engine thread, owns everything here; the world talks to it through an inbox. Step N+1 is launched before
step N is committed, so the device has work while the host reads, replies and plans. The only wait is the commit's, for
the previous step; no transfer is ever waited for. While the engine thread waits, it listens: the loads of who comes
meanwhile begin at once.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sidestream.config import SamplingDefaults, SamplingParams
from sidestream.device.base import Device
from sidestream.engine.inbox import Inbox
from sidestream.engine.session import Handle, Session, Sink
from sidestream.engine.tally import DraftTally
from sidestream.errors import DeviceLost, EngineStopped, QueueFull
from sidestream.execute.executor import Executor, LaunchedStep
from sidestream.kv.keys import BlockKeys
from sidestream.kv.layout import KVLayout
from sidestream.kv.pool import FencedPool
from sidestream.metrics import Metrics, Timeline
from sidestream.schedule.admission import Bounds, CheckedRequest, RequestChecker
from sidestream.schedule.request import Request
from sidestream.schedule.scheduler import Drawn, Scheduler
from sidestream.tiers.base import PersistentTier
from sidestream.tiers.host import HostTier
from sidestream.transfer import CostModel, LoadFailed, LoadReady, Promoted, StoreAgain, TransferEngine, TransferEvent
from sidestream.types import Delta, Health, Key, LayerGates, RequestId, RowPlan

logger = logging.getLogger(__name__)

# How soon a caller looks again whether the mover has forgotten.
_FORGETTING_POLL_S = 0.0005
# How long a loop without anything to do or to watch waits before it lets the device rest.
_REST_AFTER_S = 1.0
# Fewer prompt tokens in a step do not measure the rate of prefill.
_MEASURED_PREFILL = 64
# From so much of the time between two commits on, the host's work for a step is what it takes: the rest may be that for
# another one.
_HOST_BOUND = 0.5
# Gauges are read by people.
_GAUGE_PERIOD_S = 0.2


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of; built by `build_engine`, owned by the engine from then on."""

    device: Device
    scheduler: Scheduler
    executor: Executor
    blocks: FencedPool
    layout: KVLayout
    eos_ids: tuple[int, ...]
    defaults: SamplingDefaults
    metrics: Metrics
    bounds: Bounds
    inbox: Inbox
    asynchronous: bool
    salt: str = ""
    transfers: TransferEngine | None = None
    host: HostTier | None = None
    disk: PersistentTier | None = None
    costs: CostModel | None = None
    proposer: str = ""
    max_drafts: int = 0
    timeline: Timeline | None = None


def _took_s(interval_s: float, host_s: float, *, before: bool, awaited: bool) -> float | None:
    """Seconds that one more step of its kind takes; None: that cannot be told of this one.

    interval_s  between the end of the step before and its own, as the host saw them: the device's time if the host had
                waited for both, for the one `before` and for it (`awaited`)
    host_s      what the host did for it, to plan, to launch and to commit it: what it takes if the host was late
                because of such work. Between two commits lies what it did for the steps around
    """
    if awaited:
        return interval_s if before else None
    return host_s if host_s >= _HOST_BOUND * interval_s else interval_s


class Engine:
    """Serves one model. `submit`, `abort`, `call` and `close` are safe from any thread; all else runs on the engine
    thread.

    threaded   False: there is no thread; one caller does everything, and nothing moves on but in `step` (and in what
               calls it)
    """

    def __init__(self, parts: Parts, *, threaded: bool = True) -> None:
        self.parts = parts
        self.checker = RequestChecker(parts.bounds, self._keys_of)
        self._deliveries: tuple[Callable[[], None], ...] = ()
        self._ids = itertools.count()
        self._inbox = parts.inbox
        self._sessions: dict[RequestId, Session] = {}
        self._drafts = DraftTally(parts.metrics, parts.proposer, parts.device.now)
        self._previous: LaunchedStep | None = None
        self._unfinished = 0
        self._gate = threading.Lock()  # orders submit against close; guards _unfinished and _status
        self._status = Health("ok", "")
        self._stopping = False
        self._closing = threading.Lock()  # one close at a time; guards _closed
        self._closed = False
        self._next_gauges_s = 0.0
        self._last_done_s = self._last_s = 0.0
        self._prepared = deque[float]()  # how long it took to plan and launch each step that was not committed
        self._was_awaited = False  # the step before the one that is being committed had not ended when the host came
        self._updates: list[tuple[Callable[[], None], str, threading.Event]] = []
        self._rested = False
        self.num_steps = 0
        self._thread = threading.Thread(target=self._run, name="sidestream-engine", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    # ------------------------------------------------------------------ from any thread

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        sink: Sink,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Handle:
        """Queue one request of `params.n` samples; their deltas go to `sink`, on the engine thread.

        The engine knows tokens only: deltas have no text, and `params.stop` does not count
        (`sidestream.client.output.OutputProcessor`).

        cache_salt  KV is shared, in all tiers, with requests of the same salt only; empty: with all that have none

        Raises RequestRejected, ContextTooLong, QueueFull or EngineStopped before anything is taken.
        """
        checked = self.checker.check(
            prompt, params, seed=secrets.randbits(63), priority=priority, cache_salt=cache_salt
        )
        return self.enqueue(checked, sink)

    def enqueue(self, request: CheckedRequest, sink: Sink) -> Handle:
        """Queue a request that was checked, by this engine's checker or by a front end's. Raises QueueFull or
        EngineStopped.
        """
        num_samples, bounds = request.params.n, self.parts.bounds
        with self._gate:
            if self._status.status != "ok":
                raise EngineStopped(
                    f"the engine is {self._status.status}: {self._status.detail or 'send the request to another one'}"
                )
            if self._unfinished + num_samples > bounds.max_unfinished:
                raise QueueFull(
                    f"{self._unfinished} requests are running or waiting, the bound is {bounds.max_unfinished}: "
                    "try again later, or raise max_waiting"
                )
            sessions = [self._session(index, request, sink) for index in range(num_samples)]
            self._unfinished += num_samples
            self._inbox.put(lambda: self._begin(sessions), anytime=True)
        return Handle(tuple(session.request.id for session in sessions))

    def on_news(self, deliver: Callable[[], None]) -> None:
        """Have `deliver` called on the engine thread after sinks were told something: after each commit, and when
        requests were ended.
        """
        self._deliveries = (*self._deliveries, deliver)

    def abort(self, handle: Handle, reason: str = "abort") -> None:
        """End the samples that have not finished. Returns at once; harmless for finished ones.

        `reason` is what they are counted as, and the finish reason of their last delta: `"stop"` if a front end found a
        stop string in the text.
        """
        self._inbox.put(lambda: self._abort(handle, reason), anytime=True)

    def check(self, prompt: Sequence[int], params: SamplingParams, *, cache_salt: str = "") -> None:
        """Raise what `submit` would raise for this prompt and these params, without submitting."""
        self.checker.check(prompt, params, cache_salt=cache_salt)

    def call(self, work: Callable[[], None]) -> None:
        """Run `work` on the engine thread between two steps, and wait for it; not from a sink. Raises EngineStopped if
        the engine is gone.
        """
        if self._thread is None:
            work()
            return
        done = threading.Event()
        failures: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)
            finally:
                done.set()

        self._inbox.put(run)
        while not done.wait(0.05):
            if not self._alive and not done.is_set():
                raise EngineStopped("the engine has stopped")
        if failures:
            raise failures[0]

    def flush(self, *, timeout_s: float) -> bool:
        """Block until no transfer is on its way: what was complete rests in the tiers. False when `timeout_s` passed
        first.
        """
        transfers = self.parts.transfers
        if transfers is None:
            return True
        deadline = self._now() + timeout_s
        busy = [True]

        def look() -> None:
            busy[0] = transfers.busy

        while busy[0] and self._now() < deadline:
            self.call(look)
            self._let_go(0.002)
        return not busy[0]

    def reset_cache(self) -> None:
        """Make every block of every tier unreachable at once (H8). Running requests go on; transfers on their way end
        by their fences.

        Blocks until the tiers' ledgers are empty, too.
        """
        transfers = self.parts.transfers

        def forget() -> None:
            self.parts.scheduler.forget_all()
            if transfers is not None:
                transfers.forget_all()

        self.call(forget)
        while transfers is not None and not transfers.has_forgotten and self._alive:
            self.parts.device.sleep(_FORGETTING_POLL_S)

    def update_weights(self, apply: Callable[[], None], *, fingerprint: str) -> threading.Event:
        """Have `apply` replace the model's weights as soon as no request uses them; the event is set once it has.
        Returns at once.

        Requests that have begun end on the old weights, the others wait and begin on the new ones. `fingerprint` names
        the new ones, as `PagedModel.fingerprint` does: no block of before is reachable in any tier afterwards,
        transfers on their way end by their fences and publish nothing (H8, H14). `apply` runs on the engine thread,
        between two steps; if it raises, the engine fails.
        """
        done = threading.Event()
        self._inbox.put(lambda: self._announce(apply, fingerprint, done), anytime=True)
        return done

    def _announce(self, apply: Callable[[], None], fingerprint: str, done: threading.Event) -> None:
        """New weights are to come: from here on nobody begins on the old ones. Engine thread."""
        self._updates.append((apply, fingerprint, done))
        self.parts.scheduler.admits_new = False

    def _update_weights(self) -> None:
        """Do what is asked for, if nobody uses the weights now. Engine thread, between two steps."""
        scheduler = self.parts.scheduler
        if scheduler.num_begun or self._previous is not None:
            return
        for apply, fingerprint, done in self._updates:
            apply()
            scheduler.rekey(BlockKeys(fingerprint=fingerprint, layout=self.parts.layout, salt=self.parts.salt))
            if self.parts.transfers is not None:
                self.parts.transfers.forget_all()
            done.set()
        self._updates.clear()
        scheduler.admits_new = True

    def health(self) -> Health:
        """Whether the engine serves. Never blocks."""
        return self._status

    @property
    def unfinished(self) -> int:
        """Samples submitted and not yet ended."""
        return self._unfinished

    def close(self, *, drain_s: float = 0.0, flush_s: float = 30.0) -> None:
        """Refuse new requests, let running ones go on for `drain_s`, abort the rest, store what is complete, end all
        threads.

        Writes to disk get `flush_s`; what has not begun by then is dropped. Idempotent; blocks, but not for ever on a
        medium that is only slow. From any thread but the engine's own.
        """
        with self._gate:
            if self._status.status == "ok":
                self._status = Health("draining", "")
        deadline = self._now() + drain_s
        while self._unfinished and self._alive and self._now() < deadline:
            self._let_go(0.005)
        with self._closing, self._surviving_loss(), contextlib.ExitStack() as ends:
            if self._closed:
                return
            self._closed = True
            # Run from the last to the first, each whatever becomes of the others (an interrupt, too): the engine thread
            # ends, what is complete is stored, the streams end, and once none of them writes to it, the disk is let go
            # of.
            transfers = self.parts.transfers
            if transfers is not None:
                ends.callback(transfers.close)
            ends.callback(self.parts.device.close)
            if transfers is not None:
                ends.callback(transfers.flush, timeout_s=flush_s)
            ends.callback(self._end_loop)

    @contextlib.contextmanager
    def _surviving_loss(self) -> Iterator[None]:
        """A device that is lost is told by the engine's health and to its clients, once; whatever could end
        nevertheless has ended in here.
        """
        try:
            yield
        except DeviceLost as error:
            if self._status.status != "failed":
                logger.critical("the device was lost while the engine closed", exc_info=error)
                self._fail(error)

    # ------------------------------------------------------------------ the step

    def step(self) -> bool:
        """One turn of the loop, and the delivery of its news; False when there was nothing to compute or commit."""
        worked = self._turn()
        self._deliver()
        return worked

    def _turn(self) -> bool:
        parts = self.parts
        self._apply_inbox()
        self._apply_events()
        if self._updates:
            self._update_weights()
        begin_s = self._now()
        plan = parts.scheduler.plan(lead_s=self._lead_s(), step_s=self._last_s)
        gates = LayerGates()
        if parts.transfers is not None:
            parts.transfers.submit(plan.transfers)
            gates = parts.transfers.gates(plan.batch)
        step = None
        if plan.batch.rows:
            step = parts.executor.launch(plan.batch, after=plan.after, gates=gates)
            parts.scheduler.launched(plan.batch, step.fence)
            self._prepared.append(self._now() - begin_s)
            self.num_steps += 1
            parts.metrics.inc("steps_total")
        if plan.undrafted:
            self._drafts.count_undrafted(plan.undrafted)
        # What a step could not even be launched with is known at once: nothing is planned on what it would have left on
        # the device.
        failed = step is not None and step.fence.failure is not None
        if not parts.asynchronous or failed:
            self._commit(self._previous)
            self._previous = None
            self._commit(step)
            return step is not None
        previous, self._previous = self._previous, step
        self._commit(previous)
        return step is not None or previous is not None

    def _lead_s(self) -> float:
        """How long the device is expected to need for the step that it has: as long as for the one before."""
        return 0.0 if self._previous is None else max(0.0, self._last_done_s + self._last_s - self._now())

    def _commit(self, step: LaunchedStep | None) -> None:
        """Read a step's mailbox. The only place where a token reaches a client, a block is published or a request ends
        by itself.
        """
        if step is None:
            return
        parts, prepared_s, waits = self.parts, self._prepared.popleft(), self._waits_for_steps()
        self._await(step)
        done_s, before = self._now(), self._was_awaited
        awaited = self._was_awaited = self._waits_for_steps() > waits
        self._apply_events()
        if step.gated and parts.transfers is not None:
            self._apply(parts.transfers.failed_loads())  # they void its rows before those are believed
        if step.fence.failure is not None:
            self._step_failed(step)
            return
        interval_s = self._measure(step)
        delivered = step.results()
        committed = parts.scheduler.commit(step.batch, delivered.rows, step.fence)
        if step.batch.speculates:
            self._drafts.count(step, delivered)
        self._count_waits(committed.drawn)
        sessions, ended = self._sessions, list[tuple[Request, Session, Delta | None, bool]]()
        for request, result, count, stop_reason in committed.drawn:
            session = sessions[request.id]
            news = session.news_of(result, count, stop_reason) if count else None
            ends = news is not None and news.finish_reason is not None
            told = ends or news is None or session.tell(news)
            if ends or not told or not result.finite:
                ended.append((request, session, news if ends else None, told))
        if parts.transfers is not None and committed.invalidated:
            parts.transfers.forget(committed.invalidated)
        store = parts.scheduler.publish(committed)
        if parts.transfers is not None and store is not None:
            parts.transfers.submit([store])  # before anything is freed: the blocks are still their requests'
        for request, session, last, told in ended:
            if last is not None and last.finish_reason is not None:
                # Before its client is told: a client that hears of the end finds nothing held (H24).
                self._forget(request, last.finish_reason)
                session.tell(last)
            elif told:
                self._end(request.id, "error", "the model's logits are not finite, or every token was forbidden")
            else:
                self._forget(request, "abort")
        if not step.gated and not step.batch.num_prefill_tokens:
            took_s = _took_s(interval_s, prepared_s + self._now() - done_s, before=before, awaited=awaited)
            if took_s is not None:
                parts.scheduler.measured(step.batch, took_s)

    def _waits_for_steps(self) -> int:
        return self.parts.device.host_waits().get("step", 0)

    def _await(self, step: LaunchedStep) -> None:
        """Block until the step has ended. With transfers, what is said meanwhile is heard at once, as far as it
        may be.
        """
        wait_host, fence = self.parts.device.wait_host, step.fence
        if self.parts.transfers is None:
            wait_host(fence, reason="step")
            return
        self._listen(self.parts.transfers)
        while not wait_host(fence, reason="step", bell=self._inbox.bell):
            self._listen(self.parts.transfers)

    def _listen(self, transfers: TransferEngine) -> None:
        """Take in what has come while a step is awaited, perhaps with another one behind it, and order the loads of who
        may have them now.

        A new request, an abort and what transfers have to say change nothing that a step on its way depends on: who
        ends or is preempted leaves its blocks and its row behind its last launched step, and is no longer there when
        that one is committed. Weights are only announced. Whatever else is to be called (`call`, a reset among it) is
        promised a moment between two steps, and waits for it.
        """
        heard = self._apply_inbox(anytime=True)
        events = transfers.poll()
        self._apply(events)
        if heard or events:  # else the last plan has just looked at who waits
            transfers.submit(self.parts.scheduler.order_loads())

    def _count_waits(self, drawn: Sequence[Drawn]) -> None:
        """Count tokens that came, and how long their clients waited for each."""
        sessions, now_s = self._sessions, self._now()
        firsts: dict[float, int] = {}
        others: dict[float, int] = {}  # nearly all have waited since the same moment
        for request, _, count, _ in drawn:
            if count:
                session, waits = sessions[request.id], others
                if session.is_new:
                    session.is_new, waits = False, firsts
                wait_s, session.last_s = (now_s - session.last_s) / count, now_s
                waits[wait_s] = waits.get(wait_s, 0) + count
        metrics = self.parts.metrics
        metrics.inc("output_tokens_total", sum(firsts.values()) + sum(others.values()))
        metrics.observe_all("ttft_seconds", firsts)
        metrics.observe_all("itl_seconds", others)

    def _measure(self, step: LaunchedStep) -> float:
        """Count a step that was just seen done. It ran from its launch, or from the end of the one before, whichever
        came later: seconds.
        """
        parts, now_s = self.parts, self._now()
        seconds = self._last_s = now_s - max(step.launched_s, self._last_done_s)
        self._last_done_s = now_s
        parts.metrics.observe("step_seconds", seconds)
        prefill = step.batch.num_prefill_tokens
        # Short tails and steps that waited for a load say little about how fast a long prompt is computed.
        if (
            parts.costs is not None
            and prefill >= _MEASURED_PREFILL
            and not step.gated
            and prefill >= 0.5 * step.batch.num_tokens
        ):
            parts.costs.saw_prefill(prefill, seconds)
        if parts.timeline is not None:
            stop_ns = time.perf_counter_ns()
            parts.timeline.record("engine", "commit", stop_ns, stop_ns, tokens=step.batch.num_tokens)
        return seconds

    def _step_failed(self, step: LaunchedStep) -> None:
        logger.error(
            "a step of %d rows failed: its requests end with an error",
            len(step.batch.rows),
            exc_info=step.fence.failure,
        )
        step.drop()
        for row in step.batch.rows:
            if self._is_current(row):
                self._end(row.request_id, "error", f"the forward pass failed: {step.fence.failure}")

    def _is_current(self, row: RowPlan) -> bool:
        request = self.parts.scheduler.get(row.request_id)
        return request is not None and request.epoch == row.epoch

    # ------------------------------------------------------------------ engine thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self.step() and not self._stopping:
                    self._idle()
                self._update_gauges()
            self._drain()
        except BaseException as error:
            logger.critical("the engine failed and stops serving", exc_info=error)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Refuse what comes, and tell every client that waits, those of the inbox included."""
        with self._gate:
            self._status = Health("failed", f"{type(error).__name__}: {error}")
        while (message := self._inbox.take()) is not None:
            with contextlib.suppress(Exception):  # only new requests matter now, and those cannot fail
                message()
        for session in self._sessions.values():
            session.end("error", f"the engine failed: {error}")
            self.parts.metrics.inc("requests_total", 1, "error")
        self._sessions.clear()
        with self._gate:
            self._unfinished = 0
        self._deliver()

    def _deliver(self) -> None:
        for deliver in self._deliveries:
            deliver()

    def _idle(self) -> None:
        """Nothing to compute: sleep until a message or news of transfers comes.

        The mover rings only for what the engine needs, and a write to disk that ends is not that. So while anything is
        on its way, wake up as often as the gauges are due; once nothing is, show them a last time and sleep without a
        bound.
        """
        transfers = self.parts.transfers
        busy = bool(self._sessions) or (transfers is not None and transfers.busy)
        if busy:
            patience_s: float | None = max(0.0, self._next_gauges_s - self._now())
        else:
            self._update_gauges(force=True)
            patience_s = None if self._rested else _REST_AFTER_S
        rung = self._inbox.bell.wait(patience_s)
        self._rested = not busy and not rung
        if self._rested:
            self.parts.device.rest()

    def _stop(self) -> None:
        self._stopping = True

    def _end_loop(self) -> None:
        """Let the engine thread come to its end, or do what it would do there."""
        self._inbox.put(self._stop, anytime=True)
        if self._thread is not None:
            self._thread.join()
        else:
            self._drain()

    @property
    def _alive(self) -> bool:
        return self._thread is None or self._thread.is_alive()

    def _now(self) -> float:
        return self.parts.device.now()

    def _let_go(self, seconds: float) -> None:
        """Let the engine go on while the caller waits for something."""
        if self._thread is not None or not self.step():
            self.parts.device.sleep(seconds)

    def _drain(self) -> None:
        """Let the last step land, and abort what is left."""
        self._apply_inbox()
        self._commit(self._previous)
        self._previous = None
        for request_id in list(self._sessions):
            self._end(request_id, "abort")
        self._deliver()
        self._update_gauges(force=True)

    def _apply_inbox(self, *, anytime: bool = False) -> bool:
        """Run what was said, as far as it may run now; whether there was anything."""
        heard = False
        while (message := self._inbox.take(anytime=anytime)) is not None:
            message()
            heard = True
        return heard

    def _apply_events(self) -> None:
        if self.parts.transfers is not None:
            self._apply(self.parts.transfers.poll())

    def _apply(self, events: Iterable[TransferEvent]) -> None:
        scheduler = self.parts.scheduler
        for event in events:
            match event:
                case Promoted(request_id, epoch, complete, reason):
                    if not complete:
                        self.parts.metrics.inc("load_fallbacks_total", 1, reason)
                    scheduler.promoted(request_id, epoch, again=complete or reason == "no_room")
                case LoadReady(request_id, epoch):
                    scheduler.load_ready(request_id, epoch)
                case LoadFailed(request_id, epoch, gone):
                    self.parts.metrics.inc("load_fallbacks_total", 1, "gone" if gone else "load_failed")
                    scheduler.load_failed(request_id, epoch)
                case StoreAgain(keys):
                    self._store_again(keys)

    def _store_again(self, keys: Sequence[Key]) -> None:
        """Store blocks that found no slot before, if the device still has them."""
        transfers, again = self.parts.transfers, self.parts.scheduler.store_again(keys)
        if transfers is not None and again is not None:
            plan, lease = again
            transfers.submit([plan])
            lease.release(until=transfers.uses())

    def _begin(self, sessions: list[Session]) -> None:
        for session in sessions:
            self._sessions[session.request.id] = session
            self.parts.scheduler.submit(session.request)
            self.parts.metrics.inc("prompt_tokens_total", len(session.request.prompt))

    def _abort(self, handle: Handle, reason: str) -> None:
        for request_id in handle.request_ids:
            self._end(request_id, reason)

    def _end(self, request_id: RequestId, reason: str, error: str | None = None) -> None:
        """End a request that no token of its own ended."""
        session = self._sessions.get(request_id)
        if session is not None:
            self._forget(session.request, reason)
            session.end(reason, error)

    def _forget(self, request: Request, reason: str) -> None:
        self.parts.scheduler.finish(request, reason)
        del self._sessions[request.id]
        with self._gate:
            self._unfinished -= 1
        metrics = self.parts.metrics
        metrics.inc("requests_total", 1, reason)
        if request.cached is not None:
            for tier in ("device", "host", "disk"):
                if count := getattr(request.cached, tier):
                    metrics.inc("cached_tokens_total", count, tier)

    def _update_gauges(self, *, force: bool = False) -> None:
        now = self._now()
        if now < self._next_gauges_s and not force:
            return
        self._next_gauges_s = now + _GAUGE_PERIOD_S
        parts, metrics = self.parts, self.parts.metrics
        metrics.set("requests_running", parts.scheduler.num_running)
        metrics.set("requests_waiting", parts.scheduler.num_waiting)
        metrics.set("blocks_free", parts.blocks.num_free)
        metrics.set("blocks_cached", parts.blocks.num_cached)
        metrics.set("blocks_used", parts.blocks.num_used)
        metrics.raise_to("preemptions_total", parts.scheduler.num_preemptions)
        if parts.host is not None:
            metrics.set("tier_blocks", parts.host.pool.num_keys, "host")
            metrics.set("tier_bytes", parts.host.pool.num_keys * parts.host.layout.block_bytes, "host")
            metrics.set("tier_ready_bytes", parts.host.ready_bytes, "host")
        if parts.disk is not None:
            stats = parts.disk.index.stats
            metrics.set("tier_blocks", stats.entries, "disk")
            metrics.set("tier_bytes", stats.bytes, "disk")

    # ------------------------------------------------------------------ the front door

    def _keys_of(self, tokens: npt.NDArray[np.int64], cache_salt: str) -> tuple[list[Key], int]:
        """Keys of a prompt's complete blocks. On the submitting thread, not on the engine's: a long prompt takes
        milliseconds.
        """
        version = (
            self.parts.scheduler.keys_version
        )  # read first: keys of before under a later version would be wrong for good
        return self.parts.scheduler.keys_of(tokens, salt=cache_salt), version

    def _session(self, index: int, asked: CheckedRequest, sink: Sink) -> Session:
        """One sample of a request. On the submitting thread, under the gate, so that ids grow with arrival."""
        parts, params = self.parts, asked.params
        request = Request(
            id=next(self._ids),
            prompt=asked.prompt,
            keys=list(asked.keys),
            keys_version=asked.keys_version,
            cache_salt=asked.cache_salt,
            sampling=params.spec(seed=asked.seed + index, eos_ids=parts.eos_ids, defaults=parts.defaults),
            max_outputs=asked.max_outputs,
            stop_ids=frozenset(
                params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *parts.eos_ids)
            ),
            min_tokens=params.min_tokens,
            priority=asked.priority,
            max_drafts=parts.max_drafts if params.max_drafts is None else min(params.max_drafts, parts.max_drafts),
        )
        return Session(request, index=index, sink=sink, arrival_s=self._now())
