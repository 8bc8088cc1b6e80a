"""Measures how much slow readers slow down other clients, and how much memory a server uses for slow readers."""

from __future__ import annotations

import multiprocessing
import re
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Self

from bench.serving.answers import tokens_per_second, whole_run
from bench.serving.clients import Clients, Target, allow_open_files
from bench.serving.server import Server, ended_by_sigterm, fetch
from bench.serving.workload import Loads, Workload
from proof.report import Figure, at_least, at_most
from sidestream.errors import ConfigError, SidestreamError

_MODEL = "measured"
_READ_PERIOD_S = 1.0
_RECEIVE_BUFFER = 4096  # bytes; small, so that the kernel does not buffer a whole answer for a slow reader
_LOGPROBS = 5  # slow readers ask for logprobs, which makes their answers ten times as large
_PATIENCE_S = 600.0
_POLL_S = 0.5


def measure_slow_readers(
    path: str,
    *,
    slow: int,
    connections: int,
    load: Loads,
    arguments: Sequence[str],
    on_progress: Callable[[str], None],
) -> list[Figure]:
    """Tokens per second of the clients of `load` while `slow` other clients (slow readers) read one byte per second.
    Divided by the tokens per second without slow readers: the mean of a measurement before and a measurement after it.

    The measurement begins when the engine has generated all tokens of the slow readers, so the server then holds the
    bytes that they have not read. `connections` is the total number of connections; connections without requests are
    idle. Raises ConfigError if `connections` is too small.
    """
    idle = connections - slow - load.loop.clients
    if idle < 0:
        raise ConfigError(
            f"--connections is {connections}, fewer than {slow} slow readers and {load.loop.clients} clients: give more"
        )
    on_progress("starting the server")
    with ended_by_sigterm(), Server(path, [*arguments, "--served-model-name", _MODEL]) as server:
        target = Target.at(server.url, _MODEL)
        with Clients(target, most=load.loop.clients) as clients, _Crowd(target) as crowd:
            crowd.hold(idle)
            clients.run(load.warm)
            rates = []
            for number, readers in enumerate((0, slow, 0)):
                if readers:
                    on_progress(f"sending the requests of {slow} slow readers")
                    ended = _num_ended(server.url)
                    crowd.ask(
                        Workload("slow", slow, 1, load.loop.prompt_tokens, load.loop.output_tokens, load.loop.ids)
                    )
                    _wait_until_drawn(server.url, ended + slow)
                on_progress(f"{load.loop.clients} clients, {readers} slow readers")
                run = _with_seed(load.loop, f"others {number}")
                answers = clients.run(run)
                rates.append(tokens_per_second(answers, whole_run(answers)))
                if readers:
                    memory, cut = server.front_end_bytes(), crowd.leave()
    return [
        Figure("others_tok_s_with_slow_readers", 2 * rates[1] / (rates[0] + rates[2]), "ratio", at_least(0.95)),
        Figure("others_tok_s", rates[1], "tokens/s"),
        Figure("others_tok_s_before", rates[0], "tokens/s"),
        Figure("others_tok_s_after", rates[2], "tokens/s"),
        Figure("front_end_rss_gib", memory / 2**30, "GiB", at_most(1)),
        Figure("slow_readers", slow, "connections"),
        Figure("slow_readers_cut", cut, "connections"),
        Figure("idle_connections", idle, "connections"),
    ]


def _with_seed(load: Workload, seed: str) -> Workload:
    return Workload(seed, load.clients, load.rounds, load.prompt_tokens, load.output_tokens, load.ids)


def _num_ended(url: str) -> int:
    page = fetch(f"{url}/metrics").decode()
    return int(
        sum(float(value) for value in re.findall(r"^sidestream_requests_total\{.*\} (\S+)$", page, re.MULTILINE))
    )


def _wait_until_drawn(url: str, num_ended: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while (now := _num_ended(url)) < num_ended:
        if time.monotonic() > deadline:
            raise SidestreamError(
                f"{num_ended - now} requests of slow readers did not end in the engine within {_PATIENCE_S:g} s"
            )
        time.sleep(_POLL_S)


class _Crowd:
    """A process that holds idle connections and slow readers. A context manager."""

    def __init__(self, target: Target) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_hold, args=(theirs, target), daemon=True)
        self._process.start()
        theirs.close()

    def hold(self, idle: int) -> None:
        """Open `idle` idle connections. If the server closes one of them, it is opened again."""
        self._order(("idle", idle))

    def ask(self, load: Workload) -> None:
        """Open a connection for each client of `load`, send one request on each, and read the answers at one byte per
        second.
        """
        self._order(("slow", load))

    def leave(self) -> int:
        """Close the slow readers' connections; returns how many of them the server had closed before."""
        return self._order(("leave", None))

    def _order(self, order: tuple[str, object]) -> int:
        self._pipe.send(order)
        try:
            done: int = self._pipe.recv()
        except EOFError:
            raise SidestreamError("the process that holds slow readers died: its error is above") from None
        return done

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.join()


def _hold(pipe: Connection, target: Target) -> None:
    """Main function of the process: executes the commands of the other process, and each second reads one byte for each
    slow reader.
    """
    allow_open_files()
    idle: list[socket.socket] = []
    slow: list[socket.socket] = []
    cut, next_s = 0, time.monotonic()
    while True:
        while pipe.poll(max(0.0, next_s - time.monotonic())):
            try:
                kind, value = pipe.recv()
            except EOFError:
                return
            if kind == "idle":
                idle = [_connect(target) for _ in range(value)]
            elif kind == "slow":
                slow, cut = [_ask(target, value, client) for client in range(value.clients)], 0
            else:
                for reader in slow:
                    reader.close()
                slow = []
            pipe.send(cut)
        next_s = time.monotonic() + _READ_PERIOD_S
        closed = {reader for reader in slow if _read_one(reader) == b""}
        cut += len(closed)
        slow = [reader for reader in slow if reader not in closed]
        idle = [_connect(target) if _read_one(one) == b"" else one for one in idle]


def _connect(target: Target) -> socket.socket:
    one = socket.socket()
    one.setsockopt(
        socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER
    )  # set before the connection, because the TCP handshake fixes the window scale
    one.connect((target.host, target.port))
    one.setblocking(False)
    return one


def _ask(target: Target, load: Workload, client: int) -> socket.socket:
    one = _connect(target)
    one.setblocking(True)
    one.sendall(target.completion(load.prompt(client, 0), load.output_tokens, logprobs=_LOGPROBS))
    one.setblocking(False)
    return one


def _read_one(one: socket.socket) -> bytes | None:
    """Read one byte. Returns b"" if the server has closed the connection, and None if no byte has arrived."""
    try:
        return one.recv(1)
    except BlockingIOError:
        return None
    except OSError:
        return b""
