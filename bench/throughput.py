"""Tokens per second of an engine with offload, divided by tokens per second of an engine without offload. Two workloads
are measured: requests that reuse no KV, where offload cannot help, and conversations whose KV is larger than the
device's pool, where offload must help.

Both engines use the same model object, exist at the same time and run alternately.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

import numpy as np

from bench.requests import ask, ask_at_once, random_prompts
from proof.random_models import random_model
from proof.report import Figure, at_least
from sidestream.config import EngineConfig
from sidestream.engine import Engine, build_engine
from sidestream.errors import SidestreamError
from sidestream.models.adapter import PagedModel
from sidestream.processes.garbage import freeze_gc_heap
from sidestream_kv.config import OffloadConfig
from sidestream_kv.device.choice import torch_device
from sidestream_kv.device.kinds import CUDA


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the measurement. Small sizes test the benchmark itself.

    conversations   number of conversations. All run at once in each round; the device's pool holds a quarter of their
                    KV
    tokens          prompt tokens of a conversation
    outputs         output tokens of a conversation
    strangers       number, prompt tokens and output tokens of the requests that reuse no KV
    rounds          rounds of each workload, for each engine
    """

    conversations: int
    tokens: int
    outputs: int
    strangers: tuple[int, int, int]
    rounds: int


# The sizes used to measure other engines on the same GPU.
_FULL = Sizes(16, 8200, 32, (96, 2048, 128), 3)
_TINY = Sizes(8, 200, 4, (6, 32, 4), 1)


def measure(*, device: str, shape: str, on_progress: Callable[[str], None]) -> list[Figure]:
    """Run both engines. Raises SidestreamError if fewer or more prompt tokens came from a cache than expected."""
    sizes = _FULL if device == CUDA else _TINY
    on_progress("making the model")
    model = random_model(shape, device=torch_device(device))
    random = np.random.default_rng(0)

    def prompts(count: int, tokens: int) -> list[list[int]]:
        return random_prompts(random, model.vocab_size, count=count, tokens=tokens)

    with ExitStack() as ends:
        engines: dict[bool, Engine] = {}
        for offload in (True, False):
            on_progress(f"starting the engine {'with' if offload else 'without'} offload")
            engines[offload] = _engine(model, device, sizes, offload=offload)
            ends.callback(engines[offload].close)
            ask(engines[offload], prompts(1, 16)[0], 4).wait()

        ends.callback(freeze_gc_heap())  # as LLM does

        strangers: dict[bool, list[float]] = {True: [], False: []}
        count, tokens, outputs = sizes.strangers
        for number in range(sizes.rounds):
            for offload, engine in engines.items():
                on_progress(f"no reuse, {'with' if offload else 'without'} offload, {number + 1} of {sizes.rounds}")
                strangers[offload].append(_rate(engine, prompts(count, tokens), outputs, reused=0)[0])
                engine.flush(timeout_s=60.0)

        again: dict[bool, list[float]] = {True: [], False: []}
        conversations = prompts(sizes.conversations, sizes.tokens)
        shares = []
        for number in range(sizes.rounds + 1):
            for offload, engine in engines.items():
                on_progress(
                    f"four times the pool, {'with' if offload else 'without'} offload, round {number} of {sizes.rounds}"
                )
                rate, share = _rate(engine, conversations, sizes.outputs, reused=None)
                if number:
                    again[offload].append(rate)
                else:
                    # The first round is not timed: all its KV must be stored before the next round.
                    engine.flush(timeout_s=60.0)
                if number and offload:
                    shares.append(share)
    # The tiny model on a busy CPU computes faster than it copies, and the engine then computes instead of loading.
    if min(shares) < 0.9 and device == CUDA:
        raise SidestreamError(
            f"only a share of {min(shares):.2f} of prompt tokens came from a cache: the figures would be meaningless"
        )
    return [
        Figure("throughput_no_reuse", median(strangers[True]) / median(strangers[False]), "ratio", at_least(0.99)),
        Figure("throughput_no_reuse_tokens_s", median(strangers[True]), "tokens/s"),
        Figure("throughput_no_reuse_off_tokens_s", median(strangers[False]), "tokens/s"),
        Figure("throughput_working_set_4x", median(again[True]) / median(again[False]), "ratio", at_least(3.3)),
        Figure("throughput_working_set_4x_tokens_s", median(again[True]), "tokens/s"),
        Figure("throughput_working_set_4x_off_tokens_s", median(again[False]), "tokens/s"),
        Figure("working_set_round_s", sizes.conversations * sizes.outputs / median(again[True]), "s"),
        Figure("working_set_round_off_s", sizes.conversations * sizes.outputs / median(again[False]), "s"),
        Figure("working_set_reused", median(shares), "share"),
    ]


def _engine(model: PagedModel, device: str, sizes: Sizes, *, offload: bool) -> Engine:
    layout = model.layout
    blocks = layout.num_blocks_for(sizes.tokens + sizes.outputs) * sizes.conversations
    # The KV of requests that never repeat must not evict the KV of the conversations.
    others = layout.num_blocks_for(sizes.strangers[1] + sizes.strangers[2])
    return build_engine(
        model,
        EngineConfig(
            device=device,
            kv_memory=(blocks // 4 + 1) * layout.block_bytes,
            max_running=sizes.conversations,
            max_model_len=2 * sizes.tokens,
            offload=OffloadConfig(host=(blocks + sizes.conversations * others) * layout.block_bytes)
            if offload
            else None,
        ),
    )


def _rate(engine: Engine, prompts: Sequence[Sequence[int]], outputs: int, *, reused: int | None) -> tuple[float, float]:
    """Tokens per second from the submission to the last token, and the share of prompt tokens that came from a cache.

    reused   expected number of prompt tokens from a cache, else SidestreamError; None: any number
    """
    start = time.perf_counter()
    answers = [answer.wait() for answer in ask_at_once(engine, prompts, outputs)]
    seconds = time.perf_counter() - start
    found = sum(answer.cached.total for answer in answers)
    if reused is not None and found != reused:
        raise SidestreamError(f"{found} tokens came from a cache instead of {reused}: the figures would be meaningless")
    return sum(len(answer.tokens) for answer in answers) / seconds, found / sum(map(len, prompts))
