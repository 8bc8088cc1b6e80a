"""A small layout, blocks whose bytes follow from their key, and a store on a real disk tier with injected faults."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from proof.faults import FaultyTier
from sidestream_kv.connectors.block_store import BlockStore, FinishedJob
from sidestream_kv.connectors.chunks import ChunkLayout
from sidestream_kv.offload.tiers.disk import DiskTier, entry_bytes
from sidestream_kv.types import Key

LAYOUT = ChunkLayout(block_bytes=4096, block_tokens=16)
Bytes = npt.NDArray[np.uint8]


def key(number: int) -> Key:
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()


def block(number: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, LAYOUT.block_bytes, dtype=np.uint8)


def empty() -> Bytes:
    return np.zeros(LAYOUT.block_bytes, np.uint8)


def open_disk(directory: Path, *, blocks: int = 100) -> DiskTier:
    return DiskTier.open(directory, layout=LAYOUT, fingerprint="w", capacity_bytes=blocks * entry_bytes(LAYOUT))


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


class Rig:
    """A store on a disk tier. `tier` takes faults, and `clock` stands still."""

    def __init__(self, directory: Path, *, blocks: int = 100, **options: Any) -> None:
        self.directory = directory
        self.clock = Clock()
        self.tier = FaultyTier(open_disk(directory, blocks=blocks))
        self.store = BlockStore(self.tier, clock=self.clock, **options)
        self._next_job = 0

    def begin_store(self, *numbers: int) -> int:
        return self._begin(self.store.store, [(key(number), block(number)) for number in numbers])

    def begin_load(self, blocks: dict[int, Bytes]) -> int:
        return self._begin(self.store.load, [(key(number), out) for number, out in blocks.items()])

    def _begin(self, method: Callable[[int, list[tuple[Key, Bytes]]], None], blocks: list[tuple[Key, Bytes]]) -> int:
        self._next_job += 1
        method(self._next_job, blocks)
        return self._next_job

    def finish(self) -> list[FinishedJob]:
        self.store.drain()
        return self.store.take_finished()

    def put(self, *numbers: int) -> FinishedJob:
        self.begin_store(*numbers)
        (done,) = self.finish()
        return done

    def get(self, *numbers: int) -> tuple[FinishedJob, list[Bytes]]:
        blocks = {number: empty() for number in numbers}
        self.begin_load(blocks)
        (done,) = self.finish()
        return done, [*blocks.values()]

    def holds(self, *numbers: int) -> list[bool]:
        return [key(number) in self.store for number in numbers]
