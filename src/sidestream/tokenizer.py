"""A model's tokenizer and its chat template. Knows nothing about requests or the engine; any thread may use it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import cached_file

from sidestream.checkpoint_files import GENERATION_CONFIG, read_json
from sidestream.config import unknown_name
from sidestream.errors import ModelError, RequestRejected
from sidestream.text import Detokenizer

# Parameters of apply_chat_template. They are not allowed as template options, because an option would replace them.
_TEMPLATE_CALL = frozenset({"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters})
_ROLES = ("system", "developer", "user", "assistant", "tool")


class Tokenizer:
    """Encodes text and messages; decodes token ids.

    eos_ids      end-of-sequence ids, from the generation config (if it has none, from the model's config) and from the
                 tokenizer
    special_ids  ids of special tokens, which have no text, such as the end of sequence; `decode` skips them
    byte_ids     byte tokens of a SentencePiece model. They spell characters that have no token: <0xE2><0x82><0xAC> is €
    vocab_size   one more than the largest id; the model's logits may have more columns
    """

    def __init__(self, backend: PreTrainedTokenizerBase, *, eos_ids: Sequence[int]) -> None:
        self._backend = backend
        self._text_of = _text_of(backend)
        self.eos_ids = tuple(sorted(set(eos_ids)))
        self.special_ids = _special_ids(backend)
        self.vocab_size = max(backend.get_vocab().values()) + 1
        self.byte_ids = _byte_ids(backend.get_vocab())
        self._lengths: dict[int, int] = {}

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

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. `add_special_tokens` adds the model's special tokens, such as a beginning of sequence.

        Raises RequestRejected when `text` is not valid Unicode.
        """
        _check_unicode(text)
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`, with no clean-up of spaces. Bytes that are no character become U+FFFD."""
        if skip_special_tokens:
            return self._text_of(list(token_ids))
        return str(self._backend.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's string for each token, such as `Ġhello`; empty for an id without a token."""
        return [token or "" for token in self._backend.convert_ids_to_tokens(list(token_ids))]

    def length_of(self, token_id: int) -> int:
        """Number of characters of one token's text. Cached, because detokenizing needs it for every sampled token."""
        length = self._lengths.get(token_id)
        if length is None:
            length = self._lengths[token_id] = len(self.decode([token_id]))
        return length

    def detokenizer(self) -> Detokenizer:
        """A new incremental detokenizer, for one sample."""
        return Detokenizer(self.decode, self.length_of, special_ids=self.special_ids, byte_ids=self.byte_ids)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> list[int]:
        """Token ids of a conversation, formatted with the model's chat template.

        messages                each has a role (system, developer, user, assistant, tool) and a content: a string or a
                                list of parts `{"type": "text", "text": …}`; an assistant's message with tool_calls
                                may omit the content
        add_generation_prompt   end with the start of the assistant's turn
        continue_final_message  do not end the last message, so that the model continues it
        options                 variables of the template, such as enable_thinking

        Raises RequestRejected if the model has no template, if the template refuses the messages, or if it does not
        read the given `tools`, tool calls, role `tool` or an option. So no argument is ignored silently.
        """
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
            example = '[{"role": "user", "content": "Hello"}]'
            reason = f"messages is {reprlib.repr(messages)}: give a list of messages, such as {example}"
            raise RequestRejected(reason, param="messages")
        conversation = [_message(index, message) for index, message in enumerate(messages)]
        if not conversation:
            raise RequestRejected("messages is empty: give at least one", param="messages")
        self._check_template(conversation, tools, options)
        try:
            text = self._backend.apply_chat_template(
                conversation,
                tools=_as_dicts(tools),
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                tokenize=False,
                **options,
            )
        except Exception as fault:  # a template may raise any exception
            raise RequestRejected(
                f"the model's chat template refuses these messages: {_first_line(fault)}", param="messages"
            ) from fault
        return self.encode(str(text), add_special_tokens=False)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._backend.chat_template is not None

    def template_knows(self, option: str) -> bool:
        """Whether the chat template reads this variable, such as reasoning_effort."""
        return self.has_chat_template and option in _words(self._backend.get_chat_template())[0]

    def _check_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> None:
        if not self.has_chat_template:
            raise RequestRejected(
                "this model has no chat template: ask for a plain completion, or serve a model that is made for chat",
                param="messages",
            )
        names, strings = _words(self._backend.get_chat_template(tools=_as_dicts(tools)))
        for index, message in enumerate(messages):
            if message["role"] == "tool" and "tool" not in strings:
                where = f"messages[{index}].role"
                raise RequestRejected(
                    f"{where} is tool, which this model's chat template does not know: leave it out", param=where
                )
            if message.get("tool_calls") and "tool_calls" not in names | strings:
                where = f"messages[{index}].tool_calls"
                raise RequestRejected(f"this model's chat template knows no {where}: leave them out", param=where)
        if tools and "tools" not in names:
            raise RequestRejected("this model's chat template knows no tools: leave them out", param="tools")
        for name in options:
            if name in _TEMPLATE_CALL:
                raise RequestRejected(f"{name} is no option of a chat template: leave it out", param=name)
            if name not in names:
                raise RequestRejected(f"this model's chat template has no option {name}: leave it out", param=name)


@functools.lru_cache(maxsize=8)
def _words(template: str) -> tuple[frozenset[str], frozenset[str]]:
    """The names in a template (variables and attributes) and its string literals."""
    words = [(kind, word) for _, kind, word in jinja2.Environment().lex(template)]
    return (
        frozenset(word for kind, word in words if kind == "name"),
        frozenset(word[1:-1] for kind, word in words if kind == "string"),
    )


def _text_of(backend: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
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


def _byte_ids(vocab: Mapping[str, int]) -> frozenset[int]:
    spelled = (f"<0x{byte:02X}>" for byte in range(256))
    return frozenset(vocab[token] for token in spelled if token in vocab)


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


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestRejected(f"{where} is {message!r}: give an object with role and content", param=where)
    role = message.get("role")
    if role not in _ROLES:
        raise RequestRejected(f"{where}: {unknown_name('role', str(role), _ROLES)}", param=f"{where}.role")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return dict(message)
    return {**message, "content": _content(where, content)}


def _as_dicts(tools: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
    return [dict(tool) for tool in tools] if tools else None


def _content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestRejected(
            f"{where}.content is {content!r}: give a string or a list of text parts", param=f"{where}.content"
        )
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestRejected(
                f"{where}.content has a part of type {kind}: only text parts are supported", param=f"{where}.content"
            )
    return "".join(part["text"] for part in content)


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
