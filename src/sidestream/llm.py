"""`LLM`, the Python interface for scripts. The engine runs in this process. For asyncio programs, see
`sidestream.async_llm`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from sidestream.client.beam_search import BeamSearch, BeamSequence
from sidestream.client.front_end import (
    OutputProcessor,
    Prompt,
    as_list,
    checked_params,
    ids_of,
    params_of_each,
    tokens_with_text,
    with_token_ids,
)
from sidestream.config import EngineConfig, SamplingParams
from sidestream.engine import Engine, Handle, TokenColumns
from sidestream.engine.adapters import LoadedAdapters
from sidestream.engine.kv_events import OnBatch
from sidestream.engine.loading import LoadedEngine, OnStage, chosen_config, shown_start
from sidestream.errors import EngineStopped, QueueFull, RequestError
from sidestream.models.catalog import Progress
from sidestream.models.directory import name_of
from sidestream.tokenizer import Tokenizer
from sidestream.types import CachedPrefix, CachedTokens, Delta, Flushed, Health, PrefixQuery, TokenLogprob
from sidestream_kv.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sample. `finish_reason`: `"stop"` or `"length"`."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of one prompt.

    cached   number of prompt tokens whose KV came from a cache, by tier (device, host memory, disk)
    ttft_s   seconds from submission to the first token
    prompt_logprobs  with `SamplingParams.prompt_logprobs`, an entry for each token of the prompt; the first has none
    """

    prompt_tokens: int
    completions: tuple[Completion, ...]
    cached: CachedTokens
    ttft_s: float
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first sample."""
        return self.completions[0].token_ids


class LLM:
    """A model for scripts; every method blocks until its result is complete. A context manager.

    >>> with LLM("smollm2-135m-instruct", offload=OffloadConfig(host="1GiB", disk="kv")) as llm:
    ...     print(llm.generate("The whale", SamplingParams(max_tokens=16))[0].text)
    """

    def __init__(
        self,
        model: str | Path,
        *,
        config: EngineConfig | None = None,
        timeline: str | Path | None = None,
        check_order: bool = False,
        progress: Progress | None = None,
        on_stage: OnStage | None = None,
        **options: Any,
    ) -> None:
        """Load `model` (a directory, a hub id or a name of `sidestream models`) and start its engine; blocks until it
        serves.

        options       fields of EngineConfig, such as `kv_memory="2GiB"` or `offload=OffloadConfig(...)`; not allowed
                      together with `config`
        timeline      trace file that `close` writes: the work of each stream over time, for ui.perfetto.dev
        check_order   for debugging: check with vector clocks that no memory is read or reused too early
                      (`sidestream_order.checker`). `close` raises RaceError if the check found such an access. A step
                      takes up to twice as long
        progress      receives the progress of downloads
        on_stage      called as `on_stage(stage, done, total)` in each stage of the start; `total` is 0 if the progress
                      is unknown. None: a start of over two seconds prints a line every two seconds, to the log
                      `sidestream`, or to standard error if the program has not set up logging

        Raises ConfigError; its subclass ModelError if the model cannot be read or served.
        """
        self.config = chosen_config(config, options)
        self._closed = False
        with shown_start(model, progress, on_stage) as (progress, on_stage):
            self._loaded = LoadedEngine(
                model, self.config, timeline=timeline, check_order=check_order, progress=progress, on_stage=on_stage
            )
        self.model_name = name_of(model)
        self.engine = self._loaded.engine
        self.tokenizer = self._loaded.tokenizer
        self.sampling_defaults = self._loaded.sampling_defaults
        self.max_model_len = self.engine.parts.bounds.longest

    @property
    def metrics(self) -> Metrics:
        """The engine's metrics."""
        return self.engine.parts.metrics

    def health(self) -> Health:
        """Whether the engine serves. Never blocks."""
        return self.engine.health()

    def reset_prefix_cache(self, tier: str | None = None, *, timeout_s: float = 60.0) -> dict[str, int]:
        """Drop the prefix cache of a tier (`device`, `host`, `disk`), or of all tiers: later requests reuse no KV that
        it holds now. Running requests continue. Returns the number of dropped blocks by tier.

        Raises RequestRejected for a tier that the engine does not have, EngineStopped, and CallTimeout after
        `timeout_s`; then the reset is still under way.
        """
        self._check_open()
        return self.engine.reset_prefix_cache(tier, timeout_s=timeout_s)

    def pin_prefix(self, prompt: Prompt, *, ttl_s: float, cache_salt: str = "") -> CachedPrefix:
        """Let the tiers evict the KV of a prefix last, for `ttl_s` seconds: the leading whole blocks of the prompt that
        are cached now, in host memory and the persistent tiers, or on the device if the engine has no others. Pins hold
        at most half of a tier's blocks, and a pin ends early if requests and transfers use all other blocks. A new pin
        of the same prefix replaces the earlier one.

        Raises RequestRejected if nothing of the prompt is cached, and if the pins would hold too many blocks. Also
        raises EngineStopped and CallTimeout, as do the other operations on prefixes.
        """
        query = PrefixQuery.of(ids_of(prompt, self.tokenizer), cache_salt, ttl_s=ttl_s)
        return (self._on_prefix("pin_prefix", query))[0]

    def unpin_prefix(self, prompt: Prompt = "", *, name: str = "", cache_salt: str = "") -> int:
        """End the pin of the prompt, or the one with this name (`CachedPrefix.name`). Returns the number of pins."""
        query = PrefixQuery(name=name) if name else PrefixQuery.of(ids_of(prompt, self.tokenizer), cache_salt)
        return len(self._on_prefix("unpin_prefix", query))

    def prefetch_prefix(self, prompt: Prompt, *, cache_salt: str = "") -> CachedPrefix:
        """Begin to read the KV of a prefix from the persistent tiers into host memory, as much as half of it holds, so
        that the next request with this prefix need not wait for them. Returns at once: what is cached, by tier.
        """
        query = PrefixQuery.of(ids_of(prompt, self.tokenizer), cache_salt)
        return (self._on_prefix("prefetch_prefix", query))[0]

    def cached_prefixes(self, *, limit: int = 20) -> Sequence[CachedPrefix]:
        """The pinned prefixes, and those with which at least two of the remembered requests began, the most used ones
        first; of both, at most `limit`.
        """
        return self._on_prefix("cached_prefixes", PrefixQuery(limit=limit))

    def drop_prefix(self, prompt: Prompt, *, tier: str | None = None, cache_salt: str = "") -> dict[str, int]:
        """Drop the KV of the prompt's whole blocks from a tier, or from all tiers, and end the pins there that hold
        some of it. Longer prompts cannot reuse what comes behind it until it is computed again. Running requests
        continue. Returns the number of dropped blocks by tier. Raises RequestRejected for an unknown tier.
        """
        query = PrefixQuery.of(ids_of(prompt, self.tokenizer), cache_salt, tier=tier)
        return (self._on_prefix("drop_prefix", query))[0].tiers

    def _on_prefix(self, operation: str, query: PrefixQuery) -> Sequence[CachedPrefix]:
        self._check_open()
        return self.engine.prefixes.run(operation, query, timeout_s=60.0)

    def update_weights(self, path: str, *, timeout_s: float = 600.0) -> None:
        """Replace the weights by those of a checkpoint of the same architecture. Parameters and errors are those of
        `AsyncLLM.update_weights`.
        """
        self._check_open()
        self.engine.operations.update_weights(path, timeout_s=timeout_s)

    @property
    def adapters(self) -> LoadedAdapters:
        """The engine's LoRA adapters: `load` them, and name one in `SamplingParams.adapter`."""
        return self.engine.adapters

    def pause(self) -> None:
        """Start no request that has not begun, until another thread calls `resume`: calls of `generate` wait, too.
        Idempotent. Raises EngineStopped and CallTimeout.
        """
        self._check_open()
        self.engine.operations.pause()

    def resume(self) -> None:
        """End a `pause`. Idempotent. Raises EngineStopped and CallTimeout."""
        self._check_open()
        self.engine.operations.resume()

    def on_kv_events(self, callback: OnBatch) -> None:
        """From now on, call `callback(sequence, batch)` for every batch of KV events (docs/kv-events.md), on a separate
        thread. A callback that raises is not called again.

        Raises ConfigError if the engine was started without `kv_events=KVEventsConfig()`.
        """
        self._check_open()
        self.engine.on_kv_events(callback)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        continues: bool = True,
    ) -> list[RequestOutput]:
        """Continue one prompt, or several prompts in one batch. The results have the prompts' order.

        params       one object for all prompts, or a list with one object for each prompt
        cache_salt   only requests with the same salt share KV, in all tiers
        continues    the outputs continue the prompts' texts. False: each begins a text, as the answer in a chat does;
                     some tokenizers omit the space in front of a text's first word

        Raises RequestError for the first invalid prompt, before any prompt is started.
        """
        self._check_open()
        many = as_list(prompts)
        each = params_of_each(params, len(many))
        encoded = [ids_of(prompt, self.tokenizer, f"prompts[{index}]") for index, prompt in enumerate(many)]
        kept = [list(one.kept(ids, self.max_model_len)) for ids, one in zip(encoded, each, strict=True)]
        requests = [(ids, with_token_ids(one, self.tokenizer, ids)) for ids, one in zip(kept, each, strict=True)]
        for ids, chosen in requests:
            self.engine.check(ids, chosen, cache_salt=cache_salt)
        batch = _Batch(self.engine, self.tokenizer, cache_salt, continues)
        try:
            outputs: list[RequestOutput] = []
            for ids, chosen in requests:
                while not batch.submit(ids, chosen):
                    outputs.append(batch.next())
            while batch.pending:
                outputs.append(batch.next())
            return outputs
        except BaseException:
            batch.abort()
            raise

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        **layout: Any,
    ) -> RequestOutput:
        """Answer a conversation. Each message has a `role` and a `content`; the model's chat template formats them.

        layout   `add_generation_prompt` (True: the prompt ends with the start of an answer), `continue_final_message`
                 (False; True: the model writes on the last message), `tools`, and variables of the template, such as
                 `enable_thinking`
        """
        self._check_open()
        prompt, continues = self.tokenizer.chat(messages, **layout), bool(layout.get("continue_final_message"))
        return self.generate([prompt], checked_params(params), cache_salt=cache_salt, continues=continues)[0]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        beam_width: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        ignore_eos: bool = False,
        cache_salt: str = "",
    ) -> list[list[BeamSequence]]:
        """The `beam_width` likeliest answers to each prompt, the best first, by the rules of `BeamSearch`. Every token
        takes a request for each beam, which find their beginning in the prefix cache.

        beam_width       1 to 10, less if the model has several end-of-sequence ids
        length_penalty   an answer's score is its log-probability, divided by its length to the power of this

        Raises RequestError for the first invalid prompt, before any prompt is started.
        """
        self._check_open()
        params, searches = SamplingParams(max_tokens=max_tokens), list[BeamSearch]()
        for index, prompt in enumerate(as_list(prompts)):
            ids = ids_of(prompt, self.tokenizer, f"prompts[{index}]")
            self.engine.check(ids, params, cache_salt=cache_salt)
            room = min(max_tokens, self.max_model_len - len(ids))
            end_ids = () if ignore_eos else self.tokenizer.eos_ids
            searches.append(
                BeamSearch(ids, width=beam_width, max_tokens=room, length_penalty=length_penalty, end_ids=end_ids)
            )
        while running := [(search, search.prompts) for search in searches if search.prompts]:
            asked = [(prompt, search.params) for search, beams in running for prompt in beams]
            prompts, each = [prompt for prompt, _ in asked], [params for _, params in asked]
            outputs = iter(self.generate(prompts, each, cache_salt=cache_salt))
            for search, beams in running:
                search.advance([next(outputs).completions[0].logprobs[0] for _ in beams])
        return [search.answers(self.tokenizer, after=search.prompt) for search in searches]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        continues: bool = True,
    ) -> Generator[Delta, None, None]:
        """Yield the output of one prompt's samples as it is generated. Leaving the loop aborts the request. Parameters
        and errors are those of `generate`.
        """
        self._check_open()
        chosen = checked_params(params)
        ids = list(chosen.kept(ids_of(prompt, self.tokenizer), self.max_model_len))
        chosen = with_token_ids(chosen, self.tokenizer, ids)
        processor = OutputProcessor(self.tokenizer, chosen, after=ids if continues else ())
        request = _StreamedRequest(self.engine, processor, ids, chosen, cache_salt)
        try:
            yield from request.deltas()
        finally:
            self.engine.abort(request.handle)

    def flush(self, *, timeout_s: float = 60.0) -> Flushed:
        """Block until the tiers (host memory, disk) hold all complete blocks. After `timeout_s`, the result is false
        and says what is left. Raises CallTimeout if the engine hangs.
        """
        self._check_open()
        return self.engine.flush(timeout_s=timeout_s)

    def close(self, *, drain_s: float = 0.0) -> None:
        """Wait up to `drain_s` seconds for running requests and abort the others. Then store all complete blocks and
        end the engine, which frees the weights' memory and, on a GPU, that of KV on device and host. Idempotent.

        Raises ProcessFailed if the engine has not closed 60 s after `drain_s`, because it hangs.
        """
        self._closed = True
        self._loaded.close(drain_s=drain_s)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStopped("this LLM is closed: make a new one")


