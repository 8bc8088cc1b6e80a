"""Text that grows token by token, stop strings in it, and the texts that come with the package.

Knows nothing of requests or the engine. A `Detokenizer` and a `StopStrings` belong to one sample, and to whichever
thread handles it.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from typing import Protocol

_LONG_WINDOW = 32  # tokens; one character takes a few at most
_UNDECIDED = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet

# Of the topics of tasks, one in so many is held out.
_HELD_OUT_EVERY = 8


class Decoder(Protocol):
    """What text is made with: `sidestream.tokenizer.Tokenizer`, which takes seconds to import and is of no use without
    a model.
    """

    special_ids: frozenset[int]
    """Ids that stand for no text."""
    byte_ids: frozenset[int]
    """Ids that stand for a byte of a character."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`; bytes that are no character become U+FFFD."""
        ...

    def length_of(self, token_id: int) -> int:
        """How many characters one token's text has."""
        ...


class Detokenizer:
    """Text of one sample, as its tokens come.

    The pieces of `push` and `finish` joined are exactly `Decoder.decode` of all tokens. A piece never ends inside a
    character, and nothing that was given out changes later. The work per token does not grow with the length of the
    text: only the last few tokens are decoded again.
    """

    # _window  [0, _settled)      gave out all of its text; decoded again because a token's text depends on what is
    # before it
    #          [_settled, end)    text given out up to the last, undecided character
    # _given   how many characters of the window's text were given out

    def __init__(self, tokenizer: Decoder) -> None:
        self._decode = tokenizer.decode
        self._length_of = tokenizer.length_of
        self._special_ids = tokenizer.special_ids
        self._byte_ids = tokenizer.byte_ids
        self._window: list[int] = []
        self._settled = 0
        self._given = 0
        self._patience = 0  # the window is not decoded before it is this long

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; often none, while a character is incomplete."""
        if token_id in self._special_ids:
            return ""
        self._window.append(token_id)
        if token_id in self._byte_ids:
            return ""  # a run of bytes becomes characters all together or not at all, so wait for its end
        if len(self._window) < self._patience:
            return ""
        text = self._decode(self._window)
        undecided = text.endswith(_UNDECIDED)
        piece = self._give(text, len(text) - undecided)
        if piece and not undecided:
            self._keep_from(self._settled)
        elif len(self._window) > _LONG_WINDOW:
            self._cut(text)
        return piece

    def finish(self) -> str:
        """The rest; incomplete characters become U+FFFD. No push after it."""
        text = self._decode(self._window)
        return self._give(text, len(text))

    def _give(self, text: str, stop: int) -> str:
        piece = text[self._given : stop]
        self._given += len(piece)
        return piece

    def _keep_from(self, index: int) -> None:
        self._window = self._window[index:]
        self._settled = len(self._window)
        self._given = self._length_of(self._window[0]) if len(self._window) == 1 else len(self._decode(self._window))
        self._patience = 0

    def _cut(self, text: str) -> None:
        """Shorten a window that does not settle, as when a model writes nothing but broken bytes.

        It may be cut where the two halves decode to the same text as the whole: no character spans that place. Where
        none of the last places will do, text is held back until the window has grown by an eighth, so that the work
        stays bounded.
        """
        for index in range(len(self._window) - 1, len(self._window) - 5, -1):
            head, tail = self._decode(self._window[:index]), self._decode(self._window[index:])
            if tail and head + tail == text and len(head) <= self._given:
                self._window = self._window[index:]
                self._settled = 0
                self._given -= len(head)
                self._patience = 0
                return
        self._patience = len(self._window) + len(self._window) // 8


class StopStrings:
    """Holds back text that may be the start of a stop string, and ends the text at the first one that is complete.

    Of two that are complete at the same character the longer one counts. How the text was split into pieces makes no
    difference. `include` gives out the stop string too. `matched` names the one that was found.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._include = include
        self._lengths = [0] * len(self._stops)  # how much of each stop string the text ends with
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Text that may be shown now, and whether a stop string was found. After that, always `("", True)`."""
        if self.matched is not None:
            return "", True
        if not self._stops:
            return text, False
        for index, character in enumerate(text):
            found = self._step(character)
            if found:
                return self._stop(self._held + text[: index + 1], found), True
        text = self._held + text
        shown = len(text) - max(self._lengths)
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str:
        """Follow every stop string by one character (Knuth, Morris and Pratt 1977); the longest that is complete, or
        "".
        """
        found = ""
        for index, stop in enumerate(self._stops):
            length = self._lengths[index]
            while length and stop[length] != character:
                length = self._borders[index][length - 1]
            length += stop[length] == character
            self._lengths[index] = length
            if length == len(stop) > len(found):
                found = stop
        return found

    def _stop(self, text: str, found: str) -> str:
        self.matched = found
        self._held = ""
        return text if self._include else text[: len(text) - len(found)]


def sample_text() -> str:
    """The first chapter of Moby-Dick (1851, public domain): a real text of about 2,800 tokens, for demos, benchmarks
    and tests.
    """
    return importlib.resources.files("sidestream").joinpath("data", "loomings.txt").read_text(encoding="utf-8")


def sample_tasks(*, held_out: bool = False) -> list[str]:
    """Questions and tasks of many kinds, for training a head; `held_out`: others, about other topics, for judging it.
    In a fixed order.
    """
    data = importlib.resources.files("sidestream").joinpath("data")
    tasks, topics = (
        data.joinpath(name).read_text(encoding="utf-8").splitlines() for name in ("tasks.txt", "topics.txt")
    )
    chosen = [topic for number, topic in enumerate(topics) if (number % _HELD_OUT_EVERY == 0) == held_out]
    return [task.format(topic=topic) for topic in chosen for task in tasks]


def _borders(stop: str) -> tuple[int, ...]:
    """For every prefix of `stop`, the length of its longest proper suffix that is a prefix of `stop` too."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        length += stop[index] == stop[length]
        borders[index] = length
    return tuple(borders)
