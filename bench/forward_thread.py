"""Engine-thread time that KV transfers take: with a thousand requests that store and load KV, and with a hundred
thousand pending transfers.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from statistics import median

from bench.gpu import QWEN3_8B_BLOCK, open_device
from proof.report import Figure, at_most
from proof.rig import Rig, busy, in_groups
from sidestream.types import BatchPlan, RowPlan
from sidestream_kv.device.base import Stream
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.kv.pool import Lease
from sidestream_kv.types import Fence, Key, LoadPlan, StorePlan, TransferPlan

_STEP_S = 0.010
# With 500 steps per request, two of a thousand requests start in each step; each loads 512 prompt tokens.
_LOADS_A_STEP, _LOADED_BLOCKS = 2, 32
# Blocks of 4 KiB: the number of transfers matters here, not their size.
_SMALL = KVLayout(num_layers=4, num_kv_heads=1, head_dim=16, block_tokens=16, dtype="bfloat16")
_LOOP = range(20_000)


def measure(
    *, device: str, requests: int, steps: int, pending: int, on_progress: Callable[[str], None]
) -> list[Figure]:
    """The figures. Like the engine's loop, every step submits transfers for its requests' blocks, and polls for
    completed transfers.
    """
    used = open_device(device)
    rig = Rig(used, QWEN3_8B_BLOCK, num_blocks=6 * requests, num_slots=4 * requests)
    _freeze()
    try:
        on_progress("alone")
        alone = _python_s(rig, used.stream("alone"), steps // 4, orders=lambda: None)
        run = _Steps(rig, used.stream("compute"), requests)
        for number in range(steps + run.warm_up):
            if number % 50 == 0:
                on_progress(f"step {number} of {steps + run.warm_up}")
            run.step()
        rig.settle()
        costs, beside = run.costs_us[run.warm_up :], run.python_s[run.warm_up :]
        waits = sum(count for reason, count in used.host_waits().items() if reason not in ("step", "benchmark"))
        bytes_stored, bytes_loaded = (rig.metrics.value("transfer_bytes_total", kind) for kind in ("store", "load"))
    finally:
        rig.close()
    on_progress(f"{pending} transfers pending")
    worst_us, blocked_us, drained_s, collected_ms = _pending(device, pending)
    return [
        Figure("engine_thread_us_median", median(costs), "us/step", at_most(30)),
        Figure("engine_thread_us_max", max(costs), "us/step", at_most(300)),
        Figure("engine_thread_us_p99", sorted(costs)[int(0.99 * len(costs))], "us/step"),
        Figure("engine_thread_submit_us_median", median(run.submit_us[run.warm_up :]), "us/step"),
        Figure("host_waits", waits, "waits", at_most(0)),
        Figure("pending_submit_us_max", worst_us, "us/call", at_most(300)),
        Figure("pending_launch_us_max", blocked_us, "us/call"),
        Figure("pending_drained_s", drained_s, "s"),
        Figure("pending_collector_ms_max", collected_ms, "ms"),
        Figure("python_beside_transfers", median(beside) / alone, "ratio"),
        Figure("steps", len(costs), "steps"),
        Figure("stored_gib", bytes_stored / 2**30, "GiB"),
        Figure("loaded_gib", bytes_loaded / 2**30, "GiB"),
    ]


class _Steps:
    """A loop like the engine's: submit transfers, launch a step, poll transfers, wait for the previous step."""

    warm_up = 40

    def __init__(self, rig: Rig, compute: Stream, requests: int) -> None:
        self._rig = rig
        self._compute = compute
        self._requests = requests
        self._blocks = rig.blocks.take(requests)  # for each request, the block that it fills now
        self._stored: deque[list[Key]] = deque()
        self._loading: deque[tuple[int, Lease]] = deque()
        self._previous: Fence | None = None
        self._number = 0
        self._next_request = requests
        self._batch = BatchPlan(tuple(RowPlan(slot, slot, 0, 64, 65, None, (0,), True, 0) for slot in range(requests)))
        self.costs_us: list[float] = []
        self.submit_us: list[float] = []
        self.python_s: list[float] = []

    def step(self) -> None:
        """Run one step and record its costs."""
        plans = self._plans()
        transfers = self._rig.transfers
        start = time.perf_counter()
        transfers.submit(plans)
        transfers.gates(self._batch.prefill_requests())
        submitted = time.perf_counter()
        launched = self._compute.submit(lambda: busy(self._rig.device, _STEP_S), label="step")
        polling = time.perf_counter()
        transfers.poll()
        polled = time.perf_counter()
        self.costs_us.append(1e6 * (submitted - start + polled - polling))
        self.submit_us.append(1e6 * (submitted - start))
        start = time.perf_counter()
        _work()
        self.python_s.append(time.perf_counter() - start)
        if self._previous is not None:
            self._rig.device.wait_host(self._previous, reason="step")
        self._previous = launched
        loads = self._rig.transfers._loads
        while self._loading and self._loading[0][0] not in loads:
            self._loading.popleft()[1].release()

    def _plans(self) -> list[TransferPlan]:
        """Transfers of the next step: store one full block of every sixteenth request, and load the prompts of up to
        two requests.
        """
        rig, self._number = self._rig, self._number + 1
        full = self._blocks.ids[self._number % 16 :: 16]
        keys = rig.new_keys(len(full))
        self._stored.append(keys)
        after = () if self._previous is None else (self._previous,)
        plans: list[TransferPlan] = []
        if len(self._stored) > self.warm_up // 2:
            wanted = self._stored.popleft()
            for some in in_groups(wanted[: _LOADS_A_STEP * _LOADED_BLOCKS], _LOADED_BLOCKS):
                if rig.host.pool.get(some[0]) is None or rig.blocks.num_available < len(some):
                    continue
                lease = rig.blocks.take(len(some))
                self._next_request += 1
                plans.append(LoadPlan(self._next_request, 0, tuple(some), tuple(lease.ids), lease.after))
                self._loading.append((rig.transfers._last_job + len(plans), lease))
        plans.append(StorePlan(tuple(keys), tuple(full), after))
        return plans


