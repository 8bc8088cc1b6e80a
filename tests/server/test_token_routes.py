"""Routes that other servers have: /tokenize, /detokenize, /version, /ping, and a model's name in a path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from proof.fake_backend import FakeBackend, FakeTokenizer
from sidestream.server import ServerOptions, create_app
from sidestream.types import Health
from sidestream.version import VERSION

from .serving import HI, Served, serving


def test_tokenize_returns_token_ids_and_their_count(shared: Served) -> None:
    reply = shared.http.post("/tokenize", json={"prompt": "né"})
    assert reply.status_code == 200
    assert reply.json() == {"count": 3, "max_model_len": 4096, "tokens": [110, 195, 169], "token_strs": None}


def test_tokenize_returns_token_strings_on_request(shared: Served) -> None:
    reply = shared.http.post("/tokenize", json={"model": "fake", "prompt": "hi", "return_token_strs": True})
    assert reply.json()["token_strs"] == ["<0x68>", "<0x69>"]


def test_tokenize_can_omit_special_tokens() -> None:
    with serving() as served:
        for fields in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            assert served.http.post("/tokenize", json={"prompt": "hi", **fields}).status_code == 200
        assert served.backend.tokenizer.specials == [True, True, False]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"messages": [*HI, {"role": "assistant", "content": "Well"}], "continue_final_message": True},
        {"chat_template_kwargs": {"style": "short"}},
    ],
    ids=str,
)
def test_tokenize_returns_the_tokens_that_a_chat_request_computes(fields: dict[str, Any]) -> None:
    backend = FakeBackend()
    backend.tokenizer = FakeTokenizer(["style"])
    with serving(backend) as served:
        reply = served.http.post("/tokenize", json={"messages": HI, "add_special_tokens": False, **fields})
        assert served.chat(**fields).status_code == 200
    assert bytes(reply.json()["tokens"]).decode() == backend.prompts[0]
    assert backend.tokenizer.chats[0] == backend.tokenizer.chats[1]


def test_detokenize_returns_text(shared: Served) -> None:
    reply = shared.http.post("/detokenize", json={"model": "fake", "tokens": [110, 195, 169]})
    assert (reply.status_code, reply.json()) == (200, {"prompt": "né"})
    assert shared.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "fields", "param", "said"),
    [
        ("/tokenize", {}, "prompt", "prompt and messages are both missing: send one of them"),
        (
            "/tokenize",
            {"prompt": "a", "messages": HI},
            "prompt",
            "both prompt and messages are given: send one of them",
        ),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "prompt is ['a']: input should be a valid string"),
        ("/tokenize", {"prompt": "a", "promt": 1}, "promt", "no field promt; did you mean prompt?"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs", "return_token_strs is 1"),
        (
            "/tokenize",
            {"prompt": "a", "add_generation_prompt": True},
            "add_generation_prompt",
            "no field add_generation_prompt",
        ),
        ("/tokenize", {"messages": []}, "messages", "messages is []: it must be a list of one or more messages"),
        (
            "/tokenize",
            {"messages": HI, "add_special_tokens": True},
            "add_special_tokens",
            "does not support: leave it out",
        ),
        ("/tokenize", {"messages": HI, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x", "no option x"),
        (
            "/tokenize",
            {"messages": HI, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
            "both true",
        ),
        ("/tokenize", {"prompt": "a", "model": 5}, "model", "model is 5"),
        ("/detokenize", {}, "tokens", "tokens is missing: it is required"),
        ("/detokenize", {"tokens": "12"}, "tokens", "tokens is '12': it must be a list of token ids"),
        (
            "/detokenize",
            {"tokens": [1, 256]},
            "tokens[1]",
            "tokens[1] is 256: a token id of this model is a whole number in [0, 255]",
        ),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "tokens[0] is -1"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]", "tokens[0] is True"),
        ("/detokenize", {"tokens": [1], "skip": 1}, "skip", "no field skip"),
    ],
    ids=str,
)
def test_a_bad_field_is_a_400_that_names_it(
    shared: Served, path: str, fields: dict[str, Any], param: str, said: str
) -> None:
    reply = shared.http.post(path, json=fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert said in error["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_bodies_of_token_routes_have_the_usual_limits(path: str) -> None:
    with serving(max_body_bytes=100, api_key="k") as served:
        assert served.http.post(path, json={"model": "other", "prompt": "a", "tokens": [1]}).status_code == 400
        assert (
            served.http.post(path, json={"prompt" if path == "/tokenize" else "tokens": "a" * 200}).status_code == 413
        )
        assert served.http.post(path, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
        assert served.post_raw(b"{", path).status_code == 400
        assert served.http.post(path, json={}, headers={"authorization": ""}).status_code == 401
        assert served.http.get(path).status_code == 405


def test_token_routes_return_404_for_another_model(shared: Served) -> None:
    for path, fields in (
        ("/tokenize", {"prompt": "a"}),
        ("/tokenize", {"messages": HI}),
        ("/detokenize", {"tokens": [1]}),
    ):
        reply = shared.http.post(path, json={"model": "other", **fields})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("state", "serves", "lives", "is_ready"),
    [
        (Health("ok", "because"), 200, 200, 200),
        (Health("ok", "because", paused=True), 200, 200, 503),
        (Health("draining", "because"), 503, 200, 503),
        (Health("stalled", "because"), 503, 503, 503),
        (Health("failed", "because"), 503, 503, 503),
    ],
)
def test_health_checks_ask_about_the_engine_a_restart_or_new_requests(
    state: Health, serves: int, lives: int, is_ready: int
) -> None:
    backend = FakeBackend()
    backend.status = state
    with serving(backend, api_key="k", root_path="/llm") as served:
        served.http.headers.pop("authorization")
        paths = ("/health", "/healthz", "/ping", "/livez", "/llm/livez", "/readyz", "/llm/readyz")
        replies = [served.http.get(path) for path in paths] + [served.http.post("/ping")]
    assert [reply.status_code for reply in replies] == [
        *(serves, serves, serves, lives, lives, is_ready, is_ready, serves)
    ]
    assert replies[0].json() == {"status": state.status, "detail": "because"}


def test_the_load_counts_running_and_waiting_requests() -> None:
    backend = FakeBackend()
    backend.metrics.set("requests_running", 2)
    backend.metrics.set("requests_waiting", 3)
    with serving(backend) as served:
        assert served.http.get("/load").json() == {"server_load": 5}


def test_the_version_needs_the_key_and_a_ping_does_not() -> None:
    nobody = {"authorization": ""}
    with serving(api_key="k") as served:
        assert served.http.get("/version").json() == {"version": VERSION}
        assert served.http.get("/version", headers=nobody).status_code == 401
        assert served.http.get("/ping", headers=nobody).status_code == 200
        assert served.http.post("/ping", headers=nobody).status_code == 200


@pytest.mark.parametrize("path", ["org/name", "org%2Fname", "org%2fname", "%6Frg/name"])
def test_a_slash_in_a_model_name_may_be_escaped_in_the_path(path: str) -> None:
    with serving(served_model_name="org/name") as served:
        reply = served.http.get(f"/v1/models/{path}")
        assert (reply.status_code, reply.json()["id"]) == (200, "org/name")
        assert served.http.get(f"/v1/models/{path}x").json()["error"]["code"] == "model_not_found"


def test_an_error_about_an_unknown_path_lists_all_known_paths(shared: Served) -> None:
    message = shared.http.get("/v1/embeddings").json()["error"]["message"]
    for route in create_app(FakeBackend(), options=ServerOptions()).routes:
        assert str(getattr(route, "path", "")).partition("/{")[0] in message


def test_detokenize_keeps_special_tokens() -> None:
    class WithStart(FakeTokenizer):
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            return ("" if skip_special_tokens else "<s>") + super().decode(token_ids[1:])

    backend = FakeBackend()
    backend.tokenizer = WithStart()
    with serving(backend) as served:
        assert served.http.post("/detokenize", json={"tokens": [1, 104, 105]}).json() == {"prompt": "<s>hi"}
