"""Parses requests. Each field of a request is used, or accepted because its value has no effect, or rejected with an
error that names it.

`text_work.py` calls it off the event loop. The model's context bounds work and memory: a list that is too long for the
model is refused before its items are checked, and a text before it is tokenised.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, create_model

from sidestream.config import MOST_SALT_CHARS, SAMPLING_OPTIONS, SamplingParams, StructuredOutputs
from sidestream.errors import ContextTooLong, RequestRejected
from sidestream.formats import AnswerFormat
from sidestream.formats.answer import is_inside
from sidestream.server.body import parse_json, parse_object
from sidestream.server.errors import ApiError, bad_request, checked_request_id
from sidestream.server.structured import answer_form, check_strict, enforceable_parameters, structured_outputs
from sidestream.text import TokenizerLike
from sidestream_kv.config import unknown_name

Api = Literal["chat", "text"]
_ApiFields = TypeVar("_ApiFields", bound="_Fields")
_Checked = TypeVar("_Checked", bound=BaseModel)

_TYPING_ERROR = 0.85  # difflib's ratio, as of temprature and temperature (0.95) or promt and prompt (0.91)
_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_MAX_TOKEN_ID = (1 << 31) - 1
_MOST_TOOLS = 1024
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")

Place = Literal["chat", "text", "message", "part"]


@dataclass(frozen=True, slots=True)
class Extra:
    """A field that clients send and that this server does not implement.

    places  where the field occurs: requests of either API, messages of a chat, or parts of a message's content
    values  accepted values besides null; they have no effect. None: all values, because the field cannot change an
            answer
    """

    name: str
    places: tuple[Place, ...]
    values: tuple[Any, ...] | None = None


_BOTH: tuple[Place, ...] = ("chat", "text")

EXTRAS: tuple[Extra, ...] = (
    # For accounts, billing, caching and latency at a provider; without effect here.
    Extra("metadata", _BOTH),
    Extra("prompt_cache_key", _BOTH),
    Extra("prompt_cache_retention", _BOTH),
    Extra("safety_identifier", _BOTH),
    Extra("service_tier", _BOTH),
    Extra("store", _BOTH),
    Extra("user", _BOTH),
    Extra("prediction", ("chat",)),
    Extra("cache_control", ("part",)),
    # Without effect, because this server lacks the feature that the field modifies.
    Extra("spaces_between_special_tokens", _BOTH),
    Extra("annotations", ("message",)),
    # Accepted only with the value that asks for the default behaviour.
    Extra("add_special_tokens", ("chat",), (False,)),
    Extra("add_special_tokens", ("text",), (True,)),
    Extra("best_of", ("text",), (1,)),
    Extra("cache_prompt", _BOTH, (True,)),
    Extra("early_stopping", _BOTH, (False,)),
    Extra("echo", ("chat",), (False,)),
    Extra("length_penalty", _BOTH, (1, 1.0)),
    Extra("modalities", ("chat",), (["text"],)),
    Extra("return_token_ids", _BOTH, (False,)),
    Extra("skip_special_tokens", _BOTH, (True,)),
    Extra("suffix", ("text",), ("",)),
    Extra("use_beam_search", _BOTH, (False,)),
    Extra("verbosity", ("chat",), ("medium",)),
    # Sampling that this server lacks, with the values that switch it off.
    Extra("dry_multiplier", _BOTH, (0, 0.0)),
    Extra("dynatemp_range", _BOTH, (0, 0.0)),
    Extra("mirostat", _BOTH, (0,)),
    Extra("tfs_z", _BOTH, (1, 1.0)),
    Extra("top_a", _BOTH, (0, 0.0)),
    Extra("top_n_sigma", _BOTH, (-1, -1.0, 0, 0.0)),
    Extra("typical_p", _BOTH, (1, 1.0)),
    Extra("xtc_probability", _BOTH, (0, 0.0)),
    # Not implemented: accepted only with a value that asks for nothing.
    Extra("audio", ("chat", "message"), ()),
    Extra("chat_template", ("chat",), ()),
    Extra("documents", ("chat",), ([],)),
    Extra("function_call", ("chat",), ("none", "auto")),
    Extra("function_call", ("message",), ()),
    Extra("functions", ("chat",), ([],)),
    Extra("guided_choice", _BOTH, ()),  # older names of the parts of structured_outputs
    Extra("guided_grammar", _BOTH, ()),
    Extra("guided_json", _BOTH, ()),
    Extra("guided_regex", _BOTH, ()),
    Extra("kv_transfer_params", _BOTH, ()),
    Extra("logits_processors", _BOTH, ([],)),
    Extra("mm_processor_kwargs", ("chat",), ({},)),
    Extra("prompt_logprobs", _BOTH, ()),
    Extra("refusal", ("message",), ("",)),
    Extra("tool_choice", ("text",), ("none",)),
    Extra("truncate_prompt_tokens", _BOTH, ()),
    Extra("vllm_xargs", _BOTH, ({},)),
    Extra("web_search_options", ("chat",), ()),
)
_IDLE: Mapping[Place, Mapping[str, tuple[Any, ...] | None]] = {
    place: {extra.name: extra.values for extra in EXTRAS if place in extra.places} for place in get_args(Place)
}

OTHER_SERVERS: Mapping[str, str] = {
    # llama.cpp
    "n_predict": "max_tokens has this meaning here",
    "id_slot": "requests share all slots here; leave it out",
    "n_keep": "prompts are never shortened here; leave it out",
    "n_probs": "logprobs has this meaning here",
    "repeat_penalty": "repetition_penalty has this meaning here",
    "repeat_last_n": "repetition_penalty counts the whole prompt and output here; leave it out",
    "samplers": "the order of sampling options is fixed here; leave it out",
    "typical": "typical sampling does not exist here; leave it out",
    "grammar": "structured_outputs, with grammar, has this meaning here",
    "json_schema": "structured_outputs, with json, has this meaning here",
    # Ollama
    "options": "send its fields directly, and num_predict as max_tokens",
    "num_predict": "max_tokens has this meaning here",
    "num_ctx": "the context is set when the server starts: --max-model-len",
    "keep_alive": "the model stays loaded here; leave it out",
    "format": "structured_outputs has this meaning here, with json or json_object",
    "think": "chat_template_kwargs may have such an option, such as enable_thinking",
    "raw": "/v1/completions takes a text without a chat template",
    "images": "images are not supported here; leave them out",
    # OpenRouter
    "provider": "this server is the only provider; leave it out",
    "models": "this server has one model: send it as model",
    "route": "this server has one model; leave it out",
    "transforms": "prompts are never shortened here; leave it out",
    "plugins": "plugins do not exist here; leave it out",
    # vLLM, SGLang and text-generation-inference
    "max_new_tokens": "max_tokens has this meaning here",
    "min_new_tokens": "min_tokens has this meaning here",
    "stop_sequences": "stop has this meaning here",
    "do_sample": "temperature 0 is greedy here, and any other samples; leave it out",
    "regex": "structured_outputs, with regex, has this meaning here",
    "ebnf": "structured_outputs, with grammar, has this meaning here",
    "no_stop_trim": "include_stop_str_in_output has this meaning here",
    "separate_reasoning": "include_reasoning asks for reasoning beside the text here",
    "stream_reasoning": "reasoning is streamed here as it is written; leave it out",
    "reasoning": "send reasoning_effort, or an option of the chat template in chat_template_kwargs",
    "lora_path": "LoRA adapters are not supported here; leave it out",
    "session_params": "sessions do not exist here; leave it out",
    "rid": "request_id has this meaning here",
    "data_parallel_rank": "a server has one replica here; leave it out",
    "detokenize": "/v1/completions always returns text; leave it out",
    "inputs": "prompt has this meaning here",
    "input": "prompt, or messages in a chat, has this meaning here",
    "max_output_tokens": "max_tokens has this meaning here",
    "instructions": "send a message with the role system",
}
"""Fields of other servers, and what to send to this one in their place. No similar name is suggested for them."""

_MESSAGE_FIELDS = ("role", "content", "name", "reasoning_content", "reasoning", "tool_calls", "tool_call_id")
# Options of chat templates that a request sets in other fields, so chat_template_kwargs may not contain them.
_OWN_OPTIONS = ("self", "messages", "tools", "most_tokens", "add_generation_prompt", "continue_final_message")


@dataclass(frozen=True, slots=True)
class Served:
    """Constants of the server against which requests are checked.

    max_choices    maximum number of prompts times n
    max_model_len  maximum number of tokens of prompt and output together
    tool_format, reasoning_format   formats of the model's answers; None: unknown, or switched off
    always_reasoning   reasoning is split from every chat answer, not only if the request has tools or reasoning options
    """

    model_name: str
    max_choices: int
    max_model_len: int
    tool_format: str | None = None
    reasoning_format: str | None = None
    always_reasoning: bool = False

    def check_length(self, items: Sequence[Any], param: str, unit: str) -> None:
        """Raise ContextTooLong for more items than the model takes tokens."""
        if len(items) > self.max_model_len:
            raise ContextTooLong(
                f"{param} has {len(items)} {unit}, the model takes {self.max_model_len} tokens: shorten it", param=param
            )


@dataclass(frozen=True, slots=True)
class Call:
    """One valid request of either API, with encoded prompts.

    include_usage     end the stream with a chunk that holds the usage
    continuous_usage  add the usage to every chunk
    request_id        the id that the client gave
    continues         the answers continue the prompts' texts; False: they begin a text
    tokens_as_ids     log-probabilities name a token `token_id:7` in place of its text
    echo              the prompts' texts, with which their answers begin; empty: answers begin with the model's text
    answer            what to parse in the answers; None: they are text
    include_reasoning, parallel_tool_calls  whether the reply has the reasoning, and calls after the first one
    only_echo         answers are the prompts' texts; the token that the engine computes is left out
    explain_cache     the reply says why tokens of the prompts were reused or computed
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
    echo: tuple[str, ...] = ()
    only_echo: bool = False
    answer: AnswerFormat | None = None
    include_reasoning: bool = True
    parallel_tool_calls: bool = True
    explain_cache: bool = False

    @property
    def shown_tokens(self) -> Sequence[str]:
        """Special tokens whose name is part of the answers' text."""
        return () if self.answer is None else self.answer.literals()

    @property
    def num_choices(self) -> int:
        """Number of samples in the reply."""
        return len(self.prompts) * self.params.n


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class _StructuredOutputs(BaseModel):
    """vLLM's field. `StructuredOutputs` checks that exactly one of the first six is given."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: list[str] = []
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None


class _JsonSchema(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: str = ""
    description: str = ""
    schema_: dict[str, Any] = Field(default={}, alias="schema")
    strict: bool = False


class _ResponseFormat(BaseModel):
    """OpenAI's field. A schema is enforced whether it is strict or not."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class _Fields(BaseModel):
    """The fields that both APIs share, with their types. Fields that are null are removed before validation.
    `SamplingParams` checks ranges.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: str
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False
    stream_options: _StreamOptions | None = None
    stop: Annotated[list[str], FailFast()] = []
    logit_bias: dict[str, float] = Field(default={}, max_length=1024)
    seed: int | None = None
    response_format: _ResponseFormat | None = None
    # not in OpenAI's API
    structured_outputs: _StructuredOutputs | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[int], FailFast()] = Field(default=[], max_length=1024)
    priority: int = Field(default=0, ge=-1_000_000, le=1_000_000)
    allowed_token_ids: Annotated[list[int], FailFast()] = []
    bad_words: Annotated[list[str], FailFast()] = []
    include_stop_str_in_output: bool = False
    max_drafts: int | None = None
    request_id: str | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MOST_SALT_CHARS)
    return_tokens_as_token_ids: bool = False
    explain_cache: bool = False


class _Conversation(BaseModel):
    """Messages, and the options with which the chat template formats them."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    messages: Any
    tools: Any = ()
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # not in OpenAI's API
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class _Chat(_Fields, _Conversation):
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    # not in OpenAI's API
    include_reasoning: bool | None = None


