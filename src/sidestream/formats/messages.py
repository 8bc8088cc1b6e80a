"""Splits answers that are sequences of messages, each with a header, as gpt-oss writes them (the format harmony):

    <|channel|>analysis<|message|>REASONING<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>
    <|start|>assistant<|channel|>final<|message|>CONTENT<|return|>

The prompt ends with the first `<|start|>assistant`. Headers vary: the recipient may come before the channel, without
`functions.`, or on another channel. A message to a tool becomes a call in the form of the table's row, for `calls.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from sidestream.formats.events import Content, Event, Reasoning, prefix_at_end

_MESSAGE = "<|message|>"
_HEADER = ("<|start|>", "<|channel|>", "to=", _MESSAGE)  # texts with which a header begins
_ENDS = ("<|end|>", "<|call|>", "<|return|>")  # of a message; a new header ends it, too
_RECIPIENT = re.compile(r"\bto=(functions\.)?([^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")
# A header without an end is text. Tools' names have up to 128 characters.
_LONGEST_HEADER = 512


class MessageSplitter:
    """The splitter of one answer. Texts of several messages of one kind are joined by a line break.

    tools    names of the tools
    inside   the answer begins inside a message of reasoning
    """

    def __init__(self, tools: Collection[str], *, inside: bool = False) -> None:
        self._tools = tools
        self._buffer = ""
        self._final = False
        self._kind: type[Content] | type[Reasoning] | None = Reasoning if inside else None  # None: in a header
        self._is_call = False
        self._said: set[type[Content] | type[Reasoning]] = set()
        self._gap = ""  # before the next text of the message

    def feed(self, text: str) -> list[Event]:
        """The parts of the answer that more text brings."""
        self._buffer += text
        events: list[Event] = []
        while self._buffer and (self._read_header(events) if self._kind is None else self._read_text(events)):
            pass
        return events

    def finish(self) -> list[Event]:
        """The last parts. Do not call `feed` after it."""
        self._final = True
        return self.feed("")

    def _read_header(self, events: list[Event]) -> bool:
        """Read the header of a message, or find that there is none. False if that needs more text."""
        text = self._buffer.lstrip()
        is_header = text.startswith(_HEADER)
        if not is_header and not self._final and any(start.startswith(text) for start in _HEADER):
            return False
        end = text.find(_MESSAGE, 0, _LONGEST_HEADER) if is_header else -1
        if is_header and end < 0 and len(text) < _LONGEST_HEADER and (not self._final or "<|" in text):
            return False  # if the answer ends here, the header is no text
        if end < 0:
            self._begin(Content)
            self._say(1, events)  # behind it, there is no header
            return True
        header, self._buffer = text[:end], text[end + len(_MESSAGE) :]
        recipient = _RECIPIENT.search(header)
        self._is_call = recipient is not None and (bool(recipient[1]) or recipient[2] in self._tools)
        if self._is_call and recipient is not None:
            self._kind = Content
            events.append(Content(f"<|channel|>commentary to=functions.{recipient[2]} <|constrain|>json{_MESSAGE}"))
        else:
            self._begin(Reasoning if _ANALYSIS.search(header) else Content)
        return True

    def _begin(self, kind: type[Content] | type[Reasoning]) -> None:
        self._kind, self._gap = kind, "\n" if kind in self._said else ""

    def _read_text(self, events: list[Event]) -> bool:
        """Read the text of a message. False if it may go on."""
        markers = (*_ENDS, *_HEADER[:2])
        found = [(self._buffer.find(marker), marker) for marker in markers if marker in self._buffer]
        end, marker = min(found, default=(len(self._buffer), ""))
        if not found and not self._final:
            end -= prefix_at_end(self._buffer, markers)
        self._say(end, events)
        self._buffer = self._buffer[len(marker) * (marker in _ENDS) :]
        if found:
            self._kind, self._is_call = None, False
        return bool(found)

    def _say(self, size: int, events: list[Event]) -> None:
        """Pass text on."""
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        assert self._kind is not None
        if text:
            events.append(self._kind(self._gap + text))
            self._gap = ""
            self._said |= set() if self._is_call else {self._kind}
