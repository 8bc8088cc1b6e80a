"""Step time with offload, divided by step time without offload: once when there are blocks to store, once when there
are none. Also step time with the order checker, divided by step time without the checker.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

from proof.report import Figure, at_most
from sidestream.cli.prompt_runs import ChildEngine
from sidestream_kv.device.kinds import CPU

_REQUESTS = 4
_STORING = {"prompt_tokens": 192, "output_tokens": 48, "repeats": 1}
# No block is ever complete: eight prompt tokens, seven output tokens.
_IDLE = {"prompt_tokens": 8, "output_tokens": 7, "repeats": 6}


def measure(model: str, *, rounds: int, on_progress: Callable[[str], None]) -> list[Figure]:
    """Run the same requests on three engines in turn: without offload, with offload, and with offload and the checker.
    There are two kinds of requests: long ones, whose blocks are stored, and short ones, which fill no block.
    """
    from sidestream.models.catalog import resolve

    path, rng = resolve(model), random.Random(0)
    storing: list[float] = []
    idle: list[float] = []
    checked: list[float] = []
    steps = waits = stored = 0
    with tempfile.TemporaryDirectory(prefix="sidestream-bench-") as scratch:
        offload = {"host": "256MiB", "disk": str(Path(scratch) / "kv"), "disk_capacity": "1GiB"}
        watched = {**offload, "disk": str(Path(scratch) / "kv-checked")}
        with (
            ChildEngine(path, {"device": CPU, "kv_memory": "128MiB"}) as off,
            ChildEngine(path, {"device": CPU, "kv_memory": "128MiB", "offload": offload}) as on,
            ChildEngine(path, {"device": CPU, "kv_memory": "128MiB", "offload": watched}, check_order=True) as checking,
        ):
            engines = {"off": off, "on": on, "checking": checking}
            for number in range(rounds):
                for name, shape, ratios in (("storing", _STORING, storing), ("idle", _IDLE, idle)):
                    on_progress(f"round {number + 1} of {rounds}, {name}")
                    prompts = [
                        [rng.randrange(300, 20_000) for _ in range(shape["prompt_tokens"])] for _ in range(_REQUESTS)
                    ]
                    seconds = {}
                    for which in ("checking", "on", "off") if number % 2 else ("off", "on", "checking"):
                        answers = [
                            engines[which].generate(prompts, max_tokens=shape["output_tokens"], at_once=True)
                            for _ in range(shape["repeats"])
                        ]
                        seconds[which] = sum(a.seconds for a in answers) / sum(a.steps for a in answers)
                        if which == "on":
                            steps += sum(a.steps for a in answers)
                            waits, stored = answers[-1].transfer_waits, answers[-1].stored_bytes
                    ratios.append(seconds["on"] / seconds["off"])
                    checked.append(seconds["checking"] / seconds["on"])
    return [
        Figure("step_offload_over_off", max(median(storing), median(idle)), "ratio", at_most(1.03)),
        Figure("host_waits_per_step", waits / steps, "waits/step", at_most(0)),
        Figure("step_checked_over_on", median(checked), "ratio", at_most(2)),
        Figure("step_storing_over_off", median(storing), "ratio"),
        Figure("step_idle_over_off", median(idle), "ratio"),
        Figure("steps", steps, "steps"),
        Figure("stored_mib", stored / 2**20, "MiB"),
    ]
