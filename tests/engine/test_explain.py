"""The engine explains why tokens of a prompt were reused or computed again."""

from pathlib import Path

import pytest
from engine_rig import Rig, prompts, serving

from proof.toy import StatefulToyModel, ToyModel
from sidestream.engine.stats import Asked, CacheHistory
from sidestream.types import CacheExplanation
from sidestream_kv.offload.loads import Loads
from sidestream_kv.types import DEVICE, LoadPlan

PROMPT = prompts(21, 1, longest=1)[0] + list(range(1, 30))  # 30 tokens, of which a cache may supply 7 blocks of 4
OTHER = [(token + 7) % 60 for token in PROMPT]


def explained(rig: Rig, name: str) -> CacheExplanation:
    found = rig.engine.explain_cache(name)
    assert found is not None
    return found


def reasons(rig: Rig, name: str) -> list[tuple[int, int, str, str]]:
    return [(one.start, one.stop, one.reason, one.tier) for one in explained(rig, name).stretches]


def test_a_prompt_without_an_earlier_one_was_not_seen() -> None:
    with serving() as rig:
        rig.ask(PROMPT, name="first")
        assert reasons(rig, "first") == [(0, 28, "not_seen", ""), (28, 30, "last_block", "")]
        found = explained(rig, "first")
        assert (found.relative, found.requests, found.complete) == (None, 0, True)
        assert rig.engine.explain_cache("unknown") is None


def test_the_nearest_relative_has_the_first_difference_and_the_tokens_around() -> None:
    changed = [*PROMPT[:13], 59, *PROMPT[14:]]
    with serving() as rig:
        rig.ask([*PROMPT[:5], 58], name="farther")
        rig.ask(PROMPT, name="first")
        rig.ask(changed, name="second")
        assert reasons(rig, "second") == [(0, 12, "reused", ""), (12, 28, "not_seen", ""), (28, 30, "last_block", "")]
        near = explained(rig, "second").relative
    assert near is not None
    assert near.shared_tokens == 13
    at = near.shared_tokens - near.start
    assert (near.own[at], near.other[at]) == (59, PROMPT[13])
    assert near.own == tuple(changed[near.start : 25])


def test_a_longer_conversation_reuses_the_answer_of_its_earlier_turn() -> None:
    with serving() as rig:
        answer = rig.ask(PROMPT, name="first").token_ids()
        rig.ask([*PROMPT, *answer[:6], 1], name="second")
        assert reasons(rig, "second")[0] == (0, 36, "reused", "")
        near = explained(rig, "second").relative
        assert near is not None
        assert near.shared_tokens == 36


def test_evicted_blocks_name_their_tier_and_the_time() -> None:
    with serving(blocks=14) as rig:
        rig.ask(PROMPT, name="first")
        rig.ask(OTHER, name="between")
        rig.ask(PROMPT, name="again")
        (reused, evicted, last) = explained(rig, "again").stretches
    assert (reused.reason, evicted.reason, last.reason) == ("reused", "evicted", "last_block")
    assert (evicted.start, evicted.stop, evicted.tier) == (reused.stop, 28, DEVICE)
    assert evicted.seconds_ago is not None
    assert 0 < evicted.seconds_ago < 20


def test_blocks_evicted_from_host_memory_last_name_host_memory() -> None:
    with serving(blocks=14, slots=16) as rig:
        rig.ask(PROMPT, name="first")
        rig.settle()
        for turn in range(3):
            rig.ask([(token + turn) % 60 for token in OTHER], name="between")
            rig.settle()
        rig.ask(PROMPT, name="again")
        assert reasons(rig, "again")[0] == (0, 28, "evicted", "host")


def test_a_reset_is_the_reason_and_forgets_the_tokens_of_prompts() -> None:
    with serving() as rig:
        rig.ask(PROMPT, name="first")
        rig.engine.reset_prefix_cache()
        rig.ask([*PROMPT[:29], 59], name="again")
        assert reasons(rig, "again")[0] == (0, 28, "reset", "")
        near = explained(rig, "again").relative
    assert near is not None
    assert (near.shared_tokens, near.other) == (28, ())


def test_a_prompt_of_another_salt_is_no_relative_and_shows_no_token() -> None:
    with serving() as rig:
        rig.ask(PROMPT, name="first", cache_salt="one")
        rig.ask(PROMPT, name="second", cache_salt="two")
        found = explained(rig, "second")
        assert found.relative is None
        assert reasons(rig, "second") == [(0, 28, "other_salt", ""), (28, 30, "last_block", "")]


