"""A fake engine for tests of servers and clients. A script determines the reply to each request, and every abort is
recorded. It runs on the caller's event loop and is deterministic. One token is one UTF-8 byte, so a character may span
tokens, as with real models. Any thread may call `release` and `wait_until`.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sidestream.config import SamplingParams
from sidestream.errors import ContextTooLong, ModelNotFound, RequestRejected
from sidestream.text import Detokenizer
from sidestream.types import CachedPrefix, CachedTokens, CacheExplanation, Delta, Flushed, Health, TokenLogprob
from sidestream_kv.metrics import Metrics, MetricsSnapshot, Recent, Timeline

_NOTHING_CACHED = CachedTokens()
QUEUE_S = 0.25
"""The time in the queue that each first delta names."""


class FakeTokenizer:
    """Token ids are UTF-8 bytes.

    options   what the chat template supports: names of variables, the role `tool`, the message field `tool_calls`
    chats     messages and variables of each call of `chat`
    chat_template  text of the template, in which a server finds the format of tool calls
    specials  for each call of `encode`, whether special tokens were requested
    """

    vocab_size = 256
    eos_ids: tuple[int, ...] = ()

    def __init__(self, options: Iterable[str] = (), chat_template: str = "") -> None:
        self.chat_template = chat_template
        self.options = frozenset(options)
        self.chats: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
        self.specials: list[bool] = []

    def encode(self, text: str, *, add_special_tokens: bool = True, most_tokens: int | None = None) -> list[int]:
        """The bytes of `text`. There are no special tokens; `specials` records whether they were requested."""
        if most_tokens is not None and len(text.encode("utf-8")) > most_tokens:
            raise ContextTooLong(
                f"the text has {len(text)} characters, the model takes {most_tokens} tokens", param="prompt"
            )
        self.specials.append(add_special_tokens)
        return list(text.encode("utf-8"))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these bytes, with U+FFFD for invalid bytes."""
        return bytes(token_ids).decode("utf-8", "replace")

    def special_id(self, text: str) -> int | None:
        """Always None: no token is special."""
        return None

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """The bytes in sentencepiece's notation: <0x41>."""
        return [f"<0x{token_id:02X}>" for token_id in token_ids]

    def detokenizer(self, after: Sequence[int] = (), shown: Collection[str] | None = ()) -> Detokenizer:
        """A new incremental decoder."""
        return Detokenizer(lambda token_id: bytes([token_id]))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        most_tokens: int | None = None,
        **options: Any,
    ) -> list[int]:
        """One line per message, then the start of the assistant's turn."""
        for name in options:
            if name not in self.options:
                raise RequestRejected(f"the template has no option {name}", param=name)
        for index, message in enumerate(messages):
            for name, used in (
                ("role", message["role"] == "tool" and "tool"),
                ("tool_calls", "tool_calls" in message and "tool_calls"),
            ):
                if used and used not in self.options:
                    where = f"messages[{index}].{name}"
                    raise RequestRejected(f"the template does not know {where}", param=where)
        self.chats.append(([dict(message) for message in messages], options))
        text = "".join(f"{message['role']}: {message.get('content', '')}\n" for message in messages)
        if continue_final_message:
            return self.encode(text.removesuffix("\n"), most_tokens=most_tokens)
        return self.encode(text + "assistant: " if add_generation_prompt else text, most_tokens=most_tokens)

    def use_chat_template(self, path: Path) -> None:
        """Take the text of the file for the chat template."""
        self.chat_template = path.read_text(encoding="utf-8")

    def template_knows(self, option: str) -> bool:
        """Whether `option` is one of `options`."""
        return option in self.options


@dataclass(frozen=True, slots=True)
class Script:
    """The fake's reply to one request.

    text         the reply, the same for each sample; it is cut at max_tokens, with finish reason "length"
    token_bytes  bytes per delta
    refuse       exception to raise before any delta
    fail_after   number of deltas after which `failure` is raised; None: never
    hold_after   number of deltas after which the request waits for `release`; None: never
    cached       number of prompt tokens that count as cached
    """

    text: str = "Hello, world"
    token_bytes: int = 1
    refuse: Exception | None = None
    fail_after: int | None = None
    failure: Exception | None = None
    hold_after: int | None = None
    cached: CachedTokens = _NOTHING_CACHED