class _StreamedRequest:
    """One submitted prompt of `LLM.stream`. The caller's thread reads its deltas one by one."""

    def __init__(
        self, engine: Engine, processor: OutputProcessor, prompt: list[int], params: SamplingParams, cache_salt: str
    ) -> None:
        self._engine = engine
        self._processor = processor
        self._outputs: SimpleQueue[Delta] = SimpleQueue()
        self._num_samples = params.n
        self.handle: Handle = engine.submit(prompt, params, self._outputs.put, cache_salt=cache_salt)

    def deltas(self) -> Iterator[Delta]:
        """Yield the deltas with their text. Ends when all samples have ended in the engine."""
        left = self._num_samples
        while left:
            raw = self._outputs.get()
            left -= raw.finish_reason is not None
            delta = self._processor.read(raw)
            if delta is None:
                continue
            _abort_if_text_ended(self._engine, self.handle, raw, delta)
            _raise_if_failed(delta)
            yield delta


@dataclass(slots=True)
class _Sample:
    """One sample's output so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    has_stop_token: bool = False  # the last token ended the sample, and has no text


class _Batch:
    """The prompts of one call of `LLM.generate`, in the caller's order."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, cache_salt: str, continues: bool) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._cache_salt = cache_salt
        self._continues = continues
        self._outputs: _Outputs = SimpleQueue()
        self.pending = deque[_CollectedRequest]()

    def submit(self, prompt: list[int], params: SamplingParams) -> bool:
        """Submit one more prompt. False: the engine's queue is full. Then take a result with `next`, and try again.

        Raises the errors of `Engine.submit`, but QueueFull only if no prompt is pending.
        """
        while not self._outputs.empty():
            # With many prompts, the first ones may reach their stop strings before the last prompt is submitted.
            self._read()
        try:
            self.pending.append(
                _CollectedRequest(
                    self._engine,
                    self._tokenizer,
                    prompt,
                    params,
                    cache_salt=self._cache_salt,
                    after=prompt if self._continues else (),
                    outputs=self._outputs,
                )
            )
        except QueueFull:
            if not self.pending:
                raise
            return False
        return True

    def next(self) -> RequestOutput:
        """Wait for the first pending prompt's result. Meanwhile, process the other prompts' deltas and stop strings."""
        while not self.pending[0].ended:
            self._read()
        output = self.pending[0].output()
        self.pending.popleft()
        return output

    def abort(self) -> None:
        """Abort all pending prompts."""
        for request in self.pending:
            self._engine.abort(request.handle)

    def _read(self) -> None:
        request, delta = self._outputs.get()
        if delta is not None:
            request.read(delta)