def _freeze() -> None:
    """Freeze the heap like an engine before it serves, because a full garbage collection stops every thread."""
    gc.collect()
    gc.freeze()


def _work() -> int:
    """Run Python for about a millisecond, in place of the engine thread's other work."""
    total = 0
    for value in _LOOP:
        total += value
    return total


def _python_s(rig: Rig, stream: Stream, steps: int, *, orders: Callable[[], None]) -> float:
    """Median seconds of `_work` while steps run, but no transfers."""
    taken = []
    for _ in range(steps):
        launched = stream.submit(lambda: busy(rig.device, _STEP_S))
        start = time.perf_counter()
        _work()
        taken.append(time.perf_counter() - start)
        rig.device.wait_host(launched, reason="benchmark")
    return median(taken)


class _Collector:
    """Measures the pauses of Python's garbage collector, which stop every thread, so that they can be subtracted from
    other times.
    """

    def __init__(self) -> None:
        self.seconds = self.longest_s = self._start_s = 0.0

    def __enter__(self) -> _Collector:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *reason: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._start_s = time.perf_counter()
        else:
            taken = time.perf_counter() - self._start_s
            self.seconds, self.longest_s = self.seconds + taken, max(self.longest_s, taken)


def _pending(device: str, number: int) -> tuple[float, float, float, float]:
    """Submit `number` stores that all wait for one long step.

    Returns four times: the longest submission and the longest launch on another stream (in us, without garbage
    collection), the time from the end of the long step until all stores have ended (in s), and the longest garbage
    collection (in ms).
    """
    used = open_device(device)
    with closing(Rig(used, _SMALL, num_blocks=64, num_slots=number)) as rig:
        held, beside = used.stream("held"), used.stream("compute")
        beside.submit(lambda: busy(used, 1e-4))
        blocks, keys = rig.blocks.take(64), rig.new_keys(number)
        _freeze()
        held_back = held.submit(lambda: busy(used, 3.0))
        submits, launches = [], []
        with _Collector() as collector:
            for index, key in enumerate(keys):
                start, collected = time.perf_counter(), collector.seconds
                rig.store([key], [blocks.ids[index % 64]], held_back)
                submits.append(time.perf_counter() - start - (collector.seconds - collected))
                if index % 1000 == 0:
                    start, collected = time.perf_counter(), collector.seconds
                    beside.submit(lambda: busy(used, 1e-5))
                    launches.append(time.perf_counter() - start - (collector.seconds - collected))
        used.wait_host(held_back, reason="benchmark")
        start = time.perf_counter()
        rig.settle()
        drained_s = time.perf_counter() - start
        blocks.release()
        if rig.host.pool.num_keys != number:
            raise RuntimeError(f"{rig.host.pool.num_keys} of {number} blocks were stored")
    return 1e6 * max(submits), 1e6 * max(launches), drained_s, 1e3 * collector.longest_s
