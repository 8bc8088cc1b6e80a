"""Generates requests without a model: they write test patterns to blocks, store, load, compare, abort and release
blocks, as fast as the device allows. Uses one `Rig`, on one thread that acts as the engine thread.

A request makes the same calls as the engine, in the same order:

    compute   take blocks → write after the fences of their last uses → store after the write → release after the write,
              or keep the blocks for a while
    load      take blocks → load after the fences of their last uses → when the load's fences are known: compare, each
              layer after its fence → release. If layers have sliding windows, some loads leave these layers out of
              their first blocks (partial blocks)
    hit       share blocks that are findable on the device → compare → release

A compare is work on a stream. Blocks may be released while a delayed compare is still pending. It then detects a next
writer that does not wait for it.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from proof.rig import Rig, busy
from proof.torture.findings import Findings
from proof.torture.patterns import Found, Patterns, Words, describe, stamp_of, wrong_slots
from sidestream.errors import DeviceError
from sidestream_kv.device.base import CopyBatch, Stream
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.device.cuda import CudaDevice
from sidestream_kv.kv.pool import FencedPool, Lease, PoolExhausted
from sidestream_kv.offload.connector import LoadFailed, LoadReady, TransferEvent
from sidestream_kv.types import Fence, Key, LoadPlan, RequestId, StorePlan

_LOOKS = 4096
_STREAMS = 3
# Number of key sequences that requests use again. Older sequences are mostly evicted from the host tier.
_RUNS = 40
# Concurrent requests.
_CROWD = 24
_LOOK_AGAIN_S = 20e-6


@dataclass(frozen=True, slots=True)
class Habits:
    """The behaviour of requests, and the injected delays and faults.

    longest          blocks of the longest requests. One request in ten is that long; the others have at most a third as
                     many
    delay            share of steps and slices (parts of a copy) that are delayed, shortest delay and longest delay in
                     seconds
    load_delay       as `delay`, but for slices of loads; None: use `delay`
    faults           share of slices that fail after half of the bytes were copied
    patience_s       longest time in which no request ends, in seconds
    """

    longest: int
    delay: tuple[float, float, float]
    faults: float = 0.0
    aborts: float = 0.15
    resets: float = 0.002
    patience_s: float = 30.0
    load_delay: tuple[float, float, float] | None = None


@dataclass(slots=True)
class Tally(Findings):
    """Counts of a run, in blocks, except `wrong`, `resets` and `failed_slices`.

    blocks    blocks whose transfer succeeded and whose bytes were compared afterwards
    partial   loaded blocks of which only the layers without a sliding window were loaded and compared
    reused    blocks that were taken for writing while their last use was still running
    wrong     wrong blocks, wrong keys, and leases that never ended
    findings  the first errors, as sentences
    """

    blocks: int = 0
    stored: int = 0
    loaded: int = 0
    partial: int = 0
    missed: int = 0
    hits: int = 0
    aborted: int = 0
    reused: int = 0
    resets: int = 0
    failed_slices: int = 0


@dataclass(slots=True, eq=False)
class _Request:
    """One request: blocks that hold, or will hold, the patterns of the keys `numbers`.

    partial   for each block, whether only its layers without a sliding window have its pattern; empty: no block
    failed    the load failed, so the bytes are ignored
    """

    what: str
    numbers: range
    generation: int
    lease: Lease
    partial: tuple[bool, ...] = ()
    fence: Fence | None = None
    patience: int = 0
    counts: bool = False
    failed: bool = False

    @property
    def stamps(self) -> Words:
        return np.arange(self.numbers.start, self.numbers.stop, dtype=np.int64) + stamp_of(0, self.generation)

    def load_plan(self, request_id: RequestId, *, prefetch: bool) -> LoadPlan:
        """The plan of a load into the request's blocks; the partial ones are its first."""
        return LoadPlan(
            request_id,
            0,
            tuple(_keys(self.numbers)),
            tuple(self.lease.ids),
            self.lease.after,
            prefetch=prefetch,
            num_partial=sum(self.partial),
        )

    def publish(self, pool: FencedPool) -> None:
        """Make the blocks findable on the device."""
        partial = self.partial or (False,) * len(self.numbers)
        for number, block, is_partial in zip(self.numbers, self.lease.ids, partial, strict=True):
            pool.publish(block, _key(number), partial=is_partial)


