"""Checks the prompts and sampling parameters that callers of `LLM` and `AsyncLLM` give."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral
from typing import Any

from sidestream.config import SamplingParams
from sidestream.errors import RequestRejected
from sidestream.text import TokenizerLike
from sidestream.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""A text, or token ids."""


def ids_of(prompt: Prompt, tokenizer: Tokenizer, where: str = "prompt") -> list[int]:
    """Token ids of a prompt. Raises RequestRejected."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return _items(prompt, where, "a text or a list of token ids")


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts as a list. A list whose first item is a number is one prompt of token ids. Raises RequestRejected."""
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts, "prompts", "a text, a list of token ids, or a list of such prompts")
    return [items] if items and isinstance(items[0], Integral) else items


def params_of_each(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    """The parameters of each prompt. `params` is one object for all prompts, or a list with one object for each.

    Raises RequestRejected.
    """
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        return [checked_params(params)] * num_prompts
    if len(params) != num_prompts:
        reason = f"{len(params)} params for {num_prompts} prompts: give one object for all, or one for each prompt"
        raise RequestRejected(reason, param="params")
    return [checked_params(one, f"params[{index}]") for index, one in enumerate(params)]


def checked_params(params: SamplingParams | None, where: str = "params") -> SamplingParams:
    """The parameters of one request; None means all defaults.

    Raises RequestRejected for any other type; the message shows how to write a mapping as SamplingParams.
    """
    if params is None:
        return SamplingParams()
    if isinstance(params, SamplingParams):
        return params
    value = f"the class {params.__name__}" if isinstance(params, type) else reprlib.repr(params)
    example = "temperature=0"
    if isinstance(params, Mapping):
        example = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in params.items())
    reason = f"{where} is {value}: give a SamplingParams object, such as SamplingParams({example})"
    raise RequestRejected(reason, param=where)


def with_special_stops(params: SamplingParams, tokenizer: TokenizerLike) -> SamplingParams:
    """`params` with a stop token for each stop string that is a special token, such as `<|im_end|>`. Special tokens
    have no text, so no search in the text finds them.
    """
    ids = tuple(token_id for stop in params.stop if (token_id := tokenizer.special_id(stop)) is not None)
    return dataclasses.replace(params, stop_token_ids=(*params.stop_token_ids, *ids)) if ids else params


def _items(value: object, where: str, expected: str) -> list[Any]:
    """The items of a sequence as a list. Raises RequestRejected for anything else, including bytes."""
    if isinstance(value, bytes | bytearray | Mapping | Set) or not isinstance(value, Iterable):
        hint = "; a conversation is for chat()" if isinstance(value, Mapping) else ""
        raise RequestRejected(f"{where} is {reprlib.repr(value)}: give {expected}{hint}", param=where)
    return list(value)
