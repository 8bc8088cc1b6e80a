"""A rank other than 0: carries messages out, and reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sidestream.errors import InvariantError
from sidestream.ranks.follower import Follower
from sidestream.ranks.leader import ADAPTER_READS
from sidestream.ranks.messages import AdapterPut, AdapterRead, Copy, End, Failed, Passed, Ready, TierRead
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.offload.tiers.disk import DiskTier
from sidestream_kv.offload.tiers.stack import HostTier, TierStack

LAYOUT = KVLayout(1, 1, 2, 2, "float32")  # 32 bytes a block


class Rank:
    def __init__(self, device: CpuDevice) -> None:
        self.device = device
        self.inbox: deque[Any] = deque()
        self.reports: list[Any] = []
        self.memory = device.allocate("kv", 4 * LAYOUT.block_bytes)
        self.host = HostTier(device.allocate_host("host", 4 * LAYOUT.block_bytes), LAYOUT)
        executor: Any = None  # these tests launch no step
        self.follower = Follower(
            device=device,
            executor=executor,
            memory=self.memory,
            tiers=TierStack(self.host),
            take=lambda: self.inbox.popleft() if self.inbox else None,
            report=self.reports.append,
        )

    def settle(self) -> None:
        self.follower.turn()
        while self.follower.has_work:
            self.device.sleep(0.001)
            self.follower.turn()


@pytest.fixture
def rank() -> Any:
    device = CpuDevice(compute_threads=1)
    yield Rank(device)
    device.close()


def copy(stream: str, number: int, source: int, target: int, after: tuple[tuple[str, int], ...] = ()) -> Copy:
    size = LAYOUT.block_bytes
    starts = (np.array([at * size], "<i8").tobytes() for at in (source, target))
    return Copy(stream, number, "store", True, *starts, size, after)


def test_a_copy_moves_bytes_and_is_reported_when_it_is_done(rank: Rank) -> None:
    rank.memory.data[LAYOUT.block_bytes : 2 * LAYOUT.block_bytes] = 7
    rank.inbox.append(copy("store-0", 1, source=1, target=2))
    rank.settle()
    assert bytes(rank.host.slot(2)) == b"\7" * LAYOUT.block_bytes
    assert rank.reports == [Ready(4 * LAYOUT.block_bytes, True), Passed((("store-0", 1),))]


@pytest.fixture
def waits(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The waits of the rank's streams. Until the end of the test, no fence is seen done."""
    waits: list[str] = []

    def watched(make: Callable[[str], Any]) -> Callable[[str], Any]:
        def stream(name: str) -> Any:
            made = make(name)
            monkeypatch.setattr(
                made, "wait", lambda fence: waits.append(f"{name} waits for {fence.stream}:{fence.tick}")
            )
            return made

        return stream

    held = rank.device.stream("held").submit(lambda: None)
    monkeypatch.setattr(rank.device, "stream", watched(rank.device.stream))
    monkeypatch.setattr(rank.device, "worker", watched(rank.device.worker))
    monkeypatch.setattr(type(held), "poll", lambda fence: False)
    return waits


