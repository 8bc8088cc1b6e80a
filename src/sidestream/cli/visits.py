"""Prompts put to an engine one after another, in this process or in a fresh one, and what each answer came from.

The demo and the benchmarks show with it that KV outlives the pool (same process) and the process (fresh one).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from sidestream.config import SamplingParams
from sidestream.errors import SidestreamError

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
        found = [name for name, count in (("device", self.device), ("host memory", self.host), ("disk", self.disk)) if count]
        return " + ".join(found) or "nowhere (cold)"

    @property
    def reused(self) -> int:
        """Prompt tokens that were not computed again."""
        return self.device + self.host + self.disk


@dataclass(frozen=True, slots=True)
class Stay:
    """How a fresh process opens its engine.

    options   fields of EngineConfig and OffloadConfig as plain values; those of the latter under "offload"
    """

    model: str
    options: dict[str, object]
    timeline: str | None = None

    def open(self) -> LLM:
        """Load the model and start the engine."""
        from sidestream.config import OffloadConfig, from_options
        from sidestream.llm import LLM

        options = dict(self.options)
        offload = options.pop("offload", None)
        if isinstance(offload, dict):
            options["offload"] = from_options(OffloadConfig, offload)
        return LLM(self.model, timeline=self.timeline, **options)


def warm_up(llm: LLM) -> None:
    """Answer a short prompt that nobody else asks."""
    llm.generate([list(_WARM_UP)], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))


def visit(llm: LLM, prompt: Sequence[int], *, max_tokens: int) -> Visit:
    """Put one prompt to the engine, greedily, and wait for the answer."""
    output = llm.generate([list(prompt)], SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))[0]
    cached = output.cached
    return Visit(output.ttft_s, output.token_ids, output.text, output.prompt_tokens, cached.device, cached.host, cached.disk)


def visit_in_fresh_process(stay: Stay, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[Visit]:
    """Start a process, open an engine there, put the prompts to it, close it. Raises SidestreamError when the process fails."""
    order = {"stay": asdict(stay), "prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens}
    child = subprocess.run([sys.executable, "-m", __name__], input=json.dumps(order), capture_output=True, text=True, check=False)
    if child.returncode:
        raise SidestreamError(
            f"the fresh process ended with code {child.returncode}: {child.stderr.strip().splitlines()[-1:] or 'no message'}"
        )
    return [Visit(**{**fields, "tokens": tuple(fields["tokens"])}) for fields in json.loads(child.stdout.splitlines()[-1])]


def _main() -> None:
    order = json.load(sys.stdin)
    with Stay(**order["stay"]).open() as llm:
        warm_up(llm)
        visits = [visit(llm, prompt, max_tokens=order["max_tokens"]) for prompt in order["prompts"]]
    print(json.dumps([asdict(one) for one in visits]))


if __name__ == "__main__":
    _main()
