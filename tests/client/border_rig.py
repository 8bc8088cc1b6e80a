"""An engine rig with front ends in front of it: in process, or over sockets to a server that runs on a thread of this
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from engine_rig import PATIENCE_S, Rig

from sidestream.client.base import EngineClient, OutputQueue
from sidestream.client.engine_server import Connection, EngineServer, engine_info
from sidestream.client.in_process import InProcessClient
from sidestream.client.messages import Attach, Close, Reply, decoder_of_outputs, decoder_of_requests
from sidestream.client.remote import RemoteClient
from sidestream.config import SamplingParams
from sidestream.processes.frames import FrameEncoder
from sidestream.types import Delta

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run it on an event loop of its own, with a bound."""
    return asyncio.run(asyncio.wait_for(work, PATIENCE_S))


async def read_all(answer: OutputQueue, samples: int = 1) -> list[Delta]:
    """News until so many samples have ended."""
    news: list[Delta] = []
    while samples:
        news.append(await answer.read())
        samples -= news[-1].finish_reason is not None
    return news


def tokens_of(news: Sequence[Delta], index: int = 0) -> list[int]:
    return [token for delta in news if delta.index == index for token in delta.token_ids]


async def ask(client: EngineClient, prompt: Sequence[int], max_tokens: int = 8, **options: Any) -> list[Delta]:
    return await read_all(client.submit(prompt, SamplingParams(max_tokens=max_tokens, **options)), options.get("n", 1))


class InProcess:
    """Clients in the engine's process."""

    refuses_at_submit = True

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.clients: list[InProcessClient] = []

    def connect(self) -> InProcessClient:
        self.clients.append(InProcessClient(self.rig.engine))
        return self.clients[-1]

    def left(self) -> dict[str, int]:
        """What is kept of requests, by its name."""
        return {f"requests of client {number}": len(client._requests) for number, client in enumerate(self.clients)}

    def close(self) -> None:
        self.rig.close()


class Remote:
    """Clients over sockets to a server, which is closed with the engine, as in a process of its own."""

    refuses_at_submit = False

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.clients: list[RemoteClient] = []
        self.failure: Any = None
        self._sockets: list[socket.socket] = []
        self._encoder = FrameEncoder()
        self._owner, theirs = socket.socketpair()
        self.info = engine_info(rig.engine, model="toy", model_name="toy")
        self.server = EngineServer(rig.engine, self.info, theirs, encoder=FrameEncoder(), decoder=decoder_of_requests())
        self.thread = threading.Thread(target=self._run, name="server")
        self.thread.start()

    def attach(self, *, send_buffer: int | None = None) -> socket.socket:
        """A connection to the server; `send_buffer`: how much the server can send before it is read."""
        ours, theirs = socket.socketpair()
        if send_buffer is not None:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        ours.settimeout(PATIENCE_S)
        with theirs:
            socket.send_fds(self._owner, [self._encoder.encode(Attach())], [theirs.fileno()])
        self._sockets.append(ours)
        return ours

    def connect(self, **options: Any) -> RemoteClient:
        self.clients.append(RemoteClient.connect(self.attach(**options)))
        return self.clients[-1]

    @property
    def front_ends(self) -> tuple[Connection, ...]:
        return self.server._front_ends

    def left(self) -> dict[str, int]:
        """What is kept of requests and calls on both sides, by its name."""
        kept: dict[str, Any] = {}
        for number, client in enumerate(self.clients):
            kept |= {f"streams of client {number}": client._streams, f"calls of client {number}": client._calls}
        for number, front_end in enumerate(self.front_ends):
            kept[f"tokens of front end {number}"] = front_end._columns.tokens
            for name in ("_ids", "_details", "_unsent"):
                kept[f"{name} of front end {number}"] = getattr(front_end, name)
        return {name: len(things) for name, things in kept.items()}

    def close(self) -> None:
        """As the owner does, and wait for the end."""
        with contextlib.suppress(OSError):
            self._owner.sendall(self._encoder.encode(Close(0.0)))
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), "the server does not end"

    def tidy(self) -> None:
        self.close()
        self._owner.close()
        for client in self.clients:
            client.close()
        for connection in self._sockets:
            connection.close()

    def last_words(self) -> list[Any]:
        """What the owner was told, once the server has ended."""
        data = b""
        while more := self._owner.recv(1 << 16):
            data += more
        return list(decoder_of_outputs().feed(data))

    def _run(self) -> None:
        failure = self.server.run(lambda drain_s: self.rig.close(drain_s=drain_s))
        self.server.finish(Reply(0, failure))


Border = InProcess | Remote
KINDS: dict[str, type[Border]] = {"in process": InProcess, "remote": Remote}


@contextlib.contextmanager
def border(kind: str, **options: Any) -> Iterator[Any]:
    """A rig behind a border, where nothing of any request is left at the end, on either side and in the engine."""
    rig = Rig(**options)
    made = KINDS[kind](rig)
    try:
        yield made
        check_nothing_left(made)
    finally:
        made.tidy() if isinstance(made, Remote) else made.close()
    rig.check_idle()


def check_nothing_left(made: Border) -> None:
    """All requests have ended, and neither side remembers any."""
    if made.rig.engine.health().status == "ok":
        made.rig.turn_until(lambda: made.rig.engine.unfinished == 0)
        made.rig.turn()  # the last news were delivered
    made.rig.turn_until(lambda: not any(made.left().values()))
