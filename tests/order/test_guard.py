"""Work on a simulated device sees only the memory that it has declared, and every other access is a finding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from sidestream_kv.device.base import CopyBatch
from sidestream_kv.types import Access
from sidestream_order.checker import Checker, simulated
from sidestream_order.sim import POISON

Work = Callable[[torch.Tensor], None]


def reads(start: int, stop: int, memory: str = "kv") -> Access:
    return Access(memory, start, stop, write=False)


def writes(start: int, stop: int, memory: str = "kv") -> Access:
    return Access(memory, start, stop, write=True)


def run(work: Work, declared: Sequence[Access]) -> tuple[list[int], Checker]:
    """Run work over 16 bytes that hold 0 to 15. Returns the bytes after it."""
    device, checker = simulated("random", 0)
    kv = device.allocate("kv", 16)
    stream = device.stream("compute")
    stream.submit(lambda: kv.data.copy_(torch.arange(16, dtype=torch.uint8)) and None, lambda: [writes(0, 16)])
    stream.submit(lambda: work(kv.data), lambda: declared, label="step")
    device.close()
    return kv.data.tolist(), checker


def kinds(checker: Checker) -> list[tuple[str, int, int]]:
    return [(found.kind, found.start, found.stop) for found in checker.findings]


def test_declared_bytes_are_read_and_written() -> None:
    def work(kv: torch.Tensor) -> None:
        kv[8:12] = kv[0:4] + 1

    after, checker = run(work, [reads(0, 4), writes(8, 12)])
    assert after == [*range(8), 1, 2, 3, 4, *range(12, 16)]
    assert checker.findings == []


def test_work_reads_poison_in_undeclared_bytes_which_keep_their_content() -> None:
    seen: list[int] = []
    after, checker = run(lambda kv: seen.extend(kv.tolist()), [reads(4, 8), writes(12, 14)])
    assert seen == [*[POISON] * 4, 4, 5, 6, 7, *[POISON] * 4, 12, 13, POISON, POISON]
    assert after == [*range(16)]
    assert checker.findings == []


@pytest.mark.parametrize("declared", [[], [reads(0, 16)], [writes(0, 4)], [writes(0, 6)], [writes(7, 16)]])
def test_an_undeclared_write_is_a_finding_and_is_undone(declared: list[Access]) -> None:
    def work(kv: torch.Tensor) -> None:
        kv[4:8] = 77

    after, checker = run(work, declared)
    (found,) = checker.findings
    assert (found.kind, found.memory, found.accesses) == ("undeclared", "kv", ("writes",))
    assert "`step`" in found.message
    kept = {at for access in declared if access.write for at in range(access.start, access.stop)}
    assert after == [77 if 4 <= at < 8 and at in kept else at for at in range(16)]


def test_a_touch_declares_bytes_for_the_rest_of_the_work() -> None:
    device, checker = simulated("random", 0)
    kv, seen = device.allocate("kv", 8), list[int]()
    stream = device.stream("compute")

    def work() -> None:
        seen.append(int(kv.data[0]))
        kv.data[4] = 9
        stream.touch(lambda: [reads(0, 1)])
        seen.append(int(kv.data[0]))

    stream.submit(lambda: kv.data.fill_(5) and None, lambda: [writes(0, 8)])
    stream.submit(work, lambda: [writes(4, 8)])
    device.close()
    assert seen == [POISON, 5]
    assert kv.data.tolist() == [5, 5, 5, 5, 9, 5, 5, 5]
    assert checker.findings == []


@pytest.mark.parametrize("policy", ["random", "late", "early", "starve:copy"])
def test_interrupted_work_sees_the_latest_bytes_and_only_declared_ones(policy: str) -> None:
    for seed in range(10):
        device, checker = simulated(policy, seed)
        kv, host = device.allocate("kv", 32), device.allocate("host", 32)
        compute, copy = device.stream("compute"), device.stream("copy")
        segments = np.arange(0, 16, 4)
        batch = CopyBatch(kv, host, segments, segments, 4)
        compute.submit(lambda: kv.data.fill_(3) and None, lambda: [writes(0, 32)])  # noqa: B023

        def steps() -> None:
            for start in range(16, 32, 4):
                kv.data[start : start + 4] += 1  # noqa: B023
                compute.touch(lambda: [])  # noqa: B023

        copy.wait(compute.submit(lambda: None))
        copy.submit(lambda: copy.copy(batch), batch.accesses)  # noqa: B023
        compute.submit(steps, lambda: [writes(16, 32)])
        device.close()
        assert kv.data.tolist() == [*[3] * 16, *[4] * 16]
        assert host.data.tolist() == [*[3] * 16, *[POISON] * 16]
        assert checker.findings == []


@pytest.mark.parametrize(
    ("access", "message"),
    [
        (writes(8, 17), "writes kv[8:17], of which there are 16 bytes"),
        (reads(-1, 4), "reads kv[-1:4], of which there are 16 bytes"),
        (reads(4, 2), "reads kv[4:2], of which there are 16 bytes"),
        (writes(0, 4, "vk"), "writes vk[0:4], and there is no such memory"),
    ],
)
def test_an_access_outside_of_a_memory_or_to_an_unknown_one_is_found(access: Access, message: str) -> None:
    _, checker = run(lambda kv: None, [access])
    found = next(found for found in checker.findings if found.kind == "beyond")
    assert found.message.endswith(message)


def test_a_memory_larger_than_all_earlier_ones_is_guarded_too() -> None:
    device, checker = simulated("random", 0)
    small, large = device.allocate("small", 8), device.allocate("large", 1 << 20)
    stream = device.stream("compute")

    def work() -> None:
        small.data[0] = large.data[-1] = 1

    stream.submit(work, lambda: [writes(0, 1, "small")])
    device.close()
    assert (int(small.data[0]), int(large.data[-1])) == (1, POISON)
    assert kinds(checker) == [("undeclared", (1 << 20) - 1, 1 << 20)]


def test_memory_released_while_work_runs_is_poisoned_afterwards() -> None:
    device, checker = simulated("random", 0)
    kv = device.allocate("kv", 8)
    stream = device.stream("compute")
    stream.submit(lambda: kv.data.fill_(1) and None, lambda: [writes(0, 8)])
    stream.submit(lambda: device.poison("kv", 0, 4, ()), lambda: [reads(4, 8)])
    device.close()
    assert kv.data.tolist() == [*[POISON] * 4, 1, 1, 1, 1]
    assert checker.findings == []
