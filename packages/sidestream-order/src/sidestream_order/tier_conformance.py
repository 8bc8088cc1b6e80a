"""Tests that every persistent tier must pass. Subclass `TierConformance` in a test module that pytest collects:

    class TestMyTier(TierConformance):
        def open(self, context, *, capacity_blocks): ...
        def damage(self, tier, entry): ...

The contract is `sidestream_kv.offload.tiers.base.PersistentTier`; docs/tiers.md explains it.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sidestream_kv.errors import ConfigError, TierCorrupt, TierLost
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.offload.tiers.base import BatchTier, Entry, PersistentTier, SharedTier, TierContext
from sidestream_kv.types import Key

_LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=16, block_tokens=8, dtype="float32")
_CONTEXT = TierContext(_LAYOUT, "a model")
_PATIENCE_S = 30.0


class TierConformance:
    """The tests. Subclasses implement `open` and `damage`. Each test opens one tier after another on the same medium;
    `directory` is a new directory for each test.
    """

    directory: Path

    # ------------------------------------------------------------------ hooks of the tier's author

    def open(self, context: TierContext, *, capacity_blocks: int) -> PersistentTier:
        """Open the tier on the test's medium, with space for `capacity_blocks`. It must find the entries that an
        earlier tier left on the medium.
        """
        raise NotImplementedError

    def damage(self, tier: PersistentTier, entry: Entry) -> None:
        """Change one bit of a published entry's block on the medium."""
        raise NotImplementedError

    def lose(self, tier: PersistentTier) -> bool:
        """Remove the medium while the tier is open. False if the tier cannot notice that, like the default."""
        return False

    # ------------------------------------------------------------------ setup and teardown

    def setup_method(self) -> None:
        """Make the directory."""
        self.directory = Path(tempfile.mkdtemp(prefix="sidestream-tier-"))
        self._opened: list[PersistentTier] = []

    def teardown_method(self) -> None:
        """Close every tier that a test opened, and remove the directory."""
        for tier in self._opened:
            tier.close()
        shutil.rmtree(self.directory)

    def _open(self, capacity_blocks: int = 8, context: TierContext = _CONTEXT) -> PersistentTier:
        tier = self.open(context, capacity_blocks=capacity_blocks)
        self._opened.append(tier)
        return tier

    # ------------------------------------------------------------------ reads and writes

    def test_published_block_is_read_back_bit_for_bit(self) -> None:
        """Two keys have different bytes."""
        tier = self._open()
        for name in ("a", "b"):
            write(tier, name)
        assert [holds(tier, name) for name in ("a", "b")] == [True, True]

    def test_block_is_found_after_publication_only(self) -> None:
        """A written entry is not visible before `publish`, and never after `abandon`."""
        tier = self._open()
        for name, ends in (("kept", tier.index.publish), ("dropped", tier.index.abandon)):
            grant = tier.index.reserve(key(name))
            assert grant is not None
            tier.write(grant, content(name))
            assert grant.written
            assert key(name) not in tier.index
            ends(grant)
        assert (key("kept") in tier.index, key("dropped") in tier.index) == (True, False)

    def test_entry_that_is_missing_is_corrupt(self) -> None:
        """`read` raises TierCorrupt for an entry that was never written."""
        tier = self._open()
        assert reads_as_corrupt(tier, Entry(key("never written"), 12345))

    def test_damaged_entry_is_corrupt_and_deleted(self) -> None:
        """A read detects every flipped bit and deletes the entry, so the next read is also a miss."""
        tier = self._open()
        entry = write(tier, "a")
        self.damage(tier, entry)
        assert [reads_as_corrupt(tier, entry) for _ in range(2)] == [True, True]

    def test_damaged_block_of_a_batch_is_the_only_one_that_fails(self) -> None:
        """The other blocks that are read at once arrive, and entries written at once are like those of `write`."""
        tier = self._open()
        if not isinstance(tier, BatchTier):
            return
        entries = write_all(tier, ("a", "b", "c"))
        self.damage(tier, entries[1])
        outs = [np.zeros(_LAYOUT.block_bytes, np.uint8) for _ in entries]
        failures = [type(failure) for failure in tier.read_all(entries[::-1], outs)]
        assert failures == [type(None), TierCorrupt, type(None)]
        assert [np.array_equal(outs[at], content(name)) for at, name in ((0, "c"), (2, "a"))] == [True, True]

    def test_key_can_be_written_again_after_it_was_forgotten(self) -> None:
        """The late deletion of the old entry does not affect the new one: their serials differ."""
        tier = self._open(capacity_blocks=1)
        old = write(tier, "a")
        tier.index.forget(old)
        new = write(tier, "a")  # the reservation of the new entry deletes the old entry
        assert new.serial > old.serial
        assert holds(tier, "a")
        # What is under a name of a shared tier is the same KV, whichever write it is from.
        assert isinstance(tier, SharedTier) or reads_as_corrupt(tier, old)

    def test_reads_and_writes_may_run_at_the_same_time(self) -> None:
        """`write` and `read` are called on several threads, which do not use the index."""
        tier = self._open(capacity_blocks=32)
        names = [str(number) for number in range(16)]
        entries = [write(tier, name) for name in names]
        grants = [tier.index.reserve(key(f"new {name}")) for name in names]
        failures: list[str] = []

        def read(name: str, entry: Entry) -> None:
            out = np.zeros(_LAYOUT.block_bytes, np.uint8)
            tier.read(entry, out)
            if not np.array_equal(out, content(name)):
                failures.append(name)

        def run(number: int) -> None:
            grant = grants[number]
            assert grant is not None
            try:
                tier.write(grant, content(f"new {names[number]}"))
                read(names[number], entries[number])
            except Exception as error:
                failures.append(f"{names[number]}: {error!r}")

        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(names))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_PATIENCE_S)
        assert failures == []
        for name, grant in zip(names, grants, strict=True):
            assert grant is not None
            tier.index.publish(grant)
            assert holds(tier, f"new {name}")

    # ------------------------------------------------------------------ capacity

    def test_tier_holds_what_its_capacity_allows_and_evicts_the_least_recently_used(self) -> None:
        """The write of a new entry deletes the victim from the medium."""
        tier = self._open(capacity_blocks=3)
        entries = {name: write(tier, name) for name in ("a", "b", "c")}
        tier.index.touch([key("a")])
        write(tier, "d")
        assert [name for name in ("a", "b", "c", "d") if key(name) in tier.index] == ["a", "c", "d"]
        assert [holds(tier, name) for name in ("a", "c", "d")] == [True] * 3
        assert reads_as_corrupt(tier, entries["b"])
        assert tier.index.stats.entries == 3
        assert tier.index.stats.evictions == 1

    def test_victim_that_is_gone_already_does_no_harm(self) -> None:
        """A read may have deleted a damaged victim; of several ranks, one may lack it."""
        tier = self._open(capacity_blocks=1)
        entry = write(tier, "a")
        self.damage(tier, entry)
        assert reads_as_corrupt(tier, entry)
        tier.index.forget(entry)
        write(tier, "b")  # its victim is the deleted entry
        assert holds(tier, "b")

    def test_pinned_entry_is_not_evicted(self) -> None:
        """A pinned entry is not evicted, because a read may need it."""
        tier = self._open(capacity_blocks=2)
        write(tier, "pinned")
        pin = tier.index.pin([key("pinned")])
        for name in ("a", "b", "c"):
            write(tier, name)
        assert reads(tier, pin.entries[0], "pinned")
        pin.release()

    # ------------------------------------------------------------------ restarts

    def test_blocks_are_found_after_a_restart(self) -> None:
        """New writes get serials that no entry on the medium has."""
        tier = self._open()
        entries = [write(tier, name) for name in ("a", "b", "c")]
        tier.close()
        again = self._open()
        assert [holds(again, name) for name in ("a", "b", "c")] == [True] * 3
        assert write(again, "d").serial > max(entry.serial for entry in entries)

    def test_forgotten_blocks_are_gone_after_a_close(self) -> None:
        """`close` deletes entries that the index has dropped but that are still on the medium."""
        tier = self._open()
        for name in ("a", "b"):
            write(tier, name)
        tier.index.drop([key("a")])
        tier.close()
        again = self._open()
        assert (holds(again, "a"), holds(again, "b")) == (False, True)

    def test_lower_capacity_evicts_at_open(self) -> None:
        """The most recently used entries stay. A shared tier opens without any."""
        tier = self._open(capacity_blocks=4)
        if isinstance(tier, SharedTier):
            return
        for name in ("a", "b", "c", "d"):
            write(tier, name)
        tier.close()
        again = self._open(capacity_blocks=2)
        assert len(again.index) == 2
        assert [holds(again, name) for name in ("c", "d")] == [True, True]

    def test_other_model_or_layout_finds_nothing(self) -> None:
        """The tier either raises ConfigError, or is empty."""
        tier = self._open()
        write(tier, "a")
        tier.close()
        other = KVLayout(num_layers=4, num_kv_heads=1, head_dim=8, block_tokens=8, dtype="float32")
        for context in (TierContext(_LAYOUT, "another model"), TierContext(other, "a model")):
            try:
                opened = self._open(context=context)
            except ConfigError:
                continue
            assert len(opened.index) == 0
            assert not holds(opened, "a")
            opened.close()

    def test_lost_medium_is_reported_by_a_write_and_used_again(self) -> None:
        """The first write after the loss raises TierLost. The next one has a new medium, without the old entries."""
        tier = self._open()
        write(tier, "a")
        if not self.lose(tier):
            return
        grant = tier.index.reserve(key("b"))
        assert grant is not None
        try:
            tier.write(grant, content("b"))
        except TierLost:
            tier.index.abandon(grant)
        assert not grant.written
        tier.index.clear()
        write(tier, "c")
        assert holds(tier, "c")
        tier.close()
        again = self._open()
        assert holds(again, "c")
        assert set(again.index) == {key("c")}

    # ------------------------------------------------------------------ tiers that other processes write, too

    def test_shared_tier_finds_blocks_of_another_process(self) -> None:
        """Only complete ones, and those before the first gap at least."""
        if (pair := self._open_shared()) is None:
            return
        writer, reader = pair
        assert list(reader.find([key("a")])) == []
        entries = [write(writer, name) for name in ("a", "b", "c")]
        found = reader.find([key(name) for name in ("a", "b", "c", "d")])
        assert [entry.key for entry in found] == [entry.key for entry in entries]
        assert [entry.key for entry in reader.find([key("d"), key("a")])] in ([], [key("a")])
        assert [holds(reader, name) for name in ("a", "b", "c")] == [True] * 3

    def test_shared_tier_deletes_no_newer_write(self) -> None:
        """Not as the victim of a write, and not because a reset has dropped it."""
        if (pair := self._open_shared(capacity_blocks=1)) is None:
            return
        first, second = pair
        old = write(first, "a")
        new = write(second, "a")
        assert old.serial != new.serial
        first.delete([old])
        assert holds(second, "a")
        second.delete([new])
        assert reads_as_corrupt(second, new)

    def test_block_of_a_shared_tier_is_found_when_all_ranks_hold_it(self) -> None:
        """Each rank has its share of a block under a name of its own."""
        contexts = [TierContext(_LAYOUT, "a model", rank=rank, num_ranks=2) for rank in range(2)]
        tiers = [self.open(context, capacity_blocks=8) for context in contexts] if self._is_shared() else []
        self._opened += tiers
        if not tiers:
            return
        zero, one = tiers
        assert isinstance(zero, SharedTier)
        entry = write(zero, "a")
        assert list(zero.find([key("a")])) == []
        assert reads_as_corrupt(one, entry)
        write(one, "a", content("the other share"))
        assert [found.key for found in zero.find([key("a")])] == [entry.key]
        assert reads(zero, entry, "a")
        assert reads(one, entry, "the other share")

    def _is_shared(self) -> bool:
        tier = self._open()
        tier.close()
        return isinstance(tier, SharedTier)

    def _open_shared(self, capacity_blocks: int = 8) -> tuple[SharedTier, SharedTier] | None:
        """Two tiers on one medium at the same time; None: the tier cannot do that."""
        if not self._is_shared():
            return None
        first, second = self._open(capacity_blocks), self._open(capacity_blocks)
        assert isinstance(first, SharedTier)
        assert isinstance(second, SharedTier)
        return first, second

    # ------------------------------------------------------------------ close

    def test_close_is_idempotent(self) -> None:
        """The engine may close a tier twice."""
        tier = self._open()
        tier.close()
        tier.close()


