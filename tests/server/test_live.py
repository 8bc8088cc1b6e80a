"""`/metrics/stream`: what a sample has, who gets it, and what it costs when nobody watches."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from proof.fake_backend import FakeBackend
from sidestream.errors import EngineStopped
from sidestream.server import live
from sidestream.types import Health
from sidestream_kv.metrics import MetricsSnapshot, Recent

from .serving import WAIT_S, Served, read_to_end, serving

GET = b"GET /metrics/stream HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PERIOD_S", 0.01)


class Counted(FakeBackend):
    """Counts the samples that are taken of it."""

    samples = 0

    async def recent_spans(self, since: int) -> Recent:
        self.samples += 1
        return await super().recent_spans(since)


@contextlib.contextmanager
def watching(served: Served) -> Iterator[Iterator[dict[str, Any]]]:
    """The samples of a new viewer."""
    with served.http.stream("GET", "/metrics/stream") as reply:
        if reply.status_code != 200:
            reply.read()
        assert reply.status_code == 200, reply.text
        yield (json.loads(line.removeprefix("data: ")) for line in reply.iter_lines() if line)


def until(samples: Iterator[dict[str, Any]], wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + WAIT_S
    for sample in samples:
        if wanted(sample):
            return sample
        assert time.monotonic() < deadline
    raise AssertionError("the stream has ended")


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_sample_has_requests_tiers_and_what_was_saved() -> None:
    backend = FakeBackend()
    count, put = backend.metrics.inc, backend.metrics.set
    put("requests_running", 3)
    put("requests_waiting", 1)
    count("requests_total", 2, "stop")
    count("cached_tokens_total", 64, "host")
    count("cached_tokens_total", 36, "device")
    put("kv_token_bytes", 1000)
    count("prefill_measured_tokens_total", 500)
    count("prefill_measured_seconds_total", 2)
    put("tier_blocks", 5, "host")
    put("tier_bytes", 5000, "host")
    put("tier_ready_bytes", 9000, "host")
    put("tier_blocks", 7, "disk")
    put("tier_works", 0, "disk")
    put("tier_turned_down", 1, "disk")
    count("tier_saved_seconds_total", 3, "disk")
    count("tier_lost_seconds_total", 0.5, "disk")
    count("transfer_bytes_total", 640, "load")
    count("transfers_total", 4, "load", "done")
    with serving(backend, replica="r1") as served, watching(served) as samples:
        sample = next(samples)
    assert (sample["model"], sample["replica"], sample["health"]["status"]) == ("fake", "r1", "ok")
    assert sample["requests"] == {"running": 3, "waiting": 1, "ended": {"stop": 2}, "preempted": 0}
    assert sample["tokens"]["cached"] == {"host": 64, "device": 36}
    assert sample["saved"] == {"tokens": 100, "bytes": 100_000, "seconds": 0.4}
    unknown = {"saved_s": None, "lost_s": None, "turned_down": False}
    assert sample["tiers"]["host"] == {"blocks": 5, "bytes": 5000, "room_bytes": 9000, "works": None} | unknown
    loads = {"saved_s": 3, "lost_s": 0.5, "turned_down": True}
    assert sample["tiers"]["disk"] == {"blocks": 7, "bytes": 0, "room_bytes": None, "works": False} | loads
    assert sample["transfers"] == {"load": {"bytes": 640, "done": 4}}


def test_before_the_first_prefill_no_time_was_saved_that_is_known() -> None:
    backend = FakeBackend()
    backend.metrics.inc("cached_tokens_total", 64, "host")
    with serving(backend) as served, watching(served) as samples:
        sample = next(samples)
    assert sample["saved"]["seconds"] is None and sample["prefill_tokens_per_s"] is None


def test_rates_and_means_are_of_the_time_between_two_snapshots() -> None:
    metrics = FakeBackend().metrics
    metrics.observe("step_seconds", 9.0)
    metrics.observe("accept_length", 4.0, "ngram")
    metrics.inc("draft_tokens_total", 8, "ngram")
    before = metrics.snapshot()
    metrics.inc("output_tokens_total", 30)
    metrics.observe_all("step_seconds", {0.01: 1, 0.03: 1})
    metrics.observe("accept_length", 2.0, "ngram")
    found = live.figures(before, metrics.snapshot(), 2.0, [])
    assert found["last"]["output_tokens_per_s"] == 15
    assert found["last"]["step_seconds"] == pytest.approx(0.02)
    assert found["mean"]["step_seconds"] == pytest.approx(9.04 / 3)
    assert found["last"]["ttft_seconds"] is None
    drafts = found["drafts"]["ngram"]
    assert (drafts["drafted"], drafts["last_accept_length"], drafts["accept_length"]) == (8, 2, 3)
    assert drafts["lengths"][:4] == [0, 1, 0, 1]


def test_the_engine_threads_turn_is_the_mean_of_its_spans() -> None:
    spans = [
        ("engine", "plan and launch", 0, 1_000_000),
        ("engine", "plan and launch", 0, 3_000_000),
        ("engine", "wait for the step", 0, 9_000_000),
        ("compute", "commit", 0, 5_000_000),
    ]
    nothing = MetricsSnapshot({}, {})
    turn = live.figures(nothing, nothing, 1.0, spans)["engine_thread"]
    assert turn == {"plan_s": 0.002, "wait_s": 0.009, "commit_s": None}


def test_a_sample_has_only_the_spans_since_the_one_before() -> None:
    backend = FakeBackend()
    with serving(backend) as served, watching(served) as samples:
        next(samples)
        now = time.perf_counter_ns()
        backend.spans.record("load", "load 4 blocks", now - 3_000_000, now)
        found = until(samples, lambda sample: sample["timeline"]["spans"])["timeline"]
        assert found["spans"] == [["load", "load 4 blocks", (now - 3_000_000) // 1000, 3000]]
        assert found["now_us"] >= now // 1000
        assert not next(samples)["timeline"]["spans"]


def test_the_backend_is_sampled_once_for_all_viewers_and_not_without_them() -> None:
    backend = Counted()
    with serving(backend) as served:
        assert (backend.samples, backend.spans.until_ns) == (0, 0)
        with watching(served) as one, watching(served) as other:
            next(other)
            before = backend.samples
            first = [next(one)["time"] for _ in range(20)]
            second = [next(other)["time"] for _ in range(20)]
            assert len(set(first) & set(second)) > 10
            assert backend.samples - before < 35
        wait_for(lambda: not _sampled_within(backend, 0.1))


def _sampled_within(backend: Counted, seconds: float) -> bool:
    before = backend.samples
    time.sleep(seconds)
    return backend.samples > before


def test_a_viewer_that_reads_nothing_delays_no_other_and_then_gets_the_newest() -> None:
    backend = FakeBackend()
    backend.status = Health("ok", "x" * (1 << 20))  # fills the buffers of both ends soon
    with serving(backend) as served, served.connect() as slow:
        slow.sendall(GET)
        with watching(served) as samples:
            for _ in range(40):
                next(samples)
            backend.status = Health("ok", "the newest")
            until(samples, lambda sample: sample["health"]["detail"] == "the newest")
        received, missed = bytearray(), b"the newest"
        while missed not in received:
            received += slow.recv(1 << 20)
        assert received.count(b"data: ") < 30


def test_viewers_beyond_the_bound_are_refused_until_one_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_VIEWERS", 2)
    with serving() as served:
        with watching(served) as one, watching(served):
            next(one)
            with served.http.stream("GET", "/metrics/stream") as refused:
                assert refused.status_code == 503
                refused.read()
        assert refused.json()["error"]["code"] == "too_many_viewers"
        assert "2 viewers" in refused.json()["error"]["message"] and refused.headers["retry-after"]
        wait_for(lambda: _admitted(served))


def _admitted(served: Served) -> bool:
    with served.http.stream("GET", "/metrics/stream") as reply:
        return reply.status_code == 200


def test_a_drain_ends_the_streams_at_once_with_a_reason() -> None:
    with serving(drain_s=60.0) as served, served.connect() as viewer:
        viewer.sendall(GET)
        assert viewer.recv(1 << 16)
        began = time.monotonic()
        served.running.stop()
        assert b"shutting down" in read_to_end(viewer)
        assert served.drained.get(timeout=WAIT_S)
        assert time.monotonic() - began < 30


def test_an_engine_that_has_ended_leaves_a_sample_with_its_health(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()

    async def ended() -> MetricsSnapshot:
        raise EngineStopped("the engine's process has ended")

    with serving(backend) as served, watching(served) as samples:
        next(samples)
        monkeypatch.setattr(backend, "metrics_snapshot", ended)
        backend.status = Health("failed", "killed")
        found = until(samples, lambda sample: "requests" not in sample)
    assert found["health"] == {"status": "failed", "detail": "killed", "paused": False}


def test_figures_and_chat_need_the_key_and_the_page_does_not() -> None:
    with serving(api_key="k") as served:
        bare = httpx.Client(base_url=served.running.url, timeout=WAIT_S)
        with bare:
            assert [bare.get(path).status_code for path in ("/", "/page.js", "/page.css")] == [200, 200, 200]
            assert bare.get("/metrics/stream").status_code == 401
            assert bare.post("/v1/chat/completions", json={}).status_code == 401
        with watching(served) as samples:
            assert next(samples)["model"] == "fake"


def test_without_the_page_there_are_neither_its_files_nor_its_figures() -> None:
    paths = ("/", "/page.js", "/page.css", "/metrics/stream")
    with serving(page=False, api_key="k") as served:
        assert {served.http.get(path).status_code for path in paths} == {404}
        assert {served.http.get(path, headers={"authorization": ""}).status_code for path in paths} == {401}


def test_the_page_reads_nothing_from_elsewhere_and_has_no_inline_script() -> None:
    with serving(root_path="/llm") as served:
        page = served.http.get("/llm/")
        assert served.http.get("/llm").text == page.text
        script, style = served.http.get("/llm/page.js"), served.http.get("/llm/page.css")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "script-src 'self'" in policy
    assert 'src="/llm/page.js"' in page.text and 'href="/llm/page.css"' in page.text
    assert "<script>" not in page.text and " style=" not in page.text and "onclick" not in page.text
    for text in (page.text.replace("http://www.w3.org/2000/svg", ""), script.text, style.text):
        assert "http:" not in text and "https:" not in text
    assert "innerHTML" not in script.text and "insertAdjacentHTML" not in script.text
    assert script.headers["content-type"].startswith("text/javascript")
    assert style.headers["content-type"].startswith("text/css")
