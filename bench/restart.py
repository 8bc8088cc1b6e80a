"""Host memory that outlives engines: TTFT of the first request of an engine that was killed and has started again, with
the memory of a cache process, beside an engine in the same memory that kept running.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from bench.prefix import check_source, run_each, sample_prompts
from proof.report import Figure, at_least, at_most
from sidestream.cli.prompt_runs import ChildEngine, PromptRun
from sidestream.errors import SidestreamError
from sidestream_kv.device.kinds import CPU

_START_S = 60.0


def measure(model: str, *, prompt_tokens: int, rounds: int, on_progress: Callable[[str], None]) -> list[Figure]:
    """Measure `rounds` different prompts: computed once by the engine that keeps running; then, for each prompt, an
    engine starts, answers it as its first request and is killed; another one answers a short other prompt before; and
    the engine that keeps running answers it.
    """
    from sidestream.models import kv_token_bytes
    from sidestream.models.catalog import resolve

    path = resolve(model)
    prompts = sample_prompts(path, prompt_tokens, rounds)
    # The device holds one and a half prompts, so each prompt evicts the start of the previous prompt.
    kv_memory = prompt_tokens * 3 // 2 * kv_token_bytes(path)
    with tempfile.TemporaryDirectory(prefix="sidestream-restart-") as directory, cache_process(directory) as socket:
        options = {"device": CPU, "kv_memory": kv_memory, "offload": {"host": "2GiB", "shared_memory": socket}}
        with ChildEngine(path, options) as running:
            cold = run_each(running, prompts, lambda number: on_progress(f"cold {number} of {rounds}"))
            very_first, first, host = list[PromptRun](), list[PromptRun](), list[PromptRun]()
            for number, prompt in enumerate(prompts, start=1):
                on_progress(f"restarts {number} of {rounds}")
                for warm_up, restarts in ((False, very_first), (True, first)):
                    with ChildEngine(path, options, warm_up=warm_up) as restarted:
                        restarts.extend(run_each(restarted, [prompt], lambda _: None))
                        restarted.kill()
                host += run_each(running, [prompt], lambda _: None)
    check_source("cold", cold, lambda run: run.reused == 0)
    for name, runs in (("very first", very_first), ("after a restart", first), ("host memory", host)):
        check_source(name, runs, lambda run: run.host > 0.95 * prompt_tokens)
    answers = zip(cold, very_first, first, host, strict=True)
    identical = sum(len({run.tokens for run in runs}) == 1 for runs in answers)
    cold_s, very_first_s, first_s, host_s = (
        median(run.ttft_s for run in runs) for runs in (cold, very_first, first, host)
    )
    return [
        Figure("warm_restart_ttft_over_host", very_first_s / host_s, "ratio", at_most(1.1)),
        Figure("warm_restart_after_a_prompt_ttft_over_host", first_s / host_s, "ratio"),
        Figure("warm_restart_after_a_prompt_ttft_over_cold", first_s / cold_s, "ratio"),
        Figure("identical_answers", identical / rounds, "share", at_least(1.0)),
        Figure("ttft_after_a_prompt_ms", first_s * 1e3, "ms"),
        Figure("ttft_host_ms", host_s * 1e3, "ms"),
        Figure("ttft_cold_ms", cold_s * 1e3, "ms"),
        Figure("prompt_tokens", prompt_tokens, "tokens"),
    ]


@contextlib.contextmanager
def cache_process(directory: str, memory: str = "2GiB") -> Iterator[str]:
    """A cache process with so much memory; its socket."""
    socket = Path(directory) / "cache"
    command = [sys.executable, "-m", "sidestream", "cache", "serve", "--socket", str(socket), "--host-memory", memory]
    with subprocess.Popen([*command, "--log-level", "warning"]) as process:
        try:
            until = time.monotonic() + _START_S
            while not socket.is_socket():
                if process.poll() is not None or time.monotonic() > until:
                    raise SidestreamError(f"the cache process did not start: {' '.join(command)}")
                time.sleep(0.01)
            yield str(socket)
        finally:
            process.terminate()
