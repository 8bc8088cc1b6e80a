"""The carrier with the real offload worker, on a simulated device whose checker must find nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from foreign_engine import LAYOUT, MemoryTier

from proof.torture.narrow import narrow_lanes
from sidestream_kv.connectors import carrier as carriers
from sidestream_kv.connectors.carrier import Carrier, Finished
from sidestream_kv.connectors.orders import LoadOrder, Order, Orders, PromoteOrder, Report, StoreOrder
from sidestream_kv.errors import DeviceLost, InvariantError, TierCorrupt
from sidestream_kv.kv.key_log import KeysRemoved, KeysStored
from sidestream_kv.offload.tiers.stack import BlockMemory, HostTier, TierStack
from sidestream_kv.types import HOST, Key
from sidestream_order.checker import simulated
from sidestream_order.sim import SimFence, SimStream

KEYS = tuple(bytes([number]) * 16 for number in range(8))


class Rig:
    """A carrier of one rank. `gates` hold back the streams whose names begin with one of them."""

    def __init__(
        self, seed: int = 0, *, disk: tuple[Key, ...] = (), pin_s: float = 0.0, tells_early: bool = True
    ) -> None:
        self.device, self.checker = simulated("random", seed)
        self.gates: set[str] = set()
        self.fails: Callable[[str, int], bool] = lambda stream, block: False
        self._gate_streams()
        self.compute = self.device.stream("compute")
        self.memory = self.device.allocate("kv", 16 * LAYOUT.block_bytes)
        self.device.pin_s = pin_s
        slots = self.device.allocate_host("host", 8 * LAYOUT.block_bytes, item_bytes=LAYOUT.block_bytes)
        host = HostTier(slots, LAYOUT, ready_bytes=self.device.ready_bytes(slots), tracer=self.device.tracer)
        self.disk = MemoryTier(self.device, 0, 16, lambda: False)
        for key in disk:
            grant = self.disk.index.reserve(key)
            assert grant is not None
            self.disk._entries[grant.entry], grant.written = bytes(LAYOUT.block_bytes), True
            self.checker.host_touched(lambda grant=grant: self.disk.index.accesses(grant), "found")  # type: ignore[misc]
            self.disk.index.publish(grant)
        self.carrier = Carrier(
            rank=3,
            device=self.device,
            memory=BlockMemory(self.memory, LAYOUT),
            tiers=TierStack(host, {"disk": self.disk}),
            stream=lambda: self.compute,
            load_deadline_s=1.0,
            tells_early=tells_early,
        )
        self.steps, self.orders, self.resets = 0, 1, 0
        self.done = Finished()

    def _gate_streams(self) -> None:
        make = self.device.stream

        def stream(name: str, **options: Any) -> SimStream:
            made: SimStream = make(name, **options)
            copy = made.copy

            def gated(batch: Any) -> None:
                self.wait(name)
                (block,) = {int(start) // LAYOUT.block_bytes for start in batch.target_starts} or {0}
                if self.fails(name, block):
                    raise TierCorrupt("injected")
                copy(batch)

            made.copy = gated  # type: ignore[method-assign]
            return made

        self.device.stream = stream  # type: ignore[method-assign]

    def wait(self, name: str) -> None:
        self.device.turns.block(lambda: not any(name.startswith(gate) for gate in self.gates), lambda: None)

    def write(self, block: int, value: int) -> SimFence:
        """Launch a step that fills a block."""

        def step() -> None:
            self.wait("compute")
            self.block(block)[:] = value

        return self.compute.submit(step, self._accesses(block, write=True), label="step")

    def block(self, block: int) -> Any:
        return self.memory.data.numpy()[block * LAYOUT.block_bytes : (block + 1) * LAYOUT.block_bytes]

    def value(self, block: int) -> set[int]:
        """What the next step reads in a block."""
        found: set[int] = set()
        fence = self.compute.submit(
            lambda: found.update(self.block(block).tolist()), self._accesses(block, write=False)
        )
        self.device.wait_host(fence, reason="step")
        return found

    def _accesses(self, block: int, *, write: bool) -> Any:
        return lambda: BlockMemory(self.memory, LAYOUT).accesses([block], write=write)

    @contextmanager
    def step(self, *orders: Order, resets: int = 0, tokens: int = 1, by_layer: bool = False) -> Iterator[None]:
        """Launch a step with these orders; the body is what is launched."""
        self.steps, self.resets = self.steps + 1, self.resets + resets
        self.carrier.begin(Orders(self.steps, self.resets, self.orders, orders, tokens), by_layer=by_layer)
        self.orders += len(orders)
        yield
        self.carrier.execute()
        self.carrier.execute()

    def send(self, *orders: Order, resets: int = 0, tokens: int = 1) -> None:
        with self.step(*orders, resets=resets, tokens=tokens):
            pass

    def report(self) -> Report:
        """The report after all that can happen has happened."""
        for _ in range(100):
            self.device.sleep(1e-3)
            done = self.carrier.finished()
            for name in ("loaded", "failed", "failed_blocks"):
                getattr(self.done, name).update(getattr(done, name))
        return self.carrier.report()

    def stored(self, *blocks: int) -> None:
        """Store these blocks, block `n` with key `n` and value `n`."""
        with self.step(StoreOrder(tuple(KEYS[block] for block in blocks), blocks)):
            for block in blocks:
                self.write(block, block)
        assert self.report().settled == self.orders - 1


@pytest.fixture
def rig() -> Iterator[Rig]:
    yield from checked(Rig())


def checked(rig: Rig) -> Iterator[Rig]:
    try:
        with narrow_lanes(turn_blocks=1):
            yield rig
            rig.gates.clear()
            rig.carrier.close()
            rig.carrier.close()
            rig.checker.check_idle()
        assert not rig.checker.findings
    finally:
        rig.device.kill()


def load(*blocks: int, to: int = 8, request: str = "r") -> LoadOrder:
    return LoadOrder(request, tuple(KEYS[block] for block in blocks), tuple(range(to, to + len(blocks))))


def stored_keys(report: Report, tier: str = HOST) -> set[Key]:
    return {key for each in report.changes if isinstance(each, KeysStored) and each.tier == tier for key in each.keys}


def test_a_store_waits_for_its_step(rig: Rig) -> None:
    rig.gates.add("compute")
    with rig.step(StoreOrder(KEYS[1:3], (1, 2))):
        rig.write(1, 1)
        rig.write(2, 2)
    report = rig.report()
    assert (report.rank, report.step, report.settled, report.changes) == (3, 1, 0, ())
    rig.gates.clear()
    report = rig.report()
    assert report.settled == 1 and stored_keys(report) == set(KEYS[1:3]) == stored_keys(report, "disk")
    rig.send(load(2, 1))
    rig.report()
    assert (rig.value(8), rig.value(9)) == ({2}, {1})


def test_a_load_waits_for_the_steps_before_its_own_but_not_for_its_own(rig: Rig) -> None:
    rig.stored(1)
    rig.gates.add("compute")
    rig.write(8, 99)  # a step of the block's last owner
    with rig.step(load(1)):
        pass
    assert rig.report().loaded == {} and rig.done == Finished()
    rig.gates.clear()
    assert rig.report().loaded == {2: True}
    assert rig.value(8) == {1}
    rig.gates.add("compute")
    with rig.step(load(1, to=9)):
        rig.write(7, 99)
    assert rig.report().loaded == {3: True}


def test_orders_that_were_not_executed_are_executed_by_the_next_step(rig: Rig) -> None:
    rig.write(1, 1)
    rig.carrier.begin(Orders(1, 0, 1, (StoreOrder(KEYS[1:2], (1,)),)))
    rig.carrier.begin(Orders(2, 0, 2, ()))
    assert rig.report().settled == 1


def test_a_load_is_told_after_its_last_copy(rig: Rig) -> None:
    rig.stored(1, 2)
    rig.gates.add("load")
    rig.send(load(1, 2))
    report = rig.report()
    assert (report.loaded, report.settled, rig.done.loaded) == ({}, 1, set())
    rig.gates.clear()
    assert rig.report().loaded == {2: True}
    assert (rig.done.loaded, rig.done.failed) == ({"r"}, set())
    assert rig.report().loaded == {}


def early(rig: Rig) -> None:
    """Let a load be told in an idle step, while its last copies are held back."""
    rig.stored(1)
    rig.gates.add("load")
    rig.send(load(1), tokens=0)
    assert rig.report().loaded == {2: True} and rig.done.loaded == {"r"}
    rig.send(tokens=0)
    assert rig.carrier._transfers.settled == 1


def test_no_load_is_told_early_where_steps_begin_before_their_layers() -> None:
    for rig in checked(Rig(tells_early=False)):
        rig.stored(1)
        rig.gates.add("load")
        rig.send(load(1), tokens=0)
        assert rig.report().loaded == {} and not rig.done.loaded
        rig.gates.clear()
        assert rig.report().loaded == {2: True}


@pytest.mark.parametrize("by_layer", [False, True])
def test_a_step_waits_for_loads_that_were_told_in_an_idle_step(rig: Rig, by_layer: bool) -> None:
    early(rig)
    found: set[int] = set()
    with rig.step(by_layer=by_layer):
        for layer in range(LAYOUT.num_layers) if by_layer else ():
            rig.carrier.wait_for_layer(layer)
        fence = rig.compute.submit(lambda: found.update(rig.block(8).tolist()), rig._accesses(8, write=False))
    rig.report()
    assert not fence.done
    rig.gates.clear()
    rig.report()
    assert fence.done and found == {1}


def test_a_step_that_was_launched_without_its_waits_is_an_error(rig: Rig) -> None:
    early(rig)
    with pytest.raises(InvariantError, match="without `wait_for_layer`"), rig.step(by_layer=True):
        pass


def test_a_load_that_fails_after_it_was_told_ends_the_engine(rig: Rig) -> None:
    early(rig)
    rig.fails = lambda stream, block: stream.startswith("load")
    rig.gates.clear()
    with pytest.raises(DeviceLost, match="restart the engine"):
        rig.report()


@pytest.mark.parametrize("seed", range(12))
def test_a_failed_load_is_told_as_failed_whenever_it_fails(seed: int) -> None:
    for rig in checked(Rig(seed)):
        rig.stored(1)
        rig.fails = lambda stream, block: stream.startswith("load")
        rig.send(load(1))
        while not rig.done.loaded:
            rig.device.turns.point()
            rig.done = rig.carrier.finished()
        assert (rig.done.failed, rig.done.failed_blocks) == ({"r"}, {8})
        assert rig.carrier.report().loaded == {2: False}


def test_a_failed_load_is_told_when_it_has_settled(rig: Rig) -> None:
    rig.gates.add("store")
    with rig.step(StoreOrder(KEYS[2:3], (2,))):
        rig.write(2, 2)
    rig.send(load(1))
    assert rig.report().loaded == {}  # an earlier order has not settled
    rig.gates.clear()
    assert rig.report().loaded == {2: False}


def test_a_block_that_is_gone_fails_the_load(rig: Rig) -> None:
    rig.stored(1)
    rig.send(load(1, 2))
    report = rig.report()
    assert (report.loaded, report.settled, rig.done.failed) == ({2: False}, 2, {"r"})


def test_a_reset_forgets_all_blocks_and_those_that_are_being_stored(rig: Rig) -> None:
    rig.stored(1)
    rig.gates.add("store")
    with rig.step(StoreOrder(KEYS[2:3], (2,))):
        rig.write(2, 2)
    rig.report()
    rig.send(load(1), StoreOrder(KEYS[3:4], (1,)), resets=2)
    report = rig.report()
    assert report.resets == 2
    assert {(each.tier, each.keys) for each in report.changes if isinstance(each, KeysRemoved)} == {
        (HOST, KEYS[1:2]),
        ("disk", KEYS[1:2]),
    }
    rig.gates.clear()
    report = rig.report()
    assert stored_keys(report) == {KEYS[3]}
    assert rig.done.failed == {"r"}


@pytest.mark.parametrize("seed", range(8))
def test_keys_of_settled_stores_are_reported_with_them(seed: int) -> None:
    for rig in checked(Rig(seed)):
        with rig.step(*(StoreOrder(KEYS[block : block + 1], (block,)) for block in range(4))):
            for block in range(4):
                rig.write(block, block)
        known: set[Key] = set()
        settled = 0
        while settled < 4:
            rig.device.turns.point()
            rig.carrier.finished()
            report = rig.carrier.report()
            known |= stored_keys(report)
            settled = report.settled
            assert known >= set(KEYS[:settled])


def test_blocks_on_disk_are_reported_in_parts_and_promoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carriers, "_MOST_KEYS", 2)
    for rig in checked(Rig(disk=KEYS[1:4])):
        assert [len(stored_keys(rig.carrier.report(), "disk")) for _ in range(3)] == [2, 1, 0]
        rig.send(PromoteOrder(KEYS[1:3]))
        report = rig.report()
        assert (report.promoted, stored_keys(report)) == ((1,), set(KEYS[1:3]))
        assert set(report.seconds) == {HOST, "disk"} and rig.report().promoted == ()


def test_stores_without_a_slot_are_asked_for_again_when_host_memory_has_grown() -> None:
    for rig in checked(Rig(pin_s=1.0)):
        with rig.step(StoreOrder(KEYS[1:4], (1, 2, 3))):
            for block in (1, 2, 3):
                rig.write(block, block)
        report = rig.report()
        assert len(stored_keys(report)) < 3
        for _ in range(10):
            report = rig.report()
            if report.again:
                return
        raise AssertionError("never asked again")


def test_close_finishes_the_transfers() -> None:
    for rig in checked(Rig()):
        with rig.step(StoreOrder(KEYS[1:3], (1, 2))):
            rig.write(1, 1)
            rig.write(2, 2)
    assert set(rig.disk.index) == set(KEYS[1:3])
