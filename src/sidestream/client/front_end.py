"""A front end: checks prompts and parameters that callers give, sends token ids to an engine's client, and makes text
from the engine's tokens. API processes and `AsyncLLM` use `FrontEnd`; `LLM` uses the parts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import reprlib
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence, Set
from numbers import Integral
from typing import TYPE_CHECKING, Any

import msgspec

from sidestream.client.base import AdapterCalls, EngineClient
from sidestream.client.beam_search import BeamSearch, BeamSequence, run_search
from sidestream.config import ReasoningMarks, SamplingDefaults, SamplingParams
from sidestream.errors import RequestRejected
from sidestream.formats import REASONING_FORMATS, is_inside, reasoning_format_of
from sidestream.text import Detokenizer, StopStrings, TokenizerLike
from sidestream.types import CachedPrefix, CacheExplanation, Delta, Flushed, Health, PrefixQuery
from sidestream_kv.metrics import MetricsSnapshot, Recent

if TYPE_CHECKING:  # importing transformers takes seconds
    from sidestream.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""A text, or token ids."""


def ids_of(prompt: Prompt, tokenizer: Tokenizer, where: str = "prompt") -> list[int]:
    """Token ids of a prompt. Raises RequestRejected."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return _items(prompt, where, "a text or a list of token ids")


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts as a list. A list whose first item is a number is one prompt of token ids. Raises RequestRejected."""
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts, "prompts", "a text, a list of token ids, or a list of such prompts")
    return [items] if items and isinstance(items[0], Integral) else items


def params_of_each(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    """The parameters of each prompt. `params` is one object for all prompts, or a list with one object for each.

    Raises RequestRejected.
    """
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        return [checked_params(params)] * num_prompts
    if len(params) != num_prompts:
        reason = f"{len(params)} params for {num_prompts} prompts: give one object for all, or one for each prompt"
        raise RequestRejected(reason, param="params")
    return [checked_params(one, f"params[{index}]") for index, one in enumerate(params)]


def checked_params(params: SamplingParams | None, where: str = "params") -> SamplingParams:
    """The parameters of one request; None means all defaults.

    Raises RequestRejected for any other type; the message shows how to write a mapping as SamplingParams.
    """
    if params is None:
        return SamplingParams()
    if isinstance(params, SamplingParams):
        return params
    value = f"the class {params.__name__}" if isinstance(params, type) else reprlib.repr(params)
    example = "temperature=0"
    if isinstance(params, Mapping):
        example = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in params.items())
    reason = f"{where} is {value}: give a SamplingParams object, such as SamplingParams({example})"
    raise RequestRejected(reason, param=where)


def with_token_ids(params: SamplingParams, tokenizer: TokenizerLike, prompt: Sequence[int]) -> SamplingParams:
    """`params` with what the engine must know as token ids: a stop token for each stop string that is a special token,
    such as `<|im_end|>`, which has no text, so that no search in the text finds it; the ids of bad words; and those of
    the markers of reasoning, if its tokens have a bound. Raises RequestRejected.
    """
    if params.thinking_token_budget is not None and params.reasoning is None:
        marks = reasoning_marks(reasoning_format_of(tokenizer.chat_template), tokenizer, prompt)
        params = dataclasses.replace(params, reasoning=marks)
    stops = tuple(token_id for stop in params.stop if (token_id := tokenizer.special_id(stop)) is not None)
    words = [(word.lstrip(), " " + word.lstrip()) for word in params.bad_words]
    bad = {tuple(tokenizer.encode(text, add_special_tokens=False)) for pair in words for text in pair} - {()}
    if not stops and not bad:
        return params
    return dataclasses.replace(
        params,
        stop_token_ids=(*params.stop_token_ids, *stops),
        bad_word_ids=(*params.bad_word_ids, *sorted(bad)),
    )


