"""Runs prompts on an engine in a child process. Records the time of each prompt and the tiers that its KV came from.

The demo and the benchmarks use this module to show that KV survives eviction from the device's pool (in the same
process) and the end of the process (in a second process).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sidestream.cli.child_process import ChildProcess, answer_requests
from sidestream.config import SamplingParams
from sidestream.processes.child import config_of

if TYPE_CHECKING:
    from sidestream.llm import LLM

# A prompt that shares no block with a measured prompt. It warms up threads, allocators and kernels, but not the cache.
_WARM_UP = tuple(range(100, 164))


@dataclass(frozen=True, slots=True)
class PromptRun:
    """The result of one prompt.

    device, host, disk   number of prompt tokens whose KV came from this tier
    shared               number of those whose KV came from a store that engines share
    """

    ttft_s: float
    tokens: tuple[int, ...]
    text: str
    prompt_tokens: int
    device: int
    host: int
    disk: int
    shared: int

    @property
    def source(self) -> str:
        """The tiers that the KV came from, with their numbers of tokens; the tier with most tokens comes first."""
        tiers = (self.device, "device"), (self.host, "host memory"), (self.disk, "disk"), (self.shared, "a store")
        counts = sorted(tiers, reverse=True)
        return ", ".join(f"{name} {count}" for count, name in counts if count) or "nowhere (cold)"

    @property
    def reused(self) -> int:
        """Number of prompt tokens whose KV came from any tier."""
        return self.device + self.host + self.disk + self.shared


@dataclass(frozen=True, slots=True)
class PromptRuns:
    """The results of one call of `ChildEngine.generate`.

    steps            number of steps launched during the call
    seconds          wall time of all prompts together
    transfer_waits   number of waits of the engine thread, since its start, except for waits for a step
    stored_bytes     bytes written to disk since the engine's start
    """

    runs: tuple[PromptRun, ...]
    steps: int
    seconds: float
    transfer_waits: int
    stored_bytes: int


class ChildEngine:
    """An engine in a child process. A context manager: leaving it closes the engine and ends the process.

    options   fields of EngineConfig as plain values; "offload" maps to the fields of OffloadConfig, "speculative" to
              the fields of SpeculativeConfig
    warm_up   whether the engine answers a short prompt first
    """

    def __init__(
        self,
        model: str,
        options: dict[str, Any],
        *,
        timeline: str | None = None,
        check_order: bool = False,
        warm_up: bool = True,
    ) -> None:
        setup = {"model": model, "options": options, "timeline": timeline, "check_order": check_order}
        self._child = ChildProcess(__name__, {**setup, "warm_up": warm_up})

    def __enter__(self) -> ChildEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._child.close()

    def kill(self) -> None:
        """End the process at once, as `kill -9` does."""
        self._child.kill()

    def generate(self, prompts: Sequence[Sequence[int]], *, max_tokens: int, at_once: bool = False) -> PromptRuns:
        """Continue the prompts greedily, one after another or all at once, and wait until their KV is stored."""
        answer = self._child.request(
            {"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens, "at_once": at_once}
        )
        runs = tuple(PromptRun(**{**fields, "tokens": tuple(fields["tokens"])}) for fields in answer.pop("runs"))
        return PromptRuns(runs=runs, **answer)


def _set_up(setup: dict[str, Any]) -> tuple[Callable[[dict[str, Any]], Any], Callable[[], None]]:
    from sidestream.llm import LLM

    config = config_of({"generation_config": "none", **setup["options"]})  # neutral defaults for every checkpoint
    llm = LLM(setup["model"], config=config, timeline=setup["timeline"], check_order=setup["check_order"])
    if setup["warm_up"]:
        _generate(llm, [list(_WARM_UP)], 4)
    return lambda request: _answer(llm, request), llm.close


def _answer(llm: LLM, request: dict[str, Any]) -> dict[str, Any]:
    prompts, max_tokens = request["prompts"], request["max_tokens"]
    steps, start = llm.engine.num_steps, time.perf_counter()
    if request["at_once"]:
        runs = _generate(llm, prompts, max_tokens)
    else:
        runs = [run for prompt in prompts for run in _generate(llm, [prompt], max_tokens)]
    seconds = time.perf_counter() - start
    llm.flush()
    waits = llm.engine.parts.device.host_waits()
    return {
        "runs": [asdict(run) for run in runs],
        "steps": llm.engine.num_steps - steps,
        "seconds": seconds,
        "transfer_waits": sum(count for reason, count in waits.items() if reason != "step"),
        "stored_bytes": int(llm.metrics.value("transfer_bytes_total", "disk-write")),
    }


def _generate(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[PromptRun]:
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
    return [
        PromptRun(
            output.ttft_s,
            output.token_ids,
            output.text,
            output.prompt_tokens,
            output.cached.device,
            output.cached.host,
            output.cached.disk,
            output.cached.total - output.cached.device - output.cached.host - output.cached.disk,
        )
        for output in outputs
    ]


if __name__ == "__main__":
    answer_requests(_set_up)
