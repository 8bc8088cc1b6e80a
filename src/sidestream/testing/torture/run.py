"""One schedule: runs the real engine on the simulated device, step by step, and applies every oracle.

The caller's thread is the host. Results do not depend on a clock: the same workload and policy give the same run.
"""

from __future__ import annotations

import contextlib
import logging
import math
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sidestream.client.output import OutputProcessor
from sidestream.config import EngineConfig, OffloadConfig, SpeculativeConfig
from sidestream.device.sim import Deadlock, Policy
from sidestream.device.sim.policies import HOST
from sidestream.engine import Engine, Handle, build_engine
from sidestream.errors import DeviceLost, SidestreamError
from sidestream.offload import tier_io
from sidestream.offload.loads import layers_per_group
from sidestream.ranks.fences import local_fence
from sidestream.runner.executor import LaunchedStep
from sidestream.runner.step_inputs import GraphKey
from sidestream.schedule.commit import Committed
from sidestream.testing.checker import Checker
from sidestream.testing.findings import Finding as Objection
from sidestream.testing.guard import Guard
from sidestream.testing.ranks import RankProposer, RankToy, SimRanks
from sidestream.testing.steering import Watched
from sidestream.testing.tokenizer import ToyTokenizer
from sidestream.testing.torture.border import Border
from sidestream.testing.torture.contents import Contents
from sidestream.testing.torture.judge import wrong_accept_lengths, wrong_when_published
from sidestream.testing.torture.narrow import narrow_lanes
from sidestream.testing.torture.oracle import SALT, Reference, Sample, params_of, reference_of, state_bytes, toy_of
from sidestream.testing.torture.script import Scratch, Script, ScriptedDevice, ScriptedModel, ScriptedTier
from sidestream.testing.torture.verdict import Finding, Verdict
from sidestream.testing.torture.workload import LOAD_DEADLINE_S, Event, Workload
from sidestream.testing.toy import ToyDraftHead, ToyProposer
from sidestream.testing.trace import Recorder, TraceLine
from sidestream.types import BatchPlan, Delta, Fence, LayerGates, RowResult

_IDLE_S = 1e-4
_EVENTS = {
    "reset": "resets the cache",
    "weights": "asks for other weights",
    "crash": "dies, and begins again",
    "restart": "ends, and begins again",
    "hang_up": "loses a front end, which is replaced",
    "device_lost": "loses its device",
    "copies_lost": "loses its device's copies",
}
# Virtual time of an idle step when no client waits, or after _PATIENT_STEPS idle steps: then slow operations may end.
_DRAIN_S = 0.05
_PATIENT_STEPS = 100
# Typical schedules take 40 steps, and schedules that wait for a slow disk 200. If stores are late, each adds up to 160
# steps.
_MAX_STEPS = 6000
# No schedule has this many idle steps in a row, for each rank, unless it hangs: the policy `late` lets one of all
# actors run in five idle steps.
_STUCK_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a schedule.

    findings    empty if the schedule passed
    steps       engine steps
    deviations  decision number → chosen actor, where it was not the running one; replays the schedule
                (`policies.Steered`)
    decisions   number of decisions
    lines       the interleaving, if requested
    objections  the checker's findings; `findings` contains them as text
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
    """Run the workload under the policy and apply the oracles. `reference`: the workload's reference, if it was
    computed already.

    Blocks until done; never raises for an error of the engine. Sets torch's number of threads to one while it runs.
    """
    with _stage(workload):
        return _Schedule(workload, policy, reference or reference_of(workload), trace=trace).run()


@contextlib.contextmanager
def _stage(workload: Workload) -> Iterator[None]:
    """Settings for the duration of a schedule: short pauses of the disk, and injected faults are not logged."""
    logger, level, threads = (
        logging.getLogger("sidestream"),
        logging.getLogger("sidestream").level,
        torch.get_num_threads(),
    )
    pause_s = tier_io.PAUSE_S
    logger.setLevel(logging.CRITICAL + 1)
    torch.set_num_threads(1)
    tier_io.PAUSE_S = LOAD_DEADLINE_S
    try:
        with narrow_lanes() if workload.layer_groups else contextlib.nullcontext():
            yield
    finally:
        tier_io.PAUSE_S = pause_s
        torch.set_num_threads(threads)
        logger.setLevel(level)


