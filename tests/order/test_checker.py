"""Reads of unwritten bytes are found, and released blocks are poisoned; the text of a finding."""

from __future__ import annotations

import pytest
from checker_rig import BLOCK, Rig, judged, kinds, nothing, reads, rig, writes

from sidestream.errors import ConfigError
from sidestream_kv.device.base import no_accesses
from sidestream_kv.types import Access, Tracer
from sidestream_order.checker import Checker, simulated
from sidestream_order.sim import SimFence
from sidestream_order.sim.device import POISON

# ---------------------------------------------------------------------- contents


def test_reading_bytes_that_were_never_written_is_found() -> None:
    def program(rig: Rig, *, written: int) -> None:
        rig.write(rig.compute, 0, written)
        rig.read(rig.compute, 0, 64)

    assert kinds(lambda rig: program(rig, written=64)) == set()
    (finding,) = judged(lambda rig: program(rig, written=40))
    assert (finding.kind, finding.start, finding.stop, finding.streams, finding.second) == (
        "unwritten",
        40,
        64,
        ("compute",),
        "",
    )
    assert (
        "reads kv[40:64], which no work ever wrote (declare a write of the host with host_touched)" in finding.message
    )


def test_reading_a_reused_block_before_writing_it_is_found() -> None:
    def program(rig: Rig, *, rewritten: bool) -> None:
        rig.leased(0)
        step = rig.write(rig.compute, 0, 64)
        rig.release(0, after=[step])
        rig.take(0)
        if rewritten:
            rig.write(rig.compute, 0, 64)
        rig.read(rig.compute, 0, 64)

    assert kinds(lambda rig: program(rig, rewritten=True)) == set()
    (finding,) = judged(lambda rig: program(rig, rewritten=False))
    assert finding.kind == "unwritten"
    assert "no work wrote since its id was taken: the last to write it was `write` (compute:1, " in finding.message


def test_a_read_of_unwritten_bytes_by_failed_work_is_no_finding() -> None:
    """A step of a request whose step before failed reads blocks that the failed step would have written."""

    def program(rig: Rig, *, fails: bool) -> None:
        rig.leased(0)

        def work() -> None:
            if fails:
                raise RuntimeError("the step before failed")

        for _ in range(2):
            rig.compute.submit(work, reads(0, 64))

    assert kinds(lambda rig: program(rig, fails=True)) == set()
    assert kinds(lambda rig: program(rig, fails=False)) == {"unwritten"}


def test_work_submitted_before_a_block_was_reused_reads_its_old_bytes() -> None:
    def program(rig: Rig, *, touched: bool) -> None:
        rig.leased(0)
        rig.write(rig.compute, 0, 64)
        work, declared = (lambda: rig.compute.touch(reads(0, 64)), no_accesses) if touched else (nothing, reads(0, 64))
        rig.release(0, after=[rig.compute.submit(work, declared)])
        rig.take(0)
        rig.write(rig.compute, 0, 64)

    assert kinds(lambda rig: program(rig, touched=False)) == set()
    assert kinds(lambda rig: program(rig, touched=True)) == set()


def test_work_may_read_bytes_that_it_writes_itself() -> None:
    def program(rig: Rig) -> None:
        rig.compute.submit(nothing, lambda: [*reads(0, 64)(), *writes(0, 64)()])

    assert kinds(program) == set()


def test_an_access_over_several_blocks_is_checked_block_by_block() -> None:
    def program(rig: Rig) -> None:
        rig.leased(0)
        rig.write(rig.compute, 0, 64)
        rig.take(1)  # later than the write of its neighbour, which is fine
        rig.write(rig.compute, 64, 128)
        rig.read(rig.compute, 32, 128)
        rig.read(rig.compute, 32, 160)  # a byte too far: id 2 is nobody's

    assert kinds(program) == {"unleased", "unwritten"}
    assert {(finding.start, finding.stop) for finding in judged(program)} == {(128, 160)}


# ---------------------------------------------------------------------- poison


class Poisoned:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int, set[SimFence]]] = []
        self.checker = Checker(
            poison=lambda memory, start, stop, after: self.calls.append((memory, start, stop, set(after)))
        )  # type: ignore[arg-type]
        self.checker.backed("blocks", "kv", BLOCK)

    def told(self) -> list[tuple[str, int, int, set[SimFence]]]:
        calls, self.calls = self.calls, []
        return calls


def test_free_and_reused_blocks_are_poisoned_after_their_last_uses() -> None:
    with rig("late") as made:
        poisoned, step, store = Poisoned(), made.compute.submit(nothing), made.copy.submit(nothing)
        checker = poisoned.checker
        checker.took("blocks", [3], ())
        assert poisoned.told() == [("kv", 192, 256, set())]
        checker.shared("blocks", [3])
        checker.released("blocks", [3], [store])
        assert poisoned.told() == []  # still leased
        checker.released("blocks", [3], [step])
        assert poisoned.told() == [("kv", 192, 256, {step, store})]
        checker.took("blocks", [3], [step, store])
        assert poisoned.told() == [("kv", 192, 256, {step, store})]
        checker.released("blocks", [3], ())  # unused by this tenant, but perhaps not yet left by the last
        assert poisoned.told() == [("kv", 192, 256, {step, store})]


