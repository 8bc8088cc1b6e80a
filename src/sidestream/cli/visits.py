"""Prompts put to an engine in a process of its own, what each answer came from and how long it took.

The demo and the benchmarks show with it that KV outlives the pool (same process) and the process (another one).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sidestream.cli.child import Child, answer_lines
from sidestream.config import SamplingParams

if TYPE_CHECKING:
    from sidestream.llm import LLM

# Another text than any prompt: threads, allocators and kernels are warm after it, the cache is not.
_WARM_UP = tuple(range(100, 164))


@dataclass(frozen=True, slots=True)
class Visit:
    """One answered prompt.

    device, host, disk   prompt tokens that came from that tier
    """

    ttft_s: float
    tokens: tuple[int, ...]
    text: str
    prompt_tokens: int
    device: int
    host: int
    disk: int

    @property
    def source(self) -> str:
        """Where the prefix came from."""
        counts = sorted(((self.device, "device"), (self.host, "host memory"), (self.disk, "disk")), reverse=True)
        return ", ".join(f"{name} {count}" for count, name in counts if count) or "nowhere (cold)"

    @property
    def reused(self) -> int:
        """Prompt tokens that were not computed again."""
        return self.device + self.host + self.disk


@dataclass(frozen=True, slots=True)
class Answers:
    """What one question to an engine yielded.

    steps            steps launched while answering
    seconds          wall time of all answers together
    transfer_waits   times the engine thread ever waited for anything but a step
    stored_bytes     bytes ever written to disk
    """

    visits: tuple[Visit, ...]
    steps: int
    seconds: float
    transfer_waits: int
    stored_bytes: int


class Engine:
    """An engine in a process of its own. A context manager; leaving it closes the engine and ends the process.

    options   fields of EngineConfig as plain values; those of OffloadConfig under "offload", those of SpeculativeConfig
              under "speculative"
    """

    def __init__(
        self, model: str, options: dict[str, Any], *, timeline: str | None = None, check_order: bool = False
    ) -> None:
        self._child = Child(
            __name__, {"model": model, "options": options, "timeline": timeline, "check_order": check_order}
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *reason: object) -> None:
        self._child.close()

    def ask(self, prompts: Sequence[Sequence[int]], *, max_tokens: int, at_once: bool = False) -> Answers:
        """Answer the prompts greedily, one after another or all at once, and wait until what they left is stored."""
        question = {"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens, "at_once": at_once}
        answer = self._child.ask(question)
        visits = tuple(Visit(**{**fields, "tokens": tuple(fields["tokens"])}) for fields in answer.pop("visits"))
        return Answers(visits=visits, **answer)


def _ready(order: dict[str, Any]) -> tuple[Callable[[dict[str, Any]], Any], Callable[[], None]]:
    from sidestream.config import OffloadConfig, SpeculativeConfig
    from sidestream.llm import LLM

    options = {"generation_config": "none", **order["options"]}  # plain sampling, whatever the checkpoint
    if "offload" in options:
        options["offload"] = OffloadConfig(**options["offload"])
    if "speculative" in options:
        options["speculative"] = SpeculativeConfig(**options["speculative"])
    llm = LLM(order["model"], timeline=order["timeline"], check_order=order["check_order"], **options)
    _generate(llm, [list(_WARM_UP)], 4)
    return lambda question: _answer(llm, question), llm.close


def _answer(llm: LLM, question: dict[str, Any]) -> dict[str, Any]:
    prompts, max_tokens = question["prompts"], question["max_tokens"]
    steps, start = llm.engine.num_steps, time.perf_counter()
    if question["at_once"]:
        visits = _generate(llm, prompts, max_tokens)
    else:
        visits = [seen for prompt in prompts for seen in _generate(llm, [prompt], max_tokens)]
    seconds = time.perf_counter() - start
    llm.flush()
    return {
        "visits": [asdict(seen) for seen in visits],
        "steps": llm.engine.num_steps - steps,
        "seconds": seconds,
        "transfer_waits": sum(
            count for reason, count in llm.engine.parts.device.host_waits().items() if reason != "step"
        ),
        "stored_bytes": int(llm.metrics.value("transfer_bytes_total", "disk-write")),
    }


def _generate(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[Visit]:
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
    return [
        Visit(
            output.ttft_s,
            output.token_ids,
            output.text,
            output.prompt_tokens,
            output.cached.device,
            output.cached.host,
            output.cached.disk,
        )
        for output in outputs
    ]


if __name__ == "__main__":
    answer_lines(_ready)
