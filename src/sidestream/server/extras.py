"""Fields that clients send and that this server does not implement, and the fields of other servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

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
    Extra("cache_prompt", _BOTH, (True,)),
    Extra("early_stopping", _BOTH, (False,)),
    Extra("modalities", ("chat",), (["text"],)),
    Extra("return_token_ids", _BOTH, (False,)),
    Extra("suffix", ("text",), ("",)),
    Extra("verbosity", ("chat",), ("medium",)),
    # Sampling that this server lacks, with the values that switch it off.
    Extra("dry_multiplier", _BOTH, (0, 0.0)),
    Extra("dynatemp_range", _BOTH, (0, 0.0)),
    Extra("mirostat", _BOTH, (0,)),
    Extra("tfs_z", _BOTH, (1, 1.0)),
    Extra("top_a", _BOTH, (0, 0.0)),
    Extra("top_n_sigma", _BOTH, (-1, -1.0, 0, 0.0)),
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
    Extra("logits_processors", _BOTH, ([],)),
    Extra("mm_processor_kwargs", ("chat",), ({},)),
    Extra("refusal", ("message",), ("",)),
    Extra("tool_choice", ("text",), ("none",)),
    Extra("vllm_xargs", _BOTH, ({},)),
    Extra("web_search_options", ("chat",), ()),
)
IDLE: Mapping[Place, Mapping[str, tuple[Any, ...] | None]] = {
    place: {extra.name: extra.values for extra in EXTRAS if place in extra.places} for place in get_args(Place)
}
OTHER_SERVERS: Mapping[str, str] = {
    # llama.cpp
    "n_predict": "max_tokens has this meaning here",
    "id_slot": "requests share all slots here; leave it out",
    "n_keep": "truncate_prompt_tokens keeps the end of a prompt here",
    "n_probs": "logprobs has this meaning here",
    "repeat_penalty": "repetition_penalty has this meaning here",
    "repeat_last_n": "repetition_penalty counts the whole prompt and output here; leave it out",
    "samplers": "the order of sampling options is fixed here; leave it out",
    "typical": "typical_p has this meaning here",
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
    "transforms": "truncate_prompt_tokens keeps the end of a prompt here",
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
    "reasoning": "send reasoning_effort, thinking_token_budget, or an option of the template in chat_template_kwargs",
    "lora_path": "LoRA adapters are not supported here; leave it out",
    "session_params": "session_id names a session here; there is nothing to open",
    "rid": "request_id has this meaning here",
    "data_parallel_rank": "a server has one replica here; leave it out",
    "detokenize": "/v1/completions always returns text; leave it out",
    "inputs": "prompt has this meaning here",
    "input": "prompt, or messages in a chat, has this meaning here",
    "max_output_tokens": "max_tokens has this meaning here",
    "instructions": "send a message with the role system",
}
"""Fields of other servers, and what to send to this one in their place. No similar name is suggested for them."""
