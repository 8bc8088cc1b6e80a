"""An API process: serves HTTP on an inherited socket, and does all work on text and JSON. The engine is in another
process. The supervisor, the process that the user starts, starts and stops API processes.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec

from sidestream.client.front_end import FrontEnd
from sidestream.client.pulse import PULSE_S
from sidestream.client.remote import RemoteClient
from sidestream.errors import SidestreamError
from sidestream.processes.child import at_end_of_owner
from sidestream.processes.garbage import freeze_gc_heap
from sidestream.processes.log_stream import start_logging
from sidestream.server.app import served_constants
from sidestream.server.completions import text_handle
from sidestream.server.control import ABORTED, CONFIG_BYTES, DRAINED, GRACE_S, READY, ApiProcessConfig
from sidestream.server.response_store import ResponseStore
from sidestream.server.run import RunningServer, serve
from sidestream.server.text_work import ProcessBounds, TextWork
from sidestream.tokenizer import Tokenizer
from sidestream_kv.device.thread_limits import refused_threads_named

log = logging.getLogger("sidestream.server")


def main(descriptor: int) -> None:
    """Serve until the supervisor sends STOP. `descriptor`: the socket to the supervisor."""
    supervisor = socket.socket(fileno=descriptor)
    packed, descriptors, _, _ = socket.recv_fds(supervisor, CONFIG_BYTES, 3)
    if not packed:  # the supervisor has ended
        sys.exit(1)
    config = msgspec.msgpack.decode(packed, type=ApiProcessConfig)
    start_logging(config.log_level, config.log_format, config.log_dates)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        with refused_threads_named():
            engine, listener = map(_socket, descriptors[:2])
            supervisor.sendall(_serve(supervisor, config, engine, listener, descriptors[2]))
    except SidestreamError as error:
        log.error("an API process cannot serve: %s", error)
        sys.exit(1)


def _socket(descriptor: int) -> socket.socket:
    return socket.socket(fileno=descriptor)


def _serve(
    supervisor: socket.socket,
    config: ApiProcessConfig,
    engine: socket.socket,
    listener: socket.socket,
    limits: int | None = None,
) -> bytes:
    """Serve until STOP. Returns DRAINED or ABORTED."""
    client = RemoteClient.connect(engine)
    backend = FrontEnd(client, Tokenizer.load(client.info.model), model_name=client.info.model_name)
    served = served_constants(backend, config.options)
    bounds = ProcessBounds.for_context(served.max_model_len)
    # Forks, so it comes before the threads of the server.
    text = TextWork(text_handle(backend.tokenizer, served), room=lambda: backend.room, bounds=bounds)
    store = ResponseStore(config.options, config.responses)
    at_end_of_owner(lambda: shutil.rmtree(config.responses, ignore_errors=True))

    def wait_for_stop(server: RunningServer) -> None:
        while supervisor.recv(1):
            server.stop()

    def on_ready(server: RunningServer) -> None:
        threading.Thread(target=wait_for_stop, args=(server,), name="sidestream-supervisor", daemon=True).start()
        client.listen()
        client.request_metrics()
        _keep_asking(asyncio.get_running_loop(), client)
        # Without its connection to the engine, this process stops after GRACE_S. If the engine still runs, the
        # supervisor then starts another API process.
        client.on_lost = threading.Timer(GRACE_S, server.stop).start
        freeze_gc_heap()  # a full garbage collection would stop all streams for a tenth of a second or longer
        supervisor.sendall(READY)

    # On the main thread, `serve` would handle signals, but an API process ignores them (see `run_child`).
    with ThreadPoolExecutor(1, thread_name_prefix="sidestream-api") as thread:
        drained = thread.submit(
            serve, backend, config.options, listener=listener, on_ready=on_ready, text=text, store=store, limits=limits
        ).result()
    return DRAINED if drained else ABORTED


def _keep_asking(loop: asyncio.AbstractEventLoop, client: RemoteClient) -> None:
    """Ask the engine every second whether it still answers."""
    client.health()
    loop.call_later(PULSE_S, _keep_asking, loop, client)
