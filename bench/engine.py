"""Step time, prefill time and TTFT of an engine, divided by the shortest time that the hardware allows (the floor). The
model has the shape of a well-known model and random weights. The benchmark has seven parts:

decode    step time divided by the time to read the weights and KV; idle time of the device between steps
prefill   prefill time of a prompt divided by the time of its matrix products
ttft      TTFT of prompts without cached KV, and of prompts whose KV is in host memory
resume    ITL of decoding requests while the KV of a long request is loaded
kernels   the kernels of a step and of a prefill; only if asked for
invariant  step time with `batch_invariant` divided by that without; only if asked for, for models that support it
async     tokens per second of asynchronous execution divided by those of synchronous execution, where the host reads
          the tokens of each step (commits it) before it launches the next step
"""

from __future__ import annotations

import contextlib
import gc
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch

from bench import kernels
from bench.gpu import Link, stamp
from bench.requests import Answer, ask, ask_at_once, random_prompts
from bench.steps import StepClock
from proof.random_models import random_model, random_module
from proof.report import Figure, at_least, at_most
from sidestream.config import EngineConfig, SpeculativeConfig
from sidestream.engine import Engine, build_engine
from sidestream.errors import ConfigError, SidestreamError
from sidestream.models.adapter import PagedModel
from sidestream.models.invariant_checks import make_invariant
from sidestream.processes.garbage import freeze_gc_heap
from sidestream.ranks.leader import local_device, local_executor
from sidestream_kv.config import OffloadConfig, unknown_name
from sidestream_kv.device.choice import torch_device
from sidestream_kv.device.kinds import CUDA
from sidestream_kv.device.machine import process_age_s
from sidestream_kv.kv.layout import KVLayout

PARTS = ("decode", "prefill", "ttft", "resume", "async")
_ON_REQUEST = ("invariant", "kernels")
_MOST_INVARIANT = 1.15

