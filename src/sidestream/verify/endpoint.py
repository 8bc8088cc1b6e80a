"""Requests to an OpenAI-compatible server, with the standard library only. All calls block and may run in threads."""

from __future__ import annotations

import http.client
import json
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import SplitResult, urlsplit

from sidestream.errors import ConfigError, SidestreamError

_ALTERNATIVES = 5  # most likely tokens that an answer lists for each position; vLLM allows up to 20, others up to 5
_IDS = "return_tokens_as_token_ids"
# Optional fields that are left out together until a server accepts the others.
_LEFT_OUT = ((), (_IDS,), ("cache_salt",), ("cache_salt", _IDS), ("cache_salt", _IDS, "ignore_eos"))
_SMALLEST_BLOCK = 16  # tokens; smaller blocks divide it
_VOCABULARIES = (32_000, 8_000, 1_000, 200)  # token ids up to these are tried, the largest first


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for a completion of token ids.

    seed   of a sampled answer; None: the most likely token each time
    salt   separates caches, where the server knows `cache_salt`; empty: none
    """

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None = None
    salt: str = ""

    def body(self, model: str) -> dict[str, Any]:
        """The request's JSON."""
        sampling = {"temperature": 0} if self.seed is None else {"temperature": 1.0, "seed": self.seed}
        salt = {"cache_salt": self.salt} if self.salt else {}
        limits = {"max_tokens": self.max_tokens, "logprobs": _ALTERNATIVES, "ignore_eos": True}
        return {"model": model, "prompt": list(self.prompt), **limits, **sampling, **salt, _IDS: True}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server generated.

    tokens         each token: its id, if the server tells ids, else as the server spells it
    logprobs       the log-probability of each token
    alternatives   for each position, the most likely tokens and their log-probabilities
    cached         prompt tokens that the server says it reused; None if it says nothing
    """

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    alternatives: tuple[Mapping[str, float], ...]
    cached: int | None


class Refused(SidestreamError):
    """The server answered with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the server answered with status {status}: {message[:500]}")
        self.status = status


def server_url(url: str) -> SplitResult:
    """The parts of a server's URL; without a scheme, it is http. Raises ConfigError."""
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0):
            return parts
    except ValueError:  # brackets without an end, or a port that is no number up to 65535
        pass
    raise ConfigError(f"{url!r} is no URL of a server: give one such as http://127.0.0.1:8000")


class Connection:
    """Calls a server at `url`. Raises ConfigError for an unusable URL, and SidestreamError if the server cannot be
    reached.
    """

    def __init__(self, url: str, *, key: str | None = None, timeout_s: float = 120.0) -> None:
        self._parts = parts = server_url(url)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._timeout_s = timeout_s

    def first_model(self) -> str:
        """Name of the first model that the server lists. Raises SidestreamError if it lists none."""
        try:
            return str(json.loads(self.call("GET", "/v1/models"))["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise SidestreamError(
                f"{self._parts.geturl()} names no model at /v1/models: is it an OpenAI-compatible server?"
            ) from error

    def call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """The body of the reply. Raises Refused for an error status, and SidestreamError if the connection breaks."""
        connection = self._connection()
        try:
            connection.request(method, f"{self._path}{path}", body, self._headers)
            reply = connection.getresponse()
            content = reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from error
        finally:
            connection.close()
        if reply.status != 200:
            raise Refused(reply.status, content.decode("utf-8", "replace"))
        return content

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        assert self._parts.hostname is not None
        return kind(self._parts.hostname, self._parts.port, timeout=self._timeout_s)

    def _broken(self, error: Exception) -> SidestreamError:
        return SidestreamError(f"{self._parts.geturl()} does not answer ({error or type(error).__name__})")


class Endpoint(Connection):
    """A server at `url`. Finds the model's name, and which token ids and which optional fields the server accepts.

    Raises ConfigError for an unusable URL, and SidestreamError if the server cannot be reached or serves no model.
    """

    def __init__(self, url: str, *, model: str | None = None, key: str | None = None, timeout_s: float = 120.0) -> None:
        super().__init__(url, key=key, timeout_s=timeout_s)
        self._without: frozenset[str] = frozenset()
        self.model = model or self.first_model()
        self.vocabulary = self._probe()

    @property
    def salts(self) -> bool:
        """Whether the server knows `cache_salt`."""
        return "cache_salt" not in self._without

    def _probe(self) -> int:
        """The number of token ids to draw from. Leaves out optional fields that the server refuses."""
        refusals = []
        for vocabulary in _VOCABULARIES:
            ask = Ask((vocabulary - 1, 7), 1, salt="probe")
            for without in _LEFT_OUT:
                self._without = frozenset(without)
                try:
                    self.answer(ask)
                except Refused as refused:
                    if refused.status not in (400, 422):
                        raise
                    refusals.append(str(refused))
                else:
                    return vocabulary
        raise SidestreamError(f"no completion of token ids with log-probabilities is answered; last: {refusals[-1]}")

    def block_tokens(self, length: int, seed: int) -> int:
        """Tokens of the server's KV blocks, as far as it says how much it reused of parts of a prompt; at least 16."""
        draw = random.Random(f"blocks {seed}")
        prompt = tuple(draw.randrange(5, self.vocabulary) for _ in range(length))
        self.answer(Ask(prompt, 1))
        stops = range(length, length // 2, -length // 13)
        cached = [self.answer(Ask(prompt[:stop], 1)).cached or 0 for stop in stops]
        return max(_SMALLEST_BLOCK, math.gcd(*cached))

    def answer(self, ask: Ask) -> Answer:
        """Send a request and wait for its answer. Raises Refused, and SidestreamError if the connection breaks."""
        reply = self.call("POST", "/v1/completions", self._body(ask))
        try:
            return _answer(json.loads(reply))
        except (ValueError, LookupError, TypeError) as error:
            raise SidestreamError(
                f"the answer has no log-probabilities in the form of /v1/completions ({error!r}): {reply[:300]!r}"
            ) from error

    def abandon(self, ask: Ask, after_s: float) -> None:
        """Send a streaming request, and close the connection after `after_s` seconds."""
        connection = self._connection()
        try:
            connection.request("POST", f"{self._path}/v1/completions", self._body(ask, stream=True), self._headers)
            time.sleep(after_s)
        except OSError as error:
            raise self._broken(error) from error
        finally:
            connection.close()

    def reset(self) -> bool:
        """Ask the server to forget its prefix cache. Returns whether it knows how to."""
        try:
            self.call("POST", "/reset_prefix_cache", b"{}")
        except Refused:
            return False
        return True

    def wait(self, seconds: float) -> None:
        """Wait until the server answers again. Raises SidestreamError after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.call("GET", "/v1/models")
                return
            except SidestreamError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def _body(self, ask: Ask, **more: Any) -> bytes:
        body = {name: value for name, value in ask.body(self.model).items() if name not in self._without}
        return json.dumps({**body, **more}).encode()


def salted(ask: Ask, salt: str) -> Ask:
    """The same request with a cache of its own."""
    return replace(ask, salt=salt)


def _answer(reply: Any) -> Answer:
    choice = reply["choices"][0]
    found = choice["logprobs"]
    details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
    return Answer(
        tuple(map(str, found["tokens"])),
        tuple(map(float, found["token_logprobs"])),
        tuple({str(token): float(value) for token, value in (top or {}).items()} for top in found["top_logprobs"]),
        details.get("cached_tokens"),
    )
