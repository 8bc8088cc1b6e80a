"""KV events: the keys that a subscriber counts from them are exactly those that the engine can reuse."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from engine_rig import PATIENCE_S, Rig

from proof.torture.events import EventReplay
from sidestream.config import EngineConfig, KVEventsConfig
from sidestream.engine.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    KVEvents,
    block_hash,
    encode,
    events_of,
)
from sidestream.engine.kv_sockets import KVEventSockets, check_endpoints, warn_if_open
from sidestream.errors import ConfigError
from sidestream.processes.child import config_of, plain
from sidestream_kv.kv.key_log import KeyLog, KeysCleared, KeysRemoved, KeysStored
from sidestream_kv.metrics import Metrics

PROMPT = list(range(1, 41))


# ---------------------------------------------------------------------- exactness


def test_an_event_has_the_tokens_of_its_blocks_and_their_parent() -> None:
    rig, batches = Rig(kv_events=KVEventsConfig()), list[KVEventBatch]()
    rig.engine.on_kv_events(lambda sequence, batch: batches.append(batch))
    rig.ask(PROMPT, 9)
    rig.ask([*PROMPT, *rig.model.expected(PROMPT, 9), 7, 7, 7, 7, 7, 7, 7, 7], 2)
    rig.close()
    size = rig.model.layout.block_tokens
    (cleared, *events) = [event for batch in batches for event in batch.events]
    assert isinstance(cleared, AllBlocksCleared)
    stored = [event for event in events if isinstance(event, BlockStored)]
    known: dict[int | None, list[int]] = {None: []}
    for event in stored:
        tokens = known[event.parent_block_hash]
        for index, name in enumerate(event.block_hashes):
            assert name not in known
            tokens = known[name] = [*tokens, *event.token_ids[index * size : (index + 1) * size]]
        assert (event.block_size, event.medium, event.lora_id, event.extra_keys) == (size, "GPU", None, None)
    whole = [*PROMPT, *rig.model.expected(PROMPT, 9), 7, 7, 7, 7, 7, 7, 7, 7]
    longest = max(known.values(), key=len)
    assert longest == whole[: len(longest)]
    assert len(longest) > len(PROMPT) + 9
    keys = rig.engine.parts.scheduler.keys_of(longest)
    assert list(known)[1:] == [block_hash(key) for key in keys]


def test_blocks_loaded_from_host_memory_are_reported_again() -> None:
    rig = Rig(blocks=14, slots=40, kv_events=KVEventsConfig())
    router = EventReplay(rig.engine)
    for first in (1, 2, 3, 1, 2):
        reply = rig.ask([first, *PROMPT], 4)
        rig.engine.flush(timeout_s=PATIENCE_S)
    assert reply.cached.host
    rig.close()
    router.compare()
    assert not router.wrong
    assert len(router.held["CPU"]) > 20


def test_the_cache_salt_is_reported_with_the_first_block_only() -> None:
    rig, batches = Rig(kv_events=KVEventsConfig()), list[KVEventBatch]()
    rig.engine.on_kv_events(lambda sequence, batch: batches.append(batch))
    rig.ask(PROMPT, 30, cache_salt="mine")
    rig.close()
    first, *later = [event for batch in batches for event in batch.events if isinstance(event, BlockStored)]
    assert first.extra_keys == (("mine",), *([None] * (len(first.block_hashes) - 1)))
    assert later
    assert {event.extra_keys for event in later} == {None}


def test_removals_of_a_tier_are_one_event_unless_another_event_is_between_them() -> None:
    removed, stored = ([kind("host", KEYS[at : at + 1]) for at in range(3)] for kind in (KeysRemoved, KeysStored))
    changes = [removed[0], removed[1], stored[0], removed[0], KeysRemoved("disk", KEYS[:1]), removed[2]]
    told = [(type(event), event.medium, event.block_hashes) for event in events_of(changes, block_tokens=2)]
    assert told == [
        (BlockRemoved, "CPU", tuple(HASHES[:2])),
        (BlockStored, "CPU", (HASHES[0],)),
        (BlockRemoved, "CPU", (HASHES[0],)),
        (BlockRemoved, "DISK", (HASHES[0],)),
        (BlockRemoved, "CPU", (HASHES[2],)),
    ]


def test_a_cache_salt_that_is_no_valid_utf8_is_reported_escaped() -> None:
    (event,) = events_of([KeysStored("device", KEYS[:1], None, (1, 2), "a\ud800")], block_tokens=2)
    assert isinstance(event, BlockStored)
    assert event.extra_keys == (("a\\ud800",),)
    encode(KVEventBatch(0.0, (event,), 0), encoding="map")


def test_an_engine_without_events_logs_no_keys() -> None:
    rig = Rig(slots=8)
    with pytest.raises(ConfigError, match="give it kv_events=KVEventsConfig"):
        rig.engine.on_kv_events(lambda sequence, batch: None)
    assert rig.engine.parts.blocks.key_log is None
    assert rig.engine.parts.tiers is not None
    assert rig.engine.parts.tiers.host.pool.key_log is None
    rig.close()


# ---------------------------------------------------------------------- the format, by the shapes of vLLM's own classes


def decoder_like_vllms(*fields_of_stored: tuple[Any, ...], removed: list[tuple[Any, ...]], array_like: bool) -> Any:
    """Decodes batches of classes with these fields."""

    def event(name: str, fields: list[tuple[Any, ...]]) -> Any:
        return msgspec.defstruct(name, fields, tag=name, array_like=array_like, omit_defaults=True, gc=False)

    kinds = event("BlockStored", list(fields_of_stored)) | event("BlockRemoved", removed)
    batch = msgspec.defstruct(
        "KVEventBatch",
        [
            ("ts", float),
            ("events", list[kinds | event("AllBlocksCleared", [])]),
            ("data_parallel_rank", int | None, None),
        ],
        array_like=True,
        omit_defaults=True,
        gc=False,
    )
    return msgspec.msgpack.Decoder(batch)


def current_decoder(*, array_like: bool) -> Any:
    """`array_like`: vLLM's until 0.23; else: since then."""
    return decoder_like_vllms(
        ("block_hashes", list[int | bytes]),
        ("parent_block_hash", int | bytes | None),
        ("token_ids", list[int]),
        ("block_size", int),
        ("lora_id", int | None),
        ("medium", str | None),
        ("lora_name", str | None),
        ("extra_keys", list[tuple[Any, ...] | None] | None, None),
        ("group_idx", int | None, None),
        ("kv_cache_spec_kind", str | None, None),
        ("kv_cache_spec_sliding_window", int | None, None),
        removed=[("block_hashes", list[int | bytes]), ("medium", str | None), ("group_idx", int | None, None)],
        array_like=array_like,
    )


