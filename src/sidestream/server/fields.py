"""The fields of both APIs: what is honoured, what is accepted because it asks for nothing, and everything else refused by name.

Runs on a worker thread: validating and encoding a long prompt takes milliseconds that the event loop does not have.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from sidestream.config import SamplingParams, unknown_name
from sidestream.errors import RequestRejected
from sidestream.server.backend import Tokenizer
from sidestream.server.body import parse_object
from sidestream.server.errors import ApiError, bad_request

Api = Literal["chat", "text"]
_ApiFields = TypeVar("_ApiFields", bound="_Fields")

_COMPLETION_TOKENS = 16  # what OpenAI's /v1/completions generates when nobody says how much
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_MAX_TOKEN_ID = (1 << 31) - 1

# Fields of OpenAI's that this server does not implement, with the values that ask for nothing (null always does).
# True: any value, because the field has no effect on a reply.
_IDLE_BOTH: Mapping[str, tuple[Any, ...] | Literal[True]] = {
    "user": True,
    "safety_identifier": True,
    "prompt_cache_key": True,
    "metadata": ({},),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
_IDLE: Mapping[Api, Mapping[str, tuple[Any, ...] | Literal[True]]] = {
    "chat": {
        **_IDLE_BOTH,
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "reasoning_effort": ("none",),
        "response_format": ({"type": "text"},),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": ("medium",),
        "web_search_options": (),
    },
    "text": {**_IDLE_BOTH, "best_of": (1,), "echo": (False,), "suffix": ("",)},
}
_IDLE_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "reasoning_content": (),
    "refusal": (),
    "tool_calls": ([],),
}


@dataclass(frozen=True, slots=True)
class Call:
    """One valid request of either API, its prompts encoded."""

    api: Api
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    priority: int
    stream: bool
    include_usage: bool

    @property
    def num_choices(self) -> int:
        """Samples that the reply has."""
        return len(self.prompts) * self.params.n


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class _Fields(BaseModel):
    """What both APIs share, by type; null is taken out before.

    `SamplingParams` checks ranges. None stands for the model's sampling default, which the engine fills in.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int = 1
    stream: bool = False
    stream_options: _StreamOptions | None = None
    stop: Annotated[list[str], FailFast()] = []
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = Field(default={}, max_length=1024)
    seed: int | None = None
    # beyond OpenAI's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[int], FailFast()] = Field(default=[], max_length=1024)
    priority: int = Field(default=0, ge=-1_000_000, le=1_000_000)
    include_stop_str_in_output: bool = False
    max_drafts: int | None = None


class _Chat(_Fields):
    messages: Any
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)


class _Text(_Fields):
    prompt: Any
    logprobs: int | None = None


def parse_chat(body: bytes, *, tokenizer: Tokenizer, served_name: str, max_choices: int) -> Call:
    """A chat request. Raises ApiError or RequestError, naming the field at fault."""
    asked = _validate(_Chat, "chat", parse_object(body), served_name)
    if asked.top_logprobs and not asked.logprobs:
        raise bad_request(f"top_logprobs is {asked.top_logprobs} without logprobs: set logprobs to true", "top_logprobs")
    limit, limit_name = asked.max_tokens, "max_tokens"
    if asked.max_completion_tokens is not None:
        if limit is not None and limit != asked.max_completion_tokens:
            raise bad_request("max_tokens and max_completion_tokens differ: send max_completion_tokens only", "max_tokens")
        limit, limit_name = asked.max_completion_tokens, "max_completion_tokens"
    messages = _messages(asked.messages)
    params = _sampling(asked, limit, asked.top_logprobs if asked.logprobs else None, {"max_tokens": limit_name})
    return _call("chat", asked, params, [lambda: tokenizer.chat(messages)], "messages", max_choices)


def parse_text(body: bytes, *, tokenizer: Tokenizer, served_name: str, max_choices: int) -> Call:
    """A plain completion request. Raises ApiError or RequestError, naming the field at fault."""
    asked = _validate(_Text, "text", parse_object(body), served_name)
    params = _sampling(asked, _COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens, asked.logprobs, {})
    return _call("text", asked, params, _prompts(asked.prompt, tokenizer), "prompt", max_choices)


def _call(
    api: Api, asked: _Fields, params: SamplingParams, prompts: Sequence[Callable[[], list[int]]], where: str, max_choices: int
) -> Call:
    """Encodes last, when nothing else can be refused: it is the dear part."""
    if asked.stream_options is not None and not asked.stream:
        raise bad_request("stream_options without stream: set stream to true or leave stream_options out", "stream_options")
    if len(prompts) * params.n > max_choices:
        asks = f"{len(prompts)} prompts with n {params.n}"
        raise bad_request(f"{asks} are more than {max_choices} choices: split the request", where if len(prompts) > 1 else "n")
    encoded = tuple(tuple(encode()) for encode in prompts)
    if not all(encoded):
        raise bad_request(f"{where} has no tokens: send at least one", where)
    include_usage = asked.stream_options is not None and asked.stream_options.include_usage
    return Call(api, encoded, params, asked.priority, asked.stream, include_usage)


def _validate(kind: type[_ApiFields], api: Api, body: dict[str, Any], served_name: str) -> _ApiFields:
    fields = _without_idle(body, _IDLE[api], known=kind.model_fields, where="")
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    try:
        asked = kind.model_validate(fields)
    except ValidationError as failure:
        raise _first_fault(failure) from None
    if asked.model != served_name:
        message = f"the model {asked.model[:100]!r} does not exist: this server serves {served_name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return asked


