"""The ZeroMQ sockets that publish KV events, with vLLM's protocol: a PUB socket, and a ROUTER socket that sends batches
again to subscribers that missed them. Needs the extra `kv-events`.

    PUB     topic, sequence number, batch                  sequence numbers: 8 bytes, big-endian
    ROUTER  a subscriber sends the first sequence number that it wants, and receives
            sequence number, batch      for each batch since then that is still kept
            -1, nothing                 the end

`send` never blocks: a PUB socket drops messages for a subscriber that does not read. Replays (batches sent again) have
a thread of their own, because a ROUTER socket blocks while a subscriber reads slowly.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING

from sidestream.config import IPC, KVEventsConfig
from sidestream.errors import ConfigError

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger(__name__)

_SEQUENCE_BYTES = 8
_END = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)
# How long messages for connected subscribers are still sent after a close.
_LINGER_MS = 500
# A replay ends early if its subscriber reads nothing for this long.
_REPLAY_PATIENCE_MS = 5000


class KVEventSockets:
    """The bound sockets. `send` and `close` must not run at the same time."""

    def __init__(self, config: KVEventsConfig) -> None:
        """Bind the endpoints of `config`. Raises ConfigError if an endpoint cannot be bound or pyzmq is missing; then
        no socket is left open.
        """
        try:
            import zmq
        except ModuleNotFoundError as missing:
            raise ConfigError(
                "KV events on a socket need the package pyzmq: pip install 'sidestream[kv-events]'"
            ) from (missing)
        assert config.endpoint is not None
        self._topic = config.topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_batches)
        self._context = zmq.Context()
        self._replayer: threading.Thread | None = None
        try:
            self._publisher = self._context.socket(zmq.PUB)
            self._publisher.setsockopt(zmq.SNDHWM, config.buffer_batches)
            self._publisher.setsockopt(zmq.LINGER, _LINGER_MS)
            self.endpoint = _bind(self._publisher, config.endpoint, "endpoint")
            self.replay_endpoint: str | None = None
            if config.replay_endpoint is not None:
                router = self._context.socket(zmq.ROUTER)
                router.setsockopt(zmq.LINGER, 0)
                router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # without it, the socket drops messages to slow subscribers
                router.setsockopt(zmq.SNDTIMEO, _REPLAY_PATIENCE_MS)
                self.replay_endpoint = _bind(router, config.replay_endpoint, "replay_endpoint")
                self._replayer = threading.Thread(
                    target=self._serve_replays, args=(router,), name="sidestream-kv-replay", daemon=True
                )
                self._replayer.start()
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def send(self, sequence: int, batch: bytes) -> None:
        """Publish an encoded batch, and keep it for replays. Never blocks."""
        self._kept.append((sequence, batch))
        self._publisher.send_multipart((self._topic, sequence.to_bytes(_SEQUENCE_BYTES, "big"), batch))

    def close(self) -> None:
        """Close the sockets. Blocks the caller for at most half a second, while subscribers read the last messages."""
        self._publisher.close()
        self._context.term()  # ends the replays' thread, which closes its socket

    def _serve_replays(self, router: zmq.Socket[bytes]) -> None:
        import zmq

        with router:
            while True:
                try:
                    *envelope, first = router.recv_multipart()
                    self._replay(router, envelope, int.from_bytes(first, "big"))
                except zmq.ContextTerminated:
                    return
                except zmq.ZMQError as error:  # the subscriber has left, or does not read
                    logger.debug("a replay of KV events ended early: %s", error)

    def _replay(self, router: zmq.Socket[bytes], envelope: list[bytes], first: int) -> None:
        for sequence, batch in list(self._kept):  # a copy, because the publishing thread appends meanwhile
            if sequence >= first:
                router.send_multipart((*envelope, sequence.to_bytes(_SEQUENCE_BYTES, "big"), batch))
        router.send_multipart((*envelope, _END, b""))


def warn_if_open(sockets: KVEventSockets) -> None:
    """Log a warning for each endpoint that other machines can reach."""
    for endpoint in filter(None, (sockets.endpoint, sockets.replay_endpoint)):
        host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        if endpoint.startswith("tcp://") and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            logger.warning(
                "KV events on %s: anyone who reaches this machine can read the token ids of all prompts; give an "
                "address such as tcp://127.0.0.1:5557, or let only routers through",
                endpoint,
            )


def check_endpoints(config: KVEventsConfig | None) -> None:
    """Raise the ConfigError that KVEventSockets would raise now. Leaves no socket open."""
    if config is not None and config.endpoint is not None:
        KVEventSockets(config).close()


def _bind(opened: zmq.Socket[bytes], endpoint: str, option: str) -> str:
    """Bind the socket, and return the endpoint, with the chosen port in place of a `*`."""
    import zmq

    reason = "another process listens on it" if _is_taken(endpoint) else ""
    if not reason:
        try:
            opened.bind(endpoint)
        except zmq.ZMQError as error:
            reason = str(error)
    if reason:
        raise ConfigError(f"kv_events {option} is {endpoint}, which cannot be bound ({reason}): give another one")
    return opened.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def _is_taken(endpoint: str) -> bool:
    """Whether a process listens on this Unix socket. ZeroMQ's bind would not fail, but take the socket's path from that
    process.
    """
    if not endpoint.startswith(IPC):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(endpoint.removeprefix(IPC)) == 0
