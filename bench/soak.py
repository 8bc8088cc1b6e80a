"""Memory growth of the process over many requests. The pools are small, all tiers are in use, and some requests are
aborted.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from proof.report import Figure, at_most
from sidestream_kv.device.kinds import CPU

_SETTLED = 200
_REST_S = 3.0
_WAVE = 20


def measure(model: str, *, requests: int, on_progress: Callable[[str], None]) -> list[Figure]:
    """Growth of resident memory between request 200, when all pools are full, and request `requests`."""
    from sidestream.config import SamplingParams
    from sidestream.llm import LLM
    from sidestream_kv.config import OffloadConfig

    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="sidestream-bench-") as scratch:
        offload = OffloadConfig(host="64MiB", disk=Path(scratch) / "kv", disk_capacity="128MiB")
        with LLM(model, device=CPU, kv_memory="32MiB", offload=offload) as llm:
            settled = 0
            for done in range(0, requests, _WAVE):
                on_progress(f"request {done} of {requests}")
                prompts = [[rng.randrange(300, 20_000) for _ in range(rng.randrange(8, 64))] for _ in range(_WAVE)]
                params = [
                    SamplingParams(temperature=0.8, seed=done, max_tokens=rng.randrange(1, 9), ignore_eos=True)
                    for _ in prompts
                ]
                llm.generate(prompts, params)
                next(llm.stream(prompts[0], SamplingParams(max_tokens=64)))  # leaving the stream aborts the request
                if done + _WAVE == _SETTLED:
                    settled = _resident_bytes_at_rest()
            grown = _resident_bytes_at_rest() - settled
            preemptions = llm.engine.parts.scheduler.num_preemptions
    return [
        Figure("rss_growth_mib", grown / 2**20, "MiB", at_most(16)),
        Figure("rss_settled_mib", settled / 2**20, "MiB"),
        Figure("requests", requests, "requests"),
        Figure("preemptions", preemptions, "preemptions"),
    ]


def _resident_bytes_at_rest() -> int:
    """Resident memory of this process, after the engine was idle for some seconds and could return free memory to the
    system.
    """
    time.sleep(_REST_S)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    import resource

    return pages * resource.getpagesize()
