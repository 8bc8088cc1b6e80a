"""One API process: serves HTTP on a socket that it inherits, with an engine in another process. Text and JSON are made
here alone.
"""

from __future__ import annotations

import faulthandler
import logging
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec

from sidestream.client.remote import RemoteClient
from sidestream.errors import SidestreamError
from sidestream.front_end import FrontEnd
from sidestream.garbage import settle_garbage
from sidestream.server.orders import ABORTED, DRAINED, LAST_WORDS_S, ORDERS_BYTES, READY, Orders
from sidestream.server.run import Running, serve
from sidestream.tokenizer import Tokenizer

log = logging.getLogger("sidestream.server")


def main(descriptor: int) -> None:
    """Serve until the supervisor at the other end of this socket says when to stop."""
    faulthandler.enable()
    line = socket.socket(fileno=descriptor)
    packed, descriptors, _, _ = socket.recv_fds(line, ORDERS_BYTES, 2)
    if not packed:  # the supervisor has gone
        sys.exit(1)
    orders = msgspec.msgpack.decode(packed, type=Orders)
    logging.basicConfig(level=orders.log_level, format=orders.log_format, datefmt=orders.log_dates)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        line.sendall(_serve(line, orders, *map(_socket, descriptors)))
    except SidestreamError as error:
        log.error("an API process cannot serve: %s", error)
        sys.exit(1)


def _socket(descriptor: int) -> socket.socket:
    return socket.socket(fileno=descriptor)


def _serve(line: socket.socket, orders: Orders, engine: socket.socket, listener: socket.socket) -> bytes:
    """What became of the last requests: DRAINED or ABORTED."""
    client = RemoteClient.connect(engine)
    backend = FrontEnd(client, Tokenizer.load(client.facts.model), model_name=client.facts.model_name)

    def obey(running: Running) -> None:
        while line.recv(1):
            running.stop()

    def ready(running: Running) -> None:
        threading.Thread(target=obey, args=(running,), name="sidestream-supervisor", daemon=True).start()
        client.listen()
        client.on_lost = threading.Timer(
            LAST_WORDS_S, running.stop
        ).start  # the supervisor starts another process, if the engine lives
        settle_garbage()  # a full collection would hold all streams up for a tenth of a second and more
        line.sendall(READY)

    # On the main thread, `serve` would handle signals: see `run_child`.
    with ThreadPoolExecutor(1, thread_name_prefix="sidestream-api") as thread:
        drained = thread.submit(serve, backend, orders.options, listener=listener, on_ready=ready).result()
    return DRAINED if drained else ABORTED
