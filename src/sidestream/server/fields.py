"""Parses requests of the OpenAI API and of `/tokenize` and `/detokenize`. Each field of a request is used, or accepted
because its value has no effect, or rejected with an error that names it.

`text_work.py` calls it off the event loop. The model's context bounds work and memory: a list that is too long for the
model is refused before its items are checked, and a text before it is tokenised.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, FailFast, Field, create_model

from sidestream.client.front_end import reasoning_marks
from sidestream.config import MOST_SALT_CHARS, SAMPLING_OPTIONS, SamplingParams, StructuredOutputs
from sidestream.errors import RequestRejected
from sidestream.formats import AnswerFormat, is_inside
from sidestream.server.body import Served, Strict, checked, model_of, parse_object, short, without_idle
from sidestream.server.cache_fields import CacheFields, cache_options
from sidestream.server.conversation import Conversation, checked_messages, chosen_tools, lay_out, layout_options
from sidestream.server.errors import bad_request, checked_request_id
from sidestream.server.extras import IDLE
from sidestream.server.structured import answer_form, enforceable_parameters, structured_outputs
from sidestream.text import TokenizerLike

Api = Literal["chat", "text"]
_ApiFields = TypeVar("_ApiFields", bound="_Fields")

_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_MAX_TOKEN_ID = (1 << 31) - 1


class _StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class _StructuredOutputs(Strict):
    """vLLM's field. `StructuredOutputs` checks that exactly one of the first six is given."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: list[str] = Field(default=[])
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None


class _JsonSchema(Strict):
    name: str = ""
    description: str = ""
    schema_: dict[str, Any] = Field(default={}, alias="schema")
    strict: bool = False


class _ResponseFormat(Strict):
    """OpenAI's field. A schema is enforced whether it is strict or not."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


@dataclass(frozen=True, slots=True)
class Beams:
    """A beam search in place of sampling: the number of beams, and the exponent of the length in answers' scores."""

    width: int
    length_penalty: float


class Mark(NamedTuple):
    """The first `tokens` tokens of a prompt, in whole blocks, are to stay cached for `ttl_s`."""

    tokens: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Call:
    """One valid request of either API, with encoded prompts.

    include_usage     end the stream with a chunk that holds the usage
    continuous_usage  add the usage to every chunk
    request_id        the id that the client gave
    continues         the answers continue the prompts' texts; False: they begin a text
    tokens_as_ids     log-probabilities name a token `token_id:7` in place of its text
    prompt_logprobs   the reply has log-probabilities of the prompts, with so many alternatives; None: it has none
    echo              the prompts' texts, with which their answers begin; empty: answers begin with the model's text
    answer            what to parse in the answers; None: they are text
    include_reasoning, parallel_tool_calls  whether the reply has the reasoning, and calls after the first one
    beams             the answers are those of a beam search; None: they are sampled
    only_echo         answers are the prompts' texts; the token that the engine computes is left out
    explain_cache     the reply says why tokens of the prompts were reused or computed
    marks             prefixes of the prompts that are to stay cached, the longest time first
    hands_over        reply when a shared store holds the KV of the prompts
    """

    api: Api
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    priority: int
    stream: bool
    include_usage: bool
    continuous_usage: bool = False
    request_id: str | None = None
    cache_salt: str = ""
    continues: bool = True
    tokens_as_ids: bool = False
    prompt_logprobs: int | None = None
    echo: tuple[str, ...] = ()
    only_echo: bool = False
    beams: Beams | None = None
    answer: AnswerFormat | None = None
    include_reasoning: bool = True
    parallel_tool_calls: bool = True
    explain_cache: bool = False
    marks: tuple[Mark, ...] = ()
    hands_over: bool = False

    @property
    def shown_tokens(self) -> Sequence[str]:
        """Special tokens whose name is part of the answers' text, unless `params.skip_special_tokens` is false."""
        return () if self.answer is None else self.answer.literals()

    @property
    def num_choices(self) -> int:
        """Number of samples in the reply."""
        return len(self.prompts) * self.params.n


