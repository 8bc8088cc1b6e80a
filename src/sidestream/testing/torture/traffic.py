"""Requests without a model: they write patterns, store, load, look, abort and give blocks back, as fast as the device
takes it.

One rig, one thread, which stands for the engine thread. A request does what the engine does with a transfer, and in
that order:

    compute   take blocks → write behind their last uses → store behind the write → give up behind the last step, or
              keep for a while
    load      take blocks → load behind their last uses → heard that it is submitted: look, layer by layer behind its
              fences → give up
    hit       share blocks that are findable on the device → look → give up

What it holds is checked when it lets go of it, and what was given up early by a look that is late: whoever writes too
soon is seen.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sidestream.device.base import CopyBatch, Stream
from sidestream.device.cpu import CpuDevice
from sidestream.device.cuda import CudaDevice
from sidestream.errors import DeviceError
from sidestream.kv.pool import Lease, PoolExhausted
from sidestream.offload.connector import LoadFailed, LoadReady, TransferEvent
from sidestream.testing.rig import Rig, busy
from sidestream.testing.torture.patterns import Found, Patterns, Words, describe, stamp_of, wrong_slots
from sidestream.types import BatchPlan, Fence, Key, LoadPlan, RequestId, RowPlan, StorePlan

_LOOKS = 4096
_STREAMS = 3
# Runs of keys that requests come back to: older ones were evicted from the host tier, mostly.
_RUNS = 40
# Requests that are on their way at once.
_CROWD = 24
# Findings that are told in words.
_TOLD = 20
_LOOK_AGAIN_S = 20e-6


@dataclass(frozen=True, slots=True)
class Habits:
    """How requests behave, and what is done to them.

    longest          blocks of a request; one in ten is that long, the others a third of it at most
    delay            share of steps and slices of copies that are held up, and for how long at least and at most, in
                     seconds
    faults           share of slices of copies that fail, some of them when a part was copied
    patience_s       how long nothing may end
    """

    longest: int
    delay: tuple[float, float, float]
    faults: float = 0.0
    aborts: float = 0.15
    resets: float = 0.002
    patience_s: float = 30.0


@dataclass(slots=True)
class Tally:
    """What was done. Blocks, but for `wrong`, `resets` and `failed_slices`.

    blocks    whose transfer ended well and whose bytes were looked at behind it
    reused    taken for writing while their last use was still running
    wrong     blocks and keys that were not what they must be; leases that never ended
    findings  the first of them in words
    """

    blocks: int = 0
    stored: int = 0
    loaded: int = 0
    missed: int = 0
    hits: int = 0
    aborted: int = 0
    reused: int = 0
    wrong: int = 0
    resets: int = 0
    failed_slices: int = 0
    findings: list[str] = field(default_factory=list)

    def find(self, text: str, count: int = 1) -> None:
        """Something is wrong."""
        self.wrong += count
        if len(self.findings) < _TOLD:
            self.findings.append(text)


@dataclass(slots=True, eq=False)
class _Request:
    """Blocks that hold, or will hold, the patterns of `numbers`. `failed`: of a load; then nothing is to be
    believed.
    """

    what: str
    numbers: range
    generation: int
    lease: Lease
    fence: Fence | None = None
    patience: int = 0
    counts: bool = False
    failed: bool = False

    @property
    def stamps(self) -> Words:
        return np.arange(self.numbers.start, self.numbers.stop, dtype=np.int64) + stamp_of(0, self.generation)


class Traffic:
    """Drives one rig, round by round."""

    def __init__(self, rig: Rig, habits: Habits, *, seed: int, name: str, tally: Tally) -> None:
        self._rig = rig
        self._habits = habits
        self._rng = random.Random(seed)
        self._name = f"{name}, seed {seed}"
        self._tally = tally
        self._patterns = Patterns(rig.device, rig.memory, max_blocks=habits.longest, max_looks=_LOOKS)
        self._streams: list[Stream] = [rig.device.stream(f"compute-{index}") for index in range(_STREAMS)]
        self._round = 0
        self._moved = 0
        self._generation = 0
        self._next_number = 0
        self._next: Callable[[], bool] | None = None
        self._runs: deque[range] = deque(maxlen=_RUNS)
        self._requests = 0
        self._loading: dict[
            RequestId, _Request
        ] = {}  # until the end of the round, because a load may fail behind its look
        self._waiting: set[RequestId] = set()  # for their loads to be submitted
        self._keeping: deque[_Request] = deque()
        self._looks: dict[int, _Request] = {}
        self._unproven: set[int] = set()  # numbers of keys whose store nobody has seen the bytes of
        self._progress_s = time.monotonic()
        self.broken_off = False

    def round(self, blocks: int) -> None:
        """Move about so many blocks, wait until all has ended, and judge. Raises DeviceError when nothing ends, and
        whatever the parts raise.
        """
        self._round += 1
        self._moved = 0
        while self._moved < blocks and self._patterns.looks_left > 2 * (_CROWD + _RUNS):
            self._step()
        self._settle()
        self._judge()

    def break_off(self) -> None:
        """Begin what there is room for, wait for nothing, and give everything up: the device is closed next, and behind
        that `judge_ledgers`.
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
        """One more request, or the one that found no room before: long ones wait until there is some. False when there
        is none.
        """
        ask = self._next or self._draw()
        self._next = None if ask() else ask
        return self._next is None

    def _draw(self) -> Callable[[], bool]:
        """What comes next."""
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
        """Write the patterns into fresh blocks, and store them."""
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
            self._unproven.update(numbers[len(found) :])
            self._rig.transfers.submit([StorePlan(tuple(keys), tuple(request.lease.ids), (written,))])
            self._tally.stored += len(keys)
            self._moved += len(keys)
        if self._rng.random() < self._habits.aborts:
            self._give_up(request)
            self._tally.aborted += len(keys)
        elif self._rng.random() < 0.5:
            self._look(
                request, after=(written,)
            )  # on another stream: it is late, and the blocks are given up meanwhile
            self._give_up(request)
        else:
            self._keep(request)
        return True

    def _hit(self, numbers: range) -> bool:
        """Look at what is findable on the device under the first of these keys."""
        ids = self._rig.blocks.match(_keys(numbers))
        if not ids:
            return False
        request = _Request("hit", numbers[: len(ids)], self._generation, self._rig.blocks.share(ids))
        self._tally.hits += len(ids)
        self._look(request)
        self._give_up(request)
        return True

    def _load(self, numbers: range) -> bool:
        """Load what the host tier seems to have of these keys; sometimes more, which is a miss."""
        if self._rng.random() > 0.02:
            found = len(self._rig.transfers.locate(_keys(numbers)))
            if not found:
                return self._compute(numbers)
            numbers = numbers[:found]
        request = self._open("load", numbers)
        if request is None:
            return False
        request.counts = True
        self._requests += 1
        self._loading[self._requests] = request
        prefetch = self._rng.random() < 0.3
        plan = LoadPlan(
            self._requests, 0, tuple(_keys(numbers)), tuple(request.lease.ids), request.lease.after, prefetch=prefetch
        )
        self._rig.transfers.submit([plan])
        self._moved += len(numbers)
        if self._rng.random() < self._habits.aborts:
            self._give_up(request)
            self._tally.aborted += len(numbers)
        else:
            self._waiting.add(self._requests)
        return True

    def _look_at_loads(self, ready: Sequence[RequestId]) -> None:
        """Their first steps, which wait on the device for what is on its way, layer by layer."""
        requests = [self._loading[request_id] for request_id in ready]
        rows = tuple(
            RowPlan(request_id, row, 0, 0, len(request.numbers), (), tuple(request.lease.ids), False, 0)
            for row, (request_id, request) in enumerate(zip(ready, requests, strict=True))
        )
        gates = self._rig.transfers.gates(BatchPlan(rows)).by_layer
        for request in requests:
            self._look(request, gates=gates)
            if self._rng.random() < 0.5:
                self._give_up(request)
            else:
                self._keep(request)

    def _reset(self) -> None:
        """New weights: what rests anywhere is of no use, and the same keys name other bytes from here on."""
        self._rig.transfers.forget_all()
        self._rig.blocks.forget_all()
        self._generation += 1
        self._unproven.clear()
        self._tally.resets += 1

    # ------------------------------------------------------------------ what ends

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
        """A load failed: nothing it wrote is believed, and its request computes, in other blocks."""
        request = self._loading[request_id]
        request.failed = True
        self._tally.missed += len(request.numbers)
        if request.fence is None and request.lease.open:  # else a step looks at it already; it is let go behind that
            self._waiting.discard(request_id)
            self._give_up(request)
            self._compute(request.numbers)

    def _keep(self, request: _Request) -> None:
        """Hold the blocks for a few more steps."""
        request.patience = self._rng.randint(0, 20)
        self._keeping.append(request)

    def _let_go(self, *, at_once: bool = False) -> None:
        """Look again at what was held for long enough, make it findable if it is good, and give it up."""
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
                for number, block in zip(request.numbers, request.lease.ids, strict=True):
                    self._rig.blocks.publish(block, _key(number))
            self._look(request)
            self._give_up(request)

    def _take_failures(self, events: Sequence[TransferEvent]) -> None:
        for event in events:
            if isinstance(event, LoadFailed):
                self._miss(event.request_id)

    def _settle(self) -> None:
        """Wait until nothing is on its way, and look at all that is findable on the device."""
        self._progress_s = time.monotonic()
        while self._keeping or self._waiting or self._rig.transfers.busy or self._rig.transfers.awaited:
            self._take_news()
            self._let_go(at_once=True)
            self._rest()
        self._take_news()
        for run in self._runs:
            self._hit(run)

    def _rest(self) -> None:
        if time.monotonic() - self._progress_s > self._habits.patience_s:
            raise DeviceError(
                f"{self._where}: nothing ended within {self._habits.patience_s:g} s: {len(self._waiting)} wait for loads, "
                f"{len(self._keeping)} hold blocks, {self._rig.blocks.num_available} of {self._rig.blocks.size} blocks are available"
            )
        time.sleep(_LOOK_AGAIN_S)

    # ------------------------------------------------------------------ judgement

    @property
    def _where(self) -> str:
        return f"{self._name}, round {self._round}"

    def _judge(self) -> None:
        """Read what the looks found, and compare the host tier's bytes and the ledgers with what they must be."""
        bad: set[int] = set()

        def judge(number: int, found: Found) -> None:
            request = self._looks[number]
            if not request.failed:
                bad.add(number)
                self._say(
                    f"{request.what}, block {request.lease.ids[found.row]}",
                    request.numbers[found.row],
                    request.generation,
                    found,
                )

        self._patterns.take_results(self._streams[0], judge)
        for number, request in self._looks.items():
            if request.counts and not request.failed and number not in bad:
                request.counts = False  # it may be looked at twice
                self._tally.loaded += len(request.numbers)
                self._prove(len(request.numbers), request.numbers if request.generation == self._generation else ())
        self._judge_host()
        self.judge_ledgers()
        self._looks.clear()
        self._loading.clear()

    def _judge_host(self) -> None:
        numbers = {_key(number): number for run in self._runs for number in run}
        stamps = {key: stamp_of(number, self._generation) for key, number in numbers.items()}
        wrong = wrong_slots(self._rig.host, stamps)
        for key, found in wrong:
            self._say(f"host slot {found.row}", numbers[key], self._generation, found)
        known = {numbers[key] for key, _ in wrong}
        self._prove(0, [n for key, n in numbers.items() if n not in known and self._rig.host.pool.get(key) is not None])

    def judge_ledgers(self) -> None:
        """Nothing is on its way: whatever is still in use never lets go."""
        for pool in (self._rig.blocks, self._rig.host.pool):
            pool.check()
            if pool.num_used:
                self._tally.find(
                    f"{self._where}: {pool.num_used} of {pool.name} are still in use though all has ended",
                    pool.num_used,
                )

    def _say(self, what: str, number: int, generation: int, found: Found) -> None:
        expected = self._patterns.expected(stamp_of(number, generation), found.place)
        text = f"{self._where}: {what}: byte {found.place}: {describe(expected)} expected, {describe(found.word)} found"
        self._tally.find(
            text if found.num_bad == 1 else f"{text}; {found.num_bad} blocks beside it are wrong", found.num_bad
        )

    def _prove(self, loads: int, stores: Sequence[int]) -> None:
        """Count transfers that ended well: loads that were looked at, and the stores that brought what was seen."""
        proven = self._unproven.intersection(stores)
        self._unproven -= proven
        self._tally.blocks += loads + len(proven)

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
        """Let others have the blocks, behind its last step and whatever transfer uses them."""
        request.lease.release(after=() if request.fence is None else (request.fence,), until=self._rig.transfers.uses())

    def _look(self, request: _Request, *, after: Sequence[Fence] = (), gates: Sequence[Sequence[Fence]] = ()) -> Fence:
        number, fence = self._patterns.look(
            self._stream(), tuple(request.lease.ids), request.stamps, after=after, gates=gates, delay_s=self._delay()
        )
        self._looks[number] = request
        request.fence = fence
        return fence

    def _stream(self) -> Stream:
        return self._rng.choice(self._streams)

    def _delay(self) -> float:
        return draw_delay(self._rng, self._habits)