_OTHERS = 31  # requests that decode while the KV of a long request is loaded
_RESUMES = 7  # repetitions; each load starts at a random moment of a step
# A profile of decoding begins after so many tokens of each request, and holds so many steps.
_PROFILED_FROM, _PROFILED = 8, 32
# Output tokens of the long request. With one output, the first token would also be the last, and the engine sends the
# outputs of ending requests later than the outputs of running requests.
_LONG_OUTPUTS = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the measurement. Small sizes test the benchmark itself.

    decode           one tuple for each measurement: number of decode rows, context tokens of a row, and upper bound of
                     step time / (time to read weights and KV)
    cold             one tuple for each measurement: prompt tokens, and upper bound of TTFT in ms without cached KV
    from_host        one tuple for each measurement: prompt tokens, upper bound of TTFT / (time to load the KV), and
                     lower bound of (TTFT without cached KV) / TTFT
    others_context   prompt tokens of the requests that decode while a long request's KV is loaded
    resumed          prompt tokens of this long request
    outputs          output tokens of the other requests
    """

    kv_memory: str
    host: str
    max_model_len: int
    max_running: int
    decode: tuple[tuple[int, int, float], ...]
    cold: tuple[tuple[int, float], ...]
    from_host: tuple[tuple[int, float, float], ...]
    others_context: int
    resumed: int
    outputs: int
    block_tokens: int = 16


_FULL = Sizes(
    kv_memory="14GiB",
    host="24GiB",  # the stores of the other requests must not evict the long request's KV
    max_model_len=40960,
    max_running=128,
    decode=((1, 1024, 1.30), (32, 1024, 1.27), (128, 512, 1.30)),
    cold=((128, 9.0), (2048, 50.0), (8192, 215.0)),
    from_host=((8192, 1.10, 6.5), (32768, 1.08, 11.0)),
    others_context=1024,
    resumed=16000,
    outputs=64,
)
_TINY = Sizes("16MiB", "16MiB", 512, 4, ((1, 32, 1.30), (4, 16, 1.30)), ((32, 9.0),), ((128, 1.10, 6.5),), 32, 200, 12)


class Rig:
    """An engine, a StepClock that times its steps, and measurements of the hardware's limits. With tensor parallelism,
    the clock and the measurements are those of rank 0.

    vocab_size   prompts are drawn from token ids below this number
    end          function that closes the engine and everything that was started for it
    """

    def __init__(
        self, engine: Engine, *, vocab_size: int, end: Callable[[], None], on_progress: Callable[[str], None]
    ) -> None:
        self.engine = engine
        self.parts = engine.parts
        self.layout: KVLayout = self.parts.layout
        self.device = local_device(self.parts.device)
        assert self.parts.costs is not None
        # Without an estimate of the prefill time, the engine always loads KV from host memory and never recomputes it.
        self.parts.costs.saw_prefill = lambda *_: None  # type: ignore[method-assign]
        self._vocab_size = vocab_size
        self._end = end
        self._random = np.random.default_rng(0)
        self.clock = StepClock(self.device, local_executor(self.parts.executor))
        self._stamps = self.device.allocate_host("busy stamps", 16)
        on_progress("measuring the hardware")
        self._on_gpu = self.device.kind == CUDA
        self.link = Link(self.device, 64 << 20 if self._on_gpu else 1 << 20, in_a_row=8)
        self.link.seconds()

    def close(self) -> None:
        """Close the engine."""
        self._end()

    def prompt(self, num_tokens: int) -> list[int]:
        """A new random prompt that is in no cache."""
        return random_prompts(self._random, self._vocab_size, count=1, tokens=num_tokens)[0]

    def moment(self, most_s: float) -> float:
        """A random number of seconds up to `most_s`."""
        return float(self._random.uniform(0, most_s))

    def ask(self, prompt: Sequence[int], outputs: int) -> Answer:
        """Submit a request for `outputs` tokens."""
        return ask(self.engine, prompt, outputs)

    def ask_from_host(self, prompt: Sequence[int]) -> Answer:
        """Drop the device's prefix cache, submit a prompt again that was answered before, and wait for one token.

        Raises SidestreamError unless all KV came from host memory.
        """
        self.forget_device()
        answer, length = self.ask(prompt, 1).wait(), len(prompt) - 1
        if answer.cached.host != length:
            raise SidestreamError(
                f"{answer.cached.host} of {length} tokens came from host memory: the figures would be meaningless"
            )
        return answer

    def forget_device(self) -> None:
        """Wait for all stores, then drop the device's prefix cache, so that KV remains in host memory only."""
        if not self.engine.flush(timeout_s=60.0):
            raise SidestreamError("stores did not end within 60 s")
        self.engine.call(self.parts.scheduler.forget_all)

    @property
    def state_bytes(self) -> int:
        """Bytes of one recurrent state in a tier; 0: the model has no recurrent state."""
        region = self.parts.state_region
        return 0 if region is None else region.state_bytes

    def steps(self, rows: int, context: int, outputs: int, *, drafts: int = 0) -> tuple[list[float], list[float]]:
        """Decode `rows` requests at once. For each step in which all of them decode with `drafts` drafts each: the
        duration of the step, and the idle time of the device, both in seconds.
        """
        first = len(self.clock.launched_steps)
        answers = [self.ask(self.prompt(context), outputs) for _ in range(rows)]
        for answer in answers:
            answer.wait()
        sizes = [(step.rows, step.tokens) for step in self.clock.launched_steps]
        full = [at for at in range(first + 1, len(sizes)) if sizes[at] == sizes[at - 1] == (rows, rows * (1 + drafts))]
        return self.clock.steps(full[2:-2] if len(full) > 6 else full)

    def host_waits(self) -> int:
        """Number of times that the host waited for the device, except for waits for a step's results."""
        waits = self.device.host_waits()
        return sum(count for reason, count in waits.items() if reason not in ("step", "benchmark"))

    def busy_s(self, work: Callable[[], object]) -> float:
        """Seconds that the device needs for `work`, on a new stream; minimum of three runs."""
        stream = self.device.stream(f"bench {time.perf_counter_ns()}")
        taken = []
        for _ in range(3):

            def timed() -> None:
                stamp(self.device, self._stamps, 0)
                work()
                stamp(self.device, self._stamps, 8)

            self.device.wait_host(stream.submit(timed), reason="benchmark")
            begin, end = self._stamps.data.view(torch.int64).tolist()
            taken.append(float(end - begin) / 1e9)
        return min(taken)

    def bytes_a_second_to_device(self) -> float:
        """Bandwidth of copies from pinned host memory to the device."""
        return 8 * (64 << 20 if self._on_gpu else 1 << 20) / median(self.link.seconds()["to_device"] for _ in range(5))


