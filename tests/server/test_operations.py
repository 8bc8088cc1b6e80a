"""Operations over HTTP: who may send them, their replies, and what they refuse."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator

import httpx
import pytest

from proof.fake_backend import FakeBackend, Script
from sidestream.errors import CallTimeout
from sidestream.server import ServerOptions
from sidestream.types import CachedTokens, Delta

from .serving import Served, head, serving

BODY = b'{"model": "fake", "prompt": "hi"}'

CANCELLED = Delta(0, "", (), (), "abort", 1, CachedTokens(), "the request was cancelled")
WITH_BODY = ("/update_weights_from_disk", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
OPERATIONS = ("/reset_prefix_cache", "/flush", "/pause", "/resume", *WITH_BODY)


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(admin_key="admin") as served:
        yield served


def _as(served: Served, key: str, path: str) -> httpx.Response:
    return served.http.post(path, headers={"authorization": f"Bearer {key}"})


@pytest.mark.parametrize("api_key", [None, "user"])
@pytest.mark.parametrize("path", OPERATIONS)
def test_without_an_admin_key_operations_are_off_and_the_error_names_it(api_key: str | None, path: str) -> None:
    with serving(api_key=api_key) as served:
        reply = _as(served, "user", path)
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "operations_off")
    assert "--admin-key" in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", OPERATIONS)
def test_the_admin_key_opens_operations_and_the_users_key_does_not(path: str) -> None:
    opened = 415 if path in WITH_BODY else 200
    with serving(api_key="user", admin_key="admin") as served:
        assert [_as(served, key, path).status_code for key in ("user", "wrong", "admin")] == [401, 401, opened]


def test_the_admin_key_opens_the_paths_of_users_which_it_does_not_close() -> None:
    with serving(api_key="user", admin_key="admin") as served:
        codes = [
            served.http.get("/v1/models", headers={"x-api-key": key}).status_code for key in ("user", "admin", "none")
        ]
        assert codes == [200, 200, 200]  # the client sends the users' key as its authorization
        served.http.headers.pop("authorization")
        codes = [served.http.get("/v1/models", headers={"x-api-key": key}).status_code for key in ("admin", "none")]
        assert codes == [200, 401]
    with serving(admin_key="admin") as served:
        assert served.http.get("/v1/models").status_code == 200


def test_replies_say_what_was_done(served: Served) -> None:
    def post(path: str) -> object:
        reply = _as(served, "admin", path)
        assert reply.status_code == 200, reply.text
        return reply.json()

    assert post("/reset_prefix_cache") == {"done": True, "dropped": {"device": 1}}
    assert post("/reset_prefix_cache?tier=host&timeout_s=5") == {"done": True, "dropped": {"host": 1}}
    assert post("/flush") == {"done": True, "left": {}}
    assert post("/pause") == {"paused": True}
    assert served.http.get("/health").json()["detail"] == "paused"
    assert post("/resume") == {"paused": False}


def test_new_weights_are_read_from_the_path_of_the_body(served: Served) -> None:
    def post(body: object) -> httpx.Response:
        return served.http.post(
            "/update_weights_from_disk?timeout_s=9", json=body, headers={"authorization": "Bearer admin"}
        )

    assert post({"model_path": "/models/trained"}).json()["success"] is True
    assert served.backend.model_paths == ["/models/trained"]
    for body, param in (({"model_path": "missing"}, "model_path"), ({}, "model_path"), ({"path": "a"}, "path")):
        assert (post(body).status_code, post(body).json()["error"]["param"]) == (400, param)


def test_a_flush_that_takes_too_long_is_a_504_with_what_is_left(served: Served) -> None:
    served.backend.left = {"disk writes": 3}
    reply = _as(served, "admin", "/flush?timeout_s=0")
    assert (reply.status_code, reply.json()) == (504, {"done": False, "left": {"disk writes": 3}})


def test_a_reset_that_takes_too_long_is_a_504(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def too_long(tier: str | None, *, timeout_s: float) -> dict[str, int]:
        raise CallTimeout(f"not done in {timeout_s} s")

    monkeypatch.setattr(served.backend, "reset_prefix_cache", too_long)
    reply = _as(served, "admin", "/reset_prefix_cache?timeout_s=3")
    assert (reply.status_code, reply.json()["error"]["message"]) == (504, "not done in 3.0 s")


def test_a_request_is_cancelled_by_the_id_of_its_header() -> None:
    with serving(FakeBackend(Script(hold_after=1)), admin_key="admin") as served, served.connect() as connection:
        connection.sendall(head(len(BODY), more="X-Request-Id: job/7\r\n") + BODY)
        served.backend.wait_until(lambda fake: fake.held == ["job/7"])
        admin = {"authorization": "Bearer admin"}
        replies = [
            served.http.delete(f"/v1/requests/{name}", headers=admin) for name in ("job/7", "job%2F7", "job", "job%207")
        ]
    assert [reply.status_code for reply in replies] == [200, 200, 404, 404]
    assert replies[0].json() == {"id": "job/7", "cancelled": 1}
    assert replies[2].json()["error"]["code"] == "request_not_found"


def test_a_cancelled_request_gets_a_499(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    async def cancelled(*_: object, **__: object) -> AsyncGenerator[Delta, None]:
        yield CANCELLED

    monkeypatch.setattr(served.backend, "generate", cancelled)
    reply = served.chat()
    error = {"code": "request_cancelled", "message": "the request was cancelled", "param": None}
    assert (reply.status_code, reply.json()["error"]) == (499, error | {"type": "invalid_request_error"})


def test_replies_have_the_request_id_of_the_header_and_a_bad_one_is_a_400(served: Served) -> None:
    good, bad = (served.http.get("/v1/models", headers={"x-request-id": given}) for given in ("a-1", "a 1"))
    assert (good.status_code, good.headers["x-request-id"]) == (200, "a-1")
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "x-request-id")


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("tier=gpu", "tier is 'gpu': this engine has device, host"),
        ("timeout_s=-1", "timeout_s is '-1': give seconds in [0, 600]"),
        ("timeout_s=nan", "timeout_s is 'nan': give seconds in [0, 600]"),
        ("tier=host&tier=device", "the query has tier twice: give it once"),
        ("reset_external=true", "no query parameter reset_external: known are tier, timeout_s"),
    ],
)
def test_a_wrong_query_is_refused_by_name(served: Served, query: str, said: str) -> None:
    reply = _as(served, "admin", f"/reset_prefix_cache?{query}")
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, said)


def test_repr_shows_no_admin_key() -> None:
    assert "s3cret" not in repr(ServerOptions(admin_key="s3cret"))