class _Fields(CacheFields, Strict):
    """The fields that both APIs share, with their types. Fields that are null are removed before validation.
    `SamplingParams` checks ranges.
    """

    model: str
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False
    stream_options: _StreamOptions | None = None
    stop: Annotated[list[str], FailFast()] = Field(default=[])
    logit_bias: dict[str, float] = Field(default={}, max_length=1024)
    seed: int | None = None
    response_format: _ResponseFormat | None = None
    # not in OpenAI's API
    structured_outputs: _StructuredOutputs | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[int], FailFast()] = Field(default=[], max_length=1024)
    priority: int = Field(default=0, ge=-1_000_000, le=1_000_000)
    allowed_token_ids: Annotated[list[int], FailFast()] = Field(default=[])
    bad_words: Annotated[list[str], FailFast()] = Field(default=[])
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    use_beam_search: bool = False
    best_of: int | None = None
    length_penalty: float = Field(default=1.0, ge=-10, le=10)
    truncate_prompt_tokens: int | None = None
    echo: bool = False
    max_drafts: int | None = None
    request_id: str | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MOST_SALT_CHARS)
    return_tokens_as_token_ids: bool = False
    explain_cache: bool = False


class _Chat(_Fields, Conversation):
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    # not in OpenAI's API
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None


class _Text(_Fields):
    prompt: Any
    logprobs: int | None = None


def _with_sampling_options(fields: type[_ApiFields]) -> type[_ApiFields]:
    """`fields` with one more field for each sampling option; None means the model's default."""
    unset = SamplingParams()
    options: dict[str, Any] = {}
    for name, row in SAMPLING_OPTIONS.items():
        default = getattr(unset, name)
        options[name] = (row.kind if default is not None else row.kind | None, default)
    return create_model(fields.__name__, __base__=fields, **options)


_CHAT, _TEXT = _with_sampling_options(_Chat), _with_sampling_options(_Text)


class _TokenizeText(Strict):
    """A request to `/tokenize` with a plain text. The fields have vLLM's names."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class _TokenizeChat(Conversation):
    """A request to `/tokenize` with a conversation. The fields have vLLM's names."""

    model: str | None = None
    return_token_strs: bool = False


class _Detokenize(Strict):
    model: str | None = None
    tokens: Any


# Fields of `/tokenize` that are accepted only with these values, besides null. add_special_tokens must be false,
# because a chat template writes the special tokens itself.
_TOKENIZE_CHAT_IDLE: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
}


Body = tuple[type[BaseModel], Mapping[str, tuple[Any, ...] | None]]
"""A request body: its fields, and the fields without effect with their accepted values besides null (None: all)."""