class _Text(_Fields):
    prompt: Any
    echo: bool = False
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


class _TokenizeText(BaseModel):
    """A request to `/tokenize` with a plain text. The fields have vLLM's names."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class _TokenizeChat(_Conversation):
    """A request to `/tokenize` with a conversation. The fields have vLLM's names."""

    model: str | None = None
    return_token_strs: bool = False


class _Detokenize(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

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
    "/v1/chat/completions": ((_CHAT, _IDLE["chat"]),),
    "/v1/completions": ((_TEXT, _IDLE["text"]),),
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
    messages, layout = _messages(asked.messages, served), _layout(asked, tokenizer)
    tools, forced = _chosen(asked.tool_choice, layout.get("tools", ()))
    if tools and served.tool_format is None:
        raise bad_request(
            "tools: the format of this model's tool calls is unknown or switched off: "
            "start the server with --tool-call-parser, or leave them out",
            "tools",
        )
    params = _sampling(
        asked, limit, asked.top_logprobs if asked.logprobs else None, renamed or {"max_tokens": limit_name}
    )
    content = _form(asked)
    call = _call("chat", asked, params, [lambda: _lay_out(tokenizer, messages, layout, served)], "messages", served)
    prompt_end = tokenizer.decode(call.prompts[0][-64:], skip_special_tokens=False)
    answer = _answer(asked, tools, prompt_end, served, structured=content is not None)
    if answer is not None:
        content = answer_form(answer, tokenizer, content, forced=forced, several=asked.parallel_tool_calls)
    return dataclasses.replace(
        call,
        params=dataclasses.replace(call.params, structured_outputs=content),
        answer=answer,
        include_reasoning=asked.include_reasoning is not False,
        parallel_tool_calls=asked.parallel_tool_calls,
    )


def _form(asked: _Fields) -> StructuredOutputs | None:
    """The form of the content that the request asks for."""
    return structured_outputs(asked) if asked.response_format or asked.structured_outputs else None


def _answer(
    asked: Any, tools: Sequence[Mapping[str, Any]], prompt_end: str, served: Served, *, structured: bool
) -> AnswerFormat | None:
    """What to parse in the answers; None if the request asks for neither tools nor reasoning."""
    kwargs = asked.chat_template_kwargs
    asks = asked.include_reasoning is not None or asked.reasoning_effort is not None or structured
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


def _layout(asked: _Conversation, tokenizer: TokenizerLike) -> dict[str, Any]:
    """The options for the chat template: the client's own, and those for the end of the prompt."""
    for name in asked.chat_template_kwargs:
        if name in _OWN_OPTIONS:
            where = f"chat_template_kwargs.{name}"
            raise bad_request(f"{where} is a field of the request itself: send it as such, or leave it out", where)
    if asked.continue_final_message and asked.add_generation_prompt:
        message = (
            "continue_final_message and add_generation_prompt are both true: "
            "an answer either continues a message or begins one"
        )
        raise bad_request(message, "continue_final_message")
    options = dict(asked.chat_template_kwargs)
    if asked.reasoning_effort is not None and tokenizer.template_knows("reasoning_effort"):
        options.setdefault("reasoning_effort", asked.reasoning_effort)
    begins = not asked.continue_final_message if asked.add_generation_prompt is None else asked.add_generation_prompt
    if tools := _tools(asked.tools):
        for number, tool in enumerate(tools):
            check_strict(tool["function"], f"tools[{number}].function")
        options["tools"] = tools
    return {**options, "add_generation_prompt": begins, "continue_final_message": asked.continue_final_message}


def _tools(tools: Any) -> list[dict[str, Any]]:
    """The definitions of tools, for the chat template."""
    if not isinstance(tools, list | tuple):
        raise bad_request(f"tools is {_short(tools)}: it must be a list of tools", "tools")
    if len(tools) > _MOST_TOOLS:
        raise bad_request(f"tools has {len(tools)} tools, at most {_MOST_TOOLS} are allowed: leave some out", "tools")
    found = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in found]
    for number, name in enumerate(names):
        if name in names[:number]:
            where = f"tools[{number}].function.name"
            raise bad_request(f"{where} is {_short(name)}, as of another tool: give each a name of its own", where)
    return found


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise bad_request(f"{where} is {_short(tool)}: it must be an object with type 'function' and a function", where)
    _without_idle(tool, {}, known=("type", "function"), where=f"{where}.")
    where = f"{where}.function"
    known = ("name", "description", "parameters", "strict")
    function = _without_idle(tool["function"], {}, known=known, where=f"{where}.")
    name = function.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        reason = "give 1 to 128 letters, digits and ._:/-"
        raise bad_request(f"{where}.name is {_short(name)}: {reason}", f"{where}.name")
    for name, kind, expected in (
        ("description", str, "a string"),
        ("parameters", dict, "a JSON schema, an object"),
        ("strict", bool, "true or false"),
    ):
        if not isinstance(function.get(name, kind()), kind):
            at = f"{where}.{name}"
            raise bad_request(f"{at} is {_short(function[name])}: it must be {expected}", at)
    return {"type": "function", "function": function}


