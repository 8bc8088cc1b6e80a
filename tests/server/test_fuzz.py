"""Fuzzed bodies, made from the server's own OpenAPI document, get an answer that is no server error, and soon."""

from __future__ import annotations

import http.client
import json
import random
import socket
import time
from collections import Counter
from contextlib import suppress
from copy import deepcopy
from typing import Any

import pytest

from proof.fake_backend import FakeBackend, FakeTokenizer, Script

from .serving import head, serving

ANSWER_S = 10.0
TOKENS = {"max_tokens", "max_output_tokens"}
LOOP = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
JUNK: list[Any] = [
    *(None, True, 0, -1, 1 << 63, 10**400, -1e308, 1e-308, 0.5, "", "a", "\ud800", "\x00", "𝄞é\u202e" * 99, "a" * 70_000),
    *([], {}, [[]], [None], ["a", 1], {"": None}, {"type": "text"}, {"type": "function"}, "DEEP", "NAN", "DIGITS"),
]
SCHEMAS: list[Any] = [
    *(True, False, {}, LOOP, {"$ref": "#"}, {"$ref": "#/x"}, {"$ref": "file:///etc/passwd"}, {"type": "no"}, {"enum": []}),
    *({"anyOf": []}, {"oneOf": [{}, {}]}, {"not": {}}, {"properties": []}, {"items": "x"}, {"enum": [{"a": [1]}, 1e308]}),
    *({"type": "integer", "minimum": low, "maximum": 1} for low in (5, 0.5, -1e300, 1e308, 10**400)),
    *({"type": "number", "multipleOf": step} for step in (0, -1, 1e-300, 3, 10**30)),
    *({"type": "string", "minLength": low, "maxLength": 9} for low in (-1, 10, 1 << 63)),
    *({"type": "string", "pattern": text} for text in ("(a+)+$", "(", "a{1000000}", "(?=a)b", "^$", "(a|aa)*b", "\\d{9,1}")),
    *({"type": "array", "items": {"$ref": "#"}, "minItems": low} for low in (0, 2, 10**9)),
    {"type": "object", "properties": {str(name): {"$ref": "#"} for name in range(999)}, "required": ["0", "x", "0"]},
    {"enum": [str(number) for number in range(5000)]},
    {"allOf": [{"type": "string"}, {"type": "integer"}], "patternProperties": {"(": {}}, "format": "date-time"},
]
TEXTS = ["(a+)+$", "((((a{99}){99}){99}){99})", "[", "(" * 9999, "a{5,2}", ".*" * 999, "\\1", "root ::= root", "start: start"]
TEXTS += ['root ::= "a" | ', "start: /(/", 'start: %json {"$ref": "#"}', "%llguidance {}\nstart: <[1-99999999]>", "🙂"]
TEXTS += ["start: " + " | ".join(f'"{number}"' for number in range(5000)), 'start: "a"{1000000000}', 'start: ("a"?)*']
CHOICES: list[Any] = [[], [""], ["", "a"], ["a"] * 9999, ["\x00"], [1], [[str(number) for number in range(5000)]]]


