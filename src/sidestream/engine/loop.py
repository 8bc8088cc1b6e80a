"""The loop of the engine thread: plan, submit transfers, launch a step, commit the previous step.

Step N+1 is launched before step N is committed, so the device has work while the host reads results, sends outputs and
plans. The thread waits only for the previous step, in its commit; it never waits for a transfer.

Between two steps, the loop applies updates of the weights. A watchdog notices a pass of the loop that hangs.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence

from sidestream.config import WATCHDOG_OPTION
from sidestream.engine.failures import Failures
from sidestream.engine.inbox import Listener
from sidestream.engine.output_stream import OutputStreams
from sidestream.engine.parts import Parts
from sidestream.engine.stats import Gauges, SelfCheck, SpecStats, StepTimes
from sidestream.engine.structured import Complete, StructuredSampler
from sidestream.errors import DeviceLost
from sidestream.runner.executor import LaunchedStep
from sidestream.schedule.scheduler import RowOutput
from sidestream.types import Health, StepPlan
from sidestream_kv.kv.keys import BlockKeys
from sidestream_kv.types import Key, LayerGates

logger = logging.getLogger(__name__)

# Idle time after which the loop calls `Device.trim_memory`.
_TRIM_AFTER_S = 1.0


class StepLoop:
    """Runs steps. Engine thread only: another thread stops the loop by a message in the inbox that calls `stop`.

    Invariants:
    - At most one step is in flight when `step` returns.
    - Only `_commit` sends tokens, publishes blocks and ends requests because of a token, and only after the fence of
      their step (hazard H12).
    - The blocks that a step completed are published, and their stores to the tiers are submitted, before the step's
      requests end (hazard H23).

    in_flight  the step that was launched and is not committed yet
    num_steps  number of steps launched so far
    """

    def __init__(self, parts: Parts, *, streams: OutputStreams, failures: Failures) -> None:
        self.in_flight: LaunchedStep | None = None
        # False: each step is committed before the next step is planned. The engine thread may change it between two
        # steps.
        self.asynchronous = parts.asynchronous
        self.num_steps = 0
        self.watchdog = Watchdog(parts.watchdog_timeout_s, parts.device.now)
        self.times = StepTimes(parts)
        self.spec_stats = SpecStats(parts.metrics, parts.proposer, parts.device.now)
        self._self_check = SelfCheck(parts.self_check, parts.metrics, parts.device.now)
        self.weights = WeightUpdates(parts)
        self._parts = parts
        self._streams = streams
        self._failures = failures
        self._listener = Listener(
            device=parts.device,
            inbox=parts.inbox,
            scheduler=parts.scheduler,
            transfers=parts.transfers,
            metrics=parts.metrics,
            has_ranks=parts.ranks is not None,
        )
        self._gauges = Gauges(parts)
        self._structured = StructuredSampler(parts.scheduler, parts.executor, self._listener.wait_for)
        self._stopping = False
        self._trimmed = False

    def run(self) -> None:
        """The main function of the engine thread: run steps until `stop`. An error ends the engine (`fail`)."""
        try:
            while not self._stopping:
                self.watchdog.watch()
                if not self.step() and not self._stopping:
                    self._idle()
                self._gauges.update()
            self.drain()
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the engine because of an error of the loop: the other ranks learn of it, and every request ends."""
        logger.critical("the engine failed and stops serving", exc_info=error)
        if self._parts.ranks is not None:
            self._parts.ranks.lose(DeviceLost(f"rank 0 has failed: {error}"))
        self._failures.end_engine(error)

    def stop(self) -> None:
        """Let `run` return after this step."""
        self._stopping = True

    def drain(self) -> None:
        """Commit the step in flight, and abort the remaining samples."""
        self._listener.apply_messages()
        self._commit(self._sampled(self.in_flight))  # rule: last-step-is-committed-before-the-end
        self.in_flight = None
        self._streams.abort_all()
        self._store_latest()
        self._streams.deliver_outputs()  # rule: last-outputs-are-delivered-when-the-engine-ends
        self._flush_kv_events()
        self._gauges.update(force=True)

    def step(self) -> bool:
        """Run one turn of the loop, and deliver its outputs. False if there was nothing to compute or commit."""
        worked = self._turn()
        self._streams.deliver_outputs()  # rule: outputs-are-delivered-after-each-step
        self._flush_kv_events()
        return worked

    def _flush_kv_events(self) -> None:
        if self._parts.kv_events is not None:
            self._parts.kv_events.flush()

    def _turn(self) -> bool:
        parts, previous = self._parts, self.in_flight
        self._listener.apply_messages()
        self._listener.apply_events()
        self._store_latest()
        if previous is None:  # rule: new-weights-wait-for-the-step-in-flight
            self.weights.apply()
        begin_s = parts.device.now()
        lead_s = 0.0 if previous is None else self.times.lead_s()
        times = self.times
        plan = parts.scheduler.plan(lead_s=lead_s, step_s=times.last_s, prefill_rate=times.prefill_rate)
        step = self._launch(plan, begin_s)
        if plan.undrafted:
            self.spec_stats.count_undrafted(plan.undrafted)
        # If the launch failed, commit this step before the next plan, which would otherwise expect results of it.
        failed = step is not None and step.fence.failure is not None
        if not self.asynchronous or failed:
            self._commit(previous)
            self.in_flight = None
            self._commit(self._sampled(step))
            return step is not None
        self.in_flight = step
        self._commit(previous)
        self.in_flight = self._sampled(step)
        return step is not None or previous is not None

    def _store_latest(self) -> None:
        """Store what is kept of the ends of preempted and ended requests: recurrent states, or pages of windows."""
        transfers = self._parts.transfers
        if (latest := self._parts.scheduler.store_latest()) is None:
            return
        store, lease = latest
        if transfers is not None:
            transfers.submit([store])
        # rule: stored-checkpoint-is-released-after-its-copy
        lease.release(until=None if transfers is None else transfers.transfers_fence())

    def _launch(self, plan: StepPlan, begin_s: float) -> LaunchedStep | None:
        """Submit the plan's transfers, then launch its step. Returns None if the plan has no rows."""
        parts, gates = self._parts, LayerGates()
        if parts.transfers is not None:
            parts.transfers.submit(plan.transfers)  # rule: loads-are-submitted-before-their-step-is-gated
            gates = parts.transfers.gates(plan.batch.prefill_requests())
        if not plan.batch.num_rows:
            return None
        step = parts.executor.launch(self._self_check.choose(plan.batch), after=plan.after, gates=gates)
        parts.scheduler.launched(plan.batch, step.last_use)  # rule: launched-step-is-recorded
        self._streams.count_begun(plan.batch)
        self.times.launched(begin_s)
        self.num_steps += 1
        parts.metrics.inc("steps_total")
        return step

    def _sampled(self, step: LaunchedStep | None) -> LaunchedStep | None:
        """The step, complete: with its sampling enqueued. The step before it was committed."""
        if step is None or step.unsampled is None:
            return step
        return self._structured.sample(step)

    def _commit(self, step: LaunchedStep | None) -> None:
        """Wait for a step, and apply its results."""
        if step is None:
            return
        parts, times = self._parts, self.times
        times.begin_commit()
        self._listener.wait_for(step.fence)  # rule: commit-waits-for-its-step
        if parts.ranks is not None:
            parts.ranks.check_step(step.fence.failure)
            if step.gated:  # a load may have failed on another rank, which then computed with wrong KV
                parts.ranks.wait_for(step.last_use)  # rule: failed-load-of-any-rank-is-known-before-the-commit
        times.end_wait()
        self._listener.apply_events()  # rule: failed-load-is-known-before-its-step-is-committed
        if step.gated:
            # They preempt their requests, so the commit discards the rows.
            self._listener.apply_failed_loads()  # rule: failed-loads-are-looked-up-at-the-commit
        if step.fence.failure is not None:  # rule: results-of-a-failed-step-are-discarded
            self._failures.end_step(step)
            return
        times.count(step)
        for part, logprobs in step.prompt_logprobs():
            self._streams.add_prompt_logprobs(part.request_id, part.start, logprobs)
        results = step.results()
        committed = parts.scheduler.commit(step.batch, results.rows, step.last_use, step.forced)
        if step.batch.speculates:
            self.spec_stats.count(step, results)
        if results.compared is not None:
            self._self_check.count(step, results.compared)
        outputs: Sequence[RowOutput] = committed.outputs
        complete: Sequence[Complete] = ()
        if step.masked:
            outputs, complete = self._structured.follow(outputs)
        endings = self._streams.send(outputs, committed.going, committed.tokens)
        if parts.transfers is not None and committed.invalidated:
            parts.transfers.forget(committed.invalidated)  # rule: invalidated-keys-are-sent-to-the-tiers
        store = parts.scheduler.publish(committed)  # rule: completed-blocks-are-published-before-their-requests-end
        if parts.transfers is not None and store is not None:  # rule: store-is-submitted-before-its-blocks-are-released
            parts.transfers.submit([store])
        parts.scheduler.trim(committed)  # rule: store-of-a-page-is-submitted-before-its-release
        self._streams.finish(endings)  # rule: ended-requests-end
        for ending in complete:
            self._streams.end_sample(*ending)
        seconds = times.end_commit(step)
        if seconds is not None:
            parts.scheduler.measured(step.batch, seconds)

    def store_again(self, keys: Sequence[Key]) -> None:
        """See `Listener.store_again`."""
        self._listener.store_again(keys)

    def _idle(self) -> None:
        """Sleep until a message or an event of transfers comes.

        While requests or transfers are unfinished, sleep only until the next update of the gauges, because the end of a
        disk write does not ring the bell. Otherwise update the gauges, sleep for `_TRIM_AFTER_S`, call
        `Device.trim_memory`,
        and then sleep until the bell rings.
        """
        parts = self._parts
        busy = bool(self._streams) or (parts.transfers is not None and parts.transfers.has_work)
        if busy:
            patience_s: float | None = self._gauges.due_in_s()
        else:
            self._gauges.update(force=True)
            patience_s = None if self._trimmed else _TRIM_AFTER_S
        self.watchdog.pause()
        rung = parts.inbox.bell.wait(patience_s)
        self.watchdog.watch()
        self._trimmed = not busy and not rung
        if self._trimmed:
            parts.device.trim_memory()


