"""Explanations of the prefix cache in the replies of all APIs, and how much they tell."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from proof.fake_backend import FakeBackend, Script
from sidestream.cli.app import app
from sidestream.errors import EngineStopped
from sidestream.server.cache_explanation import REASONS, as_text
from sidestream.types import CachedTokens, CacheExplanation, Relative, Stretch

from .serving import HI, Served, serving

FOUND = CacheExplanation(
    19,
    4,
    (
        Stretch(0, 8, "reused"),
        Stretch(8, 12, "evicted", "device", 2.5),
        Stretch(12, 16, "other_salt"),
        Stretch(16, 18, "not_seen"),
        Stretch(18, 19, "last_block"),
    ),
    Relative(10, 3.0, 8, tuple(b"istant: "), tuple(b"is other")),
    7,
    60.0,
    complete=False,
)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "user: hi\nassistant: "},
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 8},
}
TIERS = {"device": 4, "host": 4, "disk": 0}


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(_backend()) as served:
        yield served


def _backend() -> FakeBackend:
    backend = FakeBackend(Script(cached=CachedTokens(device=4, host=4)))
    backend.explanation = FOUND
    return backend


def _post(served: Served, path: str, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    reply = served.http.post(path, json={"model": "fake", **BODIES[path], **fields}, headers=headers)
    if not fields.get("stream"):
        return reply.json()
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    last = [event for event in map(json.loads, events) if "usage" in event or "response" in event][-1]
    return last.get("response", last)


def _tiers(usage: Any) -> Any:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
    return details["cached_tokens_by_tier"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_every_api_tells_cached_tokens_by_tier_and_explains_on_demand(served: Served, path: str, stream: bool) -> None:
    options: Any = {"stream_options": {"include_usage": True}} if stream and "completions" in path else {}
    reply = _post(served, path, stream=stream, **options)
    assert (_tiers(reply["usage"]), "cache_explanation" in reply) == (TIERS, False)
    assert served.backend.explained == []
    for headers, fields in ({}, {"explain_cache": True}), ({"X-Explain-Cache": "1"}, {}):
        reply = _post(served, path, headers, stream=stream, **options, **fields)
        assert _tiers(reply["usage"]) == TIERS
        assert reply["cache_explanation"]["stretches"][0]["reason"] == "reused"
    assert len(served.backend.explained) == 2
    assert served.backend.explained == served.backend.names[-2:]


def test_by_default_only_whole_blocks_and_no_other_salts_are_told(served: Served) -> None:
    found = _post(served, "/v1/completions", explain_cache=True)["cache_explanation"]
    assert found["nearest"] == {
        "seconds_ago": 3.0, "shared_tokens": 8, "first_different_block": 2, "text": "\nass",
    }  # fmt: skip
    assert [(one["start"], one["stop"], one["reason"]) for one in found["stretches"]] == [
        (0, 8, "reused"), (8, 12, "evicted"), (12, 18, "not_seen"), (18, 19, "last_block"),
    ]  # fmt: skip
    assert "other" not in json.dumps(found["nearest"])
    assert found["remembered"] == {"requests": 7, "seconds": 60.0, "all": False}


@pytest.mark.parametrize(("options", "key"), [({"explain_cache": "text"}, ""), ({"admin_key": "admin"}, "admin")])
def test_the_option_or_the_admin_key_shows_tokens_and_other_salts(options: dict[str, Any], key: str) -> None:
    with serving(_backend(), **options) as served:
        headers = {"authorization": f"Bearer {key}"} if key else None
        found = _post(served, "/v1/completions", headers, explain_cache=True)["cache_explanation"]
    near = found["nearest"]
    assert (near["position"], near["token"], near["other_token"]) == (10, ord("t"), ord(" "))
    assert (near["text_before"], near["text"], near["other_text"]) == ("is", "tant: ", " other")
    assert [one["reason"] for one in found["stretches"]][2:4] == ["other_salt", "not_seen"]


def test_explanations_that_are_off_are_a_403_that_names_the_option() -> None:
    with serving(_backend(), explain_cache="off") as served:
        reply = served.text(explain_cache=True)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "explanations_off")
        assert "--explain-cache" in reply.json()["error"]["message"]
        assert served.text().status_code == 200


def test_a_header_of_another_value_is_a_400(served: Served) -> None:
    reply = served.http.post(
        "/v1/completions", json={"model": "fake", "prompt": "hi"}, headers={"x-explain-cache": "7"}
    )
    assert reply.status_code == 400
    assert "x-explain-cache" in reply.json()["error"]["message"]


def test_each_prompt_of_a_request_has_an_explanation(served: Served) -> None:
    reply = served.text(prompt=["ab", "cd"], explain_cache=True).json()
    assert len(reply["cache_explanation"]) == 2
    assert served.backend.explained == served.backend.names


def test_an_engine_that_cannot_explain_costs_no_answer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.backend.explanation = None
    assert "not remember" in served.text(explain_cache=True).json()["cache_explanation"]["meaning"]

    async def fail(name: str) -> None:
        raise EngineStopped("gone")

    monkeypatch.setattr(served.backend, "explain_cache", fail)
    reply = served.text(explain_cache=True).json()
    assert "gone" in reply["cache_explanation"]["meaning"]
    assert reply["choices"][0]["text"]


def test_the_command_sends_a_body_and_prints_the_explanation(tmp_path: Path) -> None:
    with serving(_backend(), explain_cache="text") as served:
        body = tmp_path / "body.json"
        body.write_text(json.dumps({"messages": HI, "stream": True, "max_tokens": 99}))
        done = CliRunner().invoke(app, ["explain", served.running.url, str(body), "--twice"])
        assert done.exit_code == 0, done.output
        assert [params.max_tokens for params in served.backend.params] == [1, 1]
        for words in (
            "tokens 8 to 11: cached before, and evicted to make room (device, 2.5 s ago)",
            "first different token: number 10",
            "there: token 32, ' other'",
            "remembers 7 earlier requests of the last 60 s",
        ):
            assert words in done.output
        text = CliRunner().invoke(app, ["explain", served.running.url, "-", "--json"], input="just a prompt")
        assert json.loads(text.output)["block_tokens"] == 4
        assert served.backend.prompts[-1] == "just a prompt"


def test_the_command_names_the_path_option_if_no_field_tells_the_path(tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text('{"model": "fake", "text": "hi"}')
    done = CliRunner().invoke(app, ["explain", "http://127.0.0.1:1", str(body)])
    assert done.exit_code != 0
    assert "--path" in (done.output + str(done.exception))


def test_every_reason_can_be_printed() -> None:
    for reason, meaning in REASONS.items():
        stretch = {"start": 0, "stop": 4, "reason": reason, "meaning": meaning}
        remembered = {"requests": 0, "seconds": 1.0, "all": True}
        found = {
            "prompt_tokens": 4, "block_tokens": 4, "stretches": [stretch], "nearest": None, "remembered": remembered,
        }  # fmt: skip
        assert meaning in "\n".join(as_text(found))
