"""What offload costs a step when it moves nothing, and when it stores all the time."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from sidestream.cli.bench.report import Figure, at_most
from sidestream.cli.visits import warm_up

if TYPE_CHECKING:
    from sidestream.llm import LLM

_REQUESTS = 4
_PROMPT_TOKENS = 192
_OUTPUT_TOKENS = 48


def measure(model: str, *, rounds: int, tell: Callable[[str], None]) -> list[Figure]:
    """The same requests through three engines in turn: offload off; on, storing every block; on, with all of it stored before."""
    from sidestream.llm import LLM

    with tempfile.TemporaryDirectory(prefix="sidestream-bench-") as scratch, ExitStack() as stack:

        def offload(name: str) -> dict[str, object]:
            from sidestream.config import OffloadConfig

            return {"offload": OffloadConfig(host="256MiB", disk=Path(scratch) / name, disk_capacity="1GiB")}

        engines = {
            name: stack.enter_context(LLM(model, kv_memory="128MiB", **options)) for name, options in (("off", {}), ("on", offload("on")))
        }
        for llm in engines.values():
            warm_up(llm)
        rng = random.Random(0)
        storing, idle = [], []
        for number in range(rounds):
            tell(f"round {number + 1} of {rounds}")
            storing.append(_ratio(engines, rng, number, stores=True))
            idle.append(_ratio(engines, rng, number, stores=False))
        on = engines["on"]
        waits = sum(count for reason, count in on.engine.parts.device.host_waits().items() if reason != "flight")
        steps = on.engine.num_steps
        blocks = on.metrics.value("transfer_bytes_total", "disk-write") / on.engine.parts.layout.block_bytes
    return [
        Figure("step_offload_over_off", max(median(storing), median(idle)), "ratio", at_most(1.03)),
        Figure("host_waits_per_step", waits / steps, "waits/step", at_most(0)),
        Figure("step_storing_over_off", median(storing), "ratio"),
        Figure("step_idle_over_off", median(idle), "ratio"),
        Figure("steps", steps, "steps"),
        Figure("blocks_stored", blocks, "blocks"),
    ]


def _ratio(engines: dict[str, LLM], rng: random.Random, number: int, *, stores: bool) -> float:
    """Time per step with offload on over off; which goes first alternates."""
    prompts = [[rng.randrange(300, 20_000) for _ in range(_PROMPT_TOKENS if stores else 8)] for _ in range(_REQUESTS)]
    order = ("on", "off") if number % 2 else ("off", "on")
    seconds = {name: _step_seconds(engines[name], prompts, stores=stores) for name in order}
    return seconds["on"] / seconds["off"]


def _step_seconds(llm: LLM, prompts: list[list[int]], *, stores: bool) -> float:
    """Wall time per step of answering `prompts`. Without stores, no block is ever complete: eight tokens in, seven out."""
    from sidestream.config import SamplingParams

    repeats, outputs = (1, _OUTPUT_TOKENS) if stores else (6, 7)
    steps, start = llm.engine.num_steps, time.perf_counter()
    for _ in range(repeats):
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True))
    elapsed = time.perf_counter() - start
    seconds = elapsed / (llm.engine.num_steps - steps)
    llm.flush()
    return seconds