def test_without_a_prefix_cache_that_is_the_reason() -> None:
    with serving(prefix_cache=False) as rig:
        rig.ask(PROMPT)
        rig.ask(PROMPT, name="again")
        assert reasons(rig, "again") == [(0, 30, "prefix_cache_off", "")]


def test_blocks_that_are_cheaper_to_compute_say_so() -> None:
    with serving(slots=24) as rig:
        rig.ask(PROMPT)
        rig.settle()
        rig.forget_device()
        transfers = rig.engine.parts.transfers
        assert transfers is not None
        transfers.worth_loading = lambda *_, **__: False  # type: ignore[method-assign]
        rig.ask(PROMPT, name="again")
        assert reasons(rig, "again") == [(0, 28, "cost", "host"), (28, 30, "last_block", "")]


def test_a_read_that_takes_too_long_is_the_reason(tmp_path: Path) -> None:
    with serving(slots=24, disk=tmp_path, load_deadline_s=0.05) as rig:
        rig.ask(PROMPT)
        rig.settle()
        rig.forget_device()
        rig.forget_host()
        with rig.hold("disk-read-0"), rig.hold("disk-read-1"):
            rig.ask(PROMPT, name="again")
        assert reasons(rig, "again") == [(0, 28, "load_late", "disk"), (28, 30, "last_block", "")]


def test_blocks_that_left_host_memory_before_their_load_name_the_failed_load(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(slots=24) as rig:
        rig.ask(PROMPT)
        rig.settle()
        rig.forget_device()
        tiers, load = rig.engine.parts.tiers, Loads.submit
        assert tiers is not None

        def too_late(self: Loads, job_id: int, plan: LoadPlan) -> None:
            tiers.host.pool.forget_all()
            load(self, job_id, plan)

        monkeypatch.setattr(Loads, "submit", too_late)
        rig.ask(PROMPT, name="again")
        assert reasons(rig, "again") == [(0, 28, "load_failed", ""), (28, 30, "last_block", "")]


def test_blocks_evicted_from_disk_last_name_the_disk(tmp_path: Path) -> None:
    with serving(slots=16, disk=tmp_path, disk_blocks=12) as rig:
        rig.ask(PROMPT)
        rig.settle()
        rig.forget_device()
        rig.forget_host()
        rig.ask(OTHER)
        rig.settle()
        rig.ask(PROMPT, name="again")
        assert ("evicted", "disk") in [found[2:] for found in reasons(rig, "again")]


def test_blocks_without_a_recurrent_state_at_their_end_say_so() -> None:
    with serving(model=StatefulToyModel()) as rig:
        rig.ask(PROMPT)
        rig.ask([*PROMPT[:18], 59, 58, 57], name="again")
        assert reasons(rig, "again") == [
            (0, 16, "no_checkpoint", DEVICE),
            (16, 20, "not_seen", ""),
            (20, 21, "last_block", ""),
        ]


def test_blocks_without_the_pages_of_their_window_say_so() -> None:
    with serving(model=ToyModel(window=6), slots=64) as rig:
        rig.ask(PROMPT)
        rig.settle()
        rig.forget_device()
        rig.ask([*PROMPT[:18], 59, 58, 57], name="again")
        assert reasons(rig, "again")[0] == (0, 16, "window", "host")


def test_a_later_request_is_no_relative() -> None:
    with serving() as rig:
        rig.ask(PROMPT, name="first")
        rig.ask([*PROMPT[:20], 59], name="second")
        assert explained(rig, "first").relative is None


def test_old_tokens_and_then_old_requests_are_forgotten() -> None:
    history = CacheHistory(lambda: 0.0, block_tokens=4)
    asked = Asked("", tuple(range(1 << 18)), 1 << 18, (), 0, ("", 0), None, 0.0, 0.0)
    history.remember(asked)
    history.remember(asked)
    assert [len(one.tokens) for one in history.requests()] == [1 << 18, 1 << 18]
    history.remember(asked)
    assert [len(one.tokens) for one in history.requests()] == [0, 1 << 18, 1 << 18]
    assert history.is_complete
    for _ in range(3000):
        history.remember(asked._replace(tokens=(1,), keys=(b"key",) * 8))
    assert len(history.requests()) <= 2048
    assert not history.is_complete


def test_old_evictions_are_forgotten() -> None:
    history = CacheHistory(lambda: 0.0, block_tokens=4)
    evicted = history.watch("host")
    evicted((b"old",))
    for number in range(40_000):
        evicted((b"%d" % number,))
    assert history.evictions({b"old", b"39999"}, until_s=0.0) == {b"39999": (0.0, "host")}
