"""Tiers in stores that several engines share: the contract, and what a dead, slow, full or lying store costs."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from proof.memory_store import MemoryStore
from proof.store_servers import MooncakeServer, ValkeyServer
from sidestream_kv.config import OffloadConfig
from sidestream_kv.connectors.tier_options import TierOptions
from sidestream_kv.errors import ConfigError, TierCorrupt, TierError, TierFull
from sidestream_kv.offload.tiers import mooncake, store_tier
from sidestream_kv.offload.tiers.base import Entry, PersistentTier, TierContext
from sidestream_kv.offload.tiers.mooncake import MooncakeStore
from sidestream_kv.offload.tiers.stack import open_tiers, share_of_rank
from sidestream_kv.offload.tiers.store_tier import StoreTier, value_bytes
from sidestream_order import tier_conformance
from sidestream_order.tier_conformance import TierConformance, content, holds, key, reads_as_corrupt, write

LAYOUT = tier_conformance._LAYOUT
CONTEXT = TierContext(LAYOUT, "a model")
WHY_NO_VALKEY = ValkeyServer.why_none()
WHY_NO_MOONCAKE = MooncakeServer.why_none()
needs_mooncake = pytest.mark.skipif(WHY_NO_MOONCAKE is not None, reason=str(WHY_NO_MOONCAKE))
needs_valkey = pytest.mark.skipif(WHY_NO_VALKEY is not None, reason=str(WHY_NO_VALKEY))


def open_redis(url: str, context: TierContext = CONTEXT, **options: object) -> StoreTier:
    (tier,) = open_tiers(OffloadConfig(tiers={"redis": {"url": url, **options}}), context).values()
    assert isinstance(tier, StoreTier)
    return tier


@pytest.fixture(scope="module")
def one_server() -> Iterator[ValkeyServer]:
    server = ValkeyServer()
    yield server
    server.close()


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    """For tests that end it."""
    server = ValkeyServer()
    yield server
    server.close()


@needs_valkey
class TestRedisTier(TierConformance):
    @pytest.fixture(autouse=True)
    def _server(self, one_server: ValkeyServer) -> None:
        self.server = one_server
        one_server.client().flushall()

    def open(self, context: TierContext, *, capacity_blocks: int) -> PersistentTier:
        return open_redis(self.server.url, context, capacity=capacity_blocks * value_bytes(context.layout))

    def damage(self, tier: PersistentTier, entry: Entry) -> None:
        client, (name,) = self.server.client(), self.server.client().keys(f"*:0-of-1:{entry.key.hex()}")
        client.setrange(name, client.strlen(name) - 1, bytes([client.get(name)[-1] ^ 1]))


@pytest.fixture(scope="module")
def mooncake_server() -> Iterator[MooncakeServer]:
    server = MooncakeServer()
    yield server
    server.close()


@needs_mooncake
class TestMooncakeTier(TierConformance):
    @pytest.fixture(autouse=True)
    def _server(self, mooncake_server: MooncakeServer, request: pytest.FixtureRequest) -> None:
        self.options = {"master": mooncake_server.address, "prefix": request.node.name}

    def open(self, context: TierContext, *, capacity_blocks: int) -> PersistentTier:
        capacity = capacity_blocks * value_bytes(context.layout)
        (tier,) = open_tiers(
            OffloadConfig(tiers={"mooncake": {**self.options, "capacity": capacity}}), context
        ).values()
        return tier

    def damage(self, tier: PersistentTier, entry: Entry) -> None:
        assert isinstance(tier, StoreTier)
        assert isinstance(tier._store, MooncakeStore)
        store, name = tier._store._store, tier._named(entry)[0]
        value = store.get(name)
        assert store.remove(name, True) == 0
        assert store.put(name, value[:-1] + bytes([value[-1] ^ 1])) == 0


@needs_valkey
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda value, other: value[:-1], id="short"),
        pytest.param(lambda value, other: value + b"x", id="long"),
        pytest.param(lambda value, other: value[:40], id="torn header"),
        pytest.param(lambda value, other: b"", id="empty"),
        pytest.param(lambda value, other: other, id="another key's value"),
        pytest.param(lambda value, other: bytes([value[0] ^ 1]) + value[1:], id="magic"),
        pytest.param(lambda value, other: value[:12] + other[12:28][::-1] + value[28:], id="another model"),
        pytest.param(lambda value, other: value[:70] + bytes([value[70] ^ 1]) + value[71:], id="checksum"),
        pytest.param(lambda value, other: value[:80] + other[80:], id="another key's block"),
    ],
)
def test_lying_store_gives_no_wrong_block(one_server: ValkeyServer, change) -> None:  # type: ignore[no-untyped-def]
    client = one_server.client()
    client.flushall()
    tier = open_redis(one_server.url)
    entry, other = write(tier, "a"), write(tier, "b")
    name, other_name = tier._named(entry)[0], tier._named(other)[0]
    client.set(name, change(client.get(name), client.get(other_name)))
    with pytest.raises(TierCorrupt, match=r"deleted|any more"):
        tier.read(entry, np.zeros(LAYOUT.block_bytes, np.uint8))
    assert reads_as_corrupt(tier, entry)
    assert holds(tier, "b")
    tier.close()


@needs_valkey
def test_value_of_another_key_is_not_found(one_server: ValkeyServer) -> None:
    client = one_server.client()
    client.flushall()
    tier = open_redis(one_server.url)
    a, b = write(tier, "a"), write(tier, "b")
    client.rename(tier._named(b)[0], tier._named(a)[0])
    assert tier.find([key("a"), key("b")]) == []
    tier.close()


@needs_valkey
def test_value_ends_after_its_time_to_live(one_server: ValkeyServer) -> None:
    client = one_server.client()
    tier = open_redis(one_server.url, ttl_s=1000)
    name = tier._named(write(tier, "a"))[0]
    assert 0 < client.pttl(name) <= 1_000_000
    client.pexpire(name, 500_000)
    assert holds(tier, "a")
    assert client.pttl(name) > 500_000  # a read starts it again
    tier.close()


@needs_valkey
def test_stalled_store_costs_one_timeout_and_then_nothing(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the pause is the test's: nothing waits for it."""
    now = 0.0
    monkeypatch.setattr(store_tier.time, "monotonic", lambda: now)
    tier = open_redis(server.url, timeout_s=0.2)
    entry = write(tier, "a")
    server.stall()
    out = np.zeros(LAYOUT.block_bytes, np.uint8)
    with pytest.raises(TierError, match="Timeout"):
        tier.read(entry, out)
    calls = (lambda: tier.read(entry, out), lambda: tier.find([key("b")]), lambda: write(tier, "c"))
    for call in calls:
        with pytest.raises(TierError, match=r"left alone for 5 s, because: redis at .*Timeout"):
            call()
    tier.index.drop([key("c")])
    server.go_on()
    now += store_tier.PAUSE_S
    assert holds(tier, "a")
    tier.close()


