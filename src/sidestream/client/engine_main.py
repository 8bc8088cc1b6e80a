"""The engine's process: loads a model and serves its engine to front ends, which handle text and HTTP.

Its owner is the process that started it. The engine's process ends when the owner closes it, or when the owner ends.
"""

from __future__ import annotations

import logging
import socket
import sys

from sidestream.client.engine_server import EngineServer, engine_info
from sidestream.client.messages import Failure, Progress, Reply, Start, Started, Status, ToClient, decoder_of_requests
from sidestream.errors import EngineStopped, SidestreamError
from sidestream.processes.child import config_of
from sidestream.processes.frames import FrameEncoder
from sidestream.processes.log_stream import start_logging
from sidestream_kv.device.garbage import collections_paused
from sidestream_kv.device.thread_limits import refused_threads_named

log = logging.getLogger(__name__)

_READ_BYTES = 1 << 16


class _Owner:
    """Connection to the owner. Reports the progress of the start; the loader calls it as its `Progress`."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.encoder = FrameEncoder()
        self.decoder = decoder_of_requests()
        self._stage = ""
        self._total = 0

    def first_message(self) -> Start | None:
        """The owner's first message, a `Start`; None if the owner has ended."""
        while data := self.connection.recv(_READ_BYTES):
            for message in self.decoder.feed(data):
                if isinstance(message, Start):
                    return message
                raise EngineStopped(f"the first message is a {type(message).__name__}, not a Start")
        return None

    def send(self, message: ToClient) -> None:
        self.connection.sendall(self.encoder.encode(message))

    def begin(self, stage: str, total_bytes: int | None) -> None:
        self._stage, self._total = stage, total_bytes or 0
        self.send(Progress(stage, 0, self._total, fetching=True))

    def reached(self, done_bytes: int) -> None:
        self.send(Progress(self._stage, done_bytes, self._total, fetching=True))

    def on_stage(self, stage: str, done: int, total: int) -> None:
        self.send(Progress(stage, done, total, fetching=False))


def main(descriptor: int) -> None:
    """Run an engine for its owner. `descriptor`: file descriptor of the socket to the owner."""
    owner = _Owner(socket.socket(fileno=descriptor))
    start = owner.first_message()
    if start is None:
        sys.exit(1)
    start_logging(start.log_level, *(start.log_format or ()))
    try:
        with refused_threads_named():
            serve(start, owner)
    except SidestreamError as error:
        owner.send(Reply(0, Failure.of(error)))
        sys.exit(1)
    except BaseException as error:
        log.critical("the engine's process failed", exc_info=error)
        owner.send(Reply(0, Failure.of(error)))
        sys.exit(1)


def serve(start: Start, owner: _Owner) -> None:
    """Load the model, serve its engine until the owner closes it or it fails, and close it."""
    with collections_paused():
        from sidestream.engine.loading import LoadedEngine
    from sidestream.models.directory import name_of

    loaded = LoadedEngine(
        start.model,
        config_of(start.config),
        timeline=start.timeline,
        check_order=start.check_order,
        progress=owner,
        on_stage=owner.on_stage,
    )
    engine = loaded.engine
    info = engine_info(engine, model=loaded.path, model_name=name_of(start.model))
    server = EngineServer(engine, info, owner.connection, encoder=owner.encoder, decoder=owner.decoder)
    server.send_to_owner(Started(info))
    failure = server.run(lambda drain_s: loaded.close(drain_s=drain_s))
    health = engine.health()
    if health.status == "failed":
        server.send_to_owner(Status(health.status, health.detail))
    server.finish(Reply(0, failure))
    if health.status == "failed":
        sys.exit(1)
