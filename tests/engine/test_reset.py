"""After a reset no earlier block is reused from any tier; running requests continue (H8)."""

from pathlib import Path

import pytest
from engine_rig import Rig, serving

from sidestream.errors import CallTimeout, EngineStopped, RequestRejected
from sidestream_kv.offload.tiers.stack import TierStack

PROMPT = list(range(1, 24))


def test_no_block_from_before_a_reset_is_reused(tmp_path: Path) -> None:
    rig = Rig(slots=24, disk=tmp_path)
    try:
        rig.ask(PROMPT)
        assert rig.ask(PROMPT).cached.total > 0
        rig.engine.flush(timeout_s=20)
        rig.engine.reset_prefix_cache()
        assert rig.ask(PROMPT).cached.total == 0
        assert rig.ask(PROMPT).cached.device > 0
    finally:
        rig.close()


def test_a_reset_changes_no_token_of_a_running_request(tmp_path: Path) -> None:
    rig = Rig(slots=24, disk=tmp_path)
    try:
        reply = rig.submit(PROMPT, max_tokens=40)
        reply.wait_for_tokens(3)
        rig.engine.reset_prefix_cache()
        assert reply.wait().token_ids() == rig.model.expected(PROMPT, 40)
    finally:
        rig.close()


def test_blocks_completed_after_a_reset_by_an_older_request_are_not_published(tmp_path: Path) -> None:
    """Its KV is of before the reset, all of it: the later blocks were computed from the earlier ones."""
    with serving(slots=24, disk=tmp_path) as rig:
        reply = rig.submit(PROMPT, max_tokens=40)
        reply.wait_for_tokens(3)
        rig.engine.reset_prefix_cache()
        rig.expect(reply, PROMPT, 40)
        rig.settle()
        assert keys_by_tier(rig) == (0, 0, 0)
        rig.ask(PROMPT, 40)
        rig.settle()
        assert min(keys_by_tier(rig)) > 0


@pytest.mark.parametrize(("tier", "place"), [("device", 0), ("host", 1), ("disk", 2)])
def test_a_reset_of_one_tier_drops_its_blocks_and_no_others(tier: str, place: int, tmp_path: Path) -> None:
    with serving(slots=24, disk=tmp_path) as rig:
        rig.ask(PROMPT)
        rig.settle()
        before = keys_by_tier(rig)
        assert min(before) > 0
        assert rig.engine.reset_prefix_cache(tier) == {tier: before[place]}
        assert keys_by_tier(rig) == tuple(0 if place == at else count for at, count in enumerate(before))
        rig.ask(PROMPT)  # with blocks of the other tiers


def test_a_reset_of_all_tiers_returns_the_number_of_blocks_that_each_held(tmp_path: Path) -> None:
    with serving(slots=24, disk=tmp_path) as rig:
        rig.ask(PROMPT)
        rig.settle()
        before = keys_by_tier(rig)
        assert rig.engine.reset_prefix_cache() == dict(zip(("device", "host", "disk"), before, strict=True))


def test_a_reset_of_a_tier_that_does_not_exist_names_those_that_do() -> None:
    with (
        serving(slots=24) as rig,
        pytest.raises(RequestRejected, match=r"^tier is 'disk': this engine has device, host$"),
    ):
        rig.engine.reset_prefix_cache("disk")


def test_a_reset_that_takes_too_long_raises_and_is_carried_out_later() -> None:
    with serving(slots=24) as rig:
        rig.ask(PROMPT)
        rig.settle()
        hold = rig.hold("compute")
        reply = rig.submit(PROMPT)
        rig.turn_until(lambda: rig.engine.parts.scheduler.num_running > 0)
        with pytest.raises(CallTimeout, match=r"within 0\.01 s: it is in a long step"):
            rig.engine.reset_prefix_cache(timeout_s=0.01)
        hold.release()
        rig.expect(reply, PROMPT)
        rig.turn()
        rig.settle()
        assert rig.ask(PROMPT).cached.total == 0


def test_a_flush_that_takes_too_long_says_what_is_left() -> None:
    with serving(slots=24) as rig:
        with rig.hold("store"):
            rig.ask(PROMPT)
            flushed = rig.engine.flush(timeout_s=0.01)
            assert not flushed and min(flushed.left.values()) > 0
        assert rig.engine.flush(timeout_s=20).left == {}


def test_a_reset_that_fails_in_the_tiers_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(slots=24)
    try:
        rig.ask(PROMPT)
        rig.settle()

        def fail(_: TierStack, tiers: object) -> None:
            raise RuntimeError("injected")

        monkeypatch.setattr(TierStack, "forget_all", fail)
        with pytest.raises(EngineStopped, match="the tiers were not reset, because transfers failed"):
            rig.engine.reset_prefix_cache()
    finally:
        rig.close()


def keys_by_tier(rig: Rig) -> tuple[int, int, int]:
    """On the device, in host memory, on disk."""
    assert rig.engine.parts.tiers is not None and rig.disk is not None
    return rig.engine.parts.blocks.num_keys, rig.engine.parts.tiers.host.pool.num_keys, len(rig.disk.index)