class FakeAdapters:
    """Takes every adapter but `missing`."""

    def __init__(self) -> None:
        self.room = 0
        self.loaded: list[str] = []

    async def load(self, name: str, path: str, *, timeout_s: float) -> None:
        """Keep the name."""
        if path == "missing":
            raise RequestRejected("the adapter is not loaded: no such directory", param="lora_path")
        self.loaded.append(name)

    async def unload(self, name: str) -> None:
        """Forget the name."""
        if name not in self.loaded:
            raise ModelNotFound(f"no adapter {name!r} is loaded", param="lora_name")
        self.loaded.remove(name)

    async def names(self) -> list[str]:
        """The names."""
        return self.loaded


class FakeBackend:
    """The fake engine. `script` chooses a script by the prompt's text; `health` returns `status`."""

    def __init__(
        self,
        script: Script | Callable[[str], Script] = Script(),
        *,
        model_name: str = "fake",
        max_model_len: int = 4096,
    ) -> None:
        self.model_name = model_name
        self.max_model_len = max_model_len
        self.room = 1024
        self.block_tokens = 4
        self.pinned: dict[str, CachedPrefix] = {}
        self.tokenizer = FakeTokenizer()
        self.metrics = Metrics()
        self.spans = Timeline(on_demand=True)
        self.status = Health("ok", "")
        self.left: dict[str, int] = {}
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self.priorities: list[int] = []
        self.names: list[str] = []
        self.cache_salts: list[str] = []
        self.continues: list[bool] = []
        self.shown_tokens: list[Collection[str]] = []
        self.held: list[str] = []
        self.model_paths: list[str] = []
        self.adapters: Any = FakeAdapters()
        self.closed: list[tuple[str, str]] = []
        self.finished: list[str] = []
        self.explained: list[str] = []
        self.explanation: CacheExplanation | None = None
        self.aborted: list[str] = []
        self._script = script if callable(script) else lambda _: script
        self._changed = threading.Condition()
        self._gates: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def metrics_snapshot(self) -> MetricsSnapshot:
        """A copy of `metrics`."""
        return self.metrics.snapshot()

    async def recent_spans(self, since: int) -> Recent:
        """The spans of `spans`, a real timeline."""
        return self.spans.read(since)

    def count(self, name: str, value: float, *labels: str) -> None:
        """Add to a counter of `metrics`."""
        self.metrics.inc(name, value, *labels)

    async def explain_cache(self, request_name: str) -> CacheExplanation | None:
        """`explanation`. Records the name."""
        self.explained.append(request_name)
        return self.explanation

    async def flush(self, *, timeout_s: float) -> Flushed:
        """`left`, at once."""
        return Flushed(self.left)

    async def reset_prefix_cache(self, tier: str | None = None, *, timeout_s: float) -> dict[str, int]:
        """One dropped block in the tier, or on the device. The only other tier is `host`."""
        if tier not in (None, "device", "host"):
            raise RequestRejected(f"tier is {tier!r}: this engine has device, host", param="tier")
        return {tier or "device": 1}

    async def pin_prefix(
        self, prompt: Sequence[int], *, ttl_s: float, cache_salt: str = "", hint: bool = False
    ) -> CachedPrefix:
        """Records the pin in `pinned`, by its prompt's text."""
        text = bytes(prompt).decode("utf-8", "replace")
        with self._changed:
            self.pinned[text] = CachedPrefix(
                text.encode().hex(), len(prompt), {"device": len(prompt)}, ttl_s, hint, 2, 0.5, tuple(prompt)
            )
            self._changed.notify_all()
        return self.pinned[text]

    async def unpin_prefix(self, prompt: Sequence[int] = (), *, name: str = "", cache_salt: str = "") -> int:
        """End a pin in `pinned`."""
        found = [text for text, one in self.pinned.items() if name == one.name or text.encode() == bytes(prompt)]
        return len([self.pinned.pop(text) for text in found])

    async def prefetch_prefix(self, prompt: Sequence[int], *, cache_salt: str = "") -> CachedPrefix:
        """All of the prompt is in host memory."""
        return CachedPrefix(bytes(prompt).hex(), len(prompt), {"host": len(prompt)})

    async def cached_prefixes(self, *, limit: int) -> Sequence[CachedPrefix]:
        """The pins."""
        return list(self.pinned.values())[:limit]

    async def drop_prefix(
        self, prompt: Sequence[int], *, tier: str | None = None, cache_salt: str = ""
    ) -> dict[str, int]:
        """One block for each token, in the tier or on the device."""
        return {tier or "device": len(prompt)}

    async def close_session(self, session: str, *, cache_salt: str = "") -> CachedPrefix | None:
        """Every session holds one block, unless its name is `unknown`. Records name and salt in `closed`."""
        self.closed.append((session, cache_salt))
        return None if session == "unknown" else CachedPrefix("", self.block_tokens, {"device": 1})

    async def hand_over_prefix(self, prompt: Sequence[int], *, cache_salt: str = "") -> int:
        """All tokens, at once."""
        return len(prompt)

    async def update_weights(self, path: str, *, timeout_s: float) -> None:
        """Takes every checkpoint but `missing`."""
        if path == "missing":
            raise RequestRejected("the weights stay as they are: no such directory", param="model_path")
        self.model_paths.append(path)

    async def pause(self) -> None:
        """Set `status`; no request waits."""
        self.status = Health("ok", "paused", True)

    async def resume(self) -> None:
        """End a pause."""
        self.status = Health("ok", "")

    async def cancel(self, request_name: str) -> int:
        """Number of requests with this name that were held; none ends."""
        return self.held.count(request_name)

    def health(self) -> Health:
        """`status`."""
        return self.status

    def release(self) -> None:
        """Continue every held request."""
        with self._changed:
            for loop, gate in self._gates:
                with contextlib.suppress(RuntimeError):  # the event loop of the request is closed
                    loop.call_soon_threadsafe(gate.set)
            self._gates.clear()

    def wait_until(self, happened: Callable[[FakeBackend], bool], *, timeout_s: float = 10.0) -> None:
        """Block until `happened(self)` is True. Raises TimeoutError after `timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: happened(self), timeout_s):
                raise TimeoutError(f"held {self.held}, finished {self.finished}, aborted {self.aborted}")

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        request_name: str = "",
        cache_salt: str = "",
        continues: bool = True,
        shown_tokens: Collection[str] = (),
    ) -> AsyncGenerator[Delta, None]:
        """Yield the script's deltas. Samples alternate: each gets one delta in turn."""
        prompt = self.tokenizer.decode(prompt_ids)
        with self._changed:
            self.prompts.append(prompt)
            self.params.append(params)
            self.priorities.append(priority)
            self.names.append(request_name)
            self.cache_salts.append(cache_salt)
            self.continues.append(continues)
            self.shown_tokens.append(shown_tokens)
            self._changed.notify_all()
        script = self._script(prompt)
        outcome = self.aborted
        try:
            if script.refuse is not None:
                outcome = self.finished
                raise script.refuse
            for number, delta in enumerate(_deltas(script, params, prompt_ids)):
                if number == script.fail_after:
                    outcome = self.finished
                    raise script.failure or RuntimeError("scripted failure")
                if number == script.hold_after:
                    await self._hold(request_name)
                yield delta
                await asyncio.sleep(0)  # other tasks run between deltas, as with a real engine
            outcome = self.finished
        finally:
            with self._changed:
                outcome.append(request_name)
                self._changed.notify_all()

    async def _hold(self, request_name: str) -> None:
        gate = asyncio.Event()
        with self._changed:
            self._gates.append((asyncio.get_running_loop(), gate))
            self.held.append(request_name)
            self._changed.notify_all()
        await gate.wait()