def _chosen(choice: Any, tools: Sequence[dict[str, Any]]) -> tuple[Sequence[dict[str, Any]], bool]:
    """The tools that the answer may call, and whether it must call one."""
    if choice in ("auto", "none"):
        return (tools if choice == "auto" else ()), False
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    named = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and named is None:
        expected = "it must be 'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}"
        raise bad_request(f"tool_choice is {_short(choice)}: {expected}", "tool_choice")
    found = [tool for tool in tools if named is None or tool["function"]["name"] == named]
    if not found:
        reason = "no tool has this name" if tools else "there are no tools"
        raise bad_request(f"tool_choice is {_short(choice)}: {reason}; send the tool in tools", "tool_choice")
    return found, True


def _lay_out(
    tokenizer: TokenizerLike, messages: Sequence[Mapping[str, Any]], layout: Mapping[str, Any], served: Served
) -> list[int]:
    try:
        return tokenizer.chat(messages, most_tokens=served.max_model_len, **layout)
    except RequestRejected as refusal:  # the error names the template's option, but the client knows the request field
        if refusal.param in layout and refusal.param != "tools":
            raise RequestRejected(str(refusal), param=f"chat_template_kwargs.{refusal.param}") from None
        raise


def parse_text(body: bytes | bytearray, *, tokenizer: TokenizerLike, served: Served) -> Call:
    """A plain completion request. Raises ApiError or RequestError, naming the field at fault."""
    asked = _validate(_TEXT, "text", parse_object(body), served)
    if asked.echo and asked.logprobs is not None:
        message = (
            "echo is true with logprobs: log-probabilities of prompts are not computed here; leave one of them out"
        )
        raise bad_request(message, "echo")
    max_tokens = _COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens
    only_echo = asked.echo and max_tokens == 0
    params = _sampling(asked, 1 if only_echo else max_tokens, asked.logprobs, {})
    params = dataclasses.replace(params, structured_outputs=_form(asked))
    call = _call("text", asked, params, _prompts(asked.prompt, tokenizer, served), "prompt", served)
    if not asked.echo:
        return call
    return dataclasses.replace(call, echo=_texts(asked.prompt, tokenizer), only_echo=only_echo)


