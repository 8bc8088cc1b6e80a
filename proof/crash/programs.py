"""The programs of the processes of a crash test. Each runs in a forked child, until it is killed.

A program reports lines of text: a word, and what it says.

    started                     an engine accepts requests
    answers TIER=TOKENS …       a request was answered; prompt tokens that came from each tier
    refused TEXT                a process refuses to start, by name, as it should with a damaged description
    verified NUMBER             blocks that a witness has compared
    finding KIND TEXT           something is wrong; KIND is one of FINDINGS
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from proof.crash.place import Place
from proof.torture.judge import differing
from sidestream.config import SamplingParams
from sidestream.engine import Engine, build_engine
from sidestream.errors import ConfigError, TierCorrupt, TierError
from sidestream.types import Delta
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.offload.cache_process import CacheProcess
from sidestream_kv.offload.tiers import disk, store_tier
from sidestream_kv.offload.tiers.base import PersistentTier, SharedTier, TierContext
from sidestream_kv.offload.tiers.directory import TierDirectory
from sidestream_kv.offload.tiers.shared_pool import SharedPool
from sidestream_kv.offload.tiers.slots import SlotLocks, SlotTable
from sidestream_kv.offload.tiers.stack import TierStack

FINDINGS = ("wrong_tokens", "hang", "unverified", "unpublished", "stale_lease", "error")
"""Kinds of findings:

