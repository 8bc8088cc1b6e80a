"""The limits of API keys: requests at once, requests per minute, tokens per minute.

All API processes of a server share one file without a name, so limits hold for all of them together. A key has two
token buckets there, under a lock of the file. Each of its running requests holds a lock on one byte, which the kernel
releases when the process ends, in whatever way. Used on the event loop only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import math
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from sidestream.config import CacheOptions
from sidestream.server.api_keys import MOST_CONCURRENT, ApiKey, KeyFile
from sidestream.server.errors import ApiError
from sidestream.server.fields import Call

_BUCKETS = struct.Struct("=ddd")  # time of the last change, requests left, tokens left
_ROWS = 1 << 36
_ROW_BYTES = 64
_SLOTS = _ROWS * _ROW_BYTES  # where the bytes that running requests lock begin; there is no data
_LOCK_S = 0.02

Limit = Literal["concurrent", "requests", "tokens"]
UNITS: tuple[Limit, Limit] = ("requests", "tokens")
"""Of the limits per minute."""


def limits_file() -> int:
    """Descriptor of a new file for `RateLimits`. Processes share it by descriptor; it ends with the last of these."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("sidestream-limits")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class RateLimits:
    """Admits requests of the keys in a file.

    file   descriptor of the shared file, as of `limits_file`, which is closed with the process
    count  adds to a counter of the metrics
    """

    def __init__(self, keys: KeyFile, file: int, count: Callable[..., None]) -> None:
        self.keys, self._file, self._count = keys, file, count
        self._held: set[int] = set()  # bytes that requests of this process lock

    def admit(self, given: Iterable[str], path: str, *, free: bool) -> Grant | None:
        """Admit a request whose client gave one of these texts as its key; None: it is no key of the file.

        free   the request counts as none and is never refused

        Raises ApiError: 403 if the key is not for this path, 429 beyond a limit of the key.
        """
        if (key := self.keys.find(given)) is None:
            return None
        if not key.opens(path):
            message = f"the key {key.name} is for {', '.join(key.endpoints or ())} only: use another key"
            raise ApiError(403, message, kind="permission_error", code="endpoint_not_allowed")
        return Grant(self, key, free=free)

    def take_slot(self, key: ApiKey) -> int | None:
        """Lock a byte for a request that runs. Raises ApiError if all of the key's are locked."""
        if key.max_concurrent is None:
            return None
        first = _SLOTS + _row(key) * MOST_CONCURRENT
        for slot in range(first, first + key.max_concurrent):
            if slot not in self._held:
                with contextlib.suppress(BlockingIOError, PermissionError):
                    fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
                    self._held.add(slot)
                    return slot
        raise self._refusal("concurrent", key, f"{key.max_concurrent} requests at once", 1)

    def give_back(self, slot: int) -> None:
        """Unlock the byte of a request that has ended."""
        self._held.discard(slot)
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, slot)

    def take(self, key: ApiKey, *, requests: int = 0, tokens: int = 0, must: bool = False) -> dict[str, str]:
        """Take from the key's buckets, and return headers with their state. The bucket of tokens may go below zero,
        because the tokens of a request are known late. Raises ApiError, and takes nothing, if there is no whole request
        or token left, unless the request `must` be counted.
        """
        limits = key.requests_per_minute or math.inf, key.tokens_per_minute or math.inf
        if limits == (math.inf, math.inf):
            return {}
        with self._locked(key) as at:
            now = time.monotonic()
            then, *lefts = _BUCKETS.unpack(os.pread(self._file, _BUCKETS.size, at).ljust(_BUCKETS.size, b"\0"))
            grown = [
                limit if not then or limit == math.inf else min(limit, left + (now - then) * limit / 60)
                for limit, left in zip(limits, lefts, strict=True)
            ]
            for name, limit, left in zip(UNITS, limits, grown, strict=True):
                if left < 1 and not must and (requests or name == "tokens"):
                    said = f"{limit} {name} per minute"
                    raise self._refusal(name, key, said, (1 - left) * 60 / limit, _headers(limits, grown))
            after = [grown[0] - requests, grown[1] - tokens]
            os.pwrite(self._file, _BUCKETS.pack(now, *after), at)
        return _headers(limits, after)

    def _refusal(
        self, limit: Limit, key: ApiKey, said: str, wait_s: float, headers: dict[str, str] | None = None
    ) -> ApiError:
        self._count("rate_limited_total", 1, limit)
        seconds = max(1, math.ceil(wait_s))
        return ApiError(
            429,
            f"rate limit of the key {key.name}: {said}; try again in {seconds} s",
            kind="rate_limit_error",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(seconds), **(headers or {})},
        )

    @contextlib.contextmanager
    def _locked(self, key: ApiKey) -> Iterator[int]:
        """Hold the lock of the key's buckets, which begin at the offset that the context gives. Others hold it for
        microseconds; if one of them is stopped, this goes on without the lock, which may lose its change.
        """
        at, until_s = _row(key) * _ROW_BYTES, time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > until_s:
                    yield at
                    return
                time.sleep(0)
        try:
            yield at
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, at)


class Grant:
    """The leave of one request to run, and its share of its key's limits. Used by the request's task.

    headers   of the reply, about the limits
    """

    def __init__(self, limits: RateLimits | None, key: ApiKey, *, free: bool) -> None:
        """Take a slot and a request. Raises ApiError.

        limits   None: the request is not counted, and never refused; neither is it if it is `free`
        """
        self.key, self.headers = key, dict[str, str]()
        self._limits, self._slot, self._tokens = None if free else limits, None, 0
        if self._limits is None:
            return
        self._slot = self._limits.take_slot(key)
        try:
            self.headers = self._limits.take(key, requests=1)
        except ApiError:
            self.end(0)
            raise

    def accept(self, call: Call) -> Call:
        """The call with the key's priority, salt and share of the cache. Takes the prompts' tokens. Raises ApiError."""
        if self._limits is not None:
            tokens = sum(map(len, call.prompts))
            self.headers |= self._limits.take(self.key, tokens=tokens)
            self._tokens = tokens
        salt, priority = self.key.salted(call.cache_salt), self.key.priority_of(call.priority)
        call, quota = dataclasses.replace(call, cache_salt=salt, priority=priority), self.key.max_cached_tokens
        if quota is None:
            return call
        cache = dataclasses.replace(call.params.cache or CacheOptions(), owner=self.key.name, quota_tokens=quota)
        return dataclasses.replace(call, params=dataclasses.replace(call.params, cache=cache))

    def end(self, tokens: int) -> None:
        """Give the slot back, and take the rest of the request's tokens. `tokens`: of its prompts and answers."""
        if self._limits is None:
            return
        if self._slot is not None:
            self._limits.give_back(self._slot)
            self._slot = None
        if tokens > self._tokens:
            self._limits.take(self.key, tokens=tokens - self._tokens, must=True)


def _row(key: ApiKey) -> int:
    return int.from_bytes(hashlib.sha256(key.name.encode()).digest()[:8], "big") % _ROWS


def _headers(limits: Iterable[float], lefts: Iterable[float]) -> dict[str, str]:
    """OpenAI's headers."""
    found = {}
    for name, limit, left in zip(UNITS, limits, lefts, strict=True):
        if limit != math.inf:
            found[f"x-ratelimit-limit-{name}"] = str(limit)
            found[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(left)))
            found[f"x-ratelimit-reset-{name}"] = f"{max(0.0, (limit - left) * 60 / limit):.3g}s"
    return found
