"""API keys of a file: who gets in, the limits of each key, and changes of the file."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from proof.fake_backend import FakeBackend, Script
from sidestream.config import CacheOptions, SamplingParams
from sidestream.errors import ConfigError
from sidestream.server import ServerOptions, api_keys, bind, rate_limits
from sidestream.server.errors import ApiError
from sidestream.server.fields import Call

from .serving import HI, Served, serving, warned

CHAT = "/v1/chat/completions"


class Clock:
    """Time for the limits, which tests set forward."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 0.001


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(rate_limits, "time", found)
    monkeypatch.setattr(api_keys, "time", found)
    return found


def table(name: str, secret: str | None = None, **fields: Any) -> str:
    """A key of the file; without `secret`, the key is the name."""
    digest = hashlib.sha256((secret or name).encode()).hexdigest()
    rows = {"name": name, **({} if "key" in fields or "sha256" in fields else {"sha256": digest}), **fields}
    return "[[keys]]\n" + "".join(f"{field} = {json.dumps(value)}\n" for field, value in rows.items())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def ask(served: Served, key: str, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    body = {"model": "fake", "prompt": "hi", "max_tokens": 5} | fields
    return served.http.post(path, json=body, headers={"authorization": f"Bearer {key}"})


def replace(file: Path, text: str) -> None:
    """As an editor does: the new file takes the place of the old one."""
    hidden = file.with_suffix(".new")
    hidden.write_text(text)
    hidden.replace(file)


def test_every_key_of_the_file_opens_the_server_and_others_do_not(file: Path) -> None:
    file.write_text(table("hashed", "secret-1") + table("plain", key="secret-2"))
    with serving(api_keys=str(file), api_key="old", admin_key="admin") as served:
        keys = ("secret-1", "secret-2", "old", "admin", "hashed", hashlib.sha256(b"secret-1").hexdigest(), "x")
        assert [ask(served, key).status_code for key in keys] == [200, 200, 200, 200, 401, 401, 401]
        served.http.headers.pop("authorization")
        assert served.http.get("/health").status_code == 200
        assert served.http.get("/v1/models", headers={"x-api-key": "secret-2"}).status_code == 200
        assert served.http.get("/v1/models").status_code == 401


def test_a_changed_file_counts_without_a_restart_and_a_broken_one_changes_nothing(
    file: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text(table("a") + table("b"))
    with serving(api_keys=str(file)) as served:
        found = [[ask(served, key).status_code for key in "abc"]]
        for text in (table("b") + table("c"), "[[keys]]\nname = 'd'\n", "not TOML"):
            replace(file, text)
            clock.now += 1.1
            found.append([ask(served, key).status_code for key in "abc"])
        file.unlink()
        clock.now += 1.1
        found.append([ask(served, key).status_code for key in "abc"])
    assert found == [[200, 200, 401], *[[401, 200, 200]] * 4]
    assert len(said := warned(caplog)) == 3
    assert all(str(file) in line and "2 keys from before stay valid" in line for line in said)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("keys = 3", "Expected `array`"),
        (table("a", requests_per_minutes=3), "unknown field `requests_per_minutes`"),
        (table("a", max_concurrent=0), "max_concurrent"),
        (table("a", deadline_s=-1.0), "deadline_s"),
        (table("a", sha256="abc"), "sha256"),
        (table("a", sha256="0" * 64, key="k"), "one of the two"),
        ("[[keys]]\nname = 'a'\n", "one of the two"),
        (table("a", key="a b"), "matching regex"),
        (table("a", endpoints=[]), "endpoints"),
        (table("a") + table("a", "other"), "twice"),
        (table("a", "same") + table("b", "same"), "twice"),
        ("[", "Invalid"),
    ],
)
def test_a_wrong_file_is_an_error_before_the_server_starts(file: Path, text: str, reason: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=reason) as raised:
        bind(ServerOptions(port=0, api_keys=str(file)))
    assert str(file) in str(raised.value)


