"""What a browser lets a web page of another origin do with the server: nothing, unless the origin is allowed."""

from __future__ import annotations

import httpx
import pytest

from .serving import Served, serving, warned

PAGE = "http://localhost:3000"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    "authorization": "",  # a preflight never carries a key
}


def _preflight(served: Served, **headers: str) -> httpx.Response:
    return served.http.options("/v1/chat/completions", headers=PREFLIGHT | headers)


def _allowed(reply: httpx.Response) -> str | None:
    return reply.headers.get("access-control-allow-origin")


def test_a_preflight_of_an_allowed_origin_passes_without_the_key() -> None:
    with serving(api_key="k", allowed_origins=("https://other.example", PAGE)) as served:
        reply = _preflight(served)
        assert (reply.status_code, _allowed(reply)) == (200, PAGE)
        assert {"GET", "POST", "DELETE"} <= set(reply.headers["access-control-allow-methods"].split(", "))
        for name in ("authorization", "content-type", "x-stainless-lang"):
            assert name in reply.headers["access-control-allow-headers"].lower()


def test_every_reply_and_error_names_the_allowed_origin() -> None:
    with serving(api_key="k", allowed_origins=(PAGE,)) as served:
        served.http.headers["origin"] = PAGE
        replies = [
            served.chat(),
            served.chat(stream=True),
            served.chat(temperature=-1),
            served.http.get("/v1/models", headers={"authorization": "Bearer wrong"}),
            served.http.get("/nowhere"),
        ]
        assert [reply.status_code for reply in replies] == [200, 200, 400, 401, 404]
        assert [_allowed(reply) for reply in replies] == [PAGE] * 5
        assert "x-request-id" in replies[0].headers["access-control-expose-headers"].lower()


def test_another_origin_is_not_allowed() -> None:
    with serving(allowed_origins=(PAGE,)) as served:
        reply = _preflight(served, origin="http://evil.example")
        assert (reply.status_code, _allowed(reply)) == (400, None)
        assert _allowed(served.http.get("/v1/models", headers={"origin": "http://evil.example"})) is None


def test_without_allowed_origins_no_origin_is_allowed() -> None:
    with serving() as served:
        assert _allowed(_preflight(served)) is None
        assert _allowed(served.http.get("/v1/models", headers={"origin": PAGE})) is None


def test_a_star_allows_every_origin_and_logs_a_warning_without_a_key(caplog: pytest.LogCaptureFixture) -> None:
    with serving(allowed_origins=("*",), api_key="k") as served:
        assert _allowed(_preflight(served)) == "*"
        assert _allowed(served.http.get("/v1/models", headers={"origin": PAGE})) == "*"
    assert not warned(caplog)
    with serving(allowed_origins=("*",)):
        pass
    assert any("any web page" in line for line in warned(caplog))