def reasoning_marks(
    reasoning: str | None, tokenizer: TokenizerLike, prompt: Sequence[int], *, inside: bool | None = None
) -> ReasoningMarks:
    """Token ids of the markers of reasoning, for a budget of it.

    reasoning   name of the format; None: unknown
    inside      whether an answer behind the prompt begins inside the reasoning; None: as the prompt's text says

    Raises RequestRejected if the format is unknown.
    """
    if reasoning is None:
        raise RequestRejected(
            "thinking_token_budget: the format of this model's reasoning is unknown or switched off: start the server "
            "with --reasoning-parser, or leave it out",
            param="thinking_token_budget",
        )
    form = REASONING_FORMATS[reasoning]
    start, end = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (form.start, form.end))
    if inside is None:
        inside = is_inside(reasoning, tokenizer.decode([*prompt[-64:]], skip_special_tokens=False))
    return ReasoningMarks(start, end, inside)


def _items(value: object, where: str, expected: str) -> list[Any]:
    """The items of a sequence as a list. Raises RequestRejected for anything else, including bytes."""
    if isinstance(value, bytes | bytearray | Mapping | Set) or not isinstance(value, Iterable):
        hint = "; a conversation is for chat()" if isinstance(value, Mapping) else ""
        raise RequestRejected(f"{where} is {reprlib.repr(value)}: give {expected}{hint}", param=where)
    return list(value)