def _deltas(script: Script, params: SamplingParams, prompt: Sequence[int]) -> list[Delta]:
    wanted = params.prompt_logprobs
    of_prompt = () if wanted is None else tuple(replace(_logprob(byte, wanted), rank=1) for byte in prompt[1:])
    everything = script.text.encode("utf-8")
    reply = everything if params.max_tokens is None else everything[: params.max_tokens]
    finish = "stop" if len(reply) == len(everything) else "length"
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    deltas = []
    starts = range(0, max(len(reply), 1), script.token_bytes)
    for start in starts:
        piece = reply[start : start + script.token_bytes]
        last = start == starts[-1]
        text = decoder.decode(piece, final=last)
        for index in range(params.n):
            logprobs = tuple(_logprob(byte, params.logprobs) for byte in piece) if params.logprobs is not None else ()
            deltas.append(
                Delta(
                    index,
                    text,
                    tuple(piece),
                    logprobs,
                    finish if last else None,
                    len(prompt),
                    script.cached,
                    prompt_logprobs=() if start else of_prompt,
                    queue_s=None if start else QUEUE_S,
                )
            )
    return deltas


def _logprob(token_id: int, top: int) -> TokenLogprob:
    """Log-probabilities of a token: -0.5 for the sampled token, and 1 less for each following token id. If `top` is
    above 2, the last has probability zero.
    """
    others = [((token_id + rank) % 128, -0.5 - rank if rank < 2 else float("-inf")) for rank in range(top)]
    return TokenLogprob(token_id, -0.5, tuple(others))