wrong_tokens   a request was answered with other tokens than the reference
hang           a process has not answered in time
unverified     a published block fails its verification, although nothing was damaged
unpublished    a block is served that does not hold what its key stands for
stale_lease    a slot stays leased, although no engine runs
error          a process has ended by itself
"""

Report = Callable[[str], None]
T = TypeVar("T")

HANG_S = 60.0
"""After this time without an answer, a process counts as hanging. No process waits for so long on purpose."""

# Tokens per second of a prefill, for the choice between loading and computing: loading is always faster.
_PREFILL_RATE = 500.0
_STORE_PAUSE_S = 0.05
_SEGMENT_SLOTS = 8
_LEASE_END_S = 10.0
_SLOWEST_S = 0.003  # before and after each part of a read or write
_GONE = ("is gone", "any more")  # what a tier says about a block that another process has evicted


def prepare(place: Place, seed: int) -> None:
    """Change constants of this process, so that little data has the effects of much. Every second process has a slow
    disk: its writes and reads have parts, so that it is killed between them.
    """
    store_tier.PAUSE_S = _STORE_PAUSE_S
    disk.SEGMENT_BYTES = _SEGMENT_SLOTS * disk.entry_bytes(place.model().layout)
    if seed % 2:
        os.pwritev, os.preadv = _in_parts(os.pwritev, seed), _in_parts(os.preadv, seed)


def _in_parts(call: Callable[..., int], seed: int) -> Callable[..., int]:
    rng = random.Random(seed)

    def slow(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        time.sleep(rng.uniform(0.0, _SLOWEST_S))
        count = call(fd, buffers[:1], offset)
        time.sleep(rng.uniform(0.0, _SLOWEST_S))
        return count

    return slow


# ------------------------------------------------------------------ engines


def serve(place: Place, seed: int, report: Report) -> None:
    """Start an engine, and ask it again and again."""
    prepare(place, seed)
    model = place.model()
    try:
        engine: Engine = _when_served(lambda: build_engine(model, place.config(model)))
    except ConfigError as error:
        report(f"refused {error}")
        return
    assert engine.parts.costs is not None
    engine.parts.costs.prefill_rate = _PREFILL_RATE
    engine.parts.costs.saw_prefill = lambda *_: None  # type: ignore[method-assign]
    report("started")
    rng = random.Random(seed)
    while True:
        replies = [_Reply(place, engine, number) for number in rng.sample(range(len(place.answers)), rng.randint(1, 3))]
        for reply in replies:
            reply.judge(report)
        if rng.random() < 0.02:
            engine.reset_prefix_cache()


def _when_served(make: Callable[[], T]) -> T:
    """The result of `make`, which needs a cache process: the last one may have been killed a moment ago."""
    until_s = time.monotonic() + HANG_S
    while True:
        try:
            return make()
        except ConfigError as error:
            if "no cache process" not in str(error) or time.monotonic() > until_s:
                raise
        time.sleep(0.005)


class _Reply:
    """What the client of one request has received."""

    def __init__(self, place: Place, engine: Engine, number: int) -> None:
        asked = place.workload.requests[number]
        self._right = list(place.answers[number])
        self._tokens: list[int] = []
        self._last: Delta | None = None
        self._ended = threading.Event()
        engine.submit(asked.prompt, SamplingParams(max_tokens=asked.max_tokens), self._take)

    def _take(self, delta: Delta) -> None:
        self._tokens.extend(delta.token_ids)
        if delta.finish_reason is not None:
            self._last = delta
            self._ended.set()

    def judge(self, report: Report) -> None:
        """Wait for the end, and compare."""
        if not self._ended.wait(HANG_S):
            report(f"finding hang no end after {self._tokens}")
        elif self._tokens != self._right:
            reason = self._last and (self._last.finish_reason, self._last.error)
            report(f"finding wrong_tokens {self._tokens} instead of {self._right}, {reason}")
        else:
            assert self._last is not None
            cached = self._last.cached.by_tier.items()
            report(" ".join(("answers", *(f"{tier}={tokens}" for tier, tokens in cached))))


# ------------------------------------------------------------------ the cache process


def serve_memory(place: Place) -> None:
    """Run the cache process."""
    CacheProcess(place.socket, host_bytes=64 << 20).run()


# ------------------------------------------------------------------ the witness


def examine(place: Place, seed: int, report: Report, *, alone: bool) -> None:
    """Compare every block that an engine could find now with what its key stands for.

    alone   no engine runs, so that no slot may be leased
    """
    prepare(place, seed)
    model = place.model()
    offload, device = place.config(model).offload, CpuDevice(compute_threads=1)
    assert offload is not None
    context = TierContext(model.layout, model.fingerprint)
    try:
        stack = _when_served(lambda: TierStack.open(offload, device, context))
    except ConfigError as error:
        report(f"refused {error}")
        return
    verified = _examine_memory(place, stack, report, alone=alone)
    for name, tier in stack.persistent.items():
        verified += _examine_tier(place, name, tier, report)
    if alone:
        table = SlotTable.open(TierDirectory.open(place.disk))
        if table is not None and not SlotLocks(table.fd).own(0, table.geometry.num_slots):
            report("finding stale_lease a slot of the disk is leased, although no engine runs")
    stack.close()
    device.close()
    report(f"verified {verified}")


def _examine_memory(place: Place, stack: TierStack, report: Report, *, alone: bool) -> int:
    pool, until_s, verified = stack.host.pool, time.monotonic() + _LEASE_END_S, 0
    assert isinstance(pool, SharedPool)
    for key in list(pool._index._id_of):
        lease = pool.lease([key])
        for slot in lease.ids:
            verified += 1
            _compare(place, f"host slot {slot}", key, bytes(stack.host.slot(slot)), report)
        lease.release()
    while alone:
        lease = pool.take_some(pool.size)
        missing = pool.size - len(lease.ids)
        lease.release()
        if not missing:
            break
        if time.monotonic() > until_s:
            report(f"finding stale_lease {missing} slots of the memory are leased, although no engine runs")
            break
        time.sleep(0.01)
        pool.refresh()
    return verified


def _examine_tier(place: Place, name: str, tier: PersistentTier, report: Report) -> int:
    entries, verified = list(tier.index.entries), 0
    if isinstance(tier, SharedTier):  # whose index has no room for all
        entries = [entry for key in place.contents.blocks for entry in tier.find([key])]
    for entry in entries:
        lease = tier.index.pin([entry.key] if entry.key in tier.index else [])
        out = np.zeros(place.contents.block_bytes, np.uint8)
        try:
            tier.read(entry, out)
        except TierCorrupt as error:
            if not str(error).rstrip().endswith(_GONE):
                report(f"finding unverified {error}")
        except TierError as error:
            report(f"finding error {error}")
        else:
            verified += 1
            _compare(place, f"{name} entry {entry.serial}", entry.key, out.tobytes(), report)
        lease.release()
    return verified


def _compare(place: Place, what: str, key: bytes, payload: bytes, report: Report) -> None:
    for text in differing(what, key, payload, place.contents):
        report(f"finding unpublished {text}")
