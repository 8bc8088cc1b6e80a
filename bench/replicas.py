"""Replicas on Ray Serve: the share of conversations' prompt tokens that come from a cache, and the outcomes of requests
when a replica is killed.

Requests go through HTTP; a header names the conversation (session). Needs the extra `ray`.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.serving.server import descendants
from proof.report import Figure, at_least, at_most
from sidestream.errors import ConfigError, SidestreamError
from sidestream_kv.device.kinds import CPU

_MODEL = "model"
_AT_ONCE = 4
"""Requests at the same time: two for each of two replicas."""
_ANSWER_TOKENS = 8
_KILL_TOKENS = 24
_KILL_AFTER_S = 3.0
_LOAD_S = 12.0
_HUNG_S = 60.0
"""A request that does not end within this time counts as hung. An answer takes a few seconds."""
_LONGEST_FAILURE_S = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one request.

    kind      `answered`, `refused` (HTTP error), `ended` (the stream ended with an error event), `cut` (the connection
              or stream ended without an error event) or `hung`
    status    HTTP status; 0: the server sent none
    failed_s  seconds from the kill to the failure, or from the request if it began after the kill; 0 for an answer
    """

    kind: str
    status: int = 200
    failed_s: float = 0.0


def measure(model: str, *, conversations: int, turns: int, on_progress: Callable[[str], None]) -> list[Figure]:
    """Measure the share of cached prompt tokens with one replica, and with two replicas for each router. Then kill one
    of two replicas and record the outcomes of requests.
    """
    shares: dict[str, float] = {}
    outcomes: list[Outcome] = []
    prefix = [(2, "prefix")] if find_spec("pyarrow") else []  # the router `prefix` imports pyarrow
    for count, router in [(1, "session"), (2, "load"), *prefix, (2, "session")]:
        name = router if count > 1 else "one"
        with _replicas(model, count, router) as url:
            shares[name] = _hit_share(url, conversations, turns, partial(_note, on_progress, count, router))
            if name == "session":
                on_progress("a replica is killed")
                outcomes = _kill_one(url)
    return [*_share_figures(shares), *kill_figures(outcomes)]


def _note(on_progress: Callable[[str], None], count: int, router: str, text: str) -> None:
    on_progress(f"{count} replicas, routed by {router}: {text}")


def _share_figures(shares: dict[str, float]) -> list[Figure]:
    relative = {router: share / shares["one"] for router, share in shares.items()}
    figures = [Figure("ray_prefix_hit_share", relative["session"], "of one replica's", at_least(0.9))]
    if "prefix" in relative:
        figures.append(Figure("prefix_router_hit_share", relative["prefix"], "of one replica's", at_least(0.9)))
    return [
        *figures,
        Figure("load_router_hit_share", relative["load"], "of one replica's"),
        Figure("one_replica_hit_share", shares["one"], "of prompt tokens"),
    ]


def kill_figures(outcomes: Sequence[Outcome]) -> list[Figure]:
    """The figures of the requests during the kill. A failure is clear if the client gets a 503, or an error event at
    the end of the stream.
    """
    failures = [outcome for outcome in outcomes if outcome.kind not in ("answered", "hung")]

    def count(kind: str) -> int:
        return sum(outcome.kind == kind for outcome in outcomes)

    unclear = sum(not (failure.kind == "ended" or failure.status == 503) for failure in failures)
    return [
        Figure("killed_hung", count("hung"), "requests", at_most(0)),
        Figure("killed_failed_unclearly", unclear, "requests", at_most(0)),
        Figure(
            "killed_slowest_failure_s",
            max((f.failed_s for f in failures), default=0.0),
            "s",
            at_most(_LONGEST_FAILURE_S),
        ),
        Figure("killed_answered", count("answered"), "requests"),
        Figure("killed_refused_503", sum(f.kind == "refused" and f.status == 503 for f in failures), "requests"),
        Figure("killed_streams_ended", count("ended"), "requests"),
    ]


@contextmanager
def _replicas(model: str, count: int, router: str) -> Iterator[str]:
    """Context manager: starts `count` replicas, each with one core and one compute thread, and yields their URL. Raises
    ConfigError if Ray is not installed.
    """
    if find_spec("ray") is None:
        raise ConfigError("replicas need the package ray: pip install 'sidestream[ray]'")
    from sidestream.ray import serve_locally

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    application = {
        "model": model,
        "engine": {"device": CPU, "compute_threads": 1, "kv_memory": "1GiB"},
        "server": {"drain_s": 5.0, "served_model_name": _MODEL},
        "router": router,
        "replicas": {"num_replicas": count},
    }
    # Ray writes to standard output, which is for the report.
    with redirect_stdout(sys.stderr), serve_locally(application, port=port, num_cpus=count + 2) as url:
        yield url


