"""Close: drain, abort, store complete blocks and end all threads, from any thread and during any transfer."""

import threading
import time
from pathlib import Path

import pytest
from engine_rig import PATIENCE_S, Reply, Rig, passed, prompts

from proof import faults
from proof.disk_slots import DiskSlots
from proof.toy import ToyModel
from sidestream.errors import EngineStopped
from sidestream_kv.offload.tiers.disk import DiskTier, entry_bytes


def closed_in_time(rig: Rig, **options: float) -> bool:
    closing = threading.Thread(target=lambda: rig.close(**options), daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    return not closing.is_alive()


def test_a_close_message_sent_while_the_inbox_is_read_is_not_lost() -> None:
    rig = Rig()
    until = time.monotonic() + PATIENCE_S

    def linger() -> None:  # on the engine thread: until close has left its message behind this one
        while rig.engine.parts.inbox.is_empty and time.monotonic() < until:
            pass

    rig.engine.parts.inbox.put(linger)
    assert closed_in_time(rig), "the engine sleeps on, though it was told to stop"


def test_close_lets_requests_finish_within_the_drain_timeout() -> None:
    rig = Rig()
    asked = prompts(41, 4)
    replies = [rig.submit(prompt, 20) for prompt in asked]
    rig.close(drain_s=PATIENCE_S)
    for reply, prompt in zip(replies, asked, strict=True):
        rig.expect(reply, prompt, 20)
    rig.check_idle()


def test_close_aborts_requests_after_the_drain_timeout() -> None:
    rig = Rig(max_running=2, slots=16)
    asked = prompts(42, 6)
    replies = [rig.submit(prompt, 60) for prompt in asked]
    rig.close()
    for reply, prompt in zip(replies, asked, strict=True):
        assert reply.reason in ("abort", "length")
        assert reply.token_ids() == rig.model.expected(prompt, 60)[: len(reply.token_ids())]
    assert rig.counted("requests_total", "abort") > 0
    rig.check_idle()


def test_close_ends_requests_that_are_still_in_the_inbox() -> None:
    rig = Rig()
    ready = threading.Event()
    rig.engine.parts.inbox.put(lambda: ready.wait(PATIENCE_S) and None)
    replies = [rig.submit(prompt, 60) for prompt in prompts(43, 3)]
    closing = threading.Thread(target=rig.close)
    closing.start()
    ready.set()
    closing.join(PATIENCE_S)
    for reply in replies:
        assert reply.reason == "abort"
    rig.check_idle()


def test_tokens_of_the_last_step_are_delivered_and_its_blocks_stored(tmp_path: Path) -> None:
    prompt = prompts(44, 1, longest=1)[0] + [6] * 15  # one step, four blocks, one token
    rig = Rig(slots=16, disk=tmp_path)
    launched = threading.Event()
    launch = rig.engine.parts.executor.launch

    def launch_and_tell(*args: object, **options: object) -> object:
        step = launch(*args, **options)  # type: ignore[arg-type]
        rig.engine.parts.inbox.put(rig.engine.loop.stop)  # the engine is told to stop while its step is on its way
        launched.set()
        return step

    rig.engine.parts.executor.launch = launch_and_tell  # type: ignore[assignment,method-assign]
    reply = rig.submit(prompt, 1)
    assert launched.wait(PATIENCE_S)
    rig.close()
    rig.expect(reply, prompt, 1)
    rig.check_idle()
    assert rig.disk is not None
    assert len(rig.disk.index) == 4


def test_repeated_closes_from_many_threads_flush_once(tmp_path: Path) -> None:
    rig = Rig(slots=16, disk=tmp_path)
    assert rig.engine.parts.transfers is not None
    flush, flushes = rig.engine.parts.transfers.flush, list[float]()

    def counted_flush(*, timeout_s: float) -> bool:
        flushes.append(timeout_s)
        return flush(timeout_s=timeout_s)

    rig.engine.parts.transfers.flush = counted_flush  # type: ignore[method-assign]
    for prompt in prompts(45, 4):
        rig.submit(prompt, 4)
    threads = [threading.Thread(target=rig.close) for _ in range(6)]
    failures: list[object] = []
    threading_hook, threading.excepthook = threading.excepthook, failures.append
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    finally:
        threading.excepthook = threading_hook
    assert failures == []
    rig.close()
    assert len(flushes) == 1  # the transfers are polled by one thread
    rig.check_idle()


def test_requests_submitted_after_close_are_refused() -> None:
    rig = Rig()
    rig.close()
    assert rig.engine.health().status == "draining"
    with pytest.raises(EngineStopped, match="the engine is draining"):
        rig.submit([1, 2, 3])
    with pytest.raises(EngineStopped):
        rig.engine.call(lambda: None)
    assert rig.engine.unfinished == 0


def test_every_request_accepted_during_close_gets_its_end() -> None:
    rig = Rig(max_waiting=1000)
    begun, accepted, refused = threading.Barrier(5), list[Reply](), list[Exception]()

    def client() -> None:
        begun.wait()
        for prompt in prompts(46, 40, longest=4):
            try:
                accepted.append(rig.submit(prompt, 3))
            except EngineStopped as error:
                refused.append(error)

    threads = [threading.Thread(target=client) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.wait()
    rig.submit([1], 1).wait()
    rig.close()
    for thread in threads:
        thread.join()
    assert len(accepted) + len(refused) == 160
    for reply in accepted:
        assert reply.reason in ("length", "abort")
    rig.check_idle()


def test_close_writes_stored_blocks_to_disk(tmp_path: Path) -> None:
    prompt = [9] * 24
    gate = threading.Event()
    rig = Rig(slots=16, disk=tmp_path)
    assert rig.disk is not None
    rig.disk.on_write = faults.slow(gate)
    rig.ask(prompt, 1)
    closing = threading.Thread(target=rig.close)
    closing.start()
    gate.set()
    closing.join(PATIENCE_S)
    assert len(rig.disk.index) == 6
    rig.check_idle()


def test_close_drops_unstarted_disk_writes_after_the_flush_timeout(tmp_path: Path) -> None:
    gate = threading.Event()
    rig = Rig(slots=16, disk=tmp_path)
    assert rig.disk is not None
    rig.disk.on_write = faults.slow(gate)
    rig.ask([9] * 24, 1)
    rig.turn_until(lambda: len(rig.disk.writes) == 1 if rig.disk else False)
    closing = threading.Thread(target=lambda: rig.close(flush_s=0.0))
    closing.start()
    rig.turn_until(lambda: rig.engine.parts.transfers is not None and rig.engine.parts.transfers._switches.abandoned)
    model = rig.model
    assert DiskSlots(tmp_path).in_use  # a write still runs
    gate.set()
    closing.join(PATIENCE_S)
    assert not DiskSlots(tmp_path).in_use
    assert len(rig.disk.writes) == 1
    rig.check_idle()
    with_one = DiskTier.open(
        tmp_path, layout=model.layout, fingerprint=model.fingerprint, capacity_bytes=10 * entry_bytes(model.layout)
    )
    assert len(with_one.index) == 1
    with_one.close()


def test_close_releases_the_disk_directory_even_if_the_last_poll_fails(tmp_path: Path) -> None:
    rig = Rig(slots=16, disk=tmp_path)
    rig.ask([1, 2, 3], 2)
    assert rig.engine.parts.transfers is not None

    def fail() -> None:
        raise RuntimeError("injected: a bug")

    rig.engine.parts.transfers.poll = fail  # type: ignore[method-assign]
    assert rig.submit([1, 2, 3], 2).reason == "error"
    rig.turn_until(lambda: rig.engine.health().status == "failed")
    with pytest.raises(RuntimeError, match="injected"):
        rig.close()
    again = Rig(model=ToyModel(), slots=16, disk=tmp_path)
    again.close()
    assert all(not stream._thread.is_alive() for stream in rig.device._streams.values())


def test_all_threads_have_ended_when_close_returns(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    rig = Rig(slots=16, disk=tmp_path)
    rig.ask([1, 2, 3], 2)
    passed(rig, "compute")
    rig.close()
    assert set(threading.enumerate()) <= before
