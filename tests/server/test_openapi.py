"""The OpenAPI document is true: it has every route, and the server accepts the requests that it describes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
from starlette.routing import Route

from proof.fake_backend import FakeBackend
from sidestream.server import ServerOptions
from sidestream.server.app import create_app, known_paths
from sidestream.server.extras import EXTRAS
from sidestream.server.openapi import openapi

from .serving import Served, serving

APP = create_app(FakeBackend(), options=ServerOptions())
DOCUMENT = openapi("fake", known_paths(APP))
BODIES = {
    (path, number): schema
    for path, methods in DOCUMENT["paths"].items()
    if "requestBody" in methods.get("post", {})
    for whole in [methods["post"]["requestBody"]["content"]["application/json"]["schema"]]
    for number, schema in enumerate(whole.get("anyOf", [whole]))
}
WITHOUT_BODY = {"/ping", "/reset_prefix_cache", "/flush", "/pause", "/resume"}


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    """A server for all tests, whose operations are open to its client."""
    with serving(admin_key="admin") as served:
        served.http.headers["authorization"] = "Bearer admin"
        yield served


def example(schema: Any) -> Any:
    """A small valid value: of an object, the required fields."""
    match schema:
        case {"anyOf": [first, *_]}:
            return example(first)
        case {"const": value} | {"enum": [value, *_]}:
            return value
        case {"type": "object"}:
            return {name: example(schema["properties"][name]) for name in schema.get("required", ())}
        case {"type": "array"}:
            return [example(schema["items"])] * schema.get("minItems", 0)
        case {"type": "string"}:
            return "a" * schema.get("minLength", 1)
        case {"type": "boolean"}:
            return False
        case {"type": "integer" | "number"}:
            return max(1, schema.get("minimum", 1))
    raise AssertionError(schema)


def test_the_document_has_every_route_and_a_body_for_every_post_that_reads_one() -> None:
    routes = {
        (re.sub(r":\w+}", "}", route.path), one)
        for route in APP.routes
        if isinstance(route, Route)
        for one in route.methods or ()
    }
    described = {(path, method.upper()) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == {(path, method) for path, method in routes if method != "HEAD"}
    assert {path for path, method in described if method == "POST"} - {path for path, _ in BODIES} == WITHOUT_BODY


@pytest.mark.parametrize("place", BODIES, ids=str)
def test_a_request_made_from_the_document_is_accepted_but_not_with_another_field(
    place: tuple[str, int], shared: Served
) -> None:
    body = example(BODIES[place])
    reply = shared.http.post(place[0], json=body)
    assert reply.status_code == 200, reply.text
    assert BODIES[place]["additionalProperties"] is False
    assert shared.http.post(place[0], json={**body, "other": 1}).status_code == 400


@pytest.mark.parametrize("place", BODIES, ids=str)
def test_every_optional_field_of_the_document_may_be_null(place: tuple[str, int], shared: Served) -> None:
    required = example(BODIES[place])
    nulls = dict.fromkeys(BODIES[place]["properties"].keys() - required.keys())
    assert shared.http.post(place[0], json={**nulls, **required}).status_code == 200


def test_each_value_that_the_document_gives_for_a_field_is_accepted(shared: Served) -> None:
    needs_another = {"stream_options", "top_logprobs", "tools", "max_completion_tokens", "messages"}
    needs_another |= {"structured_outputs", "previous_response_id"}  # one of its own fields; an earlier response
    needs_another |= {"thinking_token_budget", "best_of", "length_penalty"}  # a format of reasoning; use_beam_search
    for path, number in BODIES:
        schema = BODIES[path, number]
        required = example(schema)
        for name in schema["properties"].keys() - required.keys() - needs_another:
            if schema["properties"][name]:
                reply = shared.http.post(path, json={**required, name: example(schema["properties"][name])})
                assert reply.status_code == 200, (path, name, reply.text)


def test_the_document_has_the_fields_without_effect_with_their_values() -> None:
    properties = BODIES["/v1/chat/completions", 0]["properties"]
    for extra in EXTRAS:
        if "chat" in extra.places:
            assert properties[extra.name] == ({} if extra.values is None else {"enum": [*extra.values, None]})


def test_the_page_needs_no_key_and_no_other_file_and_the_document_needs_the_key() -> None:
    without_key = {"authorization": ""}
    with serving(api_key="k", root_path="/llm") as served:
        page = served.http.get("/docs", headers=without_key)
        assert served.http.get("/openapi.json", headers=without_key).status_code == 401
        document = served.http.get("/openapi.json").json()
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.text == files("sidestream.server").joinpath("docs.html").read_text("utf-8")
    assert "//" not in page.text
    assert document["servers"] == [{"url": "/llm"}]
    assert document["paths"].keys() == DOCUMENT["paths"].keys()
