"""Runs one schedule: the real engine on the simulated device, step by step, with every oracle (check) applied. The
calling thread acts as the engine thread. Results do not depend on a clock: the same workload and policy give the same
run.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import torch

from proof.torture.clients import Clients
from proof.torture.engine_run import Life, scratch
from proof.torture.findings import quiet
from proof.torture.judge import wrong_accept_lengths
from proof.torture.narrow import narrow_lanes
from proof.torture.neighbour import Surroundings
from proof.torture.oracle import Reference, reference_of
from proof.torture.script import Script
from proof.torture.verdict import Finding, Verdict
from proof.torture.workload import LOAD_DEADLINE_S, Event, Workload
from sidestream.errors import DeviceLost, EngineStopped
from sidestream.runner.executor import LaunchedStep
from sidestream.schedule.scheduler import Committed
from sidestream.types import BatchPlan, Result
from sidestream_kv.offload import tier_io
from sidestream_kv.offload.tiers import index, store_tier
from sidestream_kv.types import Fence, LayerGates, RequestId
from sidestream_order.findings import Finding as Objection
from sidestream_order.sim import Deadlock, Policy
from sidestream_order.steering import Watched
from sidestream_order.trace import TraceLine

_IDLE_S = 1e-4
_EVENTS = {
    "reset": "resets the cache",
    "weights": "asks for other weights",
    "crash": "dies, and begins again",
    "restart": "ends, and begins again",
    "hang_up": "loses a front end, which is replaced",
    "device_lost": "loses its device",
    "copies_lost": "loses its device's copies",
    "rank_lost": "loses a rank",
}
# Virtual seconds that pass in an idle step. Usually _IDLE_S; _DRAIN_S when no client waits, or after _PATIENT_STEPS
# idle steps, so that slow operations end.
_DRAIN_S = 0.05
_PATIENT_STEPS = 100
# Limit of a schedule. Most take 40 steps, or 200 if they wait for a slow disk; each late store adds up to 160 steps.
_MAX_STEPS = 6000
# After this many idle steps in a row per rank in which no work of the device has ended, the schedule hangs. Progress
# may be slow: under the policy `late`, one actor runs in five idle steps, and a long queue of stores takes a thousand.
_STUCK_STEPS = 1000
# More than a workload has losses and failing steps: each engine fails.
_MOST_FAILED_ENGINES = 20
# A neighbour goes on for so many steps after the last arrival.
_NEIGHBOUR_STEPS = 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a schedule.

    findings    empty if the schedule passed
    steps       engine steps
    deviations  decisions that switched to another actor (stream or thread): decision number → actor. `policies.Steered`
                replays them
    decisions   number of decisions about which actor runs next
    lines       the events of all actors in their order, if requested
    objections  the findings of the order checker as objects; `findings` contains their texts
    """

    findings: tuple[Finding, ...]
    steps: int
    decisions: int
    deviations: dict[int, str]
    lines: tuple[TraceLine, ...] = ()
    objections: tuple[Objection, ...] = ()

    @property
    def oracles(self) -> tuple[str, ...]:
        """Names of the oracles with findings, without duplicates."""
        return tuple(dict.fromkeys(finding.oracle for finding in self.findings))


def run_schedule(
    workload: Workload, policy: Policy, *, trace: bool = False, reference: Reference | None = None
) -> Outcome:
    """Run the workload under the policy and apply the oracles. `reference` is the workload's expected output; None:
    compute it.

    Blocks until done; never raises for an error of the engine. Sets torch's number of threads to one while it runs.
    """
    with _stage(workload):
        return _Schedule(workload, policy, reference or reference_of(workload), trace=trace).run()


@contextlib.contextmanager
def _stage(workload: Workload) -> Iterator[None]:
    """Settings for the duration of a schedule: no log lines (faults are injected), one torch thread, and a short pause
    of the disk tier after errors. New tensors are filled with NaN, or with the largest number for integers: what was in
    memory before would differ between two runs of the schedule.
    """
    threads = torch.get_num_threads()
    pause_s, store_pause_s, refresh_s = tier_io.PAUSE_S, store_tier.PAUSE_S, index._REFRESH_S
    deterministic = torch.get_deterministic_debug_mode()
    # Fills new tensors, too. `use_deterministic_algorithms` would import torch's compiler: seconds of each process.
    torch.set_deterministic_debug_mode("warn")
    torch.set_num_threads(1)
    tier_io.PAUSE_S = LOAD_DEADLINE_S
    store_tier.PAUSE_S = 0.0  # of the clock
    if workload.shared_memory or workload.shared_disk:
        index._REFRESH_S = LOAD_DEADLINE_S
    try:
        narrow = narrow_lanes(turn_blocks=workload.turn_blocks) if workload.layer_groups else contextlib.nullcontext()
        with quiet(), narrow:
            yield
    finally:
        tier_io.PAUSE_S, store_tier.PAUSE_S, index._REFRESH_S = pause_s, store_pause_s, refresh_s
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(deterministic)


