"""Early publications, host waits that are not allowed, and leaks are found."""

from __future__ import annotations

import pytest
from checker_rig import BLOCK, Rig, fails, judged, kinds, nothing, reads, rig, writes

from sidestream_order.checker import Checker

# ---------------------------------------------------------------------- publish last


def test_publishing_a_block_before_the_host_saw_its_last_write_is_found() -> None:
    def program(rig: Rig, *, seen: bool) -> None:
        rig.leased(0)
        rig.write(rig.compute, 0, 32)
        last = rig.write(rig.compute, 32, 64, "step")
        if seen:
            rig.see(last)
        rig.publish(0)
        rig.see(last)
        rig.release(0)

    assert kinds(lambda rig: program(rig, seen=True)) == set()
    assert kinds(lambda rig: program(rig, seen=False)) == {"early_publish"}
    findings = judged(lambda rig: program(rig, seen=False))
    assert any(
        "made blocks 0 (kv[0:64]) findable before the host saw that `step` (compute:2, " in finding.message
        for finding in findings
    )


def test_publishing_after_a_finished_but_unseen_write_is_found() -> None:
    with rig("early") as made:
        made.leased(0)
        store = made.write(made.copy, 0, 64)
        made.device.sleep(1.0)
        assert store.done
        made.publish(0)
        assert made.kinds == ["early_publish"]


@pytest.mark.parametrize("written", [(0, 0), (0, 32), (32, 64), (16, 48)])
def test_publishing_a_block_with_unwritten_bytes_is_found(written: tuple[int, int]) -> None:
    def program(rig: Rig) -> None:
        rig.leased(0)
        rig.see(rig.write(rig.compute, *written))
        rig.publish(0)

    (finding,) = judged(program)
    first_missing = 0 if written[0] else written[1]
    assert (
        finding.kind == "early_publish"
        and f"but no work wrote kv[{first_missing}] since it was taken" in finding.message
    )


def test_bytes_written_under_an_earlier_lease_do_not_count_at_publication() -> None:
    def program(rig: Rig) -> None:
        rig.leased(0)
        rig.see(rig.write(rig.compute, 0, 64))
        rig.release(0)
        rig.take(0)
        rig.publish(0)

    assert kinds(program) == {"early_publish"}


def test_a_block_that_the_host_wrote_may_be_published() -> None:
    def program(rig: Rig) -> None:
        rig.leased(0)
        rig.host_write(0, 64)
        rig.publish(0)

    assert kinds(program) == set()


def test_publishing_a_block_of_a_failed_store_is_found() -> None:
    def program(rig: Rig, *, again: bool) -> None:
        rig.leased(0)
        rig.see(rig.copy.submit(fails, writes(0, 64), label="store"))
        if again:
            rig.see(rig.write(rig.copy, 0, 64))
        rig.publish(0)

    assert kinds(lambda rig: program(rig, again=True)) == set()
    (finding,) = judged(lambda rig: program(rig, again=False))
    assert finding.kind == "failed_publish" and "which wrote it, failed: ValueError: no room" in finding.message


def test_a_published_block_may_be_written_only_once_forgotten_or_reused() -> None:
    def program(rig: Rig, *, how: str) -> None:
        rig.leased(0)
        rig.see(rig.write(rig.compute, 0, 64))
        rig.publish(0)
        if how == "forgotten":
            rig.forget(0)
        if how == "taken":
            rig.release(0)
            rig.take(0)
        last = rig.write(rig.compute, 32, 48, "overrun")
        rig.read(rig.compute, 32, 48)
        rig.see(last)

    assert kinds(lambda rig: program(rig, how="forgotten")) == kinds(lambda rig: program(rig, how="taken")) == set()
    (finding,) = judged(lambda rig: program(rig, how=""))
    assert finding.kind == "published_write" and finding.first.endswith("`overrun`")


@pytest.mark.parametrize("submitted_first", [True, False])
def test_a_write_declared_inside_work_is_early_or_late_by_its_submission(submitted_first: bool) -> None:
    with rig("late") as made:
        made.leased(0)
        made.see(made.write(made.copy, 0, 64))

        def overrun() -> None:
            made.compute.touch(writes(0, 64))

        if submitted_first:
            made.compute.submit(overrun)
        made.publish(0)
        if not submitted_first:
            made.compute.submit(overrun)
        made.device.close()
        assert made.kinds == ["early_publish" if submitted_first else "published_write"]


