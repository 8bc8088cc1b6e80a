"""Finds the tool calls in one answer, as its text arrives.

A call is malformed until its name and the beginning of its arguments have been read: such text is content. After that
the call has begun, and its arguments follow as they arrive; a stream cannot take it back. Text between calls that is
only white space belongs to the calls. `feed` and `finish` raise nothing, whatever the text is.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from typing import Any

from sidestream.formats.events import Arguments, CallBegun, CallEnded, Content, Event, prefix_at_end
from sidestream.formats.table import Json, Maybe, Name, Object, Pairs, Part, PythonCalls, ToolFormat
from sidestream.formats.values import Scanner, as_object, name_and_arguments, python_calls, to_json, typed

_NAME = re.compile(r"[\w.:/-]+")
_ID_AND_NAME = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")
_HEAD = re.compile(
    r'\{ "name" : ("[^"\\\x00-\x1f]+") , "(?:arguments|parameters)" : (?=\{)'.replace(" ", r"[ \t\r\n]*")
)
# The first key shows that the object is no call.
_FIRST_KEY = re.compile(r'\{[ \t\r\n]*(?:"(?!(?:name|arguments|parameters|type|id|function)")[^"]*"|[^" \t\r\n])')
_PYTHON_START = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*\s*(?:\(.*)?)?", re.DOTALL)

_TAKEN, _WAIT, _WRONG = True, None, False


class CallParser:
    """The parser of one answer.

    schemas   JSON schema of the parameters of each tool, by the tool's name
    """

    def __init__(self, form: ToolFormat, schemas: Mapping[str, Any]) -> None:
        self._form = form
        self._schemas = schemas
        self._buffer = ""
        self._events: list[Event] = []
        self._final = False
        self._num_calls = 0
        # Between calls:
        self._fresh = True  # only white space since the start of the answer or the last call
        self._space = ""  # that white space
        self._after_call = False
        # Inside a call:
        self._parts: tuple[Part, ...] = ()
        self._raw = ""  # its text so far
        self._bare = False
        self._begin_call()

    def feed(self, text: str) -> list[Event]:
        """The events that more text of the answer brings."""
        self._buffer += text
        while self._take_call() if self._parts else self._take_text():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """The last events. Do not call `feed` after it."""
        self._final = True
        events = self.feed("")
        if self._space and self._num_calls == 0:
            events.append(Content(self._space))
        return events

    # Outside of calls

    def _take_text(self) -> bool:
        """Pass text on. True if a call may begin behind it."""
        after_call, self._after_call = self._after_call, False
        if after_call or (self._fresh and self._form.bare):
            stripped = self._buffer.lstrip()
            if not stripped and not self._final:
                self._after_call = after_call
                return False
            if after_call and self._form.more and stripped.startswith(self._form.more):
                raw = self._consume(len(self._buffer) - len(stripped) + 1)
                self._begin_call(self._form.listed or self._form.parts, raw, bare=self._bare)
                return True
            if self._form.bare and self._fresh and self._num_calls == 0 and stripped.startswith(self._form.bare):
                self._say(self._consume(len(self._buffer) - len(stripped)))
                self._begin_call(self._form.parts, bare=True)
                return True
        found = [(self._buffer.find(marker), marker) for marker in self._form.markers if marker in self._buffer]
        if not found:
            held = 0 if self._final else prefix_at_end(self._buffer, self._form.markers)
            self._say(self._consume(len(self._buffer) - held))
            return False
        start, marker = min(found)
        self._say(self._consume(start))
        self._consume(len(marker))
        if marker == self._form.start:
            self._begin_call(self._form.parts, marker)
        return True

    def _say(self, text: str) -> None:
        self._space += text
        if not self._fresh or self._space.strip():
            self._events.append(Content(self._space))
            self._space, self._fresh = "", False

    def _consume(self, size: int) -> str:
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        return text

    # Inside a call

    def _begin_call(self, parts: tuple[Part, ...] = (), raw: str = "", *, bare: bool = False) -> None:
        self._parts, self._raw, self._bare = parts, raw, bare
        self._begun = self._complete = False
        self._name, self._arguments = "", ""
        self._call_id: str | None = None
        self._scanner = Scanner()
        self._scanned = 0  # characters of the buffer that the scanner, or a search, has seen

    def _take_call(self) -> bool:
        """Take the next part of the call. False if it needs more text."""
        if self._form.listed and self._parts is self._form.parts:
            first = self._buffer.lstrip()[:1]
            if not first and not self._final:
                return False
            if first in ("[", "{"):
                self._parts = self._form.listed
        taken = self._take(self._parts[0])
        if taken is _WAIT and not self._final:
            return False
        if taken:
            self._parts = self._parts[1:]
            if self._parts:
                return True
        self._end_call()
        return True

    def _end_call(self) -> None:
        """End the call, whether its text is complete or not."""
        raw, self._after_call, self._parts = self._raw, self._complete, ()
        if not self._begun:
            self._events.append(Content(self._space + raw))
            self._space, self._fresh = "", False
        else:
            self._events.append(CallEnded(self._num_calls - 1, "" if self._complete else raw))

    def _take(self, part: Part) -> bool | None:
        match part:
            case str(text):
                return self._take_literal(text)
            case Maybe(text):
                return _TAKEN if (taken := self._take_literal(text)) is _WRONG else taken
            case Name(has_id):
                return self._take_name(has_id=has_id)
            case Json():
                return self._take_json()
            case Object():
                return self._take_object()
            case Pairs():
                return self._take_pairs(part)
            case PythonCalls():
                return self._take_python()

    def _skip_space(self) -> str:
        """Consume white space; return the rest of the buffer."""
        self._raw += self._consume(len(self._buffer) - len(self._buffer.lstrip()))
        return self._buffer

    def _move(self, size: int) -> str:
        """Consume text of the call."""
        text = self._consume(size)
        self._raw += text
        return text

    def _take_literal(self, literal: str) -> bool | None:
        text = self._buffer.lstrip()
        if text.startswith(literal):
            self._move(len(self._buffer) - len(text) + len(literal))
            return _TAKEN
        return _WAIT if literal.startswith(text) else _WRONG

    def _take_name(self, *, has_id: bool) -> bool | None:
        text = self._skip_space()
        found = _NAME.match(text)
        if found is None:
            return _WRONG if text else _WAIT
        if found.end() == len(text):
            return _WAIT
        self._name = self._move(found.end())
        if has_id and (parts := _ID_AND_NAME.fullmatch(self._name)):
            self._call_id, self._name = self._name, parts[1]
        return _TAKEN

    def _take_json(self) -> bool | None:
        if not self._begun:
            text = self._skip_space()
            if text[:1] != "{":
                return _WRONG if text else _WAIT
            self._begin()
        self._argue(self._move(self._scanner.scan(self._buffer)))
        if self._scanner.broken:
            return _WRONG
        if not self._scanner.ended:
            return _WAIT
        self._complete = as_object(self._arguments) is not None
        return self._complete

    def _take_object(self) -> bool | None:
        text = self._buffer if self._scanned else self._skip_space()
        if not text:
            return _WAIT
        if text[0] != "{" or _FIRST_KEY.match(text):
            return _WRONG
        if head := _HEAD.match(text):
            self._name = json.loads(head[1])
            if not self._is_wanted():
                return _WRONG
            self._move(head.end())
            self._scanner = Scanner()
            self._parts = (Object(), Json(), "}", *self._parts[1:])
            return _TAKEN
        self._scanned += self._scanner.scan(text[self._scanned :])
        if not self._scanner.ended:
            return _WRONG if self._scanner.broken else _WAIT
        call = name_and_arguments(text[: self._scanned])
        if call is None:
            return _WRONG
        self._name = call[0]
        if not self._is_wanted():
            return _WRONG
        self._move(self._scanned)
        self._begin()
        self._argue(call[1])
        self._complete = True
        return _TAKEN

    def _take_pairs(self, part: Pairs) -> bool | None:
        text, after = self._skip_space() if not self._scanned else self._buffer, self._parts[1]
        assert isinstance(after, str)
        if text.startswith(part.opening):
            found = text.find(part.closing, max(0, self._scanned - len(part.closing)))
            self._scanned = len(text)
            if found < 0:
                return _WAIT
            pair = part.pattern.match(text)
            if pair is None:
                return _WRONG
            if not self._begun:
                self._begin()
            value = typed(pair[2], self._schemas.get(self._name), pair[1])
            self._argue(f"{', ' if self._arguments else '{'}{to_json(pair[1])}: {to_json(value)}")
            self._move(pair.end())
            self._scanned = 0
            return self._take_pairs(part)
        if text.startswith(after):
            if not self._begun:
                self._begin()
            self._argue("}" if self._arguments else "{}")
            self._complete = True
            return _TAKEN
        return _WAIT if part.opening.startswith(text) or after.startswith(text) else _WRONG

    def _take_python(self) -> bool | None:
        text = self._buffer if self._scanned else self._skip_space()
        if not self._scanned:
            self._scanner = Scanner(python=True)
        if _PYTHON_START.fullmatch(text) is None:
            return _WRONG if text else _WAIT
        self._scanned += self._scanner.scan(text[self._scanned :])
        if not self._scanner.ended:
            return _WRONG if self._scanner.broken else _WAIT
        calls = python_calls(text[: self._scanned])
        if calls is None or (self._bare and any(name not in self._schemas for name, _ in calls)):
            return _WRONG
        self._move(self._scanned)
        for number, (name, arguments) in enumerate(calls):
            if number:
                self._events.append(CallEnded(self._num_calls - 1))
            self._name, self._complete = name, True
            self._begin()
            self._argue(arguments)
        return _TAKEN

    def _is_wanted(self) -> bool:
        """Whether the name may be a call. Without a marker, it must be the name of a tool: an answer may be JSON."""
        return not self._bare or self._name in self._schemas

    def _begin(self) -> None:
        letters = uuid.uuid4().hex
        call_id = self._call_id or (letters[:9] if self._form.short_ids else f"call_{letters[:24]}")
        self._events.append(CallBegun(self._num_calls, call_id, self._name))
        self._num_calls += 1
        self._begun = self._fresh = True
        self._space = ""

    def _argue(self, text: str) -> None:
        self._arguments += text
        self._events.append(Arguments(self._num_calls - 1, text))