class ModelRig(Rig):
    """A rig with a new engine (without tensor parallelism) for a model with random weights."""

    def __init__(
        self,
        device: str,
        shape: str,
        sizes: Sizes,
        on_progress: Callable[[str], None],
        *,
        speculative: SpeculativeConfig | None = None,
        windows: bool = True,
        offload: OffloadConfig | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """`windows` False: loads copy all layers, also where a layer's sliding window does not reach. `offload` None:
        host memory alone.
        """
        self.torch_device = torch_device(device)
        gc.collect()  # models and engines are parts of reference cycles: this frees the memory of earlier ones
        on_progress("making the model")
        self.model: PagedModel = random_model(shape, device=self.torch_device, block_tokens=sizes.block_tokens)
        if batch_invariant:
            make_invariant(self.model)
        if not windows:
            self.model.layout = replace(self.model.layout, windows=())
        embedding = self.model.module.get_input_embeddings().weight
        tied = self.model.module.get_output_embeddings().weight is embedding
        # A step reads only some rows of the input embedding, so it does not count, unless it is also the output layer.
        named = {**dict(self.model.module.named_parameters()), **dict(self.model.module.named_buffers())}
        read = [(name, part) for name, part in named.items() if tied or part is not embedding]
        self._experts = [part for name, part in read if ".experts." in name]
        self._dense = [part for name, part in read if ".experts." not in name]
        phases = dict[str, float]()

        def starting(what: str, done: int, total: int) -> None:
            what = what.partition(" (")[0]  # without the sizes of the current step
            if what not in phases:
                phases[what] = time.perf_counter()
                on_progress(f"starting the engine: {what}")

        starting("making its parts", 0, 0)
        engine = build_engine(
            self.model,
            EngineConfig(
                device=device,
                kv_memory=sizes.kv_memory,
                max_running=sizes.max_running,
                max_model_len=sizes.max_model_len,
                offload=offload or OffloadConfig(host=sizes.host),
                speculative=speculative,
                batch_invariant=batch_invariant,
            ),
            tell=starting,
        )
        self.startup_s = process_age_s()
        ends = [*phases.values(), time.perf_counter()]
        self.phases = {what: end - begin for (what, begin), end in zip(phases.items(), ends[1:], strict=True)}
        unfreeze_gc_heap = freeze_gc_heap()  # as LLM does

        def end() -> None:
            engine.close()
            unfreeze_gc_heap()

        super().__init__(engine, vocab_size=self.model.vocab_size, end=end, on_progress=on_progress)

    @property
    def num_weights_used(self) -> int:
        """Number of parameters that are multiplied for each token: of the experts, those of one token."""
        dense: int = sum(part.numel() for part in self._dense)
        experts: int = sum(part.numel() for part in self._experts)
        return dense + int(experts * self._expert_share(1))

    def weights_read(self, rows: int) -> int:
        """Bytes of weights that a decode step of `rows` rows reads: of the experts, those of some row, if every row
        chooses its own at random.
        """
        dense: int = sum(part.nbytes for part in self._dense)
        experts: int = sum(part.nbytes for part in self._experts)
        return dense + int(experts * self._expert_share(rows))

    def _expert_share(self, rows: int) -> float:
        config = self.model.config
        experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
        share: float = (getattr(config, "num_experts_per_tok", None) or 1) / experts
        return 1.0 - (1.0 - share) ** rows

    def kv_read(self, context: int) -> int:
        """Bytes of KV that a decode row reads: in a layer with a sliding window, those of the window."""
        layout = self.model.layout
        windows = layout.windows or (0,) * layout.num_layers
        tokens: int = sum(min(window or context, context) for window in windows)
        return tokens * layout.token_bytes // layout.num_layers

    def bandwidth(self) -> float:
        """Memory read bandwidth of the device in bytes per second."""
        data = torch.zeros(
            (2 << 30 if self._on_gpu else 32 << 20) // 8,
            dtype=torch.int64,
            device=self.torch_device,
        )
        return data.numel() * 8 / self.busy_s(data.sum)

    def flops(self) -> float:
        """FLOP/s of a large matrix product."""
        size = 8192 if self._on_gpu else 256
        left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=self.torch_device) for _ in range(2))
        return 2 * size**3 / self.busy_s(lambda: left @ right)


