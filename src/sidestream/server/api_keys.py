"""A file of API keys, each with a name, limits and rights. It is read again when it changes.

The file is TOML, with a table `[[keys]]` for each key; `ApiKey` has the fields. Used on the event loop only.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from sidestream.config import MOST_SALT_CHARS
from sidestream.errors import ConfigError

log = logging.getLogger("sidestream.server")

MOST_CONCURRENT = 1 << 16
MOST_PRIORITY = 1_000_000  # as of requests
_LOOK_S = 1.0
"""Interval at which a changed file is noticed."""
_Rate = Annotated[int, Meta(ge=1, le=1 << 40)]
_Priority = Annotated[int, Meta(ge=-MOST_PRIORITY, le=MOST_PRIORITY)]


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key of the file. Limits that are not given do not hold.

    name                 of the key in the log, in the audit log and in errors
    sha256, key          the key's SHA-256 in hexadecimal digits, or the key itself: one of the two
    max_concurrent       requests at the same time
    requests_per_minute  requests other than GET; a minute's worth may come at once
    tokens_per_minute    tokens of prompts and answers; a minute's worth may come at once
    priority             added to the `priority` of each request: a higher number waits longer
    most_urgent_priority the sum is at least this; None: `priority`
    deadline_s           time for a request; then it ends
    cache_salt           requests share KV with requests of keys with the same salt only
    max_cached_tokens    what requests keep in the cache beyond these tokens is evicted first
    endpoints            paths that the key opens, with the paths below them; None: all
    """

    name: Annotated[str, Meta(pattern="^[!-~]{1,64}$")]
    sha256: Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")] | None = None
    key: Annotated[str, Meta(pattern="^[!-~]+$")] | None = None
    max_concurrent: Annotated[int, Meta(ge=1, le=MOST_CONCURRENT)] | None = None
    requests_per_minute: _Rate | None = None
    tokens_per_minute: _Rate | None = None
    priority: _Priority = 0
    most_urgent_priority: _Priority | None = None
    deadline_s: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MOST_SALT_CHARS)] | None = None
    max_cached_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    endpoints: Annotated[tuple[Annotated[str, Meta(pattern="^/[^ ]*$")], ...], Meta(min_length=1)] | None = None

    @property
    def digest(self) -> bytes:
        """The SHA-256 of the key."""
        return bytes.fromhex(self.sha256) if self.sha256 is not None else _digest(self.key or "")

    def __post_init__(self) -> None:
        if (self.sha256 is None) == (self.key is None):
            raise ValueError(f"{self.name} has both sha256 and key, or none of them: give one of the two")

    def opens(self, path: str) -> bool:
        """Whether the key may be used for this path."""
        return self.endpoints is None or any(
            path == one or path.startswith(one.rstrip("/") + "/") for one in self.endpoints
        )

    def salted(self, salt: str) -> str:
        """The cache salt of a request that gives `salt`, or none."""
        if self.cache_salt is None:
            return salt
        return hashlib.sha256(f"{len(self.cache_salt)}:{self.cache_salt}{salt}".encode()).hexdigest()

    def priority_of(self, asked: int) -> int:
        """The priority of a request that gives `asked`."""
        least = self.priority if self.most_urgent_priority is None else self.most_urgent_priority
        return min(MOST_PRIORITY, max(least, self.priority + asked))


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: Annotated[list[ApiKey], Meta(max_length=4096)]  # each request is compared with all of them: 0.2 us each


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def read_keys(path: str) -> dict[bytes, ApiKey]:
    """The keys of the file, by their digests. Raises ConfigError for a file that cannot be read or is wrong."""
    try:
        found = msgspec.convert(tomllib.loads(Path(path).read_text(encoding="utf-8")), _File).keys
    except OSError as fault:
        raise ConfigError(f"api_keys is {path}, which cannot be read: {fault.strerror or fault}") from fault
    except (ValueError, msgspec.ValidationError) as fault:
        raise ConfigError(f"api_keys is {path}, which is wrong: {fault}") from fault
    keys: dict[bytes, ApiKey] = {}
    names: set[str] = set()
    for key in found:
        if key.digest in keys or key.name in names:
            raise ConfigError(f"api_keys is {path}, which has the key or the name of {key.name!r} twice")
        keys[key.digest] = key
        names.add(key.name)
    return keys


class KeyFile:
    """The keys of a file, as it is now. While a changed file is wrong, the keys before the change stay valid."""

    def __init__(self, path: str) -> None:
        """A file that cannot be read opens nothing, until it is correct."""
        self._path = path
        self._keys: dict[bytes, ApiKey] = {}
        self._read: tuple[int, ...] | None = None
        self._next_look_s = 0.0

    def find(self, given: Iterable[str]) -> ApiKey | None:
        """The key that one of these texts is; None: there is no such key. Compares in constant time."""
        self._look()
        digests = [_digest(one.strip()) for one in given if one.strip()]
        found = [key for known, key in self._keys.items() for one in digests if hmac.compare_digest(known, one)]
        return found[0] if found else None

    def named(self, name: str) -> ApiKey | None:
        """The key with this name; None: there is none."""
        self._look()
        return next((key for key in self._keys.values() if key.name == name), None)

    def _look(self) -> None:
        """Read the file if it has changed. The stat of a local file takes microseconds."""
        if (now := time.monotonic()) < self._next_look_s:
            return
        self._next_look_s = now + _LOOK_S
        state: tuple[int, ...] = ()
        try:
            found = Path(self._path).stat()
            state = (found.st_mtime_ns, found.st_size, found.st_ino)
        except OSError:
            pass
        if state == self._read:
            return
        is_first, self._read = self._read is None, state
        try:
            self._keys = read_keys(self._path)
            log.log(
                logging.DEBUG if is_first else logging.INFO,
                "--api-keys (in Python api_keys): %d keys are valid",
                len(self._keys),
            )
        except ConfigError as fault:
            log.error("%s; the %d keys from before stay valid", fault, len(self._keys))
