"""The torture test of tensor parallelism: a real language model whose KV lies on several ranks, each in its own process
with its own device.

    torture_ranks(...)   send requests until enough blocks were transferred; each answer must equal the reference

The model is tiny, has random weights in float32, and each of its layers attends to all tokens before. Requests continue
the conversations of `conversations.py`: with an old prompt, or with a longer one than before. The device has space for
few of them, so they are preempted, and their KV is stored, loaded, written to disk and read again. Steps, copies and
disk I/O of every rank are delayed at random, each rank by different delays, and some copies fail on one rank only.

The ranks add their parts in another order than the reference, so log-probabilities differ a little. Each token must be
equal, and its log-probability must be at most `NEAR` from the reference's. Tokens whose two likeliest candidates are
nearer than twice that are only part of prompts, so rounding cannot change an answer. Wrong KV moves log-probabilities
by far more: if half of the heads of one of 28 blocks are zero in all layers, the largest distance among five tokens is
0.24 (median of 336 cases), and above 0.03 in 99 of 100. If only the last layer is wrong, it is 0.02, and above 0.004.

The seed determines the requests, but not the timing.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from proof.torture.conversations import Conversation, hold_conversations
from proof.torture.findings import Findings, quiet
from proof.torture.rank_engine import DRAFTS, OUTPUTS, SIZES, checked_config, rank_engine, write_model
from sidestream.config import SamplingParams
from sidestream.engine import Engine, Handle
from sidestream.errors import ConfigError, SidestreamError
from sidestream.types import Delta, TokenLogprob
from sidestream_kv.device.kinds import CPU, CUDA

NEAR = {CPU: 1e-4, CUDA: 5e-3}
"""By kind of device: largest distance of a log-probability from the reference's. Kernels on a GPU multiply in other
units, and add in another order, than those of the CPU, which computes the reference.
"""
_CROWD = 24
# After so many requests there is a new cache salt, so that old KV is evicted and new KV is stored all the time.
_SALTED = 60
_RESETS = 0.01
_ABORTS = 0.15
_PATIENCE_S = 120.0


@dataclass(slots=True)
class RanksReport(Findings):
    """The result of a run.

    blocks      blocks that were stored or loaded, on all ranks: each rank's share of a block counts
    from_host   prompt tokens whose KV was loaded from host memory; `from_disk`: that was read from disk before
    accepted    accepted drafts
    failed      transfers that failed because a copy failed on some rank
    distance    largest distance of a right token's log-probability from the reference's
    wrong       wrong answers, unexpected ends of requests, and resources still held at the end
    traffic_s   seconds from the first request to the end of the last transfer; `seconds`: of the whole run
    findings    the first errors, as sentences
    """

    requests: int = 0
    aborted: int = 0
    tokens: int = 0
    stored: int = 0
    loaded: int = 0
    from_device: int = 0
    from_host: int = 0
    from_disk: int = 0
    accepted: int = 0
    preemptions: int = 0
    resets: int = 0
    failed: int = 0
    distance: float = 0.0
    traffic_s: float = 0.0
    seconds: float = 0.0

    @property
    def blocks(self) -> int:
        """Blocks that were stored or loaded."""
        return self.stored + self.loaded


def torture_ranks(
    kind: str,
    *,
    ranks: int,
    blocks: int,
    seed: int = 0,
    late: bool = False,
    without: Sequence[str] = (),
    tell: Callable[[int, str], None] = lambda done, text: None,
) -> RanksReport:
    """Send requests until `blocks` blocks were transferred between devices and host memory, on all ranks together, and
    check each answer. Stops after the first wrong answer. Blocks.

    late      delay loads by more than a step takes on a busy machine. The run is slower, and finds a missing wait for a
              load earlier
    without   names of rules that the ranks other than 0 run without. `mutations.applied` removes a rule from rank 0
    tell      receives the number of blocks so far

    Raises ConfigError for values that do not fit, before any process is started, and the error of a rank that cannot
    start.
    """
    if blocks < 1:
        raise ConfigError(f"blocks is {blocks}: give a whole number from 1")
    config = checked_config(kind, ranks)
    start_s, report = time.monotonic(), RanksReport()
    with quiet(), tempfile.TemporaryDirectory(prefix="sidestream-torture-") as scratch:
        tell(0, "computing the reference")
        model, near = write_model(Path(scratch, "model")), NEAR[kind]
        known = hold_conversations(model, SIZES[kind].conversations, seed=seed, margin=2 * near)
        tell(0, f"starting {ranks} ranks")
        disk = Path(scratch, "kv")
        with rank_engine(model, config, disk, seed=seed, late=late, without=tuple(without)) as engine:
            _Traffic(engine, known, report, seed=seed, near=near, ranks=ranks).run(blocks, tell)
    report.seconds = time.monotonic() - start_s
    return report


@dataclass(slots=True, eq=False)
class _Asked:
    """One request: its prompt is the first `start` tokens of a conversation. It is aborted after `abort_at` tokens;
    None: never.
    """

    conversation: Conversation
    start: int
    outputs: int
    abort_at: int | None
    handle: Handle | None = None
    given: list[TokenLogprob] = field(default_factory=list)
    reason: str | None = None
    error: str | None = None


class _Traffic:
    """Sends requests from one thread, and checks their answers."""

    def __init__(
        self,
        engine: Engine,
        conversations: Sequence[Conversation],
        report: RanksReport,
        *,
        seed: int,
        near: float,
        ranks: int,
    ) -> None:
        self._engine = engine
        self._conversations = conversations
        self._report = report
        self._rng = random.Random(seed)
        self._near = near
        self._ranks = ranks
        self._asked = 0
        self._changed = threading.Event()

    def run(self, blocks: int, tell: Callable[[int, str], None]) -> None:
        """Send requests until `blocks` blocks were transferred, and wait for their ends."""
        start_s = time.monotonic()
        try:
            self._send_and_check(blocks, tell)
            if not self._engine.flush(timeout_s=_PATIENCE_S):
                self._report.find("transfers did not end")
            elif not self._report.wrong:
                self._check_pools()
        except SidestreamError as error:  # the engine has ended
            self._report.find(f"{type(error).__name__}: {error}")
        self._count()
        self._report.traffic_s = time.monotonic() - start_s

    def _send_and_check(self, blocks: int, tell: Callable[[int, str], None]) -> None:
        running: list[_Asked] = []
        progress_s, moved = time.monotonic(), -1
        while not self._report.wrong and (running or self._report.blocks < blocks):
            while self._report.blocks < blocks and len(running) < _CROWD:
                running.append(self._ask())
                if self._rng.random() < _RESETS:
                    self._engine.reset_prefix_cache()
                    self._report.resets += 1
            self._changed.wait(0.05)
            self._changed.clear()
            ended = [one for one in running if one.reason is not None]
            for one in ended:
                self._judge(one)
            running = [one for one in running if one not in ended]  # others may have ended during the wait
            self._count()
            tell(self._report.blocks, f"{self._report.requests:,} requests")
            if ended and self._report.blocks != moved:
                progress_s, moved = time.monotonic(), self._report.blocks
            elif time.monotonic() - progress_s > _PATIENCE_S:
                self._report.find(
                    f"for {_PATIENCE_S:g} s, no request ended or no block was transferred; "
                    f"{len(running)} requests are running"
                )

    def _ask(self) -> _Asked:
        rng = self._rng
        talk = rng.choice(self._conversations)
        start = rng.choice(talk.starts)
        outputs = rng.randint(1, min(OUTPUTS, talk.ends[start] - start))
        one = _Asked(talk, start, outputs, rng.randint(0, OUTPUTS // 2) if rng.random() < _ABORTS else None)

        def take(delta: Delta) -> None:
            one.given.extend(delta.logprobs)
            one.error = delta.error
            aborts = one.abort_at is not None and delta.finish_reason is None and len(one.given) >= one.abort_at
            if aborts and one.handle is not None:
                self._engine.abort(one.handle)
                one.abort_at = None
            if delta.finish_reason is not None:
                one.reason = delta.finish_reason
                self._changed.set()

        params = SamplingParams(
            temperature=0,
            max_tokens=outputs,
            ignore_eos=True,
            logprobs=1,
            max_drafts=rng.choice((0, 0, 1, DRAFTS)),
        )
        self._asked += 1
        one.handle = self._engine.submit(
            talk.tokens[:start],
            params,
            take,
            priority=rng.choice((0, 0, 1)),
            cache_salt=f"salt {self._asked // _SALTED + rng.choice((0, 1))}",
        )
        if one.abort_at == 0:
            self._engine.abort(one.handle)
        return one

    def _judge(self, one: _Asked) -> None:
        report, prompt = self._report, f"a prompt of {one.start} tokens"
        report.requests += 1
        report.tokens += len(one.given)
        report.aborted += one.reason == "abort"
        if one.reason not in ("length", "abort"):
            report.find(f"{prompt} ended with {one.reason}: {one.error}")
        elif len(one.given) > one.outputs or (one.reason == "length" and len(one.given) < one.outputs):
            report.find(f"{prompt}: {len(one.given)} tokens were given, {one.outputs} expected")
        for at, given in zip(range(one.start, one.start + one.outputs), one.given, strict=False):
            wanted, logprob = one.conversation.tokens[at], one.conversation.logprobs[at]
            distance = abs(given.logprob - logprob)
            if given.token_id != wanted or not distance <= self._near:
                report.find(
                    f"{prompt}: output {at - one.start} is wrong: token {given.token_id} with log-probability "
                    f"{given.logprob:.4f} given, token {wanted} with {logprob:.4f} expected"
                )
                return
            report.distance = max(report.distance, distance)

    def _check_pools(self) -> None:
        parts = self._engine.parts
        assert parts.tiers is not None
        self._report.check_pools((parts.blocks, parts.tiers.host.pool))

    def _count(self) -> None:
        """Update the report's counts that the engine keeps."""
        report, parts = self._report, self._engine.parts
        value, share = parts.metrics.value, parts.layout.block_bytes
        # A transfer has ended when it has ended on every rank, and each rank moves its share of a block.
        report.stored, report.loaded = (
            round(value("transfer_bytes_total", kind) / share) * self._ranks for kind in ("store", "load")
        )
        report.failed = sum(
            int(value("transfers_total", kind, "failed")) for kind in ("store", "load", "disk-write", "disk-read")
        )
        report.from_device, report.from_host, report.from_disk = (
            int(value("cached_tokens_total", tier)) for tier in ("device", "host", "disk")
        )
        report.accepted = int(value("accepted_tokens_total", parts.proposer))
        report.preemptions = parts.scheduler.num_preemptions