def measure(
    *, device: str, shape: str, parts: Sequence[str] | None, on_progress: Callable[[str], None]
) -> list[Figure]:
    """The figures of these parts of the benchmark (None: of all), all from one engine. Raises ConfigError for an
    unknown part.
    """
    parts = parts or PARTS
    for part in parts:
        if part not in (*PARTS, *_ON_REQUEST):
            raise ConfigError(unknown_name("part", part, (*PARTS, *_ON_REQUEST)))
    sizes = _FULL if device == CUDA else _TINY
    with contextlib.closing(ModelRig(device, shape, sizes, on_progress)) as rig:
        rig.ask(rig.prompt(40), 4).wait()
        figures = [Figure("engine_ready_s", rig.startup_s, "s", at_most(60.0))]
        figures += [
            Figure(f"engine_ready_{'_'.join(re.findall('[a-z]+', what.lower()))}_s", seconds, "s")
            for what, seconds in rig.phases.items()
        ]
        step_s = median(rig.steps(1, sizes.others_context, sizes.outputs)[0])
        ways = {"decode": decode, "prefill": _prefill, "ttft": ttft, "resume": resume, "async": _async}
        ways["kernels"] = _kernels
        for part in parts:
            if part == "invariant":
                figures += _invariant(rig, device, shape, sizes, on_progress)
            else:
                figures += ways[part](rig, sizes, step_s, on_progress)
        figures.append(Figure("host_waits_besides_commits", rig.host_waits(), "waits", at_most(0)))
    return figures


def _invariant(
    rig: ModelRig, device: str, shape: str, sizes: Sizes, on_progress: Callable[[str], None]
) -> list[Figure]:
    """Step times of a second engine, with `batch_invariant`, divided by those of `rig`."""
    other, figures = ModelRig(device, shape, sizes, on_progress, batch_invariant=True), list[Figure]()
    try:
        other.ask(other.prompt(40), 4).wait()
        for rows, context, _ in sizes.decode:
            on_progress(f"batch_invariant, {rows} rows")
            default, invariant = (median(each.steps(rows, context, sizes.outputs)[0]) for each in (rig, other))
            ratio = Figure(f"invariant_b{rows}_over_default", invariant / default, "ratio", at_most(_MOST_INVARIANT))
            figures += [ratio, Figure(f"invariant_b{rows}_ms", 1e3 * invariant, "ms")]
    finally:
        other.close()
    return figures


def decode(rig: ModelRig, sizes: Sizes, step_s: float, on_progress: Callable[[str], None]) -> list[Figure]:
    """Step time divided by the time to read weights, KV and recurrent states; the step time of transformers'
    `generate`; and the device's idle time.
    """
    bandwidth = rig.bandwidth()
    figures, idle_shares = [Figure("memory_read_gb_s", bandwidth / 1e9, "GB/s")], []
    for rows, context, bound in sizes.decode:
        on_progress(f"decode, {rows} rows")
        lengths, idle = rig.steps(rows, context, sizes.outputs)
        on_progress(f"decode, {rows} rows: {1e3 * median(lengths):.3f} ms")
        read = rig.weights_read(rows) + rows * rig.kv_read(context)
        floor = (read + 2 * rows * rig.state_bytes) / bandwidth  # a state is read and written
        figures.append(Figure(f"decode_b{rows}_over_floor", median(lengths) / floor, "ratio", at_most(bound)))
        figures.append(Figure(f"decode_b{rows}_ms", 1e3 * median(lengths), "ms"))
        figures.append(Figure(f"decode_b{rows}_floor_ms", 1e3 * floor, "ms"))
        idle_shares.append(sum(idle) / sum(lengths))
    on_progress("transformers' generate")
    figures += _generate(
        rig, sizes, {rows: figure.value for (rows, _, _), figure in zip(sizes.decode, figures[2::3], strict=True)}
    )
    return [*figures, Figure("idle_share_max", max(idle_shares), "share", at_most(0.02))]


def _generate(rig: ModelRig, sizes: Sizes, ours_ms: Mapping[int, float]) -> list[Figure]:
    """Step time of transformers' own `generate` with the same shape and batch, without prefill. No figures from a batch
    on that does not fit the device beside the engine.
    """
    kind = type(rig.model.module)
    attention = "sdpa" if kind._supports_sdpa else "eager"
    figures: list[Figure] = []
    with contextlib.suppress(torch.OutOfMemoryError):
        module = random_module(rig.model.name, device=rig.torch_device, attention=attention)
        for rows, context, _ in sizes.decode:
            figures += _generate_batch(rig, module, rows, context, ours_ms[rows])
    return figures