BODIES: Mapping[str, tuple[Body, ...]] = {
    "/v1/chat/completions": ((_CHAT, IDLE["chat"]),),
    "/v1/completions": ((_TEXT, IDLE["text"]),),
    "/tokenize": ((_TokenizeText, {"messages": ()}), (_TokenizeChat, {**_TOKENIZE_CHAT_IDLE, "prompt": ()})),
    "/detokenize": ((_Detokenize, {}),),
}
"""Alternatives of the request body by path, for the OpenAPI document."""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The result of a request to `/tokenize`: token ids, and whether the reply also lists the tokens as texts."""

    token_ids: list[int]
    with_strings: bool


def parse_chat(body: bytes | bytearray, *, tokenizer: TokenizerLike, served: Served) -> Call:
    """A chat request. Raises ApiError or RequestError, naming the field at fault."""
    return chat_call(parse_object(body), tokenizer=tokenizer, served=served)


def chat_call(
    fields: dict[str, Any], *, tokenizer: TokenizerLike, served: Served, renamed: Mapping[str, str] | None = None
) -> Call:
    """The call of a chat request with these fields. Raises ApiError or RequestError, naming the field at fault.

    renamed   the client's names of sampling parameters, for errors
    """
    asked = _validate(_CHAT, "chat", fields, served)
    if asked.top_logprobs and not asked.logprobs:
        raise bad_request(
            f"top_logprobs is {asked.top_logprobs} without logprobs: set logprobs to true", "top_logprobs"
        )
    limit, limit_name = asked.max_tokens, "max_tokens"
    if asked.max_completion_tokens is not None:
        if limit is not None and limit != asked.max_completion_tokens:
            raise bad_request(
                "max_tokens and max_completion_tokens differ: send max_completion_tokens only", "max_tokens"
            )
        limit, limit_name = asked.max_completion_tokens, "max_completion_tokens"
    messages, layout = checked_messages(asked.messages, served), layout_options(asked, tokenizer)
    tools, forced = chosen_tools(asked.tool_choice, layout.get("tools", ()))
    if tools and served.tool_format is None:
        raise bad_request(
            "tools: the format of this model's tool calls is unknown or switched off: "
            "start the server with --tool-call-parser, or leave them out",
            "tools",
        )
    params = _sampling(
        asked, served, limit, asked.top_logprobs if asked.logprobs else None, renamed or {"max_tokens": limit_name}
    )
    content = _form(asked)
    bound = _bound_of_prompts(asked, served)
    call = _call("chat", asked, params, [lambda: lay_out(tokenizer, messages, layout, bound)], "messages", served)
    prompt_end = tokenizer.decode(call.prompts[0][-64:], skip_special_tokens=False)
    answer = _answer(asked, tools, prompt_end, served, structured=content is not None)
    if answer is not None:
        content = answer_form(answer, tokenizer, content, forced=forced, several=asked.parallel_tool_calls)
    params = dataclasses.replace(call.params, structured_outputs=content)
    if asked.thinking_token_budget is not None:
        form = AnswerFormat() if answer is None else answer
        marks = reasoning_marks(form.reasoning, tokenizer, call.prompts[0], inside=form.inside)
        params = dataclasses.replace(params, reasoning=marks)
    call = dataclasses.replace(
        call,
        params=params,
        echo=_opened(messages) if asked.echo else (),
        answer=answer,
        include_reasoning=asked.include_reasoning is not False,
        parallel_tool_calls=asked.parallel_tool_calls,
    )
    return _with_beams(call, asked)


def _opened(messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """With `echo`, what an answer begins with: the text of the last message, if it is the assistant's."""
    last = messages[-1]
    return (last.get("content", ""),) if last["role"] == "assistant" else ()


# Parameters that a request with beam search may have; some have no effect on it.
_OF_BEAMS = {
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "n", "max_tokens", "max_drafts"),
    *("stop_token_ids", "ignore_eos", "include_stop", "skip_special_tokens"),
}


def _with_beams(call: Call, asked: _Fields) -> Call:
    """The call, with its beam search if the request asks for one. Raises ApiError for fields that do not fit."""
    if not asked.use_beam_search:
        for name, default in (("best_of", 1), ("length_penalty", 1.0)):
            if getattr(asked, name) not in (None, default):
                raise bad_request(f"{name} without use_beam_search: set use_beam_search to true, or leave it out", name)
        return call
    if asked.stream:
        raise bad_request("use_beam_search with stream: a beam search has no partial answers; leave one out", "stream")
    unset, params = SamplingParams(), call.params
    for name in (field.name for field in dataclasses.fields(SamplingParams)):
        if name not in _OF_BEAMS and getattr(params, name) != getattr(unset, name):
            raise bad_request(f"{name} with use_beam_search: a beam search does not know it; leave one out", name)
    width = params.n if asked.best_of is None else asked.best_of
    if width < params.n:
        raise bad_request(f"best_of is {width} with n {params.n}: it must be n or more", "best_of")
    return dataclasses.replace(call, beams=Beams(width, asked.length_penalty))