class _CollectedRequest:
    """One submitted prompt of `LLM.generate`, whose result is returned at its end.

    Without stop strings, the engine thread appends the tokens to a list, and queues one message for the caller's thread
    at the end. One message per token would slow the engine thread, because of the garbage collector and the reading
    thread.
    With stop strings, the caller's thread reads each delta, because only the text shows where the sample ends.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        prompt: list[int],
        params: SamplingParams,
        *,
        cache_salt: str,
        after: Sequence[int],
        outputs: _Outputs,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._params = params
        self._after = after
        self._processor = OutputProcessor(tokenizer, params, after) if params.stop else None
        self._outputs = outputs
        self._samples = [_Sample() for _ in range(params.n)]
        self._left = params.n
        self._first: Delta | None = None
        self._failed: Delta | None = None
        self._started_s = time.monotonic()
        self._ttft_s: float | None = None
        columns = TokenColumns([], self._samples[0].token_ids) if params.n == 1 and not params.stop else None
        self.handle: Handle = engine.submit(prompt, params, self._on_delta, cache_salt=cache_salt, columns=columns)

    def _on_delta(self, delta: Delta) -> None:
        """Called by the engine, on its thread, for each delta."""
        if self._first is None:
            self._first = delta
        if self._ttft_s is None and delta.token_ids:
            self._ttft_s = time.monotonic() - self._started_s
        if self._processor is not None:
            self._outputs.put((self, delta))
            return
        self._add(delta)
        if delta.finish_reason is not None:
            self._left -= 1
            if self.ended:
                self._outputs.put((self, None))

    def read(self, raw: Delta) -> None:
        """Process one delta of a request with stop strings, on the caller's thread."""
        assert self._processor is not None
        delta = self._processor.read(raw)
        if delta is not None:
            _abort_if_text_ended(self._engine, self.handle, raw, delta)
            self._add(delta)
        self._left -= raw.finish_reason is not None

    @property
    def ended(self) -> bool:
        """Whether all samples have ended in the engine, or one has failed."""
        return not self._left or self._failed is not None

    def _add(self, delta: Delta) -> None:
        sample = self._samples[delta.index]
        sample.token_ids += delta.token_ids
        if delta.logprobs:
            sample.logprobs += delta.logprobs
        if delta.text:
            sample.text += delta.text
        if delta.finish_reason is not None:
            sample.finish_reason = delta.finish_reason
            sample.has_stop_token = delta.finish_reason == "stop" and bool(delta.token_ids)
            if delta.finish_reason in ("error", "abort"):
                self._failed = self._failed or delta

    def output(self) -> RequestOutput:
        """The result of an ended request. Without stop strings, all tokens are decoded here."""
        if self._failed is not None:
            _raise_if_failed(self._failed)
        first = self._first
        assert first is not None
        completions = tuple(
            Completion(
                index,
                self._text(sample) if self._processor is None else sample.text,
                tuple(sample.token_ids),
                tuple(sample.logprobs),
                sample.finish_reason,
            )
            for index, sample in enumerate(self._samples)
        )
        prompt_logprobs = () if self._params.prompt_logprobs is None else (None, *first.prompt_logprobs)
        return RequestOutput(first.prompt_tokens, completions, first.cached, self._ttft_s or 0.0, prompt_logprobs)

    def _text(self, sample: _Sample) -> str:
        ending = "stop" if sample.has_stop_token else None
        token_ids = tokens_with_text(tuple(sample.token_ids), ending, include_stop=self._params.include_stop)
        shown = () if self._params.skip_special_tokens else None
        try:
            return self._tokenizer.detokenizer(self._after, shown).decode(token_ids)
        except Exception as error:  # a tokenizer is third-party code
            raise RequestError(f"the tokenizer failed: {error}") from error


_Outputs = SimpleQueue[tuple[_CollectedRequest, Delta | None]]
"""Queue from the engine thread to the caller's thread. A request with stop strings puts each of its deltas; a request
without stop strings puts None once, when it has ended.
"""


def _abort_if_text_ended(engine: Engine, handle: Handle, raw: Delta, processed: Delta) -> None:
    """Abort a sample that the engine still runs although its text has ended: at a stop string, or because the tokenizer
    failed.
    """
    if raw.finish_reason is None and processed.finish_reason is not None:
        engine.abort(handle.sample(processed.index), reason=processed.finish_reason)


def _raise_if_failed(delta: Delta) -> None:
    if delta.finish_reason == "error":
        raise RequestError(delta.error or "the request failed")
    if delta.finish_reason == "abort":
        raise EngineStopped("the request was aborted: the engine is closing")
