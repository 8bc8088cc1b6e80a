"""Injects the faults of a workload into disk operations, copies and forward passes. The disk tier and its files are
real, so the tier's own checks must detect damage to a file. Delays are in virtual time.
"""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from proof.disk_slots import DiskSlots
from proof.faults import failure_of
from proof.torture.workload import DAMAGE, Fault, Operation, Workload
from proof.toy import Wrapped, paged_layer
from sidestream.attention.interface import AttentionBatch
from sidestream.engine.build_plan import block_layout
from sidestream.errors import DeviceLost, InvariantError, TierCorrupt, TierError, TierFull
from sidestream_kv.device.base import CopyBatch, Memory
from sidestream_kv.offload.tiers.base import Block, TierStreams
from sidestream_kv.offload.tiers.disk import DiskTier, entry_bytes
from sidestream_kv.offload.tiers.index import Entry, TierIndex, WriteGrant
from sidestream_kv.offload.tiers.slots import HEADER_BYTES
from sidestream_kv.types import Fence, Tracer
from sidestream_order.sim import Guard, SimDevice, SimStream


class Script:
    """Chooses the fault of each operation. Operations are counted over the whole schedule, across restarts."""

    def __init__(self, workload: Workload) -> None:
        self._faults = workload.faults
        self._counts: Counter[Operation] = Counter()

    def next(self, operation: Operation) -> Fault | None:
        """The fault of the operation that starts now; None: no fault."""
        number = self._counts[operation]
        self._counts[operation] += 1
        return next((fault for fault in self._faults if fault.operation == operation and fault.hits(number)), None)


class ScriptedDevice(SimDevice):
    """A simulated device whose copies fail as the workload says. `step_failed`: whether a forward pass has failed."""

    def __init__(self, policy: Any, script: Script, *, tracer: Tracer | None, guard: Guard | None = None) -> None:
        super().__init__(policy, tracer=tracer, guard=guard)
        self.script = script
        self.step_failed = False
        self._lost_to: tuple[str, ...] = ()

    @property
    def is_lost(self) -> bool:
        """Whether some or all streams of the device refuse work."""
        return bool(self._lost_to)

    def lose(self, *streams: str) -> None:
        """From now on, streams whose names begin with one of these prefixes refuse work. Work submitted earlier
        continues.
        """
        self._lost_to = streams

    def stream(self, name: str, *, blocking: bool = False, on_host: bool = False) -> SimStream:
        stream = super().stream(name, blocking=blocking, on_host=on_host)
        submit = stream.submit

        def mortal(*given: Any, **options: Any) -> Fence:
            if name.startswith(self._lost_to):
                raise DeviceLost("injected: the device is lost")
            return submit(*given, **options)

        stream.submit = mortal  # type: ignore[method-assign, assignment]
        operation = name.rpartition("/")[2].partition("-")[0]  # of any rank
        if operation in ("store", "load"):
            stream.copy = self._around(operation, stream.copy)  # type: ignore[method-assign, assignment, arg-type]
        return stream

    def memory(self, name: str) -> Memory:
        """The memory with this name."""
        return self._memories[name]

    def play(self, fault: Fault | None, proceed: Callable[[], None], *, torn: Callable[[], None]) -> None:
        """Run an operation with `fault`; None: without a fault."""
        match fault.kind if fault is not None else "none":
            case "slow":
                assert fault is not None
                self.sleep(fault.seconds)
                proceed()
            case "late":
                assert fault is not None
                proceed()
                self.sleep(fault.seconds)
            case "lost":
                raise TierError("injected: it is lost")
            case "torn":
                torn()
                raise TierCorrupt("injected: only a part was copied")
            case "full":
                raise TierFull("injected: no room")
            case _:
                proceed()

    def _around(self, operation: Operation, copy: Callable[[CopyBatch], None]) -> Callable[[CopyBatch], None]:
        def faulty(batch: CopyBatch) -> None:
            def half() -> None:
                count = (len(batch.source_starts) + 1) // 2
                copy(batch.part(0, count))

            self.play(self.script.next(operation), lambda: copy(batch), torn=half)

        return faulty