def parse_tokenize(body: bytes | bytearray, *, tokenizer: TokenizerLike, served: Served) -> Tokenized:
    """The token ids for a request to `/tokenize`. Raises ApiError or RequestError, naming the field at fault."""
    fields = parse_object(body)
    chosen = [name for name in ("prompt", "messages") if fields.get(name) is not None]
    if len(chosen) != 1:
        given = "both prompt and messages are given" if chosen else "prompt and messages are both missing"
        raise bad_request(f"{given}: send one of them", "prompt")
    if chosen == ["prompt"]:
        text = _model_of(
            _TokenizeText, _without_idle(fields, {"messages": ()}, known=_TokenizeText.model_fields, where="")
        )
        _check_model(text.model, served)
        ids = tokenizer.encode(
            text.prompt, add_special_tokens=text.add_special_tokens, most_tokens=served.max_model_len
        )
        return Tokenized(ids, text.return_token_strs)
    idle = {**_TOKENIZE_CHAT_IDLE, "prompt": ()}
    chat = _model_of(_TokenizeChat, _without_idle(fields, idle, known=_TokenizeChat.model_fields, where=""))
    _check_model(chat.model, served)
    ids = _lay_out(tokenizer, _messages(chat.messages, served), _layout(chat, tokenizer), served)
    return Tokenized(ids, chat.return_token_strs)