def old_decoder() -> Any:
    """vLLM's 0.9."""
    return decoder_like_vllms(
        ("block_hashes", list[int]),
        ("parent_block_hash", int | None),
        ("token_ids", list[int]),
        ("block_size", int),
        ("lora_id", int | None),
        removed=[("block_hashes", list[int])],
        array_like=True,
    )


KEYS = tuple(bytes([255 - n] * 16) for n in range(3))
CHANGES = (
    KeysCleared(),
    KeysStored("device", KEYS[:2], None, (1, 2, 3, 4), "mine"),
    KeysStored("device", KEYS[2:], KEYS[1], (5, 6)),
    KeysStored("host", KEYS[:1]),
    KeysRemoved("disk", KEYS[:1]),
    KeysRemoved("disk", KEYS[1:2]),
    KeysRemoved("elsewhere", KEYS[:1]),
)
HASHES = [int.from_bytes(key[8:], "big") for key in KEYS]
BATCH = KVEventBatch(1.5, tuple(events_of(CHANGES, block_tokens=2)), 0)


@pytest.mark.parametrize(
    ("encoding", "decoder"), [("map", current_decoder(array_like=False)), ("array", current_decoder(array_like=True))]
)
def test_vllms_event_classes_decode_every_field(encoding: str, decoder: Any) -> None:
    batch = decoder.decode(encode(BATCH, encoding=encoding))
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 0)
    cleared, first, second, on_host, from_disk, elsewhere = batch.events
    assert type(cleared).__name__ == "AllBlocksCleared"
    assert first.block_hashes == HASHES[:2]
    assert (first.parent_block_hash, first.token_ids, first.block_size) == (None, [1, 2, 3, 4], 2)
    assert (first.medium, first.lora_id, first.lora_name) == ("GPU", None, None)
    assert first.extra_keys == [("mine",), None]
    assert (second.block_hashes, second.parent_block_hash) == (HASHES[2:], HASHES[1])
    assert (second.token_ids, second.extra_keys) == ([5, 6], None)
    assert (on_host.medium, on_host.block_hashes, on_host.token_ids) == ("CPU", HASHES[:1], [])
    assert (from_disk.medium, from_disk.block_hashes) == ("DISK", HASHES[:2])
    assert elsewhere.medium == "EXTERNAL"