class FrontEnd:
    """Takes prompts as text or token ids, sends token ids to the engine, and returns text with the engine's tokens.

    Belongs to one event loop; tokenizes on worker threads.
    """

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, *, model_name: str) -> None:
        self.client = client
        self.adapters = AdapterCalls(client)
        self.tokenizer = tokenizer
        self.model_name = model_name

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and output together."""
        return self.client.max_model_len

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the KV cache."""
        return self.client.block_tokens

    @property
    def room(self) -> int:
        """Number of samples that the engine may still take from this front end."""
        return self.client.room

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """The model's sampling defaults."""
        return self.client.sampling_defaults

    def health(self) -> Health:
        """Whether the engine serves. Never blocks."""
        return self.client.health()

    def count(self, name: str, value: float, *labels: str) -> None:
        """Add to a counter of the engine's metrics."""
        self.client.count(name, value, *labels)

    async def metrics_snapshot(self) -> MetricsSnapshot:
        """A copy of all metrics. Raises EngineStopped."""
        return await self.client.metrics_snapshot()

    async def recent_spans(self, since: int) -> Recent:
        """The newest spans of the streams after position `since`; see `Timeline.read`. Raises EngineStopped."""
        return await self.client.recent_spans(since)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_name: str = "",
        cache_salt: str = "",
        continues: bool = True,
        shown_tokens: Collection[str] = (),
    ) -> AsyncGenerator[Delta, None]:
        """Yield the output of one prompt's samples as it is generated. Closing or cancelling the generator aborts the
        samples.

        priority      requests with a lower number run earlier
        request_name  name for `cancel`, without spaces; several requests may have the same
        cache_salt    only requests with the same salt share KV, in all tiers
        continues     the output continues the prompt's text. False: it begins a text, as the answer in a chat does;
                      some tokenizers omit the space in front of a text's first word
        shown_tokens  special tokens whose name is part of the text

        Raises RequestError or EngineStopped before the first delta.
        """
        return self._answer(
            lambda: ids_of(prompt, self.tokenizer),
            params,
            priority,
            cache_salt,
            request_name,
            continues=continues,
            in_thread=isinstance(prompt, str),
            shown_tokens=shown_tokens,
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_name: str = "",
        cache_salt: str = "",
        **layout: Any,
    ) -> AsyncGenerator[Delta, None]:
        """Yield the output of a conversation's samples, like `generate`.

        messages   each has a `role` and a `content`; a worker thread formats them with the model's chat template
        layout     see `LLM.chat`
        """
        return self._answer(
            lambda: self.tokenizer.chat(messages, **layout),
            params,
            priority,
            cache_salt,
            request_name,
            continues=bool(layout.get("continue_final_message")),
            in_thread=True,
        )

    async def beam_search(
        self,
        prompt: Prompt,
        *,
        beam_width: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        ignore_eos: bool = False,
        priority: int = 0,
        request_name: str = "",
        cache_salt: str = "",
    ) -> list[BeamSequence]:
        """The `beam_width` likeliest answers to a prompt, the best first; see `LLM.beam_search`."""
        ids = ids_of(prompt, self.tokenizer)
        room = min(SamplingParams(max_tokens=max_tokens).max_tokens or 1, max(1, self.max_model_len - len(ids)))
        end_ids = () if ignore_eos else self.tokenizer.eos_ids
        search = BeamSearch(ids, width=beam_width, max_tokens=room, length_penalty=length_penalty, end_ids=end_ids)
        options: dict[str, Any] = {"priority": priority, "request_name": request_name, "cache_salt": cache_salt}
        await run_search(search, lambda prompt, params: self.generate(prompt, params, **options))
        return search.answers(self.tokenizer, after=ids)

    async def explain_cache(self, request_name: str) -> CacheExplanation | None:
        """Why tokens of the last request with this `request_name` were reused or computed. None: the engine does not
        remember the request. Raises EngineStopped and CallTimeout.
        """
        self._check_open()
        return await self.client.explain_cache(request_name)

    async def flush(self, *, timeout_s: float = 60.0) -> Flushed:
        """Wait until the tiers (host memory, disk) hold all complete blocks. After `timeout_s`, the result is false and
        says what is left. Raises CallTimeout if the engine hangs.
        """
        self._check_open()
        return Flushed(await self.client.operate("flush", timeout_s=timeout_s))

    async def reset_prefix_cache(self, tier: str | None = None, *, timeout_s: float = 60.0) -> dict[str, int]:
        """Drop the prefix cache of a tier (`device`, `host`, `disk`), or of all tiers: later requests reuse no KV that
        it holds now. Running requests continue. Returns the number of dropped blocks by tier.

        Raises RequestRejected for a tier that the engine does not have, EngineStopped, and CallTimeout after
        `timeout_s`; then the reset is still under way.
        """
        self._check_open()
        return await self.client.operate("reset_prefix_cache", timeout_s=timeout_s, name=tier)

    async def pin_prefix(
        self, prompt: Prompt, *, ttl_s: float, cache_salt: str = "", hint: bool = False
    ) -> CachedPrefix:
        """Let the tiers evict the KV of a prefix last, for `ttl_s` seconds: the leading whole blocks of the prompt that
        are cached now, in host memory and the persistent tiers, or on the device if the engine has no others. Pins hold
        at most half of a tier's blocks, and a pin ends early if requests and transfers use all other blocks. A new pin
        of the same prefix replaces the earlier one.

        Raises RequestRejected if nothing of the prompt is cached, and if the pins would hold too many blocks. Also
        raises EngineStopped and CallTimeout, as do the other operations on prefixes.

        hint   the pin gives way to pins without `hint`, and nothing is raised if there is nothing to pin or no room
        """
        query = PrefixQuery.of(
            await asyncio.to_thread(ids_of, prompt, self.tokenizer), cache_salt, ttl_s=ttl_s, hint=hint
        )
        return (await self._on_prefix("pin_prefix", query))[0]

    async def unpin_prefix(self, prompt: Prompt = "", *, name: str = "", cache_salt: str = "") -> int:
        """End the pin of the prompt, or the one with this name (`CachedPrefix.name`). Returns the number of pins."""
        query = (
            PrefixQuery(name=name)
            if name
            else PrefixQuery.of(await asyncio.to_thread(ids_of, prompt, self.tokenizer), cache_salt)
        )
        return len(await self._on_prefix("unpin_prefix", query))

    async def prefetch_prefix(self, prompt: Prompt, *, cache_salt: str = "") -> CachedPrefix:
        """Begin to read the KV of a prefix from the persistent tiers into host memory, as much as half of it holds, so
        that the next request with this prefix need not wait for them. Returns at once: what is cached, by tier.
        """
        query = PrefixQuery.of(await asyncio.to_thread(ids_of, prompt, self.tokenizer), cache_salt)
        return (await self._on_prefix("prefetch_prefix", query))[0]

    async def cached_prefixes(self, *, limit: int = 20) -> Sequence[CachedPrefix]:
        """The pinned prefixes, and those with which at least two of the remembered requests began, the most used ones
        first; of both, at most `limit`.
        """
        return await self._on_prefix("cached_prefixes", PrefixQuery(limit=limit))

    async def drop_prefix(self, prompt: Prompt, *, tier: str | None = None, cache_salt: str = "") -> dict[str, int]:
        """Drop the KV of the prompt's whole blocks from a tier, or from all tiers, and end the pins there that hold
        some of it. Longer prompts cannot reuse what comes behind it until it is computed again. Running requests
        continue. Returns the number of dropped blocks by tier. Raises RequestRejected for an unknown tier.
        """
        query = PrefixQuery.of(await asyncio.to_thread(ids_of, prompt, self.tokenizer), cache_salt, tier=tier)
        return (await self._on_prefix("drop_prefix", query))[0].tiers

    async def close_session(self, session: str, *, cache_salt: str = "") -> CachedPrefix | None:
        """Forget a session (`CacheOptions.session`): the KV of its last request is evicted first, unless a pin holds
        it. Returns what was held, by tier; None: there is no such session.
        """
        query = PrefixQuery(name=session, cache_salt=cache_salt.encode("utf-8", "surrogatepass"))
        return next(iter(await self._on_prefix("close_session", query)), None)

    async def hand_over_prefix(self, prompt: Prompt, *, cache_salt: str = "") -> int:
        """Wait until a store that engines share holds the KV of the prompt's whole blocks, at most 5 s: then another
        engine can load it. Returns the number of tokens whose KV is there. Raises RequestRejected if the engine has no
        such store.
        """
        query = PrefixQuery.of(await asyncio.to_thread(ids_of, prompt, self.tokenizer), cache_salt)
        return (await self._on_prefix("hand_over_prefix", query))[0].tokens

    async def _on_prefix(self, operation: str, query: PrefixQuery) -> Sequence[CachedPrefix]:
        self._check_open()
        return await self.client.operate_on_prefix(operation, query)

    async def pause(self) -> None:
        """Start no request that has not begun, until `resume`: new requests wait in the queue, begun ones continue.
        Idempotent. Raises EngineStopped and CallTimeout.
        """
        self._check_open()
        await self.client.operate("pause")

    async def update_weights(self, path: str, *, timeout_s: float = 600.0) -> None:
        """Replace the weights by those of a checkpoint of the same architecture: a directory, a hub id, or a name that
        `sidestream models` lists. Requests that have begun end with the old weights, others wait. All KV of the old
        weights becomes unreachable. Tokenizer and sampling defaults stay.

        Raises RequestRejected, and changes nothing, if the checkpoint cannot be read or does not fit. Raises
        CallTimeout after `timeout_s`; the weights may still be replaced. Raises EngineStopped.
        """
        self._check_open()
        await self.client.operate("update_weights", timeout_s=timeout_s, name=path)

    async def resume(self) -> None:
        """End a `pause`. Idempotent. Raises EngineStopped and CallTimeout."""
        self._check_open()
        await self.client.operate("resume")

    async def cancel(self, request_name: str) -> int:
        """End the requests with this `request_name`, of all front ends of the engine. Returns the number of samples
        that it ended; 0: no such request runs or waits. Their last delta has the finish reason `abort` and an error.
        Raises EngineStopped and CallTimeout.
        """
        self._check_open()
        return (await self.client.operate("cancel", name=request_name))["cancelled"]

    def _check_open(self) -> None:
        pass

    async def _answer(
        self,
        encode: Callable[[], list[int]],
        params: SamplingParams | None,
        priority: int,
        cache_salt: str,
        name: str,
        *,
        continues: bool,
        in_thread: bool,
        shown_tokens: Collection[str] = (),
    ) -> AsyncGenerator[Delta, None]:
        """Submit the token ids that `encode` returns, and yield the deltas of the samples with their text.

        in_thread   run `encode` on a worker thread, because tokenizing a long text takes milliseconds
        """
        self._check_open()
        chosen = checked_params(params)
        ids = await asyncio.to_thread(encode) if in_thread else encode()
        ids = list(chosen.kept(ids, self.max_model_len))
        chosen = with_token_ids(chosen, self.tokenizer, ids)
        processor = OutputProcessor(self.tokenizer, chosen, ids if continues else (), shown_tokens)
        outputs = self.client.submit(ids, chosen, priority=priority, cache_salt=cache_salt, name=name)
        left = chosen.n
        try:
            while left:
                raw = await outputs.read()
                delta = processor.read(raw)
                if delta is None:
                    continue
                if delta.finish_reason is not None:
                    left -= 1
                    if raw.finish_reason is None:  # the text ended at a stop string, or the tokenizer failed
                        self.client.abort(outputs, delta.finish_reason, index=delta.index)
                yield delta
        finally:
            if left:
                self.client.abort(outputs)


