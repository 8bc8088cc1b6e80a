"""Fuzzed bodies, made from the server's own OpenAPI document, get no server error, and get their answers soon."""

from __future__ import annotations

import http.client
import json
import random
import socket
from collections import Counter
from contextlib import suppress
from copy import deepcopy
from typing import Any

import pytest

from proof.fake_backend import FakeBackend, FakeTokenizer, Script

from .serving import head, serving

ADMIN = "admin"
ANSWER_S = 10.0
LIMITS = ("max_tokens", "max_output_tokens")
JUNK: list[Any] = (
    json.loads(r"""[null, true, 0, -1, 9223372036854775808, -1e308, 1e-308, "", "a", "\ud800", "\u0000", [],
    {}, [[]], [null], ["a", 1], {"": null}, {"type": "text"}, {"type": "function"}, "DEEP", "NAN", "DIGITS", "LONG"]""")
)
SCHEMAS: list[Any] = json.loads(r"""[true, false, {}, {"$ref": "#"}, {"$ref": "#/x"}, {"$ref": "file:///etc/passwd"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, {"type": "no"},
    {"enum": []}, {"enum": [{"a": [1]}, 1e308]}, {"anyOf": []}, {"oneOf": [{}, {}]}, {"not": {}}, {"properties": []},
    {"items": "x"}, {"type": "integer", "minimum": 5, "maximum": 1}, {"type": "number", "multipleOf": 1e-300},
    {"type": "integer", "minimum": 1e308}, {"type": "number", "multipleOf": 0}, {"type": "string", "minLength": -1},
    {"type": "string", "minLength": 10, "maxLength": 9}, {"type": "string", "pattern": "(a+)+$"}, {"patternProperties":
    {"(": {}}}, {"type": "string", "pattern": "(?=a)b"}, {"type": "string", "pattern": "a{1000000}"}, {"type": "array",
    "items": {"$ref": "#"}, "minItems": 1}, {"type": "array", "minItems": 1000000000}, {"allOf": [{"type": "string"},
    {"type": "integer"}], "format": "date-time"}]""")
SCHEMAS += [{"properties": {str(i): {"$ref": "#"} for i in range(999)}}, {"enum": [str(i) for i in range(5000)]}]
TEXTS = r"""(a+)+$|((((a{99}){99}){99}){99})|[|a{5,2}|\1|root ::= root|root ::= "a" | |start: start|start: /(/
start: %json {"$ref": "#"}|start: "a"{1000000000}|start: ("a"?)*|%llguidance {}""".replace("\n", "|").split("|")
TEXTS += ["(" * 9999, ".*" * 999, "start: " + " | ".join(f'"{i}"' for i in range(5000))]


