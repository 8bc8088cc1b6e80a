"""What other engines of a schedule's host do: they share its memory of a cache process, its disk directory and a store.

A *neighbour* is another engine as far as the engine under test can notice it: a pool and a tier of its own over what
both share. It writes, reads and leases blocks at moments that the policy chooses, also while a write or read of the
engine is half done, and checks every block that it finds.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import numpy as np

from proof.memory_store import Call, MemoryStore
from proof.torture.contents import Contents
from proof.torture.judge import differing
from proof.torture.script import Script, ScriptedDevice, ScriptedModel, ScriptedTier
from proof.torture.workload import DAMAGE, Fault, Workload
from sidestream.errors import TierCorrupt, TierError, TierFull
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.offload.tiers import stack
from sidestream_kv.offload.tiers.base import TierContext
from sidestream_kv.offload.tiers.entry_format import HEADER_BYTES, EntryFormat
from sidestream_kv.offload.tiers.index import Entry
from sidestream_kv.offload.tiers.shared_memory import SharedMemory
from sidestream_kv.offload.tiers.shared_pool import SharedPool
from sidestream_kv.offload.tiers.slots import Segments, table_bytes
from sidestream_kv.offload.tiers.store_tier import StoreTier
from sidestream_kv.types import Fence, Key
from sidestream_order.sim.stream import SimStream

OpenDisk = Callable[[], ScriptedTier]
"""Opens another tier in the directory of the engine's."""

# Virtual time between two halves of what a process does, so that others get a turn.
_MOMENT_S = 1e-6
_SERIAL_BITS = 32


class ScriptedStore(MemoryStore):
    """The shared store of a schedule. Its calls fail, and its values change, as the workload says."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script
        self._opened = 0
        self._device: ScriptedDevice | None = None
        self.on_call = self._befall

    def fill(self, context: TierContext, contents: Contents, seed: int) -> None:
        """Let another engine have stored half of the blocks."""
        rng, tier = random.Random(f"sidestream store {seed}"), self.tier(context)
        form = EntryFormat(context)
        for serial, (key, block) in enumerate(contents.blocks.items(), start=1):
            if rng.random() < 0.5:
                name, view = tier._own + key.hex(), memoryview(block)
                self.values[name] = form.header(Entry(key, serial), view) + block

    def open(self, context: TierContext, device: ScriptedDevice) -> StoreTier:
        """The tier of the next engine of the schedule."""
        self._opened, self._device = self._opened + 1, device
        tier = self.tier(context)
        tier.index._next_serial = self._opened << _SERIAL_BITS  # not the time, which differs between runs
        return tier

    def _befall(self, call: Call) -> None:
        """Let the fault of this call happen."""
        if call == "delete" or self._device is None:
            return
        fault = self._script.next(call)
        if fault is not None and fault.kind == "emptied":
            self.values.clear()
        elif fault is not None and fault.kind in DAMAGE:
            self._damage(fault)
        elif fault is not None:
            self._device.play(fault, lambda: None, torn=lambda: None)

    def _damage(self, fault: Fault) -> None:
        """Damage the first values of the store."""
        names = list(self.values)[: fault.entries]
        for name, other in zip(names, [*names[1:], *names[:1]], strict=True):
            value = self.values[name]
            at = min(len(value) - 1, int(fault.place * len(value)))
            if fault.kind == "swapped":  # a header and the block of another key
                self.values[name] = value[:HEADER_BYTES] + self.values[other][HEADER_BYTES:]
            elif fault.kind == "truncated":
                self.values[name] = value[:at]
            else:
                self.values[name] = value[:at] + bytes([value[at] ^ 0x10]) + value[at + 1 :]


class SharedHost:
    """Host memory as a cache process gives it to engines: a file in memory, and for each engine a descriptor of its
    own. The cache process itself takes no part in reads and writes.
    """

    def __init__(self, layout: KVLayout, num_slots: int) -> None:
        self._layout, self._num_slots, self._clients = layout, num_slots, 0
        self._fd = os.memfd_create("sidestream-torture", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, table_bytes(num_slots) + num_slots * layout.block_bytes)
        self._ends: list[socket.socket] = []

    def open(self, *given: object, **options: object) -> SharedMemory:
        """The share of another engine. Takes the arguments of `SharedMemory.open`."""
        ours, theirs = socket.socketpair()
        self._ends.append(ours)
        self._clients += 1
        fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        return SharedMemory(Path("cache"), theirs, fd, self._num_slots, self._clients, self._layout.block_bytes)

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Let engines that are built meanwhile get this memory."""
        with mock.patch.object(stack, "SharedMemory", self):
            yield

    def close(self) -> None:
        """Free the memory."""
        os.close(self._fd)
        for end in self._ends:
            end.close()