logger = logging.getLogger(__name__)


class OutputProcessor:
    """Adds the text to one request's deltas (new tokens of one sample), in their order, and finds stop strings. Only
    one thread may use it at a time.

    A stop string, or a failure of the tokenizer, ends a sample here before it ends in the engine, which knows only
    token ids:

        delta = outputs.get()
        processed = output.read(delta)
        if processed is not None and processed.finish_reason is not None and delta.finish_reason is None:
            engine.abort(handle.sample(delta.index), reason=processed.finish_reason)
    """

    def __init__(
        self,
        tokenizer: TokenizerLike,
        params: SamplingParams,
        after: Sequence[int] = (),
        shown: Collection[str] = (),
    ) -> None:
        """
        after   token ids of the text that the samples continue; empty: they begin a text
        shown   special tokens whose name is part of the text

        Raises the tokenizer's errors, so construct the object before the request is submitted.
        """
        names = shown if params.skip_special_tokens else None
        self._samples = [_SampleOutput(tokenizer.detokenizer(after, names), params) for _ in range(params.n)]

    def read(self, delta: Delta) -> Delta | None:
        """The delta with its text; None if its sample has ended already.

        If a stop string is complete, the result is the sample's last delta (finish reason `"stop"`), and ends with the
        token that completed the string. If the tokenizer fails, the result is also the sample's last delta
        (`"error"`); other samples continue.
        """
        sample = self._samples[delta.index]
        if sample.ended:
            return None
        processed = sample.read(delta)
        sample.ended = processed.finish_reason is not None
        return processed


