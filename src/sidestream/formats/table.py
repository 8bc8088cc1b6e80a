"""The table of formats, under vLLM's names (`--tool-call-parser`, `--reasoning-parser`).

A tool format is the sequence of parts that a call consists of; `calls.py` interprets it. White space in front of a part
is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Maybe:
    """A literal that may be missing."""

    text: str


@dataclass(frozen=True, slots=True)
class Name:
    """The function's name. `has_id`: in the form `functions.NAME:N`, which is also the call's id."""

    has_id: bool = False


@dataclass(frozen=True, slots=True)
class Json:
    """The arguments, as a JSON object."""


@dataclass(frozen=True, slots=True)
class Object:
    """A JSON object that has the name and, under `key` (or another usual one), the arguments."""

    key: str = "arguments"


@dataclass(frozen=True, slots=True)
class Pairs:
    """The arguments, each with a name and a value that is JSON or, by the tool's schema, plain text.

    opening   literal with which each begins
    closing   literal with which each ends
    pattern   one complete argument: its groups are name and value
    form      how a model writes an argument
    """

    opening: str
    closing: str
    pattern: re.Pattern[str]
    form: str


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """A list of calls, written in Python."""


Part = str | Maybe | Name | Json | Object | Pairs | PythonCalls


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes tool calls.

    marks      texts of a chat template that uses the format
    start      marker with which a call begins, in front of its parts
    parts      parts of a call
    listed     parts of a call that begins with `[` or `{`, if they differ
    bare       character with which an answer begins that is only calls, without a marker; empty: none
    more       characters between calls that have one marker together
    wrappers   markers that only surround calls
    short_ids  ids are 9 letters and digits, as the model's chat template demands
    """

    marks: tuple[str, ...]
    start: str
    parts: tuple[Part, ...]
    listed: tuple[Part, ...] = ()
    bare: str = ""
    more: str = ""
    wrappers: tuple[str, ...] = ()
    short_ids: bool = False
    markers: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "markers", tuple(marker for marker in (self.start, *self.wrappers) if marker))

    def literals(self) -> set[str]:
        """All markers. If one is a special token, the parser needs its text."""
        inside = {
            part.text if isinstance(part, Maybe) else part for part in self.parts if isinstance(part, str | Maybe)
        }
        pairs = [part for part in self.parts if isinstance(part, Pairs)]
        return {*self.markers, *inside, *(text for part in pairs for text in (part.opening, part.closing))}


_GLM_PAIRS = Pairs(
    "<arg_key>",
    "</arg_value>",
    re.compile(r"\s*<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL),
    "<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>",
)
_QWEN_PAIRS = Pairs(
    "<parameter=",
    "</parameter>",
    re.compile(r"\s*<parameter=\s*([^>]*?)\s*>\n?(.*?)\n?</parameter>", re.DOTALL),
    "<parameter={name}>\n{value}\n</parameter>",
)
_DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")

# A template is compared with the rows from the top: hermes's marker occurs in other formats, too.
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "openai": ToolFormat(  # one of the messages that messages.py finds
        ("<|channel|>commentary",),
        "<|channel|>commentary to=functions.",
        (Name(), Maybe("<|constrain|>json"), "<|message|>", Json()),
    ),
    "kimi_k2": ToolFormat(
        ("<|tool_calls_section_begin|>",),
        "<|tool_call_begin|>",
        (Name(has_id=True), "<|tool_call_argument_begin|>", Json(), "<|tool_call_end|>"),
        wrappers=_KIMI_SECTION,
    ),
    "deepseek_v3": ToolFormat(
        ("<｜tool▁calls▁begin｜>", "```json"),
        _DEEPSEEK[0],
        ("function", _DEEPSEEK[1], Name(), Maybe("```json"), Json(), Maybe("```"), _DEEPSEEK[2]),
        wrappers=_DEEPSEEK_SECTION,
    ),
    "deepseek_v31": ToolFormat(
        ("<｜tool▁calls▁begin｜>",),
        _DEEPSEEK[0],
        (Name(), _DEEPSEEK[1], Json(), _DEEPSEEK[2]),
        wrappers=_DEEPSEEK_SECTION,
    ),
    "glm45": ToolFormat(("<arg_key>",), "<tool_call>", (Name(), _GLM_PAIRS, "</tool_call>")),
    "qwen3_coder": ToolFormat(
        ("<function=", "<parameter="),
        "<tool_call>",
        ("<function=", Name(), ">", _QWEN_PAIRS, "</function>", "</tool_call>"),
    ),
    "mistral": ToolFormat(
        ("[TOOL_CALLS]",),
        "[TOOL_CALLS]",
        (Name(), Maybe("[ARGS]"), Json()),
        (Maybe("["), Object(), Maybe("]")),
        more=",",
        short_ids=True,
    ),
    "hermes": ToolFormat(("<tool_call>",), "<tool_call>", (Object(), "</tool_call>")),
    "llama3_json": ToolFormat(
        ('"parameters": dictionary of argument name',), "<|python_tag|>", (Object("parameters"),), bare="{", more=";"
    ),
    "pythonic": ToolFormat(
        ("[func_name1(params_name1=params_value1",),
        "<|python_start|>",
        (PythonCalls(),),
        bare="[",
        wrappers=("<|python_end|>",),
    ),
}


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its reasoning, at the beginning of an answer.

    assumed   the answer begins inside the reasoning, even if the prompt does not end with `start`
    messages  an answer is a sequence of messages (messages.py), so it is never text as it is
    """

    start: str
    end: str
    assumed: bool = False
    messages: bool = False

    def literals(self) -> set[str]:
        """As of `ToolFormat`."""
        return {self.start, self.end, *(("<|start|>", "<|call|>", "<|return|>") if self.messages else ())}


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "openai_gptoss": ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>", messages=True),
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", assumed=True),
    "deepseek_v3": ReasoningFormat("<think>", "</think>"),
    "glm45": ReasoningFormat("<think>", "</think>"),
    "kimi_k2": ReasoningFormat("<think>", "</think>"),
}


def tool_format_of(template: str) -> str | None:
    """The name of the tool format that a chat template uses; None if it uses none of the table's."""
    return next((name for name, row in TOOL_FORMATS.items() if all(mark in template for mark in row.marks)), None)


def reasoning_format_of(template: str) -> str | None:
    """The name of the reasoning format that a chat template uses; None if it uses none of the table's."""
    return next(
        (name for name, row in REASONING_FORMATS.items() if (row.start if row.messages else row.end) in template), None
    )
