"""The grammar that a request gets: of `response_format`, `structured_outputs`, tools and reasoning together."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proof.fake_backend import FakeBackend, FakeTokenizer, Script
from sidestream.config import StructuredOutputs

from .serving import Served, accepts, serving

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


def call(name: str, arguments: str = '{"x": 1}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def asked(fields: dict[str, Any], *, template: str = "<tool_call> </think>", api: str = "chat") -> StructuredOutputs:
    """What the engine is asked for."""
    backend = FakeBackend(Script("x"))
    backend.tokenizer = FakeTokenizer(("tools", "tool", "tool_calls", "enable_thinking"), template)
    with serving(backend) as served:
        reply = getattr(served, api)(**fields)
        assert reply.status_code == 200, reply.text
    wanted = backend.params[-1].structured_outputs
    assert wanted is not None
    return wanted


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            '{"x": 1}',
            "{}",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, '{"x":1}', '{"x": "1"}'),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{ "x": 1}', '{"y": 1}'),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, '{"x":1}', '{"x": 1}'),
        ({"structured_outputs": {"regex": "[a-c]/[0-9]+"}}, "a/12", "a/12 "),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "yesno"),
        ({"structured_outputs": {"grammar": 'start: "a" start | "b"'}}, "aab", "aa"),
        ({"structured_outputs": {"grammar": 'root ::= "a" root | "b"'}}, "aab", "ba"),
        (
            {
                "structured_outputs": {
                    "structural_tag": {
                        "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
                        "triggers": ["<f"],
                    }
                }
            },
            'so <f>{"x": 1}</f> and',
            "so <f>{}</f>",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_form_reaches_the_engine_through_both_apis(fields: dict[str, Any], right: str, wrong: str) -> None:
    for api in ("chat", "text"):
        wanted = asked(fields, api=api)
        assert accepts(wanted, right)
        assert not accepts(wanted, wrong)


def test_a_form_of_text_asks_for_nothing() -> None:
    with serving() as served:
        assert served.chat(response_format={"type": "text"}).status_code == 200
        assert served.backend.params[-1].structured_outputs is None


def test_the_grammar_begins_behind_the_reasoning() -> None:
    wanted = asked({"structured_outputs": {"choice": ["yes", "no"]}})
    assert accepts(wanted, "<think>yes or no?</think>\n\nyes")
    assert accepts(wanted, "no")
    assert not accepts(wanted, "<think>yes</think>maybe")


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"tool_choice": "required"}, [call("f"), f"{call('g')}\n{call('f')}"], ["so", call("h"), call("f", "{}")]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [call("f")], [f"{call('g')}\n{call('f')}"]),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, [call("g")], [call("f"), "so"]),
        ({"tool_choice": "auto"}, ["so", f"so {call('f')}", call("f")], [call("h"), f"so {call('f', '{}')}"]),
        (
            {"tool_choice": "auto", "response_format": {"type": "json_object"}},
            [call("f"), '{"y": 2}'],
            ["so", call("f", "{}")],
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_calls_are_enforced(fields: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    wanted = asked({"tools": [tool("f", strict=True), tool("g")], **fields})
    assert all(accepts(wanted, text) for text in right)
    assert not any(accepts(wanted, text) for text in wrong)


def test_arguments_of_a_schema_that_cannot_be_enforced_are_any_object() -> None:
    loose = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {"type": "null"}}}}
    assert accepts(asked({"tools": [loose], "tool_choice": "required"}), call("f", '{"y": 2}'))


def test_without_tools_and_forms_no_grammar_is_made() -> None:
    with serving() as served:
        served.chat()
        served.chat(tool_choice="none", tools=[])
        assert [params.structured_outputs for params in served.backend.params] == [None, None]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a(b"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": {"format": {}}}}, "structured_outputs.structural_tag"),
        ({"guided_json": {}}, "guided_json"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_forms_that_cannot_be_enforced_are_refused_by_name(shared: Served, fields: dict[str, Any], param: str) -> None:
    reply = shared.chat(**fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