@needs_valkey
def test_dead_store_is_used_again_when_it_is_back(server: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(store_tier.time, "monotonic", lambda: now)
    tier = open_redis(server.url)
    entry = write(tier, "a")
    server.kill()
    with pytest.raises(TierError):
        tier.read(entry, np.zeros(LAYOUT.block_bytes, np.uint8))
    server.start()
    now += store_tier.PAUSE_S
    assert reads_as_corrupt(tier, entry)  # it has lost all values
    write(tier, "b")
    assert holds(tier, "b")
    tier.close()


@needs_valkey
def test_full_store_is_reported_as_full_and_still_read(server: ValkeyServer) -> None:
    tier = open_redis(server.url)
    entry = write(tier, "a")
    server.client().config_set("maxmemory", 1)
    grant = tier.index.reserve(key("b"))
    assert grant is not None
    with pytest.raises(TierFull):
        tier.write(grant, content("b"))
    assert not grant.written
    tier.index.abandon(grant)
    assert tier.find([key("a")]) == [entry]
    assert holds(tier, "a")
    tier.delete([entry])
    assert tier.find([key("a")]) == []
    tier.close()


@needs_valkey
def test_engine_starts_while_the_store_does_not_answer(server: ValkeyServer, caplog: pytest.LogCaptureFixture) -> None:
    server.kill()
    with caplog.at_level(logging.WARNING):
        open_redis(server.url).close()
    assert "blocks are neither stored there nor found" in caplog.text


@needs_valkey
def test_password_is_in_no_message(caplog: pytest.LogCaptureFixture) -> None:
    server = ValkeyServer("--requirepass", "sesame")
    try:
        with caplog.at_level(logging.DEBUG):
            with pytest.raises(ConfigError, match="check the redis url's user and password") as refused:
                open_redis(server.url.replace("unix://", "unix://:hunter2@"))
            open_redis("redis://:hunter2@127.0.0.1:1/0").close()
            for url in ("redis://:hunter2@host:port/0", "ftp://user:hunter2@host", "rediss://:hunter2@[host"):
                with pytest.raises(ConfigError) as unusable:
                    open_redis(url)
                assert "hunter2" not in str(unusable.value)
            tier = open_redis(server.url.replace("unix://", "unix://:sesame@"))
            write(tier, "a")
            server.kill()
            with pytest.raises(TierError) as failed:
                tier.read(Entry(key("a"), 1), np.zeros(LAYOUT.block_bytes, np.uint8))
            tier.close()
        for text in (str(refused.value), str(failed.value), caplog.text):
            assert "hunter2" not in text
            assert "sesame" not in text
    finally:
        server.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "has no url"),
        ({"url": "redis://h", "timeout": 1}, "no option of the tier redis timeout; did you mean timeout_s"),
        ({"url": "redis://h", "timeout_s": 0}, "timeout_s is 0: give a positive number"),
        ({"url": "redis://h", "ttl_s": "1h"}, "ttl_s is '1h': give a positive number"),
        ({"url": "redis://h", "capacity": "much"}, "redis capacity is 'much'"),
    ],
)
@needs_valkey
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_tiers(OffloadConfig(tiers={"redis": options}), CONTEXT)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"pip install 'sidestream-kv\[redis\]'"):
        open_redis("redis://host")


