"""Measures KV offload inside vLLM: Sidestream's connector, vLLM's own, LMCache and none, with dummy weights.

    python -m bench.vllm_offload DIR sidestream offloading none ... > result.json    # DIR: a model's config.json
    VLLM_BATCH_INVARIANT=1 PARTS=faults python -m bench.vllm_offload DIR none sidestream-disk    # wrong answers

Every connector runs in processes of its own, one after another: one engine with the whole pool, one with a pool of
41,600 tokens, and, where it has a disk, one more that finds what the first one stored. Needs vLLM; the caller sets what
vLLM's model runner and LMCache need in the environment, by connector: `name@VARIABLE=value`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from proof.report import Bound, Figure, at_least, at_most, publish
from sidestream_kv.errors import DeviceError, TierCorrupt

_PROMPT = 8200  # not a multiple of a block, of which vLLM computes at least one token
_VOCABULARY = 100_000
_GIB = 1 << 30
_HOST_GIB = 16
_HOST_GIB_OF_PART = {"small": 32, "faults": 3}  # more than all conversations, less than the documents
_POOL_BLOCKS = 2600  # of 16 tokens
_ROUNDS = 5
_TIMEOUT_S = 400
_FAULTY_REQUESTS = 1000
_FAULTY_BLOCKS = 1500  # less than 24 requests need
_COMPARED = {  # with the best of the other connectors; None: no bound
    "ttft_host_ms": at_most(0.75),
    "ttft_disk_ms": at_most(0.75),
    "no_reuse_tok_s": None,
    "working_set_tok_s": at_least(1.15),
    "gap_p99_host_beside_ms": None,
}


def _connector(name: str, directory: str, host_gib: int = _HOST_GIB) -> dict[str, Any] | None:
    host = host_gib * _GIB
    tiered = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": host,
        "secondary_tiers": [{"type": "fs", "root_dir": directory}],
    }
    known: dict[str, tuple[str, dict[str, Any]]] = {
        "sidestream": ("SidestreamConnector", {"host": host}),
        "sidestream-disk": ("SidestreamConnector", {"host": host, "disk": directory, "fingerprint": "dummy"}),
        "offloading": ("OffloadingConnector", {"cpu_bytes_to_use": host}),
        "simple": ("SimpleCPUOffloadConnector", {"cpu_bytes_to_use": host}),
        "tiered-fs": ("OffloadingConnector", tiered),
        "lmcache": ("LMCacheConnectorV1", {}),
        "lmcache-fs": ("LMCacheConnectorV1", {}),
    }
    if (plain := name.split("@")[0]) == "none":
        return None
    connector, extra = known[plain]
    chosen = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    if connector == "SidestreamConnector":
        chosen["kv_connector_module_path"] = "sidestream_kv.connectors.vllm"
    return chosen


class Engine:
    """vLLM in this process. `steps`: end of each step since the last `begin`, and the tokens of each request then."""

    def __init__(self, directory: str, connector: dict[str, Any] | None, *, blocks: int | None) -> None:
        from vllm import EngineArgs, LLMEngine
        from vllm.config import KVTransferConfig

        self.spent_s: list[float] = []
        self.answers: list[list[int]] = []
        if connector is not None and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
            self._watch(connector)
        transfer = None if connector is None else KVTransferConfig(**connector)
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=directory,
                load_format="dummy",
                dtype="bfloat16",
                skip_tokenizer_init=True,
                max_model_len=20_000,
                gpu_memory_utilization=0.6,
                max_num_seqs=128,
                seed=0,
                num_gpu_blocks_override=blocks,
                kv_transfer_config=transfer,
            )
        )
        self.steps: list[tuple[float, dict[str, int]]] = []
        self._number = 0

    def _watch(self, connector: dict[str, Any]) -> None:
        """Add up the time in the connector's methods, of both sides, by step."""
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        kind = KVConnectorFactory.get_connector_class(KVTransferConfig(**connector))
        for method in (
            *("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
            *("update_connector_output", "request_finished", "request_finished_all_groups", "handle_preemptions"),
            *("bind_connector_metadata", "start_load_kv", "wait_for_save", "get_finished"),
            *("build_connector_worker_meta", "get_kv_connector_stats"),
        ):
            if hasattr(kind, method):
                setattr(kind, method, self._timed(getattr(kind, method)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        inside = False

        def run(*given: Any, **named: Any) -> Any:
            nonlocal inside
            if inside:
                return method(*given, **named)
            inside, began = True, time.perf_counter()
            try:
                return method(*given, **named)
            finally:
                inside = False
                if self.spent_s:
                    self.spent_s[-1] += time.perf_counter() - began

        return run

    def add(self, prompt: list[int], outputs: int) -> str:
        from vllm import SamplingParams

        self._number += 1
        how = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self._number), {"prompt_token_ids": prompt}, how)
        return str(self._number)

    def step(self) -> dict[str, tuple[list[int], bool]]:
        """One step: the tokens so far of the requests that got one, and whether they ended."""
        self.spent_s.append(0.0)
        outputs = self.engine.step()
        found = {out.request_id: (list(out.outputs[0].token_ids), out.finished) for out in outputs}
        self.steps.append((time.perf_counter(), {name: len(tokens) for name, (tokens, _) in found.items()}))
        return found

    def run(self, prompts: list[list[int]], outputs: int) -> tuple[float, dict[str, list[int]]]:
        """Run all prompts at once. Seconds, and the tokens of each."""
        began = time.perf_counter()
        open_, done = {self.add(prompt, outputs) for prompt in prompts}, dict[str, list[int]]()
        while open_:
            for name, (tokens, finished) in self.step().items():
                done[name] = tokens
                open_ -= {name} if finished else set()
        return time.perf_counter() - began, done

    def rest(self, seconds: float = 0.2) -> None:
        """Let transfers end: vLLM's own stores begin with a later step."""
        for _ in range(3):
            self.run([[random.randrange(100, _VOCABULARY) for _ in range(32)]], 2)
            time.sleep(seconds)

    def forget_on_device(self) -> None:
        for _ in range(50):
            if self.engine.reset_prefix_cache():
                return
            self.rest(0.1)
        raise RuntimeError("vLLM's prefix cache could not be reset")


def _prompts(seed: str, count: int, length: int) -> list[list[int]]:
    drawn = random.Random(seed)
    return [[drawn.randrange(100, _VOCABULARY) for _ in range(length)] for _ in range(count)]


def _first_tokens(engine: Engine) -> Iterator[tuple[str, float]]:
    """TTFT of a prompt that is nowhere, on the device, in host memory."""
    for prompt in _prompts("warm", 2, _PROMPT):
        engine.run([prompt], 1)
    engine.rest()
    times: dict[str, list[float]] = {"cold": [], "device": [], "host": []}
    same = 0
    for prompt in _prompts("first", _ROUNDS, _PROMPT):
        answers = []
        for kind in times:
            if kind == "host":
                engine.rest()
                engine.forget_on_device()
            seconds, answer = engine.run([prompt], 1)
            times[kind].append(seconds)
            answers.append(list(answer.values()))
        same += answers[0] == answers[1] == answers[2]
    yield from ((f"ttft_{kind}_ms", 1e3 * statistics.median(taken)) for kind, taken in times.items())
    yield "same_first_tokens", same


def _from_disk(engine: Engine) -> Iterator[tuple[str, float]]:
    """TTFT of prompts that an earlier process has stored."""
    for prompt in _prompts("other", 2, _PROMPT):
        engine.run([prompt], 1)
    times = [engine.run([prompt], 1)[0] for prompt in _prompts("first", _ROUNDS, _PROMPT)]
    yield "ttft_disk_ms", 1e3 * statistics.median(times)


def _no_reuse(engine: Engine) -> Iterator[tuple[str, float]]:
    """Output tokens per second of prompts of which none comes back."""
    rates = []
    for round_ in range(2):
        seconds, done = engine.run(_prompts(f"no reuse {round_}", 96, 2048), 128)
        rates.append(sum(len(tokens) for tokens in done.values()) / seconds)
    yield "no_reuse_tok_s", statistics.median(rates)


def _gaps(engine: Engine) -> Iterator[tuple[str, float]]:
    """Gaps between tokens of 31 requests: alone, and beside 16,000 tokens whose KV is on the device or comes back."""
    (long,) = _prompts("long", 1, 16_000)
    engine.run([long], 1)
    engine.rest()
    for kind in ("device", "host"):
        rounds = []
        for round_ in range(3):
            if kind == "host":
                engine.forget_on_device()
            rounds.append(_gaps_of_round(engine, long, f"{kind} {round_}"))
            engine.rest()
        for index, name in enumerate(("alone_ms", "beside_ms", "beside_over_alone")):
            yield f"gap_p99_{kind}_{name}", statistics.median(found[index] for found in rounds)


def _gaps_of_round(engine: Engine, long: list[int], seed: str) -> tuple[float, float, float]:
    others = {engine.add(prompt, 700) for prompt in _prompts(f"others {seed}", 31, 512)}
    counts = dict.fromkeys(others, 0)

    def step() -> dict[str, tuple[list[int], bool]]:
        found = engine.step()
        counts.update({name: len(tokens) for name, (tokens, _) in found.items() if name in counts})
        return found

    while min(counts.values()) < 32:
        step()
    engine.steps.clear()
    for _ in range(150):
        step()
    alone_ms = 1e3 * _p99(_gaps_between(engine, others))
    engine.steps.clear()
    name, arrived = engine.add(long, 40), 0
    while arrived < 40:
        arrived = max(arrived, len(step().get(name, ([], False))[0]))
    beside_ms = 1e3 * _p99(_gaps_between(engine, others))
    engine.engine.abort_request([*others])
    while engine.engine.has_unfinished_requests():
        engine.step()
    return alone_ms, beside_ms, beside_ms / alone_ms


def _gaps_between(engine: Engine, names: set[str]) -> list[float]:
    last: dict[str, float] = {}
    gaps = []
    for end, tokens in engine.steps:
        for name in names.intersection(tokens):
            if name in last:
                gaps.append(end - last[name])
            last[name] = end
    return gaps


def _p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def _working_set(engine: Engine) -> Iterator[tuple[str, float]]:
    """Output tokens per second of 16 conversations, four at once, whose KV is larger than the device's pool."""
    conversations = _prompts("talk", 16, _PROMPT)
    drawn = random.Random("answers")
    for prompt in conversations:
        engine.run([prompt], 1)
    engine.rest()
    began, count = time.perf_counter(), 0
    for _ in range(3):
        for first in range(0, len(conversations), 4):
            talks = conversations[first : first + 4]
            _, done = engine.run(talks, 64)
            for talk, answer in zip(talks, done.values(), strict=True):
                talk += [*answer, *(drawn.randrange(100, _VOCABULARY) for _ in range(32))]
                count += len(answer)
    yield "working_set_tok_s", count / (time.perf_counter() - began)


def _faults(engine: Engine) -> Iterator[tuple[str, float]]:
    """Answers to 1,000 requests which share prefixes, of which some are given up once and asked again."""
    drawn = random.Random("faults")
    documents = _prompts("document", 40, 2400)
    asked = [
        [*drawn.choice(documents)[: drawn.randrange(300, 2400)], *_prompts(f"question {number}", 1, 12)[0]]
        for number in range(_FAULTY_REQUESTS)
    ]
    waiting, open_, answers = list(range(len(asked))), dict[str, int](), dict[int, list[int]]()
    steps, given_up = 0, set[int]()
    while waiting or open_:
        while waiting and len(open_) < 24:
            number = waiting.pop()
            open_[engine.add(asked[number], 16)] = number
        for name, (tokens, finished) in engine.step().items():
            if finished and name in open_:
                answers[open_.pop(name)] = tokens
        steps += 1
        if open_ and steps % 10 == 0 and open_[name := drawn.choice([*open_])] not in given_up:
            engine.engine.abort_request([name])
            given_up.add(open_[name])
            waiting.append(open_.pop(name))
        if steps % 100 == 0:
            engine.engine.reset_prefix_cache()
    engine.answers = [answers[number] for number in range(len(asked))]
    yield "faulty_requests", len(asked)


class _Faults:
    """Makes copies between device and host memory, and reads from disk, late and failing, in this process."""

    def __init__(self) -> None:
        self.drawn = random.Random("injected")
        self.copies = self.failed = self.reads = self.damaged = 0

    def inject(self) -> None:
        """Once, before the engine is made."""
        from sidestream_kv.device.cuda.stream import CudaStream
        from sidestream_kv.offload.tiers.disk import DiskTier

        read, copier = DiskTier.read, CudaStream.submit_copy

        def submit_copy(stream: CudaStream, *given: Any, **named: Any) -> Any:
            self.copies += 1
            if self.drawn.random() < 0.2:
                stream.submit(lambda: _spin(self.drawn.randrange(1, 20)), label="delay")
            if self.drawn.random() < 0.03:
                self.failed += 1
                return stream.submit(_fail, label="fail")
            return copier(stream, *given, **named)

        def damaged(tier: Any, *given: Any, **named: Any) -> Any:
            self.reads += 1
            if self.drawn.random() < 0.03:
                self.damaged += 1
                raise TierCorrupt("injected: damaged")
            return read(tier, *given, **named)

        CudaStream.submit_copy = submit_copy  # type: ignore[method-assign, assignment]
        DiskTier.read = damaged  # type: ignore[method-assign, assignment]

    def figures(self) -> dict[str, float]:
        """What was injected."""
        return {
            "submitted_copies": self.copies,
            "failed_copies": self.failed,
            "disk_reads": self.reads,
            "damaged_reads": self.damaged,
        }


def _spin(milliseconds: int) -> None:
    import torch

    torch.cuda._sleep(1_500_000 * milliseconds)  # type: ignore[no-untyped-call]


def _fail() -> None:
    raise DeviceError("injected: a copy failed")


_PARTS: dict[str, tuple[Callable[[Engine], Iterator[tuple[str, float]]], ...]] = {
    "whole": (_first_tokens, _no_reuse, _gaps),
    "thread": (_no_reuse, _gaps),
    "fill": (_first_tokens,),
    "gaps": (_first_tokens, _gaps),
    "disk": (_from_disk,),
    "small": (_working_set,),
    "faults": (_faults,),
}
_DISKS = ("sidestream-disk", "tiered-fs", "lmcache-fs")


def _measure_here(directory: str, name: str, part: str, disk: str, answers: str) -> None:
    faults = _Faults() if part == "faults" and name.startswith("sidestream") else None
    if faults is not None:
        faults.inject()
    blocks = {"small": _POOL_BLOCKS, "faults": _FAULTY_BLOCKS if Path(answers).exists() else None}
    connector = _connector(name, disk, _HOST_GIB_OF_PART.get(part, _HOST_GIB))
    engine = Engine(directory, connector, blocks=blocks.get(part))
    figures: dict[str, float] = {}
    for measure in _PARTS[part]:
        engine.spent_s.clear()
        began = time.perf_counter()
        figures |= dict(measure(engine))
        print(f"{name} {part} {measure.__name__}: {time.perf_counter() - began:.1f} s {figures}", file=sys.stderr)
        if part == "thread":
            figures[f"engine_thread_us_p99{measure.__name__}"] = 1e6 * _p99(engine.spent_s)
            figures[f"engine_thread_us_max{measure.__name__}"] = 1e6 * max(engine.spent_s)
    if part == "faults":
        right, found = Path(answers), json.dumps(engine.answers)
        if right.exists():
            pairs = zip(json.loads(right.read_text()), engine.answers, strict=True)
            figures["wrong_answers"] = sum(one != other for one, other in pairs)
            figures |= {} if faults is None else faults.figures()
        else:
            right.write_text(found)
    print("\nRESULT " + json.dumps(figures), flush=True)
    engine.rest(0.1)
    if hasattr(engine.engine, "engine_core"):
        engine.engine.engine_core.shutdown()
    os._exit(0)  # vLLM's own threads may hang


def _in_process(directory: str, name: str, part: str, disk: str, answers: str) -> dict[str, float]:
    own = "1" if part not in ("thread", "faults") else "0"  # the engine has a process of its own, as in a server
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": own, "PYTHONHASHSEED": "0"}
    environment |= dict(setting.split("=", 1) for setting in name.split("@")[1:])
    command = [sys.executable, "-m", "bench.vllm_offload", directory, "--here", name, part, disk, answers]
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=_TIMEOUT_S, check=True)
    except subprocess.SubprocessError as error:
        print(f"{name} {part}: {error}", file=sys.stderr)
        return {}
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(b"RESULT ")]  # vLLM logs there, too
    return dict(json.loads(line.removeprefix(b"RESULT ")))


