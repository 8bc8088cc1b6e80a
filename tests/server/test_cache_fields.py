"""What requests say about the KV cache, in the spellings of several servers, and the end of a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sidestream.config import CacheOptions

from .serving import HI, Served, serving
from .test_api_keys import table


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as served:
        yield served


def options(served: Served, path: str = "/v1/chat/completions", **request: Any) -> CacheOptions | None:
    """What the engine is told."""
    prompt = {"/v1/responses": {"input": "hi"}}.get(path, {"messages": HI, "max_tokens": 3})
    headers = request.pop("headers", {})
    reply = served.http.post(path, json={"model": "fake", **prompt, **request}, headers=headers)
    assert reply.status_code == 200, reply.text
    return served.backend.params[-1].cache


def test_a_request_that_says_nothing_has_no_options(served: Served) -> None:
    assert options(served) is None


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"session_id": "s"}, CacheOptions(session="s")),
        ({"headers": {"X-Session-ID": "s"}}, CacheOptions(session="s")),
        ({"headers": {"X-Session-ID": "h"}, "session_id": "s"}, CacheOptions(session="s")),
        ({"prompt_cache_key": "s"}, CacheOptions(session="s")),
        ({"prompt_cache_key": "k", "session_id": "s"}, CacheOptions(session="s")),
        ({"agent_hint": {"session_id": "s", "parent_session_id": "p"}}, CacheOptions(session="s")),
        (
            {"agent_hint": {"session_id": "s", "cache_control": {"type": "ephemeral", "ttl": 60}}},
            CacheOptions(session="s", session_ttl_s=60.0),
        ),
        (
            {"prompt_cache_key": "s", "prompt_cache_retention": "24h"},
            CacheOptions(session="s", session_ttl_s=3600.0),  # the server's bound
        ),
        ({"prompt_cache_key": "s", "prompt_cache_retention": "in_memory"}, CacheOptions(session="s")),
        (
            {"kv_transfer_params": {"max_load_tokens": 0, "max_offload_tokens": 64, "kv_load_tiers": ["disk"]}},
            CacheOptions(max_load_tokens=0, max_offload_tokens=64, load_tiers=("disk",)),
        ),
    ],
    ids=str,
)
def test_each_spelling_reaches_the_engine(served: Served, request_: dict[str, Any], expected: CacheOptions) -> None:
    assert options(served, **request_) == expected


@pytest.mark.parametrize("fields", [{"prompt_cache_retention": "24h"}, {"kv_transfer_params": {"remote_host": "a"}}])
def test_fields_that_ask_for_nothing_here_have_no_effect(served: Served, fields: dict[str, Any]) -> None:
    assert options(served, **fields) is None


def test_a_response_is_part_of_the_session_that_its_cache_key_names(served: Served) -> None:
    assert options(served, "/v1/responses", prompt_cache_key="s") == CacheOptions(session="s")


def test_a_message_is_part_of_the_session_of_the_header(served: Served) -> None:
    headers = {"X-Session-ID": "s", "anthropic-version": "2023-06-01"}
    assert options(served, "/v1/messages", headers=headers) == CacheOptions(session="s")


def test_without_time_for_hints_there_are_no_sessions() -> None:
    with serving(max_hint_ttl_s=0) as served:
        assert options(served, headers={"X-Session-ID": "s"}) is None
        assert options(served, session_id="s", kv_transfer_params={"max_load_tokens": 1}) == CacheOptions(
            max_load_tokens=1, max_ttl_s=0.0
        )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"session_id": ""}, "session_id"),
        ({"session_id": "a", "agent_hint": {"session_id": "b"}}, "session_id"),
        ({"agent_hint": {"cache_control": {"ttl": 3601}}}, "agent_hint.cache_control.ttl"),
        ({"agent_hint": {"priority": 1}}, "agent_hint.priority"),
        ({"prompt_cache_retention": "48h"}, "prompt_cache_retention"),
        ({"kv_transfer_params": {"max_load_tokens": -1}}, "max_load_tokens"),
        ({"kv_transfer_params": {"kv_load_tiers": "disk"}}, "kv_transfer_params.kv_load_tiers"),
    ],
    ids=str,
)
def test_bad_fields_are_refused_by_name(served: Served, fields: dict[str, Any], param: str) -> None:
    reply = served.chat(**fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_a_header_that_is_too_long_is_refused(served: Served) -> None:
    reply = served.http.post(
        "/v1/completions", json={"model": "fake", "prompt": "hi"}, headers={"x-session-id": "x" * 1025}
    )
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x-session-id")


def test_a_session_is_closed_by_its_name(served: Served) -> None:
    reply = served.http.post("/close_session", json={"session_id": "s"})
    assert (reply.status_code, reply.json()) == (200, {"session_id": "s", "tokens": 4, "blocks_by_tier": {"device": 1}})
    reply = served.http.post("/close_session", json={"session_id": "unknown"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "session_not_found")
    assert served.http.post("/close_session", json={}).status_code == 400


def test_a_key_closes_sessions_of_its_own_salt_only(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(table("ann", cache_salt="a") + table("bob"))
    with serving(api_keys=keys) as served:
        for key in ("ann", "bob"):
            headers = {"authorization": f"Bearer {key}"}
            assert served.http.post("/close_session", json={"session_id": "s"}, headers=headers).status_code == 200
            options(served, session_id="s", headers=headers)
        assert [salt for _, salt in served.backend.closed] == served.backend.cache_salts
        assert served.backend.cache_salts[0] != ""