def _without_idle(
    body: Mapping[str, Any], idle: Mapping[str, tuple[Any, ...] | Literal[True]], *, known: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """`body` without nulls and without idle fields that ask for nothing. One that asks for something, or is unknown, is a 400."""
    fields = {}
    for name, value in body.items():
        path = f"{where}{name[:64]}"
        if name in known:
            if value is not None:
                fields[name] = value
        elif name not in idle:
            raise bad_request(unknown_name("field", path, [f"{where}{other}" for other in (*known, *idle)]), path)
        elif not _asks_nothing(value, idle[name]):
            raise bad_request(f"{path} is {_short(value)}, which this server does not support: leave it out", path)
    return fields


def _asks_nothing(value: Any, idle: tuple[Any, ...] | Literal[True]) -> bool:
    if value is None or idle is True:
        return True
    return any(type(value) is type(nothing) and value == nothing for nothing in idle)  # by type too: True == 1


def _first_fault(failure: ValidationError) -> ApiError:
    fault = failure.errors(include_url=False, include_context=False)[0]
    param = ""
    for step in fault["loc"]:
        param += f"[{step}]" if isinstance(step, int) else f".{step[:64]}" if param else step
    if fault["type"] == "missing":
        return bad_request(f"{param} is missing: it is required", param)
    if fault["type"] == "extra_forbidden":
        return bad_request(f"no field {param}", param)
    reason = fault["msg"][:1].lower() + fault["msg"][1:]
    return bad_request(f"{param} is {_short(fault['input'])}: {reason}", param)


def _sampling(asked: _Fields, max_tokens: int | None, logprobs: int | None, renamed: Mapping[str, str]) -> SamplingParams:
    try:
        return SamplingParams(
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            min_p=asked.min_p,
            repetition_penalty=asked.repetition_penalty,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
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
        )
    except RequestRejected as failure:  # speaks of the parameter; the client knows the field
        param = failure.param or ""
        field = renamed.get(param, param)
        raise RequestRejected(str(failure).replace(param, field), param=field) from None


def _token_id(name: str) -> int:
    if not _TOKEN_ID.fullmatch(name) or int(name) > _MAX_TOKEN_ID:
        raise RequestRejected(f'logit_bias has the key {name[:64]!r}: keys are token ids, such as "50256"', param="logit_bias")
    return int(name)


def _messages(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise bad_request(f"messages is {_short(messages)}: it must be a list of one or more messages", "messages")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise bad_request(f"{where} is {_short(message)}: it must be an object with role and content", where)
    fields = _without_idle(message, _IDLE_MESSAGE, known={"role": None, "content": None}, where=f"{where}.")
    role = fields.get("role")
    if role == "developer":
        role = "system"  # OpenAI's newer name for the same thing; chat templates know the older one
    if role not in ("system", "user", "assistant"):
        raise bad_request(f"{where}.role is {_short(role)}: it must be system, developer, user or assistant", f"{where}.role")
    return {"role": role, "content": _content(fields.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    """A message's text; parts are joined with nothing between them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise bad_request(f"{where} is {_short(content)}: it must be a string or a list of text parts", where)
    return "".join(_part(part, f"{where}[{number}]") for number, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise bad_request(f"{where} is {_short(part)}: it must be an object with type and text", where)
    if part.get("type") != "text":
        raise bad_request(f"{where}.type is {_short(part.get('type'))}: this server reads parts of type 'text' only", f"{where}.type")
    fields = _without_idle(part, {}, known={"type": None, "text": None}, where=f"{where}.")
    text = fields.get("text")
    if not isinstance(text, str):
        raise bad_request(f"{where}.text is {_short(text)}: it must be a string", f"{where}.text")
    return text


def _prompts(prompt: Any, tokenizer: Tokenizer) -> list[Callable[[], list[int]]]:
    """One encoder per prompt of a string, a list of strings, a list of token ids or a list of those; the first item decides."""
    if isinstance(prompt, str):
        return [lambda: tokenizer.encode(prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise bad_request(f"prompt is {_short(prompt)}: it must be a string, strings, token ids, or lists of token ids", "prompt")
    match prompt[0]:
        case str():
            return [_string(item, f"prompt[{number}]", tokenizer) for number, item in enumerate(prompt)]
        case list():
            return [_ids(item, f"prompt[{number}]") for number, item in enumerate(prompt)]
        case _:
            return [_ids(prompt, "prompt")]


def _string(item: Any, where: str, tokenizer: Tokenizer) -> Callable[[], list[int]]:
    if not isinstance(item, str):
        raise bad_request(f"{where} is {_short(item)}: the first prompt is a string, so all must be", where)
    return lambda: tokenizer.encode(item)


def _ids(ids: Any, where: str) -> Callable[[], list[int]]:
    if not isinstance(ids, list):
        raise bad_request(f"{where} is {_short(ids)}: the first prompt is a list of token ids, so all must be", where)
    for number, token_id in enumerate(ids):
        if type(token_id) is not int or not 0 <= token_id <= _MAX_TOKEN_ID:
            at = f"{where}[{number}]"
            raise bad_request(f"{at} is {_short(token_id)}: a token id is a whole number in [0, {_MAX_TOKEN_ID}]", at)
    return lambda: ids


def _short(value: Any) -> str:
    """A bounded rendering of a client's value, however long or deep; null as JSON says it."""
    return "null" if value is None else reprlib.repr(value)