class Surroundings:
    """What the engines of a schedule share with each other and with a neighbour. Outlives them.

    find   receives what a neighbour finds wrong
    """

    def __init__(self, workload: Workload, contents: Contents, script: Script, find: Callable[[str], None]) -> None:
        self._workload, self._contents, self._find = workload, contents, find
        self._store = ScriptedStore(script) if workload.store else None
        self._hosts: dict[str, SharedHost] = {}
        self._damaged = "corrupt_tier" in workload.features
        self._neighbours = 0
        self._of_life: Neighbour | None = None
        self._stream: SimStream | None = None
        self._acting: Fence | None = None

    def store_of(self, model: ScriptedModel, device: ScriptedDevice) -> StoreTier | None:
        """The tier in the store for the next engine; None: there is none."""
        if self._store is None:
            return None
        context = TierContext(model.layout, model.fingerprint, device.tracer)
        if not self._store.calls:
            self._store.fill(context, self._contents, self._workload.seed)
        return self._store.open(context, device)

    def host_of(self, model: ScriptedModel) -> AbstractContextManager[object]:
        """A context manager: engines that are built meanwhile get the shared memory of this model, if there is one."""
        return self._host(model).serving() if self._workload.shared_memory else contextlib.nullcontext()

    def _host(self, model: ScriptedModel) -> SharedHost:
        if model.fingerprint not in self._hosts:
            self._hosts[model.fingerprint] = SharedHost(model.layout, self._workload.slots)
        return self._hosts[model.fingerprint]

    def join(
        self, model: ScriptedModel, device: ScriptedDevice, disk: ScriptedTier | None, open_disk: OpenDisk
    ) -> None:
        """Start a neighbour of an engine that has just started, if the workload has one."""
        workload = self._workload
        if not workload.shared_memory and not workload.shared_disk:
            return
        memory, theirs = None, None
        if workload.shared_memory:
            memory = self._host(model).open()
        if workload.shared_disk and disk is not None:
            theirs = open_disk()
            disk.refresh = disk.inner.refresh  # type: ignore[attr-defined]
            for tier in (disk, theirs):
                interrupt_io(tier.inner._medium.slots.segments, device)
        self._neighbours += 1
        seed = workload.seed + 1000 * self._neighbours
        self._of_life = Neighbour(
            self._contents, seed, memory=memory, disk=theirs, find=self._find, damaged=self._damaged
        )
        self._stream, self._acting = device.worker("neighbour"), None

    def turn(self, device: ScriptedDevice) -> None:
        """Let the neighbour begin something, unless it is busy."""
        neighbour = self._of_life
        if neighbour is not None and self._stream is not None and not self.is_busy and not device.is_lost:
            self._acting = self._stream.submit(lambda: neighbour.act(device), label="a neighbour")

    @property
    def is_busy(self) -> bool:
        """Whether the neighbour does something."""
        return self._acting is not None and not self._acting.poll()

    def leased(self) -> Iterator[str]:
        """See `Neighbour.leased`."""
        return iter(()) if self._of_life is None else self._of_life.leased()

    def leave(self) -> None:
        """End the neighbour, at any moment, like a killed process. Idempotent."""
        if self._of_life is not None:
            self._of_life.close()
        self._of_life = None

    def close(self) -> None:
        """Free what was shared. Idempotent."""
        self.leave()
        for host in self._hosts.values():
            host.close()
        self._hosts.clear()