def test_ranks_find_a_block_that_all_of_them_hold() -> None:
    store = MemoryStore()
    zero, one = (store.tier(TierContext(LAYOUT, "a model", rank=rank, num_ranks=2)) for rank in range(2))
    entry = write(zero, "a")
    assert zero.find([key("a")]) == []
    write(one, "a")
    assert zero.find([key("a")]) == [entry]


@needs_valkey
def test_ranks_of_other_engines_meet_in_no_store(one_server: ValkeyServer) -> None:
    """Each has a share of a block, under the same key."""
    options = TierOptions(tiers={"redis": {"url": one_server.url}})
    zero, one = (options.open(f"tp-{rank}-of-2", LAYOUT, "weights") for rank in range(2))
    write(zero, "a")
    assert holds(zero, "a")
    assert not holds(one, "a")
    zero.close()
    one.close()


def test_ranks_may_share_a_store_but_not_a_tier_that_cannot_tell_them_apart() -> None:
    config = OffloadConfig(host=4096, tiers={"redis": {"url": "redis://h"}})
    assert share_of_rank(config, 1, 2).tiers == config.tiers
    with pytest.raises(ConfigError, match="tier sqlite cannot be used with 2 ranks"):
        share_of_rank(OffloadConfig(host=4096, tiers={"sqlite": {}}), 0, 2)


# ---------------------------------------------------------------------- Mooncake


def open_mooncake(**options: object) -> StoreTier:
    (tier,) = open_tiers(OffloadConfig(tiers={"mooncake": options}), CONTEXT).values()
    assert isinstance(tier, StoreTier)
    return tier


