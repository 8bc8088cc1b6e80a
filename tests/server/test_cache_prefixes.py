"""The endpoints about prefixes in the KV cache: who may use them, what they accept, and what they tell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .serving import HI, Served, serving

ADMIN = {"authorization": "Bearer admin"}
PATHS = ("/v1/cache/pin", "/v1/cache/unpin", "/v1/cache/prefetch", "/v1/cache/drop")


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(admin_key="admin") as served:
        yield served


def _post(served: Served, path: str, **fields: Any) -> Any:
    return served.http.post(f"/v1/cache/{path}", json=fields, headers=ADMIN)


def test_only_the_admin_key_opens_them() -> None:
    with serving(api_key="user", admin_key="admin") as served:
        codes = [served.http.post(path, json={"prompt": "hi", "ttl_s": 1}).status_code for path in PATHS]
        assert codes == [401] * 4 and served.http.get("/v1/cache/prefixes").status_code == 401
    with serving(api_key="user") as served:
        reply = served.http.post("/v1/cache/pin", json={"prompt": "hi", "ttl_s": 1})
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "operations_off")


def test_a_pin_is_listed_without_its_text_and_ends_by_name(served: Served) -> None:
    pinned = _post(served, "pin", prompt="secret", ttl_s=5).json()
    assert (pinned["prompt_tokens"], pinned["tokens"], pinned["pinned_for_s"]) == (6, 6, 5.0)
    listed = served.http.get("/v1/cache/prefixes?limit=7", headers=ADMIN)
    (one,) = listed.json()["prefixes"]
    assert "text" not in one and "secret" not in listed.text
    counts = {"requests": 2, "seconds_ago": 0.5, "pinned_by": "operator", "blocks_by_tier": {"device": 6}}
    assert one == {"name": pinned["name"], "tokens": 6, "pinned_for_s": 5.0, **counts}
    assert [_post(served, "unpin", name=one["name"]).json() for _ in range(2)] == [{"unpinned": 1}, {"unpinned": 0}]
    assert served.http.get("/v1/cache/prefixes", headers=ADMIN).json() == {"prefixes": []}


def test_lists_have_texts_if_explanations_may_have_them() -> None:
    with serving(admin_key="admin", explain_cache="text") as served:
        _post(served, "pin", prompt="secret", ttl_s=5)
        (one,) = served.http.get("/v1/cache/prefixes", headers=ADMIN).json()["prefixes"]
        assert one["text"] == "secret"


def test_a_prefix_is_a_text_token_ids_or_a_conversation(served: Served) -> None:
    for given in ({"prompt": "hi"}, {"tokens": [104, 105]}, {"messages": HI}):
        assert _post(served, "pin", ttl_s=1.5, model="fake", cache_salt="a", **given).status_code == 200
    assert list(served.backend.pinned) == ["hi", "user: hi\n"]
    _post(served, "pin", ttl_s=1, messages=HI, add_generation_prompt=True)
    assert list(served.backend.pinned)[-1] == "user: hi\nassistant: "
    assert _post(served, "unpin", tokens=[104, 105]).json() == {"unpinned": 1}


def test_a_prefetch_tells_how_much_is_cached_in_which_tier(served: Served) -> None:
    cached = {"prompt_tokens": 5, "tokens": 5, "blocks_by_tier": {"host": 5}}
    assert _post(served, "prefetch", prompt="hello", cache_salt="a").json() == cached


def test_a_drop_tells_the_blocks_of_each_tier(served: Served) -> None:
    assert _post(served, "drop", prompt="hello").json() == {"prompt_tokens": 5, "dropped": {"device": 5}}
    assert _post(served, "drop", prompt="hello", tier="host").json()["dropped"] == {"host": 5}


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("pin", {"prompt": "hi"}, "ttl_s"),
        ("pin", {"ttl_s": 1}, "nothing given: send one of prompt, tokens, messages"),
        ("pin", {"ttl_s": 1, "prompt": "hi", "tokens": [1]}, "prompt and tokens given"),
        ("pin", {"ttl_s": 1, "tokens": [-1]}, "tokens[0] is -1"),
        ("pin", {"ttl_s": "1h", "prompt": "hi"}, "ttl_s"),
        ("pin", {"ttl_s": 1, "prompt": "hi", "tier": "host"}, "tier"),
        ("unpin", {"prompt": "hi", "name": "00"}, "prompt and name given"),
        ("drop", {"messages": []}, "messages is []"),
        ("drop", {"prompt": "hi", "cache_salt": ""}, "cache_salt"),
    ],
)
def test_a_bad_request_is_a_400_that_names_the_field(served: Served, path: str, fields: Any, said: str) -> None:
    reply = _post(served, path, **fields)
    assert reply.status_code == 400 and said in reply.json()["error"]["message"], reply.text


@pytest.mark.parametrize("limit", ["0", "1001", "x", "-1", "1.5"])
def test_a_bad_limit_is_refused_with_its_bounds(served: Served, limit: str) -> None:
    reply = served.http.get(f"/v1/cache/prefixes?limit={limit}", headers=ADMIN)
    assert reply.status_code == 400 and "[1, 1000]" in reply.json()["error"]["message"]