class WeightUpdates:
    """Updates of the model's weights that were announced, and are applied when no request uses the old weights. Engine
    thread only.

    Invariants:
    - After an announcement, no request begins with the old weights (hazard H26). Requests that have begun end with the
      old weights (hazard H8).
    - After an update, no block computed with the old weights is reachable in any tier, and new blocks have other keys
      (hazards H8, H14).
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._announced: list[tuple[Callable[[], None], str, threading.Event]] = []

    def announce(self, apply: Callable[[], None], fingerprint: str, done: threading.Event) -> None:
        """Register an update: as soon as no request uses the weights, `apply` is called, and then `done` is set."""
        self._announced.append((apply, fingerprint, done))
        self._parts.scheduler.pause_admission()  # rule: new-requests-wait-for-new-weights

    def apply(self) -> None:
        """Apply announced updates, unless a request that has begun uses the weights. Call it only while no step is in
        flight.
        """
        parts = self._parts
        if not self._announced or parts.scheduler.num_begun:  # rule: new-weights-wait-for-running-requests
            return
        states = None if parts.state_region is None else parts.state_region.layout
        for apply, fingerprint, done in self._announced:
            apply()
            # rule: new-weights-replace-the-keys
            parts.scheduler.rekey(
                BlockKeys(fingerprint=fingerprint, layout=parts.key_layout, salt=parts.salt, states=states)
            )
            if parts.transfers is not None:
                parts.transfers.forget_all()  # rule: new-weights-drop-the-keys-of-the-tiers
            done.set()
        self._announced.clear()  # rule: new-weights-are-taken-once
        parts.scheduler.resume_admission()  # rule: new-weights-end-the-pause


class Watchdog:
    """Notices an engine thread that hangs, for example in a driver: measures its turn that has not ended. The engine
    thread calls `watch` and `pause`, any thread calls `judge`.

    timeout_s  seconds after which a turn counts as hanging
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._began_s: float | None = None
        self._stalled = False  # as logged

    def watch(self) -> None:
        """A turn begins."""
        self._began_s = self._clock()

    def pause(self) -> None:
        """The turn has ended, and the next one has not begun."""
        self._began_s = None

    def judge(self, health: Health) -> Health:
        """`health`, but `stalled` while an engine that should serve hangs. Logs each change. Never blocks."""
        began_s = self._began_s
        stalled = health.status == "ok" and began_s is not None and self._clock() - began_s > self._timeout_s
        detail = f"the engine thread has not finished a step for more than {self._timeout_s:g} s ({WATCHDOG_OPTION})"
        if stalled != self._stalled:
            self._stalled = stalled
            if stalled:
                logger.critical("%s: SIGUSR1 to process %d prints where its threads hang", detail, os.getpid())
            elif health.status == "ok":
                logger.warning("the engine thread goes on")
        return Health("stalled", detail) if stalled else health