@needs_mooncake
def test_mooncake_that_lies_or_is_full_costs_hits(mooncake_server: MooncakeServer) -> None:
    tier = open_mooncake(master=mooncake_server.address, prefix="lies")
    a, b = write(tier, "a"), write(tier, "b")
    assert isinstance(tier._store, MooncakeStore)
    store, (name, other) = tier._store._store, (tier._named(entry)[0] for entry in (a, b))
    value, of_other = store.get(name), store.get(other)
    for wrong in (of_other, value[:80] + of_other[80:], value[:-1], value + b"x", value[:40]):
        assert store.remove(name, True) == 0
        assert store.put(name, wrong) == 0
        assert reads_as_corrupt(tier, a)
        assert store.is_exist(name) == 0
        assert store.put(name, value) == 0
    assert holds(tier, "a")
    assert store.put("filler", bytes(100 << 20)) < 0  # more than there is
    assert holds(tier, "b")
    tier.close()


@needs_mooncake
def test_mooncake_that_stalls_costs_a_timeout(mooncake_server: MooncakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that lends memory stops, and goes on later."""
    now, out = 0.0, np.zeros(LAYOUT.block_bytes, np.uint8)
    monkeypatch.setattr(store_tier.time, "monotonic", lambda: now)
    tier = open_mooncake(master=mooncake_server.address, prefix="stall", timeout_s=0.3)
    entries = [write(tier, name) for name in ("a", "b")]
    mooncake_server.lender.send_signal(signal.SIGSTOP)
    status = Path(f"/proc/{mooncake_server.lender.pid}/stat")
    while status.read_text().rpartition(")")[2].split()[0] != "T":  # all its threads have stopped
        time.sleep(0.01)
    try:
        with pytest.raises(TierError, match=r"did not answer within 0\.3 s"):
            tier.read(entries[0], out)
        with pytest.raises(TierError, match="left alone"):
            tier.read(entries[1], out)
    finally:
        mooncake_server.lender.send_signal(signal.SIGCONT)
    now += store_tier.PAUSE_S
    assert holds(tier, "a")
    tier.close()


@needs_mooncake
def test_mooncake_whose_master_dies_costs_hits() -> None:
    server = MooncakeServer()
    try:
        tier = open_mooncake(master=server.address)
        entry = write(tier, "a")
        server.close()
        for call in (lambda: tier.find([key("a")]), lambda: tier.read(entry, np.zeros(LAYOUT.block_bytes, np.uint8))):
            with pytest.raises(TierError):
                call()
        tier.close()
    finally:
        server.close()


@needs_mooncake
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "has no master: give its address"),
        ({"master": "h:1", "segments": "1GiB"}, "no option of the tier mooncake segments; did you mean segment"),
        ({"master": "h:1", "timeout_s": -1}, "mooncake timeout_s is -1: give a positive number"),
    ],
)
def test_wrong_options_of_mooncake_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_mooncake(**options)


class StuckClient:
    """A client of Mooncake whose reads end when they are told to."""

    def __init__(self) -> None:
        self.ends = threading.Event()
        self.buffers: list[int] = []
        self.reads = 0

    def setup(self, *given: object) -> int:
        return 0

    def register_buffer(self, start: int, size: int) -> int:
        return 0

    def get_into(self, name: str, start: int, size: int) -> int:
        self.buffers.append(start)
        if name == "stuck":
            self.reads += 1
            assert self.ends.wait(30)
            self.reads -= 1
        return -704

    def close(self) -> None:
        self.closed_after_reads = not self.reads


def test_a_late_call_of_mooncake_keeps_its_buffer_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    client = StuckClient()
    monkeypatch.setattr(mooncake, "_package", lambda: lambda: client)
    store = MooncakeStore("m:1", host="h", segment_bytes=0, protocol="tcp", devices="", value_bytes=100, timeout_s=0.05)
    head, block = bytearray(80), memoryview(bytearray(20))
    with pytest.raises(TierError, match="did not answer"):
        store.get("stuck", head, block)
    assert [store.get("other", head, block) for _ in range(3)] == [-1] * 3
    stuck, *others = client.buffers
    assert stuck not in others
    assert len(set(others)) == 1
    threading.Timer(0.1, client.ends.set).start()
    store.close()
    assert client.closed_after_reads
    assert len(store._free) == 2
