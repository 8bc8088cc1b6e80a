"""Replicas on Ray Serve. What needs Ray runs on two real replicas of a tiny model: `make test-ray`."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import openai
import pytest

from bench.replicas import Outcome, kill_figures, replica_pids
from proof.tiny_models import tiny_model_dir
from sidestream.errors import ConfigError
from sidestream.ray import APP_NAME, RayOptions, _prompt_of, build_app

# Ray and what it imports warn of their own code.
real = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"model": "m", "rooter": "session"}, "no argument rooter; did you mean router?"),
        ({}, "missing 1 required positional argument: 'model'"),
        ({"model": "m", "router": "sesion"}, "no router sesion; did you mean session?"),
        ({"model": "m", "engine": {"max_runing": 3}}, "no engine option max_runing; did you mean max_running?"),
        ({"model": "m", "engine": {"offload": {"hst": 1}}}, "no offload option hst"),
        ({"model": "m", "server": {"drain_s": -1}}, "drain_s is -1"),
        ({"model": "m", "server": {"port": 8000}}, "server has port: leave it out"),
        ({"model": "m", "server": {"page": True}}, "replicas have no page"),
        ({"model": "m", "server": ["drain_s"]}, r"server is \['drain_s'\]: give a mapping"),
        ({"model": "m", "queue_timeout_s": 0}, r"queue_timeout_s is 0: give a number of seconds in \(0, 3600\]"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_app(args)


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'sidestream\[ray\]'"):
        build_app({"model": "m"})


def test_replicas_serve_no_page() -> None:
    assert RayOptions("m").server_options("r1").page is False


def test_the_prompt_of_a_turn_begins_with_the_previous_prompt() -> None:
    first = b'{"model": "m", "seed": 1, "messages": [{"role": "user", "content": "Why"}]}'
    second = b'{"model": "m", "seed": 2, "messages": [{"role": "user", "content": "Why"}, {"role": "user"}]}'
    assert _prompt_of(second).startswith(_prompt_of(first).removesuffix("]"))
    assert _prompt_of(b'{"prompt": "whales"}') == "whales"
    for empty in (b"", b"[]", b"{", b'{"prompt": ""}'):
        assert _prompt_of(empty)


def test_a_failure_without_a_503_or_an_error_event_is_unclear() -> None:
    outcomes = [
        Outcome("answered"),
        Outcome("refused", 503, 0.5),
        Outcome("refused", 500, 0.25),
        Outcome("ended", 200, 1.5),
        Outcome("cut", 200, 0.1),
        Outcome("hung", 0, 60.0),
    ]
    assert {figure.name: figure.value for figure in kill_figures(outcomes)} == {
        "killed_hung": 1,
        "killed_failed_unclearly": 2,
        "killed_slowest_failure_s": 1.5,
        "killed_answered": 1,
        "killed_refused_503": 1,
        "killed_streams_ended": 1,
    }


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two replicas of a tiny model."""
    pytest.importorskip("ray", reason="needs the extra `ray`: make test-ray")
    from sidestream.ray import serve_locally

    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    model = tiny_model_dir("llama", tmp_path_factory.mktemp("models") / "tiny", seed=1)
    application = {
        "model": str(model),
        "engine": {"device": "cpu", "compute_threads": 1, "kv_memory": "16MiB"},
        "server": {"drain_s": 20.0},
        "replicas": {"num_replicas": 2},
    }
    with serve_locally(application, port=port, num_cpus=4) as url:
        yield url


def _client(url: str, session: str = "") -> openai.OpenAI:
    headers = {"x-session-id": session} if session else {}
    return openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, default_headers=headers, timeout=60)


def _stream(client: openai.OpenAI, tokens: int) -> openai.Stream[openai.types.Completion]:
    return client.completions.create(
        model="tiny", prompt="a", max_tokens=tokens, stream=True, extra_body={"ignore_eos": True}
    )


def _replica_of(url: str, session: str) -> str:
    with httpx.Client() as http:
        reply = http.post(
            f"{url}/v1/completions",
            json={"model": "tiny", "prompt": "a", "max_tokens": 1},
            headers={"x-session-id": session},
            timeout=60,
        )
    assert reply.status_code == 200, reply.text
    assert len(reply.headers.get_list("x-request-id")) == 1
    return str(reply.headers["x-sidestream-replica"])


@real
def test_a_session_stays_on_its_replica_and_sessions_use_both(url: str) -> None:
    sessions = [f"session-{number}" for number in range(12)]
    first = [_replica_of(url, session) for session in sessions]
    assert [_replica_of(url, session) for session in sessions] == first
    assert len(set(first)) == 2


