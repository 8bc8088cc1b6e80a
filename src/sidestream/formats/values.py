"""Values in the arguments of tool calls: where a JSON or Python value ends, and which value a text stands for."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

_PAIRS = {"}": "{", "]": "[", ")": "("}
_JSON_CHARS = frozenset('{}[],:"+-.0123456789eEtrufalsn \t\r\n')


class Scanner:
    """Finds the end of a value that begins with a bracket, in text that arrives in pieces.

    python   Python's quotes, and any character outside strings; else JSON's
    ended    the value is complete
    broken   the text is no such value
    """

    def __init__(self, *, python: bool = False) -> None:
        self.ended = False
        self.broken = False
        self._python = python
        self._quotes = "\"'" if python else '"'
        self._open: list[str] = []
        self._quote = ""
        self._escaped = False

    def scan(self, text: str) -> int:
        """Number of characters of `text` that belong to the value."""
        for index, char in enumerate(text):
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == self._quote:
                    self._quote = ""
                elif char < " " and not self._python:  # JSON has no control characters in strings
                    self.broken = True
                    return index
            elif char in self._quotes:
                self._quote = char
            elif char in "{[(" and (self._python or char != "("):
                self._open.append(char)
            elif char in _PAIRS and self._open and self._open[-1] == _PAIRS[char]:
                self._open.pop()
                if not self._open:
                    self.ended = True
                    return index + 1
            elif char in _PAIRS or not (self._python or char in _JSON_CHARS):
                self.broken = True
                return index
        return len(text)


def as_object(text: str) -> dict[str, Any] | None:
    """The JSON object that `text` is; None if it is none."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def name_and_arguments(text: str) -> tuple[str, str] | None:
    """The name and the arguments (as JSON text) of a call that is one JSON object; None if it is no call."""
    call = as_object(text)
    if call is None or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = as_object(arguments)
    return (call["name"], to_json(arguments)) if isinstance(arguments, dict) else None


def to_json(value: Any) -> str:
    """The JSON text of a value."""
    return json.dumps(value, ensure_ascii=False)


def typed(text: str, parameters: Any, name: str) -> Any:
    """The value of the argument `name` that is written as plain text; `parameters` is the JSON schema of the call. A
    text that is no value of the schema's types, or has no type there, stays a text.
    """
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    types = _types(properties.get(name)) if isinstance(properties, Mapping) else set()
    if not types or ("string" in types and not ("null" in types and text == "null")):
        return text
    word = text.strip()
    try:
        return json.loads(word.lower() if word in ("True", "False", "None") else word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None if word == "None" and "null" in types else text


def is_text(parameters: Any, name: str) -> bool:
    """Whether the argument `name`, written as plain text, is a text whatever it says."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    types = _types(properties.get(name)) if isinstance(properties, Mapping) else set()
    return not types or "string" in types


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type", "object" if "$ref" in schema else [])
    found = {named} if isinstance(named, str) else {name for name in named or () if isinstance(name, str)}
    for choices in ("anyOf", "oneOf"):
        if isinstance(schema.get(choices), list):
            found |= {name for choice in schema[choices] for name in _types(choice)}
    return found


def python_calls(text: str) -> list[tuple[str, str]] | None:
    """Name and arguments (as JSON text) of each call in a list such as `[f(x=1), g()]`; None if it is no such list."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        return [_python_call(call) for call in tree.elts]
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _python_call(call: ast.expr) -> tuple[str, str]:
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("no call with named arguments only")
    return ast.unparse(call.func), to_json({str(word.arg): _literal(word.value) for word in call.keywords})


def _literal(node: ast.expr) -> Any:
    """A literal's value; `true`, `false` and `null` count as Python's constants."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return json.loads(node.id)
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(ast.literal_eval(key)): _literal(item) for key, item in pairs if key is not None}
    return ast.literal_eval(node)
