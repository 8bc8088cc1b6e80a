"""One schedule: the real engine on the simulated device, driven step by step, judged by every oracle.

The caller's thread is the host. Nothing here depends on a clock: same workload, same policy, same run.
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
from sidestream.device.sim.policies import HOST, Choice
from sidestream.engine import Engine, Handle, build_engine
from sidestream.errors import SidestreamError
from sidestream.offload import tier_io
from sidestream.offload.loads import layers_per_group
from sidestream.runner.executor import LaunchedStep
from sidestream.runner.frame import GraphKey
from sidestream.schedule.commit import Committed
from sidestream.testing.checker import Checker
from sidestream.testing.findings import Finding as Objection
from sidestream.testing.tokenizer import ToyTokenizer
from sidestream.testing.torture.border import Border
from sidestream.testing.torture.judge import (
    still_findable,
    unbalanced,
    wrong_accept_lengths,
    wrong_answer,
    wrong_blocks,
    wrong_entries,
)
from sidestream.testing.torture.narrow import narrow_lanes
from sidestream.testing.torture.oracle import SALT, Reference, Sample, params_of, reference_of, toy_of
from sidestream.testing.torture.script import Scratch, Script, ScriptedDevice, ScriptedModel, ScriptedTier
from sidestream.testing.torture.trace import Recorder, TraceLine
from sidestream.testing.torture.workload import LOAD_DEADLINE_S, Event, Workload
from sidestream.testing.toy import ToyDraftHead, ToyProposer
from sidestream.types import BatchPlan, Delta, Fence, LayerGates, RowResult

ORACLES = ("checker", "tokens", "accept lengths", "content", "balance", "answered", "deadlock", "no progress", "error")
"""What judges a schedule; the first to object is named first.

checker         no two unordered accesses, no use outside a lease, and what else `sidestream.testing.checker` knows
tokens          equal to the reference's, with text, log-probabilities and finish reason; an aborted request's: a
                beginning of them
accept lengths  every step drafts what its row's tokens lead to, and accepts as much of it as is right: a stale read
                would leave the text right (H19)
content         every findable block in every tier holds what its key stands for; nothing from before a reset becomes
                findable
balance         when all is done, every pool is as it was at the start, and nothing is kept by request or transfer
answered        every request ends once, for a reason that it can have; who is told so finds nothing held any more (H24)
deadlock        everybody waits for somebody else
no progress     the schedule does not end (H26)
error           an exception came out of the engine
"""

_IDLE_S = 1e-4
_EVENTS = {
    "reset": "resets the cache",
    "weights": "asks for other weights",
    "crash": "dies, and begins again",
    "restart": "ends, and begins again",
    "hang_up": "loses a front end, and gets another one",
}
# When nobody waits any more, or so many steps in a row had nothing to do, the slowest of all operations may end soon.
_DRAIN_S = 0.05
_PATIENT_STEPS = 100
# Typical schedules take 40 steps, those that wait for a slow disk 200, and those whose every store is late 160 for each
# of them.
_MAX_STEPS = 6000
# Nothing takes so many steps in a row without anything to do.
_STUCK_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Finding:
    """What an oracle objects to."""

    oracle: str
    text: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a schedule went.

    findings    none: it went well
    steps       turns of the loop
    deviations  decision number → who was chosen, where that was not whoever ran: replays the schedule
                (`policies.Steered`)
    decisions   how many were made
    lines       the interleaving, if it was asked for
    objections  what the checker found, in its own terms; among `findings` as text
    """

    findings: tuple[Finding, ...]
    steps: int
    decisions: int
    deviations: dict[int, str]
    lines: tuple[TraceLine, ...] = ()
    objections: tuple[Objection, ...] = ()

    @property
    def oracles(self) -> tuple[str, ...]:
        """Names of the oracles that object, each once."""
        return tuple(dict.fromkeys(finding.oracle for finding in self.findings))


