"""A simulated device under the checker, with leases reported by hand: each test is a program to check.

A program is run under every policy; what the checker says about it must not depend on that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sidestream_kv.types import Access, Accesses
from sidestream_order.checker import Checker, Finding, simulated
from sidestream_order.sim import SimFence, SimStream

POLICIES = ["random", "late", "early", "starve:compute", "starve:copy", "pct:3"]
RUNS = [(policy, seed) for policy in POLICIES for seed in range(4)]
BLOCK = 64


def reads(start: int, stop: int, memory: str = "kv") -> Accesses:
    return lambda: [Access(memory, start, stop, write=False)]


def writes(start: int, stop: int, memory: str = "kv") -> Accesses:
    return lambda: [Access(memory, start, stop, write=True)]


def nothing() -> None:
    pass


def fails() -> None:
    raise ValueError("no room")


class Rig:
    """Two streams, a memory of 16 blocks. `pool`: blocks are leased, by telling the checker so."""

    def __init__(self, policy: str, seed: int) -> None:
        self.device, self.checker = simulated(policy, seed)
        self.memory = self.device.allocate("kv", 16 * BLOCK)
        self.compute = self.device.stream("compute")
        self.copy = self.device.stream("copy")

    def write(self, stream: SimStream, start: int, stop: int, label: str = "write") -> SimFence:
        return stream.submit(nothing, writes(start, stop), label=label)

    def read(self, stream: SimStream, start: int, stop: int, label: str = "read") -> SimFence:
        return stream.submit(nothing, reads(start, stop), label=label)

    def see(self, *fences: SimFence) -> None:
        for fence in fences:
            assert self.device.wait_host(fence, reason="step")

    def host_write(self, start: int, stop: int) -> None:
        self.checker.host_touched(writes(start, stop), "fill")

    def host_read(self, start: int, stop: int) -> None:
        self.checker.host_touched(reads(start, stop), "look")

    def leased(self, *ids: int) -> Rig:
        """Blocks have a pool from now on; these are taken."""
        self.checker.backed("blocks", "kv", BLOCK)
        self.take(*ids)
        return self

    def take(self, *ids: int) -> None:
        self.checker.took("blocks", ids, ())

    def share(self, *ids: int) -> None:
        self.checker.shared("blocks", ids)

    def release(self, *ids: int, after: Sequence[SimFence] = ()) -> None:
        self.checker.released("blocks", ids, after)

    def publish(self, item: int) -> None:
        self.checker.published("blocks", item, b"key")

    def forget(self, *ids: int) -> None:
        self.checker.forgot("blocks", ids)

    @property
    def kinds(self) -> list[str]:
        return [finding.kind for finding in self.checker.findings]


@contextmanager
def rig(policy: str = "random", seed: int = 0) -> Iterator[Rig]:
    made = Rig(policy, seed)
    try:
        yield made
        made.device.close()
    finally:
        made.device.kill()


def judged(program: Callable[[Rig], None]) -> list[Finding]:
    """The findings of a program, which has to be judged alike whatever runs when."""
    verdicts: dict[tuple[str, ...], list[Finding]] = {}
    for policy, seed in RUNS:
        with rig(policy, seed) as made:
            program(made)
            made.device.close()
            found = made.checker.findings
            verdicts[tuple(sorted({finding.kind for finding in found}))] = found
    assert len(verdicts) == 1, f"judged in {len(verdicts)} ways: {verdicts}"
    return next(iter(verdicts.values()))


def kinds(program: Callable[[Rig], None]) -> set[str]:
    return {finding.kind for finding in judged(program)}


__all__ = [
    "BLOCK",
    "RUNS",
    "Checker",
    "Finding",
    "Rig",
    "fails",
    "judged",
    "kinds",
    "nothing",
    "reads",
    "rig",
    "writes",
]
