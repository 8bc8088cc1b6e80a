"""What requests say about the KV cache: sessions, as SGLang (`session_id`), vLLM (`agent_hint`) and OpenAI
(`prompt_cache_key`) spell them, and bounds of what tiers do, as vLLM spells them in `kv_transfer_params`.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers

from sidestream.config import MOST_SALT_CHARS, CacheOptions, SamplingParams
from sidestream.errors import RequestRejected
from sidestream.server.body import Strict
from sidestream.server.errors import bad_request

SESSION_HEADER = "x-session-id"

_Name = Annotated[str, Field(min_length=1, max_length=MOST_SALT_CHARS)]
_RETENTION_S = {"in_memory": None, "in-memory": None, "24h": 86_400.0}


class KVTransferParams(BaseModel):
    """As vLLM and its proxies spell them. Fields that name an engine have no effect: a store has the KV."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    max_load_tokens: int | None = None
    max_offload_tokens: int | None = None
    kv_load_tiers: list[str] | None = Field(default=None, max_length=16)


class _CacheControl(Strict):
    type: Literal["ephemeral"] = "ephemeral"
    ttl: float = Field(default=300.0, ge=0, le=3600)


class AgentHint(Strict):
    """As vLLM spells it. `parent_session_id` has no effect: requests share KV whatever their session is."""

    session_id: _Name | None = None
    parent_session_id: _Name | None = None
    cache_control: _CacheControl | None = None


class CacheFields(BaseModel):
    """The fields of a request about the KV cache, but for its salt."""

    kv_transfer_params: KVTransferParams | None = None
    session_id: _Name | None = None
    agent_hint: AgentHint | None = None
    prompt_cache_key: _Name | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None


def cache_options(asked: CacheFields) -> CacheOptions | None:
    """The options of a request with these fields; None: it asks for nothing. Raises ApiError."""
    kv, hint = asked.kv_transfer_params or KVTransferParams(), asked.agent_hint or AgentHint()
    names = {name: name for name in (asked.session_id, hint.session_id) if name is not None}
    if len(names) > 1:
        raise bad_request("session_id and agent_hint.session_id differ: send one of them", "session_id")
    control, retention_s = hint.cache_control, _RETENTION_S[asked.prompt_cache_retention or "in_memory"]
    options = CacheOptions(
        max_load_tokens=kv.max_load_tokens,
        max_offload_tokens=kv.max_offload_tokens,
        load_tiers=None if kv.kv_load_tiers is None else tuple(kv.kv_load_tiers),
        session=next(iter(names), asked.prompt_cache_key or ""),
        session_ttl_s=retention_s if control is None else control.ttl,
    )
    return None if options == CacheOptions(session_ttl_s=options.session_ttl_s) else options


def with_session(params: SamplingParams, headers: Headers, most_s: float) -> SamplingParams:
    """The parameters with the session of the header, which a field overrides, and with `most_s` as the bound of the
    time for which its KV is held; 0: there are no sessions. Raises RequestRejected for a bad header.
    """
    cache, name = params.cache or CacheOptions(), headers.get(SESSION_HEADER, "")
    if len(name) > MOST_SALT_CHARS:
        message = f"the header {SESSION_HEADER} has {len(name)} characters: give at most {MOST_SALT_CHARS}"
        raise RequestRejected(message, param=SESSION_HEADER)
    session = (cache.session or name) if most_s else ""
    if not session and params.cache is None:
        return params
    ttl_s = None if cache.session_ttl_s is None else min(cache.session_ttl_s, most_s)
    cache = dataclasses.replace(cache, session=session, session_ttl_s=ttl_s, max_ttl_s=most_s)
    return dataclasses.replace(params, cache=cache)