def _generate_batch(rig: ModelRig, module: Any, rows: int, context: int, ours_ms: float) -> list[Figure]:
    prompts = torch.tensor([rig.prompt(context) for _ in range(rows)], device=rig.torch_device)

    def seconds(outputs: int, prompts: torch.Tensor = prompts) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            module.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=outputs,
                min_new_tokens=outputs,
                do_sample=False,
                pad_token_id=0,
            ).cpu()
        return time.perf_counter() - start

    seconds(1)
    step_ms = 1e3 * (seconds(9) - seconds(1)) / 8
    return [
        Figure(f"generate_b{rows}_ms", step_ms, "ms"),
        Figure(f"generate_b{rows}_over_ours", step_ms / ours_ms, "ratio"),
    ]


def _prefill(rig: ModelRig, sizes: Sizes, step_s: float, on_progress: Callable[[str], None]) -> list[Figure]:
    flops, figures = rig.flops(), []
    layout = rig.layout
    for length, _ in sizes.cold:
        on_progress(f"prefill, {length} tokens")
        taken = []
        for _ in range(5):
            first = len(rig.clock.launched_steps)
            rig.ask(rig.prompt(length), 1).wait()
            last = len(rig.clock.launched_steps) - 1
            taken.append(rig.clock.seconds(first, last))
        work = (
            2 * rig.num_weights_used * length
            + 2 * length**2 * rig.model.num_heads * layout.head_dim * layout.num_layers
        )
        figures.append(Figure(f"prefill_{length}_over_floor", median(taken) * flops / work, "ratio"))
        figures.append(Figure(f"prefill_{length}_ms", 1e3 * median(taken), "ms"))
    return [*figures, Figure("matmul_tflops", flops / 1e12, "TFLOP/s")]


def ttft(rig: Rig, sizes: Sizes, step_s: float, on_progress: Callable[[str], None]) -> list[Figure]:
    """TTFT without cached KV, and with KV and recurrent states in host memory.

    step_s   time of a step that decodes one request
    """
    figures = []
    for length, bound in sizes.cold:
        on_progress(f"first token, {length} tokens cold")
        taken = [rig.ask(rig.prompt(length), 1).wait().ttft_s for _ in range(7)]
        figures.append(Figure(f"ttft_cold_ms_{length}", 1e3 * median(taken), "ms", at_most(bound)))
    rate = rig.bytes_a_second_to_device()
    for number, (length, bound, gain) in enumerate(sizes.from_host):
        on_progress(f"first token, {length} tokens from host memory")
        suffix = "" if not number else f"_{length}"
        cold, warm = [], []
        for _ in range(5):
            prompt = rig.prompt(length + 1)
            cold.append(rig.ask(prompt, 1).wait().ttft_s)
            warm.append(rig.ask_from_host(prompt).ttft_s)
        floor = (length * rig.layout.token_bytes + rig.state_bytes) / rate + step_s
        figures.append(Figure(f"ttft_host_over_floor{suffix}", median(warm) / floor, "ratio", at_most(bound)))
        figures.append(Figure(f"ttft_cold_over_host{suffix}", median(cold) / median(warm), "ratio", at_least(gain)))
        figures.append(Figure(f"ttft_host_ms_{length}", 1e3 * median(warm), "ms"))
    return [*figures, Figure("link_to_device_gb_s", rate / 1e9, "GB/s"), Figure("one_step_ms", 1e3 * step_s, "ms")]