def parse_detokenize(body: bytes | bytearray, *, tokenizer: TokenizerLike, served: Served) -> list[int]:
    """The token ids of a request to `/detokenize`. Raises ApiError, naming the field at fault."""
    asked = _model_of(_Detokenize, _without_idle(parse_object(body), {}, known=_Detokenize.model_fields, where=""))
    _check_model(asked.model, served)
    if not isinstance(asked.tokens, list):
        raise bad_request(f"tokens is {_short(asked.tokens)}: it must be a list of token ids", "tokens")
    served.check_length(asked.tokens, "tokens", "token ids")
    for number, token_id in enumerate(asked.tokens):
        if type(token_id) is not int or not 0 <= token_id < tokenizer.vocab_size:
            where, highest = f"tokens[{number}]", tokenizer.vocab_size - 1
            raise bad_request(
                f"{where} is {_short(token_id)}: a token id of this model is a whole number in [0, {highest}]", where
            )
    return asked.tokens


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
    if len(prompts) * params.n > served.max_choices:
        asks = f"{len(prompts)} prompts with n {params.n}"
        raise bad_request(
            f"{asks} are more than {served.max_choices} choices: split the request", where if len(prompts) > 1 else "n"
        )
    encoded = tuple(tuple(encode()) for encode in prompts)
    if not all(encoded):
        raise bad_request(f"{where} has no tokens: send at least one", where)
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
        not isinstance(asked, _Conversation) or asked.continue_final_message,
        asked.return_tokens_as_token_ids,
        explain_cache=asked.explain_cache,
    )


