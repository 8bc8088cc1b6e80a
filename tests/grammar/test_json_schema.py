"""Schemas that llguidance would compile to a grammar of other answers, or only in seconds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from sidestream.config import StructuredOutputs
from sidestream.errors import RequestRejected
from sidestream.grammar import check
from sidestream.grammar.compiler import source_of

OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMES = {f"name_{number}": {"type": "integer"} for number in range(1001)}
CLOSED = {"properties": dict(list(NAMES.items())[:41]), "additionalProperties": False}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
NEAR = [{"exclusiveMinimum": 0}, {"maximum": 0.5}]
BYTES = LLTokenizer("byte")


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance is not taken"),
        ({"prefixItems": [{"type": "integer"}], "additionalItems": False}, "prefixItems is not enforced"),
        ({"properties": {"a": {"$schema": DRAFT_7, "const": 3}}}, r"\$schema of a part"),
        ({"type": "object", "minProperties": 2}, "minProperties 2 is not enforced with 0 required"),
        ({"required": ["a", "a"], "minProperties": 3}, "minProperties 3 is not enforced"),
        ({"anyOf": [{**CLOSED, "minProperties": 1}]}, "more than 40 optional properties"),
        ({"const": 2**53 + 1}, "9007199254740993 has more than 53 bits"),
        ({"enum": [{"a": [-(2**53) - 1]}]}, "has more than 53 bits"),
        ({"type": "integer", "maximum": 2**63 - 1}, "has more than 53 bits"),
        ({"const": "a\0b"}, r"const and enum cannot have the control character '\\x00'"),
        ({"pattern": "^a\x01$"}, "cannot have the control character"),
        ({"pattern": r"^a\\\u0001$"}, "cannot have the control character"),
        ({"patternProperties": {r"^[\x7F]$": {}}}, "cannot have the control character"),
        ({"pattern": "^[[a]b]$"}, r"has \[ inside of brackets"),
        ({"pattern": "^[a-z&&b]$"}, "has && inside of brackets"),
        ({"multipleOf": 9_999_991}, "multipleOf, or its least common multiple"),
        ({"allOf": [{"multipleOf": 101}, {"multipleOf": 103}]}, "multipleOf, or its least common multiple"),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum or exclusiveMaximum 0 is not enforced"),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, "exclusiveMinimum or exclusiveMaximum 0 is not enforced"),
        ({"minimum": 2, "exclusiveMinimum": True, "maximum": 2.4}, "exclusiveMaximum 2 is not enforced"),
        ({"allOf": NEAR}, "exclusiveMinimum or exclusiveMaximum 0 is not enforced"),
        ({"properties": {"a": NEAR[0]}, "patternProperties": {"^a": NEAR[1]}}, "is not enforced"),
        ({"$defs": {"a": NEAR[0]}, "$ref": "#/$defs/a", "maximum": 0.5}, "is not enforced"),
        ({"exclusiveMinimum": float("inf")}, "cannot convert float infinity"),
        ({"properties": NAMES}, "properties has 1001 entries"),
        ({"prefixItems": [{"items": {}}] * 2_500}, "it has 5002 objects and arrays"),
        ({"enum": list(range(30_000))}, "and 30002 values: at most 5000 and 30000"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_schema_that_is_not_enforced_is_refused_by_name(schema: Any, says: str) -> None:
    with pytest.raises(RequestRejected, match=says):
        check(StructuredOutputs(json=json.dumps(schema)))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "minProperties": 2, "required": ["a"]},
        {"properties": {"a": NEAR[0], "b": NEAR[1]}},
        {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"multipleOf": 0.01, "maximum": 1000},
        {"properties": {"a": {"multipleOf": 101}, "b": {"multipleOf": 103}}},
        {"const": 2**60, "default": 2**60 + 1},
        {"pattern": r"^[^\x00-\x1f\x7f]+$"},
        {"pattern": r"^[\x00-\x7f]*\\a\[\[&&$"},
        {"$schema": DRAFT_7, "properties": {"$schema": {"type": "string"}, "pattern": {"const": "[["}}},
        {"enum": [f"value {number}" for number in range(20_000)]},
        {"type": "array", "maxItems": 10**9},
        {"type": "string", "maxLength": 10**6},
        True,
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_schema_that_is_nearly_like_these_is_taken(schema: Any) -> None:
    check(StructuredOutputs(json=json.dumps(schema)))


@pytest.mark.parametrize(
    ("wanted", "before", "behind"),
    [
        (StructuredOutputs(json=OPEN), "", ""),
        (StructuredOutputs(json=OPEN, disable_any_whitespace=True), "", ""),
        (
            StructuredOutputs(
                structural_tag={"structures": [{"begin": "<", "schema": OPEN, "end": ">"}], "triggers": ["<"]}
            ),
            "<",
            ">",
        ),
    ],
    ids=["json", "no white space", "structural tag"],
)
def test_a_property_in_escapes_is_not_an_additional_one(wanted: StructuredOutputs, before: str, behind: str) -> None:
    taken = []
    for text in ('{"a":1,"b":"x"}', r'{"\u0061":"x"}'):
        matcher, tokens = LLMatcher(BYTES, source_of(wanted)), BYTES.tokenize_str(f"{before}{text}{behind}")
        taken.append(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())
    assert taken == [True, False]


def test_schemas_inside_of_other_grammars_are_checked() -> None:
    wrong = {"multipleOf": 9_999_991}
    tag = {"structures": [{"begin": "<", "schema": wrong, "end": ">"}], "triggers": ["<"]}
    for fields in ({"structural_tag": tag}, {"grammar": f"%llguidance {{}}\nstart: %json {json.dumps(wrong)}"}):
        with pytest.raises(RequestRejected, match="multipleOf, or its least common multiple"):
            check(StructuredOutputs(**fields))
    ours = {"type": "object", "x-guidance": {"whitespace_flexible": False}}
    check(StructuredOutputs(grammar=f"%llguidance {{}}\nstart: %json {json.dumps(ours)}"))