def _form(asked: _Fields) -> StructuredOutputs | None:
    """The form of the content that the request asks for."""
    return structured_outputs(asked) if asked.response_format or asked.structured_outputs else None


def _answer(
    asked: Any, tools: Sequence[Mapping[str, Any]], prompt_end: str, served: Served, *, structured: bool
) -> AnswerFormat | None:
    """What to parse in the answers; None if the request asks for neither tools nor reasoning."""
    kwargs = asked.chat_template_kwargs
    asks = asked.include_reasoning is not None or asked.reasoning_effort is not None or structured
    asks |= asked.thinking_token_budget is not None
    asks |= bool(tools or kwargs.get("enable_thinking") or kwargs.get("thinking"))
    reasoning = served.reasoning_format if asks or served.always_reasoning else None
    if not tools and reasoning is None:
        return None
    return AnswerFormat(
        served.tool_format if tools else None,
        reasoning,
        reasoning is not None and is_inside(reasoning, prompt_end, continues=asked.continue_final_message),
        {tool["function"]["name"]: enforceable_parameters(tool["function"]) for tool in tools},
    )


def parse_text(body: bytes | bytearray, *, tokenizer: TokenizerLike, served: Served) -> Call:
    """A plain completion request. Raises ApiError or RequestError, naming the field at fault."""
    asked = _validate(_TEXT, "text", parse_object(body), served)
    max_tokens = _COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens
    only_echo = asked.echo and max_tokens == 0
    params = _sampling(asked, served, 1 if only_echo else max_tokens, asked.logprobs, {})
    params = dataclasses.replace(params, structured_outputs=_form(asked))
    prompts = _prompts(asked.prompt, tokenizer, _bound_of_prompts(asked, served))
    call = _with_beams(_call("text", asked, params, prompts, "prompt", served), asked)
    if not asked.echo:
        return call
    if asked.logprobs is not None:  # those of the echoed tokens
        wanted = max(asked.logprobs, -1 if asked.prompt_logprobs is None else asked.prompt_logprobs)
        call = dataclasses.replace(call, params=dataclasses.replace(call.params, prompt_logprobs=wanted))
    shown = asked.prompt if asked.truncate_prompt_tokens is None else [list(prompt) for prompt in call.prompts]
    return dataclasses.replace(call, echo=_texts(shown, tokenizer), only_echo=only_echo)


def parse_tokenize(body: bytes | bytearray, *, tokenizer: TokenizerLike, served: Served) -> Tokenized:
    """The token ids for a request to `/tokenize`. Raises ApiError or RequestError, naming the field at fault."""
    fields = parse_object(body)
    chosen = [name for name in ("prompt", "messages") if fields.get(name) is not None]
    if len(chosen) != 1:
        given = "both prompt and messages are given" if chosen else "prompt and messages are both missing"
        raise bad_request(f"{given}: send one of them", "prompt")
    if chosen == ["prompt"]:
        text = checked(_TokenizeText, fields, {"messages": ()})
        served.adapter_of(text.model)
        ids = tokenizer.encode(
            text.prompt, add_special_tokens=text.add_special_tokens, most_tokens=served.max_model_len
        )
        return Tokenized(ids, text.return_token_strs)
    idle = {**_TOKENIZE_CHAT_IDLE, "prompt": ()}
    chat = checked(_TokenizeChat, fields, idle)
    served.adapter_of(chat.model)
    ids = lay_out(tokenizer, checked_messages(chat.messages, served), layout_options(chat, tokenizer), served)
    return Tokenized(ids, chat.return_token_strs)


def parse_detokenize(body: bytes | bytearray, *, tokenizer: TokenizerLike, served: Served) -> list[int]:
    """The token ids of a request to `/detokenize`. Raises ApiError, naming the field at fault."""
    asked = checked(_Detokenize, parse_object(body), {})
    served.adapter_of(asked.model)
    return checked_ids(asked.tokens, tokenizer, served)


