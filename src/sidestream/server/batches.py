"""`/v1/files` and `/v1/batches`: the parts that an application with a directory for them needs."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from starlette.routing import Route
from starlette.types import ASGIApp

from sidestream.client.front_end import FrontEnd
from sidestream.server.batch_routes import batch_routes
from sidestream.server.batch_runner import BatchRunner
from sidestream.server.batch_store import BatchStore
from sidestream.server.body import BodyReader
from sidestream.server.rate_limits import RateLimits


class Batches:
    """The batches of a directory; see `BatchStore`."""

    def __init__(self, directory: str, most_bytes: int | None) -> None:
        """Raises ConfigError."""
        self._store = BatchStore(Path(directory), most_bytes)

    def routes(self, bodies: BodyReader, allowed_origins: Collection[str]) -> list[Route]:
        """The endpoints."""
        return batch_routes(self._store, bodies, allowed_origins)

    def runner(self, backend: FrontEnd, app: ASGIApp, limits: RateLimits | None) -> BatchRunner:
        """The runner of the batches, which sends their requests to `app`."""
        return BatchRunner(self._store, backend, app, limits.keys.named if limits else lambda name: None)