def _validate(kind: type[_ApiFields], api: Api, body: dict[str, Any], served: Served) -> _ApiFields:
    fields = _without_idle(body, _IDLE[api], known=kind.model_fields, where="")
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    if fields.get("top_k") == -1:  # vLLM's value for off
        fields["top_k"] = 0
    for name in ("max_tokens", "max_completion_tokens"):
        if type(fields.get(name)) is int and fields[name] == -1:  # llama.cpp's value for as many as fit
            fields[name] = served.max_model_len
    asked = _model_of(kind, fields)
    _check_model(asked.model, served)
    return asked


def _model_of(kind: type[_Checked], fields: Mapping[str, Any]) -> _Checked:
    try:
        return kind.model_validate(fields)
    except ValidationError as failure:
        raise _first_fault(failure) from None


def checked(
    kind: type[_Checked], fields: Mapping[str, Any], idle: Mapping[str, tuple[Any, ...] | None], where: str = ""
) -> _Checked:
    """`fields` as a valid object of `kind`. Raises ApiError with status 400, naming the field at fault.

    idle    fields without effect, with their accepted values besides null; None: all values
    where   the place of the object in the request, such as `messages[0]`
    """
    used = _without_idle(fields, idle, known=kind.model_fields, where=where and f"{where}.")
    try:
        return kind.model_validate(used)
    except ValidationError as failure:
        raise _first_fault(failure, where) from None


