"""The engine's own process: loads a model, serves its engine to front ends, and ends when its owner says so, or is
gone.
"""

from __future__ import annotations

import faulthandler
import logging
import socket
import sys
from typing import Any

from sidestream.client.engine_server import EngineServer, facts_of
from sidestream.client.messages import (
    Failure,
    Packer,
    Progress,
    Reply,
    Start,
    Started,
    Status,
    ToClient,
    from_front_end,
)
from sidestream.client.process import config_of
from sidestream.errors import EngineStopped, SidestreamError

log = logging.getLogger(__name__)

_READ_BYTES = 1 << 16


class _Owner:
    """The owner's end of the start: hears how far it is. Passed to the loader as its `Progress`."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.packer = Packer()
        self.unpacker = from_front_end()
        self._stage = ""
        self._total = 0

    def first_message(self) -> Start | None:
        """What to load; None: the owner has gone."""
        while data := self.connection.recv(_READ_BYTES):
            for message in self.unpacker.feed(data):
                if isinstance(message, Start):
                    return message
                raise EngineStopped(f"the first message is a {type(message).__name__}, not a Start")
        return None

    def send(self, message: ToClient) -> None:
        self.connection.sendall(self.packer.pack(message))

    def begin(self, stage: str, total_bytes: int | None) -> None:
        self._stage, self._total = stage, total_bytes or 0
        self.send(Progress(stage, 0, self._total, fetching=True))

    def reached(self, done_bytes: int) -> None:
        self.send(Progress(self._stage, done_bytes, self._total, fetching=True))

    def tell(self, what: str, done: int, total: int) -> None:
        self.send(Progress(what, done, total, fetching=False))


def main(descriptor: int) -> None:
    """Run an engine for the owner at the other end of this socket."""
    faulthandler.enable()
    owner = _Owner(socket.socket(fileno=descriptor))
    start = owner.first_message()
    if start is None:
        sys.exit(1)
    logging.basicConfig(level=start.log_level, **_layout(start))
    try:
        serve(start, owner)
    except SidestreamError as error:
        owner.send(Reply(0, Failure.of(error)))
        sys.exit(1)
    except BaseException as error:
        log.critical("the engine's process failed", exc_info=error)
        owner.send(Reply(0, Failure.of(error)))
        sys.exit(1)


def serve(start: Start, owner: _Owner) -> None:
    """Load what `start` names, serve it until the owner or a failure ends it, and close it."""
    from sidestream.loading import LoadedEngine, name_of

    loaded = LoadedEngine(
        start.model,
        config_of(start.config),
        timeline=start.timeline,
        check_order=start.check_order,
        progress=owner,
        tell=owner.tell,
    )
    engine = loaded.engine
    facts = facts_of(engine, model=loaded.path, model_name=name_of(start.model))
    server = EngineServer(engine, facts, owner.connection, packer=owner.packer, unpacker=owner.unpacker)
    server.tell_owner(Started(facts))
    failure = server.run(lambda drain_s: loaded.close(drain_s=drain_s))
    health = engine.health()
    if health.status == "failed":
        server.tell_owner(Status(health.status, health.detail))
    server.finish(Reply(0, failure))
    if health.status == "failed":
        sys.exit(1)


def _layout(start: Start) -> dict[str, Any]:
    if start.log_format is None:
        return {}
    layout, dates = start.log_format
    return {"format": layout, "datefmt": dates or None}