class Fuzzer:
    """Makes bodies of one endpoint. `schema`: its body in the OpenAPI document."""

    def __init__(self, rng: random.Random, schema: Any) -> None:
        self.rng, self.schema = rng, schema

    def body(self) -> bytes:
        """A valid body, or one with a few mutations, or a part of it."""
        value = deepcopy(self.valid(self.rng.choice(self.schema.get("anyOf", [self.schema]))))
        for _ in range(self.rng.choice((0, 0, 0, 1, 1, 2, 5))):
            self.mutate(value)
        for name in LIMITS:  # without a limit, a real model writes for long
            if name in self.schema.get("properties", ()) and value.get("max_completion_tokens") is None:
                value[name] = self.rng.choice((1, 4, 4, 4, "a"))
        text = json.dumps(value).replace('"DEEP"', "[" * 5000 + "]" * 5000).replace('"DIGITS"', "9" * 5000)
        text = text.replace('"NAN"', self.rng.choice(("NaN", "1e999", '{"a": 1, "a": 2}'))).replace(
            "LONG", "é" * 70_000
        )
        return text.encode()[: self.rng.randrange(len(text)) if self.rng.random() < 0.05 else None]

    def valid(self, schema: Any, name: str = "") -> Any:
        """A value of this schema. Half of the forms of answers are evil."""
        rng = self.rng
        is_mild = rng.random() < 0.5
        form = {"type": "object", "properties": {"a": {"type": "integer"}}} if is_mild else rng.choice(SCHEMAS)
        function = {"name": "f", "parameters": form, "strict": not is_mild}
        tools = ({"type": "function", **function}, {"type": "function", "function": function})
        match name, schema:
            case "messages" | "input", _:
                return [{"role": "user", "content": rng.choice(("hi", "é𝄞", [{"type": "text", "text": "hi"}]))}]
            case "tools", _:
                return [rng.choice((*tools, {"name": "f", "input_schema": form}))] * rng.choice((1, 1, 2))
            case "schema" | "json", _:
                return form
            case "choice", _:
                return rng.choice((["a"], [""], ["a", "a", ""], ["\x00"], [1], ["a"] * 9999))
            case "regex" | "grammar" | "structural_tag" | "whitespace_pattern", _:
                return "[ab]+" if is_mild else rng.choice(TEXTS)
            case _, {"anyOf": kinds}:
                return self.valid(rng.choice(kinds), name)
            case _, {"const": value}:
                return value
            case _, {"enum": values}:
                return rng.choice(values)
            case _, {"type": "object"}:
                known, needed = schema.get("properties", {}), schema.get("required", ())
                names = [key for key in known if key in needed or rng.random() < 3 / len(known)]
                return {key: self.valid(known[key], key) for key in names}
            case _, {"type": "array"}:
                return [self.valid(schema.get("items", {})) for _ in range(rng.randrange(schema.get("minItems", 0), 3))]
            case _, {"type": "boolean"}:
                return rng.random() < 0.5
            case _, {"type": "integer" | "number"}:
                return max(schema.get("minimum", 1), min(1, schema.get("maximum", 1)))
        return rng.choice(("a", "é"))

    def mutate(self, value: Any) -> None:
        """Replace, remove or add one thing somewhere in the value."""
        while True:
            keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
            key = self.rng.choice(keys) if keys else "x"
            if not keys or not isinstance(value[key], dict | list) or self.rng.random() < 0.4:
                break
            value = value[key]
        new = deepcopy(self.rng.choice((*JUNK, *SCHEMAS)))
        if isinstance(value, list):
            value[:] = self.rng.choice(([*value, new], value[1:], [new], value * 50))
        else:
            value[self.rng.choice((key, key, key, "", "\ud800", "schema", "stream", "n", "é" * 99))] = new


def fuzz(address: tuple[str, int], paths: Any, *, seed: int, rounds: int) -> tuple[Counter[Any], list[str]]:
    """Send `rounds` bodies to each endpoint of the document's `paths`. Returns the number of answers by path and
    status, and the faults: server errors and late answers.
    """
    answers, faults = Counter[Any](), list[str]()
    for path in [path for path in paths if "requestBody" in paths[path].get("post", {})]:
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        fuzzer = Fuzzer(random.Random(f"{seed} {path}"), schema)
        for number in range(rounds):
            body = fuzzer.body()
            if number % 20 == 19:  # leave in the middle of the body or of the answer
                with socket.create_connection(address, ANSWER_S) as leaving, suppress(OSError):
                    leaving.sendall(head(len(body) + number % 2, path=path) + body)
                    leaving.settimeout(0.01)
                    leaving.recv(99)
                continue
            connection = http.client.HTTPConnection(*address, timeout=ANSWER_S)
            try:
                headers = {"content-type": "application/json", "authorization": f"Bearer {ADMIN}"}
                connection.request("POST", path, body, headers)
                reply = connection.getresponse()
                status, text = reply.status, reply.read()
            except (OSError, http.client.HTTPException) as failure:
                status, text = 599, repr(failure).encode()
            connection.close()
            answers[path, status] += 1
            if status >= 500 or b"internal_error" in text:
                faults.append(f"{path}: {status} {text[:300]!r} to {body[:2000]!r}")
    return answers, faults


@pytest.mark.slow
def test_fuzzed_bodies_get_no_server_error_and_leave_nothing_behind() -> None:
    backend = FakeBackend(Script('{"a": 1}<tool_call>{"name": "f", "arguments": {}}</tool_call>'))
    backend.tokenizer = FakeTokenizer(("tools", "tool", "tool_calls"), "<tool_call>{{ tools }}")
    with serving(backend, admin_key=ADMIN) as served:
        paths = served.http.get("/openapi.json").json()["paths"]
        answers, faults = fuzz(served.address, paths, seed=0, rounds=200)
        assert not faults, "\n".join(faults)
        assert {path for path, status in answers if status == 200} == {path for path, _ in answers}
        backend.wait_until(lambda fake: len(fake.names) == len(fake.finished) + len(fake.aborted))
        assert served.http.get("/health").status_code == 200
