"""`sidestream serve` with a planted fault: a reused block is now and then another block. For tests of `verify`.

    python tests/verify/faulty_server.py hit|load SHARE MODEL [OPTION ...]

hit     a prefix hit on the device returns another published block
load    a load from host memory copies the slot beside the right one
SHARE   of the blocks, for example 0.01
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

from sidestream.cli import main
from sidestream.schedule.prefix_cache import PrefixCache
from sidestream_kv.device.base import CopyBatch
from sidestream_kv.offload import loads
from sidestream_kv.offload.pacing import layers_batch
from sidestream_kv.offload.tiers.stack import BlockMemory
from sidestream_kv.types import Key


def plant_hit(share: float, rng: random.Random) -> None:
    """Make prefix hits return another block."""
    sound = PrefixCache.on_device

    def on_device(cache: PrefixCache, keys: Sequence[Key]) -> list[int]:
        found, index = sound(cache, keys), cache._blocks._index
        others = [block for block in map(index.get, index) if block is not None and block not in found]
        return [rng.choice(others) if others and rng.random() < share else block for block in found]

    PrefixCache.on_device = on_device  # type: ignore[method-assign,assignment]


def plant_load(share: float, rng: random.Random) -> None:
    """Make loads read the slot beside the right one."""
    wrong: set[int] = set()

    def batch(
        source: BlockMemory, slots: Sequence[int], target: BlockMemory, blocks: Sequence[int], layers: Sequence[int]
    ) -> CopyBatch:
        if layers[0] == 0:  # the groups of further layers follow, with the same blocks
            wrong.clear()
            wrong.update(slot for slot in slots if rng.random() < share)
        read = [abs(slot - 1) if slot in wrong else slot for slot in slots]
        return layers_batch(source, read, target, blocks, layers)

    loads.layers_batch = batch  # type: ignore[attr-defined,assignment]


if __name__ == "__main__":
    kind, share = sys.argv[1], float(sys.argv[2])
    {"hit": plant_hit, "load": plant_load}[kind](share, random.Random(1))
    sys.argv[1:3] = ["serve", "--single-process"]  # the engine in this process
    main()
