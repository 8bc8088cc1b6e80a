"""TTFT of prompts that are computed, loaded from host memory, and loaded from disk by a fresh process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

from sidestream.cli.bench.report import Figure, at_least, at_most
from sidestream.cli.visits import Stay, Visit, visit, visit_in_fresh_process, warm_up
from sidestream.errors import SidestreamError

_OUTPUT_TOKENS = 8


def measure(model: str, *, prompt_tokens: int, rounds: int, tell: Callable[[str], None]) -> list[Figure]:
    """Ask `rounds` different prompts cold, again when the pool has lost them, and again in a fresh process."""
    with tempfile.TemporaryDirectory(prefix="sidestream-bench-") as scratch:
        # The pool holds one prompt and a half: when the second is answered, little of the first is left, and nothing after the third.
        pool_tokens = prompt_tokens * 3 // 2
        stay = Stay(model, {"kv_memory": "1MiB", "offload": {"host": "1GiB", "disk": str(Path(scratch) / "kv"), "disk_capacity": "2GiB"}})
        stay.options["kv_memory"] = pool_tokens * _token_bytes(model)
        with stay.open() as llm:
            ids = _text_ids(llm.tokenizer.encode, prompt_tokens + rounds)
            prompts = [ids[start : start + prompt_tokens] for start in range(rounds)]
            warm_up(llm)
            cold: list[Visit] = []
            for number, prompt in enumerate(prompts):
                tell(f"cold {number + 1} of {rounds}")
                cold.append(visit(llm, prompt, max_tokens=_OUTPUT_TOKENS))
                llm.flush()
            host: list[Visit] = []
            for number, prompt in enumerate(prompts):
                tell(f"from host memory {number + 1} of {rounds}")
                host.append(visit(llm, prompt, max_tokens=_OUTPUT_TOKENS))
        tell("from disk, in a fresh process")
        disk = visit_in_fresh_process(stay, prompts, max_tokens=_OUTPUT_TOKENS)
    _check("cold", cold, lambda seen: seen.reused == 0)
    _check("host memory", host, lambda seen: seen.host > 0.95 * prompt_tokens)
    _check("disk", disk, lambda seen: seen.disk > 0.95 * prompt_tokens)
    identical = sum(a.tokens == b.tokens == c.tokens for a, b, c in zip(cold, host, disk, strict=True))
    cold_s, host_s, disk_s = (median(seen.ttft_s for seen in visits) for visits in (cold, host, disk))
    return [
        Figure("ttft_disk_over_cold", disk_s / cold_s, "ratio", at_most(1 / 30)),
        Figure("ttft_host_over_cold", host_s / cold_s, "ratio", at_most(1 / 40)),
        Figure("identical_answers", identical / rounds, "share", at_least(1.0)),
        Figure("ttft_cold_ms", cold_s * 1e3, "ms"),
        Figure("ttft_host_ms", host_s * 1e3, "ms"),
        Figure("ttft_disk_ms", disk_s * 1e3, "ms"),
        Figure("prompt_tokens", prompt_tokens, "tokens"),
    ]


def _check(name: str, visits: list[Visit], expected: Callable[[Visit], bool]) -> None:
    for seen in visits:
        if not expected(seen):
            raise SidestreamError(
                f"a {name} answer came from elsewhere ({seen.source}, {seen.reused} tokens): the figures would mean nothing"
            )


def _text_ids(encode: Callable[[str], list[int]], count: int) -> list[int]:
    from sidestream.text import sample_text

    ids = encode(sample_text())
    return (ids * (count // len(ids) + 1))[:count]


def _token_bytes(model: str) -> int:
    """Bytes of one token's KV, from the model's config."""
    from sidestream.models import kv_token_bytes
    from sidestream.models.catalog import resolve

    return kv_token_bytes(resolve(model))
