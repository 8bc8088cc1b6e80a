"""Refusals by the engine, errors, and clients that leave: every end of a request except success."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import select
import socket
import threading
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import openai
import pytest

from proof.fake_backend import FakeBackend, FakeTokenizer, Script
from sidestream.config import SamplingParams
from sidestream.errors import ContextTooLong, EngineStopped, QueueFull, RequestRejected
from sidestream.server import ServerOptions, create_app
from sidestream.server.completions import generate_all
from sidestream.server.fields import Call
from sidestream.server.middleware import RequestRecord
from sidestream.types import NO_TOKEN_LEFT, CachedTokens, Delta

from .serving import ASK_LONG, HI, LONG, WAIT_S, head, read_to_end, request_lines, send, serving, warned


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "expected", "code"),
    [
        (RequestRejected("no", param="seed"), openai.BadRequestError, None),
        (ContextTooLong("prompt has 9 tokens, the model takes 8"), openai.BadRequestError, "context_length_exceeded"),
        (QueueFull("8 requests wait"), openai.RateLimitError, "rate_limit_exceeded"),
        (EngineStopped("stopping"), openai.InternalServerError, "engine_stopped"),
        (ZeroDivisionError("secret"), openai.InternalServerError, "internal_error"),
    ],
)
def test_a_refused_request_raises_the_clients_exception(
    stream: bool, refusal: Exception, expected: type[openai.APIStatusError], code: str | None
) -> None:
    with serving(FakeBackend(Script(refuse=refusal))) as served:
        with pytest.raises(expected) as failure:
            served.openai.chat.completions.create(model="fake", messages=HI, stream=stream)  # type: ignore[call-overload]
        assert failure.value.code == code
        assert "secret" not in str(failure.value)


def test_a_full_queue_is_a_429_with_retry_after() -> None:
    with serving(FakeBackend(Script(refuse=QueueFull("full"))), retry_after_s=3) as served:
        reply = served.chat()
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "3")


def test_one_refused_prompt_aborts_the_others() -> None:
    def script(prompt: str) -> Script:
        return Script(refuse=QueueFull("full")) if prompt == "b" else Script(hold_after=0)

    with serving(FakeBackend(script)) as served:
        assert served.text(prompt=["a", "b"]).status_code == 429
        (aborted,) = served.backend.aborted
        assert aborted.endswith(" 0")


def test_an_unexpected_error_is_logged_with_a_traceback_and_sent_without(caplog: pytest.LogCaptureFixture) -> None:
    with serving(FakeBackend(Script(refuse=ZeroDivisionError("secret")))) as served:
        reply = served.chat()
    assert reply.status_code == 500
    assert "secret" not in reply.text and "Traceback" not in reply.text
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None and isinstance(record.exc_info[1], ZeroDivisionError)
    assert record.getMessage().startswith(reply.headers["x-request-id"])
    assert reply.headers["x-request-id"] in reply.json()["error"]["message"]


def test_a_failure_during_a_stream_is_an_error_event_without_done() -> None:
    with serving(FakeBackend(Script(fail_after=3, failure=EngineStopped("the engine stops")))) as served:
        reply = served.chat(stream=True)
        assert reply.status_code == 200
        events = reply.text.split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "engine_stopped"
        assert "[DONE]" not in reply.text
        with (
            served.openai.chat.completions.create(model="fake", messages=HI, stream=True) as stream,
            pytest.raises(openai.APIError),
        ):
            list(stream)


def test_a_failure_before_a_whole_reply_is_an_error_reply() -> None:
    with serving(FakeBackend(Script(fail_after=3))) as served:
        assert served.chat().status_code == 500


def test_a_generation_without_a_finish_reason_is_an_error_reply() -> None:
    class Mumbling(FakeBackend):
        async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Delta, None]:
            yield Delta(0, "Hel", (1,), (), None, 1, CachedTokens())

    with serving(Mumbling()) as served:
        assert served.chat().status_code == 500
        assert "[DONE]" not in served.chat(stream=True).text


def test_options_that_forbid_every_token_are_a_400_with_the_reason() -> None:
    class Stuck(FakeBackend):
        async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Delta, None]:
            yield Delta(0, "a", (1,), (), None, 1, CachedTokens())
            yield Delta(0, "", (), (), "error", 1, CachedTokens(), error=NO_TOKEN_LEFT)

    with serving(Stuck()) as served:
        reply = served.chat()
        assert (reply.status_code, reply.json()["error"]["message"]) == (400, NO_TOKEN_LEFT)
        assert '"type":"invalid_request_error"' in served.chat(stream=True).text


@pytest.mark.parametrize(("ending", "code"), [("error", "internal_error"), ("abort", "engine_stopped")])
def test_a_sample_with_a_failing_finish_reason_is_an_error_reply(ending: str, code: str) -> None:
    class Failing(FakeBackend):
        async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Delta, None]:
            yield Delta(0, "", (), (), ending, 1, CachedTokens(), error="secret")

    with serving(Failing()) as served:
        reply = served.chat()
        assert reply.json()["error"]["code"] == code
        assert "secret" not in reply.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sidestream.server")
    with serving(FakeBackend(Script(hold_after=2))) as served:
        leaving = send(served, {"model": "fake", "messages": HI, "stream": stream, "n": 2})
        served.backend.wait_until(lambda fake: len(fake.held) == 1)
        leaving.close()
        served.backend.wait_until(lambda fake: fake.aborted == fake.held)
    (line,) = request_lines(caplog)
    assert f"status={200 if stream else 499} outcome=client_gone" in line
    assert not warned(caplog)


def test_a_client_that_leaves_aborts_all_its_prompts() -> None:
    with serving(FakeBackend(Script(hold_after=0))) as served:
        leaving = send(served, {"model": "fake", "prompt": ["a", "b", "c"]}, "/v1/completions")
        served.backend.wait_until(lambda fake: len(fake.held) == 3)
        leaving.close()
        served.backend.wait_until(lambda fake: sorted(fake.aborted) == sorted(fake.held))


def test_a_client_that_leaves_during_its_body_affects_no_other_client(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as served:
        leaving = served.connect()
        leaving.sendall(head(99) + b"{")
        leaving.close()
        assert served.text().status_code == 200
        assert len(served.backend.names) == 1
    assert not warned(caplog)


def test_a_client_that_does_not_read_delays_no_other_and_gets_its_whole_reply() -> None:
    with serving(FakeBackend(lambda prompt: LONG if prompt == "long" else Script())) as served:
        slow = send(served, ASK_LONG, "/v1/completions")
        served.backend.wait_until(lambda fake: len(fake.names) == 1)
        assert served.text(prompt="short").json()["choices"][0]["text"] == "Hello, world"
        assert served.backend.finished == served.backend.names[1:]
        with slow:
            received = read_to_end(slow)
        assert received.count(b"x" * LONG.token_bytes) == len(LONG.text) // LONG.token_bytes
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_slow_client_that_leaves_aborts_its_request() -> None:
    with serving(FakeBackend(LONG)) as served:
        slow = send(served, ASK_LONG, "/v1/completions")
        slow.recv(100)
        slow.close()
        served.backend.wait_until(lambda fake: len(fake.aborted) == 1)


def test_a_failed_request_is_aborted_before_its_error_is_raised() -> None:
    backend = FakeBackend()
    call = Call("text", ((1,), (2,)), SamplingParams(), priority=0, stream=False, include_usage=False)

    async def broken(index: int, delta: Delta) -> None:
        raise ZeroDivisionError

    async def run() -> None:
        with pytest.raises(ZeroDivisionError):
            await generate_all(backend, call, RequestRecord("r"), broken)
        assert sorted(backend.aborted) == ["r 0", "r 1"]

    asyncio.run(run())


def test_encoding_a_long_prompt_delays_no_other_client() -> None:
    health_was_answered = threading.Event()

    class SlowTokenizer(FakeTokenizer):
        def encode(self, text: str, **options: Any) -> list[int]:
            assert health_was_answered.wait(WAIT_S)
            return super().encode(text)

    backend = FakeBackend(max_model_len=1 << 20)
    backend.tokenizer = SlowTokenizer()
    with serving(backend) as served:
        waiting = send(served, {"model": "fake", "prompt": "a long one " * 1000}, "/v1/completions")
        assert served.http.get("/health").status_code == 200
        health_was_answered.set()
        with waiting:
            assert b"Hello, world" in read_to_end(waiting)


def test_short_prompts_are_encoded_on_the_event_loop_and_long_ones_in_a_thread() -> None:
    threads: list[threading.Thread] = []

    class WatchedTokenizer(FakeTokenizer):
        def encode(self, text: str, **options: Any) -> list[int]:
            threads.append(threading.current_thread())
            return super().encode(text)

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            threads.append(threading.current_thread())  # called by the request's task
            return super().decode(token_ids)

    for prompt, on_loop in (("short", True), ("a long one " * 1000, False)):
        threads.clear()
        backend = FakeBackend(max_model_len=1 << 20)
        backend.tokenizer = WatchedTokenizer()
        with serving(backend) as served:
            assert served.http.post("/v1/completions", json={"model": "fake", "prompt": prompt}).status_code == 200
        encoded, loop = threads[:2]
        assert (encoded is loop) == on_loop


def test_the_response_starts_before_any_event_of_any_prompt() -> None:
    """The first prompt's start is still being sent when the second prompt has news."""
    sent: list[str] = []
    body = [
        {"type": "http.request", "body": json.dumps({"model": "fake", "prompt": ["a", "b"], "stream": True}).encode()}
    ]

    async def receive() -> dict[str, Any]:
        return body.pop() if body else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        for _ in range(100 if message["type"] == "http.response.start" else 1):
            await asyncio.sleep(0)
        sent.append(message["type"])

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    asyncio.run(create_app(FakeBackend(), options=ServerOptions())(scope, receive, send))
    assert sent[0] == "http.response.start"
    assert set(sent[1:]) == {"http.response.body"}