class _Watched:
    """A policy whose deviations are kept."""

    def __init__(self, inner: Policy) -> None:
        self._inner = inner
        self.count = 0
        self.deviations: dict[int, str] = {}

    def choose(self, choice: Choice) -> str:
        """See `Policy.choose`."""
        name = self._inner.choose(choice)
        if name != (choice.current if choice.current in choice.able else choice.able[0]):
            self.deviations[self.count] = name
        self.count += 1
        return name


def run_schedule(
    workload: Workload, policy: Policy, *, trace: bool = False, reference: Reference | None = None
) -> Outcome:
    """Run the workload under the policy and judge it. `reference`: that of the workload, if it is known already.

    Blocks until done; never raises for what the engine does wrong. Changes torch's number of threads to one while it
    runs.
    """
    with _stage(workload):
        return _Schedule(workload, policy, reference or reference_of(workload), trace=trace).run()


@contextlib.contextmanager
def _stage(workload: Workload) -> Iterator[None]:
    """What a schedule changes around it: its disk's pauses are short, and its faults no news."""
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


class _Life:
    """One engine, from its start to its close or crash.

    handles   by request number
    outputs   what makes the text that clients are told, by request number
    told      by request number and sample number
    started   the version of the weights that a request began with, by number
    cut_off   numbers of those that had not ended when the engine was closed
    gone      numbers of those that were refused, or whose front end has gone
    border    what is between clients and engine; None: nothing
    straddles which of those who began with the old weights had been told nothing yet when the new ones were announced
    """

    def __init__(
        self, workload: Workload, policy: Policy, script: Script, weights: int, lines: list[TraceLine] | None
    ) -> None:
        self.checker = Checker(poison=self._poison)
        self.recorder = Recorder(self.checker, self._actor, lines)
        self.device = ScriptedDevice(policy, script, tracer=self.recorder)
        self.device.pin_s = workload.pin_s
        if workload.layer_groups:
            self.device.segment_bytes = 1
        self.model = ScriptedModel(toy_of(workload), self.device)
        self.model.weights = weights
        self.head = ToyDraftHead(toy_of(workload), width=max(1, workload.drafts))
        self.disk: ScriptedTier | None = None
        self.handles: dict[int, Handle] = {}
        self.outputs: dict[int, OutputProcessor] = {}
        self.told: dict[tuple[int, int], Sample] = {}
        self.started: dict[int, int] = {}
        self.cut_off: set[int] = set()
        self.gone: set[int] = set()
        self.border: Border | None = None
        self.straddles: set[tuple[int, int]] = set()
        try:
            if workload.disk_blocks:
                self.disk = _scratch().open(self.model, self.device, num_blocks=workload.disk_blocks)
            self.engine: Engine = build_engine(
                self.model,
                _config(workload, self.model),
                device=self.device,
                threaded=False,
                tiers=None if self.disk is None else {"disk": self.disk},
                proposer=ToyProposer(self.head, model=self.model if workload.leaves_hidden else None),
            )
            if (
                workload.layer_groups
            ):  # steps join loads that are far from their end: what that costs is nobody's concern here
                self.engine.loop.times.lead_s = lambda: math.inf  # type: ignore[method-assign]
            if workload.captured:
                self._capture(workload)
        except BaseException:
            self.crash()
            raise

    def _capture(self, workload: Workload) -> None:
        """One shape, and one each for few drafts and for none: what does not fit runs eagerly, between steps
        that do.
        """
        parts, layout = self.engine.parts, self.model.layout
        few = (
            [GraphKey(workload.max_running, 0, workload.drafts, together=1), GraphKey(workload.max_running, 0)]
            if workload.drafts
            else []
        )
        parts.executor.capture(
            [GraphKey(workload.max_running, workload.chunk_tokens, workload.drafts), *few],
            gate_layers=0 if parts.transfers is None else layers_per_group(layout, self.device.segment_bytes),
        )

    def crash(self) -> None:
        """End as a killed process does. Idempotent, and harmless after a close."""
        if self.border is not None:
            self.border.close()
            self.border = None
        self.device.kill()
        if self.disk is not None:
            self.disk.crash()

    def _poison(self, memory: str, start: int, stop: int, after: Sequence[Fence]) -> None:
        self.device.poison(memory, start, stop, after)

    def _actor(self) -> str:
        return self.device.turns.current.name if hasattr(self, "device") else HOST


