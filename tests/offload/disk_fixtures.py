"""A small layout, blocks whose bytes follow from their key, and the steps of a store and a load."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from proof.disk_slots import DiskSlots
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.offload.tiers.disk import DiskTier, entry_bytes
from sidestream_kv.offload.tiers.index import Entry
from sidestream_kv.types import Key

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_tokens=16, dtype="bfloat16")
ENTRY_BYTES = entry_bytes(LAYOUT)
FINGERPRINT = "model-a"


def open_tier(
    directory: Path,
    *,
    layout: KVLayout = LAYOUT,
    fingerprint: str = FINGERPRINT,
    max_entries: int = 100,
    capacity_bytes: int | None = None,
) -> DiskTier:
    capacity = max_entries * entry_bytes(layout) if capacity_bytes is None else capacity_bytes
    return DiskTier.open(directory, layout=layout, fingerprint=fingerprint, capacity_bytes=capacity)


def key(number: int) -> Key:
    return xxhash.xxh3_128_digest(f"key {number}".encode())


def keys(*numbers: int) -> list[Key]:
    return [key(number) for number in numbers]


def block(of: Key) -> npt.NDArray[np.uint8]:
    seed = int.from_bytes(of, "little")
    return np.random.default_rng(seed).integers(0, 256, LAYOUT.block_bytes, dtype=np.uint8)


def store(tier: DiskTier, *wanted: Key) -> None:
    for one in wanted:
        grant = tier.index.reserve(one)
        assert grant is not None
        tier.write(grant, block(one))
        tier.index.publish(grant)


def load(tier: DiskTier, wanted: Key) -> npt.NDArray[np.uint8]:
    lease = tier.index.pin([wanted])
    out = np.zeros(LAYOUT.block_bytes, np.uint8)
    try:
        tier.read(lease.entries[0], out)
    finally:
        lease.release()
    return out


def holds(tier: DiskTier, wanted: Key) -> bool:
    """Whether the tier serves the key with the bytes that were stored."""
    return wanted in tier.index and bool((load(tier, wanted) == block(wanted)).all())


def entry_of(tier: DiskTier, wanted: Key) -> Entry:
    entry = tier.index.get(wanted)
    assert entry is not None
    return entry


def slot_of(tier: DiskTier, entry: Entry) -> int:
    slot = tier._medium._slot_of(entry)
    assert slot is not None
    return slot


def file_of(directory: Path, tier: DiskTier, entry: Entry) -> tuple[Path, int]:
    """The file of an entry's slot, and the slot's position in it."""
    return DiskSlots(directory).place(slot_of(tier, entry))[:2]


def records(tier: DiskTier) -> list[Entry]:
    """The entries of all records that are valid, in the order of their slots."""
    return list(DiskSlots(tier.directory).slots)


def snapshot(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Contents and modification time of every file, to see that nothing was changed."""
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in directory.rglob("*") if path.is_file()}


def crash(tier: DiskTier) -> None:
    """What kill -9 does to the tier: its lock goes, nothing else happens."""
    tier._medium.slots.close()
    tier._closed = True


def failing_with(number: int) -> Callable[..., object]:
    def fail(*_: object, **__: object) -> object:
        raise OSError(number, os.strerror(number))

    return fail