class Life:
    """One engine, from start to close or crash.

    handles   by request number
    outputs   the output processor of each request, by request number
    received  by request number and sample number
    started   the version of the weights that a request started with, by request number
    cut_off   numbers of the requests that were unfinished when the engine was closed
    gone      numbers of the requests that were rejected, or whose front end has died
    border    the front ends between clients and engine; None: there are none
    straddles request and sample numbers: started with the old weights, and had no output when the update was announced
    """

    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        script: Script,
        contents: Contents,
        *,
        weights: int,
        lines: list[TraceLine] | None,
    ) -> None:
        self.checker = Checker(poison=self._poison)
        self.recorder = Recorder(
            self.checker,
            self._actor,
            lines,
            lambda what, memory, where, key: wrong_when_published(self.device, contents, what, memory, where, key),
        )
        self.device = ScriptedDevice(policy, script, tracer=self.recorder, guard=Guard(self.checker))
        self.device.pin_s = workload.pin_s
        if workload.layer_groups:
            self.device.segment_bytes = 1
        self.model = ScriptedModel(toy_of(workload), self.device)
        self.model.weights = weights
        self.head = ToyDraftHead(toy_of(workload), width=max(1, workload.drafts))
        self.disk: ScriptedTier | None = None
        self.disks: list[ScriptedTier] = []
        self.others: SimRanks | None = None
        self.handles: dict[int, Handle] = {}
        self.outputs: dict[int, OutputProcessor] = {}
        self.received: dict[tuple[int, int], Sample] = {}
        self.started: dict[int, int] = {}
        self.cut_off: set[int] = set()
        self.gone: set[int] = set()
        self.border: Border | None = None
        self.straddles: set[tuple[int, int]] = set()
        try:
            if workload.disk_blocks:
                self.disk = _scratch().open(self.model, self.device, num_blocks=workload.disk_blocks)
                self.disks.append(self.disk)
            if workload.ranks > 1:
                self.others = self._start_ranks(workload)
            self.engine: Engine = build_engine(
                self.model if self.others is None else RankToy(self.model, self.others.groups[0]),
                _config(workload, self.model),
                device=self.device,
                threaded=False,
                ranks=None if self.others is None else self.others.ranks,
                group=None if self.others is None else self.others.groups[0],
                tiers=None if self.disk is None else {"disk": self.disk},
                proposer=self._proposer(workload),
            )
            if workload.layer_groups:  # steps join loads long before their end: schedules do not measure time
                self.engine.loop.times.lead_s = lambda: math.inf  # type: ignore[method-assign]
            if workload.captured:
                self._capture(workload)
        except BaseException:
            self.crash()
            raise

    def _start_ranks(self, workload: Workload) -> SimRanks:
        """Start the ranks other than 0, each with its own toy and disk."""
        ranks = SimRanks(self.device, workload.ranks)
        for rank in range(1, workload.ranks):
            if workload.disk_blocks:
                self.disks.append(_scratch().open(self.model, self.device, num_blocks=workload.disk_blocks, rank=rank))
            ranks.start(
                rank,
                RankToy(toy_of(workload), ranks.groups[rank]),
                _config(workload, self.model),
                tiers={"disk": self.disks[-1]} if workload.disk_blocks else None,
                proposer=RankProposer(self._proposer(workload), self.model.vocab_size),
            )
        return ranks

    def _proposer(self, workload: Workload) -> ToyProposer:
        return ToyProposer(self.head, model=self.model if workload.leaves_hidden else None)

    def _capture(self, workload: Workload) -> None:
        """Capture one shape and, if the workload has drafts, a shape with few drafts and one without. All other batches
        run eagerly, between captured steps.
        """
        parts, layout = self.engine.parts, self.model.layout
        has_states = workload.states > 0
        few = (
            [
                GraphKey(workload.max_running, 0, workload.drafts, total_drafts=1, has_states=has_states),
                GraphKey(workload.max_running, has_states=has_states),
            ]
            if workload.drafts
            else []
        )
        for executor in (parts.executor, *(() if self.others is None else self.others.executors)):
            executor.capture(
                [GraphKey(workload.max_running, workload.chunk_tokens, workload.drafts, has_states=has_states), *few],
                gate_layers=0 if parts.transfers is None else layers_per_group(layout, self.device.segment_bytes),
            )

    def crash(self) -> None:
        """Stop like a killed process. Idempotent; does nothing after a close."""
        if self.border is not None:
            self.border.close()
            self.border = None
        self.device.kill()
        for disk in self.disks:
            disk.crash()

    def _poison(self, memory: str, start: int, stop: int, after: Sequence[Fence]) -> None:
        self.device.poison(memory, start, stop, [local_fence(fence) for fence in after])  # the memory is rank 0's

    def _actor(self) -> str:
        return self.device.turns.current.name if hasattr(self, "device") else HOST


