"""Text to tokens and back: the tokenizer, the chat template, and text that grows token by token.

Knows nothing of requests or the engine. `Tokenizer` may be used from any thread; a `Detokenizer` and a `StopStrings` belong
to one sample, and to whichever thread handles it.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sidestream.config import unknown_name
from sidestream.errors import ModelError, RequestRejected

_ROLES = ("system", "developer", "user", "assistant", "tool")
_LONG_WINDOW = 32  # tokens; one character takes a few at most
_UNDECIDED = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet

# Of the topics of tasks, one in so many is held out.
_HELD_OUT_EVERY = 8


class Tokenizer:
    """A model's tokenizer: text to token ids, messages to token ids, ids to text.

    eos_ids      ids that end an answer: those of the generation config (else of the model's config), and the tokenizer's
    special_ids  ids that stand for no text, such as the end of sequence; `decode` leaves them out
    byte_ids     ids with which a sentencepiece model spells an unknown character in bytes: <0xE2><0x82><0xAC>
    vocab_size   one more than the largest id; the model's logits may be wider
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
        """The tokenizer in a transformers directory or of a hub id. Raises ModelError when there is none that can be read."""
        try:
            backend = AutoTokenizer.from_pretrained(model)
        except Exception as fault:  # transformers raises anything from OSError to KeyError here
            raise _no_tokenizer(model, _first_line(fault)) from fault
        if not backend.get_vocab():
            raise _no_tokenizer(model, "its vocabulary is empty")
        return cls(backend, eos_ids=_eos_ids(model, backend))

    def check_equal(self, other: Tokenizer, *, name: str) -> None:
        """Raise ModelError, with both values, unless the draft model `name`'s tokenizer gives every id the same token."""
        ours, theirs = self._backend.get_vocab(), other._backend.get_vocab()
        for token, number in sorted(ours.items(), key=lambda item: item[1]):
            if theirs.get(token) != number:
                raise ModelError(
                    f"the draft model {name} has another tokenizer: {token!r} is {theirs.get(token, 'no token')} there, {number} here "
                    f"({len(theirs)} tokens there, {len(ours)} here); take a draft model of the same family"
                )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with what the model wants around it (such as a beginning of sequence) if asked.

        Raises RequestRejected when `text` is not valid Unicode.
        """
        _check_unicode(text)
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, without special tokens and with no clean-up of spaces. Bytes that are no character become U+FFFD."""
        return self._text_of(list(token_ids))

    def length_of(self, token_id: int) -> int:
        """How many characters one token's text has; asked for every token that is drawn, so it is looked up."""
        length = self._lengths.get(token_id)
        if length is None:
            length = self._lengths[token_id] = len(self.decode([token_id]))
        return length

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental `decode`, for one sample."""
        return Detokenizer(self)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> list[int]:
        """Token ids of a conversation, laid out by the model's chat template.

        messages                each has a role (system, developer, user, assistant, tool) and a content: a string or a list of
                                parts `{"type": "text", "text": …}`; an assistant's message with tool_calls needs none
        add_generation_prompt   end with the start of an answer
        continue_final_message  leave the last message open, for the model to write on
        options                 variables of the template, such as enable_thinking

        Raises RequestRejected when there is no template, when it refuses the messages, or when it knows no `tools` or option
        that was given: nothing is ignored silently.
        """
        conversation = [_message(index, message) for index, message in enumerate(messages)]
        if not conversation:
            raise RequestRejected("messages is empty: give at least one", param="messages")
        self._check_template(tools, options)
        try:
            text = self._backend.apply_chat_template(
                conversation,
                tools=_as_dicts(tools),
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                tokenize=False,
                **options,
            )
        except Exception as fault:  # a template may raise whatever it likes
            raise RequestRejected(f"the model's chat template refuses these messages: {_first_line(fault)}", param="messages") from fault
        return self.encode(str(text), add_special_tokens=False)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can work at all."""
        return self._backend.chat_template is not None

    def _check_template(self, tools: Sequence[Mapping[str, Any]] | None, options: Mapping[str, Any]) -> None:
        if not self.has_chat_template:
            raise RequestRejected(
                "this model has no chat template: ask for a plain completion, or serve a model that is made for chat", param="messages"
            )
        if not (tools or options):
            return
        template = self._backend.get_chat_template(tools=_as_dicts(tools))
        known = {word for _, kind, word in jinja2.Environment().lex(template) if kind == "name"}
        if tools and "tools" not in known:
            raise RequestRejected("this model's chat template knows no tools: leave them out", param="tools")
        for name in options:
            if name not in known:
                raise RequestRejected(f"this model's chat template has no option {name}: leave it out", param=name)


class Detokenizer:
    """Text of one sample, as its tokens come.

    The pieces of `push` and `finish` joined are exactly `Tokenizer.decode` of all tokens. A piece never ends inside a
    character, and nothing that was given out changes later. The work per token does not grow with the length of the text:
    only the last few tokens are decoded again.
    """

    # _window  [0, _settled)      gave out all of its text; decoded again because a token's text depends on what is before it
    #          [_settled, end)    text given out up to the last, undecided character
    # _given   how many characters of the window's text were given out

    def __init__(self, tokenizer: Tokenizer) -> None:
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

        It may be cut where the two halves decode to the same text as the whole: no character spans that place. Where none of
        the last places will do, text is held back until the window has grown by an eighth, so that the work stays bounded.
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
        """Follow every stop string by one character (Knuth, Morris and Pratt 1977); the longest that is complete, or ""."""
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
    """The first chapter of Moby-Dick (1851, public domain): a real text of about 2,800 tokens, for demos, benchmarks and tests."""
    return importlib.resources.files("sidestream").joinpath("data", "loomings.txt").read_text(encoding="utf-8")


def sample_tasks(*, held_out: bool = False) -> list[str]:
    """Questions and tasks of many kinds, for training a head; `held_out`: others, about other topics, for judging it. In a fixed order."""
    data = importlib.resources.files("sidestream").joinpath("data")
    tasks, topics = (data.joinpath(name).read_text(encoding="utf-8").splitlines() for name in ("tasks.txt", "topics.txt"))
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


def _text_of(backend: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Text of ids, without special tokens and clean-up: by the tokenizer underneath, where transformers adds nothing but five times its time."""
    fast, kind = PreTrainedTokenizerFast, type(backend)
    if isinstance(backend, fast) and kind.decode is fast.decode and kind._decode is fast._decode:
        return functools.partial(backend.backend_tokenizer.decode, skip_special_tokens=True)

    def decode(token_ids: list[int]) -> str:
        text = backend.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # a list would mean that ids of several texts were given
        return text

    return decode


def _special_ids(backend: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that decoding leaves out: asked of the tokenizer, not believed from its lists."""
    listed = {index for index, token in backend.added_tokens_decoder.items() if token.special} | set(backend.all_special_ids)
    return frozenset(index for index in listed if not backend.decode([index], skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _byte_ids(vocab: Mapping[str, int]) -> frozenset[int]:
    spelled = (f"<0x{byte:02X}>" for byte in range(256))
    return frozenset(vocab[token] for token in spelled if token in vocab)


def _eos_ids(model: str, backend: PreTrainedTokenizerBase) -> list[int]:
    declared: list[int] = []
    for read in (GenerationConfig.from_pretrained, AutoConfig.from_pretrained):
        try:
            found = getattr(read(model), "eos_token_id", None)
        except (OSError, ValueError):  # a tokenizer alone, or a model that transformers does not know
            continue
        if found is not None:
            declared = list(found) if isinstance(found, list | tuple) else [found]
            break
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
        raise RequestRejected(f"{where}.content is {content!r}: give a string or a list of text parts", param=f"{where}.content")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestRejected(f"{where}.content has a part of type {kind}: only text parts are supported", param=f"{where}.content")
    return "".join(part["text"] for part in content)


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as fault:
        raise RequestRejected(
            f"the text is not valid Unicode: character {fault.start} is the lone surrogate U+{ord(text[fault.start]):04X}; send UTF-8"
        ) from fault


def _no_tokenizer(model: str, reason: str) -> ModelError:
    return ModelError(f"no usable tokenizer in {model}: {reason}; a transformers directory has a tokenizer.json beside its config.json")


def _first_line(fault: Exception) -> str:
    return next(iter(str(fault).splitlines()), "") or type(fault).__name__