def checked_ids(tokens: Any, tokenizer: TokenizerLike, served: Served) -> list[int]:
    """The field `tokens`, token ids of this model. Raises ApiError, naming it."""
    if not isinstance(tokens, list):
        raise bad_request(f"tokens is {short(tokens)}: it must be a list of token ids", "tokens")
    served.check_length(tokens, "tokens", "token ids")
    for number, token_id in enumerate(tokens):
        if type(token_id) is not int or not 0 <= token_id < tokenizer.vocab_size:
            where, highest = f"tokens[{number}]", tokenizer.vocab_size - 1
            raise bad_request(
                f"{where} is {short(token_id)}: a token id of this model is a whole number in [0, {highest}]", where
            )
    return tokens


def _call(
    api: Api,
    asked: _Fields,
    params: SamplingParams,
    prompts: Sequence[Callable[[], list[int]]],
    where: str,
    served: Served,
) -> Call:
    """The call with encoded prompts. Encoding takes the most time, so it comes after all checks."""
    if asked.request_id is not None:
        checked_request_id(asked.request_id, "request_id")
    if asked.stream_options is not None and not asked.stream:
        raise bad_request(
            "stream_options without stream: set stream to true or leave stream_options out", "stream_options"
        )
    if asked.stream and asked.prompt_logprobs is not None:
        raise bad_request(
            "prompt_logprobs with stream: a complete reply has them; leave one of the two out", "prompt_logprobs"
        )
    hands_over = asked.kv_transfer_params is not None and asked.kv_transfer_params.do_remote_decode
    if asked.stream and hands_over:
        raise bad_request(
            "kv_transfer_params with do_remote_decode and stream: a complete reply tells of the hand-over; leave "
            "stream out",
            "kv_transfer_params",
        )
    if len(prompts) * params.n > served.max_choices:
        asks = f"{len(prompts)} prompts with n {params.n}"
        raise bad_request(
            f"{asks} are more than {served.max_choices} choices: split the request", where if len(prompts) > 1 else "n"
        )
    encoded = tuple(tuple(params.kept(encode(), served.max_model_len)) for encode in prompts)
    if not all(encoded):
        raise bad_request(f"{where} has no tokens: send at least one", where)
    params = dataclasses.replace(params, truncate_prompt_tokens=None)
    stream_options = asked.stream_options or _StreamOptions()
    return Call(
        api,
        encoded,
        params,
        asked.priority,
        asked.stream,
        stream_options.include_usage,
        stream_options.continuous_usage_stats,
        asked.request_id,
        asked.cache_salt or "",
        not isinstance(asked, Conversation) or asked.continue_final_message,
        asked.return_tokens_as_token_ids,
        asked.prompt_logprobs,
        explain_cache=asked.explain_cache,
        hands_over=hands_over,
    )


def _bound_of_prompts(asked: _Fields, served: Served) -> Served:
    """The bound of the prompts as they are sent. A request that truncates them has none but that of its body."""
    return served if asked.truncate_prompt_tokens is None else dataclasses.replace(served, max_model_len=1 << 31)


def _validate(kind: type[_ApiFields], api: Api, body: dict[str, Any], served: Served) -> _ApiFields:
    fields = without_idle(body, IDLE[api], known=kind.model_fields, where="")
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    if fields.get("top_k") == -1:  # vLLM's value for off
        fields["top_k"] = 0
    for name in ("max_tokens", "max_completion_tokens"):
        if type(fields.get(name)) is int and fields[name] == -1:  # llama.cpp's value for as many as fit
            fields[name] = served.max_model_len
    asked = model_of(kind, fields)
    served.adapter_of(asked.model)
    return asked