class ScriptedModel(Wrapped):
    """A model whose forward pass fails as the workload says. `weights` is the version of the weights. It is added to
    each input token, so it changes all outputs.
    """

    def __init__(self, inner: Any, device: ScriptedDevice | None = None) -> None:
        super().__init__(inner)
        self._device = device
        self.weights = 0

    @property
    def fingerprint(self) -> str:
        """Depends on the version of the weights."""
        return self.fingerprint_of(self.weights)

    def fingerprint_of(self, weights: int) -> str:
        """The fingerprint of the model with this version of the weights."""
        return f"{self._inner.fingerprint}-{weights}"

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        logit_rows: torch.Tensor,
        **more: Any,
    ) -> torch.Tensor:
        given: list[torch.Tensor] = []
        seen = (tokens + self.weights) % self.vocab_size if self.weights else tokens

        def proceed() -> None:
            given.append(self._inner.forward(seen, positions, batch, logit_rows, **more))

        if self._device is None:
            proceed()
            return given[0]
        fault = self._device.script.next("forward")
        if fault is not None and fault.kind == "lost":
            # A step that waits for loads declares its accesses layer by layer; other steps declare them at the start. A
            # failing step must declare the accesses of all layers too, because later steps may already have been
            # launched.
            for layer in range(self.layout.num_layers):
                paged, index = paged_layer(batch, layer)
                paged.before_layer(index)
            self._device.step_failed = True
        self._device.play(fault, proceed, torn=_never)
        if fault is not None and fault.kind == "nan":
            given[0].fill_(torch.nan)
            size = self.layout.block_tokens
            for layer, last in itertools.product(range(self.layout.num_layers), logit_rows.tolist()):
                paged, index = paged_layer(batch, layer)  # only rows with logits: no result of other rows is read
                row = bisect_left(paged.cu_seqlens_q, last + 1) - 1
                slots = paged.slot_mapping[paged.cu_seqlens_q[row] : last + 1]
                paged.kv[slots // size, index, :, slots % size] = -1.0
        return given[0]

    def hidden_after(self, tokens: Sequence[int]) -> int:
        """See `ToyModel.hidden_after`, with the current weights."""
        hidden: int = self._inner.hidden_after([(token + self.weights) % self.vocab_size for token in tokens])
        return hidden

    def state_after(self, tokens: Sequence[int]) -> int:
        """See `StatefulToyModel.state_after`, with the current weights."""
        state: int = self._inner.state_after([(token + self.weights) % self.vocab_size for token in tokens])
        return state

    def next_token(self, tokens: Sequence[int]) -> int:
        """The most likely token after `tokens`, with the current weights. See `ToyModel.expected`."""
        (token,) = self._inner.expected([(token + self.weights) % self.vocab_size for token in tokens], 1)
        return int(token)


class ScriptedTier:
    """The real disk tier, whose reads and writes fail as the workload says."""

    def __init__(
        self,
        inner: DiskTier,
        device: ScriptedDevice,
        used: Callable[[Entry], None],
        others: Callable[[Entry], Sequence[Entry]] = lambda entry: (),
    ) -> None:
        """`used` receives each entry that is written or read. `others` returns other used entries of the same
        directory, the last used entry first.
        """
        self._inner = inner
        self._device = device
        self._used = used
        self._others = others
        self.streams = TierStreams(batch_bytes=inner.streams.batch_bytes)

    @property
    def index(self) -> TierIndex:
        """The real tier's index."""
        return self._inner.index

    @property
    def inner(self) -> DiskTier:
        """The real tier."""
        return self._inner

    def write(self, grant: WriteGrant, payload: Block) -> None:
        self._begin_write(grant)
        self._write(grant, payload, self._device.script.next("write"))

    def write_all(self, grants: Sequence[WriteGrant], payloads: Sequence[Block]) -> list[Exception | None]:
        for grant in grants:
            self._begin_write(grant)
        return self._all("write", self._inner.write_all, self._write, list(zip(grants, payloads, strict=True)))

    def read(self, entry: Entry, out: Block) -> None:
        self._begin_read(entry)
        self._read(entry, out, self._device.script.next("read"))

    def read_all(self, entries: Sequence[Entry], outs: Sequence[Block]) -> list[Exception | None]:
        for entry in entries:
            self._begin_read(entry)
        return self._all("read", self._inner.read_all, self._read, list(zip(entries, outs, strict=True)))

    def _all(
        self,
        operation: Operation,
        work: Callable[..., Sequence[Exception | None]],
        faulty: Callable[..., None],
        blocks: Sequence[tuple[Any, Block]],
    ) -> list[Exception | None]:
        """Blocks that have no fault are one batch of the real tier. Returns the failure of each block."""
        faults = [self._device.script.next(operation) for _ in blocks]
        good = [at for at, fault in enumerate(faults) if fault is None]
        failures = dict(zip(good, work([blocks[at][0] for at in good], [blocks[at][1] for at in good]), strict=True))
        return [
            failures[at] if at in failures else failure_of(faulty, *blocks[at], faults[at]) for at in range(len(blocks))
        ]

    def _begin_write(self, grant: WriteGrant) -> None:
        for entry in (grant.entry, grant.victim):
            self._require(entry, write=True)
        self._used(grant.entry)

    def _write(self, grant: WriteGrant, payload: Block, fault: Fault | None) -> None:
        self._device.play(fault, lambda: self._inner.write(grant, payload), torn=_never)
        self._damage(grant.entry, fault)

    def _begin_read(self, entry: Entry) -> None:
        self._require(entry, write=False)
        self._used(entry)

    def _read(self, entry: Entry, out: Block, fault: Fault | None) -> None:
        def torn() -> None:
            self._inner.read(entry, out)
            data = np.frombuffer(out, np.uint8)
            data[: len(data) // 2] ^= 0xA5

        self._damage(entry, fault)
        self._device.play(fault, lambda: self._inner.read(entry, out), torn=torn)

    def _damage(self, entry: Entry, fault: Fault | None) -> None:
        """Damage slots behind the tier's back."""
        if fault is None or fault.kind not in DAMAGE:
            return
        table = DiskSlots(self._inner.directory)
        slots = [slot for used in (entry, *self._others(entry)) if (slot := table.slots.get(used)) is not None]
        if fault.kind == "swapped":
            for one, other in itertools.pairwise(slots[: fault.entries + 1]):
                contents = table.bytes_of(one), table.bytes_of(other)
                table.fill(other, contents[0])
                table.fill(one, contents[1])
            return
        for slot in slots[: fault.entries]:
            content = table.bytes_of(slot)
            at = int(fault.place * (HEADER_BYTES + self._inner._geometry.block_bytes - 1))
            if fault.kind == "truncated":
                content[at:] = bytes(len(content) - at)
            else:
                content[at] ^= 0x10
            table.fill(slot, content)

    def _require(self, entry: Entry | None, *, write: bool) -> None:
        """Verify that the running work has declared its access to the entry's file."""
        guard, index = self._device.guard, self._inner.index
        if entry is not None and guard is not None and index.traced:
            guard.require(self._device.turns.current.name, index.access(entry, write=write))

    def peek(self, entry: Entry) -> bytes | None:
        """The bytes of a published entry, read without injected faults. None if the tier rejects the file."""
        out = bytearray(self._inner._geometry.block_bytes)
        try:
            self._inner.read(entry, memoryview(out))
        except TierError:
            return None
        return bytes(out)

    def strays(self) -> tuple[set[str], set[str]]:
        """Entries on disk that are not findable, and findable entries that are not on disk."""
        on_disk, entries = set(DiskSlots(self._inner.directory).slots), set(self.index.entries)
        return {_name(entry) for entry in on_disk - entries}, {_name(entry) for entry in entries - on_disk}

    def close(self) -> None:
        self._inner.close()

    def crash(self) -> None:
        """Release the lock and leave the files as they are, as the kernel does for a killed process."""
        self._inner.index.take_doomed()  # a dead process deletes nothing
        self._inner.close()


class Scratch:
    """Directories for the disk tier. They are kept until the process ends, because creating one takes longer than a
    schedule.
    """

    def __init__(self) -> None:
        self._root = tempfile.TemporaryDirectory(prefix="sidestream-torture-")
        self._used: dict[tuple[Path, Entry], int] = {}  # serial number of the last use
        self._paths: set[Path] = set()
        self._opened: set[Path] = set()  # since the last `clean`
        self._process = os.getpid()

    def open(
        self,
        model: ScriptedModel,
        device: ScriptedDevice,
        *,
        num_blocks: int,
        rank: int = 0,
        ranks: int = 1,
        neighbour: bool = False,
    ) -> ScriptedTier:
        """Open the disk tier of a model on one of `ranks` ranks, or of another engine, a `neighbour`. It has the
        entries that were written since the last `clean`.
        """
        path = Path(self._root.name) / f"{model.fingerprint}-{rank}"
        if path not in self._paths:
            self._paths.add(path)
            self._open(path, model, num_blocks=num_blocks, tracer=None).close()
            DiskSlots(path).clear()  # serial numbers begin with a random one
        self._opened.add(path)
        # rank 0's index keeps the leases of all ranks
        tracer = None if rank or neighbour else device.tracer
        tier = self._open(path, model, num_blocks=num_blocks, tracer=tracer, batches=ranks == 1)
        return ScriptedTier(tier, device, functools.partial(self._use, path), functools.partial(self._others, path))

    def _open(
        self, path: Path, model: ScriptedModel, *, num_blocks: int, tracer: Tracer | None, batches: bool = True
    ) -> DiskTier:
        return DiskTier.open(
            path,
            layout=block_layout(model),
            fingerprint=model.fingerprint,
            capacity_bytes=num_blocks * entry_bytes(block_layout(model)),
            batches=batches,
            tracer=tracer,
        )

    def settle(self) -> None:
        """Set the times of the entries to their order of use, because a restart reads these times, and the clock's
        times differ between runs.
        """
        for path in self._paths:
            table = DiskSlots(path)
            for (directory, entry), when in self._used.items():
                if directory == path and entry in table.slots:
                    table.table.stamp(table.slots[entry], when)

    def clean(self) -> None:
        """Delete all entries; no tier may be open."""
        for path in self._opened:
            DiskSlots(path).clear()
        self._opened.clear()
        self._used.clear()

    def _use(self, path: Path, entry: Entry) -> None:
        self._used.pop((path, entry), None)
        self._used[path, entry] = 0 if not self._used else next(reversed(self._used.values())) + 1

    def _others(self, path: Path, entry: Entry) -> list[Entry]:
        return [other for place, other in reversed(self._used) if place == path and other != entry]

    @property
    def is_ours(self) -> bool:
        """Whether this process created the directories. A forked child must not use them."""
        return self._process == os.getpid()


def _name(entry: Entry) -> str:
    return f"{entry.key.hex()}-{entry.serial:x}"


def _never() -> None:
    raise InvariantError("the workload tears a disk write, but a tier publishes complete entries only")