def test_a_too_large_content_length_is_refused_before_the_body() -> None:
    with serving(max_body_bytes=1000) as served, served.connect() as announcing:
        announcing.sendall(head(1001))
        assert announcing.recv(12) == b"HTTP/1.1 413"


def test_a_too_long_chunked_body_is_refused_while_it_is_read() -> None:
    with serving(max_body_bytes=1000) as served, served.connect() as endless:
        endless.sendall(head(None))
        endless.sendall(b"3e9\r\n" + b"x" * 1001 + b"\r\n")  # and the last chunk never comes
        assert endless.recv(12) == b"HTTP/1.1 413"


def test_the_default_body_limit_grows_with_the_context_length() -> None:
    for tokens, bound in ((2048, (1 << 20) + 2048 * 64), (1 << 20, (1 << 20) + (64 << 20))):
        with serving(FakeBackend(max_model_len=tokens)) as served, served.connect() as announcing:
            announcing.sendall(head(bound + 1))
            _read_until(announcing, b"exceeds %d bytes" % bound)


def test_unfinished_bodies_have_a_total_bound_and_short_bodies_still_pass() -> None:
    size = 100_000
    unfinished = head(size) + b" " * (size - 1)
    with serving(max_body_bytes=size, max_buffered_bytes=size * 2) as served, contextlib.ExitStack() as opened:
        connections = [opened.enter_context(served.connect()) for _ in range(2)]
        for connection in connections:
            connection.sendall(unfinished)
        (refused, *_), _, _ = select.select(connections, [], [], WAIT_S)  # one and a half of these bodies may be held
        reply = _read_until(refused, b"too_many_bodies")
        assert reply.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in reply
        assert served.text().status_code == 200
        opened.close()
        while served.text(user="x" * (size - 1000)).status_code == 503:  # the server has not noticed yet
            pass


