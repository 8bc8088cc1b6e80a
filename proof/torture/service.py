"""The torture test of a whole engine on a real device. Requests share prefixes, abort and return.

    torture_service(...)   send many requests; each answer must equal the reference, which is computed without a KV pool
    hunt_service(...)      send requests with a mutation, until an answer is wrong. The mutation removes a gate, which
                           is a wait of a forward pass for a load

The toy model's next token is a hash of all KV that it attends to, so a wrong byte or a read that is too early changes
the text. On a GPU, its forward pass is captured in CUDA graphs. The seed determines the requests, but not the timing.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from proof.mutations import applied, find
from proof.rig import busy
from proof.torture.findings import Findings, quiet
from proof.torture.hardware import Missed, open_device
from proof.torture.isolated_job import Apart, ProcessEnded
from proof.torture.traffic import Habits, Meddler, draw_delay
from proof.toy import ToyItself, ToyModel
from sidestream.config import EngineConfig, SamplingParams, SpeculativeConfig
from sidestream.engine import Engine, Handle, build_engine
from sidestream.errors import ConfigError, InvariantError, RequestRejected, SidestreamError
from sidestream.runner.executor import PreparedStep, UnsampledPass
from sidestream.types import BatchPlan, Delta, PrefixQuery
from sidestream_kv.config import OffloadConfig, unknown_name
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.device.cuda import CudaDevice
from sidestream_kv.device.kinds import CPU, CUDA

# Number of prefixes that prompts share, most tokens of a prefix, and most tokens of a prompt after the prefix.
_FAMILIES = 12
_LONGEST = 320
_OWN = 40
_OUTPUTS = 40
# Draft tokens per step, for requests with speculation.
_DRAFTS = 3
# Concurrent requests: several times as many as fit into the KV pool.
_CROWD = 24
_POOL_BLOCKS = 72
_HOST_BLOCKS = 320
_PATIENCE_S = 120.0
# Share of requests with which an operator pins, unpins or drops a prefix.
_OPERATED = 0.2
_HABITS = Habits(longest=0, delay=(0.2, 20e-6, 3e-3), faults=0.02)
# Copies of loads are delayed by more than a step takes, so that a layer without its gate is read too early.
_LOAD_DELAY = (0.5, 10e-3, 20e-3)
_CAPTURED_LOAD_DELAY = (0.5, 1e-3, 8e-3)
# Three groups of layers, so that a load has a first, a middle and a last gate.
_GROUPS = 3

GATES: dict[str, tuple[str, ...]] = {
    CPU: ("layer-waits-for-its-load",),
    CUDA: (
        "layer-waits-for-its-load",
        "captured-layer-waits-for-its-load",
        "first-captured-layer-waits-for-its-load",
        "middle-captured-layers-wait-for-their-load",
        "last-captured-layers-wait-for-their-load",
        "gate-is-recorded-behind-its-loads",
        "batch-with-loads-replays-the-gated-graph",
    ),
}
"""By kind of device: the mutations that `hunt_service` must detect. Each removes a gate between loads and forward
passes. On a CPU, there are no gates in captured graphs.
"""

EAGER_GATES = ("layer-waits-for-its-load",)
"""The mutations of `GATES` that concern only steps without captured graphs."""


@dataclass(slots=True)
class ServiceReport(Findings):
    """The result of a run.

    wrong        wrong answers, unexpected ends of requests, and resources still held at the end
    from_host    prompt tokens whose KV was loaded from host memory
    accepted     accepted drafts
    findings     the first errors, as sentences
    """

    requests: int = 0
    aborted: int = 0
    tokens: int = 0
    from_device: int = 0
    from_host: int = 0
    accepted: int = 0
    preemptions: int = 0
    resets: int = 0
    failed_slices: int = 0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Asked:
    """One request. It is aborted after `abort_at` tokens; None: never."""

    prompt: tuple[int, ...]
    outputs: int
    abort_at: int | None
    handle: Handle | None = None
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    error: str | None = None


def torture_service(
    kind: str,
    *,
    requests: int,
    seed: int = 0,
    eager: bool = False,
    tell: Callable[[int, str], None] = lambda done, text: None,
) -> ServiceReport:
    """Send `requests` requests and check each answer. Blocks.

    eager   on a GPU, run steps without captured graphs
    tell    receives the number of answers so far

    The end of the engine by an error is a finding. Raises ConfigError when the device does not exist.
    """
    if requests < 1:
        raise ConfigError(f"requests is {requests}: give a whole number from 1")
    start, report = time.monotonic(), ServiceReport()
    try:
        _torture(kind, requests, seed, eager, report, tell)
    except ConfigError:
        raise
    except SidestreamError as error:  # on a GPU, a wrong number may be a wrong address, which ends everything
        report.find(f"the engine has ended: {type(error).__name__}: {error}")
    report.seconds = time.monotonic() - start
    return report


def _torture(
    kind: str, requests: int, seed: int, eager: bool, report: ServiceReport, tell: Callable[[int, str], None]
) -> None:
    rng = random.Random(seed)
    model = ToyModel(block_tokens=16, num_layers=12, vocab_size=97, max_model_len=512, eos_every=60)
    with quiet(), _engine(kind, model, seed=seed, eager=eager, report=report) as engine:
        _ask_all(engine, model, requests, rng, report, tell)
        if not engine.flush(timeout_s=_PATIENCE_S):
            report.find("transfers did not end")
        report.preemptions = engine.parts.scheduler.num_preemptions
        assert engine.parts.tiers is not None
        report.check_pools((engine.parts.blocks, engine.parts.tiers.host.pool))


def hunt_service(
    kind: str,
    names: Sequence[str] = (),
    *,
    requests: int,
    seed: int = 0,
    tell: Callable[[int, str], None] = lambda done, text: None,
) -> list[Missed]:
    """Apply the mutations of `GATES` one by one, each in a process of its own, because a mutation may end the GPU for
    its process. With each, send at most `requests` requests, until an answer is wrong. Blocks.

    Raises ConfigError when the device does not exist, or a mutation is not one of `GATES`; InvariantError when the
    unmodified code gives a wrong answer.
    """
    known = GATES.get(kind, ())
    for name in names:
        if name not in known:
            raise ConfigError(unknown_name(f"mutation for a whole engine on {kind}", name, known))
    apart, rows = Apart(limit_memory=False), list[Missed]()
    try:
        for eager in {name in EAGER_GATES for name in names or known}:
            clean = apart.run(_Trial(None, kind, requests, seed, eager))
            if clean.wrong:
                raise InvariantError(f"the unmodified code fails: {clean.findings[0]}: mutations would prove nothing")
        for name in names or known:
            tell(len(rows), name)
            rows.append(_hunt(apart, _Trial(name, kind, requests, seed, name in EAGER_GATES)))
    finally:
        apart.stop()
    return rows


@dataclass(frozen=True, slots=True)
class _Trial:
    """A job of `Apart`: `torture_service` with a mutation, or with the unmodified code."""

    name: str | None
    kind: str
    requests: int
    seed: int
    eager: bool

    def run(self) -> ServiceReport:
        """Run the torture test."""
        with contextlib.nullcontext() if self.name is None else applied(find(self.name)):
            return torture_service(self.kind, requests=self.requests, seed=self.seed, eager=self.eager)


def _hunt(apart: Apart, trial: _Trial) -> Missed:
    """The result of a trial with a mutation. If its process has ended, all its requests count as sent."""
    assert trial.name is not None
    hazard = find(trial.name).hazard
    try:
        report = apart.run(trial)
    except ProcessEnded as error:
        return Missed(trial.name, hazard, trial.requests, str(error))
    if not report.wrong:
        return Missed(trial.name, hazard, None, "")
    apart.stop()  # the process's GPU may be unusable
    return Missed(trial.name, hazard, report.requests, report.findings[0])


def _ask_all(
    engine: Engine,
    model: ToyModel,
    requests: int,
    rng: random.Random,
    report: ServiceReport,
    tell: Callable[[int, str], None],
) -> None:
    """Keep many requests running, and check the answer of each."""
    families = [tuple(rng.randrange(1, model.vocab_size) for _ in range(_LONGEST)) for _ in range(_FAMILIES)]
    running: list[_Asked] = []
    changed, operator = threading.Event(), random.Random("operations on prefixes")
    asked, progress_s = 0, time.monotonic()
    while asked < requests or running:
        while asked < requests and len(running) < _CROWD:
            running.append(_ask(engine, model, families, rng, changed))
            asked += 1
            if operator.random() < _OPERATED:
                _operate(engine, operator.choice(running).prompt, operator)
            if rng.random() < 0.005:
                engine.reset_prefix_cache()
                report.resets += 1
        changed.wait(0.05)
        changed.clear()
        ended = [one for one in running if one.reason is not None]
        for one in ended:
            _judge(one, model, report)
            progress_s = time.monotonic()
        running = [one for one in running if one not in ended]  # other requests may have ended during the wait
        tell(report.requests, f"{report.tokens:,} tokens")
        if report.wrong or time.monotonic() - progress_s > _PATIENCE_S:
            if not report.wrong:
                report.find(f"no request ended within {_PATIENCE_S:g} s; {len(running)} are running")
            return


def _ask(
    engine: Engine, model: ToyModel, families: list[tuple[int, ...]], rng: random.Random, changed: threading.Event
) -> _Asked:
    shared = rng.choice(families)[: rng.randint(0, _LONGEST)]
    prompt = (*shared, *(rng.randrange(1, model.vocab_size) for _ in range(rng.randint(1, _OWN))))
    one = _Asked(prompt, rng.randint(1, _OUTPUTS), rng.randint(0, 20) if rng.random() < 0.15 else None)

    def take(delta: Delta) -> None:
        one.tokens.extend(delta.token_ids)
        one.error, one.reason = delta.error, delta.finish_reason
        if (
            one.abort_at is not None
            and one.reason is None
            and len(one.tokens) >= one.abort_at
            and one.handle is not None
        ):
            engine.abort(one.handle)
            one.abort_at = None
        if one.reason is not None:
            changed.set()

    params = SamplingParams(temperature=0, max_tokens=one.outputs, max_drafts=rng.choice((0, 0, 1, _DRAFTS)))
    one.handle = engine.submit(prompt, params, take, priority=rng.choice((0, 0, 1)))
    if one.abort_at == 0:
        engine.abort(one.handle)
    return one


def _operate(engine: Engine, prompt: Sequence[int], rng: random.Random) -> None:
    """Pin, unpin or drop a prefix of a prompt, which may be running, ended, or not cached any more."""
    operation = rng.choice(("pin_prefix", "pin_prefix", "pin_prefix", "unpin_prefix", "drop_prefix"))
    hint, ttl_s = rng.random() < 0.5, rng.choice((0.05, 5.0, 60.0))
    query = PrefixQuery.of(prompt[: rng.randint(1, len(prompt))], ttl_s=ttl_s, hint=hint)
    with contextlib.suppress(RequestRejected):  # too short, not cached, or no room for a pin
        engine.prefixes.run(operation, query, timeout_s=_PATIENCE_S)


def _judge(one: _Asked, model: ToyModel, report: ServiceReport) -> None:
    report.requests += 1
    report.tokens += len(one.tokens)
    if one.reason == "abort":
        report.aborted += 1
    expected = model.expected(one.prompt, one.outputs)
    given, wanted = one.tokens, expected if one.reason != "abort" else expected[: len(one.tokens)]
    if given != wanted:
        at = next(
            (at for at, (a, b) in enumerate(zip(given, wanted, strict=False)) if a != b), min(len(given), len(wanted))
        )
        report.find(
            f"a prompt of {len(one.prompt)} tokens: output {at} is wrong: "
            f"{given[at : at + 3]} given, {wanted[at : at + 3]} expected"
        )
    if one.reason not in ("stop", "length", "abort"):
        report.find(f"a prompt of {len(one.prompt)} tokens ended with {one.reason}: {one.error}")


@contextlib.contextmanager
def _engine(kind: str, model: ToyModel, *, seed: int, eager: bool, report: ServiceReport) -> Iterator[Engine]:
    """An engine whose steps and copies are delayed at random, and whose copies sometimes fail."""
    device = open_device(kind)
    load_delay = _CAPTURED_LOAD_DELAY if kind == CUDA and not eager else _LOAD_DELAY
    meddler = Meddler(device, replace(_HABITS, load_delay=load_delay), seed=seed)
    layout = model.layout
    device.segment_bytes = layout.block_bytes // _GROUPS
    engine = build_engine(
        model,
        EngineConfig(
            device=kind,
            eager=eager,
            kv_memory=_POOL_BLOCKS * layout.block_bytes,
            block_tokens=layout.block_tokens,
            max_running=8,
            max_model_len=model.max_model_len,
            chunk_tokens=64,
            token_budget=128,
            offload=OffloadConfig(host=_HOST_BLOCKS * layout.block_bytes),
            speculative=SpeculativeConfig(max_drafts=_DRAFTS, adaptive=False),
        ),
        device=device,
        proposer=ToyItself(model),
    )
    try:
        _hold_up_steps(engine, device, seed)
        engine.loop.times.lead_s = lambda: math.inf  # type: ignore[method-assign]  # steps join loads long before their end
        costs = engine.parts.costs
        assert costs is not None
        costs.saw_prefill = lambda *_: None  # type: ignore[method-assign]  # always load KV that host memory has
        yield engine
        report.accepted = int(engine.parts.metrics.value("accepted_tokens_total", ToyItself.name))
        report.from_device, report.from_host = (
            int(engine.parts.metrics.value("cached_tokens_total", tier)) for tier in ("device", "host")
        )
    finally:
        engine.close(flush_s=_PATIENCE_S)
        report.failed_slices = meddler.failed


def _hold_up_steps(engine: Engine, device: CpuDevice | CudaDevice, seed: int) -> None:
    executor, rng = engine.parts.executor, random.Random(seed + 1)
    run = executor._work.run

    def late(batch: BatchPlan, step: PreparedStep, unsampled: UnsampledPass | None) -> None:
        busy(device, draw_delay(rng, _HABITS.delay))
        run(batch, step, unsampled)

    executor._work.run = late  # type: ignore[method-assign]
