"""Random programs: the checker agrees with a plain implementation of the definitions, has no finding in correct
programs, and does not grow.
"""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
from checker_rig import BLOCK, POLICIES, fails, nothing
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream_kv.kv.pool import FencedPool, Lease, PoolExhausted
from sidestream_kv.types import Access
from sidestream_order.checker import Checker, simulated
from sidestream_order.shadow import Op, Shadow
from sidestream_order.sim import SimDevice, SimFence, SimStream

BYTES = 12
STREAMS = ("compute", "copy", "load")

# ---------------------------------------------------------------------- against the definition


@dataclass(frozen=True)
class Part:
    """A wait for an earlier step, if there is one, and what is touched from there on."""

    awaits: int
    accesses: tuple[Access, ...]


@dataclass(frozen=True)
class Step:
    """What the host does: submit work to `who`, make `who` wait for an earlier step, see an earlier step done, or touch
    memory itself.
    """

    kind: str
    who: str
    target: int
    parts: tuple[Part, ...]


spans = st.tuples(st.integers(0, BYTES - 1), st.integers(1, BYTES), st.booleans())
accesses = st.lists(spans.filter(lambda span: span[0] < span[1]).map(lambda span: Access("kv", *span)), max_size=3).map(
    tuple
)
parts = st.lists(st.builds(Part, st.integers(-1, 9), accesses), min_size=1, max_size=3).map(tuple)
steps = st.builds(
    Step,
    st.sampled_from(["submit", "submit", "submit", "wait", "see", "touch"]),
    st.sampled_from(STREAMS),
    st.integers(0, 9),
    parts,
)


def races_by_definition(program: Sequence[Step]) -> set[frozenset[str]]:
    """Pairs of labels that touch the same byte, one of them writing, with neither among what the other knows to be
    done.
    """
    touches: list[tuple[int, Access, frozenset[int]]] = []
    known: dict[str, frozenset[int]] = {name: frozenset() for name in STREAMS}
    host: frozenset[int] = frozenset()
    done: dict[int, frozenset[int]] = {}  # by step: all that is done once it is
    for index, step in enumerate(program):
        if step.kind == "submit":
            now = known[step.who] | host
            for at, part in enumerate(step.parts):
                if at:
                    now |= done.get(part.awaits, frozenset())
                touches += [(index, access, now) for access in part.accesses]
            known[step.who] = done[index] = now | {index}
        elif step.kind == "wait":
            known[step.who] |= done.get(step.target, frozenset())
        elif step.kind == "see":
            host |= done.get(step.target, frozenset())
        else:
            touches += [(index, access, host) for access in step.parts[0].accesses]
            host |= {index}
    return {
        frozenset((f"step {first}", f"step {second}"))
        for position, (second, access, knows) in enumerate(touches)
        for first, other, _ in touches[:position]
        if first != second and first not in knows and (access.write or other.write)
        if max(access.start, other.start) < min(access.stop, other.stop)
    }


def run(program: Sequence[Step], policy: str, seed: int) -> Checker:
    device, checker = simulated(policy, seed)
    streams = {name: device.stream(name) for name in STREAMS}
    fences: dict[int, SimFence] = {}

    def work(stream: SimStream, later: Sequence[Part], known: dict[int, SimFence]) -> None:
        for part in later:
            if part.awaits in known:
                stream.wait(known[part.awaits])
            stream.touch(lambda part=part: part.accesses)

    try:
        for index, step in enumerate(program):
            label, declared = f"step {index}", partial(tuple, step.parts[0].accesses)
            if step.kind == "submit":
                stream, known = streams[step.who], dict(fences)
                fences[index] = stream.submit(partial(work, stream, step.parts[1:], known), declared, label=label)
            elif step.kind == "wait" and step.target in fences:
                streams[step.who].wait(fences[step.target])
            elif step.kind == "see" and step.target in fences:
                device.wait_host(fences[step.target], reason="step")
            elif step.kind == "touch":
                checker.host_touched(declared, label)
        device.close()
    finally:
        device.kill()
    return checker


def labels(checker: Checker) -> set[frozenset[str]]:
    pairs = ((finding.first, finding.second) for finding in checker.findings if finding.kind == "race")
    return {frozenset(place.rpartition(", ")[2].strip("`") for place in pair) for pair in pairs}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(steps, min_size=2, max_size=10), st.sampled_from(POLICIES), st.integers(0, 3))
def test_the_checker_finds_a_race_exactly_if_the_program_has_one(program: list[Step], policy: str, seed: int) -> None:
    expected = races_by_definition(program)
    found = labels(run(program, policy, seed))
    assert found <= expected, "nothing is wrong with these"
    assert bool(found) == bool(expected)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(steps, min_size=2, max_size=10))
def test_all_policies_agree_whether_a_program_has_a_race(program: list[Step]) -> None:
    verdicts = {bool(labels(run(program, policy, 0))) for policy in POLICIES}
    assert len(verdicts) == 1


