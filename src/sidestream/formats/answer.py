"""The parser of one answer: its reasoning first, then content and tool calls. It uses the processor of its caller and
blocks never; one thread at a time may use it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sidestream.formats.calls import CallParser
from sidestream.formats.events import (
    Arguments,
    CallBegun,
    CallEnded,
    Content,
    Event,
    Reasoning,
    merged,
    prefix_at_end,
)
from sidestream.formats.messages import MessageSplitter
from sidestream.formats.table import REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What to look for in an answer.

    tools       name of the format of tool calls; None: tool calls are text
    reasoning   name of the format of the reasoning; None: reasoning is text
    inside      the prompt ends inside the reasoning
    schemas     JSON schema of the parameters of each tool, by the tool's name
    """

    tools: str | None = None
    reasoning: str | None = None
    inside: bool = False
    schemas: Mapping[str, Any] = field(default_factory=dict)

    def literals(self) -> list[str]:
        """The formats' markers. The parser needs the text of those that are special tokens."""
        found = set() if self.tools is None else TOOL_FORMATS[self.tools].literals()
        if self.reasoning is not None:
            found |= REASONING_FORMATS[self.reasoning].literals()
        return sorted({*found, *(token for text in found for token in re.findall("<[^<>]+>", text))})


def is_inside(reasoning: str, prompt_end: str, *, continues: bool = False) -> bool:
    """Whether an answer behind a prompt that ends with this text begins inside the reasoning.

    continues   the answer continues an answer, whose text is at the end of the prompt
    """
    form, end = REASONING_FORMATS[reasoning], prompt_end.rstrip()
    if continues:
        return end.rfind(form.start) > end.rfind(form.end)
    return end.endswith(form.start) or (form.assumed and not end.endswith(form.end))


class AnswerParser:
    """`feed` it the answer's text in pieces, then call `finish`. Texts of events, joined, do not depend on the pieces.
    Nothing is held back but text that may be a marker or part of a call that has no name yet.
    """

    def __init__(self, form: AnswerFormat) -> None:
        row = None if form.reasoning is None else REASONING_FORMATS[form.reasoning]
        self._reasoning: _ReasoningParser | MessageSplitter | None = None
        if row is not None:
            splits = row.messages
            self._reasoning = (
                MessageSplitter(form.schemas, inside=form.inside) if splits else _ReasoningParser(row, form)
            )
        self._calls = None if form.tools is None else CallParser(TOOL_FORMATS[form.tools], form.schemas)

    def feed(self, text: str) -> list[Event]:
        """The events that more text brings; raises nothing."""
        return merged(self._rest([Content(text)] if self._reasoning is None else self._reasoning.feed(text)))

    def finish(self) -> list[Event]:
        """The last events."""
        events = self._rest([] if self._reasoning is None else self._reasoning.finish())
        return merged(events + ([] if self._calls is None else self._calls.finish()))

    def _rest(self, events: Iterable[Event]) -> list[Event]:
        out: list[Event] = []
        for event in events:
            out += self._calls.feed(event.text) if self._calls and isinstance(event, Content) else [event]
        return out


class _ReasoningParser:
    """Splits an answer into reasoning and the text behind it. Reasoning is only at the beginning."""

    def __init__(self, form: ReasoningFormat, answer: AnswerFormat) -> None:
        self._form = form
        self._at_start = True
        self._inside = answer.inside
        self._buffer = ""

    def feed(self, text: str) -> list[Event]:
        if not self._at_start and not self._inside:
            return [Content(text)]
        self._buffer += text
        if self._at_start:
            stripped = self._buffer.lstrip()
            if self._form.start.startswith(stripped) and stripped != self._form.start:
                return []
            self._at_start = False
            if stripped.startswith(self._form.start):
                self._inside, self._buffer = True, stripped.removeprefix(self._form.start)
        if not self._inside:
            return [Content(self._take(len(self._buffer)))]
        end = self._buffer.find(self._form.end)
        if end < 0:
            return [Reasoning(self._take(len(self._buffer) - prefix_at_end(self._buffer, (self._form.end,))))]
        self._inside = False
        reasoning = Reasoning(self._take(end))
        return [reasoning, Content(self._take(len(self._buffer))[len(self._form.end) :])]

    def finish(self) -> list[Event]:
        rest = self._take(len(self._buffer))
        return [Reasoning(rest) if self._inside else Content(rest)]

    def _take(self, size: int) -> str:
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        return text


@dataclass(slots=True)
class Message:
    """A complete answer.

    calls   id, name and arguments (JSON text) of each tool call
    """

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)


def message_of(events: Iterable[Event]) -> Message:
    """The answer that the events make. A call with malformed arguments is content."""
    message, begun = Message(), CallBegun(0, "", "")
    arguments = ""
    for event in events:
        match event:
            case Content(text):
                message.content += text
            case Reasoning(text):
                message.reasoning += text
            case CallBegun():
                begun, arguments = event, ""
            case Arguments(_, text):
                arguments += text
            case CallEnded(_, ""):
                message.calls.append((begun.id, begun.name, arguments))
            case CallEnded(_, malformed):
                message.content += malformed
    return message
