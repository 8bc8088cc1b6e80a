"""Bytes of text that a token stands for at most. A text that cannot fit a model is refused before it is tokenised."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sidestream.errors import ContextTooLong

# Bytes that Unicode's normal forms make of one byte at least: a character of 4 bytes may become a letter of 1.
_NORMAL_FORM_SHRINKS = 4
_NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")


@dataclass(frozen=True, slots=True)
class TextBound:
    """A text of n bytes has at least n / `token_bytes` tokens.

    strips_spaces   some special tokens take the white space beside them, so white space does not count
    """

    token_bytes: int
    strips_spaces: bool


def check_length(text: str, most_tokens: int, bound: TextBound | None) -> None:
    """Raise ContextTooLong if `text` surely has more than `most_tokens` tokens. Without a bound, do nothing."""
    if bound is None or len(text) * 4 <= most_tokens * bound.token_bytes:
        return
    size = len(text.encode("utf-8"))
    if size > most_tokens * bound.token_bytes and bound.strips_spaces:
        size = len(re.sub(r"\s+", "", text).encode("utf-8"))
    if size > most_tokens * bound.token_bytes:
        raise ContextTooLong(
            f"the text has {size} bytes, so at least {-(-size // bound.token_bytes)} tokens (one stands for "
            f"at most {bound.token_bytes} bytes), the model takes {most_tokens}: shorten it",
            param="prompt",
        )


def text_bound(backend: PreTrainedTokenizerBase) -> TextBound | None:
    """The bound of a tokenizer; None if it may drop text or make one token of any number of unknown characters."""
    if not isinstance(backend, PreTrainedTokenizerFast):
        return None
    tokenizer = backend.backend_tokenizer
    shrinks, removes = _normalizer_shrinks(_state(tokenizer.normalizer)), _removes(_state(tokenizer.pre_tokenizer))
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    if shrinks is None or removes or not isinstance(tokenizer.model, BPE) or not vocab:
        return None
    if not _spells_every_byte(tokenizer, vocab):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    longest = max(len(token.encode("utf-8")) for token in (*vocab, *(token.content for token in added)))
    return TextBound(longest * shrinks, any(token.lstrip or token.rstrip for token in added))


def _spells_every_byte(tokenizer: Tokenizer, vocab: dict[str, int]) -> bool:
    if tokenizer.model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    by_bytes = "ByteLevel" in json.dumps(_state(tokenizer.pre_tokenizer))
    return by_bytes and all(letter in vocab for letter in pre_tokenizers.ByteLevel.alphabet())


def _state(part: Any) -> Any:
    """A normalizer or pre-tokenizer as in tokenizer.json."""
    return None if part is None else json.loads(part.__getstate__())


def _normalizer_shrinks(state: Any) -> int | None:
    """How many bytes may become one; None: no bound is known."""
    match state:
        case None | {"type": "Prepend"}:
            return 1
        case {"type": "Replace", "pattern": {"String": str(before)}, "content": str(after)}:
            return 1 if len(after.encode()) >= len(before.encode()) else None
        case {"type": "Sequence", "normalizers": list(steps)}:
            shrinks = 1
            for step in map(_normalizer_shrinks, steps):
                if step is None:
                    return None
                shrinks *= step
            return shrinks
        case {"type": str(form)} if form in _NORMAL_FORMS:
            return _NORMAL_FORM_SHRINKS
    return None


def _removes(state: Any) -> bool:
    """Whether a pre-tokenizer may drop text, such as white space."""
    match state:
        case None | {"type": "ByteLevel" | "Digits" | "Metaspace"}:
            return False
        case {"type": "Split" | "Punctuation", "behavior": str(behavior)}:
            return behavior == "Removed"
        case {"type": "Sequence", "pretokenizers": list(steps)}:
            return any(map(_removes, steps))
    return True