def test_a_late_write_of_an_earlier_lease_does_not_count_for_the_next_one() -> None:
    with rig("late") as made:
        made.leased(0)
        gate = made.copy.submit(nothing)
        made.compute.wait(gate)
        old = made.compute.submit(lambda: made.compute.touch(writes(0, 64)), label="old")
        made.release(0, after=[old])
        made.take(0)
        made.host_write(0, 64)  # not behind the old one: that is the finding, and the only one
        made.publish(0)
        made.device.close()
        assert made.kinds == ["race"]


def test_a_pool_without_memory_is_checked_for_leases_only() -> None:
    checker = Checker()
    checker.took("rows", [0, 1], ())
    checker.published("rows", 0, b"key")
    checker.released("rows", [0, 0], ())
    (finding,) = checker.findings
    assert (finding.kind, finding.memory, finding.start) == ("unleased", "rows", 0)


def test_entries_on_disk_are_checked_like_blocks() -> None:
    def program(rig: Rig, *, seen: bool) -> None:
        rig.checker.backed("disk", "disk", 1)
        rig.checker.took("disk", [7], ())
        write = rig.copy.submit(nothing, writes(7, 8, "disk"))
        if seen:
            rig.see(write)
        rig.checker.published("disk", 7, b"key")
        rig.see(write)
        rig.checker.released("disk", [7], ())
        rig.checker.shared("disk", [7])
        rig.see(rig.compute.submit(nothing, reads(7, 8, "disk")))
        rig.checker.released("disk", [7], ())
        rig.checker.forgot("disk", [7])

    assert kinds(lambda rig: program(rig, seen=True)) == set()
    assert kinds(lambda rig: program(rig, seen=False)) == {"early_publish"}


# ---------------------------------------------------------------------- stalls, leaks


def test_the_host_may_wait_for_steps_only() -> None:
    with rig() as made:
        made.see(made.compute.submit(nothing))
        assert made.kinds == []
        made.device.stall("queue full")
        (finding,) = made.checker.findings
    assert (
        finding.kind == "stall"
        and finding.first.endswith("`queue full`")
        and "test_checker_publishing.py:" in finding.first
    )
    assert 'allowed reasons: "step" (others: `Rules.waits` of explore' in finding.message


def test_reasons_for_which_the_host_may_wait_can_be_chosen() -> None:
    strict, lax = Checker(allowed_waits=frozenset()), Checker(allowed_waits=frozenset({"flush"}))
    for checker in (strict, lax):
        checker.stalled("flush")
        checker.stalled("step")
    assert [len(strict.findings), len(lax.findings)] == [2, 1]
    assert "allowed reasons: none" in strict.findings[0].message


def test_blocks_still_leased_at_the_end_are_a_leak() -> None:
    with rig() as made:
        made.leased(0, 1, 2)
        made.release(1)
        made.checker.took("rows", [4], ())
        blocks, rows = made.checker.check_idle()
        assert (blocks.kind, blocks.memory, blocks.start, blocks.stop) == ("leak", "kv", 0, BLOCK)
        assert blocks.message.startswith(
            "2 of blocks still leased at the end: 0, 2; the first since `lease of blocks` (host, "
        )
        assert rows.message.startswith("1 of rows still leased")
        assert made.checker.check_idle() == made.checker.findings == [blocks, rows]
        made.release(0, 2)
        made.checker.released("rows", [4], ())
        assert made.checker.check_idle() == []


def test_a_leak_lists_at_most_eight_ids() -> None:
    checker = Checker()
    checker.took("rows", range(11), ())
    (finding,) = checker.check_idle()
    assert "11 of rows still leased at the end: 0, 1, 2, 3, 4, 5, 6, 7 and 3 more" in finding.message


def test_a_cached_block_is_no_leak() -> None:
    with rig() as made:
        made.leased(0)
        made.host_write(0, 64)
        made.publish(0)
        made.release(0)
        assert made.checker.check_idle() == []