@real
def test_a_second_turn_reuses_the_kv_of_the_first(url: str) -> None:
    prompt = "Call me Ishmael. Some years ago, never mind how long precisely. " * 4
    with _client(url, "turns") as client:
        usages = [client.completions.create(model="tiny", prompt=prompt, max_tokens=1).usage for _ in range(2)]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    assert cached[0] == 0
    assert cached[1] > 0.8 * usages[1].prompt_tokens


@real
def test_a_stream_is_delivered_piece_by_piece(url: str) -> None:
    with _client(url) as client:
        times = [time.monotonic() for _ in _stream(client, 200)]
    assert len(times) > 100
    # Collected somewhere, they would come within a few milliseconds of each other at the end.
    assert len({round(moment, 2) for moment in times}) > 10


@real
def test_replies_of_the_api_pass_through_with_status_and_labels(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60) as http:
        assert http.get("/health").json()["status"] == "ok"
        refused = http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": -2})
        assert refused.status_code == 400 and "max_tokens" in refused.json()["error"]["message"]
        assert http.post("/v1/completions", content=b"{", headers={"content-type": "text/plain"}).status_code == 415
        metrics = http.get("/metrics")
    assert f'replica="{metrics.headers["x-sidestream-replica"]}"' in metrics.text


@real
def test_the_node_exports_the_metrics_of_all_replicas(url: str) -> None:
    import ray

    address = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"
    expected = {_replica_of(url, f"session-{number}") for number in range(12)}
    deadline = time.monotonic() + 40
    found: set[str] = set()
    while found != expected:
        assert time.monotonic() < deadline, f"only the metrics of {found} of {expected} are exported"
        time.sleep(0.5)
        lines = [line for line in httpx.get(address).text.splitlines() if line.startswith("ray_sidestream_steps_total")]
        found = {match[1] for line in lines if (match := re.search(r'replica="(\w+)"', line))}


@real
def test_a_client_that_leaves_ends_its_request(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60) as http:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1500, "stream": True, "ignore_eos": True}
        session = {"x-session-id": "leaver"}
        with http.stream("POST", "/v1/completions", json=body, headers=session) as reply:
            next(reply.iter_lines())
        deadline = time.monotonic() + 10
        while 'finish_reason="abort"' not in http.get("/metrics", headers=session).text:
            assert time.monotonic() < deadline, "the request was not aborted"
            time.sleep(0.1)


@real
def test_draining_refuses_new_requests_with_503_and_waits_for_running_ones(url: str) -> None:
    from ray import serve

    ingress = serve.get_app_handle(APP_NAME)
    with _client(url) as client:
        running = _stream(client, 300)
        next(running)
        drained = ingress.drain.remote(30.0)
        with pytest.raises(openai.InternalServerError, match="shutting down") as refused:
            while True:  # the drain is on its way
                client.completions.create(model="tiny", prompt="a", max_tokens=1)
        assert (refused.value.status_code, refused.value.code) == (503, "draining")
        assert [chunk.choices[0].finish_reason for chunk in running][-1] == "length"
    assert drained.result() is True
    ingress.reconfigure.remote({"draining": False}).result()
    _replica_of(url, "afterwards")


@real
def test_a_killed_replica_ends_its_requests_with_clear_errors_and_is_replaced(url: str) -> None:
    outcomes: list[str] = []

    names = [f"kill-{number}" for number in range(20)]
    replicas = {_replica_of(url, name) for name in names}

    begun = threading.Barrier(7)

    def stream(session: str) -> None:
        try:
            with _client(url, session) as client:
                pieces = _stream(client, 1500)
                next(pieces)
                begun.wait(30)
                for _ in pieces:
                    pass
            outcomes.append("answered")
        except openai.InternalServerError as error:
            outcomes.append(f"{error.status_code}")
        except openai.APIError as error:
            outcomes.append(error.code or str(error))

    # Three streams on each of the replicas.
    sessions = [[name for name in names if _replica_of(url, name) == replica][:3] for replica in replicas]
    threads = [threading.Thread(target=stream, args=(name,)) for name in itertools.chain(*sessions)]
    for thread in threads:
        thread.start()
    begun.wait(30)
    killed = min(replica_pids())
    os.kill(killed, signal.SIGKILL)
    killed_s = time.monotonic()
    for thread in threads:
        thread.join(60)
    assert sorted(outcomes) == ["answered"] * 3 + ["replica_lost"] * 3
    assert time.monotonic() - killed_s < 60
    for name in names:
        _replica_of(url, name)  # the other replica takes over
