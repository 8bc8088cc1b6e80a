"""The Python interface: a model with its engine, for scripts (`LLM`) and for event loops (`AsyncLLM`)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import reprlib
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from sidestream.config import NEUTRAL, EngineConfig, SamplingDefaults, SamplingParams
from sidestream.device.choice import torch_device
from sidestream.engine import Engine, Handle, Reader, build_engine
from sidestream.engine.garbage import settle_garbage
from sidestream.errors import ConfigError, EngineStopped, ModelError, QueueFull, RaceError, RequestError, RequestRejected
from sidestream.metrics import Metrics, Timeline
from sidestream.models import PagedModel, load_model
from sidestream.models.catalog import Progress, resolve, shipped_head
from sidestream.models.draft import attach_draft
from sidestream.models.generation import sampling_defaults
from sidestream.models.loader import config_directory
from sidestream.models.mtp import attach_head
from sidestream.speculate import Proposer
from sidestream.speculate.draft_model import DraftModelProposer
from sidestream.speculate.mtp import MtpProposer
from sidestream.testing.checker import Checker
from sidestream.tokenizer import Tokenizer
from sidestream.types import CachedTokens, Delta, Health, TokenLogprob

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
"""A text, or token ids."""


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


class _Served:
    """A loaded model and its running engine; what both interfaces share."""

    def __init__(
        self,
        model: str | Path,
        *,
        config: EngineConfig | None = None,
        timeline: str | Path | None = None,
        check_order: bool = False,
        progress: Progress | None = None,
        tell: Callable[[str, int, int], None] = lambda what, done, total: None,
        **options: Any,
    ) -> None:
        """Load `model` (a directory, a hub id or a name of `sidestream models`) and start an engine.

        options    fields of EngineConfig, such as `kv_memory="2GiB"` or `offload=OffloadConfig(...)`; not together with `config`
        tell       is told what the start is at, in words, and how much of that is done, of how much (0 of 0: nobody knows): on a GPU it takes up to a
                   minute
        timeline   file that `close` writes: what each stream did when, for ui.perfetto.dev
        check_order   judge with vector clocks that nothing is read or reused too early (`sidestream.testing.checker`); `close` raises
                      RaceError if anything was. For finding bugs: a step takes up to twice as long

        Raises ConfigError (ModelError for the model's part).
        """
        if config is not None and options:
            raise TypeError(f"give either config or options ({', '.join(options)}), not both")
        self.config = config or EngineConfig(**options)
        self._closed = False
        self.model_name = Path(model).name if Path(model).is_dir() else str(model)
        device = torch_device(self.config.device)  # first: without a GPU that was asked for, nothing large need be read
        self.config.sizes(device.type)
        path = resolve(str(model), progress=progress)
        self.sampling_defaults = self._sampling_defaults(path)
        self._timeline = Timeline() if timeline is not None else None
        self._timeline_path = timeline
        self.tokenizer = Tokenizer.load(path)
        draft_path = self._draft_path(progress)
        tell("reading the weights", 0, 0)
        loaded = load_model(
            path,
            dtype=self.config.dtype,
            block_tokens=self.config.block_tokens,
            device=device,
            max_model_len=self.config.max_model_len,
        )
        proposer = self._proposer(loaded, path, draft_path, tell)
        self._checker = Checker() if check_order else None
        self.engine: Engine = build_engine(
            loaded,
            self.tokenizer,
            self.config,
            timeline=self._timeline,
            witness=self._checker,
            proposer=proposer,
            defaults=self.sampling_defaults,
            tell=tell,
        )
        self.max_model_len = min(self.engine.parts.bounds.max_model_len, self.engine.parts.bounds.pool_tokens)
        self._unsettle_garbage = settle_garbage()

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

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStopped(f"this {type(self).__name__} is closed: make a new one")

    def _ids(self, prompt: Prompt, where: str = "prompt") -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return _items(prompt, where, "a text or a list of token ids")

    def _sampling_defaults(self, path: str) -> SamplingDefaults:
        """Read the sampling options of requests that leave them out, and log them."""
        if self.config.generation_config == "none":
            log.info("sampling defaults: %s; generation_config.json is ignored", NEUTRAL)
            return NEUTRAL
        defaults = sampling_defaults(config_directory(path))
        from_file = "sampling defaults from generation_config.json: %s; --generation-config none ignores them"
        log.info("sampling defaults: %s" if defaults == NEUTRAL else from_file, defaults)
        return defaults

    def _draft_path(self, progress: Progress | None) -> str | None:
        """Where the draft model is, if there is one; before anything large is read, it is known to have the same tokenizer."""
        wanted = self.config.speculative
        if wanted is None or wanted.model is None:
            return None
        with _about("the draft model"):
            path = resolve(str(wanted.model), progress=progress)
            theirs = Tokenizer.load(path)
        self.tokenizer.check_equal(theirs, name=str(wanted.model))
        return path

    def _proposer(self, model: PagedModel, path: str, draft_path: str | None, tell: Callable[[str, int, int], None]) -> Proposer | None:
        """One that needs weights; None: nobody drafts, or one that the engine makes by itself."""
        wanted = self.config.speculative
        if wanted is not None and wanted.proposer == "mtp":
            with _about("the head"):
                return MtpProposer(attach_head(model, wanted.head or shipped_head(path) or path))
        if draft_path is None:
            return None
        tell("reading the draft model's weights", 0, 0)
        max_model_len = self.config.max_model_len or model.max_model_len
        with _about("the draft model"):
            draft = load_model(
                draft_path,
                dtype=model.layout.dtype,
                block_tokens=model.layout.block_tokens,
                device=torch_device(self.config.device),
                max_model_len=max_model_len,
            )
        num_layers = attach_draft(model, draft, max_model_len=max_model_len, num_tokens=self.tokenizer.vocab_size)
        return DraftModelProposer(draft, num_layers=num_layers, vocab_size=model.vocab_size)

    def _close(self, drain_s: float) -> None:
        self._closed = True
        self.engine.close(drain_s=drain_s)
        self._unsettle_garbage()
        if self._timeline is not None and self._timeline_path is not None:
            self._timeline.write(self._timeline_path)
        checker, self._checker = self._checker, None
        if checker is not None:
            if self.health().status != "failed":
                checker.check_idle()
            if checker.findings:
                raise RaceError(f"the order of {len(checker.findings)} accesses was wrong; the first: {checker.findings[0]}")


@contextlib.contextmanager
def _about(what: str) -> Iterator[None]:
    """Say in every reason what it is about; what a hub raises is a reason too."""
    try:
        yield
    except ConfigError as error:
        raise ModelError(f"{what}: {error}") from error
    except OSError as error:
        raise ModelError(f"{what}: it cannot be fetched ({str(error).strip().splitlines()[0]}); check the path or the name") from error


class LLM(_Served):
    """A model for scripts; every method blocks until its answer is there. A context manager.

    >>> with LLM("smollm2-135m-instruct", offload=OffloadConfig(host="1GiB", disk="kv")) as llm:
    ...     print(llm.generate("The whale", SamplingParams(max_tokens=16))[0].text)
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Answer one prompt or several at once, in their order; `params` for all or one for each.

        `cache_salt`: KV is shared with requests of the same salt only, in all tiers.

        As many as the engine queues are on their way at a time. Raises RequestError for the first prompt that is refused,
        before any is started.
        """
        self._check_open()
        many = _as_list(prompts)
        each = _params_of_each(params, len(many))
        encoded = [self._ids(prompt, f"prompts[{index}]") for index, prompt in enumerate(many)]
        asked = list(zip(encoded, each, strict=True))
        for ids, chosen in asked:
            self.engine.check(ids, chosen, cache_salt=cache_salt)
        outputs: list[RequestOutput] = []
        pending: deque[_Gathered] = deque()
        try:
            for ids, chosen in asked:
                while (submitted := self._submitted(ids, chosen, cache_salt, may_wait=bool(pending))) is None:
                    outputs.append(pending[0].output())
                    pending.popleft()
                pending.append(submitted)
            while pending:
                outputs.append(pending[0].output())
                pending.popleft()
            return outputs
        except BaseException:
            for one in pending:
                self.engine.abort(one.handle)
            raise

    def _submitted(self, ids: list[int], params: SamplingParams, cache_salt: str, *, may_wait: bool) -> _Gathered | None:
        """One prompt on its way; None when the queue is full and an answer of ours will make room."""
        try:
            return _Gathered(self.engine, self.tokenizer, ids, params, cache_salt)
        except QueueFull:
            if may_wait:
                return None
            raise

    def chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, *, cache_salt: str = "") -> RequestOutput:
        """Answer a conversation: messages of `role` and `content`, laid out by the model's chat template."""
        self._check_open()
        return self.generate([self.tokenizer.chat(messages)], _checked(params), cache_salt=cache_salt)[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, cache_salt: str = "") -> Generator[Delta, None, None]:
        """News of one prompt's samples as they come. Leaving the loop aborts the request."""
        self._check_open()
        streamed = _Streamed(self.engine, self.tokenizer, self._ids(prompt), _checked(params), cache_salt)
        try:
            yield from streamed.deltas()
        finally:
            self.engine.abort(streamed.handle)

    def flush(self, *, timeout_s: float = 60.0) -> bool:
        """Block until what is complete rests in the tiers; False when `timeout_s` passed first."""
        self._check_open()
        return self.engine.flush(timeout_s=timeout_s)

    def close(self, *, drain_s: float = 0.0) -> None:
        """Abort what runs (after `drain_s` seconds), bring what is complete to the tiers, end the threads. Idempotent."""
        self._close(drain_s)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Post:
    """Brings news from the engine thread to one event loop: all of a step at once, because to wake a loop takes longer than to make the news."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[asyncio.Queue[Delta], Delta]] = deque()
        self._called = False

    def put(self, queue: asyncio.Queue[Delta], delta: Delta) -> None:
        """Have `delta` put into a queue of the loop; on the engine thread. A loop that was closed hears nothing."""
        if self.loop.is_closed():
            return
        self._waiting.append((queue, delta))
        if not self._called:
            self._called = True
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._called = False  # first: who adds behind the last one that is taken here calls again
        while self._waiting:
            queue, delta = self._waiting.popleft()
            queue.put_nowait(delta)


class AsyncLLM(_Served):
    """A model for event loops; what the server serves. An asynchronous context manager.

    >>> question = [{"role": "user", "content": "Why do whales sing?"}]
    >>> async with AsyncLLM("smollm2-135m-instruct") as llm:
    ...     async for delta in llm.chat(question, SamplingParams(max_tokens=64)):
    ...         print(delta.text, end="")
    """

    _post: _Post | None = None

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_name: str = "",
        cache_salt: str = "",
    ) -> AsyncGenerator[Delta, None]:
        """News of one prompt's samples until all have ended. Closing or cancelling the generator aborts them.

        priority      lower runs earlier
        request_name  for the log
        cache_salt    KV is shared with requests of the same salt only, in all tiers

        Raises RequestError or EngineStopped before any news.
        """
        return self._answer(functools.partial(self._ids, prompt), params, priority, cache_salt, in_thread=isinstance(prompt, str))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_name: str = "",
        cache_salt: str = "",
    ) -> AsyncGenerator[Delta, None]:
        """News of a conversation's samples, as from `generate`.

        messages   each has a `role` and a `content`; the model's chat template lays them out, on a worker thread
        """
        return self._answer(functools.partial(self.tokenizer.chat, messages), params, priority, cache_salt, in_thread=True)

    async def _answer(
        self, encode: Callable[[], list[int]], params: SamplingParams | None, priority: int, cache_salt: str, *, in_thread: bool
    ) -> AsyncGenerator[Delta, None]:
        """Submit the token ids that `encode` returns, and yield the news of their samples.

        `in_thread` runs `encode` on a worker thread: tokenizing a long text takes milliseconds.
        """
        self._check_open()
        loop, chosen = asyncio.get_running_loop(), _checked(params)
        news: asyncio.Queue[Delta] = asyncio.Queue()
        post = self._post
        if post is None or post.loop is not loop:
            post = self._post = _Post(loop)
        sink = functools.partial(post.put, news)
        ids = await asyncio.to_thread(encode) if in_thread else encode()
        reader = Reader(self.tokenizer, chosen)
        handle = self.engine.submit(ids, chosen, sink, priority=priority, text=False, cache_salt=cache_salt)
        left = chosen.n
        try:
            while left:
                told = await news.get()
                delta = reader.read(told)
                if delta is None:
                    continue
                left -= delta.finish_reason is not None
                if told.finish_reason is None and delta.finish_reason is not None:  # its text cannot be made: nobody waits for the rest
                    self.engine.abort(Handle((handle.request_ids[delta.index],)))
                yield delta
        finally:
            if left:
                self.engine.abort(handle)

    async def flush(self, *, timeout_s: float = 60.0) -> bool:
        """Wait until what is complete rests in the tiers; False when `timeout_s` passed first."""
        self._check_open()
        return await asyncio.to_thread(self.engine.flush, timeout_s=timeout_s)

    async def close(self, *, drain_s: float = 0.0) -> None:
        """Abort what runs (after `drain_s` seconds), bring what is complete to the tiers, end the threads. Idempotent."""
        await asyncio.to_thread(self._close, drain_s)

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


class _Streamed:
    """One submitted prompt and its news, read as they come."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, prompt: list[int], params: SamplingParams, cache_salt: str) -> None:
        self._reader = Reader(tokenizer, params)
        self._news: SimpleQueue[Delta] = SimpleQueue()
        self._num_samples = params.n
        self.handle: Handle = engine.submit(prompt, params, self._news.put, text=False, cache_salt=cache_salt)

    def deltas(self) -> Iterator[Delta]:
        """The news as they come, with their text."""
        left = self._num_samples
        while left:
            delta = self._reader.read(self._news.get())
            if delta is None:
                continue
            _raise_for(delta)
            left -= delta.finish_reason is not None
            yield delta


@dataclass(slots=True)
class _Sample:
    """What came of one sample so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""


class _Gathered:
    """One submitted prompt whose answer is wanted whole. Nothing is kept of the news but what they add, and its reader is woken once: a thousand
    messages a second that lie about make the garbage collector stop the engine thread, and so does whoever takes them one by one.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, prompt: list[int], params: SamplingParams, cache_salt: str) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._reader = Reader(tokenizer, params)
        self._samples = [_Sample() for _ in range(params.n)]
        self._left = params.n
        self._first: Delta | None = None
        self._failed: Delta | None = None
        self._ended = threading.Event()
        self._started_s = time.monotonic()
        self._ttft_s: float | None = None
        self.handle: Handle = engine.submit(prompt, params, self._take, text=False, cache_salt=cache_salt)

    def _take(self, delta: Delta) -> None:
        """The engine's sink."""
        if self._first is None:
            self._first = delta
        if self._ttft_s is None and delta.token_ids:
            self._ttft_s = time.monotonic() - self._started_s
        sample = self._samples[delta.index]
        sample.token_ids += delta.token_ids
        if delta.logprobs:
            sample.logprobs += delta.logprobs
        if delta.text:
            sample.text += delta.text
        if delta.finish_reason is not None:
            sample.finish_reason = delta.finish_reason
            self._left -= 1
            if delta.finish_reason in ("error", "abort"):
                self._failed = self._failed or delta
            if not self._left or self._failed is not None:
                self._ended.set()

    def output(self) -> RequestOutput:
        """Wait for all of it; where no stop string was looked for, text is made of all tokens at once."""
        self._ended.wait()
        if self._failed is not None:
            _raise_for(self._failed)
        first = self._first
        assert first is not None
        completions = tuple(
            Completion(
                index,
                sample.text if self._params.stop else self._text(sample),
                tuple(sample.token_ids),
                tuple(sample.logprobs),
                sample.finish_reason,
            )
            for index, sample in enumerate(self._samples)
        )
        return RequestOutput(first.prompt_tokens, completions, first.cached, self._ttft_s or 0.0)

    def _text(self, sample: _Sample) -> str:
        try:
            return self._tokenizer.decode(self._reader.shown(tuple(sample.token_ids), sample.finish_reason))
        except Exception as error:  # a tokenizer is foreign code
            raise RequestError(f"the tokenizer failed: {error}") from error