class _Schedule:
    def __init__(self, workload: Workload, policy: Policy, reference: Reference, *, trace: bool) -> None:
        self._workload = workload
        self._policy = _Watched(policy)
        self._reference = reference
        self._script = Script(workload)
        self._lines: list[TraceLine] | None = [] if trace else None
        self._findings: dict[Finding, None] = {}
        self._objections: list[Objection] = []
        self._weights = 0
        self._steps = 0
        self._again: list[int] = []  # requests to be asked again after a crash
        self._due: int | None = None  # the step whose clients have not acted yet
        self._life = self._begin(0)

    def _begin(self, weights: int) -> _Life:
        life = _Life(self._workload, self._policy, self._script, weights, self._lines)
        scheduler = life.engine.parts.scheduler
        commit = scheduler.commit

        def judged(batch: BatchPlan, results: Sequence[RowResult], fence: Fence) -> Committed:
            for text in wrong_accept_lengths(life.head, scheduler, batch, results):
                self._find("accept lengths", text)
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
        """Put front ends between the clients and the engine of this life, if there are any."""
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
                self._judge_idle()
                self._close()
            self._judge_answers(over=not done)
        except Deadlock as error:
            self._find("deadlock", str(error))
        except Exception as error:
            self._find("error", f"{type(error).__name__}: {error} ({_where(error)})")
        finally:
            self._judge_traceres()
            self._life.crash()
            _scratch().clean()
        policy, found = self._policy, sorted(self._findings, key=lambda finding: ORACLES.index(finding.oracle))
        return Outcome(
            tuple(found),
            self._steps,
            policy.count,
            policy.deviations,
            tuple(self._lines or ()),
            tuple(self._objections),
        )

    # ------------------------------------------------------------------ driving

    def _drive(self) -> bool:
        """Do what the workload says until all is done; False when the engine was closed under its requests, or does not
        get on.
        """
        workload = self._workload
        last = max([0, *(asked.at for asked in workload.requests), *(event.at for event in workload.events)])
        idle = 0
        for step in range(_MAX_STEPS):
            self._steps += 1
            for event in workload.events:
                if event.at == step:
                    self._happen(event)
            if workload.closes_at == step:
                self._say("closes the engine")
                self._close()
                self._judge_answers(over=False)
                return False
            self._due = step
            if not workload.meanwhile:
                self._clients()
            idle = 0 if self._step() else idle + 1
            if idle == _STUCK_STEPS:
                break
            self._clients()  # if no step was launched
            if self._life.border is not None:
                self._life.border.turn(between_steps=True)
            if idle:
                self._life.device.sleep(_IDLE_S if self._life.engine.unfinished and idle < _PATIENT_STEPS else _DRAIN_S)
            if step >= last and not self._life.engine.unfinished and not self._busy() and self._is_quiet():
                return True
        left = [number for (number, _), sample in self._life.told.items() if sample.reason is None]
        self._find(
            "no progress",
            f"after {self._steps} steps, requests {left} have not ended or transfers are still on their way",
        )
        return False

    def _step(self) -> bool:
        """A turn of the loop; it ends what clients have left, if the engine was told of it."""
        life = self._life
        told_of_all = life.border is not None and life.border.is_quiet and not self._workload.meanwhile
        waited_for = sum(sample.reason is None for sample in life.told.values())
        worked = life.engine.step()
        if told_of_all and life.engine.unfinished > waited_for:
            self._find(
                "answered",
                f"the engine goes on with {life.engine.unfinished} samples, and clients wait for {waited_for}",
            )
        return worked

    def _clients(self) -> None:
        """What clients do at a step; nothing if they have done it."""
        step, self._due = self._due, None
        if step is None:
            return
        again, self._again = self._again, []
        for number, asked in enumerate(self._workload.requests):
            if asked.at == step or number in again:
                self._submit(number)
            if asked.abort_at == step and (number, 0) in self._life.told:
                self._say(f"aborts request {number}")
                self._abort(number)
        if self._life.border is not None:
            self._life.border.turn()

    def _submit(self, number: int) -> None:
        asked, life = self._workload.requests[number], self._life
        self._say(f"submits request {number}: prompt of {len(asked.prompt)}, at most {asked.max_tokens} out")
        for index in range(asked.n):
            life.told[number, index] = Sample([])
        life.started[number] = self._weights
        params = params_of(number, asked)
        life.outputs[number] = OutputProcessor(ToyTokenizer(), params)
        if life.border is not None:
            life.border.submit(number, asked.prompt, params, priority=asked.priority)
            return
        life.handles[number] = life.engine.submit(
            asked.prompt, params, lambda delta: self._tell(life, number, delta), priority=asked.priority
        )

    def _abort(self, number: int) -> None:
        life = self._life
        if life.border is None:
            life.engine.abort(life.handles[number])
            return
        for index in life.border.end(number):  # whoever leaves is told nothing more
            life.told[number, index].reason = "abort"

    def _fail(self, life: _Life, number: int, error: SidestreamError, *, refused: bool) -> None:
        """The client of one request hears that nothing more comes of it: it was not taken, or its connection
        has ended.
        """
        if refused:
            life.gone.add(number)
        for index in range(self._workload.requests[number].n):
            sample = life.told[number, index]
            if sample.reason is None:
                sample.reason, sample.error = ("abort" if refused else "error"), str(error)

    def _close(self) -> None:
        """Close the engine, and have its last news arrive."""
        life = self._life
        life.engine.close(flush_s=self._workload.flush_s)
        if life.border is not None and not life.border.settle():
            self._find(
                "no progress", "the engine is closed, and what it and its front ends have to say does not arrive"
            )
        self._judge_balance("closed")

    def _tell(self, life: _Life, number: int, delta: Delta) -> None:
        """The client of one request; called from inside the engine's step, unless a front end is between."""
        sample, who = life.told[number, delta.index], f"request {number}, sample {delta.index}"
        if delta.prompt_tokens != (length := len(self._workload.requests[number].prompt)):
            self._find("answered", f"{who} was told of {delta.prompt_tokens} prompt tokens, it has {length}")
        read = life.outputs[number].read(delta)
        if read is None:
            self._find("answered", f"{who} was told more after its end ({sample.reason}): {delta.finish_reason}")
            return
        sample.take(read)
        if delta.finish_reason is None:
            return
        self._say(f"request {number} ends: {delta.finish_reason}")
        if life.border is not None:
            return  # the engine has gone on meanwhile
        parts, left = life.engine.parts, sum(asked.reason is None for asked in life.told.values())
        if life.engine.unfinished != left:
            self._find(
                "answered",
                f"{who} was told of its end, and the engine counts {life.engine.unfinished} unfinished, not {left} (H24)",
            )
        if parts.scheduler.get(life.handles[number].request_ids[delta.index]) is not None:
            self._find("answered", f"{who} was told of its end, and the scheduler still holds it (H24)")

    def _happen(self, event: Event) -> None:
        life = self._life
        self._say(_EVENTS[event.kind])
        match event.kind:
            case "reset":
                life.recorder.reset()
                life.engine.reset_cache()
                self._judge_forgotten()
            case "weights":
                self._update_weights()
            case "restart":
                life.cut_off = {number for (number, _), sample in life.told.items() if sample.reason is None}
                self._close()
                self._begin_again()
            case "crash":
                self._begin_again()
            case "hang_up" if life.border is not None:
                for number in life.border.hang_up():
                    life.gone.add(number)
                    for index in range(self._workload.requests[number].n):
                        if life.told[number, index].reason is None:
                            life.told[number, index].reason = "abort"
            case "hang_up":
                pass

    def _begin_again(self) -> None:
        """Another engine on the same disk; whoever had no answer asks again, and whoever had one, too: what is found
        must be right.
        """
        life = self._life
        life.crash()
        _scratch().settle()
        self._judge_answers(over=True)
        self._judge_traceres()
        left = {
            number
            for (number, _), sample in life.told.items()
            if sample.reason in ("abort", "error") and number not in life.cut_off
        }
        self._again = sorted({number for number, _ in life.told} - left)
        self._life = self._begin(self._weights)
        self._connect()
        self._judge_disk(self._life, "after the restart")

    def _update_weights(self) -> None:
        """Those who were told something end on the old weights, who comes later begins on the new ones, the others may
        do either.
        """
        life, model = self._life, self._life.model
        self._weights = 1
        life.straddles.update(who for who, told in life.told.items() if told.reason is None and not told.tokens)

        def apply() -> None:
            self._say("has new weights")
            model.weights = 1
            life.recorder.reset()

        life.engine.update_weights(apply, fingerprint=model.fingerprint_of(1))

    def _is_quiet(self) -> bool:
        return self._life.border is None or self._life.border.is_quiet

    def _busy(self) -> bool:
        engine = self._life.engine
        transfers = engine.parts.transfers
        return engine.loop.in_flight is not None or (transfers is not None and transfers.busy)

    # ------------------------------------------------------------------ judging

    def _find(self, oracle: str, text: str) -> None:
        self._findings[Finding(oracle, text)] = None

    def _say(self, text: str) -> None:
        self._life.recorder.say(text)

    def _judge_idle(self) -> None:
        """Everything ended, nothing is on its way, the engine still serves."""
        life = self._life
        self._judge_balance("idle")
        for text in wrong_blocks(life.engine, life.device, self._reference):
            self._find("content", text)
        self._judge_disk(life, "at the end")
        life.checker.check_idle()

    def _judge_balance(self, when: str) -> None:
        for text in unbalanced(self._life.engine, self._life.disk):
            self._find("balance", f"{when}: {text}")
        border = self._life.border
        for name, count in (border.left() if border is not None else {}).items():
            self._find("balance", f"{when}: {count} {name} are kept")

    def _judge_forgotten(self) -> None:
        for text in still_findable(self._life.engine, self._life.disk):
            self._find("content", text)

    def _judge_disk(self, life: _Life, when: str) -> None:
        if life.disk is not None:
            for text in wrong_entries(life.disk, self._reference, damaged=self._damaged):
                self._find("content", f"{when}: {text}")

    def _judge_answers(self, *, over: bool) -> None:
        """`over`: the clients ask another engine, so that a beginning will do for now."""
        life = self._life
        for (number, index), told in life.told.items():
            versions = (0, 1) if (number, index) in life.straddles else (life.started[number],)
            ends = over or number in life.gone
            faults = [
                list(
                    wrong_answer(
                        self._workload, number, told, self._reference.samples[version][number, index], over=ends
                    )
                )
                for version in versions
            ]
            for oracle, text in min(faults, key=len):
                self._find(oracle, text)

    def _judge_traceres(self) -> None:
        """What the life's checker has found, and what came back from before a reset."""
        for text in self._life.recorder.stale:
            self._find("content", text)
        for finding in self._life.checker.findings:
            self._find("checker", str(finding))
            self._objections.append(finding)

    @property
    def _damaged(self) -> bool:
        return any(fault.kind in ("truncated", "flipped") for fault in self._workload.faults)


def _config(workload: Workload, model: ScriptedModel) -> EngineConfig:
    size = model.layout.block_bytes
    offload = OffloadConfig(host=workload.slots * size, load_deadline_s=LOAD_DEADLINE_S) if workload.slots else None
    return EngineConfig(
        kv_memory=workload.blocks * size,
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
    """Where an exception came from: file, line and function, innermost first."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return ", ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in reversed(frames))


_scratches: list[Scratch] = []


def _scratch() -> Scratch:
    """This process's directories."""
    if not _scratches or not _scratches[-1].is_ours:
        _scratches.append(Scratch())
    return _scratches[-1]