# ---------------------------------------------------------------------- cells


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.booleans(), st.sampled_from("ab")), max_size=25))
def test_ranges_record_the_same_accesses_as_a_record_per_byte(touches: list[tuple[int, int, bool, str]]) -> None:
    shadow, writers, readers = Shadow("kv"), dict[int, Op](), dict[int, dict[str, Op]]()
    for index, (start, stop, write, stream) in enumerate(touches):
        if start >= stop:
            continue
        op = Op(stream, index, index, "", (nothing.__code__, 0), None)
        cells = shadow.carve(start, stop)
        assert [cell.start for cell in cells] == [start, *(cell.stop for cell in cells[:-1])] and cells[-1].stop == stop
        assert shadow.span(start, stop) == cells
        for at in range(start, stop):
            if write:
                writers[at], readers[at] = op, {}
            else:
                readers.setdefault(at, {})[stream] = op
        if write:
            cell = shadow.join(cells)
            assert (cell.start, cell.stop) == (start, stop)
            cell.write, cell.reads = op, {}
        else:
            for cell in cells:
                cell.reads[stream] = op
    for at in range(31):
        covering = shadow.span(at, at + 1)
        assert len(covering) <= 1
        for cell in covering:
            assert (cell.write, cell.reads) == (writers.get(at), readers.get(at, {}))
        assert bool(covering) == (at in writers or at in readers)


# ---------------------------------------------------------------------- ordered by construction


class Offloader:
    """A small runtime that does everything right: steps fill blocks, stores and loads move them, all under leases and
    behind fences.
    """

    def __init__(self, device: SimDevice, checker: Checker, rng: random.Random) -> None:
        self.device = device
        self.checker = checker
        self.rng = rng
        self.compute, self.copy, self.load = (device.stream(name) for name in STREAMS)
        self.blocks, self.slots = FencedPool("blocks", 5, tracer=checker), FencedPool("slots", 3, tracer=checker)
        for pool, memory in ((self.blocks, "kv"), (self.slots, "host")):
            device.allocate(memory, pool.size * BLOCK)
            checker.backed(pool.name, memory, BLOCK)
        self.endings: list[tuple[SimFence, Callable[[], None]]] = []
        self.keys = [bytes([index]) for index in range(8)]

    def touch(self, memory: str, ids: Sequence[int], *, write: bool) -> list[Access]:
        """Whole blocks, or halves of them."""
        halves = self.rng.random() < 0.5
        size = BLOCK // 2 if halves else BLOCK
        return [
            Access(memory, at * size, (at + 1) * size, write)
            for item in ids
            for at in (range(2 * item, 2 * item + 2) if halves else [item])
        ]

    def launched(self) -> None:
        """Fill fresh blocks behind their last uses and publish them once that was seen; some blocks are read
        besides.
        """
        key = self.rng.choice(self.keys)
        try:
            fresh = self.blocks.take(self.rng.randint(1, 2))
        except PoolExhausted:
            return
        known = self.blocks.match([self.rng.choice(self.keys)])
        prefix = self.blocks.share(known)
        for fence in fresh.after:
            self.compute.wait(fence)
        declared = [*self.touch("kv", fresh.ids, write=True), *self.touch("kv", prefix.ids, write=False)]
        work, gated = nothing, self.rng.random() < 0.5
        if gated:
            work = lambda: self.compute.touch(lambda: declared)  # noqa: E731
        fence = self.compute.submit(work, lambda: [] if gated else declared, label="step")
        prefix.release(after=[fence])
        if self.rng.random() < 0.3:
            fresh.release(after=[fence])  # aborted while the step runs
            return
        self.endings.append((fence, lambda: self.commit(fresh, key, fence)))

    def commit(self, fresh: Lease, key: bytes, fence: SimFence) -> None:
        if self.blocks.publish(fresh.ids[0], key):
            self.store(fresh.ids[0], key, fence)
        fresh.release(after=[fence])

    def store(self, block: int, key: bytes, fence: SimFence) -> None:
        try:
            slot = self.slots.take(1)
        except PoolExhausted:
            return
        source = self.blocks.share([block])
        for other in (fence, *slot.after):
            self.copy.wait(other)
        failing = self.rng.random() < 0.2
        declared = [*self.touch("kv", [block], write=False), *self.touch("host", slot.ids, write=True)]
        stored = self.copy.submit(fails if failing else nothing, lambda: declared, label="store")
        source.release(after=[stored])

        def end() -> None:
            if stored.failure is None:
                self.slots.publish(slot.ids[0], key)
            slot.release()

        self.endings.append((stored, end))

    def load_back(self) -> None:
        """Copy a stored block into a fresh one, and read it in a step behind that."""
        found = self.slots.get(self.rng.choice(self.keys))
        if found is None:
            return
        try:
            target = self.blocks.take(1)
        except PoolExhausted:
            return
        slot = self.slots.share([found])
        for fence in target.after:
            self.load.wait(fence)
        declared = [*self.touch("host", slot.ids, write=False), *self.touch("kv", target.ids, write=True)]
        loaded = self.load.submit(nothing, lambda: declared, label="load")
        read = self.touch("kv", target.ids, write=False)

        def gated() -> None:
            self.compute.wait(loaded)
            self.compute.touch(lambda: read)

        fence = self.compute.submit(gated, label="gated step")
        slot.release(after=[loaded])
        target.release(after=[fence])  # covers the load, which the step waits for

    def poll(self) -> None:
        for fence, end in [*self.endings]:
            if fence.poll():
                self.endings.remove((fence, end))
                end()

    def forget(self) -> None:
        self.rng.choice([self.blocks, self.slots]).forget_all()

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.rng.choice([self.launched, self.launched, self.load_back, self.poll, self.poll, self.forget])()
        while self.endings:
            self.device.wait_host(self.endings[0][0], reason="step")
            self.poll()
        self.device.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_correct_offloader_has_no_finding(policy: str) -> None:
    for seed in range(50):
        device, checker = simulated(policy, seed)
        try:
            Offloader(device, checker, random.Random(seed)).run(30)
        finally:
            device.kill()
        assert checker.findings == [], seed
        assert checker.check_idle() == []