def _raise_for(delta: Delta) -> None:
    """Raise what the news of a sample's bad end mean to whoever asked."""
    if delta.finish_reason == "error":
        raise RequestError(delta.error or "the request failed")
    if delta.finish_reason == "abort":
        raise EngineStopped("the request was aborted: the engine is closing")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts as a list. A list whose first item is a number is one prompt of token ids. Raises RequestRejected."""
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts, "prompts", "a text, a list of token ids, or a list of such prompts")
    return [items] if items and isinstance(items[0], Integral) else items


def _items(given: object, where: str, wanted: str) -> list[Any]:
    """The items of a sequence, as a list. Raises RequestRejected for anything else, bytes included."""
    if isinstance(given, bytes | bytearray | Mapping | Set) or not isinstance(given, Iterable):
        hint = "; a conversation is for chat()" if isinstance(given, Mapping) else ""
        raise RequestRejected(f"{where} is {reprlib.repr(given)}: give {wanted}{hint}", param=where)
    return list(given)


def _params_of_each(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    """The parameters of each prompt: the same for all, or one from a list for each. Raises RequestRejected."""
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        return [_checked(params)] * num_prompts
    if len(params) != num_prompts:
        reason = f"{len(params)} params for {num_prompts} prompts: give one, or one for each"
        raise RequestRejected(reason, param="params")
    return [_checked(one, f"params[{index}]") for index, one in enumerate(params)]


def _checked(params: SamplingParams | None, where: str = "params") -> SamplingParams:
    """The parameters of one request; None means all defaults.

    Raises RequestRejected for any other type; the message shows how to write a mapping as SamplingParams.
    """
    if params is None:
        return SamplingParams()
    if isinstance(params, SamplingParams):
        return params
    given = f"the class {params.__name__}" if isinstance(params, type) else reprlib.repr(params)
    wanted = "temperature=0"
    if isinstance(params, Mapping):
        wanted = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in params.items())
    reason = f"{where} is {given}: give a SamplingParams object, such as SamplingParams({wanted})"
    raise RequestRejected(reason, param=where)