def test_a_missing_file_is_an_error_before_the_server_starts(file: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        bind(ServerOptions(port=0, api_keys=str(file)))


def test_requests_beyond_the_minute_are_refused_until_the_bucket_fills(file: Path, clock: Clock) -> None:
    file.write_text(table("a", requests_per_minute=2) + table("b"))
    backend = FakeBackend()
    with serving(backend, api_keys=str(file)) as served:
        first, second, third = (ask(served, "a") for _ in range(3))
        assert [reply.status_code for reply in (first, second, third)] == [200, 200, 429]
        limits = ("limit", "remaining", "reset")
        headers = [[one.headers[f"x-ratelimit-{name}-requests"] for name in limits] for one in (first, second, third)]
        assert headers == [["2", "1", "30s"], ["2", "0", "60s"], ["2", "0", "60s"]]
        assert third.headers["retry-after"] == "30"
        error = third.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "key a: 2 requests per minute; try again in 30 s" in error["message"]
        assert ask(served, "b").status_code == 200
        assert served.http.get("/v1/models", headers={"x-api-key": "a"}).status_code == 200
        clock.now += 29
        assert ask(served, "a").status_code == 429
        clock.now += 2
        assert [ask(served, "a").status_code for _ in range(2)] == [200, 429]
        assert len(backend.prompts) == 4
        assert backend.metrics.value("rate_limited_total", "requests") == 3


def test_tokens_of_prompts_and_answers_empty_the_bucket_which_may_go_below_zero(file: Path, clock: Clock) -> None:
    file.write_text(table("a", tokens_per_minute=60))
    with serving(FakeBackend(Script("x" * 100)), api_keys=str(file)) as served:
        first = ask(served, "a", prompt="p" * 30, max_tokens=40)
        assert first.headers["x-ratelimit-remaining-tokens"] == "30"  # the answer's tokens are not known yet
        refused = ask(served, "a")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "11")  # 10 tokens below zero
        assert served.backend.metrics.value("rate_limited_total", "tokens") == 1
        clock.now += 11.5
        assert ask(served, "a").status_code == 200


def test_a_prompt_is_refused_if_others_took_the_tokens_while_it_was_read(file: Path, clock: Clock) -> None:
    file.write_text(table("a", tokens_per_minute=60))
    limits = rate_limits.RateLimits(api_keys.KeyFile(str(file)), rate_limits.limits_file(), lambda *more: None)
    grants = [limits.admit(["a"], "/v1/completions", free=False) for _ in range(2)]
    call = Call("text", ((1,) * 100,), SamplingParams(), 0, False, False)
    assert grants[0] and grants[1] and grants[0].accept(call)
    with pytest.raises(ApiError, match="60 tokens per minute; try again in 41 s"):
        grants[1].accept(call)
    grants[0].end(150)  # 90 tokens below zero
    with pytest.raises(ApiError, match="try again in 91 s"):
        limits.admit(["a"], "/v1/completions", free=False)


def test_requests_at_once_are_bounded_and_an_aborted_one_makes_room(file: Path) -> None:
    file.write_text(table("a", max_concurrent=2))
    backend = FakeBackend(Script(hold_after=1))
    with serving(backend, api_keys=str(file)) as served:
        client = served.openai.with_options(api_key="a")
        streams = [client.chat.completions.create(model="fake", messages=HI, stream=True) for _ in range(2)]
        backend.wait_until(lambda found: len(found.held) == 2)
        with pytest.raises(openai.RateLimitError, match="2 requests at once"):
            client.chat.completions.create(model="fake", messages=HI)
        assert len(backend.prompts) == 2
        streams[0].close()
        backend.wait_until(lambda found: bool(found.aborted))
        backend.release()
        assert client.chat.completions.with_raw_response.create(model="fake", messages=HI, max_tokens=1)


_OTHER = """
import sys
from sidestream.server.api_keys import KeyFile
from sidestream.server.rate_limits import RateLimits
limits = RateLimits(KeyFile(sys.argv[1]), int(sys.argv[2]), lambda *more: None)
for line in sys.stdin:
    try:
        grant = limits.admit(["a"], "/v1/completions", free=False)
        print("admitted", flush=True)
    except Exception as failure:
        print(failure, flush=True)
"""


def test_limits_hold_for_all_processes_and_a_killed_one_leaves_its_slots(file: Path) -> None:
    file.write_text(table("a", max_concurrent=2, requests_per_minute=4))
    shared = rate_limits.limits_file()
    limits = rate_limits.RateLimits(api_keys.KeyFile(str(file)), shared, lambda *more: None)
    command = [sys.executable, "-c", _OTHER, str(file), str(shared)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[shared]
    ) as other:
        assert other.stdin and other.stdout

        def there() -> str:
            assert other.stdin and other.stdout
            print(file=other.stdin, flush=True)
            return other.stdout.readline().strip()

        assert there() == "admitted"
        grant = limits.admit(["a"], "/", free=False)
        assert grant is not None
        for admit in (there, lambda: limits.admit(["a"], "/", free=False)):
            with pytest.raises(Exception, match="2 requests at once"):
                raise RuntimeError(admit())
        grant.end(0)
        assert there() == "admitted"
        other.kill()
        other.wait()
    assert limits.admit(["a"], "/", free=False)
    with pytest.raises(Exception, match="4 requests per minute"):
        limits.admit(["a"], "/", free=False)
    os.close(shared)


