"""A model's tokenizer and chat template, and the largest number of bytes of text that one token stands for. Knows
nothing about requests or the engine; any thread may use it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError, TemplateRuntimeError
from tokenizers.models import BPE
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import cached_file

from sidestream.checkpoint_files import GENERATION_CONFIG, read_json
from sidestream.errors import ConfigError, ContextTooLong, ModelError, RequestRejected
from sidestream.text import Detokenizer
from sidestream.text.chat_template import ChatTemplate


class Tokenizer:
    """Encodes text and messages; decodes token ids.

    eos_ids      end-of-sequence ids, from the generation config (if it has none, from the model's config) and from the
                 tokenizer
    special_ids  ids of special tokens, which have no text, such as the end of sequence; `decode` skips them
    vocab_size   one more than the largest id; the model's logits may have more columns
    """

    def __init__(self, backend: PreTrainedTokenizerBase, *, eos_ids: Sequence[int]) -> None:
        self._backend = backend
        self.eos_ids = tuple(sorted(set(eos_ids)))
        self.special_ids = _special_ids(backend)
        self.vocab_size = max(backend.get_vocab().values()) + 1
        decode = _decode_of(backend)
        self._bytes = _TokenBytes(backend, decode, self.special_ids)
        self._check_bytes(decode)
        self._template = ChatTemplate(backend)
        self.text_bound = text_bound(backend)

    @classmethod
    def load(cls, model: str) -> Tokenizer:
        """Load the tokenizer of a transformers directory or a hub id. Raises ModelError."""
        try:
            pieces = _sentencepiece_file(model)
            backend = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
            backend.chat_template = backend.chat_template or _legacy_template(model)
        except ModelError:
            raise
        except Exception as fault:  # transformers raises anything from OSError to KeyError here
            if "trust_remote_code" in str(fault):
                raise ModelError(
                    f"the tokenizer in {model} needs code of its own (auto_map in tokenizer_config.json), "
                    "which Sidestream never runs: add a tokenizer.json and remove auto_map, or choose another model"
                ) from fault
            raise _no_tokenizer(model, _first_line(fault)) from fault
        if not backend.get_vocab():
            raise _no_tokenizer(model, "its vocabulary is empty")
        if pieces is not None:
            _check_conversion(backend, pieces)
        return cls(backend, eos_ids=_eos_ids(model, backend))

    def check_equal(self, other: Tokenizer, *, name: str) -> None:
        """Raise ModelError unless each token has the same id in `other`, the tokenizer of the draft model `name`."""
        ours, theirs = self._backend.get_vocab(), other._backend.get_vocab()
        for token, number in sorted(ours.items(), key=lambda item: item[1]):
            if theirs.get(token) != number:
                raise ModelError(
                    f"the draft model {name} has another tokenizer: "
                    f"{token!r} is {theirs.get(token, 'no token')} there, {number} here "
                    f"({len(theirs)} tokens there, {len(ours)} here); take a draft model of the same family"
                )

    def encode(self, text: str, *, add_special_tokens: bool = True, most_tokens: int | None = None) -> list[int]:
        """Token ids of `text`. `add_special_tokens` adds the model's special tokens, such as a beginning of sequence.

        most_tokens   refuse a text if its length alone proves that it has more tokens: tokenising takes 150 bytes of
                      memory for each byte of text

        Raises RequestRejected when `text` is not valid Unicode; ContextTooLong.
        """
        _check_unicode(text)
        if most_tokens is not None:
            check_length(text, most_tokens, self.text_bound)
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`, with no clean-up of spaces. Bytes that are no character become U+FFFD."""
        if skip_special_tokens:
            return self.detokenizer().decode(token_ids)
        return str(self._backend.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's string for each token, such as `Ġhello`; empty for an id without a token."""
        return [token or "" for token in self._backend.convert_ids_to_tokens(list(token_ids))]

    def to_json(self) -> str:
        """The content of the tokenizer's tokenizer.json."""
        return str(self._backend.backend_tokenizer.to_str())

    def detokenizer(self, after: Sequence[int] = (), shown: Collection[str] | None = ()) -> Detokenizer:
        """A new incremental detokenizer, for one sample.

        after   token ids of the text that the sample continues; empty: the sample begins a text
        shown   special tokens that have a text, their own name; other special tokens have none. None: all have one
        """
        within, first = self._bytes.__getitem__, self._bytes.first
        if shown is None or shown:
            added = self._backend.get_added_vocab()
            chosen = added if shown is None else shown
            names = {added[name]: name.encode() for name in chosen if added.get(name) in self.special_ids}
            if names:
                return Detokenizer(
                    lambda token_id: names.get(token_id) or within(token_id),
                    None if self._continues(after) else lambda token_id: names.get(token_id) or first(token_id),
                )
        return Detokenizer(within, None if self._continues(after) else first)

    def _continues(self, after: Sequence[int]) -> bool:
        return any(token_id not in self.special_ids for token_id in after)

    def special_id(self, text: str) -> int | None:
        """The id of the special token with this string; None if there is none."""
        token_id = self._backend.get_added_vocab().get(text)
        return token_id if token_id in self.special_ids else None

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, most_tokens: int | None = None, **options: Any
    ) -> list[int]:
        """Token ids of a conversation. For options and errors see `ChatTemplate.render`, for `most_tokens` see
        `encode`.
        """
        text = self._template.render(messages, **options)
        return self.encode(text, add_special_tokens=False, most_tokens=most_tokens)

    @property
    def chat_template(self) -> str:
        """The text of the chat template that tools are for; empty if the model has none."""
        return self._template.text

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._template.exists

    def use_chat_template(self, path: Path) -> None:
        """Replace the model's chat template. Raises ConfigError for a file that is no template."""
        before = self._backend.chat_template
        try:
            self._backend.chat_template = path.read_text(encoding="utf-8")
            with contextlib.suppress(TemplateRuntimeError):  # it may refuse this conversation
                self._backend.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        except (OSError, ValueError, TemplateError) as fault:
            self._backend.chat_template = before
            raise ConfigError(f"chat_template is {path}, which is no chat template: {fault}") from fault
        self._template = ChatTemplate(self._backend)

    def template_knows(self, option: str) -> bool:
        """Whether the chat template reads this variable, such as reasoning_effort."""
        return self._template.knows(option)

    def _check_bytes(self, decode: Callable[[list[int]], str]) -> None:
        """Raise ModelError if the tokens' bytes do not spell the text that the library decodes."""
        for text in _PROBES:
            ids = self._backend.encode(text, add_special_tokens=False)
            ours, theirs = self.decode(ids), decode(ids)
            if ours != theirs:
                raise ModelError(
                    f"the decoder of this {type(self._backend).__name__} is not supported: the text of its tokens "
                    f"depends on the tokens behind them ({theirs!r} in place of {ours!r}); "
                    "choose a model whose tokenizer is byte-level BPE or SentencePiece"
                )


class _TokenBytes(dict[int, bytes]):
    """The bytes of each token within a text. Made when they are first needed, because a vocabulary is large.

    A part of a character has the bytes that its name spells: `Ã` in byte-level BPE, `<0xC3>` in SentencePiece. Every
    other token has the text that the library adds for it behind another token.
    """

    def __init__(self, backend: PreTrainedTokenizerBase, decode: Callable[[list[int]], str], skipped: Set[int]) -> None:
        self._name_of: Callable[[int], str | None] = backend.convert_ids_to_tokens
        self._decode = decode
        self._skipped = skipped
        decoder = getattr(getattr(backend, "backend_tokenizer", None), "decoder", None)
        self._is_byte_level = decoder is not None and decoder.decode(["Ã", "©"]) == "é"

    def first(self, token_id: int) -> bytes | None:
        """The bytes of a token at the start of a text; None if the token has no text there or elsewhere."""
        data = self[token_id]
        if not data:
            return None
        # The library omits the space of a text's first word, but cannot decode a part of a character alone.
        is_part = len(data) == 1 and data[0] >= 0x80
        return data if self._is_byte_level or is_part else self._decode([token_id]).encode()

    def __missing__(self, token_id: int) -> bytes:
        data = self[token_id] = self._made(token_id)
        return data

    def _made(self, token_id: int) -> bytes:
        name = None if token_id in self._skipped else self._name_of(token_id)
        if name is None:
            return b""
        if self._is_byte_level:
            known = all(letter in _BYTE_OF_LETTER for letter in name)
            return bytes(_BYTE_OF_LETTER[letter] for letter in name) if known else name.encode()
        alone = self._decode([token_id])
        if _BYTE_TOKEN.fullmatch(name) and alone != name:
            return bytes.fromhex(name[3:5])
        return self._decode([token_id, token_id]).removeprefix(alone).encode()


_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_BYTE_OF_LETTER = {letter: byte for byte, letter in bytes_to_unicode().items()}


def _decode_of(backend: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """The function for `decode` without special tokens and without clean-up of spaces. For a fast tokenizer whose class
    does not override `decode`, it calls the Rust tokenizer directly, which is five times as fast.
    """
    fast, kind = PreTrainedTokenizerFast, type(backend)
    if isinstance(backend, fast) and kind.decode is fast.decode and kind._decode is fast._decode:
        return functools.partial(backend.backend_tokenizer.decode, skip_special_tokens=True)

    def decode(token_ids: list[int]) -> str:
        text = backend.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # transformers returns a list only for a batch of texts
        return text

    return decode


def _special_ids(backend: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that `decode` skips. Each candidate is decoded, because the tokenizer's lists may be wrong."""
    listed = {index for index, token in backend.added_tokens_decoder.items() if token.special} | set(
        backend.all_special_ids
    )
    return frozenset(
        index
        for index in listed
        if not backend.decode([index], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


def _eos_ids(model: str, backend: PreTrainedTokenizerBase) -> list[int]:
    # Not read with transformers' class, because the class warns that sampling options may be ignored, but Sidestream
    # applies them.
    path = _file_of(model, GENERATION_CONFIG)
    found = None if path is None else read_json(path).get("eos_token_id")
    if found is None:
        with contextlib.suppress(OSError, ValueError):  # the model has no config, or transformers does not know it
            found = getattr(AutoConfig.from_pretrained(model, trust_remote_code=False), "eos_token_id", None)
    declared = [] if found is None else list(found) if isinstance(found, list | tuple) else [found]
    own = backend.eos_token_id
    return declared if own is None else [*declared, own]


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as fault:
        raise RequestRejected(
            f"the text is not valid Unicode: character {fault.start} is the lone surrogate "
            f"U+{ord(text[fault.start]):04X}; send UTF-8"
        ) from fault


def _file_of(model: str, name: str) -> Path | None:
    """Path of a file in a transformers directory or a hub id; None if the file does not exist."""
    quietly = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = cached_file(model, name, **quietly)
    return None if found is None else Path(found)


def _sentencepiece_file(model: str) -> Path | None:
    """Path of the SentencePiece model, if the tokenizer has no tokenizer.json; else None. Raises ModelError if
    `sentencepiece` or `protobuf` cannot be loaded.

    Call it before transformers loads the tokenizer: without these packages, transformers takes the file for a tiktoken
    file and asks the user to install tiktoken.
    """
    if _file_of(model, "tokenizer.json") is not None:
        return None
    path = next((path for name in _SENTENCEPIECE if (path := _file_of(model, name)) is not None), None)
    if path is None or not _starts_like_sentencepiece(path):
        return None
    try:
        importlib.import_module("sentencepiece.sentencepiece_model_pb2")  # also imports protobuf
    except Exception as fault:  # protobuf raises errors of its own
        raise ModelError(
            f"the tokenizer in {model} is a SentencePiece model ({path.name}) without a tokenizer.json, and "
            f"the packages that read it cannot be loaded ({_first_line(fault)}): "
            "pip install 'sidestream[sentencepiece]'"
        ) from fault
    return path


def _starts_like_sentencepiece(path: Path) -> bool:
    """Whether the file is a protobuf that starts with field 1, as SentencePiece models do. A tiktoken file may have the
    same name, but it is text.
    """
    with path.open("rb") as file:
        return file.read(1) == b"\n"


_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_PROBES = (
    "The whale, 1,234 fathoms down, didn't care.",
    "caf\u00e9 \u20ac5 \u6f22\u5b57 \U0001f40b",
    "def f(x):\n    return x + 1\n",
)


def _check_conversion(backend: PreTrainedTokenizerBase, path: Path) -> None:
    """Raise ModelError if transformers' converted tokenizer gives other ids than SentencePiece, because transformers
    may have chosen a class that does not suit the model.
    """
    from sentencepiece import SentencePieceProcessor

    original = SentencePieceProcessor(model_file=str(path))
    for text in _PROBES:
        ours, theirs = backend.encode(text, add_special_tokens=False), original.encode(text)
        if ours != theirs:
            raise ModelError(
                f"{path}: transformers converts it to a {type(backend).__name__} that gives other token ids than "
                f"SentencePiece ({ours[:8]} in place of {theirs[:8]} for {text!r}): "
                "name its tokenizer_class in tokenizer_config.json, or add a tokenizer.json"
            )


def _legacy_template(model: str) -> str | None:
    """The chat template in chat_template.json, an older format that transformers reads only for multimodal processors.
    None if the file does not exist.
    """
    path = _file_of(model, "chat_template.json")
    if path is None:
        return None
    template = read_json(path).get("chat_template")
    if not isinstance(template, str):
        raise ModelError(f"{path} has no text chat_template: correct the file, or remove it")
    return template


def _no_tokenizer(model: str, reason: str) -> ModelError:
    return ModelError(
        f"no usable tokenizer in {model}: {reason}; "
        "a transformers directory has a tokenizer.json beside its config.json"
    )


def _first_line(fault: Exception) -> str:
    return next(iter(str(fault).splitlines()), "") or type(fault).__name__


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
    """Raise ContextTooLong if `text` surely has more than `most_tokens` tokens; it is not tokenised for that. Without a
    bound, do nothing.
    """
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


def _spells_every_byte(tokenizer: tokenizers.Tokenizer, vocab: dict[str, int]) -> bool:
    if tokenizer.model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    by_bytes = "ByteLevel" in json.dumps(_state(tokenizer.pre_tokenizer))
    return by_bytes and all(letter in vocab for letter in tokenizers.pre_tokenizers.ByteLevel.alphabet())


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
