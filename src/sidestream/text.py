"""Incremental detokenization, stop strings, the protocol of tokenizers, and the package's sample texts.

Knows nothing about requests or the engine. A `Detokenizer` and a `StopStrings` belong to one sample and one thread.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol

_LONG_WINDOW = 32  # tokens; far more than the tokens of one character
_UNDECIDED = "\ufffd"  # decoders return it for bytes that are no complete character

# Every eighth topic of the sample tasks is held out from training.
_HELD_OUT_EVERY = 8


class DetokenizerLike(Protocol):
    """Incremental detokenizer of one sample: `Detokenizer`, or a fake in tests."""

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that became certain with this token."""
        ...

    def finish(self) -> str:
        """The text that `push` has not returned yet."""
        ...


class TokenizerLike(Protocol):
    """The part of a tokenizer that front ends use, from any thread: `sidestream.tokenizer.Tokenizer`, or a fake in
    tests.
    """

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **options: Any,
    ) -> list[int]:
        """Token ids of a conversation, formatted with the model's chat template.

        messages                each has a role, a content, and further fields that the template may read
        add_generation_prompt   end with the start of the assistant's turn
        continue_final_message  do not end the last message, so that the model continues it
        options                 variables of the template

        Raises RequestRejected. If an option is at fault, the error's `param` is the option's name.
        """
        ...

    def template_knows(self, option: str) -> bool:
        """Whether the chat template reads this variable."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; U+FFFD for the bytes of an incomplete character."""
        ...

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's string for each token."""
        ...

    def detokenizer(self) -> DetokenizerLike:
        """A new incremental detokenizer, for one sample."""
        ...


class Detokenizer:
    """Incremental detokenizer of one sample.

    The pieces that `push` and `finish` return, joined, equal `decode` of all tokens. A piece never ends inside a
    character, and text that was returned never changes. Only the last few tokens (the window) are decoded again, so
    the work per token is bounded.
    """

    # _window  [0, _settled)      tokens whose text was returned; they are decoded again because the text of the next
    #                             tokens depends on them
    #          [_settled, end)    tokens whose text was returned, except for a last, incomplete character
    # _given   number of characters of the window's text that were returned

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        length_of: Callable[[int], int],
        *,
        special_ids: Set[int] = frozenset(),
        byte_ids: Set[int] = frozenset(),
    ) -> None:
        """
        decode       text of token ids; U+FFFD for bytes that are no character
        length_of    number of characters of one token's text
        special_ids  ids of special tokens, which have no text
        byte_ids     ids of byte tokens, which stand for one byte of a character
        """
        self._decode = decode
        self._length_of = length_of
        self._special_ids = special_ids
        self._byte_ids = byte_ids
        self._window: list[int] = []
        self._settled = 0
        self._given = 0
        self._patience = 0  # length of the window at which it is decoded again

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that became certain, empty while a character is incomplete."""
        if token_id in self._special_ids:
            return ""
        self._window.append(token_id)
        if token_id in self._byte_ids:
            return ""  # a run of bytes decodes as a whole: wait for its end
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
        """The text that `push` has not returned; incomplete characters become U+FFFD. Do not call `push` after it."""
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
        """Shorten a window whose last character stays incomplete, such as a long run of invalid bytes.

        Cut the window at a position that no character spans: there, the text of both parts together equals the text of
        the whole window. If none of the last four positions qualifies, decode again only when the window has grown by
        an eighth, which bounds the work.
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
    """Ends the text at the first complete stop string. Holds back text that may be the start of a stop string.

    If two stop strings end at the same character, the longer one counts. The result does not depend on how the text is
    split into pieces.

    include   return the stop string, too
    matched   the stop string that was found; None: no stop string yet
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._include = include
        self._lengths = [0] * len(self._stops)  # per stop string: length of its longest prefix that the text ends with
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Add text. Returns the text that no stop string can contain any more, and whether a stop string was found.

        After a stop string was found, always `("", True)`.
        """
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
        """The text that was held back, for a sample that ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str:
        """Match one more character against all stop strings (Knuth, Morris and Pratt 1977). Returns the longest stop
        string that ends here, or "".
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
    """The first chapter of Moby-Dick (1851, public domain), about 2,800 tokens: for demos, benchmarks and tests."""
    return importlib.resources.files("sidestream").joinpath("data", "loomings.txt").read_text(encoding="utf-8")


def sample_tasks(*, held_out: bool = False) -> list[str]:
    """Tasks for training a draft head, in a fixed order. `held_out`: tasks about other topics, for testing the head."""
    data = importlib.resources.files("sidestream").joinpath("data")
    tasks, topics = (
        data.joinpath(name).read_text(encoding="utf-8").splitlines() for name in ("tasks.txt", "topics.txt")
    )
    chosen = [topic for number, topic in enumerate(topics) if (number % _HELD_OUT_EVERY == 0) == held_out]
    return [task.format(topic=topic) for topic in chosen for task in tasks]


def _borders(stop: str) -> tuple[int, ...]:
    """The KMP failure table: for every prefix of `stop`, the length of the prefix's longest proper suffix that is also
    a prefix of `stop`.
    """
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        length += stop[index] == stop[length]
        borders[index] = length
    return tuple(borders)