class _Checks:
    """Compares bytes with the expected patterns, and counts the results.

    looks      by number of a look (a compare on the device): its request
    unproven   numbers of keys whose stored bytes have not been compared yet
    """

    def __init__(self, rig: Rig, patterns: Patterns, tally: Tally) -> None:
        self.looks: dict[int, _Request] = {}
        self.unproven: set[int] = set()
        self._rig = rig
        self._patterns = patterns
        self._tally = tally

    def judge(self, where: str, stream: Stream, runs: Iterable[range], generation: int) -> None:
        """Read the results of all looks, and check the host tier's bytes and both pools."""
        bad: set[int] = set()

        def judge(number: int, found: Found) -> None:
            request = self.looks[number]
            if not request.failed:
                bad.add(number)
                what = f"{where}: {request.what}, block {request.lease.ids[found.row]}"
                self._report(what, request.numbers[found.row], request.generation, found)

        self._patterns.take_results(stream, judge)
        for number, request in self.looks.items():
            if request.counts and not request.failed and number not in bad:
                request.counts = False  # a second look at the request does not count
                self._tally.loaded += len(request.numbers)
                self._tally.partial += sum(request.partial)
                self._prove(len(request.numbers), request.numbers if request.generation == generation else ())
        self._judge_host(where, runs, generation)
        self.judge_ledgers(where)
        self.looks.clear()

    def _judge_host(self, where: str, runs: Iterable[range], generation: int) -> None:
        numbers = {_key(number): number for run in runs for number in run}
        stamps = {key: stamp_of(number, generation) for key, number in numbers.items()}
        wrong = wrong_slots(self._rig.host, stamps)
        for key, found in wrong:
            self._report(f"{where}: host slot {found.row}", numbers[key], generation, found)
        known = {numbers[key] for key, _ in wrong}
        self._prove(0, [n for key, n in numbers.items() if n not in known and self._rig.host.pool.get(key) is not None])

    def judge_ledgers(self, where: str) -> None:
        """Report blocks that are still in use when no transfer is running."""
        for pool in (self._rig.blocks, self._rig.host.pool):
            pool.check()
            if pool.num_used:
                text = f"{where}: {pool.num_used} of {pool.name} are still in use at the end"
                self._tally.find(text, pool.num_used)

    def _report(self, what: str, number: int, generation: int, found: Found) -> None:
        expected = self._patterns.expected(stamp_of(number, generation), found.place)
        text = f"{what}: byte {found.place}: {describe(expected)} expected, {describe(found.word)} found"
        self._tally.find(text if found.num_bad == 1 else f"{text}; {found.num_bad} blocks are wrong", found.num_bad)

    def _prove(self, loads: int, stores: Sequence[int]) -> None:
        """Count successful transfers: loads and stores whose bytes were compared."""
        proven = self.unproven.intersection(stores)
        self.unproven -= proven
        self._tally.blocks += loads + len(proven)


