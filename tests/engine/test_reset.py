"""After a reset no earlier block is reused from any tier; running requests continue (H8)."""

from pathlib import Path

import pytest
from engine_rig import Rig, serving

from sidestream.errors import EngineStopped
from sidestream_kv.offload.tiers.stack import TierStack

PROMPT = list(range(1, 24))


def test_no_block_from_before_a_reset_is_reused(tmp_path: Path) -> None:
    rig = Rig(slots=24, disk=tmp_path)
    try:
        rig.ask(PROMPT)
        assert rig.ask(PROMPT).cached.total > 0
        rig.engine.flush(timeout_s=20)
        rig.engine.reset_cache()
        assert rig.ask(PROMPT).cached.total == 0
        assert rig.ask(PROMPT).cached.device > 0
    finally:
        rig.close()


def test_a_reset_changes_no_token_of_a_running_request(tmp_path: Path) -> None:
    rig = Rig(slots=24, disk=tmp_path)
    try:
        reply = rig.submit(PROMPT, max_tokens=40)
        reply.wait_for_tokens(3)
        rig.engine.reset_cache()
        assert reply.wait().token_ids() == rig.model.expected(PROMPT, 40)
    finally:
        rig.close()


def test_blocks_completed_after_a_reset_by_an_older_request_are_not_published(tmp_path: Path) -> None:
    """Its KV is of before the reset, all of it: the later blocks were computed from the earlier ones."""
    with serving(slots=24, disk=tmp_path) as rig:
        reply = rig.submit(PROMPT, max_tokens=40)
        reply.wait_for_tokens(3)
        rig.engine.reset_cache()
        rig.expect(reply, PROMPT, 40)
        rig.settle()
        assert keys_by_tier(rig) == (0, 0, 0)
        rig.ask(PROMPT, 40)
        rig.settle()
        assert min(keys_by_tier(rig)) > 0


def test_a_reset_that_fails_in_the_tiers_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(slots=24)
    try:
        rig.ask(PROMPT)
        rig.settle()

        def fail(_: TierStack) -> None:
            raise RuntimeError("injected")

        monkeypatch.setattr(TierStack, "forget_all", fail)
        with pytest.raises(EngineStopped, match="the tiers were not reset, because transfers failed"):
            rig.engine.reset_cache()
    finally:
        rig.close()


def keys_by_tier(rig: Rig) -> tuple[int, int, int]:
    """On the device, in host memory, on disk."""
    assert rig.engine.parts.tiers is not None and rig.disk is not None
    return rig.engine.parts.blocks.num_keys, rig.engine.parts.tiers.host.pool.num_keys, len(rig.disk.index)
