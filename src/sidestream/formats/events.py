"""What a parser finds in an answer, in the order of the text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call whose name is known. `index` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of a call's arguments, which are the JSON text of an object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The end of a call.

    malformed   the call as the model wrote it, if its arguments are no complete JSON object; else empty
    """

    index: int
    malformed: str = ""


Event = Content | Reasoning | CallBegun | Arguments | CallEnded


def merged(events: list[Event]) -> list[Event]:
    """The events, with neighbours of the same kind joined and without empty texts."""
    out: list[Event] = []
    for event in events:
        match out[-1] if out else None, event:
            case _, Content("") | Reasoning("") | Arguments(_, ""):
                pass
            case Content(before), Content(text):
                out[-1] = Content(before + text)
            case Reasoning(before), Reasoning(text):
                out[-1] = Reasoning(before + text)
            case Arguments(index, before), Arguments(other, text) if index == other:
                out[-1] = Arguments(index, before + text)
            case _:
                out.append(event)
    return out


def prefix_at_end(text: str, markers: tuple[str, ...]) -> int:
    """Number of characters at the end of `text` that may be the start of a marker."""
    longest = max(map(len, markers), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(marker.startswith(tail) for marker in markers):
            return size
    return 0