def key(name: str) -> Key:
    """A key of 16 bytes."""
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def content(name: str) -> npt.NDArray[np.uint8]:
    """Test content: the bytes of the block with this name."""
    seed = int.from_bytes(key(name), "little")
    return np.random.default_rng(seed).integers(0, 256, _LAYOUT.block_bytes, np.uint8)


def write(tier: PersistentTier, name: str, block: npt.NDArray[np.uint8] | None = None) -> Entry:
    """Write and publish a block, like the offload worker. `block`: other bytes than the content of this name."""
    grant = tier.index.reserve(key(name))
    assert grant is not None
    tier.write(grant, content(name) if block is None else block)
    tier.index.publish(grant)
    return grant.entry


def write_all(tier: BatchTier, names: Sequence[str]) -> list[Entry]:
    """Write blocks at once, and publish them."""
    grants = [grant for name in names if (grant := tier.index.reserve(key(name))) is not None]
    assert [*tier.write_all(grants, [content(name) for name in names])] == [None] * len(names)
    for grant in grants:
        tier.index.publish(grant)
    return [grant.entry for grant in grants]


def reads(tier: PersistentTier, entry: Entry, name: str) -> bool:
    """Whether the entry can be read, and holds the test content of this name."""
    out = np.zeros(_LAYOUT.block_bytes, np.uint8)
    tier.read(entry, out)
    return np.array_equal(out, content(name))


def holds(tier: PersistentTier, name: str) -> bool:
    """Whether the tier finds the key of this name, and the entry holds its test content."""
    if key(name) not in tier.index and isinstance(tier, SharedTier):
        tier.index.learn(tier.find([key(name)]))
    if key(name) not in tier.index:
        return False
    pin = tier.index.pin([key(name)])
    try:
        return reads(tier, pin.entries[0], name)
    finally:
        pin.release()


def reads_as_corrupt(tier: PersistentTier, entry: Entry) -> bool:
    """Whether a read of the entry raises TierCorrupt."""
    try:
        tier.read(entry, np.zeros(_LAYOUT.block_bytes, np.uint8))
    except TierCorrupt:
        return True
    return False
