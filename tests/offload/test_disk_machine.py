"""Any order of stores, loads, failures, damage, crashes and restarts, against a model that is a set of keys."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from disk_fixtures import LAYOUT, block, crash, key, open_tier
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from sidestream.errors import TierCorrupt, TierError, TierFull
from sidestream_kv.offload.tiers.index import Entry, ReadLease, WriteGrant
from sidestream_kv.types import Key

NUMBERS = st.integers(0, 5)


class DiskMachine(RuleBasedStateMachine):
    """Grants and leases stay open over other steps, as they do in the engine; I/O happens at any later step."""

    grants = Bundle("grants")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.TemporaryDirectory()
        self.directory = Path(self.scratch.name)
        self.visible: set[Key] = set()
        self.damaged: set[Entry] = set()
        self.open_grants: list[WriteGrant] = []
        self.open_leases: list[ReadLease] = []

    @initialize(max_entries=st.integers(1, 4))
    def create(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self.tier = open_tier(self.directory, max_entries=max_entries)

    @rule(target=grants, number=NUMBERS)
    def reserve(self, number: int) -> object:
        wanted = key(number)
        busy = wanted in self.visible or any(grant.entry.key == wanted for grant in self.open_grants)
        before = set(self.tier.index)
        try:
            grant = self.tier.index.reserve(wanted)
        except TierFull:
            pinned = {entry.key for lease in self.open_leases for entry in lease.entries}
            assert before <= pinned
            return multiple()
        assert (grant is None) == busy
        if grant is None:
            return multiple()
        assert len(before) - len(self.tier.index) <= 1
        self.visible = set(self.tier.index)
        self.open_grants.append(grant)
        return grant

    @rule(grant=grants)
    def write(self, grant: WriteGrant) -> None:
        if grant in self.open_grants and not grant.written:
            self.tier.write(grant, block(grant.entry.key))

    @rule(grant=grants, call=st.sampled_from(["open", "writev", "rename", "unlink"]))
    def fail_to_write(self, grant: WriteGrant, call: str) -> None:
        if grant not in self.open_grants or grant.written or (call == "unlink" and grant.victim is None):
            return
        with pytest.MonkeyPatch.context() as patch, pytest.raises(TierError):
            patch.setattr(os, call, no_space)
            self.tier.write(grant, block(grant.entry.key))
        self.end(grant)
        self.tier.index.abandon(grant)

    @rule(grant=consumes(grants))
    def publish_or_abandon(self, grant: WriteGrant) -> None:
        if grant not in self.open_grants:
            return
        self.end(grant)
        if grant.written:
            self.tier.index.publish(grant)
            self.visible |= set() if grant.void else {grant.entry.key}
        else:
            self.tier.index.abandon(grant)

    @rule(grant=consumes(grants))
    def abandon(self, grant: WriteGrant) -> None:
        if grant in self.open_grants:
            self.end(grant)
            self.tier.index.abandon(grant)

    @rule(target=leases, numbers=st.lists(NUMBERS, max_size=3))
    def pin(self, numbers: list[int]) -> ReadLease:
        wanted = [key(number) for number in numbers]
        lease = self.tier.index.pin(wanted[: self.tier.index.lookup(wanted)])
        self.open_leases.append(lease)
        return lease

    @rule(lease=leases)
    def read(self, lease: ReadLease) -> None:
        if lease not in self.open_leases:
            return
        for entry in lease.entries:
            out = np.zeros(LAYOUT.block_bytes, np.uint8)
            if entry in self.damaged:
                with pytest.raises(TierCorrupt):
                    self.tier.read(entry, out)
                if entry.key in self.visible and self.current(entry.key) == entry:
                    self.visible.discard(entry.key)
                self.tier.index.forget(entry)
            else:
                self.tier.read(entry, out)
                assert (out == block(entry.key)).all()

    @rule(lease=consumes(leases))
    def release(self, lease: ReadLease) -> None:
        if lease in self.open_leases:
            self.open_leases.remove(lease)
            lease.release()

    @precondition(lambda self: self.visible)
    @rule(position=st.integers(0, 4095 + LAYOUT.block_bytes), data=st.data())
    def damage(self, position: int, data: st.DataObject) -> None:
        entry = self.current(data.draw(st.sampled_from(sorted(self.visible))))
        if entry in self.damaged:
            return
        path = next(path for path in self.files() if path.name == f"{entry.key.hex()}-{entry.serial:016x}")
        content = bytearray(path.read_bytes())
        content[position] ^= 1
        path.write_bytes(content)
        self.damaged.add(entry)

    @rule()
    def clear(self) -> None:
        self.tier.index.clear()
        self.visible.clear()

    @rule(numbers=st.lists(NUMBERS, max_size=3))
    def touch(self, numbers: list[int]) -> None:
        self.tier.index.touch([key(number) for number in numbers])

    @rule(max_entries=st.integers(1, 4))
    def close_and_reopen(self, max_entries: int) -> None:
        for grant in self.open_grants:
            self.tier.index.abandon(grant)
        for lease in self.open_leases:
            lease.release()
        self.tier.close()
        assert len(self.files()) == len(self.visible)
        self.reopen(max_entries)
        assert len(self.tier.index) == min(len(self.visible), max_entries)
        assert set(self.tier.index) <= self.visible
        self.visible = set(self.tier.index)

    @rule(max_entries=st.integers(1, 4))
    def crash_and_reopen(self, max_entries: int) -> None:
        """Everything that was written and not yet deleted may be served, each key once; nothing visible is lost but to
        capacity.
        """
        crash(self.tier)
        on_disk = {bytes.fromhex(path.name[:32]) for path in self.files()}
        self.reopen(max_entries)
        assert self.visible <= on_disk
        assert len(self.tier.index) == min(len(on_disk), max_entries) == len(self.files())
        self.visible = set(self.tier.index)

    @invariant()
    def the_index_is_the_model(self) -> None:
        if hasattr(self, "tier"):
            assert set(self.tier.index) == self.visible

    @invariant()
    def the_disk_never_holds_more_than_its_capacity(self) -> None:
        if hasattr(self, "tier"):
            assert len(self.files()) <= self.max_entries

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            for number in range(6):
                if key(number) in self.visible and self.current(key(number)) not in self.damaged:
                    out = np.zeros(LAYOUT.block_bytes, np.uint8)
                    self.tier.read(self.current(key(number)), out)
                    assert (out == block(key(number))).all()
            self.tier.close()
        self.scratch.cleanup()

    def reopen(self, max_entries: int) -> None:
        self.open_grants, self.open_leases, self.max_entries = [], [], max_entries
        self.tier = open_tier(self.directory, max_entries=max_entries)
        self.damaged &= {self.current(one) for one in self.tier.index}  # a serial may come again after a restart

    def end(self, grant: WriteGrant) -> None:
        self.open_grants.remove(grant)

    def files(self) -> list[Path]:
        """Files of entries, complete or not."""
        return [path for folder in self.directory.iterdir() if folder.is_dir() for path in folder.iterdir()]

    def current(self, wanted: Key) -> Entry:
        return self.tier.index._published[wanted]


def no_space(*_: object, **__: object) -> object:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
