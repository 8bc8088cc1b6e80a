"""Engines that share a store: what one has stored, another finds; and no fault of the store costs more than hits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_rig import PATIENCE_S, Reply, Rig, prompts, serving

from proof.memory_store import Call, MemoryStore
from sidestream.errors import RequestRejected
from sidestream.types import PrefixQuery
from sidestream_kv.errors import TierError
from sidestream_kv.offload import loads, tier_io
from sidestream_kv.offload.tiers import store_tier
from sidestream_kv.offload.tiers.store_tier import StoreTier

PROMPT = prompts(21, 1, longest=1)[0] + list(range(1, 30))  # 30 tokens: 7 blocks that a cache may supply
REUSABLE = 28


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait for answers as long as a test may take: no machine is too slow for it."""
    monkeypatch.setattr(loads, "_FIND_PATIENCE_S", PATIENCE_S)


def fill(store: MemoryStore) -> None:
    """Another engine has answered PROMPT, and stored its blocks."""
    with serving(slots=24, store=store) as rig:
        rig.ask(PROMPT)
        rig.settle()


def stored_tokens(reply: Reply) -> int:
    return dict(reply.cached.by_tier).get("redis", 0)


class Gate:
    """Holds up the calls of one kind until it is opened."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, call: Call) -> None:
        if call == self._call:
            self.reached.set()
            assert self.opened.wait(PATIENCE_S)


# ------------------------------------------------------------------ it works


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_engine_finds_what_another_has_stored(store: MemoryStore, asynchronous: bool) -> None:
    fill(store)
    puts = store.calls.count("put")
    with serving(slots=24, store=store, asynchronous=asynchronous) as rig:
        assert stored_tokens(rig.ask(PROMPT)) == REUSABLE
        rig.settle()
        assert store.calls.count("put") == puts + 2  # the blocks of the answer; those that were found stay as they are
        assert rig.counted("transfers_total", "redis-find", "done") == 1


@pytest.mark.usefixtures("patient")
def test_a_prompt_that_continues_a_found_one_finds_the_rest(store: MemoryStore) -> None:
    longer = [*PROMPT, *range(30, 50)]
    with serving(slots=32, store=store) as first, serving(slots=32, store=store) as second:
        first.ask(PROMPT)
        first.settle()
        assert stored_tokens(second.ask(PROMPT)) == REUSABLE
        first.ask(longer)
        first.settle()
        assert second.ask(longer).cached.total == 48
        assert second.counted("transfers_total", "redis-read", "done") == 12


@pytest.mark.usefixtures("patient")
def test_engines_with_other_weights_or_salts_find_nothing(store: MemoryStore) -> None:
    fill(store)
    with serving(slots=24, store=store) as rig:
        assert rig.ask(PROMPT, cache_salt="another").cached.total == 0
        assert rig.counted("transfers_total", "redis-find", "done") == 1


def test_only_missing_blocks_are_asked_for(store: MemoryStore) -> None:
    with serving(slots=24, store=store) as rig:
        asked = lambda: store.calls.count("heads")  # noqa: E731
        rig.ask(PROMPT)
        rig.settle()
        assert asked() == 1
        rig.ask(PROMPT)
        rig.forget_device()
        rig.ask(PROMPT)
        assert asked() == 1  # the device held them, then the host
        rig.forget_device()
        rig.forget_host()
        assert stored_tokens(rig.ask(PROMPT)) == REUSABLE
        assert asked() == 1  # its own blocks are known
        rig.ask([1, 2, 3])
        assert asked() == 1  # there is no complete block


def test_no_question_if_computing_is_as_fast_as_an_answer(store: MemoryStore) -> None:
    fill(store)
    calls = len(store.calls)
    with serving(slots=24, store=store) as rig:
        assert rig.engine.parts.costs is not None
        rig.engine.parts.costs.prefill_rate = 1e6  # tokens per second: 28 of them take 28 us
        assert rig.ask(PROMPT).cached.total == 0
        assert "heads" not in store.calls[calls:]
        rig.engine.parts.costs.prefill_rate = 1e3
        assert rig.engine.parts.transfers is not None
        assert rig.engine.parts.transfers.find_patience(7) == pytest.approx(0.0028)
        assert rig.engine.parts.transfers.find_patience(10**6) == loads._FIND_PATIENCE_S


def test_an_engine_without_shared_tier_asks_nothing() -> None:
    with serving(slots=24) as rig:
        assert rig.engine.parts.transfers is not None
        assert rig.engine.parts.transfers.find_patience(100) == 0.0


# ------------------------------------------------------------------ faults


def test_a_late_answer_serves_the_next_request(store: MemoryStore) -> None:
    fill(store)
    with serving(slots=24, store=store) as rig:
        store.on_call = gate = Gate("heads")
        assert rig.ask(PROMPT).cached.total == 0  # it has gone on without an answer
        assert rig.counted("transfers_total", "find", "late") == 1
        rig.forget_device()
        rig.forget_host()
        gate.opened.set()
        rig.settle()
        assert stored_tokens(rig.ask(PROMPT)) == REUSABLE
        assert store.calls.count("heads") == 2  # the first engine's, and the late one


@pytest.mark.usefixtures("patient")
def test_requests_that_miss_the_same_blocks_share_a_question(store: MemoryStore) -> None:
    fill(store)
    with serving(slots=24, store=store) as rig:
        store.on_call = gate = Gate("heads")
        replies = [rig.submit(PROMPT) for _ in range(3)]
        assert gate.reached.wait(PATIENCE_S)
        rig.turn()
        gate.opened.set()
        for reply in replies:
            rig.expect(reply, PROMPT)
        assert store.calls.count("heads") == 2


def test_a_store_that_stalls_collects_few_questions(store: MemoryStore) -> None:
    with serving(slots=24, store=store, blocks=64) as rig:
        store.on_call = gate = Gate("heads")
        for number in range(4 + tier_io._MOST_QUESTIONS):
            rig.ask([number, *range(1, 12)])
        assert rig.sizes()["questions"] == tier_io._MOST_QUESTIONS
        assert rig.counted("transfers_total", "redis-find", "skipped") == 4
        gate.opened.set()
        rig.settle()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("call", ["heads", "get"])
def test_a_failing_store_costs_its_hits_only(store: MemoryStore, call: Call) -> None:
    fill(store)

    def fail(called: Call) -> None:
        if called == call:
            raise TierError("injected: the connection is lost")

    with serving(slots=24, store=store) as rig:
        store.on_call = fail
        assert rig.ask(PROMPT).cached.total == 0
        assert rig.ask(list(range(40, 60))).cached.total == 0


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda one, other: other, id="another key's value"),
        pytest.param(lambda one, other: one[:80] + other[80:], id="another key's block"),
        pytest.param(lambda one, other: one[:-1] + bytes([one[-1] ^ 1]), id="a flipped bit"),
        pytest.param(lambda one, other: one[:-1], id="short"),
    ],
)
def test_a_lying_store_changes_no_token(store: MemoryStore, change: Callable[[bytes, bytes], bytes]) -> None:
    """The values are swapped after they were found, so that their reads are what meets them."""
    fill(store)
    with serving(slots=24, store=store) as rig:

        def lie(call: Call) -> None:
            if call == "get" and store.calls.count("get") == 1:
                names, values = list(store.values), list(store.values.values())
                for name, one, other in zip(names, values, values[1:] + values[:1], strict=True):
                    store.values[name] = change(one, other)

        store.on_call = lie
        assert rig.ask(PROMPT).cached.total == 0
        assert rig.counted("transfers_total", "redis-read", "failed") > 0


@pytest.mark.usefixtures("patient")
def test_a_request_that_waits_for_an_answer_can_be_aborted(store: MemoryStore) -> None:
    with serving(slots=24, store=store) as rig:
        store.on_call = gate = Gate("heads")
        reply = rig.submit(PROMPT)
        assert gate.reached.wait(PATIENCE_S)
        rig.abort(reply)
        assert reply.reason == "abort"
        gate.opened.set()
        rig.settle()


@pytest.mark.usefixtures("patient")
def test_a_reset_reaches_blocks_in_the_store_and_answers_on_their_way(store: MemoryStore) -> None:
    """The engine deletes what it knows; an answer that was asked for before finds nothing."""
    fill(store)
    with serving(slots=24, store=store) as rig:
        gate = Gate("heads")
        store.on_call = gate
        reply = rig.submit(PROMPT)
        assert gate.reached.wait(PATIENCE_S)
        rig.engine.reset_prefix_cache()
        gate.opened.set()
        rig.expect(reply, PROMPT)
        assert reply.cached.total == 0
        rig.settle()
        rig.engine.reset_prefix_cache()
        rig.settle()
        assert store.values == {}
        assert rig.ask(PROMPT).cached.total == 0


def test_a_close_does_not_wait_for_questions_that_have_not_begun(store: MemoryStore) -> None:
    rig = Rig(slots=24, store=store)
    gate = Gate("heads")
    store.on_call = gate
    try:
        for number in range(3):
            rig.ask([number, *range(1, 12)])
        assert gate.reached.wait(PATIENCE_S)
        threading.Timer(0.2, gate.opened.set).start()
        rig.close(flush_s=0.05)
    finally:
        gate.opened.set()
    assert store.calls.count("heads") == 1


def test_a_store_is_left_alone_after_a_failure(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of one prompt do not fail one timeout after the other."""
    monkeypatch.setattr(loads, "_FIND_PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(store_tier, "PAUSE_S", 1000.0)
    fill(store)
    with serving(slots=24, store=store) as rig:

        def fail(called: Call) -> None:
            if called == "get":
                raise TierError("injected: timeout")

        store.on_call = fail
        assert rig.ask(PROMPT).cached.total == 0
        assert store.calls.count("get") <= 2  # one on each read stream
        assert rig.counted("transfers_total", "redis-read", "failed") == 7


@pytest.mark.parametrize("is_read", [False, True])
def test_an_entry_that_is_about_to_be_deleted_is_not_found(is_read: bool, store: MemoryStore) -> None:
    """A read of it has failed, so the next write deletes it, or the end of another read; until then, the store still
    has it.
    """
    fill(store)
    with serving(slots=24, store=store) as rig:
        assert rig.engine.parts.tiers is not None
        tier = rig.engine.parts.tiers.persistent["redis"]
        assert isinstance(tier, StoreTier)
        entry, *others = tier.find(rig.engine.parts.scheduler.keys_of(PROMPT, salt="")[: REUSABLE // 4])
        tier.index.learn([entry])
        lease = tier.index.pin([entry.key] if is_read else [])
        tier.index.forget(entry)
        rig.ask(PROMPT)
        rig.settle()
        lease.release()
        assert rig.counted("transfers_total", "redis-find", "done") == 1
        assert entry not in list(tier.index.entries)
        assert {*others} <= {*tier.index.entries}


# ------------------------------------------------------------------ hand-overs


def hand_over(rig: Rig, prompt: list[int], salt: str = "") -> int:
    query = PrefixQuery.of(prompt, cache_salt=salt)
    (stored,) = rig.engine.prefixes.run("hand_over_prefix", query, timeout_s=PATIENCE_S)
    return stored.tokens


@pytest.mark.usefixtures("patient")
def test_a_hand_over_ends_when_the_store_holds_the_prompt(store: MemoryStore) -> None:
    with serving(slots=24, store=store) as first, serving(slots=24, store=store) as second:
        store.on_call = gate = Gate("put")
        first.ask(PROMPT, 1)
        with ThreadPoolExecutor() as threads:
            stored = threads.submit(hand_over, first, PROMPT)
            assert gate.reached.wait(PATIENCE_S)
            assert not stored.done()
            gate.opened.set()
            assert stored.result(PATIENCE_S) == REUSABLE
        assert stored_tokens(second.ask(PROMPT)) == REUSABLE


@pytest.mark.usefixtures("patient")
def test_a_hand_over_tells_of_no_block_of_another_request(store: MemoryStore) -> None:
    with serving(slots=24, store=store) as rig:
        rig.ask(PROMPT, 1, cache_salt="another user's")
        rig.settle()
        assert hand_over(rig, PROMPT, "one user's") == hand_over(rig, [*PROMPT[1:], 1], "another user's") == 0
        assert hand_over(rig, PROMPT, "another user's") == REUSABLE


def test_a_failed_hand_over_says_how_much_was_stored_and_is_computed(store: MemoryStore) -> None:
    """The prompt that was handed over in part is computed from there, and another one completely."""

    def fail(called: Call) -> None:
        if called == "put" and store.calls.count("put") > 3:
            raise TierError("injected: the connection is lost")

    with serving(slots=24, store=store) as first, serving(slots=24, store=store) as second:
        store.on_call = fail
        first.ask(PROMPT, 1)
        assert hand_over(first, PROMPT) == 3 * 4
        assert hand_over(first, [1, 2, 3]) == 0  # not a block
        second.ask(PROMPT)
        second.ask(PROMPT[:8] + PROMPT[9:])


def test_a_hand_over_without_a_shared_store_is_refused() -> None:
    with (
        serving(slots=24) as rig,
        pytest.raises(RequestRejected, match="no tier that engines share: start it with --offload-tiers"),
    ):
        hand_over(rig, PROMPT)
