"""Offload against traffic and tiers that give it no chance, beside the same engine without offload: users with a common
prefix and one-shot prompts between them, while the disk is healthy, throttled, slower than computing, stalled and gone;
then conversations that need three times the host tier's memory.

Each round runs on both engines, in turns. What a real service has is scaled down to a demo model on a CPU: the figures
give the numbers of tokens.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from proof import faults
from proof.report import Figure, at_least, at_most
from sidestream.config import SamplingParams
from sidestream.errors import TierLost
from sidestream.llm import LLM
from sidestream_kv.config import OffloadConfig
from sidestream_kv.device.kinds import CPU
from sidestream_kv.offload.tiers import disk, stack
from sidestream_kv.offload.tiers.base import Block, PersistentTier, TierContext, TierKind

_TIER = "adversary"
_IN_FLIGHT = 8
_OUTPUT_TOKENS = 1
_ONE_SHOTS = 8
_PART = 16  # prompts
_STATES = ("healthy", "throttled", "crawling", "stalled", "gone")


@dataclass(slots=True)
class _Adversary:
    """A disk whose reads and writes take as long as `state` says; times are those of one block.

    healthy_s   of the disk without an adversary: the median of those seen while it was healthy
    compute_s   to compute a block's tokens
    """

    tier: faults.FaultyTier
    compute_s: float = 0.0
    state: str = "healthy"
    seen_s: list[float] = field(default_factory=list)
    open: threading.Event = field(default_factory=threading.Event)

    def __call__(self, proceed: Callable[[], None], block: Block) -> None:
        if self.state == "stalled":
            self.open.wait()
        if self.state == "gone":
            raise TierLost("the disk is gone")
        start_s = time.perf_counter()
        proceed()
        taken_s = time.perf_counter() - start_s
        if self.state == "healthy":
            self.seen_s.append(taken_s)
        elif self.state == "throttled":
            time.sleep(9 * median(self.seen_s))
        elif self.state == "crawling":
            time.sleep(2 * self.compute_s)


@contextmanager
def _engines(model: str, *, kv_tokens: int, host_tokens: int) -> Iterator[tuple[LLM, LLM, _Adversary]]:
    """An engine with offload to a disk with an adversary, one without offload, and the adversary."""
    made: list[_Adversary] = []
    with tempfile.TemporaryDirectory(prefix="sidestream-bench-") as scratch:

        def open_tier(context: TierContext) -> PersistentTier:
            inner = disk.KIND.open(OffloadConfig(disk=Path(scratch) / "kv", disk_capacity="2GiB"), context)
            assert inner is not None
            tier = faults.FaultyTier(inner)
            made.append(_Adversary(tier))
            tier.on_read = tier.on_write = made[0]
            return tier

        if _TIER not in stack.names():
            stack.register(TierKind(_TIER, _open, disk.KIND.write_policy))
        _OPEN[:] = [open_tier]
        block_bytes = _block_bytes(model)
        sizes: dict[str, Any] = {"device": CPU, "kv_memory": kv_tokens * block_bytes // 16, "max_running": _IN_FLIGHT}
        host = host_tokens * block_bytes // 16
        with (
            LLM(model, **sizes, offload=OffloadConfig(host=host, tiers={_TIER: {}})) as offload,
            LLM(model, **sizes) as off,
        ):
            yield offload, off, made[0]
            made[0].state = "gone"
            made[0].open.set()


_OPEN: list[Callable[[TierContext], PersistentTier]] = []
"""How the tier of the engine that is being built is opened."""


def _open(config: OffloadConfig, context: TierContext) -> PersistentTier | None:
    return _OPEN[0](context) if _TIER in config.tiers else None


def _block_bytes(model: str) -> int:
    from sidestream.models import kv_token_bytes
    from sidestream.models.catalog import resolve

    return kv_token_bytes(resolve(model)) * 16


@dataclass(frozen=True, slots=True)
class _Round:
    """`tokens`: of all prompts and answers."""

    seconds: float
    ttfts_s: tuple[float, ...]
    tokens: int


def _run(llm: LLM, prompts: Sequence[list[int]]) -> _Round:
    """Run the prompts, in order, `_IN_FLIGHT` at a time."""
    params = SamplingParams(temperature=0, max_tokens=_OUTPUT_TOKENS, ignore_eos=True)
    start_s = time.perf_counter()
    with ThreadPoolExecutor(_IN_FLIGHT) as clients:
        ttfts_s = tuple(clients.map(lambda prompt: llm.generate([prompt], params)[0].ttft_s, prompts))
    seconds = time.perf_counter() - start_s
    return _Round(seconds, ttfts_s, sum(map(len, prompts)) + _OUTPUT_TOKENS * len(prompts))


def _both(offload: LLM, off: LLM, prompts: Sequence[list[int]]) -> Iterator[tuple[_Round, _Round]]:
    """Parts of a round, with offload and without. Which of them goes first alternates, so that what else the machine
    does falls on both.
    """
    for number, first in enumerate(range(0, len(prompts), _PART)):
        part = prompts[first : first + _PART]
        if number % 2:
            without = _run(off, part)
            yield _run(offload, part), without
        else:
            yield _run(offload, part), _run(off, part)


def _times(taken: Sequence[tuple[_Round, _Round]]) -> tuple[float, float]:
    """Seconds with offload, and without."""
    return sum(with_it.seconds for with_it, _ in taken), sum(without.seconds for _, without in taken)


def _p99(rounds: Sequence[_Round]) -> float:
    return float(np.percentile([ttft_s for each in rounds for ttft_s in each.ttfts_s], 99))


def measure(
    model: str,
    *,
    users: int,
    prefix_tokens: int,
    rounds: int,
    conversations: int,
    on_progress: Callable[[str], None],
) -> list[Figure]:
    """Figures of both workloads. `rounds` for each state of the disk, and of conversations."""
    drawn = random.Random(0)

    def text(tokens: int) -> list[int]:
        return [drawn.randrange(1000, 40_000) for _ in range(tokens)]

    return [
        Figure("users", users, "users"),
        Figure("prefix_tokens", prefix_tokens, "tokens"),
        *_shared_prefix(model, users, prefix_tokens, rounds, text, drawn, on_progress),
        *_conversations(model, conversations, rounds, text, on_progress),
    ]


def _shared_prefix(
    model: str,
    users: int,
    prefix_tokens: int,
    rounds: int,
    text: Callable[[int], list[int]],
    drawn: random.Random,
    on_progress: Callable[[str], None],
) -> Iterator[Figure]:
    prefix = text(prefix_tokens)
    asked = [prefix + text(32) for _ in range(users)]
    working_set = prefix_tokens + users * 64
    ratios, taken = list[float](), list[tuple[_Round, _Round]]()
    with _engines(model, kv_tokens=prefix_tokens + _IN_FLIGHT * 192, host_tokens=working_set // 3) as engines:
        offload, off, adversary = engines
        for state in ("warm-up", *_STATES):
            if state != "warm-up":
                adversary.state = state
            if rate := offload.engine.parts.costs and offload.engine.parts.costs.prefill_rate:
                adversary.compute_s = 16 / rate
            of_state = list[tuple[_Round, _Round]]()
            for number in range(1 if state == "warm-up" else rounds):
                on_progress(f"{users} users, disk {state}, round {number + 1}")
                prompts = asked + [text(96) for _ in range(_ONE_SHOTS)]
                drawn.shuffle(prompts)
                of_state += _both(offload, off, prompts)
                asked = [prompt + text(16) for prompt in asked]
            if state == "warm-up":
                continue
            taken += of_state
            speedup = [without.seconds / with_it.seconds for with_it, without in of_state]
            ratios += speedup
            yield Figure(f"throughput_{state}", median(speedup), "of off")
            late = _p99([pair[0] for pair in of_state]) / _p99([pair[1] for pair in of_state])
            yield Figure(f"ttft_p99_{state}", late, "of off")
    yield Figure("throughput_adversarial", median(ratios), "of off", at_least(0.97))
    late = _p99([pair[0] for pair in taken]) / _p99([pair[1] for pair in taken])
    yield Figure("ttft_p99_adversarial", late, "of off", at_most(1.1))


def _conversations(
    model: str, conversations: int, rounds: int, text: Callable[[int], list[int]], on_progress: Callable[[str], None]
) -> Iterator[Figure]:
    asked = [text(80) for _ in range(conversations)]
    working_set = conversations * (80 + 16 * rounds)
    taken = list[tuple[float, float]]()
    with _engines(model, kv_tokens=_IN_FLIGHT * 256, host_tokens=working_set // 3) as (offload, off, _):
        list(_both(offload, off, [text(80) for _ in range(2 * _PART)]))  # both are warm
        for number in range(rounds + 1):
            on_progress(f"{conversations} conversations, turn {number + 1}")
            taken.append(_times([*_both(offload, off, asked)]))
            asked = [prompt + text(16) for prompt in asked]
        written, read = (offload.metrics.value("transfer_bytes_total", f"{_TIER}-{kind}") for kind in ("write", "read"))
    yield Figure("conversations", conversations, "conversations")
    yield Figure("conversations_first_turn_over_off", taken[0][0] / taken[0][1], "ratio")
    yield Figure("conversations_over_off", sum(t[0] for t in taken) / sum(t[1] for t in taken), "ratio", at_most(1.0))
    yield Figure("bytes_written_over_read", written / max(1.0, read), "ratio", at_most(2.0))