def test_an_old_decoder_reads_the_array_encoding() -> None:
    batch = old_decoder().decode(encode(BATCH, encoding="array"))
    assert batch.events[1].block_hashes == HASHES[:2]
    assert batch.events[1].token_ids == [1, 2, 3, 4]
    assert batch.events[4].block_hashes == HASHES[:2]


def test_the_map_encoding_names_event_classes_as_vllm_does() -> None:
    ts, events, rank = msgspec.msgpack.decode(encode(BATCH, encoding="map"))
    assert (ts, rank) == (1.5, 0)
    assert events[0] == {"type": "AllBlocksCleared"}
    assert events[4] == {"type": "BlockRemoved", "block_hashes": HASHES[:2], "medium": "DISK"}
    assert [*events[2]] == [
        *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
    ]


# ---------------------------------------------------------------------- sockets


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def connected(context: Any, kind: int, endpoint: str) -> Any:
    """A socket; close it with `with`."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
    if kind == zmq.SUB:
        socket.subscribe("")
    socket.connect(endpoint)
    return socket


def replayed(context: Any, endpoint: str, first: int) -> list[tuple[int, bytes]]:
    """What a subscriber that has missed batches since `first` receives."""
    found = []
    with connected(context, zmq.DEALER, endpoint) as asking:
        asking.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            empty, sequence, batch = asking.recv_multipart()
            assert empty == b""
            if int.from_bytes(sequence, "big", signed=True) == -1:
                assert batch == b""
                return found
            found.append((int.from_bytes(sequence, "big"), batch))


def test_a_subscriber_and_a_replay_receive_what_a_callback_receives(tmp_path: Path, context: Any) -> None:
    config = KVEventsConfig(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", topic="kv")
    rig, told = Rig(kv_events=config), list[tuple[int, KVEventBatch]]()
    rig.engine.on_kv_events(lambda sequence, batch: told.append((sequence, batch)))
    heard = list[tuple[int, bytes]]()
    with connected(context, zmq.SUB, config.endpoint or "") as subscriber:
        rig.ask(PROMPT, 2)
        # The subscription may have come too late; and an answer may come before the batch of its last step.
        while not (missed := replayed(context, config.replay_endpoint or "", 0)):
            pass
        rig.engine.reset_prefix_cache()
        rig.ask(PROMPT, 12)
        rig.close()
        while not heard or heard[-1][0] < len(told) - 1:
            topic, sequence, batch = subscriber.recv_multipart()
            assert (topic, len(sequence)) == (b"kv", 8)
            heard.append((int.from_bytes(sequence, "big"), batch))
    assert [sequence for sequence, _ in told] == list(range(len(told)))
    expected = [(sequence, encode(batch, encoding="map")) for sequence, batch in told]
    assert missed == expected[: len(missed)]
    assert heard == expected[heard[0][0] :]
    assert heard[0][0] <= len(missed)
    resets = [event for _, batch in told[1:] for event in batch.events if isinstance(event, AllBlocksCleared)]
    assert len(resets) == 1


def test_blocks_on_disk_from_an_earlier_process_are_reported_at_start(tmp_path: Path, context: Any) -> None:
    rig = Rig(slots=8, disk=tmp_path / "kv")
    rig.ask(PROMPT, 2)
    rig.close()
    config = KVEventsConfig(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    rig = Rig(slots=8, disk=tmp_path / "kv", kv_events=config)
    rig.ask([9], 1)  # no whole block
    assert rig.engine.parts.tiers is not None and rig.engine.parts.tiers.persistent["disk"].index
    (batch,) = replayed(context, config.replay_endpoint or "", 0)
    cleared, stored = current_decoder(array_like=False).decode(batch[1]).events
    assert type(cleared).__name__ == "AllBlocksCleared"
    assert (stored.medium, stored.token_ids, stored.parent_block_hash) == ("DISK", [], None)
    assert set(stored.block_hashes) == {block_hash(key) for key in rig.engine.parts.tiers.persistent["disk"].index}
    rig.close()


def test_a_replay_starts_at_the_requested_batch_or_the_oldest_kept_one(tmp_path: Path, context: Any) -> None:
    sockets = KVEventSockets(KVEventsConfig(f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/b", buffer_batches=3))
    for sequence in range(5):
        sockets.send(sequence, b"%d" % sequence)
    assert replayed(context, sockets.replay_endpoint or "", 3) == [(3, b"3"), (4, b"4")]
    assert replayed(context, sockets.replay_endpoint or "", 0) == [(2, b"2"), (3, b"3"), (4, b"4")]
    assert replayed(context, sockets.replay_endpoint or "", 9) == []
    sockets.close()


def test_a_replay_of_6000_batches_is_complete(tmp_path: Path, context: Any) -> None:
    sockets = KVEventSockets(KVEventsConfig(f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/b"))
    for sequence in range(6000):
        sockets.send(sequence, bytes(500))
    assert [sequence for sequence, _ in replayed(context, sockets.replay_endpoint or "", 0)] == list(range(6000))
    sockets.close()


def test_a_subscriber_that_does_not_read_blocks_neither_send_nor_close(tmp_path: Path, context: Any) -> None:
    sockets = KVEventSockets(KVEventsConfig(f"ipc://{tmp_path}/a", buffer_batches=10))
    done = threading.Event()

    def send() -> None:
        for sequence in range(2000):
            sockets.send(sequence, bytes(10_000))
        sockets.close()
        done.set()

    with connected(context, zmq.SUB, sockets.endpoint) as subscriber:
        while not subscriber.poll(1):  # until it is connected
            sockets.send(0, b"")
        threading.Thread(target=send, daemon=True).start()
        assert done.wait(PATIENCE_S)


# ---------------------------------------------------------------------- the queue


def test_a_blocking_callback_does_not_delay_the_engine_and_misses_batches() -> None:
    metrics = Metrics()
    events = KVEvents(KVEventsConfig(buffer_batches=2), log=KeyLog(block_tokens=2), block_tokens=2, metrics=metrics)
    began, go_on, caught_up = threading.Event(), threading.Event(), threading.Event()
    heard: list[tuple[int, KVEventBatch]] = []

    def slow(sequence: int, batch: KVEventBatch) -> None:
        began.set()
        assert go_on.wait(PATIENCE_S)
        heard.append((sequence, batch))
        if len(heard) == 3:
            caught_up.set()

    events.subscribe(slow)
    events.start()
    tier = events.log.tier("host")

    def change() -> None:
        tier.stored(KEYS)
        events.flush()

    change()
    assert began.wait(PATIENCE_S)
    for _ in range(5):  # two of them wait, three are dropped
        change()
    go_on.set()
    assert caught_up.wait(PATIENCE_S)
    change()
    events.close()
    assert [sequence for sequence, _ in heard] == [0, 1, 2, 6]
    assert metrics.value("kv_event_batches_total", "dropped") == 3
    cleared = [isinstance(batch.events[0], AllBlocksCleared) for _, batch in heard]
    assert cleared == [True, False, False, True]  # at the start, and after the gap


def test_a_callback_that_raises_is_not_called_again(caplog: pytest.LogCaptureFixture) -> None:
    events = KVEvents(KVEventsConfig(), log=KeyLog(block_tokens=2), block_tokens=2, metrics=Metrics())
    calls, others = [], list[int]()

    def fail(sequence: int, batch: KVEventBatch) -> None:
        calls.append(sequence)
        raise ValueError("no")

    events.subscribe(fail)
    events.subscribe(lambda sequence, batch: others.append(sequence))
    for _ in range(2):
        events.log.tier("host").stored(KEYS)
        events.flush()
    events.close()
    assert (calls, others) == ([0], [0, 1])
    assert "is not called again" in caplog.text


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KVEventsConfig("localhost:5557"), r"endpoint is 'localhost:5557': give tcp://ADDRESS:PORT"),
        (lambda: KVEventsConfig("tcp://*:65536"), r"'tcp://\*:65536': give .* port of 1 to 65535"),
        (lambda: KVEventsConfig("tcp://*:0"), "port of 1 to 65535"),
        (lambda: KVEventsConfig("udp://*:5557"), "give tcp://ADDRESS:PORT"),
        (lambda: KVEventsConfig("ipc://"), "give tcp://ADDRESS:PORT"),
        (lambda: KVEventsConfig(f"ipc:///{'x' * 103}"), "at most 103 bytes"),
        (lambda: KVEventsConfig(5557), "endpoint is 5557"),  # type: ignore[arg-type]
        (lambda: KVEventsConfig(replay_endpoint="tcp://*:5558"), "endpoint is not given"),
        (lambda: KVEventsConfig("tcp://*:5557", "tcp://*:5557"), "are both tcp"),
        (lambda: KVEventsConfig(encoding="maps"), "no encoding maps; did you mean map"),
        (lambda: KVEventsConfig(buffer_batches=0), "buffer_batches is 0"),
        (lambda: KVEventsConfig(endpont="tcp://*:5557"), "did you mean endpoint"),  # type: ignore[call-arg]
        (lambda: EngineConfig(prefix_cache=False, kv_events=KVEventsConfig()), "leave prefix_cache on"),
    ],
)
def test_a_wrong_option_is_refused_with_a_remedy(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_engine_process_gets_the_whole_config() -> None:
    config = EngineConfig(kv_events=KVEventsConfig("tcp://*:5557", "tcp://*:5558", "kv", "array", 7))
    assert config_of(msgspec.msgpack.decode(msgspec.msgpack.encode(plain(config)))) == config


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "tcp://[::1]:5557", "tcp://*:5557", "ipc://kv/events"])
def test_tcp_and_ipc_endpoints_are_accepted(endpoint: str) -> None:
    assert KVEventsConfig(endpoint).endpoint == endpoint


def test_an_endpoint_in_use_is_refused(tmp_path: Path) -> None:
    first = KVEventSockets(KVEventsConfig("tcp://127.0.0.1:*", f"ipc://{tmp_path}/replay"))
    with pytest.raises(ConfigError, match=r"endpoint is tcp://127.0.0.1:\d+, which cannot be bound \(Address already"):
        check_endpoints(KVEventsConfig(first.endpoint))
    with pytest.raises(ConfigError, match=r"replay_endpoint is ipc://.*another process listens on it"):
        check_endpoints(KVEventsConfig("tcp://127.0.0.1:*", first.replay_endpoint))
    with pytest.raises(ConfigError, match="cannot be bound"):
        Rig(kv_events=KVEventsConfig(first.endpoint))
    config = KVEventsConfig(first.endpoint, first.replay_endpoint)
    first.close()
    check_endpoints(config)
    check_endpoints(config)


@pytest.mark.parametrize(
    ("endpoint", "warned"), [("tcp://*:*", True), ("tcp://0.0.0.0:*", True), ("tcp://127.0.0.1:*", False)]
)
def test_an_endpoint_reachable_from_other_machines_logs_a_warning(
    endpoint: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sockets = KVEventSockets(KVEventsConfig(endpoint))
    try:
        warn_if_open(sockets)
    finally:
        sockets.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned
    assert (f"KV events on {sockets.endpoint}: anyone who reaches this machine" in caplog.text) == warned


def test_an_error_about_a_missing_package_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"pip install 'sidestream\[kv-events\]'"):
        check_endpoints(KVEventsConfig("tcp://*:5557"))
    check_endpoints(KVEventsConfig())
