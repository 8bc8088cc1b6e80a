"""A block is useless without those before it: every tier evicts the end of a sequence before its start."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from transfer_rig import Rig, keys

from sidestream_kv.device.host import HostStream
from sidestream_kv.types import Key

Full = tuple[Rig, Callable[[Key], bool]]
CONVERSATION = keys("a", "b", "c", "d")


def evicted_by_others(full_tier: Full, watched: Sequence[Key]) -> list[str]:
    """Fill the tier with others, one block at a time: which of the watched keys go, in the order in which they do."""
    rig, holds = full_tier
    names = dict(zip(CONVERSATION, "abcd", strict=True))
    left, gone = list(watched), []
    for other in range(8):
        rig.stored(keys(f"other {other}"))
        gone += [names[of] for of in left if not holds(of)]
        left = [of for of in left if holds(of)]
    return gone


def test_a_store_is_evicted_from_its_end(full_tier: Full) -> None:
    rig, _ = full_tier
    rig.stored(CONVERSATION, prefix=CONVERSATION)
    assert evicted_by_others(full_tier, CONVERSATION) == ["d", "c", "b", "a"]


def test_a_sequence_stored_in_two_parts_is_evicted_from_its_end(full_tier: Full) -> None:
    rig, _ = full_tier
    rig.stored(CONVERSATION[:2], prefix=CONVERSATION[:2])
    rig.stored(CONVERSATION[2:], prefix=CONVERSATION)
    assert evicted_by_others(full_tier, CONVERSATION) == ["d", "c", "b", "a"]


def test_storing_a_next_turn_protects_the_conversations_start_from_eviction(full_tier: Full) -> None:
    rig, holds = full_tier
    rig.stored(CONVERSATION[:3], prefix=CONVERSATION[:3])
    others = keys("w", "x", "y", "z")
    rig.stored(others)
    rig.stored(CONVERSATION[3:], prefix=CONVERSATION)
    rig.stored(keys(*range(4)))
    assert [holds(of) for of in CONVERSATION] == [True] * 4
    assert not any(holds(of) for of in others)


def test_sequences_stored_together_are_evicted_one_by_one_from_their_ends(full_tier: Full) -> None:
    rig, _ = full_tier
    lease, others = rig.blocks.take(8), keys("w", "x", "y", "z")
    fence = rig.fill(lease.ids, (*CONVERSATION, *others))
    rig.store(CONVERSATION, lease.ids[:4], fence, prefix=CONVERSATION)
    rig.store(others, lease.ids[4:], fence, prefix=others)
    rig.finish("compute", "store")
    lease.release()
    if rig.disk is not None:
        rig.finish("disk-write-0")
    assert evicted_by_others(full_tier, CONVERSATION) == ["d", "c", "b", "a"]


def test_superseded_blocks_are_evicted_first(full_tier: Full) -> None:
    rig, holds = full_tier
    others = keys("w", "x")
    rig.stored(others)
    rig.stored(CONVERSATION[:2])
    rig.stored(CONVERSATION[2:], superseded=CONVERSATION[:2])
    assert evicted_by_others(full_tier, CONVERSATION)[:2] == ["b", "a"]
    rig.stored(CONVERSATION[:2])
    assert not any(holds(of) for of in others)


def test_a_store_of_blocks_that_exist_already_also_supersedes(full_tier: Full) -> None:
    rig, _ = full_tier
    rig.stored(keys("w", "x"))
    rig.stored(CONVERSATION)
    rig.stored(CONVERSATION[2:], superseded=CONVERSATION[:2])
    assert evicted_by_others(full_tier, CONVERSATION)[:2] == ["b", "a"]


@pytest.mark.usefixtures("one_block_a_turn")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_store_supersedes_no_blocks(full_tier: Full, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    rig, _ = full_tier
    rig.stored(CONVERSATION, prefix=CONVERSATION)
    copy, copies = HostStream.copy, count()

    def sometimes(*args: Any) -> None:
        if next(copies) == failing:
            raise OSError("injected: the copy failed")
        copy(*args)

    lease = rig.blocks.take(2)
    fence = rig.fill(lease.ids, keys("y", "z"))
    with monkeypatch.context() as patched:
        patched.setattr(HostStream, "copy", sometimes)
        rig.store(keys("y", "z"), lease.ids, fence, superseded=CONVERSATION[:2])
        rig.finish("compute", "store")
    rig.let_go(lease)
    if rig.disk is not None:
        rig.finish("disk-write-0")
    assert next(copies) == 2
    assert evicted_by_others(full_tier, CONVERSATION)[0] == "d"