def test_a_body_of_exactly_the_limit_is_read() -> None:
    body = json.dumps({"model": "fake", "messages": HI}).encode()
    with serving(max_body_bytes=len(body)) as served:
        assert served.post_raw(body).status_code == 200
        assert served.post_raw(body + b" ").status_code == 413


def test_a_body_that_does_not_arrive_in_time_is_refused() -> None:
    with serving(body_timeout_s=0) as served, served.connect() as late:
        late.sendall(head(9) + b"{")
        assert late.recv(12) == b"HTTP/1.1 408"


def test_requests_need_the_right_key_and_health_needs_none() -> None:
    with serving(api_key="s3cret") as served:
        assert served.chat().status_code == 200
        for wrong in ("Bearer s3cre", "Bearer s3cret2", "Bearer", "Basic s3cret", "s3cret", "Bearer s3crét"):
            reply = served.http.get("/v1/models", headers={"authorization": wrong.encode()})
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key"), wrong
            assert "s3cret" not in reply.text
        nobody = {"authorization": ""}
        assert served.http.get("/metrics", headers=nobody).status_code == 401
        assert served.http.get("/nowhere", headers=nobody).status_code == 401
        assert served.http.get("/health", headers=nobody).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            served.openai.with_options(api_key="wrong").models.list()


def test_repr_shows_no_secret() -> None:
    assert "s3cret" not in repr(ServerOptions(api_key="s3cret", ssl_keyfile_password="s3cret"))


def test_each_reply_has_an_id_and_each_request_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sidestream.server")
    with serving() as served:
        replies = [
            served.chat(),
            served.chat(temperature=-1),
            served.http.get("/v1/%0Aforged"),
            served.chat(stream=True),
        ]
        served.http.get("/health")
    ids = [reply.headers["x-request-id"] for reply in replies]
    assert len(set(ids)) == 4
    lines = request_lines(caplog)
    assert [line.split()[0] for line in lines] == ids
    assert re.search(
        r"status=200 outcome=ok prompt_tokens=20 output_tokens=12 cached_tokens=0 ttft=[\d.]+s duration=[\d.]+s$",
        lines[0],
    )
    assert "status=400" in lines[1] and "ttft=-" in lines[1]
    assert not any("\n" in line for line in lines)


def _read_until(connection: socket.socket, word: bytes) -> bytes:
    reply = b""
    while word not in reply:
        piece = connection.recv(1 << 16)
        assert piece, reply
        reply += piece
    return reply
