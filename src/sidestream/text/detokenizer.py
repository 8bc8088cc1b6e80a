"""Incremental detokenization, stop strings, the protocol of tokenizers, and the package's sample texts.

Knows nothing about requests or the engine. A `Detokenizer` and a `StopStrings` belong to one sample and one thread.
"""

from __future__ import annotations

import codecs
import importlib.resources
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

# Every eighth topic of the sample tasks is held out from training.
_HELD_OUT_EVERY = 8


class TokenizerLike(Protocol):
    """The part of a tokenizer that front ends use, from any thread: `sidestream.tokenizer.Tokenizer`, or a fake in
    tests.
    """

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        ...

    @property
    def eos_ids(self) -> Sequence[int]:
        """Token ids that end an answer."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True, most_tokens: int | None = None) -> list[int]:
        """Token ids of a text. Raises ContextTooLong if its length shows that it has more than `most_tokens`."""
        ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        most_tokens: int | None = None,
        **options: Any,
    ) -> list[int]:
        """Token ids of a conversation, formatted with the model's chat template.

        messages                each has a role, a content, and further fields that the template may read
        add_generation_prompt   end with the start of the assistant's turn
        continue_final_message  do not end the last message, so that the model continues it
        most_tokens             as in `encode`
        options                 variables of the template

        Raises ContextTooLong or RequestRejected. If an option is at fault, the error's `param` is the option's name.
        """
        ...

    def use_chat_template(self, path: Path) -> None:
        """Replace the model's chat template. Raises ConfigError for a file that is no template."""
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

    def special_id(self, text: str) -> int | None:
        """The id of the special token with this string; None if there is none."""
        ...

    @property
    def chat_template(self) -> str:
        """The text of the chat template that tools are for; empty if the model has none."""
        ...

    def detokenizer(self, after: Sequence[int] = (), shown: Collection[str] | None = ()) -> Detokenizer:
        """A new incremental detokenizer, for one sample.

        after   token ids of the text that the sample continues; empty: the sample begins a text
        shown   special tokens that have a text, their own name; other special tokens have none. None: all have one
        """
        ...


class Detokenizer:
    """Incremental detokenizer of one sample. The text is the tokens' bytes, decoded as UTF-8.

    The pieces that `push` and `finish` return, joined, are the text. No piece ends inside a character; the token that
    completes a character brings it. Bytes that are no character become U+FFFD.
    """

    def __init__(
        self, bytes_of: Callable[[int], bytes], first_bytes_of: Callable[[int], bytes | None] | None = None
    ) -> None:
        """
        bytes_of        the bytes of a token within a text; empty for a special token
        first_bytes_of  the bytes of a token that begins a text, if they differ: a tokenizer may omit the space in front
                        of a text's first word. The result None means that the token has no text, so the next token may
                        begin the text
        """
        self._bytes_of = bytes_of
        self._first_bytes_of = first_bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that it completes, empty while a character is incomplete."""
        return self._decoder.decode(self._take(token_id))

    def finish(self) -> str:
        """The text that `push` has not returned: U+FFFD for an incomplete character. Do not call `push` after it."""
        return self._decoder.decode(b"", final=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Add the sample's remaining tokens; returns all their text, like `push` for each and `finish`."""
        return self._decoder.decode(b"".join(map(self._take, token_ids)), final=True)

    def peek(self, token_id: int) -> tuple[str, bytes]:
        """The text that `push` would return for this token, and the token's bytes. Adds nothing."""
        first = None if self._first_bytes_of is None else self._first_bytes_of(token_id) or b""
        data = self._bytes_of(token_id) if first is None else first
        ahead = codecs.getincrementaldecoder("utf-8")("replace")
        return ahead.decode(self.pending + data), data

    @property
    def pending(self) -> bytes:
        """The bytes of an incomplete character at the end."""
        return self._decoder.getstate()[0]

    def _take(self, token_id: int) -> bytes:
        if self._first_bytes_of is None:
            return self._bytes_of(token_id)
        data = self._first_bytes_of(token_id)
        if data is None:
            return b""
        self._first_bytes_of = None
        return data


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
