"""The engine's interface for other threads: they submit requests, receive new tokens through sinks (callbacks), and
make control calls.

One thread, the engine thread, runs the loop (loop.py) and owns scheduler, executor and transfers. Other threads send it
messages through the inbox.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from sidestream.config import SamplingParams
from sidestream.engine.adapters import LoadedAdapters
from sidestream.engine.explain import explain_last
from sidestream.engine.failures import Failures
from sidestream.engine.inbox import ServingState
from sidestream.engine.kv_events import OnBatch
from sidestream.engine.loop import StepLoop
from sidestream.engine.operations import Operations
from sidestream.engine.output_stream import Handle, OutputStream, OutputStreams, Sink, TokenColumns
from sidestream.engine.parts import Parts
from sidestream.engine.prefixes import Prefixes
from sidestream.engine.stats import CacheHistory
from sidestream.errors import CallTimeout, ConfigError, DeviceLost, EngineStopped
from sidestream.grammar import TokenGrammar, grammar_of
from sidestream.schedule.limits import CheckedRequest, RequestChecker
from sidestream.schedule.request import Request
from sidestream.types import CacheExplanation, Flushed, Health
from sidestream_kv.metrics import Recent
from sidestream_kv.types import Key

_PAUSED = "paused: new requests wait until resume"


class Engine:
    """Serves one model. All methods except `step` may be called from any thread except the engine thread.

    threaded  False: there is no engine thread. One thread must make all calls, and the engine works only during calls
              of `step` and of methods that block
    """

    def __init__(self, parts: Parts, *, threaded: bool = True) -> None:
        self.parts = parts
        self.checker = RequestChecker(parts.bounds, self._keys_of)
        self.serving = ServingState(parts.bounds.max_unfinished)
        self.history = CacheHistory.of_parts(parts)
        self.streams = OutputStreams(parts, self.serving, on_end=self._ended)
        self._failures = Failures(parts, self.serving, self.streams)
        self.loop = StepLoop(parts, streams=self.streams, failures=self._failures)
        self.adapters = LoadedAdapters(parts, keys_of=self._keys_of, call=self.call, wait_a_turn=self._wait_a_turn)
        self.operations = Operations(
            parts,
            adapters=self.adapters,
            serving=self.serving,
            cancel=self.streams.cancel,
            replace=self.update_weights,
            on_reset=self.history.reset,
            call=self.call,
            wait_a_turn=self._wait_a_turn,
            is_alive=lambda: self._alive,
        )
        self.prefixes = Prefixes(
            parts, self.history, call=self.call, store_again=self.loop.store_again, is_alive=lambda: self._alive
        )
        self._ids = itertools.count()
        self._closing = threading.Lock()  # one close at a time; guards _closed
        self._closed = False
        self._thread: threading.Thread | None = None
        if threaded:
            if parts.kv_events is not None:
                parts.kv_events.start()
            self._thread = threading.Thread(target=self.loop.run, name="sidestream-engine", daemon=True)
            self._thread.start()

    # ------------------------------------------------------------------ requests

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        sink: Sink,
        *,
        priority: int = 0,
        cache_salt: str = "",
        name: str = "",
        columns: TokenColumns | None = None,
    ) -> Handle:
        """Queue one request of `params.n` samples. The engine thread calls `sink` with each delta (the new tokens of a
        sample).

        The engine knows only tokens: deltas have no text, and `params.stop` is not applied; see
        `sidestream.client.front_end.OutputProcessor`.

        cache_salt  requests share KV, in all tiers, only if they have the same salt; it may be empty
        name        for `Operations.cancel`
        columns     see `enqueue`

        Raises RequestRejected, ContextTooLong, QueueFull or EngineStopped before it takes any resource.
        """
        checked = self.checker.check(
            prompt, params, seed=secrets.randbits(63), priority=priority, cache_salt=cache_salt
        )
        return self.enqueue(checked, sink, name=name, columns=columns)

    def enqueue(
        self, request: CheckedRequest, sink: Sink, *, name: str = "", columns: TokenColumns | None = None
    ) -> Handle:
        """Queue a request that this engine or a front end has checked. Compiles its grammar, if it has one, on this
        thread. Raises QueueFull or EngineStopped, and RequestRejected for a grammar.

        columns  where single tokens go; None: to `sink`
        """
        parts, num_samples, arrival_s = self.parts, request.params.n, self.parts.device.now()
        grammar = grammar_of(request.params, parts.grammars) if request.params.masked else None
        if request.params.adapter:
            request = self.adapters.admit(request)
        try:
            with self.serving.lock:  # so that ids are in order of arrival
                self.serving.check_room(num_samples)
                streams = [
                    OutputStream(
                        _sample(parts, next(self._ids), index, request, grammar, name),
                        index=index,
                        sink=sink,
                        arrival_s=arrival_s,
                        columns=columns,
                    )
                    for index in range(num_samples)
                ]
                self.serving.accept(num_samples)
                parts.inbox.put(lambda: self.streams.start(streams), anytime=True)
        except BaseException:
            if request.adapter:
                self.adapters.ended(request.adapter, num_samples)
            raise
        return Handle(tuple(stream.request.id for stream in streams))

    def check(self, prompt: Sequence[int], params: SamplingParams, *, cache_salt: str = "") -> None:
        """Raise the error that `submit` would raise for this prompt and these params, without submitting."""
        self.checker.check(prompt, params, cache_salt=cache_salt)
        grammar_of(params, self.parts.grammars)

    def abort(self, handle: Handle, reason: str = "abort") -> None:
        """End the samples that have not finished. Returns at once. Has no effect on finished samples.

        `reason` is the samples' label in metrics and the finish reason of their last delta, for example `"stop"` if a
        front end found a stop string in the text.
        """
        self.parts.inbox.put(lambda: self.streams.abort(handle, reason), anytime=True)

    def on_outputs(self, deliver: Callable[[], None]) -> None:
        """Register `deliver`. The engine thread calls it after it has called sinks: after the commit of each step, and
        after other ends of requests.
        """
        self.streams.on_outputs(deliver)

    def _keys_of(self, tokens: npt.NDArray[np.int64], cache_salt: str) -> tuple[list[Key], int]:
        """Keys (block hashes) of a prompt's complete blocks, and the version of the keys, which changes with the
        weights. Runs on the submitting thread, because hashing a long prompt takes milliseconds.
        """
        # The version is read before the keys are computed: old keys with a new version would never be recomputed.
        version = self.parts.scheduler.keys_version
        # rule: keys-are-computed-with-the-requests-salt
        return self.parts.scheduler.keys_of(tokens, salt=cache_salt), version

    def _ended(self, stream: OutputStream, now_s: float) -> None:
        self.history.ended(stream, now_s)
        if slot := stream.request.sampling.adapter:
            self.adapters.ended(slot)
        if stream.request.cache is not None:
            self.prefixes.ended(stream, now_s)

    def on_kv_events(self, on_batch: OnBatch) -> None:
        """Call `on_batch` for every batch of KV events from now on. Raises ConfigError if KV events are off."""
        if self.parts.kv_events is None:
            raise ConfigError("the engine makes no KV events: give it kv_events=KVEventsConfig()")
        self.parts.kv_events.subscribe(on_batch)

    # ------------------------------------------------------------------ state

    def health(self) -> Health:
        """Whether the engine serves, or hangs. If it serves while a tier fails, the detail says why. Never blocks."""
        health, transfers = self.loop.watchdog.judge(self.serving.health), self.parts.transfers
        if health.status != "ok":
            return health
        paused, faults = self.serving.paused, [] if transfers is None else transfers.tier_faults
        return Health("ok", "; ".join([*faults, *([_PAUSED] if paused else [])]), paused)

    def recent_spans(self, since: int) -> Recent:
        """The newest spans of the timeline; see `Timeline.read`. Any thread may call it."""
        return Recent(0, 0) if self.parts.timeline is None else self.parts.timeline.read(since)

    @property
    def unfinished(self) -> int:
        """Number of samples that were submitted and have not ended."""
        return self.serving.unfinished

    @property
    def num_steps(self) -> int:
        """Steps launched so far."""
        return self.loop.num_steps

    @property
    def running_thread(self) -> threading.Thread | None:
        """The engine thread; None: it has ended, or the engine has none."""
        return self._thread if self._thread is not None and self._thread.is_alive() else None

    def explain_cache(self, name: str) -> CacheExplanation | None:
        """Why tokens of the last request with this name were computed or reused. None: it is not remembered. Takes
        milliseconds, on the calling thread.
        """
        limits, now_s = self.parts.scheduler.limits, self.parts.device.now()
        return explain_last(name, self.streams, self.history, limits, now_s=now_s)

    # ------------------------------------------------------------------ control

    def call(self, work: Callable[[], None], *, timeout_s: float | None = None) -> None:
        """Run `work` on the engine thread between two steps, and wait for it. A sink must not call this. Raises
        EngineStopped if the engine has ended, and CallTimeout after `timeout_s`; then `work` may still run.
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

        until_s = None if timeout_s is None else self.parts.device.now() + timeout_s
        self.parts.inbox.put(run)
        while not done.wait(0.05):
            if not self._alive and not done.is_set():
                raise EngineStopped("the engine has stopped")
            if until_s is not None and self.parts.device.now() >= until_s:
                raise CallTimeout(f"the engine thread did not get to this within {timeout_s:g} s: it is in a long step")
        if failures:
            raise failures[0]

    def flush(self, *, timeout_s: float) -> Flushed:
        """See `Operations.flush`."""
        return self.operations.flush(timeout_s=timeout_s)

    def reset_prefix_cache(self, tier: str | None = None, *, timeout_s: float = 60.0) -> dict[str, int]:
        """See `Operations.reset_prefix_cache`."""
        return self.operations.reset_prefix_cache(tier, timeout_s=timeout_s)

    def update_weights(self, apply: Callable[[], None], *, fingerprint: str) -> threading.Event:
        """Let `apply` replace the model's weights as soon as no request uses them. Returns at once, with an event that
        is set when the weights were replaced.

        Requests that have begun end with the old weights; others wait for the new ones, which `fingerprint` identifies.
        Afterwards, no old block is reachable in any tier (hazards H8, H14). `apply` runs on the engine thread; if it
        raises, the engine fails. Raises ConfigError if several ranks share the model.
        """
        if (ranks := self.parts.ranks) is not None:
            raise ConfigError(f"weights cannot be replaced while {ranks.size} ranks share them: start a new engine")
        done = threading.Event()
        self.parts.inbox.put(lambda: self.loop.weights.announce(apply, fingerprint, done), anytime=True)
        return done

    def step(self) -> bool:
        """Run one turn of the loop, for an engine without a thread. False if there was nothing to do."""
        return self.loop.step()

    # ------------------------------------------------------------------ the end

    def close(self, *, drain_s: float = 0.0, flush_s: float = 30.0) -> None:
        """Refuse new requests, let running requests continue for `drain_s`, abort the others, store complete blocks,
        and end all threads.

        Writes to disk may take `flush_s`; writes that have not begun by then are dropped, so a slow disk does not block
        the close for long. Blocks the caller. Idempotent.
        """
        parts = self.parts
        self.serving.drain()
        deadline_s = parts.device.now() + drain_s
        while self.unfinished and self._alive and parts.device.now() < deadline_s:
            self._wait_a_turn(0.005)
        with self._closing, self._failures.surviving_device_loss(), contextlib.ExitStack() as ends:
            if self._closed:
                return
            self._closed = True
            # The stack calls its callbacks from the last to the first, even if one raises. So the order is: end the
            # engine thread, store complete blocks, end the streams, close the disk after its last write, delete the
            # captured graphs, publish the last KV events.
            transfers = parts.transfers
            if parts.kv_events is not None:
                ends.callback(parts.kv_events.close)
            ends.callback(parts.executor.close)
            if transfers is not None:  # rule: streams-end-before-the-disk-is-unlocked
                ends.callback(transfers.close)
            ends.callback(parts.device.close)
            if transfers is not None:  # rule: transfers-end-before-their-streams
                ends.callback(transfers.flush, timeout_s=flush_s)
            ends.callback(self._end_loop)  # rule: loop-ends-before-the-transfers

    def abandon(self, error: BaseException) -> None:
        """End all requests with `error`, because `close` hangs on another thread. If the engine goes on after all, that
        call of `close` ends it.
        """
        self._failures.end_engine(error)

    def _end_loop(self) -> None:
        if self._thread is None:
            try:
                self.loop.drain()
            except DeviceLost as error:  # any other error leaves the ranks able to end, and the caller gets it
                self.loop.fail(error)  # rule: error-of-the-last-step-ends-the-engine
                raise
            return
        self.parts.inbox.put(self.loop.stop, anytime=True)
        self._thread.join()

    @property
    def _alive(self) -> bool:
        return self._thread is None or self._thread.is_alive()

    def _wait_a_turn(self, seconds: float) -> None:
        """Let the engine work while the caller waits: run one step if the engine has no thread, else sleep."""
        if self._thread is not None or not self.step():
            self.parts.device.sleep(seconds)


def _sample(
    parts: Parts, number: int, index: int, checked: CheckedRequest, grammar: TokenGrammar | None, name: str
) -> Request:
    """One sample of a request."""
    params = checked.params
    sampling = params.spec(seed=checked.seed + index, eos_ids=parts.eos_ids, defaults=parts.defaults)
    return Request(
        id=number,
        prompt=checked.prompt,
        keys=list(checked.keys),
        keys_version=checked.keys_version,
        grammar=None if grammar is None else grammar.copy(),
        name=name,
        cache_salt=checked.cache_salt,
        cache=params.cache,
        sampling=replace(sampling, adapter=checked.adapter) if checked.adapter else sampling,
        max_outputs=checked.max_outputs,
        stop_ids=frozenset(params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *parts.eos_ids)),
        min_tokens=params.min_tokens,
        priority=checked.priority,
        max_drafts=parts.max_drafts if params.max_drafts is None else min(params.max_drafts, parts.max_drafts),
    )