class _Schedule:
    def __init__(self, workload: Workload, policy: Policy, reference: Reference, *, trace: bool) -> None:
        self._workload = workload
        self._policy = Watched(policy)
        self._verdict = Verdict(workload, reference)
        self._script = Script(workload)
        self._lines: list[TraceLine] | None = [] if trace else None
        self._weights = 0
        self._steps = 0
        self._again: list[int] = []  # requests that clients repeat after a crash
        self._due: int | None = None  # the committed step to which clients have not reacted yet
        self._life = self._begin(0)

    def _begin(self, weights: int) -> Life:
        life = Life(
            self._workload,
            self._policy,
            self._script,
            self._verdict.contents,
            weights=weights,
            lines=self._lines,
        )
        scheduler = life.engine.parts.scheduler
        commit = scheduler.commit

        def judged(batch: BatchPlan, results: Sequence[RowResult], fence: Fence) -> Committed:
            for text in wrong_accept_lengths(life.head, scheduler, batch, results):
                self._verdict.find("accept lengths", text)
            return commit(batch, results, fence)

        if self._workload.drafts:
            scheduler.commit = judged  # type: ignore[method-assign]
        if self._workload.meanwhile:
            executor = life.engine.parts.executor
            launch = executor.launch

            def launched(batch: BatchPlan, *, after: tuple[Fence, ...], gates: LayerGates) -> LaunchedStep:
                launched = launch(batch, after=after, gates=gates)
                self._clients()
                return launched

            executor.launch = launched  # type: ignore[method-assign]
        return life

    def _connect(self) -> None:
        """Connect this engine's front ends to the clients, if the workload has any."""
        life = self._life
        if self._workload.front_ends:
            life.border = Border(
                life.engine,
                front_ends=self._workload.front_ends,
                seed=self._workload.seed,
                tell=lambda number, delta: self._tell(life, number, delta),
                fail=lambda number, error, refused: self._fail(life, number, error, refused=refused),
            )

    def run(self) -> Outcome:
        try:
            self._connect()
            done = self._drive()
            if done:
                self._verdict.judge_idle(self._life)
                self._close()
            self._verdict.judge_answers(self._life, over=not done)
        except Deadlock as error:
            self._verdict.find("deadlock", str(error))
        except Exception as error:
            self._verdict.find("error", f"{type(error).__name__}: {error} ({_where(error)})")
        finally:
            self._verdict.judge_trace(self._life)
            self._life.crash()
            _scratch().clean()
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
        """Run the workload until all is done; False when the engine was closed with requests running, or hangs."""
        workload = self._workload
        last = max([0, *(asked.at for asked in workload.requests), *(event.at for event in workload.events)])
        idle = 0
        for step in range(_MAX_STEPS * workload.ranks):
            self._steps += 1
            for event in workload.events:
                if event.at == step:
                    self._happen(event)
            if workload.closes_at == step:
                self._say("closes the engine")
                self._close()
                self._verdict.judge_answers(self._life, over=False)
                return False
            self._due = step
            if not workload.meanwhile:
                self._clients()
            try:
                idle = 0 if self._step() else idle + 1
            except DeviceLost as error:
                if not self._life.device.is_lost:
                    raise
                self._end_lost_engine(error)
                idle = 0
            if idle == _STUCK_STEPS * workload.ranks:
                break
            self._clients()  # unless a step was launched
            if self._life.border is not None:
                self._life.border.turn(between_steps=True)
            if idle:
                self._life.device.sleep(_IDLE_S if self._life.engine.unfinished and idle < _PATIENT_STEPS else _DRAIN_S)
            if step >= last and not self._life.engine.unfinished and not self._busy() and self._is_quiet():
                if not self._life.device.is_lost:
                    return True
                self._end_lost_engine(DeviceLost("injected: the device is lost, and the engine had nothing to do"))
        left = [number for (number, _), sample in self._life.received.items() if sample.reason is None]
        self._verdict.find(
            "no progress",
            f"after {self._steps} steps, requests {left} have not ended or transfers are still running",
        )
        return False

    def _step(self) -> bool:
        """One engine step; then ends requests whose clients have left, if the engine was informed."""
        life = self._life
        told_of_all = life.border is not None and life.border.is_quiet and not self._workload.meanwhile
        waited_for = sum(sample.reason is None for sample in life.received.values())
        worked = life.engine.step()
        if told_of_all and life.engine.unfinished > waited_for:
            self._verdict.find(
                "answered",
                f"the engine continues with {life.engine.unfinished} samples, and clients wait for {waited_for}",
            )
        return worked

    def _clients(self) -> None:
        """Run the clients' actions at a step. Does nothing in a second call for the same step."""
        step, self._due = self._due, None
        if step is None:
            return
        again, self._again = self._again, []
        for number, asked in enumerate(self._workload.requests):
            if asked.at == step or number in again:
                self._submit(number)
            if asked.abort_at == step and (number, 0) in self._life.received:
                self._say(f"aborts request {number}")
                self._abort(number)
        if self._life.border is not None:
            self._life.border.turn()

    def _submit(self, number: int) -> None:
        asked, life = self._workload.requests[number], self._life
        self._say(f"submits request {number}: prompt of {len(asked.prompt)}, at most {asked.max_tokens} out")
        for index in range(asked.n):
            life.received[number, index] = Sample([])
        life.started[number] = self._weights
        params = params_of(number, asked)
        life.outputs[number] = OutputProcessor(ToyTokenizer(), params)
        if life.border is not None:
            life.border.submit(number, asked.prompt, params, priority=asked.priority, salt=asked.salt)
            return
        life.handles[number] = life.engine.submit(
            asked.prompt,
            params,
            lambda delta: self._tell(life, number, delta),
            priority=asked.priority,
            cache_salt=asked.salt,
        )

    def _abort(self, number: int) -> None:
        life = self._life
        if life.border is None:
            life.engine.abort(life.handles[number])
            return
        for index in life.border.end(number):  # a client that has left receives no output
            life.received[number, index].reason = "abort"

    def _fail(self, life: Life, number: int, error: SidestreamError, *, refused: bool) -> None:
        """Tell a client that its request has ended, because it was rejected or because its connection has ended."""
        if refused:
            life.gone.add(number)
        for index in range(self._workload.requests[number].n):
            sample = life.received[number, index]
            if sample.reason is None:
                sample.reason, sample.error = ("abort" if refused else "error"), str(error)

    def _close(self) -> None:
        """Close the engine, and deliver its last messages."""
        life = self._life
        life.engine.close(flush_s=self._workload.flush_s)
        if life.border is not None and not life.border.settle():
            self._verdict.find(
                "no progress", "the engine is closed, but messages between it and its front ends do not arrive"
            )
        self._verdict.judge_balance(self._life, "closed")

    def _tell(self, life: Life, number: int, delta: Delta) -> None:
        """Deliver output to one request's client; called inside the engine's step, unless front ends are in between."""
        sample, who = life.received[number, delta.index], f"request {number}, sample {delta.index}"
        if delta.prompt_tokens != (length := len(self._workload.requests[number].prompt)):
            self._verdict.find("answered", f"{who} has {length} prompt tokens, its output counts {delta.prompt_tokens}")
        read = life.outputs[number].read(delta)
        if read is None:
            self._verdict.find(
                "answered", f"{who} received output after its end ({sample.reason}): {delta.finish_reason}"
            )
            return
        sample.take(read)
        if delta.finish_reason is None:
            return
        self._say(f"request {number} ends: {delta.finish_reason}")
        if life.border is not None or life.device.is_lost:
            return  # the engine has advanced meanwhile, or has failed
        parts, left = life.engine.parts, sum(asked.reason is None for asked in life.received.values())
        if life.engine.unfinished != left:
            self._verdict.find(
                "answered",
                f"{who} received its end, and the engine counts {life.engine.unfinished} unfinished, not {left} (H24)",
            )
        if parts.scheduler.get(life.handles[number].request_ids[delta.index]) is not None:
            self._verdict.find("answered", f"{who} received its end, and the scheduler still holds it (H24)")

    def _happen(self, event: Event) -> None:
        life = self._life
        self._say(_EVENTS[event.kind])
        match event.kind:
            case "reset":
                life.recorder.reset()
                life.engine.reset_cache()
                self._verdict.judge_forgotten(self._life)
            case "weights":
                self._update_weights()
            case "restart":
                life.cut_off = {number for (number, _), sample in life.received.items() if sample.reason is None}
                self._close()
                self._begin_again()
            case "crash":
                self._begin_again()
            case "device_lost":
                life.device.lose("")  # every name begins like this
            case "copies_lost":
                life.device.lose("store", "load")
            case "hang_up" if life.border is not None:
                for number in life.border.hang_up():
                    life.gone.add(number)
                    for index in range(self._workload.requests[number].n):
                        if life.received[number, index].reason is None:
                            life.received[number, index].reason = "abort"
            case "hang_up":
                pass

    def _end_lost_engine(self, error: DeviceLost) -> None:
        """Do as an engine's thread does after an error, and start another engine."""
        life = self._life
        life.cut_off = {number for (number, _), sample in life.received.items() if sample.reason is None}
        life.engine.loop._failures.end_engine(error)
        waiting = sorted(number for (number, _), sample in life.received.items() if sample.reason is None)
        if waiting:
            self._verdict.find("answered", f"the device was lost, and requests {waiting} did not end (H22)")
        self._begin_again()

    def _begin_again(self) -> None:
        """Start another engine on the same disk. All clients repeat their requests, including finished ones: reused
        blocks must be right.
        """
        life = self._life
        life.crash()
        _scratch().settle()
        self._verdict.judge_answers(self._life, over=True)
        self._verdict.judge_trace(self._life)
        left = {
            number
            for (number, _), sample in life.received.items()
            if sample.reason in ("abort", "error") and number not in life.cut_off
        }
        self._again = sorted({number for number, _ in life.received} - left)
        self._life = self._begin(self._weights)
        self._connect()
        self._verdict.judge_disk(self._life, "after the restart")

    def _update_weights(self) -> None:
        """Announce new weights. Requests that have output must end with the old weights, and requests that arrive later
        must start with the new weights. Requests in between may do either.
        """
        life, model = self._life, self._life.model
        self._weights = 1
        life.straddles.update(
            who for who, received in life.received.items() if received.reason is None and not received.tokens
        )

        def apply() -> None:
            self._say("has new weights")
            model.weights = 1
            life.recorder.reset()

        life.engine.update_weights(apply, fingerprint=model.fingerprint_of(1))

    def _is_quiet(self) -> bool:
        return self._life.border is None or self._life.border.is_quiet

    def _busy(self) -> bool:
        engine = self._life.engine
        transfers, others = engine.parts.transfers, self._life.others
        if others is not None and others.busy:
            return True
        return engine.loop.in_flight is not None or (transfers is not None and transfers.busy)

    def _say(self, text: str) -> None:
        self._life.recorder.say(text)


def _config(workload: Workload, model: ScriptedModel) -> EngineConfig:
    size = model.layout.block_bytes
    offload = (
        OffloadConfig(host=workload.slots * size * workload.ranks, load_deadline_s=LOAD_DEADLINE_S)
        if workload.slots
        else None
    )
    return EngineConfig(
        kv_memory=workload.blocks * size + state_bytes(model, workload.states),
        state_memory=state_bytes(model, workload.states) or None,
        block_tokens=model.layout.block_tokens,
        chunk_tokens=workload.chunk_tokens,
        token_budget=workload.chunk_tokens + workload.max_running,
        max_running=workload.max_running,
        asynchronous=workload.asynchronous,
        offload=offload,
        speculative=SpeculativeConfig(max_drafts=workload.drafts, adaptive=False) if workload.drafts else None,
        max_waiting=workload.waiting,
        salt=SALT,
    )


def _where(error: BaseException) -> str:
    """Origin of an exception: file, line and function, innermost first."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return ", ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in reversed(frames))


_scratches: list[Scratch] = []


def _scratch() -> Scratch:
    """This process's directories for disk tiers."""
    if not _scratches or not _scratches[-1].is_ours:
        _scratches.append(Scratch())
    return _scratches[-1]