class _Schedule:
    """One run of a workload: several engines one after another, if the workload restarts or crashes them."""

    def __init__(self, workload: Workload, policy: Policy, reference: Reference, *, trace: bool) -> None:
        self._workload = workload
        self._policy = Watched(policy)
        self._verdict = Verdict(workload, reference)
        self._script = Script(workload)
        self._lines: list[TraceLine] | None = [] if trace else None
        self._weights = 0
        self._steps = 0
        self._num_failed = 0
        self._again: list[int] = []  # requests that clients repeat after a crash
        self._due: int | None = None  # the step at which clients have not acted yet
        self._surroundings = Surroundings(
            workload, self._verdict.contents, self._script, lambda text: self._verdict.find("content", text)
        )
        self._life = self._begin()
        self._clients = self._join()

    def _begin(self) -> Life:
        """Start an engine, and call the oracle and the clients from inside its steps."""
        life = Life(
            self._workload,
            self._policy,
            self._script,
            self._verdict.contents,
            weights=self._weights,
            lines=self._lines,
            surroundings=self._surroundings,
        )
        scheduler = life.engine.parts.scheduler
        commit = scheduler.commit

        def judged(
            batch: BatchPlan, results: Sequence[Result], fence: Fence, forced: Container[RequestId] = ()
        ) -> Committed:
            for text in wrong_accept_lengths(life.head, scheduler, batch, results):
                self._verdict.find("accept lengths", text)
            return commit(batch, results, fence, forced)

        if self._workload.drafts:
            scheduler.commit = judged  # type: ignore[method-assign]
        if self._workload.meanwhile:
            executor = life.engine.parts.executor
            launch = executor.launch

            def launched(batch: BatchPlan, *, after: tuple[Fence, ...], gates: LayerGates) -> LaunchedStep:
                launched = launch(batch, after=after, gates=gates)
                self._run_clients()
                return launched

            executor.launch = launched  # type: ignore[method-assign]
        return life

    def _join(self) -> Clients:
        return Clients(self._workload, self._life, self._verdict.find, weights=self._weights)

    def run(self) -> Outcome:
        try:
            self._clients.connect()
            done = self._drive()
            if done:
                self._verdict.judge_idle(self._life, self._clients)
                self._close()
            self._verdict.judge_answers(self._clients, over=not done)
        except Deadlock as error:
            self._verdict.find("deadlock", str(error))
        except Exception as error:
            self._verdict.find("error", f"{type(error).__name__}: {error} ({where(error)})")
        finally:
            self._verdict.judge_trace(self._life)
            self._crash()
            self._surroundings.close()
            scratch().clean()
        policy, verdict = self._policy, self._verdict
        return Outcome(
            verdict.sorted_findings(),
            self._steps,
            policy.count,
            policy.deviations,
            tuple(self._lines or ()),
            tuple(verdict.objections),
        )

    # ------------------------------------------------------------------ the loop

    def _drive(self) -> bool:
        """Run the workload to its end. Returns False if the engine was closed with requests running, or hangs."""
        workload = self._workload
        last = max([0, *(asked.at for asked in workload.requests), *(event.at for event in workload.events)])
        idle = stuck = num_done = 0
        for step in range(_MAX_STEPS * workload.ranks):
            self._steps += 1
            for event in workload.events:
                if event.at == step:
                    self._happen(event)
            if workload.closes_at == step:
                self._say("closes the engine")
                self._close()
                self._verdict.judge_answers(self._clients, over=False)
                return False
            self._due = step
            if not workload.meanwhile:
                self._run_clients()
            if step <= last + _NEIGHBOUR_STEPS:
                self._surroundings.turn(self._life.device)
            try:
                idle = 0 if self._step() else idle + 1
            except DeviceLost as error:
                self._end_lost_engine(error)
                idle = 0
            before, num_done = num_done, self._life.device.num_done
            stuck = stuck + 1 if idle and num_done == before else 0
            if stuck == _STUCK_STEPS * workload.ranks:
                break
            self._run_clients()  # if no launch let the clients act
            if self._clients.border is not None:
                self._clients.border.turn(between_steps=True)
                if (step_error := self._clients.border.step_error) is not None:
                    self._end_lost_engine(step_error)
            if idle:
                self._life.device.sleep(_IDLE_S if self._life.engine.unfinished and idle < _PATIENT_STEPS else _DRAIN_S)
            rests = not (self._life.engine.unfinished or self._busy())
            if rests:
                self._life.check_events()
            if step >= last and rests and not self._again and self._clients.is_quiet():
                if not self._life.is_lost:
                    return True
                self._end_lost_engine(
                    DeviceLost("injected: the device or a rank is lost, and the engine had nothing to do")
                )
        self._verdict.find(
            "no progress",
            f"after {self._steps} steps, requests {self._clients.waiting()} have not ended or transfers are still "
            "running",
        )
        return False

    def _step(self) -> bool:
        """One engine step; returns whether the engine did any work. If the engine has all messages of its clients, it
        must not continue requests that no client waits for.
        """
        life, border = self._life, self._clients.border
        told_of_all = border is not None and border.is_quiet and not self._workload.meanwhile
        waited_for = self._clients.num_waiting()
        worked = life.engine.step()
        if told_of_all and life.engine.unfinished > waited_for:
            self._verdict.find(
                "answered",
                f"the engine continues with {life.engine.unfinished} samples, and clients wait for {waited_for}",
            )
        return worked

    def _run_clients(self) -> None:
        """Let the clients act at the current step. A second call in the same step does nothing."""
        step, self._due = self._due, None
        if step is not None:
            again, self._again = self._again, []
            self._clients.act(step, again)

    def _close(self) -> None:
        """Close the engine, and deliver its last messages."""
        self._life.engine.close(flush_s=self._workload.flush_s)
        self._settle("the engine is closed")
        if self._life.is_lost:  # what a lost device held cannot be released
            self._verdict.judge_ended(self._life, self._clients, "closed")
        else:
            self._verdict.judge_balance(self._life, self._clients, "closed")
            self._verdict.judge_files(self._life)

    def _settle(self, why: str) -> None:
        """Deliver all messages between the engine and its front ends. `why` is named in the finding if some stay."""
        if self._clients.border is not None and not self._clients.border.settle():
            self._verdict.find("no progress", f"{why}, but messages between it and its front ends do not arrive")

    def _happen(self, event: Event) -> None:
        life = self._life
        self._say(_EVENTS[event.kind])
        match event.kind:
            case "reset":
                life.recorder.reset()
                try:
                    life.engine.reset_prefix_cache()
                except EngineStopped:
                    if not life.is_lost:
                        raise
                else:
                    self._verdict.judge_forgotten(self._life)
            case "weights":
                self._update_weights()
            case "restart":
                self._clients.cut_off()
                self._close()
                self._begin_again()
            case "crash":
                self._begin_again()
            case "device_lost":
                # Every name begins with "". With several ranks, only rank 0 loses its device.
                life.device.lose(*([""] if life.others is None else ["compute", "store", "load"]))
            case "copies_lost":
                life.device.lose("store", "load")
            case "rank_lost":
                assert life.others is not None
                life.others.lose(1 + event.at % (self._workload.ranks - 1))
            case "hang_up":
                self._clients.hang_up()

    def _end_lost_engine(self, error: Exception) -> None:
        """End the engine as the engine thread does after an error, and start another engine. Raises the error if it is
        not that of a lost device or rank, or if engines fail again and again.
        """
        self._num_failed += 1
        lost = self._life.is_lost and isinstance(error, DeviceLost)
        if not lost or self._num_failed > _MOST_FAILED_ENGINES:
            raise error
        self._clients.cut_off()
        self._life.engine.loop.fail(error)
        self._settle("the engine has failed")
        self._verdict.judge_ended(self._life, self._clients, "failed")
        if waiting := self._clients.waiting():
            self._verdict.find("answered", f"the device was lost, and requests {sorted(waiting)} did not end (H22)")
        self._begin_again()

    def _begin_again(self) -> None:
        """Start another engine on the same disk. All clients repeat their requests, including finished ones, so that
        blocks reused from disk are compared, too.
        """
        self._crash()
        scratch().settle()
        self._verdict.judge_answers(self._clients, over=True)
        self._verdict.judge_trace(self._life)
        self._again = self._clients.wanted()
        self._life = self._begin()
        self._clients = self._join()
        self._clients.connect()
        self._verdict.judge_disk(self._life, "after the restart")

    def _update_weights(self) -> None:
        """Announce new weights. Requests that already have output must end with the old weights. Requests that arrive
        later must start with the new weights. Running requests without output may use either.
        """
        life, model = self._life, self._life.model
        self._weights = 1
        self._clients.announce_weights(1)

        def apply() -> None:
            self._say("has new weights")
            model.weights = 1
            life.recorder.reset()

        life.engine.update_weights(apply, fingerprint=model.fingerprint_of(1))

    def _crash(self) -> None:
        """Stop the engine like a killed process. Idempotent; does nothing after a close."""
        self._clients.disconnect()
        self._life.crash()

    def _busy(self) -> bool:
        engine = self._life.engine
        transfers, others = engine.parts.transfers, self._life.others
        if (others is not None and others.has_work) or self._surroundings.is_busy:
            return True
        return engine.loop.in_flight is not None or (transfers is not None and transfers.has_work)

    def _say(self, text: str) -> None:
        self._life.recorder.say(text)


def where(error: BaseException) -> str:
    """The innermost three frames of an exception: file, line and function."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return ", ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in reversed(frames))