def _sampling(
    asked: _Fields, served: Served, max_tokens: int | None, logprobs: int | None, renamed: Mapping[str, str]
) -> SamplingParams:
    adapter = served.adapter_of(asked.model)
    try:
        return SamplingParams(
            **{name: getattr(asked, name) for name in SAMPLING_OPTIONS},
            logit_bias={_token_id(name): bias for name, bias in asked.logit_bias.items()},
            seed=asked.seed,
            stop=tuple(asked.stop),
            stop_token_ids=tuple(asked.stop_token_ids),
            include_stop=asked.include_stop_str_in_output,
            skip_special_tokens=asked.skip_special_tokens,
            prompt_logprobs=asked.prompt_logprobs,
            thinking_token_budget=getattr(asked, "thinking_token_budget", None),
            truncate_prompt_tokens=asked.truncate_prompt_tokens,
            max_tokens=max_tokens,
            min_tokens=asked.min_tokens,
            ignore_eos=asked.ignore_eos,
            logprobs=logprobs,
            n=asked.n,
            max_drafts=asked.max_drafts,
            cache=cache_options(asked) if asked.model_fields_set & CacheFields.model_fields.keys() else None,
            allowed_token_ids=tuple(asked.allowed_token_ids),
            bad_words=tuple(asked.bad_words),
            adapter=adapter,
        )
    except RequestRejected as failure:  # the error names the parameter, but the client knows the request field
        param = failure.param or ""
        field = renamed.get(param, param)
        raise RequestRejected(str(failure).replace(param, field), param=field) from None


def _token_id(name: str) -> int:
    if not _TOKEN_ID.fullmatch(name) or int(name) > _MAX_TOKEN_ID:
        raise RequestRejected(
            f'logit_bias has the key {name[:64]!r}: keys are token ids, such as "50256"', param="logit_bias"
        )
    return int(name)


def _prompts(prompt: Any, tokenizer: TokenizerLike, served: Served) -> list[Callable[[], list[int]]]:
    """One encoder per prompt. `prompt` is a string, a list of strings, a list of token ids, or a list of such lists;
    the type of the first item decides.
    """

    def encoder(text: str) -> Callable[[], list[int]]:
        return lambda: tokenizer.encode(text, most_tokens=served.max_model_len)

    if isinstance(prompt, str):
        return [encoder(prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise bad_request(
            f"prompt is {short(prompt)}: it must be a string, strings, token ids, or lists of token ids", "prompt"
        )
    if not isinstance(prompt[0], str | list):
        return [_ids(prompt, "prompt", served)]
    if len(prompt) > served.max_choices:
        raise bad_request(
            f"{len(prompt)} prompts are more than {served.max_choices} choices: split the request", "prompt"
        )
    if isinstance(prompt[0], str):
        return [encoder(_string(item, f"prompt[{number}]")) for number, item in enumerate(prompt)]
    return [_ids(item, f"prompt[{number}]", served) for number, item in enumerate(prompt)]


def _texts(prompt: Any, tokenizer: TokenizerLike) -> tuple[str, ...]:
    """The texts of the valid `prompt`. Token ids that the tokenizer lacks have none; the model may lack them, too."""
    prompts = prompt if isinstance(prompt, list) and isinstance(prompt[0], str | list) else [prompt]
    return tuple(
        one if isinstance(one, str) else tokenizer.decode([index for index in one if index < tokenizer.vocab_size])
        for one in prompts
    )


def _string(item: Any, where: str) -> str:
    if not isinstance(item, str):
        raise bad_request(f"{where} is {short(item)}: the first prompt is a string, so all must be strings", where)
    return item


def _ids(ids: Any, where: str, served: Served) -> Callable[[], list[int]]:
    if not isinstance(ids, list):
        raise bad_request(
            f"{where} is {short(ids)}: the first prompt is a list of token ids, so all must be lists", where
        )
    served.check_length(ids, where, "token ids")
    for number, token_id in enumerate(ids):
        if type(token_id) is not int or not 0 <= token_id <= _MAX_TOKEN_ID:
            at = f"{where}[{number}]"
            raise bad_request(f"{at} is {short(token_id)}: a token id is a whole number in [0, {_MAX_TOKEN_ID}]", at)
    return lambda: ids