# ---------------------------------------------------------------------- bounded


def size_of(checker: Checker) -> int:
    """How much the checker remembers, in objects of its own kind."""
    seen, todo = {id(checker)}, [vars(checker)]
    while todo:
        for held in gc.get_referents(todo.pop()):
            own = isinstance(held, (dict, list, tuple, set, deque)) or type(held).__module__.startswith("proof")
            if own and id(held) not in seen:
                seen.add(id(held))
                todo.append(held)
    return len(seen)


def test_the_checkers_memory_does_not_grow_in_a_long_run() -> None:
    device, checker = simulated("random", 0)
    runtime, sizes = Offloader(device, checker, random.Random(0)), []
    try:
        for _ in range(4):
            for _ in range(400):
                runtime.rng.choice([runtime.launched, runtime.load_back, runtime.poll, runtime.poll])()
            sizes.append(size_of(checker))
    finally:
        device.kill()
    assert max(sizes[1:]) < 1.3 * sizes[0], sizes


def test_finished_work_is_kept_while_a_stream_may_still_wait_for_it() -> None:
    device, checker = simulated("early", 0)
    try:
        device.allocate("kv", 64)
        compute, copy, load = (device.stream(name) for name in STREAMS)
        first = compute.submit(nothing, lambda: [Access("kv", 0, 64, write=True)])
        for _ in range(600):
            device.wait_host(copy.submit(nothing), reason="step")
        load.wait(first)
        load.submit(nothing, lambda: [Access("kv", 0, 64, write=False)])
        device.close()
    finally:
        device.kill()
    assert checker.findings == []


def test_seen_work_is_kept_while_older_work_is_pending() -> None:
    """The held up work was submitted before the other was seen, so it has to wait for it by itself; and it does."""
    device, checker = simulated("late", 0)
    try:
        device.allocate("kv", 64)
        compute, copy, load = (device.stream(name) for name in STREAMS)
        first = compute.submit(nothing, lambda: [Access("kv", 0, 64, write=True)])
        load.wait(first)
        load.submit(nothing, lambda: [Access("kv", 0, 64, write=False)])
        for _ in range(600):
            device.wait_host(copy.submit(nothing), reason="step")
            device.wait_host(first, reason="step")
        device.close()
    finally:
        device.kill()
    assert checker.findings == []


def entries(
    checker: Checker, device: SimDevice, count: int, *, each: Callable[[int], None] = lambda serial: None
) -> None:
    """Write `count` entries of a disk one after another, each under a number of its own, and give each up again."""
    stream = device.stream("disk-write")
    checker.backed("disk", "disk", 1)
    for serial in range(count):
        checker.took("disk", [serial], ())
        device.wait_host(
            stream.submit(nothing, lambda serial=serial: [Access("disk", serial, serial + 1, write=True)]),
            reason="step",
        )
        checker.published("disk", serial, b"key")
        checker.released("disk", [serial], ())
        each(serial)


def remembered(checker: Checker) -> set[int]:
    return set(checker._leases.pools["disk"].items)


def test_the_checkers_memory_does_not_grow_if_block_ids_are_never_reused() -> None:
    device, checker = simulated("early", 0)
    try:
        entries(
            checker,
            device,
            9000,
            each=lambda serial: checker.forgot("disk", [serial]) if serial not in (7, 8) else None,
        )
        checker.took("disk", [10_000], ())
        assert len(remembered(checker)) < 5000
        assert len(checker._memories.shadows["disk"].cells) < 5000
        assert {7, 8} <= remembered(checker), "these are still findable"
        assert checker.findings == []
    finally:
        device.kill()