def _check_model(name: str | None, served: Served) -> None:
    if name is not None and name != served.model_name:
        message = f"the model {name[:100]!r} does not exist: this server serves {served.model_name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _without_idle(
    body: Mapping[str, Any], idle: Mapping[str, tuple[Any, ...] | None], *, known: Collection[str], where: str
) -> dict[str, Any]:
    """`body` without nulls and without fields whose value has no effect. Raises ApiError with status 400 for unknown or
    unsupported fields.
    """
    fields = {}
    for name, value in body.items():
        path = f"{where}{name[:64]}"
        if name in known:
            if value is not None:
                fields[name] = value
        elif name not in idle:
            raise bad_request(_unknown_field(name, path, [f"{where}{other}" for other in known]), path)
        elif not _asks_nothing(value, idle[name]):
            raise bad_request(f"{path} is {_short(value)}, which this server does not support: leave it out", path)
    return fields


def _unknown_field(name: str, path: str, known: Sequence[str]) -> str:
    """The message for an unknown field. It suggests a name only for a typing error: less similar names have other
    meanings.
    """
    if name in OTHER_SERVERS:
        return f"no field {path}: {OTHER_SERVERS[name]}"
    if difflib.get_close_matches(path, known, n=1, cutoff=_TYPING_ERROR):
        return unknown_name("field", path, known)
    return f"no field {path}: leave it out"


def _asks_nothing(value: Any, idle: tuple[Any, ...] | None) -> bool:
    if value is None or idle is None:
        return True
    return any(type(value) is type(nothing) and value == nothing for nothing in idle)  # type, too: True == 1


def _first_fault(failure: ValidationError, param: str = "") -> ApiError:
    fault = failure.errors(include_url=False, include_context=False)[0]
    for step in fault["loc"]:
        param += f"[{step}]" if isinstance(step, int) else f".{step[:64]}" if param else step
    if fault["type"] == "missing":
        return bad_request(f"{param} is missing: it is required", param)
    if fault["type"] == "extra_forbidden":
        return bad_request(f"no field {param}", param)
    reason = fault["msg"][:1].lower() + fault["msg"][1:]
    return bad_request(f"{param} is {_short(fault['input'])}: {reason}", param)


