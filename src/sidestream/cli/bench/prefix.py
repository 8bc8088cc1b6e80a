"""TTFT of prompts that are computed, loaded from host memory, and loaded from disk by a fresh process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from sidestream.cli.bench.report import Figure, at_least, at_most
from sidestream.cli.visits import Engine, Visit
from sidestream.errors import SidestreamError

_OUTPUT_TOKENS = 8


def measure(model: str, *, prompt_tokens: int, rounds: int, tell: Callable[[str], None]) -> list[Figure]:
    """Ask `rounds` different prompts cold, again when the pool has lost them, and again in a fresh process."""
    from sidestream.models import kv_token_bytes
    from sidestream.models.catalog import resolve
    from sidestream.text import sample_text
    from sidestream.tokenizer import Tokenizer

    path = resolve(model)
    ids = Tokenizer.load(path).encode(sample_text())
    ids = ids * ((prompt_tokens + rounds) // len(ids) + 1)
    prompts = [ids[start : start + prompt_tokens] for start in range(rounds)]
    # The pool holds a prompt and a half: after the next prompt's answer, nothing of the start of the one before is
    # left.
    kv_memory = prompt_tokens * 3 // 2 * kv_token_bytes(path)
    with tempfile.TemporaryDirectory(prefix="sidestream-bench-") as scratch:
        options = {
            "device": "cpu",
            "kv_memory": kv_memory,
            "offload": {"host": "2GiB", "disk": str(Path(scratch) / "kv"), "disk_capacity": "2GiB"},
        }
        with Engine(path, options) as engine:
            cold = _ask_each(engine, prompts, lambda number: tell(f"cold {number} of {rounds}"))
            host = _ask_each(engine, prompts, lambda number: tell(f"from host memory {number} of {rounds}"))
        with Engine(path, options) as engine:
            disk = _ask_each(engine, prompts, lambda number: tell(f"from disk, fresh process, {number} of {rounds}"))
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


def _ask_each(engine: Engine, prompts: Sequence[Sequence[int]], tell: Callable[[int], None]) -> list[Visit]:
    visits: list[Visit] = []
    for number, prompt in enumerate(prompts, start=1):
        tell(number)
        visits.extend(engine.ask([prompt], max_tokens=_OUTPUT_TOKENS).visits)
    return visits


def _check(name: str, visits: list[Visit], expected: Callable[[Visit], bool]) -> None:
    for seen in visits:
        if not expected(seen):
            raise SidestreamError(
                f"a {name} answer came from elsewhere ({seen.source}, {seen.reused} tokens): the figures would mean nothing"
            )
