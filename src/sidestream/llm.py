"""The Python interface for scripts: a model with its engine in this process. For event loops:
`sidestream.async_llm`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from sidestream.client.output import OutputProcessor, shown_tokens
from sidestream.config import EngineConfig, SamplingParams
from sidestream.engine import Engine, Handle
from sidestream.errors import EngineStopped, QueueFull, RequestError
from sidestream.loading import LoadedEngine, Tell, name_of
from sidestream.metrics import Metrics
from sidestream.models.catalog import Progress
from sidestream.prompts import Prompt, as_list, checked_params, ids_of, params_of_each
from sidestream.tokenizer import Tokenizer
from sidestream.types import CachedTokens, Delta, Health, TokenLogprob


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample: its text and tokens, and why it ended (`"stop"` or `"length"`)."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one prompt yielded.

    cached   prompt tokens that were not computed again, by the tier they came from
    ttft_s   seconds from submission to the first token
    """

    prompt_tokens: int
    completions: tuple[Completion, ...]
    cached: CachedTokens
    ttft_s: float

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first sample."""
        return self.completions[0].token_ids


class LLM:
    """A model for scripts; every method blocks until its answer is there. A context manager.

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
        tell: Tell = lambda what, done, total: None,
        **options: Any,
    ) -> None:
        """Load `model` (a directory, a hub id or a name of `sidestream models`) and start an engine on a thread of this
        process.

        options    fields of EngineConfig, such as `kv_memory="2GiB"` or `offload=OffloadConfig(...)`; not together with
                   `config`
        tell       is told what the start is at, in words, and how much of that is done, of how much (0 of 0: unknown):
                   on a GPU it takes up to a minute
        timeline   file that `close` writes: what each stream did when, for ui.perfetto.dev
        check_order   judge with vector clocks that nothing is read or reused too early (`sidestream.testing.checker`);
                      `close` raises RaceError if anything was. For finding bugs: a step takes up to twice as long

        Raises ConfigError (ModelError for the model's part).
        """
        if config is not None and options:
            raise TypeError(f"give either config or options ({', '.join(options)}), not both")
        self.config = config or EngineConfig(**options)
        self._closed = False
        self._loaded = LoadedEngine(
            model, self.config, timeline=timeline, check_order=check_order, progress=progress, tell=tell
        )
        self.model_name = name_of(model)
        self.engine = self._loaded.engine
        self.tokenizer = self._loaded.tokenizer
        self.sampling_defaults = self._loaded.sampling_defaults
        self.max_model_len = self.engine.parts.bounds.longest

    @property
    def metrics(self) -> Metrics:
        """Counters of everything that happened."""
        return self.engine.parts.metrics

    def health(self) -> Health:
        """Whether the engine serves. Never blocks."""
        return self.engine.health()

    def reset_cache(self) -> None:
        """Make every stored block of every tier unreachable at once. Requests that run go on."""
        self._check_open()
        self.engine.reset_cache()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Answer one prompt or several at once, in their order; `params` for all or one for each.

        `cache_salt`: KV is shared with requests of the same salt only, in all tiers.

        As many as the engine queues are on their way at a time. Raises RequestError for the first prompt that is
        refused, before any is started.
        """
        self._check_open()
        many = as_list(prompts)
        each = params_of_each(params, len(many))
        encoded = [ids_of(prompt, self.tokenizer, f"prompts[{index}]") for index, prompt in enumerate(many)]
        asked = list(zip(encoded, each, strict=True))
        for ids, chosen in asked:
            self.engine.check(ids, chosen, cache_salt=cache_salt)
        answers = _Answers(self.engine, self.tokenizer, cache_salt)
        try:
            outputs: list[RequestOutput] = []
            for ids, chosen in asked:
                while not answers.submit(ids, chosen):
                    outputs.append(answers.next())
            while answers.pending:
                outputs.append(answers.next())
            return outputs
        except BaseException:
            answers.abort()
            raise

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> RequestOutput:
        """Answer a conversation: messages of `role` and `content`, laid out by the model's chat template."""
        self._check_open()
        return self.generate([self.tokenizer.chat(messages)], checked_params(params), cache_salt=cache_salt)[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> Generator[Delta, None, None]:
        """News of one prompt's samples as they come. Leaving the loop aborts the request."""
        self._check_open()
        streamed = _Streamed(
            self.engine, self.tokenizer, ids_of(prompt, self.tokenizer), checked_params(params), cache_salt
        )
        try:
            yield from streamed.deltas()
        finally:
            self.engine.abort(streamed.handle)

    def flush(self, *, timeout_s: float = 60.0) -> bool:
        """Block until what is complete rests in the tiers; False when `timeout_s` passed first."""
        self._check_open()
        return self.engine.flush(timeout_s=timeout_s)

    def close(self, *, drain_s: float = 0.0) -> None:
        """Abort what runs (after `drain_s` seconds), bring what is complete to the tiers, end the threads.
        Idempotent.
        """
        self._closed = True
        self._loaded.close(drain_s=drain_s)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStopped("this LLM is closed: make a new one")


class _Streamed:
    """One submitted prompt and its news, read as they come."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, prompt: list[int], params: SamplingParams, cache_salt: str
    ) -> None:
        self._engine = engine
        self._output = OutputProcessor(tokenizer, params)
        self._news: SimpleQueue[Delta] = SimpleQueue()
        self._num_samples = params.n
        self.handle: Handle = engine.submit(prompt, params, self._news.put, cache_salt=cache_salt)

    def deltas(self) -> Iterator[Delta]:
        """The news as they come, with their text. Ends when the engine holds nothing of the request any more."""
        left = self._num_samples
        while left:
            told = self._news.get()
            left -= told.finish_reason is not None
            delta = self._output.read(told)
            if delta is None:
                continue
            _end_with_text(self._engine, self.handle, told, delta)
            _raise_for(delta)
            yield delta


@dataclass(slots=True)
class _Sample:
    """The part of one sample's answer that has come."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""


class _Answers:
    """The prompts of one `LLM.generate`, whose answers are wanted whole and in their order."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, cache_salt: str) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._cache_salt = cache_salt
        self._news: _News = SimpleQueue()
        self.pending = deque[_Gathered]()

    def submit(self, prompt: list[int], params: SamplingParams) -> bool:
        """Submit one more; False if the queue is full and an answer that is pending will make room. Raises what
        `Engine.submit` raises.
        """
        while not self._news.empty():
            # a long list of prompts takes its time, and the first ones may reach their stop strings meanwhile
            self._read()
        try:
            self.pending.append(_Gathered(self._engine, self._tokenizer, prompt, params, self._cache_salt, self._news))
        except QueueFull:
            if not self.pending:
                raise
            return False
        return True

    def next(self) -> RequestOutput:
        """Wait for the first pending answer. What comes for the others is read meanwhile: each must end at its own stop
        string.
        """
        while not self.pending[0].ended:
            self._read()
        output = self.pending[0].output()
        self.pending.popleft()
        return output

    def abort(self) -> None:
        """End all that are pending."""
        for one in self.pending:
            self._engine.abort(one.handle)

    def _read(self) -> None:
        whose, delta = self._news.get()
        if delta is not None:
            whose.read(delta)


class _Gathered:
    """One submitted prompt whose answer is wanted whole.

    Without stop strings, the engine thread adds up the tokens and sends one message at the end: a thousand messages a
    second that wait to be read make the garbage collector stop the engine thread, and so does a reader that takes them
    one by one. With stop strings, its deltas are read as they come, because only the reader knows where the answer
    ends.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        prompt: list[int],
        params: SamplingParams,
        cache_salt: str,
        news: _News,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._include_stop = params.include_stop
        self._output = OutputProcessor(tokenizer, params) if params.stop else None
        self._news = news
        self._samples = [_Sample() for _ in range(params.n)]
        self._left = params.n
        self._first: Delta | None = None
        self._failed: Delta | None = None
        self._started_s = time.monotonic()
        self._ttft_s: float | None = None
        self.handle: Handle = engine.submit(prompt, params, self._take, cache_salt=cache_salt)

    def _take(self, delta: Delta) -> None:
        """The engine's sink."""
        if self._first is None:
            self._first = delta
        if self._ttft_s is None and delta.token_ids:
            self._ttft_s = time.monotonic() - self._started_s
        if self._output is not None:
            self._news.put((self, delta))
            return
        self._add(delta)
        if delta.finish_reason is not None:
            self._left -= 1
            if self.ended:
                self._news.put((self, None))

    def read(self, told: Delta) -> None:
        """Take in the next delta of a request with stop strings, on the caller's thread."""
        assert self._output is not None
        delta = self._output.read(told)
        if delta is not None:
            _end_with_text(self._engine, self.handle, told, delta)
            self._add(delta)
        self._left -= told.finish_reason is not None

    @property
    def ended(self) -> bool:
        """Whether the engine holds none of the samples any more, or one of them failed."""
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
            if delta.finish_reason in ("error", "abort"):
                self._failed = self._failed or delta

    def output(self) -> RequestOutput:
        """The answer, once it has ended; where no stop string was looked for, text is made of all tokens at once."""
        if self._failed is not None:
            _raise_for(self._failed)
        first = self._first
        assert first is not None
        completions = tuple(
            Completion(
                index,
                self._text(sample) if self._output is None else sample.text,
                tuple(sample.token_ids),
                tuple(sample.logprobs),
                sample.finish_reason,
            )
            for index, sample in enumerate(self._samples)
        )
        return RequestOutput(first.prompt_tokens, completions, first.cached, self._ttft_s or 0.0)

    def _text(self, sample: _Sample) -> str:
        shown = shown_tokens(tuple(sample.token_ids), sample.finish_reason, include_stop=self._include_stop)
        try:
            return self._tokenizer.decode(shown)
        except Exception as error:  # a tokenizer is foreign code
            raise RequestError(f"the tokenizer failed: {error}") from error


_News = SimpleQueue[tuple[_Gathered, Delta | None]]
"""Deltas of prompts with stop strings, and, without a delta, that another prompt's answer is complete."""


def _end_with_text(engine: Engine, handle: Handle, told: Delta, read: Delta) -> None:
    """End a sample in the engine if its text ended it first: with a stop string, or because the tokenizer failed."""
    if told.finish_reason is None and read.finish_reason is not None:
        engine.abort(handle.sample(read.index), reason=read.finish_reason)


def _raise_for(delta: Delta) -> None:
    """Raise what the news of a sample's bad end mean to whoever asked."""
    if delta.finish_reason == "error":
        raise RequestError(delta.error or "the request failed")
    if delta.finish_reason == "abort":
        raise EngineStopped("the request was aborted: the engine is closing")