def _sampling(
    asked: _Fields, max_tokens: int | None, logprobs: int | None, renamed: Mapping[str, str]
) -> SamplingParams:
    try:
        return SamplingParams(
            **{name: getattr(asked, name) for name in SAMPLING_OPTIONS},
            logit_bias={_token_id(name): bias for name, bias in asked.logit_bias.items()},
            seed=asked.seed,
            stop=tuple(asked.stop),
            stop_token_ids=tuple(asked.stop_token_ids),
            include_stop=asked.include_stop_str_in_output,
            max_tokens=max_tokens,
            min_tokens=asked.min_tokens,
            ignore_eos=asked.ignore_eos,
            logprobs=logprobs,
            n=asked.n,
            max_drafts=asked.max_drafts,
            allowed_token_ids=tuple(asked.allowed_token_ids),
            bad_words=tuple(asked.bad_words),
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


def _messages(messages: Any, served: Served) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise bad_request(f"messages is {_short(messages)}: it must be a list of one or more messages", "messages")
    served.check_length(messages, "messages", "messages")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    """A message for the chat template: its role, its content, and fields that some templates read."""
    if not isinstance(message, dict):
        raise bad_request(f"{where} is {_short(message)}: it must be an object with role and content", where)
    fields = _without_idle(message, _IDLE["message"], known=_MESSAGE_FIELDS, where=f"{where}.")
    role = fields.get("role")
    if role == "developer":
        role = "system"  # OpenAI's newer name; chat templates know only the older one
    if role not in ("system", "user", "assistant", "tool"):
        raise bad_request(
            f"{where}.role is {_short(role)}: it must be system, developer, user, assistant or tool", f"{where}.role"
        )
    known: dict[str, Any] = {"role": role}
    calls = _tool_calls(fields.get("tool_calls", []), f"{where}.tool_calls")
    if calls:
        known["tool_calls"] = calls
    if not calls or "content" in fields:
        known["content"] = _content(fields.get("content"), f"{where}.content")
    for name in ("reasoning", "reasoning_content", "name", "tool_call_id"):
        if name in fields:
            if not isinstance(fields[name], str):
                raise bad_request(f"{where}.{name} is {_short(fields[name])}: it must be a string", f"{where}.{name}")
            known["reasoning_content" if name == "reasoning" else name] = fields[
                name
            ]  # the two names have the same meaning
    return known


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls of an earlier answer. In OpenAI's API the arguments are a JSON text, but chat templates expect an
    object.
    """
    if not isinstance(calls, list):
        raise bad_request(f"{where} is {_short(calls)}: it must be a list", where)
    return [_tool_call(call, f"{where}[{number}]") for number, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(
            f"{where} is {_short(call)}: it must be an object with a function, which has a name and arguments", where
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parse_json(arguments or "{}", f"{where}.function.arguments")
    if not isinstance(arguments, dict):
        at = f"{where}.function.arguments"
        raise bad_request(f"{at} is {_short(arguments)}: it must be a JSON object", at)
    return {**call, "function": {**function, "arguments": arguments}}


def _content(content: Any, where: str) -> str:
    """A message's text. The parts of a message are joined without a separator."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise bad_request(f"{where} is {_short(content)}: it must be a string or a list of text parts", where)
    return "".join(_part(part, f"{where}[{number}]") for number, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise bad_request(f"{where} is {_short(part)}: it must be an object with type and text", where)
    if part.get("type") != "text":
        raise bad_request(
            f"{where}.type is {_short(part.get('type'))}: this server reads parts of type 'text' only", f"{where}.type"
        )
    fields = _without_idle(part, _IDLE["part"], known=("type", "text"), where=f"{where}.")
    text = fields.get("text")
    if not isinstance(text, str):
        raise bad_request(f"{where}.text is {_short(text)}: it must be a string", f"{where}.text")
    return text


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
            f"prompt is {_short(prompt)}: it must be a string, strings, token ids, or lists of token ids", "prompt"
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
        raise bad_request(f"{where} is {_short(item)}: the first prompt is a string, so all must be strings", where)
    return item


def _ids(ids: Any, where: str, served: Served) -> Callable[[], list[int]]:
    if not isinstance(ids, list):
        raise bad_request(
            f"{where} is {_short(ids)}: the first prompt is a list of token ids, so all must be lists", where
        )
    served.check_length(ids, where, "token ids")
    for number, token_id in enumerate(ids):
        if type(token_id) is not int or not 0 <= token_id <= _MAX_TOKEN_ID:
            at = f"{where}[{number}]"
            raise bad_request(f"{at} is {_short(token_id)}: a token id is a whole number in [0, {_MAX_TOKEN_ID}]", at)
    return lambda: ids


def _short(value: Any) -> str:
    """A short text for a client's value, however long or deep the value is; null is written as in JSON."""
    return "null" if value is None else reprlib.repr(value)