class Traffic:
    """Runs requests on one `Rig`, in rounds."""

    def __init__(self, rig: Rig, habits: Habits, *, seed: int, name: str, tally: Tally) -> None:
        self._rig = rig
        self._habits = habits
        self._rng = random.Random(seed)
        self._name = f"{name}, seed {seed}"
        self._tally = tally
        self._patterns = Patterns(rig.device, rig.memory, max_blocks=habits.longest, max_looks=_LOOKS)
        self._checks = _Checks(rig, self._patterns, tally)
        self._streams: list[Stream] = [rig.device.stream(f"compute-{index}") for index in range(_STREAMS)]
        self._round = 0
        self._moved = 0
        self._generation = 0
        self._next_number = 0
        self._next: Callable[[], bool] | None = None
        self._runs: deque[range] = deque(maxlen=_RUNS)
        self._requests = 0
        # Kept until the end of the round, because a load may fail after its look.
        self._loading: dict[RequestId, _Request] = {}
        self._waiting: set[RequestId] = set()  # requests whose loads are not submitted yet
        self._keeping: deque[_Request] = deque()
        self._progress_s = time.monotonic()
        self.broken_off = False

    def round(self, blocks: int, tell: Callable[[int], None] = lambda moved: None) -> None:
        """Transfer about this many blocks, wait for all transfers, and check all bytes. Raises DeviceError when no
        request ends for `patience_s`, and any error of the rig. `tell` receives the number of blocks so far.
        """
        self._round += 1
        self._moved = 0
        while self._moved < blocks and self._patterns.looks_left > 2 * (_CROWD + _RUNS):
            self._step()
            tell(self._moved)
        self._settle()
        self._checks.judge(self._where, self._streams[0], self._runs, self._generation)
        self._loading.clear()

    def break_off(self) -> None:
        """Start as many requests as possible, then release all blocks without waiting. Afterwards, the caller closes
        the device and calls `judge_ledgers`.
        """
        self._progress_s = time.monotonic()
        while self._begin():
            pass
        held = [*self._keeping, *(self._loading[request_id] for request_id in self._waiting)]
        self._keeping.clear()
        self._waiting.clear()
        for request in held:
            self._give_up(request)
        self.broken_off = True

    # ------------------------------------------------------------------ one step

    def _step(self) -> None:
        self._take_news()
        self._let_go()
        if self._rng.random() < self._habits.resets:
            self._reset()
        if len(self._waiting) + len(self._keeping) >= _CROWD or not self._begin():
            self._rest()

    def _begin(self) -> bool:
        """Start one more request. Returns False if too few blocks are free; then the next call tries the same request
        again, so that long requests do not starve.
        """
        ask = self._next or self._draw()
        self._next = None if ask() else ask
        return self._next is None

    def _draw(self) -> Callable[[], bool]:
        """Choose the next request."""
        draw = self._rng.random()
        if draw < 0.65 and self._runs:
            run = self._rng.choice(self._runs)
            numbers = run if self._rng.random() < 0.3 else run[: self._rng.randint(1, len(run))]
            return lambda: (draw < 0.1 and self._hit(numbers)) or self._load(numbers)
        longest = self._habits.longest
        count = longest if self._rng.random() < 0.1 else self._rng.randint(1, longest // 3)
        run = range(self._next_number, self._next_number + count)
        self._next_number = run.stop
        self._runs.append(run)
        return lambda: self._compute(run)

    def _compute(self, numbers: range) -> bool:
        """Start a request that writes patterns to new blocks and stores the blocks."""
        request = self._open("write", numbers)
        if request is None:
            return False
        written = self._patterns.write(
            self._stream(), request.lease.ids, request.stamps, after=request.lease.after, delay_s=self._delay()
        )
        request.fence = written
        keys = _keys(numbers)
        if self._rng.random() < 0.9:
            found = self._rig.transfers.locate(keys)
            self._checks.unproven.update(numbers[len(found) :])
            self._rig.transfers.submit([StorePlan(tuple(keys), tuple(request.lease.ids), (written,))])
            self._tally.stored += len(keys)
            self._moved += len(keys)
        if self._rng.random() < self._habits.aborts:
            self._give_up(request)
            self._tally.aborted += len(keys)
        elif self._rng.random() < 0.5:
            # A delayed compare on another stream, which is still pending when the blocks are released.
            self._look(request, after=(written,))
            self._give_up(request)
        else:
            self._keep(request)
        return True

    def _hit(self, numbers: range) -> bool:
        """Start a request that compares the longest prefix of `numbers` that is cached on the device."""
        ids = self._rig.blocks.match(_keys(numbers))
        if not ids:
            return False
        partial = tuple(map(self._rig.blocks.is_partial, ids))
        request = _Request("hit", numbers[: len(ids)], self._generation, self._rig.blocks.share(ids), partial)
        self._tally.hits += len(ids)
        self._look(request)
        self._give_up(request)
        return True

    def _load(self, numbers: range) -> bool:
        """Start a request that loads the longest prefix of `numbers` in the host tier; sometimes it asks for more, so
        that the load fails.
        """
        if self._rng.random() > 0.02:
            found = len(self._rig.transfers.locate(_keys(numbers)))
            if not found:
                return self._compute(numbers)
            numbers = numbers[:found]
        request = self._open("load", numbers)
        if request is None:
            return False
        request.counts = True
        if self._rig.layout.windows and len(numbers) > 1 and self._rng.random() < 0.5:
            num_partial = self._rng.randrange(1, len(numbers))
            request.partial = tuple(at < num_partial for at in range(len(numbers)))
        self._requests += 1
        self._loading[self._requests] = request
        self._rig.transfers.submit([request.load_plan(self._requests, prefetch=self._rng.random() < 0.3)])
        self._moved += len(numbers)
        if self._rng.random() < self._habits.aborts:
            self._give_up(request)
            self._tally.aborted += len(numbers)
        else:
            self._waiting.add(self._requests)
        return True

    def _look_at_loads(self, ready: Sequence[RequestId]) -> None:
        """Compare loaded blocks while their loads run: on the device, each layer is compared after the fence of its
        group.
        """
        requests = [self._loading[request_id] for request_id in ready]
        gates = self._rig.transfers.gates((request_id, 0) for request_id in ready).by_layer
        for request in requests:
            self._look(request, gates=gates)
            if self._rng.random() < 0.5:
                self._give_up(request)
            else:
                self._keep(request)

    def _reset(self) -> None:
        """Reset the cache as after a weight update: from now on, the same keys stand for other patterns."""
        self._rig.transfers.forget_all()
        self._rig.blocks.forget_all()
        self._generation += 1
        self._checks.unproven.clear()
        self._tally.resets += 1

    # ------------------------------------------------------------------ ends of requests

    def _take_news(self) -> None:
        ready = []
        for event in self._rig.transfers.poll():
            self._progress_s = time.monotonic()
            match event:
                case LoadReady(request_id):
                    if request_id in self._waiting:
                        self._waiting.remove(request_id)
                        ready.append(request_id)
                case LoadFailed(request_id):
                    self._miss(request_id)
                    ready = [other for other in ready if other != request_id]
        if ready:
            self._look_at_loads(ready)

    def _miss(self, request_id: RequestId) -> None:
        """Handle a failed load: ignore the bytes, and start a request that computes the same keys in other blocks."""
        request = self._loading[request_id]
        request.failed = True
        self._tally.missed += len(request.numbers)
        if request.fence is None and request.lease.open:  # else a compare reads them, and releases them later
            self._waiting.discard(request_id)
            self._give_up(request)
            self._compute(request.numbers)

    def _keep(self, request: _Request) -> None:
        """Keep the blocks for a random number of steps."""
        request.patience = self._rng.randint(0, 20)
        self._keeping.append(request)

    def _let_go(self, *, at_once: bool = False) -> None:
        """For requests that were kept long enough: publish the blocks if they are valid, compare them again, and
        release them.
        """
        for _ in range(len(self._keeping)):
            request = self._keeping.popleft()
            request.patience -= 1
            assert request.fence is not None
            if not request.fence.poll() or (request.patience > 0 and not at_once):
                self._keeping.append(request)
                continue
            self._progress_s = time.monotonic()
            self._take_failures(self._rig.transfers.failed_loads())
            if not request.failed and request.generation == self._generation:
                request.publish(self._rig.blocks)
            self._look(request)
            self._give_up(request)

    def _take_failures(self, events: Sequence[TransferEvent]) -> None:
        for event in events:
            if isinstance(event, LoadFailed):
                self._miss(event.request_id)

    def _settle(self) -> None:
        """Wait until no transfer is running, and compare all blocks that are cached on the device."""
        self._progress_s = time.monotonic()
        while self._keeping or self._waiting or self._rig.transfers.has_work or self._rig.transfers.has_waiters:
            self._take_news()
            self._let_go(at_once=True)
            self._rest()
        self._take_news()
        for run in self._runs:
            self._hit(run)

    def _rest(self) -> None:
        if time.monotonic() - self._progress_s > self._habits.patience_s:
            raise DeviceError(
                f"{self._where}: nothing ended within {self._habits.patience_s:g} s: "
                f"{len(self._waiting)} wait for loads, {len(self._keeping)} hold blocks, "
                f"{self._rig.blocks.num_available} of {self._rig.blocks.size} blocks are available"
            )
        time.sleep(_LOOK_AGAIN_S)

    # ------------------------------------------------------------------ checks

    @property
    def _where(self) -> str:
        return f"{self._name}, round {self._round}"

    def judge_ledgers(self) -> None:
        """Report blocks that are still in use. Call it when no transfer is running, because nothing would release them
        later.
        """
        self._checks.judge_ledgers(self._where)

    # ------------------------------------------------------------------ the parts of a request

    def _open(self, what: str, numbers: range) -> _Request | None:
        try:
            lease = self._rig.blocks.take(len(numbers))
        except PoolExhausted:
            return None
        if lease.after:
            self._tally.reused += len(numbers)
        self._progress_s = time.monotonic()
        return _Request(what, numbers, self._generation, lease)

    def _give_up(self, request: _Request) -> None:
        """Release the blocks. They are free after the request's last step and all transfers that use them."""
        request.lease.release(
            after=() if request.fence is None else (request.fence,), until=self._rig.transfers.transfers_fence()
        )

    def _look(self, request: _Request, *, after: Sequence[Fence] = (), gates: Sequence[Sequence[Fence]] = ()) -> Fence:
        number, fence = self._patterns.look(
            self._stream(),
            tuple(request.lease.ids),
            request.stamps,
            partial=request.partial,
            after=after,
            gates=gates,
            delay_s=self._delay(),
        )
        self._checks.looks[number] = request
        request.fence = fence
        return fence

    def _stream(self) -> Stream:
        return self._rng.choice(self._streams)

    def _delay(self) -> float:
        return draw_delay(self._rng, self._habits.delay)


class Meddler:
    """Delays slices of copies, and lets some fail. Affects the streams for stores and loads that the device creates
    from now on.

    failed   number of failed slices
    """

    def __init__(self, device: CpuDevice | CudaDevice, habits: Habits, *, seed: int) -> None:
        self.failed = 0
        self._device = device
        self._habits = habits
        self._rng = random.Random(seed)  # shared by all streams, so timing affects which stream gets which number
        make: Callable[[str], Stream] = device.stream

        def stream(name: str) -> Stream:
            made = make(name)
            if name.startswith(("store-", "load-")):
                self._meddle(made)
            return made

        device.stream = stream  # type: ignore[method-assign, assignment]

    def _meddle(self, stream: Stream) -> None:
        submit_copy, delay = stream.submit_copy, self._habits.delay
        if stream.name.startswith("load-"):
            delay = self._habits.load_delay or delay

        def meddled(batch: CopyBatch, first: int, stop: int, *, label: str = "") -> Fence:
            if delay_s := draw_delay(self._rng, delay):
                stream.submit(lambda: busy(self._device, delay_s), label="held up")
            if self._rng.random() >= self._habits.faults:
                return submit_copy(batch, first, stop, label=label)
            self.failed += 1

            def work() -> None:
                stream.copy(batch.part(first, (first + stop) // 2))
                raise DeviceError("injected: a copy failed half-way")

            return stream.submit(work, batch.part(first, stop).accesses, label=label)

        stream.submit_copy = meddled  # type: ignore[method-assign]


def draw_delay(rng: random.Random, delay: tuple[float, float, float]) -> float:
    """A random delay in seconds, often 0; otherwise its logarithm is uniformly distributed. `delay`: see
    `Habits.delay`.
    """
    share, least, most = delay
    return math.exp(rng.uniform(math.log(least), math.log(most))) if rng.random() < share else 0.0


def _key(number: int) -> Key:
    return number.to_bytes(16, "little")


def _keys(numbers: range) -> list[Key]:
    return [number.to_bytes(16, "little") for number in numbers]
