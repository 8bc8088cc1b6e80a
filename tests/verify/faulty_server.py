"""A server with a planted fault: a reused block is now and then another block. For tests of `verify`."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from proof.tiny_models import tiny_model_dir
from sidestream import AsyncLLM, OffloadConfig
from sidestream.schedule.prefix_cache import PrefixCache
from sidestream.server import RunningServer, ServerOptions, serve
from sidestream_kv.device.base import CopyBatch
from sidestream_kv.offload import loads
from sidestream_kv.offload.pacing import layers_batch
from sidestream_kv.offload.tiers.stack import BlockMemory
from sidestream_kv.types import Key


@contextmanager
def faulty_server(kind: str, share: float, directory: Path) -> Iterator[str]:
    """URL of a server of this process with a planted fault, a tiny model, host memory and a disk.

    hit     a prefix hit on the device returns another published block
    load    a load from host memory copies the slot beside the right one
    share   of the blocks
    """
    model = tiny_model_dir("llama", directory / "model", seed=0)
    offload = OffloadConfig(host="2MiB", disk=directory / "disk")
    ready: queue.Queue[RunningServer] = queue.Queue()
    with pytest.MonkeyPatch.context() as patch:
        {"hit": plant_hit, "load": plant_load}[kind](share, random.Random(1), patch)
        llm = AsyncLLM(model, engine_process=False, kv_memory="1MiB", offload=offload, compute_threads=1)
        options = {"on_ready": ready.put}
        thread = threading.Thread(target=serve, args=(llm, ServerOptions(port=0)), kwargs=options, daemon=True)
        thread.start()
        running = ready.get(timeout=60)
        try:
            yield running.url
        finally:
            running.stop()
            thread.join(60)
            asyncio.run(llm.close())


def plant_hit(share: float, rng: random.Random, patch: pytest.MonkeyPatch) -> None:
    sound = PrefixCache.on_device

    def on_device(cache: PrefixCache, keys: Sequence[Key]) -> list[int]:
        found, index = sound(cache, keys), cache._blocks._index
        others = [block for block in map(index.get, index) if block is not None and block not in found]
        return [rng.choice(others) if others and rng.random() < share else block for block in found]

    patch.setattr(PrefixCache, "on_device", on_device)


def plant_load(share: float, rng: random.Random, patch: pytest.MonkeyPatch) -> None:
    wrong: set[int] = set()

    def batch(
        source: BlockMemory, slots: Sequence[int], target: BlockMemory, blocks: Sequence[int], layers: Sequence[int]
    ) -> CopyBatch:
        if layers[0] == 0:  # the groups of further layers follow, with the same blocks
            wrong.clear()
            wrong.update(slot for slot in slots if rng.random() < share)
        read = [abs(slot - 1) if slot in wrong else slot for slot in slots]
        return layers_batch(source, read, target, blocks, layers)

    patch.setattr(loads, "layers_batch", batch)