class _SampleOutput:
    """One sample's text so far."""

    def __init__(self, detokenizer: Detokenizer, params: SamplingParams) -> None:
        self.ended = False
        self._detokenizer = detokenizer
        self._stops = StopStrings(params.stop, include=params.include_stop)
        self._include_stop = params.include_stop
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def read(self, delta: Delta) -> Delta:
        """The next delta, with its text."""
        if delta.finish_reason == "error":
            return delta
        text, count, num_tokens = "", 0, len(delta.token_ids)
        num_with_text = len(tokens_with_text(delta.token_ids, delta.finish_reason, include_stop=self._include_stop))
        try:
            for count, token_id in enumerate(delta.token_ids[:num_with_text], 1):
                more, found = self._push(token_id)
                text += more
                if found:
                    return _with_text(delta, text, count, "stop")
            count = num_tokens
            if delta.finish_reason is not None:
                more, found = self._stops.push(self._detokenizer.finish())
                text += more + self._stops.flush()
                if found:
                    return _with_text(delta, text, count, "stop")
        except Exception as error:  # the tokenizer is third-party code: its failure ends only this sample
            logger.exception("sample %d: the tokenizer failed at token %d of the answer", delta.index, self._num_tokens)
            if delta.finish_reason == "abort":
                return _with_text(delta, text, num_tokens, "abort")
            return _with_text(delta, text, count, "error", f"the tokenizer failed: {error}")
        return _with_text(delta, text, num_tokens, delta.finish_reason, delta.error)

    def _push(self, token_id: int) -> tuple[str, bool]:
        """The text that is final after this token, and whether a stop string is complete."""
        self._num_tokens += 1
        text = self._detokenizer.push(token_id)
        return self._stops.push(text) if self._num_tokens >= self._min_tokens else (text, False)


def tokens_with_text(token_ids: tuple[int, ...], finish_reason: str | None, *, include_stop: bool) -> tuple[int, ...]:
    """The tokens whose text belongs to the answer. The text of a stop token belongs to it only with `include_stop`."""
    return token_ids[:-1] if finish_reason == "stop" and not include_stop else token_ids


def _with_text(delta: Delta, text: str, count: int, finish_reason: str | None, error: str | None = None) -> Delta:
    """The first `count` tokens of a delta, with their text."""
    return msgspec.structs.replace(
        delta,
        text=text,
        token_ids=delta.token_ids[:count],
        logprobs=delta.logprobs[:count],
        finish_reason=finish_reason,
        error=error,
    )