class Fuzzer:
    """Makes bodies of one endpoint. `schema`: its body in the OpenAPI document."""

    def __init__(self, rng: random.Random, schema: Any) -> None:
        self.rng, self.schema = rng, schema
        self.limits = TOKENS & schema.get("properties", {}).keys()

    def body(self) -> bytes:
        """A valid body, or one with a few mutations, or a part of it."""
        value = deepcopy(self.valid(self.rng.choice(self.schema.get("anyOf", [self.schema]))))
        for _ in range(self.rng.choice((0, 0, 0, 1, 1, 2, 5))):
            self.mutate(value)
        for name in self.limits:  # without a limit, a real model writes for long
            if "max_completion_tokens" not in value and isinstance(value.get(name) or 4, int | float):
                value[name] = min(value.get(name) or 4, 4)
        text = json.dumps(value).replace('"DEEP"', "[" * 5000 + "]" * 5000).replace('"DIGITS"', "9" * 5000)
        body = text.replace('"NAN"', self.rng.choice(("NaN", "1e999", '{"a": 1, "a": 2}', '"\\udc00"'))).encode()
        return body[: self.rng.randrange(len(body))] if self.rng.random() < 0.05 else body

    def valid(self, schema: Any, name: str = "") -> Any:
        """A value of this schema; forms of answers are evil."""
        rng = self.rng
        mild = rng.random() < 0.5
        evil = {"type": "object", "properties": {"a": {"type": "integer"}}} if mild else rng.choice(SCHEMAS)
        form = {"schema": evil, "json": evil, "choice": ["a", "b"] if mild else rng.choice(CHOICES)}
        match name:
            case "messages" | "input":
                parts = [{"type": "text", "text": "hi"}] * rng.randrange(1, 3)
                return [{"role": "user", "content": rng.choice(("hi", "é𝄞", parts))}] * rng.randrange(1, 3)
            case "tools":
                function = {"name": "f", "parameters": form["schema"], "strict": not mild}
                nested = {"type": "function", "function": function}
                anthropic = {"name": "f", "input_schema": form["schema"]}
                return [rng.choice((anthropic, nested, {"type": "function", **function}))] * rng.choice((1, 1, 2))
            case "schema" | "json" | "choice":
                return form[name]
            case "regex" | "grammar" | "structural_tag" | "whitespace_pattern":
                return "[ab]+" if mild else rng.choice(TEXTS)
            case "format" if not schema.get("properties"):
                return {"type": "json_schema", "name": "x", "schema": form["schema"]}
        match schema:
            case {"anyOf": kinds}:
                return self.valid(rng.choice(kinds), name)
            case {"const": value}:
                return value
            case {"enum": values}:
                return rng.choice(values)
            case {"type": "object"}:
                known, needed = schema.get("properties", {}), schema.get("required", ())
                return {key: self.valid(known[key], key) for key in known if key in needed or rng.random() < 3 / len(known)}
            case {"type": "array"}:
                return [self.valid(schema.get("items", {})) for _ in range(rng.randrange(schema.get("minItems", 0), 3))]
            case {"type": "boolean"}:
                return rng.random() < 0.5
            case {"type": "integer" | "number"}:
                return max(schema.get("minimum", 1), min(1, schema.get("maximum", 1)))
        return rng.choice(("a", "é"))

    def mutate(self, value: Any) -> None:
        """Replace, remove or add one thing somewhere in the value."""
        while True:
            keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
            key = self.rng.choice(keys) if keys else None
            if key is None or not isinstance(value[key], dict | list) or self.rng.random() < 0.4:
                break
            value = value[key]
        new = deepcopy(self.rng.choice((*JUNK, *SCHEMAS)))
        if isinstance(value, list):
            value[:] = self.rng.choice(([*value, new], value[1:], [new], value * 50))
        elif key is not None and self.rng.random() < 0.8:
            value[key] = new
        else:
            value[self.rng.choice(("x", "", "\ud800", "schema", "stream", "n", "é" * 99))] = new


def fuzz(address: tuple[str, int], paths: Any, *, seed: int, rounds: int) -> tuple[Counter[Any], list[str]]:
    """Send `rounds` bodies to each endpoint of the document's `paths`. Returns the number of answers by path and
    status, and the faults: server errors, and answers that took too long.
    """
    answers: Counter[Any] = Counter()
    faults: list[str] = []
    for path in [path for path in paths if "requestBody" in paths[path].get("post", {})]:
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        fuzzer = Fuzzer(random.Random(f"{seed} {path}"), schema)
        connection = http.client.HTTPConnection(*address, timeout=ANSWER_S)
        for number in range(rounds):
            body, start = fuzzer.body(), time.monotonic()
            if number % 20 == 19:  # leave in the middle of the body, or of the answer
                with socket.create_connection(address, ANSWER_S) as leaving, suppress(ConnectionError):
                    leaving.sendall(head(len(body) + number % 2, path=path) + body)
                    leaving.settimeout(0.01)
                    with suppress(TimeoutError):
                        leaving.recv(99)
                continue
            try:
                connection.request("POST", path, body, {"content-type": "application/json"})
                reply = connection.getresponse()
                text = reply.read()
            except (OSError, http.client.HTTPException) as failure:
                faults.append(f"{path}: {failure!r} after {time.monotonic() - start:.1f} s: {body[:2000]!r}")
                connection.close()
                continue
            answers[path, reply.status] += 1
            if reply.status >= 500 or b"internal_error" in text or time.monotonic() - start > ANSWER_S:
                faults.append(f"{path}: {reply.status} {text[:300]!r} to {body[:2000]!r}")
        connection.close()
    return answers, faults


@pytest.mark.slow
def test_fuzzed_bodies_get_no_server_error_and_leave_nothing_behind() -> None:
    backend = FakeBackend(Script('{"a": 1}<tool_call>{"name": "f", "arguments": {}}</tool_call>'))
    backend.tokenizer = FakeTokenizer(("tools", "tool", "tool_calls"), "<tool_call>{{ tools }}")
    with serving(backend) as served:
        paths = served.http.get("/openapi.json").json()["paths"]
        answers, faults = fuzz(served.address, paths, seed=0, rounds=100)
        assert not faults, "\n".join(faults)
        assert {path for path, status in answers if status == 200} == {path for path, _ in answers}
        backend.wait_until(lambda fake: len(fake.names) == len(fake.finished) + len(fake.aborted))
        assert served.http.get("/health").status_code == 200
