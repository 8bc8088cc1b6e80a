"""Prefill on one server and decode on another one, each with its processes, over a real store."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from proof.store_servers import ValkeyServer
from proof.tiny_models import tiny_model_dir

from .test_processes import serving

WHY_NO_VALKEY = ValkeyServer.why_none()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(WHY_NO_VALKEY is not None, reason=str(WHY_NO_VALKEY))]


def ask(url: str, **fields: object) -> dict[str, Any]:
    body = {"model": "tiny", "temperature": 0, "ignore_eos": True, **fields}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def hand_over(prefill: str, decode: str, prompt: list[int], *, meanwhile: Callable[[], object] = lambda: None) -> int:
    """Hand a prompt over, compare the answers of both, and return the number of tokens that the second one loaded."""
    first = ask(prefill, prompt=prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    passed_on = first["kv_transfer_params"]
    assert passed_on["stored_tokens"] == 2000
    meanwhile()
    answer = ask(decode, prompt=prompt, max_tokens=8, kv_transfer_params=passed_on)
    assert answer["choices"] == ask(prefill, prompt=prompt, max_tokens=8)["choices"]
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_a_decode_replica_loads_what_a_prefill_replica_has_handed_over(tmp_path: Path) -> None:
    """A hand-over whose values the store has lost is computed, with the same tokens. So is one that is late, which a
    machine with other work may see several times.
    """
    model = tiny_model_dir("llama", tmp_path / "tiny", seed=1, max_position_embeddings=4096)
    store, prompt = ValkeyServer(), [3 + number % 50 for number in range(2000)]
    options = ("--offload-host", "64MiB", "--offload-tiers", json.dumps({"redis": {"url": store.url}}))
    try:
        with serving(model, *options) as first, serving(model, *options) as second:
            urls = first.url, second.url
            assert any(hand_over(*urls, [60 + attempt, *prompt]) == 2000 for attempt in range(9))
            assert hand_over(*urls, [70, *prompt], meanwhile=store.client().flushall) == 0
    finally:
        store.close()
