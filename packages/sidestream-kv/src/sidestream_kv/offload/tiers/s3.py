"""The tier `s3`: values as objects in a bucket of Amazon S3, or of a server with its API. `tiers.store_tier` has the
rest.

The package `obstore` makes the requests. The bucket's own lifecycle rules end values that no engine deletes; a deletion
that races with another engine's write of the same block costs a hit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from sidestream_kv.config import OffloadConfig
from sidestream_kv.errors import ConfigError, TierError
from sidestream_kv.offload.tiers.base import TierContext, TierKind
from sidestream_kv.offload.tiers.entry_format import HEADER_BYTES
from sidestream_kv.offload.tiers.store_tier import StoreTier, copied, options_of

NAME = "s3"
# Requests for headers that are under way at the same time.
_MOST_AT_ONCE = 64

_log = logging.getLogger(__name__)


class S3Store:
    """Objects in a bucket. Credentials are those of the environment (`AWS_ACCESS_KEY_ID` and so on) or of the machine.

    endpoint    URL of the server; None: Amazon's of the region
    timeout_s   longest time of a request
    """

    def __init__(self, bucket: str, *, endpoint: str | None, region: str | None, timeout_s: float) -> None:
        self._obstore = _package()
        limit = timedelta(seconds=timeout_s)
        given = {"endpoint": endpoint, "region": region}
        self._store = self._obstore.store.S3Store(
            bucket,
            **{name: value for name, value in given.items() if value is not None},
            virtual_hosted_style_request=endpoint is None,
            client_options={"timeout": limit, "connect_timeout": limit, "allow_http": True},
            retry_config={"max_retries": 1, "retry_timeout": limit},
        )
        self._where = f"s3://{bucket}" + ("" if endpoint is None else f" at {urlsplit(endpoint).netloc}")

    def check(self) -> None:
        """Raise ConfigError if there is no such bucket, or no access to it. A server that cannot be reached is only
        logged.
        """
        try:
            with self._translated():
                self._read("sidestream-check")
        except TierError as error:
            cause = error.__cause__
            if "NoSuchBucket" in str(cause):
                raise ConfigError(f"{self._where}: there is no such bucket; create it, or check the url") from None
            if type(cause).__name__ in ("PermissionDeniedError", "UnauthenticatedError", "PermissionError"):
                raise ConfigError(f"{self._where}: access is denied; check AWS_ACCESS_KEY_ID and its policy") from None
            _log.warning("%s: until it answers, blocks are neither stored there nor found", error)

    def heads(self, names: Sequence[str]) -> Sequence[bytes | None]:
        """See `ValueStore.heads`."""

        async def all_heads() -> list[bytes | None]:
            places = asyncio.Semaphore(_MOST_AT_ONCE)

            async def head(name: str) -> bytes | None:
                async with places:
                    with contextlib.suppress(FileNotFoundError):
                        part = await self._obstore.get_range_async(self._store, _path(name), end=HEADER_BYTES, start=0)
                        return bytes(part)
                return None

            return await asyncio.gather(*map(head, names))

        with self._translated():
            return asyncio.run(all_heads())

    def get(self, name: str, head: bytearray, block: memoryview) -> int:
        """See `ValueStore.get`."""
        with self._translated():
            return copied(self._read(name), head, block)

    def put(self, name: str, head: bytes, block: memoryview) -> None:
        """See `ValueStore.put`."""
        with self._translated():
            self._obstore.put(self._store, _path(name), b"".join((head, block)), use_multipart=False)

    def delete(self, values: Sequence[tuple[str, bytes]]) -> None:
        """See `ValueStore.delete`."""
        heads = self.heads([name for name, _ in values])
        same = [
            _path(name)
            for (name, first), head in zip(values, heads, strict=True)
            if head is not None and head[: len(first)] == first
        ]
        if same:
            with self._translated():
                self._obstore.delete(self._store, same)

    def close(self) -> None:
        """There is nothing to end: connections are those of the package."""

    def _read(self, name: str) -> memoryview | None:
        try:
            return memoryview(self._obstore.get(self._store, _path(name)).bytes())
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise TierError(f"{self._where}: the bucket is gone") from error
            return None

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Errors of the package as a tier's. Their first line says what failed; the others repeat the request."""
        try:
            yield
        except TierError:
            raise
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            first = next(iter(str(error).splitlines()), "")
            raise TierError(f"{self._where}: {type(error).__name__}: {first}") from error


def _path(name: str) -> str:
    return "/".join(name.split(":"))


def _package() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise ConfigError("the tier s3 needs the package obstore: pip install 'sidestream-kv[s3]'") from error
    return obstore


def _open(config: OffloadConfig, context: TierContext) -> StoreTier | None:
    options = options_of(config, NAME, url=None, endpoint=None, region=None, timeout_s=2.0)
    if options is None:
        return None
    url, endpoint = options["url"], options["endpoint"]
    parts = urlsplit(url) if isinstance(url, str) else urlsplit("")
    if parts.scheme != NAME or not parts.netloc:
        raise ConfigError(f"s3 url is {url!r}: give s3://BUCKET or s3://BUCKET/PREFIX")
    if endpoint is not None and urlsplit(str(endpoint)).scheme not in ("http", "https"):
        raise ConfigError(f"s3 endpoint is {endpoint!r}: give the server's URL, such as http://127.0.0.1:9000")
    store = S3Store(parts.netloc, endpoint=endpoint, region=options["region"], timeout_s=options["timeout_s"])
    store.check()
    prefix = parts.path.strip("/") or "sidestream"
    return StoreTier(store, context, name=NAME, prefix=prefix, capacity_bytes=options["capacity"])


KIND = TierKind(NAME, _open, ranks=True)
"""Objects in a bucket."""