class Neighbour:
    """Another engine of the host, which lives as long as the schedule.

    memory   what it shares of host memory; None: nothing
    disk     its tier in the shared directory; None: there is none
    find     receives what is wrong
    damaged  files are damaged behind its back
    """

    def __init__(
        self,
        contents: Contents,
        seed: int,
        *,
        memory: SharedMemory | None,
        disk: ScriptedTier | None,
        find: Callable[[str], None],
        damaged: bool,
    ) -> None:
        self._contents, self._find, self._damaged = contents, find, damaged
        self._keys = list(contents.blocks)
        self._rng = random.Random(f"sidestream neighbour {seed}")
        self._memory, self._disk = memory, disk
        self._pool = None if memory is None else SharedPool(memory, ready=memory.num_slots)
        self._pause: Callable[[], None] = lambda: None

    def act(self, device: ScriptedDevice) -> None:
        """Do one thing. Called as the work of a stream of its own, whose other actors get turns meanwhile."""
        self._pause = lambda: device.sleep(_MOMENT_S)
        acts: list[Callable[[], None]] = []
        if self._pool is not None:
            acts += [self._write_memory, self._read_memory]
        if self._disk is not None:
            acts += [self._write_disk, self._read_disk]
        self._rng.choice(acts)()

    def leased(self) -> Iterator[str]:
        """What is leased, although neither this neighbour nor the engine uses anything."""
        if self._memory is not None:
            refused = self._memory.leases.write(range(self._memory.num_slots))
            self._memory.leases.end_all()
            if refused:
                yield f"{len(refused)} host slots are leased"
        if self._disk is not None:
            slots = self._disk.inner._medium.slots
            for slot in range(slots.table.geometry.num_slots):
                if slots.locks.own(slot):
                    slots.locks.release(slot)
                else:
                    yield f"slot {slot} of the disk is leased"

    def close(self) -> None:
        """End. Its leases end with it. Idempotent."""
        if self._memory is not None:
            self._memory.close()
        if self._disk is not None:
            self._disk.crash()

    # ------------------------------------------------------------------ host memory

    def _slot(self, slot: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        assert self._memory is not None
        size = self._contents.block_bytes
        return np.frombuffer(self._memory.pages, np.uint8)[slot * size : (slot + 1) * size]

    def _write_memory(self) -> None:
        assert self._pool is not None
        self._pool.refresh()
        keys = [key for key in self._some_keys() if self._pool.get(key) is None]
        lease = self._pool.take_some(len(keys))
        self._pause()
        for half in (slice(0, self._contents.block_bytes // 2), slice(None)):
            for slot, key in zip(lease.ids, keys, strict=False):
                self._slot(slot)[half] = np.frombuffer(self._contents.blocks[key], np.uint8)[half]
            self._pause()
        self._pool.publish_all(lease.ids, keys[: len(lease.ids)])
        self._pause()
        lease.release()

    def _read_memory(self) -> None:
        assert self._pool is not None
        self._pool.refresh()
        findable = [key for key in self._keys if self._pool.get(key) is not None]
        for key in self._rng.sample(findable, min(2, len(findable))):
            lease = self._pool.lease([key])
            for _ in range(2):
                for slot in lease.ids:
                    self._compare(f"host slot {slot}", key, self._slot(slot).tobytes())
                self._pause()
            lease.release()

    # ------------------------------------------------------------------ disk

    def _write_disk(self) -> None:
        assert self._disk is not None
        self._disk.inner.refresh()
        for key in self._some_keys():
            with contextlib.suppress(TierFull):
                if key in self._disk.index or (grant := self._disk.index.reserve(key)) is None:
                    continue
                try:
                    self._disk.inner.write(grant, np.frombuffer(self._contents.blocks[key], np.uint8).copy())
                    self._disk.index.publish(grant)
                except TierError:
                    self._disk.index.abandon(grant)

    def _read_disk(self) -> None:
        assert self._disk is not None
        self._disk.inner.refresh()
        index = self._disk.index
        for key in self._rng.sample(list(index), min(2, len(index))):
            lease, out = index.pin([key]), np.zeros(self._contents.block_bytes, np.uint8)
            entry = lease.entries[0]
            self._pause()
            try:
                self._disk.inner.read(entry, out)
            except TierError as error:
                index.forget(entry)
                if isinstance(error, TierCorrupt) and not self._damaged and not str(error).endswith("is gone"):
                    self._find(f"a neighbour finds a damaged block: {error}")
            else:
                self._compare(f"disk entry {entry.serial}", key, out.tobytes())
            lease.release()

    def _some_keys(self) -> list[Key]:
        return self._rng.sample(self._keys, min(len(self._keys), self._rng.randint(1, 3)))

    def _compare(self, what: str, key: Key, payload: bytes) -> None:
        for text in differing(f"found by a neighbour: {what}", key, payload, self._contents):
            self._find(text)


def interrupt_io(segments: Segments, device: ScriptedDevice) -> None:
    """Let others get turns between the parts of a write, and while a slot is read."""
    write, read = segments.write, segments.read

    def slow_write(*given: object) -> None:
        device.sleep(_MOMENT_S)
        write(*given)  # type: ignore[arg-type]
        device.sleep(_MOMENT_S)

    def slow_read(*given: object) -> list[str | None]:
        device.sleep(_MOMENT_S)
        return read(*given)  # type: ignore[arg-type]

    segments.write, segments.read = slow_write, slow_read  # type: ignore[method-assign, assignment]
