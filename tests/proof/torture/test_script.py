"""Scripted faults: the operation that is named suffers what is named, as often as is said, and the engine serves on."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from proof.torture import Asked, Event, Fault, Outcome, Workload, draw_workload, run_schedule
from proof.torture.script import DiskSlots, Script, ScriptedDevice, ScriptedTier
from proof.torture.workload import DAMAGE, FAULTS_OF, OF_STORE, EventKind, Operation
from sidestream.engine.failures import Failures
from sidestream.engine.loop import StepLoop
from sidestream.errors import InvariantError
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.offload.tiers.disk import DiskTier
from sidestream_kv.offload.tiers.index import Entry
from sidestream_order.sim import make_policy

FIRST, SECOND, THIRD = (tuple(range(start, start + 16)) for start in (1, 21, 41))
# A prompt comes back after others have taken its room on the device and in host memory.
VISITS = tuple(
    Asked(at=20 * number, prompt=prompt, max_tokens=2)
    for number, prompt in enumerate((FIRST, SECOND, THIRD, FIRST, SECOND, THIRD))
)


def workload(*faults: Fault, slots: int = 5) -> Workload:
    return Workload(0, VISITS, faults=faults, blocks=5, slots=slots, disk_blocks=40, max_running=1)


def run(given: Workload) -> Outcome:
    return run_schedule(given, make_policy("random", random.Random(0)), trace=True)


@pytest.mark.parametrize(
    ("operation", "kind"), [(operation, kind) for operation, kinds in FAULTS_OF.items() for kind in kinds]
)
def test_every_fault_befalls_its_operation_and_no_oracle_objects(
    operation: Operation, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    suffered: Counter[tuple[str, str]] = Counter()
    following = Script.next

    def counted(self: Script, asked: Operation) -> Fault | None:
        fault = following(self, asked)
        if fault is not None:
            suffered[asked, fault.kind] += 1
        return fault

    monkeypatch.setattr(Script, "next", counted)
    fault = Fault(operation, kind, first=1, seconds=4e-3 if kind in ("slow", "late") else 0.0)  # type: ignore[arg-type]
    # With little host memory blocks come back from the disk, with much from there.
    given = workload(fault, slots=24 if operation == "load" else 5)
    if operation in OF_STORE:  # and without a disk, from the store
        given = dataclasses.replace(given, store=True, disk_blocks=0, faults=(dataclasses.replace(fault, first=0),))
    assert run(given).findings == ()
    assert suffered == {(operation, kind): 1}


def test_a_fault_is_repeated_its_number_of_times() -> None:
    script = Script(workload(Fault("read", "lost", first=2, every=3), Fault("write", "full", first=1)))
    assert [script.next("read") is not None for _ in range(9)] == [
        False,
        False,
        True,
        False,
        False,
        True,
        False,
        False,
        True,
    ]
    assert [script.next("write") is not None for _ in range(4)] == [False, True, False, False]
    assert script.next("store") is None


def test_slowness_is_virtual_time_only() -> None:
    device = ScriptedDevice(make_policy("early", random.Random(0)), Script(workload()), tracer=None)
    times: list[float] = []

    def done() -> None:
        times.append(device.now())

    stream = device.stream("compute")
    stream.submit(lambda: device.play(Fault("forward", "slow", 0, seconds=3600.0), done, torn=done))
    stream.submit(lambda: device.play(Fault("forward", "late", 0, seconds=3600.0), done, torn=done))
    device.close()
    slow, late = times
    assert slow >= 3600.0  # begins late
    assert late < slow + 1.0  # its bytes move at once …
    assert device.now() >= 7200.0  # … and nobody learns of it


def test_a_crash_keeps_the_disk_and_unanswered_clients_ask_again() -> None:
    for kind in ("crash", "restart"):
        given = Workload(0, VISITS, (Event(47, kind),), blocks=5, slots=5, disk_blocks=40, max_running=1)  # type: ignore[arg-type]
        outcome = run(given)
        assert outcome.findings == ()
        texts = [line.text for line in outcome.lines]
        begun = next(at for at, text in enumerate(texts) if "begins again" in text)
        assert any("found on disk" in text for text in texts[begun:])
        assert sum(text.startswith("submits request 0") for text in texts) == 2


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[tuple[ScriptedTier, list[Entry]]]:
    """A tier on a real disk, and its three entries: the others are used after the first."""
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_tokens=8, dtype="float32")
    tier = DiskTier.open(tmp_path / "disk", layout=layout, fingerprint="made up", capacity_bytes=1 << 20)
    entries = []
    for number in range(3):
        grant = tier.index.reserve(bytes([number + 1]) * 16)
        assert grant is not None
        tier.write(grant, memoryview(bytearray([number]) * layout.block_bytes))
        tier.index.publish(grant)
        entries.append(grant.entry)
    device = ScriptedDevice(make_policy("early", random.Random(0)), Script(workload()), tracer=None)
    yield ScriptedTier(tier, device, lambda _: None, lambda _: entries[1:]), entries
    tier.close()
    device.close()


@pytest.mark.parametrize(
    ("fault", "changed"),
    [
        (Fault("read", "flipped", 0), [(0, 4223)]),
        (Fault("read", "flipped", 0, place=0.0), [(0, 0)]),
        (Fault("read", "flipped", 0, place=0.999, entries=2), [(0, 4218), (1, 4218)]),
        (Fault("read", "truncated", 0, place=0.0), [(0, 0)]),
    ],
)
def test_damage_is_done_at_its_place_and_to_as_many_slots_as_it_says(
    fault: Fault, changed: list[tuple[int, int]], scripted: tuple[ScriptedTier, list[Entry]]
) -> None:
    tier, entries = scripted
    slots = DiskSlots(tier._inner.directory)
    before = [slots.bytes_of(slots.slots[entry]) for entry in entries]
    tier._damage(entries[0], fault)
    found = []
    for number, entry in enumerate(entries):
        after = slots.bytes_of(slots.slots[entry])
        different = [at for at, byte in enumerate(after) if byte != before[number][at]]
        found += [(number, at) for at in (different[:1] if fault.kind == "truncated" else different)]
    assert found == changed


def test_swapped_slots_exchange_their_contents_with_the_last_used_ones(
    scripted: tuple[ScriptedTier, list[Entry]],
) -> None:
    tier, entries = scripted
    slots = DiskSlots(tier._inner.directory)
    before = [slots.bytes_of(slots.slots[entry]) for entry in entries]
    tier._damage(entries[0], Fault("read", "swapped", 0))
    assert [slots.bytes_of(slots.slots[entry]) for entry in entries] == [before[1], before[0], before[2]]


def test_workloads_damage_headers_blocks_and_several_files() -> None:
    faults = [fault for seed in range(200) for fault in draw_workload(seed).faults if fault.kind in DAMAGE]
    assert {fault.kind for fault in faults} == set(DAMAGE)
    assert any(fault.place < 52 / 4288 for fault in faults)
    assert any(1.0 > fault.place > 1 - 192 / 4288 for fault in faults)
    assert any(fault.entries > 1 for fault in faults)


@pytest.mark.parametrize("front_ends", [0, 2])
@pytest.mark.parametrize("kind", ["device_lost", "copies_lost"])
def test_after_a_lost_device_the_next_engine_answers_the_requests(kind: EventKind, front_ends: int) -> None:
    lost = dataclasses.replace(workload(), front_ends=front_ends, waiting=64, events=(Event(14, kind),))
    assert "device_loss" in lost.features
    outcome = run(lost)
    assert outcome.findings == ()
    ends = [line.text for line in outcome.lines if " ends: " in line.text]
    assert ends.count("request 1 ends: error") == 1
    assert {f"request {number} ends: length" for number in range(len(VISITS))} <= set(ends)


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_engine_that_loses_a_rank_ends_its_requests_and_the_next_one_answers_them(ranks: int) -> None:
    lost = dataclasses.replace(workload(), ranks=ranks, events=(Event(20, "rank_lost"),))
    assert "rank_loss" in lost.features
    outcome = run(lost)
    assert outcome.findings == ()
    texts = [line.text for line in outcome.lines]
    assert texts.count("loses a rank") == 1
    assert texts.count("request 1 ends: error") == 1
    assert {f"request {number} ends: length" for number in range(len(VISITS))} <= set(texts)


# `at`: a turn after which the engine is closed before it learns of a lost device.
@pytest.mark.parametrize(
    ("ranks", "kind", "end", "front_ends", "at"),
    [
        (1, "device_lost", "abort", 0, 21),
        (1, "device_lost", "abort", 2, 22),
        (2, "device_lost", "abort", 0, 23),
        (2, "device_lost", "abort", 2, 24),
        *((2, "rank_lost", "error", front_ends, 23) for front_ends in (0, 2)),
    ],
)
def test_a_close_right_after_a_loss_ends_the_running_request(
    ranks: int, kind: EventKind, end: str, front_ends: int, at: int
) -> None:
    lost = dataclasses.replace(
        workload(), front_ends=front_ends, ranks=ranks, waiting=64, events=(Event(at, kind),), closes_at=at
    )
    outcome = run(lost)
    assert outcome.findings == ()
    texts = [line.text for line in outcome.lines]
    assert [text for text in texts if text.startswith("request 1 ends: ")] == [f"request 1 ends: {end}"]


@pytest.mark.parametrize("first", [12, 13])
def test_close_ends_even_if_the_step_in_flight_fails_on_one_rank(first: int) -> None:
    failing = dataclasses.replace(workload(Fault("forward", "lost", first, 0)), ranks=2, closes_at=23)
    outcome = run(failing)
    assert outcome.findings == ()
    texts = [line.text for line in outcome.lines]
    assert "it failed" in "".join(texts)
    assert [text for text in texts if text.startswith("request 1 ends: ")] == ["request 1 ends: error"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_of_the_last_commit_of_a_close_is_noticed(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drain = StepLoop.drain

    def broken(self: StepLoop) -> None:
        drain(self)
        raise InvariantError("injected: a bug")

    monkeypatch.setattr(StepLoop, "drain", broken)
    outcome = run(dataclasses.replace(workload(), ranks=ranks, closes_at=23))
    assert any(finding.oracle == "error" and "injected: a bug" in finding.text for finding in outcome.findings)


@pytest.mark.parametrize("at", [14, 102, 104])
def test_clients_repeat_all_requests_after_device_loss_even_if_the_last_was_running(at: int) -> None:
    outcome = run(dataclasses.replace(workload(), events=(Event(at, "device_lost"),)))
    assert outcome.findings == ()
    texts = [line.text for line in outcome.lines]
    repeated = texts[texts.index("loses its device") :]
    assert {f"request {number} ends: length" for number in range(len(VISITS))} <= set(repeated)


def test_a_request_that_does_not_end_with_its_engine_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = dataclasses.replace(workload(), events=(Event(22, "device_lost"),))
    monkeypatch.setattr(Failures, "end_engine", lambda self, error: None)
    outcome = run(lost)
    assert any(
        finding.oracle == "answered" and "requests [1] did not end (H22)" in finding.text
        for finding in outcome.findings
    )