def test_a_copy_waits_for_the_fences_that_its_message_names(
    rank: Rank, waits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.inbox += [copy("store-0", number, 0, 0) for number in (1, 2, 3)]
    rank.inbox.append(copy("store-1", 1, 1, 1, (("store-0", 2),)))
    rank.follower.turn()
    monkeypatch.undo()
    assert waits == ["store-1 waits for store-0:2"]
    rank.settle()


def test_a_read_waits_for_the_fences_that_its_message_names(
    tmp_path: Path, rank: Rank, waits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier.open(tmp_path, layout=LAYOUT, fingerprint="f", capacity_bytes=1 << 20)
    rank.follower._tiers = TierStack(rank.host, {"disk": tier})
    rank.inbox += [copy("load-0", 1, 0, 0), TierRead("disk-read-0", 1, "disk", 0, b"k" * 16, 1, (("load-0", 1),))]
    rank.follower.turn()
    monkeypatch.undo()
    assert waits == ["disk-read-0 waits for load-0:1"]
    rank.settle()
    tier.close()


@pytest.mark.parametrize(
    "messages",
    [
        [copy("store-0", 2, 0, 0)],
        [copy("store-0", 1, 0, 0), copy("store-0", 1, 0, 0)],
        [copy("store-1", 1, 0, 0, (("store-0", 1),))],
    ],
    ids=["skipped", "twice", "names what was not sent"],
)
def test_messages_out_of_order_end_the_rank(rank: Rank, messages: list[Copy]) -> None:
    rank.inbox += messages
    with pytest.raises(InvariantError, match=r"came after|was not sent"):
        rank.follower.turn()


def test_a_failure_is_reported_before_the_work_counts_as_done(rank: Rank) -> None:
    def fail(batch: Any) -> None:
        raise OSError("the link is down")

    rank.inbox.append(copy("store-0", 1, 0, 0))
    make = rank.device.stream

    def broken(name: str) -> Any:
        stream = make(name)
        stream.copy = fail  # type: ignore[method-assign]
        return stream

    rank.device.stream = broken  # type: ignore[method-assign]
    rank.settle()
    assert rank.reports[1:] == [Failed("store-0", 1, "DeviceError", "the link is down"), Passed((("store-0", 1),))]


class Adapters:
    """Room for adapters, whose digests are their paths."""

    def __init__(self) -> None:
        self.held: dict[int, str] = {}

    def read(self, path: str) -> Any:
        return SimpleNamespace(digest=path)

    def put(self, slot: int, adapter: Any) -> None:
        self.held[slot] = adapter.digest


def with_adapters(rank: Rank) -> Adapters:
    room: Any = Adapters()
    stream = rank.device.stream("compute")
    rank.follower._adapters = room
    rank.follower.executor = SimpleNamespace(enqueue=lambda work, label: stream.submit(work, label=label))  # type: ignore[assignment]
    return room  # type: ignore[no-any-return]


def test_an_adapter_is_read_and_then_put_into_its_slot(rank: Rank) -> None:
    room = with_adapters(rank)
    rank.inbox.append(AdapterRead(1, "a", "a"))
    rank.settle()
    rank.inbox += [AdapterPut(1, 2), AdapterRead(2, "b", "b")]
    rank.settle()
    assert room.held == {2: "a"}
    assert rank.reports[1] == Passed(((ADAPTER_READS, 1),))


def test_an_adapter_that_differs_from_that_of_rank_0_is_a_failure(rank: Rank) -> None:
    with_adapters(rank)
    rank.inbox.append(AdapterRead(1, "a", "another"))
    rank.settle()
    message = "a has other matrices than rank 0 has read: load it again"
    assert rank.reports[1] == Failed(ADAPTER_READS, 1, "ModelError", message)


def test_the_end_message_is_handled_after_all_work(rank: Rank) -> None:
    rank.inbox += [copy("store-0", 1, 0, 0), End()]
    rank.settle()
    assert rank.follower.ended
    assert rank.reports[-1] == Passed((("store-0", 1),))


def test_work_is_never_reported_without_the_work_that_it_waited_for(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.inbox += [copy("store-0", 1, 0, 0), copy("store-1", 1, 1, 1, (("store-0", 1),))]
    polled: set[str] = set()

    def poll(fence: Any) -> bool:
        """Both copies end after the first was polled."""
        polled.add(fence.stream)
        return "store-1" in polled

    held = rank.device.stream("held").submit(lambda: None)
    monkeypatch.setattr(type(held), "poll", poll)
    rank.follower.turn()
    monkeypatch.undo()
    rank.settle()
    assert [report for report in rank.reports if isinstance(report, Passed)] == [
        Passed((("store-1", 1), ("store-0", 1)))
    ]