def test_a_published_block_is_poisoned_once_forgotten_and_unused() -> None:
    poisoned = Poisoned()
    checker = poisoned.checker
    checker.took("blocks", [0], ())
    checker.host_touched(writes(0, 64), "fill")
    checker.published("blocks", 0, b"key")
    poisoned.told()
    checker.released("blocks", [0], ())
    assert poisoned.told() == []
    checker.shared("blocks", [0])
    checker.forgot("blocks", [0])
    assert poisoned.told() == []
    checker.released("blocks", [0], ())
    assert poisoned.told() == [("kv", 0, 64, set())]
    checker.forgot("blocks", [0, 9])  # neither is findable
    assert poisoned.told() == []
    checker.took("blocks", [0], ())
    checker.host_touched(writes(0, 64), "fill")
    checker.published("blocks", 0, b"key")
    checker.released("blocks", [0], ())
    poisoned.told()
    checker.forgot("blocks", [0])
    assert poisoned.told() == [("kv", 0, 64, set())]


def test_poisoning_does_not_wait_for_fences_that_the_host_saw_done() -> None:
    with rig("late") as made:
        poisoned = Poisoned()
        checker = poisoned.checker
        seen, pending = made.compute.submit(nothing), made.copy.submit(nothing)
        checker.took("blocks", [0], ())
        for fence in (seen, pending):
            checker.submitted(fence, writes(0, 64), "work")
        checker.released("blocks", [0], [seen, pending])
        checker.started(seen)
        checker.finished(seen)
        checker.observed(seen)
        poisoned.told()
        checker.took("blocks", [0], [pending])
        assert poisoned.told() == [("kv", 0, 64, {pending})]


def test_blocks_of_a_pool_without_memory_are_not_poisoned() -> None:
    poisoned = Poisoned()
    poisoned.checker.took("rows", [0], ())
    poisoned.checker.released("rows", [0], ())
    assert poisoned.told() == []


def test_simulated_memory_of_a_released_block_is_poisoned() -> None:
    with rig("late") as made:
        made.leased(0, 1)
        made.checker.backed("disk", "disk", 1)
        made.checker.took("disk", [12345], ())  # no memory of the device's: left alone
        made.memory.data[: 2 * BLOCK] = 1
        made.host_write(0, 128)
        step = made.read(made.compute, 0, 64)
        made.release(0, 1, after=[step])
        assert made.memory.data[0] == 1, "work on its way still reads it"
        made.see(step)
        assert made.memory.data[: 2 * BLOCK].unique().tolist() == [POISON]


def test_simulated_refuses_an_unknown_policy() -> None:
    with pytest.raises(ConfigError, match="policy is 'fast'"):
        simulated("fast", 0)


# ---------------------------------------------------------------------- findings


def test_a_finding_is_kept_once_for_each_pair_of_call_sites() -> None:
    with rig("early") as made:
        for index in range(8):
            made.write(made.compute, index * 64, index * 64 + 64)
            made.write(made.copy, index * 64, index * 64 + 64)
        made.device.close()
        assert made.kinds == ["race"]


def test_findings_with_different_labels_or_memories_are_kept_apart() -> None:
    checker = Checker()
    for memory in ("kv", "host"):
        for label in ("one", "two"):
            checker.host_touched(lambda memory=memory: [Access(memory, 0, 1, write=False)], label)
    assert len(checker.findings) == 4


def test_no_more_findings_than_the_limit_are_kept() -> None:
    checker = Checker(max_findings=3)
    for index in range(10):
        checker.stalled(f"reason {index}")
    checker.took("rows", [0], ())
    assert checker.check_idle() == []
    assert [finding.first.rpartition("`reason ")[2] for finding in checker.findings] == ["0`", "1`", "2`"]


def test_default_labels_are_work_and_touch() -> None:
    with rig() as made:
        made.compute.submit(nothing, reads(0, 64))
        made.checker.host_touched(reads(64, 128), "")
        made.device.close()
        assert {finding.first.rpartition(", ")[2] for finding in made.checker.findings} == {"`work`", "`touch`"}


def test_the_call_site_is_the_line_that_submitted_the_work() -> None:
    with rig() as made:
        made.compute.submit(nothing, reads(0, 64), label="here")
        made.device.close()
        (finding,) = made.checker.findings
    line = test_the_call_site_is_the_line_that_submitted_the_work.__code__.co_firstlineno + 2
    assert (
        finding.first == f"order/test_checker.py:{line} test_the_call_site_is_the_line_that_submitted_the_work, `here`"
    )


def test_the_checker_is_a_tracer() -> None:
    tracer: Tracer = Checker()
    assert isinstance(tracer, Checker)
