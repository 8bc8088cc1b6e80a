"""The tier `redis`: values in a server that speaks the Redis protocol, such as Valkey. `tiers.store_tier` has the rest.

The server evicts by its own `maxmemory-policy`, and a `ttl_s` ends values that are not read. Two short Lua scripts run
in the server: one reads many headers at once, the other deletes a value only if it is still the one that is meant.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from sidestream_kv.config import OffloadConfig
from sidestream_kv.errors import ConfigError, TierError, TierFull
from sidestream_kv.offload.tiers.base import TierContext, TierKind
from sidestream_kv.offload.tiers.entry_format import HEADER_BYTES
from sidestream_kv.offload.tiers.store_tier import StoreTier, copied, options_of, seconds

NAME = "redis"

_HEADS = f"""local r = {{}} for i, k in ipairs(KEYS) do
r[i] = redis.call('GETRANGE', k, 0, {HEADER_BYTES - 1}) end return r"""
_DELETE = """local n = 0 for i, k in ipairs(KEYS) do
if redis.call('GETRANGE', k, 0, #ARGV[i] - 1) == ARGV[i] then n = n + redis.call('UNLINK', k) end end return n"""
# Names in one call of a script: a script may put 8,000 values on Lua's stack, and no other client runs meanwhile.
_MOST_NAMES = 1000

_log = logging.getLogger(__name__)


class RedisStore:
    """Values in the server at `url`. Connections are made when they are needed, one for each thread that calls.

    timeout_s   longest wait for a connection, and for each part of an answer
    ttl_s       seconds after which a value that was neither written nor read ends; None: never
    """

    def __init__(self, url: str, *, timeout_s: float, ttl_s: float | None) -> None:
        redis = _package()
        self._errors = redis.exceptions
        self._expiry = {} if ttl_s is None else {"px": max(1, round(ttl_s * 1000))}
        try:
            # One more try if the server has closed an idle connection, but never after a timeout.
            self._client = redis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=redis.retry.Retry(redis.backoff.NoBackoff(), 1, (redis.exceptions.ConnectionError,)),
                decode_responses=False,
            )
        except Exception as error:  # its text may hold the password
            raise ConfigError(
                f"redis url ({where(url)}) cannot be used ({type(error).__name__}): give redis://[USER:PASSWORD@]HOST"
                "[:PORT][/DB], rediss:// for TLS, or unix://PATH"
            ) from None
        self._where = where(url)

    def check(self) -> None:
        """Raise ConfigError if the server refuses the credentials. A server that cannot be reached is only logged."""
        try:
            with self._translated():
                self._client.ping()
        except TierError as error:
            if isinstance(error.__cause__, self._errors.AuthenticationError | self._errors.ResponseError):
                raise ConfigError(f"{error}: check the redis url's user and password") from None
            _log.warning("%s: until it answers, blocks are neither stored there nor found", error)

    def heads(self, names: Sequence[str]) -> Sequence[bytes | None]:
        """See `ValueStore.heads`."""
        with self._translated():
            heads: list[bytes] = []
            for part in _parts(names):
                heads += self._client.eval(_HEADS, len(part), *part)
        return [head or None for head in heads]

    def get(self, name: str, head: bytearray, block: memoryview) -> int:
        """See `ValueStore.get`."""
        with self._translated():
            value = self._client.getex(name, **self._expiry) if self._expiry else self._client.get(name)
        return copied(None if value is None else memoryview(value), head, block)

    def put(self, name: str, head: bytes, block: memoryview) -> None:
        """See `ValueStore.put`."""
        with self._translated():
            self._client.set(name, b"".join((head, block)), **self._expiry)

    def delete(self, values: Sequence[tuple[str, bytes]]) -> None:
        """See `ValueStore.delete`."""
        with self._translated():
            for part in _parts(values):
                names, heads = zip(*part, strict=True)
                self._client.eval(_DELETE, len(names), *names, *heads)

    def close(self) -> None:
        """End the connections."""
        self._client.close()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Errors of the package as a tier's. After a lost connection, the others are closed, too: the server has
        probably restarted.
        """
        try:
            yield
        except self._errors.OutOfMemoryError as error:
            raise TierFull(f"redis at {self._where} has no memory left: {error}") from error
        except (self._errors.RedisError, OSError) as error:
            self._client.connection_pool.disconnect(inuse_connections=False)
            raise TierError(f"redis at {self._where}: {type(error).__name__}: {error}") from error


def where(url: str) -> str:
    """Host and port, or path, of a URL, without its credentials."""
    try:
        parts = urlsplit(url)
        return parts.path if parts.scheme == "unix" else parts.netloc.rpartition("@")[2] or "no host"
    except ValueError:
        return "not a URL"


def _parts(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (items[first : first + _MOST_NAMES] for first in range(0, len(items), _MOST_NAMES))


def _package() -> Any:
    try:
        import redis
        import redis.backoff
        import redis.retry
    except ImportError as error:
        raise ConfigError("the tier redis needs the package redis: pip install 'sidestream-kv[redis]'") from error
    return redis


def _open(config: OffloadConfig, context: TierContext) -> StoreTier | None:
    options = options_of(config, NAME, url=None, prefix="sidestream", timeout_s=1.0, ttl_s=None)
    if options is None:
        return None
    url, ttl_s = options["url"], options["ttl_s"]
    if not isinstance(url, str):
        raise ConfigError("the tier redis has no url: give one, such as redis://127.0.0.1:6379/0")
    ttl_s = None if ttl_s is None else seconds(ttl_s, "redis ttl_s")
    store = RedisStore(url, timeout_s=options["timeout_s"], ttl_s=ttl_s)
    store.check()
    return StoreTier(store, context, name=NAME, prefix=options["prefix"], capacity_bytes=options["capacity"])


KIND = TierKind(NAME, _open, ranks=True)