def test_a_key_opens_only_its_endpoints(file: Path) -> None:
    file.write_text(table("a", endpoints=["/v1/models", CHAT]))
    with serving(api_keys=str(file), root_path="/llm") as served:
        refused = ask(served, "a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "endpoint_not_allowed")
        for path in ("/v1/models", "/llm/v1/models/fake"):
            assert served.http.get(path, headers={"x-api-key": "a"}).status_code == 200
        assert served.http.get("/v1/modelsx", headers={"x-api-key": "a"}).status_code == 403


def test_a_key_sets_the_salt_and_bounds_the_priority_of_its_requests(file: Path) -> None:
    rows = table("a", cache_salt="s", priority=10), table("b", priority=10, most_urgent_priority=7), table("c")
    file.write_text("".join(rows))
    backend = FakeBackend()
    with serving(backend, api_keys=str(file)) as served:
        for key in "abc":
            for priority in (0, -5, 5):
                ask(served, key, priority=priority)
        ask(served, "a", cache_salt="s")
        ask(served, "c", cache_salt="s")
    assert backend.priorities == [10, 10, 15, 10, 7, 15, 0, 0, 5, 10, 0]
    salts = backend.cache_salts
    assert len(set(salts[:3])) == 1 and salts[3:9] == [""] * 6
    assert len({"", "s", salts[0], salts[9]}) == 4 and salts[10] == "s"


def test_a_request_beyond_its_deadline_ends_with_504_and_is_aborted(file: Path) -> None:
    file.write_text(table("a", deadline_s=0.2) + table("b"))
    backend = FakeBackend(Script(hold_after=1))
    with serving(backend, api_keys=str(file)) as served:
        replies = [ask(served, "a")]
        for key, seconds in (("b", "0.1"), ("a", "600")):
            served.http.headers["x-request-timeout"] = seconds
            replies.append(ask(served, key))
        assert [(one.status_code, one.json()["error"]["code"]) for one in replies] == [(504, "timeout")] * 3
        assert ["0.2 s" in one.text for one in replies] == [True, False, True]
    assert backend.aborted == backend.names and backend.names  # one may have ended before the engine got it


def test_a_stream_beyond_its_deadline_ends_with_an_error_event() -> None:
    backend = FakeBackend(Script(hold_after=1))
    with serving(backend) as served:
        served.http.headers["x-request-timeout"] = "0.2"
        reply = served.text(stream=True)
        message = served.http.post("/v1/messages", json={"model": "fake", "max_tokens": 5, "messages": HI})
    assert reply.status_code == 200 and "[DONE]" not in reply.text
    assert json.loads(reply.text.splitlines()[-2].removeprefix("data: "))["error"]["code"] == "timeout"
    assert (message.status_code, message.json()["error"]["type"]) == (504, "timeout_error")
    assert len(backend.aborted) == 2


@pytest.mark.parametrize("value", ["0", "-1", "nan", "soon", "1e9"])
def test_a_deadline_that_is_no_time_is_refused(value: str, shared: Served) -> None:
    reply = shared.http.post(
        "/v1/completions", json={"model": "fake", "prompt": "hi"}, headers={"x-request-timeout": value}
    )
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x-request-timeout")


def test_a_response_is_stored_for_its_key_alone(file: Path) -> None:
    file.write_text(table("ann") + table("bob"))
    with serving(api_keys=file) as served:

        def ask(key: str, **fields: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return served.http.post("/v1/responses", json={"model": "fake", "input": "hi", **fields}, headers=headers)

        name = ask("ann").json()["id"]
        assert ask("ann", previous_response_id=name).status_code == 200
        reply = ask("bob", previous_response_id=name)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "previous_response_not_found")
        for path in (name, f"{name}/input_items"):
            for key, status in (("bob", 404), ("ann", 200)):
                headers = {"authorization": f"Bearer {key}"}
                assert served.http.get(f"/v1/responses/{path}", headers=headers).status_code == status
        for key, status in (("bob", 404), ("ann", 200), ("ann", 404)):
            headers = {"authorization": f"Bearer {key}"}
            assert served.http.delete(f"/v1/responses/{name}", headers=headers).status_code == status


def test_a_share_of_the_cache_reaches_the_engine_with_the_name_of_the_key(file: Path) -> None:
    file.write_text(table("a", max_cached_tokens=60) + table("b"))
    limits = rate_limits.RateLimits(api_keys.KeyFile(str(file)), rate_limits.limits_file(), lambda *more: None)
    call = Call("text", ((1,) * 100,), SamplingParams(cache=CacheOptions(session="s")), 0, False, False)
    cache: list[CacheOptions | None] = []
    for name in "ab":
        grant = limits.admit([name], "/v1/completions", free=False)
        assert grant is not None
        cache.append(grant.accept(call).params.cache)
    assert cache == [CacheOptions(session="s", owner="a", quota_tokens=60), CacheOptions(session="s")]