def resume(rig: Rig, sizes: Sizes, step_s: float, on_progress: Callable[[str], None]) -> list[Figure]:
    """ITL of decoding requests while a long request's KV is loaded, and the TTFT of the long request."""
    on_progress("decoding while a long request resumes")
    count = min(_OTHERS, sizes.max_running - 1)
    long = rig.prompt(sizes.resumed)
    rig.ask(long, 1).wait()
    rig.forget_device()
    alone, during, taken = list[float](), list[float](), list[float]()
    for _ in range(_RESUMES):
        others = [rig.ask(rig.prompt(sizes.others_context), 3 * sizes.outputs) for _ in range(count)]
        for other in others:
            other.wait_for(sizes.outputs // 2)
        # A new request joins the batch at the next step, so it waits for up to one step: start at a random moment.
        time.sleep(rig.moment(2 * step_s))
        began = time.perf_counter()
        answer = rig.ask(long, _LONG_OUTPUTS).wait()
        if answer.cached.host < sizes.resumed - rig.layout.block_tokens:
            raise SidestreamError(
                f"{answer.cached.host} of {sizes.resumed} tokens came back from host memory: "
                "the figures would be meaningless"
            )
        ended = answer.times[0]
        taken.append(answer.ttft_s)
        for other in others:
            other.wait()
            for before, after in zip(other.times, other.times[1:], strict=False):
                if began <= after <= ended + 2 * (after - before):
                    during.append(after - before)
                elif after > ended + 10 * step_s and before > began:
                    alone.append(after - before)
        rig.forget_device()
    rate = rig.bytes_a_second_to_device()
    blocks = (sizes.resumed - 1) // rig.layout.block_tokens
    floor = (blocks * rig.layout.block_bytes + rig.state_bytes) / rate + step_s
    return [
        Figure("itl_p99_during_resume", _p99(during) / _p99(alone), "ratio", at_most(1.05)),
        Figure("itl_p99_during_resume_ms", 1e3 * _p99(during), "ms"),
        Figure("itl_p99_alone_ms", 1e3 * _p99(alone), "ms"),
        Figure("itl_median_alone_ms", 1e3 * median(alone), "ms"),
        Figure("itl_max_during_resume_ms", 1e3 * max(during), "ms"),
        Figure("resume_ttft_over_floor", median(taken) / floor, "ratio", at_most(1.10)),
        Figure("resume_ttft_ms", 1e3 * median(taken), "ms"),
    ]


def _async(rig: Rig, sizes: Sizes, step_s: float, on_progress: Callable[[str], None]) -> list[Figure]:
    figures, equal = [], True
    for rows, context, _ in sizes.decode:
        rates: dict[bool, list[float]] = {True: [], False: []}
        prompts = [rig.prompt(context) for _ in range(rows)]
        tokens: dict[bool, list[list[int]]] = {}
        for _ in range(3):
            for asynchronous in (True, False):
                on_progress(f"{rows} rows, {'asynchronous' if asynchronous else 'each step committed before the next'}")
                rig.engine.reset_prefix_cache()
                _make_asynchronous(rig.engine, asynchronous)
                answers = ask_at_once(rig.engine, prompts, sizes.outputs)
                tokens[asynchronous] = [answer.wait().tokens for answer in answers]
                last = max(answer.times[-1] for answer in answers)
                begin = max(answer.times[0] for answer in answers)
                rates[asynchronous].append(
                    sum(sum(at > begin for at in answer.times) for answer in answers) / (last - begin)
                )
        equal &= tokens[True] == tokens[False]
        figures.append(Figure(f"async_over_sync_b{rows}", median(rates[True]) / median(rates[False]), "ratio"))
    _make_asynchronous(rig.engine, True)
    return [*figures, Figure("async_tokens_identical", float(equal), "1 if so", at_least(1))]


def _kernels(rig: ModelRig, sizes: Sizes, step_s: float, on_progress: Callable[[str], None]) -> list[Figure]:
    """The longest kernels of each measurement of `sizes`, in microseconds of a step or of a prompt."""
    figures, activities = list[Figure](), kernels.activities(rig.device.kind)
    for rows, context, _ in sizes.decode:
        on_progress(f"kernels, {rows} rows")
        answers = [rig.ask(rig.prompt(context), 4 * sizes.outputs) for _ in range(rows)]
        for answer in answers:
            answer.wait_for(_PROFILED_FROM)
        first, last = len(rig.clock.launched_steps), answers[-1]
        with torch.profiler.profile(activities=activities) as profile:
            last.wait_for(len(last.times) + _PROFILED)
        figures += kernels.longest(f"b{rows}", kernels.kernels_of(profile), len(rig.clock.launched_steps) - first)
        for answer in answers:
            answer.wait()
    for length, _ in sizes.cold:
        on_progress(f"kernels, a prompt of {length} tokens")
        prompt = rig.prompt(length)
        with torch.profiler.profile(activities=activities) as profile:
            rig.ask(prompt, 1).wait()
        figures += kernels.longest(f"prefill_{length}", kernels.kernels_of(profile), 1)
    return figures


def _make_asynchronous(engine: Engine, asynchronous: bool) -> None:
    """Launch each step before the host has read the tokens of the previous step (True), or after it (False)."""
    engine.call(lambda: setattr(engine.loop, "asynchronous", asynchronous))


def _p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]