def measured(directory: str, names: list[str], parts: list[str]) -> dict[str, dict[str, float]]:
    """What each connector measured. A part that fails has no figure."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as shared:
        for name in names:
            disk, answers = tempfile.mkdtemp(dir=shared), f"{shared}/answers.json"
            found[name] = {}
            for part in parts:
                if part not in ("fill", "disk") or name.startswith(_DISKS):
                    found[name] |= _in_process(directory, name, part, disk, answers)
            print(f"{name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
            shutil.rmtree(disk)
    return found


def figures(found: Mapping[str, Mapping[str, float]]) -> list[Figure]:
    """All figures, and those of each of Sidestream's engines divided by the best of the other connectors."""
    listed = [
        Figure(f"{_label(name)}_{figure}", value, _unit(figure), _bound(name, figure))
        for name, of_one in found.items()
        for figure, value in of_one.items()
    ]
    others = [of_one for name, of_one in found.items() if not name.startswith(("sidestream", "none"))]
    alone = found.get("none", {})
    for name in (name for name in found if name.startswith("sidestream")):
        for figure, value in found[name].items():
            best = [other[figure] for other in others if figure in other]
            if best and figure in _COMPARED:
                value_of_best = (max if figure.endswith("_tok_s") else min)(best)
                listed.append(
                    Figure(f"{_label(name)}_{figure}_over_best", value / value_of_best, "ratio", _COMPARED[figure])
                )
            if figure == "no_reuse_tok_s" and figure in alone:
                listed.append(
                    Figure(f"{_label(name)}_{figure}_over_alone", value / alone[figure], "ratio", at_least(0.995))
                )
    return listed


def _label(name: str) -> str:
    """`sidestream_v1` for vLLM's first model runner."""
    return name.replace("@VLLM_USE_V2_MODEL_RUNNER=0", "_v1").replace("-", "_")


def _bound(name: str, figure: str) -> Bound | None:
    bounds = {"gap_p99_host_beside_over_alone": at_most(1.3), "wrong_answers": at_most(0)}
    if figure.startswith("engine_thread_us_max"):
        return at_most(300) if name.startswith("sidestream") else None
    return bounds.get(figure) if name.startswith("sidestream") else None


def _unit(figure: str) -> str:
    units = {"_ms": "ms", "_tok_s": "tokens/s", "_over_alone": "ratio", "_tokens": ""}
    return next((unit for end, unit in units.items() if figure.endswith(end)), "us" if "_us_" in figure else "")


if __name__ == "__main__":
    if sys.argv[2] == "--here":
        _measure_here(sys.argv[1], *sys.argv[3:])
    else:
        chosen = os.environ.get("PARTS", "whole,small,fill,disk").split(",")
        every = figures(measured(sys.argv[1], sys.argv[2:], chosen))
        publish("vllm-offload", "Qwen3-8B, random weights", every, as_json=True, console=Console())
