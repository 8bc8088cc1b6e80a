"""Incremental detokenising, stop strings, the protocol of tokenizers, and the package's sample texts.

Knows nothing of requests or the engine. A `Detokenizer` and a `StopStrings` belong to one sample and one thread.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol

_LONG_WINDOW = 32  # tokens; one character takes a few at most
_UNDECIDED = "\ufffd"  # decoders return it for bytes that are no complete character

# One topic in this many is held out from training.
_HELD_OUT_EVERY = 8


class DetokenizerLike(Protocol):
    """Incremental text of one sample: `Detokenizer`, or a test's."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        ...

    def finish(self) -> str:
        """The rest of the text."""
        ...


class TokenizerLike(Protocol):
    """A tokenizer as front ends use it, from any thread: `sidestream.tokenizer.Tokenizer`, or a test's."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a plain prompt."""
        ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **options: Any,
    ) -> list[int]:
        """Token ids of a conversation, laid out by the model's chat template.

        messages                each has a role, a content, and further fields that the template may read
        add_generation_prompt   end with the start of the assistant's turn
        continue_final_message  leave the last message open: the model continues it
        options                 variables of the template

        Raises RequestRejected; for an option, its `param` is the option's name.
        """
        ...

    def template_knows(self, option: str) -> bool:
        """Whether the chat template reads this variable."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; U+FFFD for the bytes of an incomplete character."""
        ...

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it."""
        ...

    def detokenizer(self) -> DetokenizerLike:
        """A new incremental `decode`, for one sample."""
        ...


class Detokenizer:
    """Incremental text of one sample.

    The joined pieces of `push` and `finish` equal `decode` of all tokens. A piece never ends inside a character, and
    text that was returned never changes. Only the last few tokens are decoded again, so the work per token is bounded.
    """

    # _window  [0, _settled)      all of its text was returned; decoded again because a token's text depends on the
    #                             tokens before it
    #          [_settled, end)    its text was returned up to the last, undecided character
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
        special_ids  ids without text
        byte_ids     ids that stand for one byte of a character
        """
        self._decode = decode
        self._length_of = length_of
        self._special_ids = special_ids
        self._byte_ids = byte_ids
        self._window: list[int] = []
        self._settled = 0
        self._given = 0
        self._patience = 0  # decode the window again when it is this long

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; empty while a character is incomplete."""
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
        """Shorten a window that does not settle, such as a long run of broken bytes.

        Cut where the two halves decode to the same text as the whole: no character spans that position. If none of the
        last four positions works, hold text back until the window has grown by an eighth, which bounds the work.
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
    """Ends the text at the first complete stop string; holds back text that may be the start of one.

    Of two that are complete at the same character, the longer one counts. The split of the text into pieces makes no
    difference.

    include   return the stop string too
    matched   the stop string that was found
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._include = include
        self._lengths = [0] * len(self._stops)  # length of the longest prefix of each stop string that ends the text
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is certain now, and whether a stop string was found; after one was, always `("", True)`."""
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
        """The text held back, when the sample ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str:
        """Advance all stop strings by one character (Knuth, Morris and Pratt 1977). The longest complete one, or ""."""
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
    """Tasks for training a draft head, in a fixed order; `held_out`: about other topics, for judging the head."""
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