def _hit_share(url: str, conversations: int, turns: int, on_progress: Callable[[str], None]) -> float:
    """Share of cached tokens in the prompt tokens of all requests. All conversations take their first turn, then all
    take their second turn, and so on.
    """
    told = [
        [{"role": "system", "content": f"You are assistant {number}. Answer in a few words."}]
        for number in range(conversations)
    ]
    cached = prompts = 0

    def turn(number: int) -> dict[str, Any]:
        status, body = _post(url, _chat(told[number], _ANSWER_TOKENS), f"conversation-{number}")
        if status != 200:
            raise SidestreamError(f"a conversation was refused with status {status}: {body[:300]!r}")
        reply: dict[str, Any] = json.loads(body)
        return reply

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for round_number in range(turns):
            on_progress(f"turn {round_number + 1} of {turns}")
            for number, history in enumerate(told):
                question = f"Question {round_number} of conversation {number}: which animals of the sea sing, and why?"
                history.append({"role": "user", "content": question})
            for history, reply in zip(told, threads.map(turn, range(conversations)), strict=True):
                history.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
                prompts += reply["usage"]["prompt_tokens"]
                cached += reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached / prompts


def _chat(messages: Sequence[dict[str, str]], tokens: int, **more: Any) -> bytes:
    fields = {"model": _MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
    return json.dumps(fields).encode()


def _connection(url: str, timeout_s: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)


def _headers(session: str) -> dict[str, str]:
    return {"content-type": "application/json", "x-session-id": session}


def _post(url: str, body: bytes, session: str) -> tuple[int, bytes]:
    connection = _connection(url, _HUNG_S * 5)
    try:
        connection.request("POST", "/v1/chat/completions", body, _headers(session))
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def _kill_one(url: str) -> list[Outcome]:
    """Send requests for several seconds, half of them streamed, and kill a replica meanwhile. Returns the outcomes."""
    ends_s = time.monotonic() + _LOAD_S
    killed_s = [ends_s]
    outcomes: list[Outcome] = []

    def load(worker: int) -> None:
        number = 0
        while time.monotonic() < ends_s:
            number += 1
            outcomes.append(_outcome(url, f"{worker}-{number}", killed_s, stream=worker % 2 == 0))

    workers = [threading.Thread(target=load, args=(worker,)) for worker in range(2 * _AT_ONCE)]
    for thread in workers:
        thread.start()
    time.sleep(_KILL_AFTER_S)
    victim = min(replica_pids())
    killed_s[0] = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    for thread in workers:
        thread.join()
    return outcomes


def _outcome(url: str, session: str, killed_s: Sequence[float], *, stream: bool) -> Outcome:
    begun_s = time.monotonic()

    def failed(kind: str, status: int) -> Outcome:
        return Outcome(kind, status, time.monotonic() - max(begun_s, killed_s[0]))

    connection, status = _connection(url, _HUNG_S), 0
    body = _chat([{"role": "user", "content": f"Tell story {session}."}], _KILL_TOKENS, stream=stream)
    try:
        connection.request("POST", "/v1/chat/completions", body, _headers(session))
        reply = connection.getresponse()
        status, text = reply.status, reply.read()
    except TimeoutError:
        return failed("hung", status)
    except (OSError, http.client.HTTPException):
        return failed("cut", status)
    finally:
        connection.close()
    if status != 200:
        return failed("refused", status)
    if not stream or text.endswith(b"data: [DONE]\n\n"):
        return Outcome("answered")
    return failed("ended" if b'data: {"error":' in text else "cut", status)


def replica_pids() -> list[int]:
    """Process ids of the replicas of the deployment `Engines` that this process has started."""
    # Ray sets the processes' titles: ray::SERVE_REPLICA::…#Engines#…, or ray::ServeReplica:…:Engines.… during a call.
    return [pid for pid in descendants(os.getpid()) if re.match(rb"ray::S.*\bEngines\b", _command_of(pid))]


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""  # the process has ended
