"""A tokenizer for the toy model: one token per character, so that every stop string of two characters spans tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sidestream.errors import RequestRejected
from sidestream.text import Detokenizer

EOS_ID = 0


class ToyTokenizer:
    """Id 0 ends an answer and has no text; 1 to 95 are the printable ASCII characters, 96 is a new line, higher ids are
    other characters, without surrogates.
    """

    eos_ids = (EOS_ID,)
    vocab_size = 0x110000 - 0x100 - 0x800  # number of ids
    chat_template = ""

    def encode(self, text: str, *, add_special_tokens: bool = True, most_tokens: int | None = None) -> list[int]:
        """One id per character. Raises RequestRejected for a character without an id."""
        for character in text:
            if _text(_token(character)) != character:
                raise RequestRejected(
                    f"the text holds {character!r}: the toy tokenizer knows printable ASCII and new lines",
                    param="prompt",
                )
        return [_token(character) for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """One character per id."""
        return "".join(_text(token_id) for token_id in token_ids)

    def detokenizer(self, after: Sequence[int] = (), shown: Collection[str] | None = ()) -> Detokenizer:
        """A new incremental decoder."""
        return Detokenizer(text_bytes)

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """The character of each id."""
        return [_text(token_id) for token_id in token_ids]

    def special_id(self, text: str) -> int | None:
        """Always None: no token is special."""
        return None

    def use_chat_template(self, path: Path) -> None:
        """Take the text of the file for the chat template."""
        self.chat_template = path.read_text(encoding="utf-8")

    def template_knows(self, option: str) -> bool:
        """Always False: the chat template has no options."""
        return False

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """One line per message, then the start of the assistant's turn."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + "assistant: ")


def text_bytes(token_id: int) -> bytes:
    """The UTF-8 bytes of the token's character; empty for the end of sequence."""
    return _text(token_id).encode()


def _text(token_id: int) -> str:
    if token_id <= 0:
        return ""
    if token_id <= 96:
        return chr(31 + token_id) if token_id <= 95 else "\n"
    code = 0x100 + token_id
    return chr(code if code < 0xD800 else code + 0x800)


def _token(character: str) -> int:
    code = ord(character)
    if code > 0x100 + 96:
        return code - 0x100 - 0x800 * (code >= 0xE000)
    return 96 if character == "\n" else max(code - 31, 0)
