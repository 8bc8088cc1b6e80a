"""Verifies the accesses that work declares on a simulated device. Running work sees only the memory that it has
declared.

Work runs in turns with other streams and threads (actors). When a turn begins, all bytes that the work has not declared
are replaced by poison (a fixed byte). Work that reads such bytes computes a wrong result. When the turn ends, bytes
that the work declared as written are kept, and all other bytes are restored. A change of any other byte is a finding.
Called by the actor whose turn it is.

Accesses of host threads are not verified, because host code runs between the turns of work, when all memory is visible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sidestream_kv.types import Access
from sidestream_order.sim import POISON

_ARENA_BYTES = 1 << 18
_ALIGNMENT = 64

Bytes = npt.NDArray[np.uint8]


class _Arena:
    """One allocation that holds many memories, so that one copy saves, hides or compares all of them.

    data     the bytes that the running work reads and writes
    saved    the true content of all bytes during a turn
    shown    the content of `data` at the begin of the turn: poison where nothing was declared
    """

    def __init__(self, num_bytes: int) -> None:
        self.data, self.saved, self.shown = (np.full(num_bytes, POISON, dtype=np.uint8) for _ in range(3))
        self.used = 0

    def take(self, num_bytes: int) -> int | None:
        """Reserve `num_bytes` and return the offset of the first; None: too little space is left."""
        start = -(-self.used // _ALIGNMENT) * _ALIGNMENT
        if start + num_bytes > len(self.data):
            return None
        self.used = start + num_bytes
        return start


Range = tuple[_Arena, int, int, bool]


class Declarations(Protocol):
    """The part of `Checker` that a guard uses."""

    def refuse_unknown(self) -> None:
        """From now on, report accesses to memories that were not allocated."""
        ...

    def declared(self, stream: str) -> Sequence[Access]:
        """All accesses that the running work of a stream has declared so far."""
        ...

    def undeclared(self, stream: str, access: Access) -> None:
        """Report an access that the running work of a stream has not declared."""
        ...


class Guard:
    """See `sidestream_order.sim.Guard`. Gets the declared accesses from `checker`, and reports findings to it."""

    def __init__(self, checker: Declarations) -> None:
        self._checker = checker
        self._arenas: list[_Arena] = []
        self._places: dict[str, tuple[_Arena, int, int]] = {}
        self._ranges: Sequence[Range] | None = None  # ranges that the running work has declared
        self._known: tuple[Sequence[Access], Sequence[Range]] = ((), ())
        checker.refuse_unknown()

    def allocate(self, name: str, num_bytes: int) -> Bytes:
        start = self._arenas[-1].take(num_bytes) if self._arenas else None
        if start is None:
            self._arenas.append(_Arena(max(_ARENA_BYTES, num_bytes)))
            start = self._arenas[-1].take(num_bytes)
            assert start is not None
        arena = self._arenas[-1]
        self._places[name] = arena, start, num_bytes
        return arena.data[start : start + num_bytes]

    def enter(self, stream: str) -> None:
        declared = self._checker.declared(stream)
        if declared is not self._known[0]:
            self._known = declared, self._ranges_of(declared)
        ranges = self._ranges = self._known[1]
        for arena in self._arenas:
            used = arena.used
            arena.saved[:used] = arena.data[:used]
            arena.shown[:used] = POISON
        for arena, start, stop, _ in ranges:
            arena.shown[start:stop] = arena.saved[start:stop]
        for arena in self._arenas:
            arena.data[: arena.used] = arena.shown[: arena.used]

    def leave(self, stream: str) -> None:
        ranges, self._ranges = self._ranges, None
        if ranges is None:
            return
        for arena, start, stop, write in ranges:
            if write:
                arena.saved[start:stop] = arena.shown[start:stop] = arena.data[start:stop]
        for arena in self._arenas:
            used = arena.used
            if arena.data[:used].tobytes() != arena.shown[:used].tobytes():
                self._report(stream, arena)
            arena.data[:used] = arena.saved[:used]

    def poison(self, name: str, start: int, stop: int) -> None:
        arena, first, _ = self._places[name]
        content = arena.data if self._ranges is None else arena.saved
        content[first + start : first + stop] = POISON

    def require(self, stream: str, access: Access) -> None:
        """Report an access of running work that was not declared. Called for memories that have no byte array, such as
        files.
        """
        if access not in self._checker.declared(stream):
            self._checker.undeclared(stream, access)

    def _ranges_of(self, declared: Sequence[Access]) -> list[Range]:
        """The ranges of the declared accesses: arena, start, stop, and whether it is a write. Memories without a byte
        array are left out.
        """
        ranges = []
        for access in declared:
            place = self._places.get(access.memory)
            if place is not None:
                arena, first, size = place
                ranges.append((arena, first + access.start, first + min(access.stop, size), access.write))
        return ranges

    def _report(self, stream: str, arena: _Arena) -> None:
        changed = np.flatnonzero(arena.data[: arena.used] != arena.shown[: arena.used])
        for name, (place, first, size) in self._places.items():
            inside = changed[(changed >= first) & (changed < first + size)] - first if place is arena else changed[:0]
            if len(inside):
                access = Access(name, int(inside[0]), int(inside[-1]) + 1, True)
                self._checker.undeclared(stream, access)
