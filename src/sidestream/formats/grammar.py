"""Grammars of answers with tool calls and reasoning, in llguidance's dialect of Lark, from the same table that
`calls.py` reads. What such a grammar lets a model write, the parser reads as calls with valid arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sidestream.formats.answer import AnswerFormat
from sidestream.formats.table import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    Json,
    Maybe,
    Name,
    Object,
    Pairs,
    Part,
    ReasoningFormat,
    ToolFormat,
)
from sidestream.formats.values import is_text

SpecialId = Callable[[str], int | None]
"""Function that returns the token id of a special token; None: the text is no special token."""

# `gap` is between the parts of calls: with more white space than the chat template writes, the next prompt would repeat
# other tokens than the model wrote, and their cached KV would be lost.
_TERMINALS = r"""
TEXT: /(.|\n)*/
ws: /[ \n]{0,2}/
gap: /[ \n]?/
"""
_TAG = re.compile(r"(<[^<>]+>)")
_PYTHON = r"""
python_value: PYTHON_TEXT | PYTHON_NUMBER | "True" | "False" | "None" | python_list | python_dict
python_list: "[" (python_value (", " python_value)*)? "]"
python_dict: "{" (PYTHON_TEXT ": " python_value (", " PYTHON_TEXT ": " python_value)*)? "}"
PYTHON_TEXT: /"([^"\\\x00-\x1f]|\\["\\nt])*"/
PYTHON_NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
"""


def answer_grammar(
    form: AnswerFormat, special_id: SpecialId, *, content: str | None = None, forced: bool = False, several: bool = True
) -> str:
    """The grammar of answers in this form.

    content   Lark expression for an answer without calls; None: any text
    forced    the answer is calls; False: calls are bound from their first marker on
    several   an answer may have more than one call
    """
    rules = _Rules(special_id)
    if form.reasoning is not None and REASONING_FORMATS[form.reasoning].messages:
        return f"%llguidance {{}}\nstart: {_messages(rules, form, content, forced)}\n{rules.text()}"
    answer = content if content is not None else "TEXT"
    if form.tools is not None:
        answer = _answer_with_calls(rules, TOOL_FORMATS[form.tools], form.schemas, content, forced, several)
    rules.add("answer", answer)
    start = "answer"
    if form.reasoning is not None:
        reasoning = REASONING_FORMATS[form.reasoning]
        if form.inside:
            start = f"{rules.until(reasoning.end)} ws answer"
        elif forced or content is not None or rules.is_special(reasoning.start):  # else reasoning is part of the text
            start = f"({_opening(rules, reasoning)})? answer"
    return "%llguidance {}\nstart: " + start + "\n" + rules.text()


class _Rules:
    """The rules of one grammar."""

    def __init__(self, special_id: SpecialId) -> None:
        self._special_id = special_id
        self._rules: list[str] = []

    def add(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name

    def is_special(self, text: str) -> bool:
        return self._special_id(text) is not None

    def literal(self, text: str) -> str:
        """A text; markers in it that are special tokens, such as `<|tool_call|>`, become tokens."""
        if self.is_special(text):
            return f"<[{self._special_id(text)}]>"
        pieces = [piece for piece in _TAG.split(text) if piece]
        if not any(map(self.is_special, pieces)):
            return json.dumps(text, ensure_ascii=False)
        return " ".join(self.literal(piece) for piece in pieces)

    def until(self, text: str) -> str:
        """Any text, and the first occurrence of `text` behind it."""
        if self.is_special(text.strip()):
            return f"TEXT {self.literal(text.strip())}"
        name = f"until_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: TEXT {json.dumps(text, ensure_ascii=False)}")
        return name

    def text(self) -> str:
        body = "\n".join(self._rules)
        return body + _TERMINALS + (_PYTHON if "python_value" in body else "")


def _messages(rules: _Rules, form: AnswerFormat, content: str | None, forced: bool) -> str:
    """An answer of messages: reasoning and preambles, then one with the content or with a call, which ends it."""
    go_on = f"{rules.until('<|end|>')} {rules.literal('<|start|>assistant')}"
    before = rules.add("reasoning", f"{rules.literal('<|channel|>analysis<|message|>')} {go_on}")
    last = [] if forced else [f"{rules.literal('<|channel|>final<|message|>')} {content or 'TEXT'}"]
    if form.tools is not None:
        before += " | " + rules.add("preamble", f"{rules.literal('<|channel|>commentary<|message|>')} {go_on}")
        opening, calls = _calls(rules, TOOL_FORMATS[form.tools], form.schemas, several=False, forced=forced)
        last.append(f"{rules.literal(opening)} {calls}")
    return f"{go_on if form.inside else ''} ({before})* ({' | '.join(last)})"


def _opening(rules: _Rules, reasoning: ReasoningFormat) -> str:
    return f"{rules.literal(reasoning.start)} {rules.until(reasoning.end)} ws"


def _answer_with_calls(
    rules: _Rules,
    form: ToolFormat,
    schemas: Mapping[str, Any],
    content: str | None,
    forced: bool,
    several: bool,
) -> str:
    opening, calls = _calls(rules, form, schemas, several, forced=forced)
    if forced:
        return f"{rules.literal(opening)} {calls}" if opening else calls
    if not opening:  # without a marker, nothing shows where a call begins
        return f"{calls} | {content}" if content is not None else "TEXT"
    if content is not None:
        return f"{rules.literal(opening)} {calls} | {content}"
    rules.add("tag", f"{rules.until(opening)} {calls}")
    return "tag* TEXT" if several else "tag? TEXT"


def _calls(
    rules: _Rules, form: ToolFormat, schemas: Mapping[str, Any], several: bool, *, forced: bool
) -> tuple[str, str]:
    """The marker in front of an answer's calls, and the expression for all behind it."""
    parts, listed = form.parts, False
    if form.listed and not any(isinstance(part, Maybe) and rules.is_special(part.text) for part in form.parts):
        parts, listed = form.listed, True
    if any(isinstance(part, Object | Name | Json | Pairs) for part in parts):
        choices = [_call(rules, parts, number, name, schema) for number, (name, schema) in enumerate(schemas.items())]
        rules.add("call", " | ".join(choices))
        between = {",": '("," gap call)*', ";": '("; " call)*'}
        more = between.get("," if listed else form.more, "(gap {start} call)*")
    else:  # calls in Python
        choices = [_python_call(name, schema) for name, schema in schemas.items()]
        rules.add("call", " | ".join(choices))
        more = '(", " call)*'
    if form.bare and forced:
        calls = f"call {more}" if several else "call"
        return "", f'"[" {calls} "]"' if form.bare == "[" else calls
    start = rules.literal(form.start)
    calls = "call " + more.format(start=start) if several else "call"
    if listed:
        return form.start, f'"[" {calls} "]"'
    if form.bare == "[":
        closing = " ".join(f"({rules.literal(wrapper)})?" for wrapper in form.wrappers)
        return form.start, f'"[" {calls} "]" {closing}'
    if len(form.wrappers) == 2:
        return form.wrappers[0], f"gap {start} {calls} gap {rules.literal(form.wrappers[1])}"
    return form.start, calls


def _call(rules: _Rules, parts: Sequence[Part], number: int, name: str, schema: Any) -> str:
    """One call of one tool, behind its start marker."""
    body: list[str] = []
    arguments = rules.add(f"arguments_{number}", _json(schema or {"type": "object"}))
    for part in parts:
        if isinstance(part, Maybe) and part.text in "[]":
            continue
        if not isinstance(part, Name):
            body.append("gap")
        match part:
            case Name(has_id):
                body.append(f"{json.dumps('functions.' + name + ':')} /[0-9]{{1,3}}/" if has_id else json.dumps(name))
            case Json():
                body.append(arguments)
            case Object(key):
                head = json.dumps({"name": name})[:-1] + f', "{key}": '
                body.append(f'{json.dumps(head)} {arguments} "}}"')
            case Pairs():
                body += [_pair(rules, part, name, schema) for name in _properties(schema)]
            case str(text) | Maybe(text):
                body.append(rules.literal(text))
    return rules.add(f"call_{number}", " ".join(body))


def _pair(rules: _Rules, pairs: Pairs, name: str, schema: Any) -> str:
    """One argument that is written by itself."""
    before, after = pairs.form.format(name=name, value="\0").split("\0")
    if is_text(schema, name):
        value = rules.until(after)
    else:
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        value = f"{_json({**definitions, **_properties(schema)[name]})} {rules.literal(after)}"
    pair = f"{rules.literal(before)} {value} gap"
    return pair if name in schema.get("required", ()) else f"({pair})?"


def _json(schema: Mapping[str, Any]) -> str:
    """JSON as `json.dumps` writes it, which is how most models were taught to write arguments."""
    spaces = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    escapes = {"json_allowed_escapes": 'nrbtf"\\'}  # with escapes of letters, keys would have several spellings
    return "%json " + json.dumps({**schema, "x-guidance": {**spaces, **escapes}})


def _properties(schema: Any) -> Mapping[str, Any]:
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _python_call(name: str, schema: Any) -> str:
    pairs, required = _properties(schema), schema.get("required", ()) if isinstance(schema, Mapping) else ()
    needed = [f"{json.dumps(key + '=')} python_value" for key in pairs if key in required]
    others = " | ".join(f"{json.dumps(key + '=')} python_value" for key in pairs if key not in required)
    arguments = ' ", " '.join(needed)
    if others:
        arguments += f' (", " ({others}))*' if needed else f'(({others}) (", " ({others}))*)?'
    return f'{json.dumps(name + "(")} {arguments} ")"'