class Meddler:
    """Holds up the slices of copies, and lets some fail: on every stream that its device makes from here on, but for
    steps'.

    failed   slices
    """

    def __init__(self, device: CpuDevice | CudaDevice, habits: Habits, *, seed: int) -> None:
        self.failed = 0
        self._device = device
        self._habits = habits
        self._rng = random.Random(seed)  # for all streams: who draws first is the machine's affair
        make: Callable[[str], Stream] = device.stream

        def stream(name: str) -> Stream:
            made = make(name)
            if name.startswith(("store-", "load-")):
                self._meddle(made)
            return made

        device.stream = stream  # type: ignore[method-assign, assignment]

    def _meddle(self, stream: Stream) -> None:
        submit_copy = stream.submit_copy

        def meddled(batch: CopyBatch, first: int, stop: int, *, label: str = "") -> Fence:
            if delay_s := draw_delay(self._rng, self._habits):
                stream.submit(lambda: busy(self._device, delay_s), label="held up")
            if self._rng.random() >= self._habits.faults:
                return submit_copy(batch, first, stop, label=label)
            self.failed += 1

            def work() -> None:
                stream.copy(batch.part(first, (first + stop) // 2))
                raise DeviceError("injected: a copy failed when half of it was on its way")

            return stream.submit(work, batch.part(first, stop).accesses, label=label)

        stream.submit_copy = meddled  # type: ignore[method-assign]


def draw_delay(rng: random.Random, habits: Habits) -> float:
    """Seconds, mostly 0; else any order of magnitude is as likely as any other."""
    share, least, most = habits.delay
    return math.exp(rng.uniform(math.log(least), math.log(most))) if rng.random() < share else 0.0


def _key(number: int) -> Key:
    return number.to_bytes(16, "little")


def _keys(numbers: range) -> list[Key]:
    return [number.to_bytes(16, "little") for number in numbers]
