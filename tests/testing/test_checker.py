"""The rules beside order: bytes are written before they are read, ids are leased while they are used, published last, and nothing stalls or leaks."""

from __future__ import annotations

import pytest
from checker_rig import BLOCK, RUNS, Rig, fails, judged, kinds, nothing, reads, rig, writes

from sidestream.device.base import no_accesses
from sidestream.device.sim import SimFence
from sidestream.device.sim.device import POISON
from sidestream.errors import ConfigError
from sidestream.testing.checker import Checker, simulated
from sidestream.types import Access, Witness

# ---------------------------------------------------------------------- contents


def test_bytes_that_nobody_ever_wrote_are_not_read() -> None:
    def program(rig: Rig, *, written: int) -> None:
        rig.write(rig.compute, 0, written)
        rig.read(rig.compute, 0, 64)

    assert kinds(lambda rig: program(rig, written=64)) == set()
    (finding,) = judged(lambda rig: program(rig, written=40))
    assert (finding.kind, finding.start, finding.stop, finding.streams, finding.second) == ("unwritten", 40, 64, ("compute",), "")
    assert finding.message.endswith("reads kv[40:64], which nobody ever wrote")


def test_what_an_id_held_is_gone_once_it_is_taken_again() -> None:
    def program(rig: Rig, *, rewritten: bool) -> None:
        rig.leased(0)
        flight = rig.write(rig.compute, 0, 64)
        rig.release(0, after=[flight])
        rig.take(0)
        if rewritten:
            rig.write(rig.compute, 0, 64)
        rig.read(rig.compute, 0, 64)

    assert kinds(lambda rig: program(rig, rewritten=True)) == set()
    (finding,) = judged(lambda rig: program(rig, rewritten=False))
    assert finding.kind == "unwritten"
    assert "nobody wrote since its id was taken: the last to write it was `write` (compute:1, " in finding.message


def test_work_that_was_submitted_before_the_id_was_taken_still_reads_what_it_held() -> None:
    def program(rig: Rig, *, touched: bool) -> None:
        rig.leased(0)
        rig.write(rig.compute, 0, 64)
        work, declared = (lambda: rig.compute.touch(reads(0, 64)), no_accesses) if touched else (nothing, reads(0, 64))
        rig.release(0, after=[rig.compute.submit(work, declared)])
        rig.take(0)
        rig.write(rig.compute, 0, 64)

    assert kinds(lambda rig: program(rig, touched=False)) == set()
    assert kinds(lambda rig: program(rig, touched=True)) == set()


def test_a_piece_of_work_may_read_what_it_writes_itself() -> None:
    def program(rig: Rig) -> None:
        rig.compute.submit(nothing, lambda: [*reads(0, 64)(), *writes(0, 64)()])

    assert kinds(program) == set()


def test_an_access_over_several_ids_is_judged_id_by_id() -> None:
    def program(rig: Rig) -> None:
        rig.leased(0)
        rig.write(rig.compute, 0, 64)
        rig.take(1)  # later than the write of its neighbour, which is fine
        rig.write(rig.compute, 64, 128)
        rig.read(rig.compute, 32, 128)
        rig.read(rig.compute, 32, 160)  # a byte too far: id 2 is nobody's

    assert kinds(program) == {"unleased", "unwritten"}
    assert {(finding.start, finding.stop) for finding in judged(program)} == {(128, 160)}


# ---------------------------------------------------------------------- leases


def test_work_on_an_id_that_nobody_leases_is_found_at_its_submission() -> None:
    def never(rig: Rig) -> None:
        rig.leased()
        rig.write(rig.compute, 0, 64)

    def no_longer(rig: Rig) -> None:
        rig.leased(0)
        flight = rig.write(rig.compute, 0, 64)
        rig.see(flight)
        rig.release(0)
        rig.read(rig.compute, 0, 64)

    def in_time(rig: Rig) -> None:
        rig.leased(0)
        rig.write(rig.compute, 0, 64)
        rig.release(0, after=[rig.read(rig.compute, 0, 64)])

    assert kinds(never) == kinds(no_longer) == {"unleased"}
    assert kinds(in_time) == set()
    (finding,) = judged(no_longer)
    assert "touches blocks 0 (kv[0:64]), of which no lease was open when it was submitted" in finding.message


def test_a_cached_id_may_be_used_again_under_a_lease_for_reading_only() -> None:
    def program(rig: Rig, *, shared: bool) -> None:
        rig.leased(0)
        rig.see(rig.write(rig.compute, 0, 64))
        rig.publish(0)
        rig.release(0)
        if shared:
            rig.share(0)
        last = rig.read(rig.compute, 0, 64)
        if shared:
            rig.release(0, after=[last])

    assert kinds(lambda rig: program(rig, shared=True)) == set()
    assert kinds(lambda rig: program(rig, shared=False)) == {"unleased"}


def test_an_id_is_leased_until_its_last_lease_has_ended() -> None:
    def program(rig: Rig, *, releases: int) -> None:
        rig.leased(0)
        rig.see(rig.write(rig.compute, 0, 64))
        rig.share(0)
        rig.share(0)
        for _ in range(releases):
            rig.release(0)
        last = rig.read(rig.compute, 0, 64)
        if releases < 3:
            rig.release(0, after=[last])

    assert kinds(lambda rig: program(rig, releases=2)) == set()
    assert kinds(lambda rig: program(rig, releases=3)) == {"unleased"}


def test_the_host_needs_a_lease_too() -> None:
    def program(rig: Rig, *, leased: bool) -> None:
        rig.leased(0)
        rig.host_write(0, 64)
        if not leased:
            rig.release(0)
        rig.host_read(0, 64)

    assert kinds(lambda rig: program(rig, leased=True)) == set()
    assert kinds(lambda rig: program(rig, leased=False)) == {"unleased"}


def test_a_touch_inside_work_is_judged_by_the_leases_at_the_submission_of_the_work() -> None:
    def program(rig: Rig, *, leased_before: bool) -> None:
        rig.leased()
        gate = rig.copy.submit(nothing)

        def flight() -> None:
            rig.compute.touch(writes(0, 64))

        if leased_before:
            rig.take(0)
        rig.compute.wait(gate)
        last = rig.compute.submit(flight)
        if not leased_before:
            rig.take(0)
        rig.release(0, after=[last])

    assert kinds(lambda rig: program(rig, leased_before=True)) == set()
    with rig("late") as made:
        program(made, leased_before=False)
        made.device.close()
        assert made.kinds == ["unleased"]


def test_a_touch_is_of_the_tenant_at_its_submission_however_often_the_id_changed_hands() -> None:
    def program(rig: Rig) -> None:
        rig.leased(0)
        rig.write(rig.compute, 0, 64)
        last = rig.compute.submit(lambda: rig.compute.touch(reads(0, 64)))
        for _ in range(3):
            rig.release(0, after=[last])
            rig.take(0)
            rig.write(rig.compute, 0, 64)
            last = rig.compute.submit(lambda: rig.compute.touch(reads(0, 64)))

    assert kinds(program) == set()


def test_an_id_that_is_released_more_often_than_leased_is_found() -> None:
    def program(rig: Rig) -> None:
        rig.leased(0)
        rig.release(0)
        rig.release(0)
        rig.release(5)

    assert kinds(program) == {"unleased"}
    assert "gave up blocks 0 (kv[0:64]), of which no lease was open" in judged(program)[0].message


def test_an_id_that_is_taken_under_an_open_lease_is_found_and_both_leases_count() -> None:
    def program(rig: Rig) -> None:
        rig.leased(0)
        rig.take(0)
        rig.release(0)
        rig.host_write(0, 64)

    (finding,) = judged(program)
    assert finding.kind == "early_release"
    assert "gave out blocks 0 (kv[0:64]), which `lease of blocks`" in finding.message and "still holds" in finding.message


# ---------------------------------------------------------------------- releases


def test_an_id_is_given_up_behind_the_work_that_uses_it() -> None:
    def program(rig: Rig, *, how: str) -> None:
        rig.leased(0)
        before = rig.write(rig.compute, 0, 64)
        use = rig.read(rig.compute, 0, 64, "use")
        behind = rig.compute.submit(nothing)
        if how == "seen":
            rig.see(use)
        after = {"exact": [use], "behind": [behind], "before": [before]}.get(how, [])
        rig.release(0, after=after)

    for how in ("seen", "exact", "behind"):
        assert kinds(lambda rig, how=how: program(rig, how=how)) == set()
    for how in ("before", "by time"):
        assert kinds(lambda rig, how=how: program(rig, how=how)) == {"early_release"}
    (finding,) = judged(lambda rig: program(rig, how="before"))
    assert finding.first.endswith("`use`") and finding.second.endswith("`release of blocks`")
    assert "the host had not seen compute:2 done, and no fence given with a release is behind it (given: compute:1)" in finding.message


@pytest.mark.parametrize(("policy", "seed"), RUNS)
@pytest.mark.parametrize("waits", [True, False])
def test_a_fence_of_another_stream_covers_what_it_waits_for_and_that_may_show_later(policy: str, seed: int, waits: bool) -> None:
    with rig(policy, seed) as made:
        made.leased(0)
        use = made.write(made.compute, 0, 64)
        if waits:
            made.copy.wait(use)
        made.release(0, after=[made.copy.submit(nothing)])
        made.device.close()
        assert made.kinds == ([] if waits else ["early_release"])


def test_one_of_several_fences_that_are_on_their_way_is_enough() -> None:
    def program(rig: Rig, *, waiting: str) -> None:
        rig.leased(0)
        load = rig.device.stream("load")
        use = rig.write(rig.compute, 0, 64)
        if waiting:
            rig.device._streams[waiting].wait(use)
        rig.release(0, after=[rig.copy.submit(nothing), load.submit(nothing)])

    assert kinds(lambda rig: program(rig, waiting="copy")) == set()
    assert kinds(lambda rig: program(rig, waiting="load")) == set()
    assert kinds(lambda rig: program(rig, waiting="")) == {"early_release"}


def test_a_verdict_is_given_once_every_fence_is_known_and_not_before() -> None:
    with rig("late") as made:
        made.leased(0)
        use = made.write(made.compute, 0, 64)
        ended, other = made.copy.submit(nothing), made.device.stream("load").submit(nothing)
        made.release(0, after=[ended, other])
        made.see(ended)
        assert made.kinds == []
        made.see(other)
        assert made.kinds == ["early_release"]
        made.see(use)


def test_fences_of_earlier_releases_count_as_long_as_nobody_took_the_id() -> None:
    def program(rig: Rig, *, ticketed: bool) -> None:
        rig.leased(0)
        rig.see(rig.write(rig.compute, 0, 64))
        if ticketed:
            rig.share(0)
        store = rig.read(rig.copy, 0, 64, "store")
        if ticketed:
            rig.release(0, after=[store])  # the store's own lease
        rig.release(0)

    assert kinds(lambda rig: program(rig, ticketed=True)) == set()
    assert kinds(lambda rig: program(rig, ticketed=False)) == {"early_release"}


def test_an_earlier_fence_does_not_take_the_place_of_a_later_one() -> None:
    def program(rig: Rig) -> None:
        rig.leased(0)
        rig.share(0)
        first, second = rig.write(rig.compute, 0, 64), rig.write(rig.compute, 0, 64)
        rig.release(0, after=[second])
        rig.release(0, after=[first])

    assert kinds(program) == set()


def test_every_stream_that_uses_the_id_has_to_be_covered() -> None:
    def program(rig: Rig) -> None:
        rig.leased(0)
        flight = rig.write(rig.compute, 0, 64)
        rig.copy.wait(flight)
        rig.read(rig.copy, 0, 64, "store")
        rig.release(0, after=[flight])

    (finding,) = judged(program)
    assert finding.kind == "early_release" and finding.first.endswith("`store`")


def test_the_uses_of_an_earlier_tenant_are_not_the_next_ones() -> None:
    def program(rig: Rig) -> None:
        rig.leased(0)
        rig.release(0, after=[rig.write(rig.compute, 0, 64)])
        rig.take(0)
        rig.release(0)  # never used it

    assert kinds(program) == set()


def test_work_that_says_only_later_what_it_touches_was_covered_or_not_when_its_lease_ended() -> None:
    def program(rig: Rig, *, covered: bool) -> None:
        rig.leased(0)
        gate = rig.copy.submit(nothing)
        rig.compute.wait(gate)
        flight = rig.compute.submit(lambda: rig.compute.touch(writes(0, 64)), label="flight")
        rig.release(0, after=[flight] if covered else [])

    assert kinds(lambda rig: program(rig, covered=True)) == set()
    (finding,) = judged(lambda rig: program(rig, covered=False))
    assert finding.kind == "early_release" and finding.first.endswith("`flight`")


def test_a_touch_of_earlier_work_does_not_hide_the_use_by_later_work() -> None:
    with rig("late") as made:
        made.leased(0)
        early = made.compute.submit(lambda: made.compute.touch(writes(0, 64)))
        made.read(made.compute, 0, 64, "later")
        made.see(early)
        made.release(0, after=[early])
        assert [finding.first.rpartition(", ")[2] for finding in made.checker.findings] == ["`later`"]


# ---------------------------------------------------------------------- publish last


def test_an_id_is_published_once_the_host_saw_its_bytes_complete() -> None:
    def program(rig: Rig, *, seen: bool) -> None:
        rig.leased(0)
        rig.write(rig.compute, 0, 32)
        last = rig.write(rig.compute, 32, 64, "flight")
        if seen:
            rig.see(last)
        rig.publish(0)
        rig.see(last)
        rig.release(0)

    assert kinds(lambda rig: program(rig, seen=True)) == set()
    assert kinds(lambda rig: program(rig, seen=False)) == {"early_publish"}
    findings = judged(lambda rig: program(rig, seen=False))
    assert any(
        "made blocks 0 (kv[0:64]) findable before the host saw that `flight` (compute:2, " in finding.message for finding in findings
    )


def test_a_write_that_has_run_is_not_seen_for_that() -> None:
    with rig("early") as made:
        made.leased(0)
        store = made.write(made.copy, 0, 64)
        made.device.sleep(1.0)
        assert store.done
        made.publish(0)
        assert made.kinds == ["early_publish"]


@pytest.mark.parametrize("written", [(0, 0), (0, 32), (32, 64), (16, 48)])
def test_an_id_with_bytes_that_nobody_wrote_is_not_published(written: tuple[int, int]) -> None:
    def program(rig: Rig) -> None:
        rig.leased(0)
        rig.see(rig.write(rig.compute, *written))
        rig.publish(0)

    (finding,) = judged(program)
    first_missing = 0 if written[0] else written[1]
    assert finding.kind == "early_publish" and f"but nobody wrote kv[{first_missing}] since it was taken" in finding.message


def test_bytes_of_the_tenant_before_do_not_make_an_id_complete() -> None:
    def program(rig: Rig) -> None:
        rig.leased(0)
        rig.see(rig.write(rig.compute, 0, 64))
        rig.release(0)
        rig.take(0)
        rig.publish(0)

    assert kinds(program) == {"early_publish"}


def test_bytes_that_the_host_wrote_itself_are_seen() -> None:
    def program(rig: Rig) -> None:
        rig.leased(0)
        rig.host_write(0, 64)
        rig.publish(0)

    assert kinds(program) == set()


def test_a_store_that_failed_publishes_nothing() -> None:
    def program(rig: Rig, *, again: bool) -> None:
        rig.leased(0)
        rig.see(rig.copy.submit(fails, writes(0, 64), label="store"))
        if again:
            rig.see(rig.write(rig.copy, 0, 64))
        rig.publish(0)

    assert kinds(lambda rig: program(rig, again=True)) == set()
    (finding,) = judged(lambda rig: program(rig, again=False))
    assert finding.kind == "failed_publish" and "which wrote it, failed: ValueError: no room" in finding.message


def test_a_published_id_is_not_written_until_it_is_forgotten_or_taken() -> None:
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
def test_work_that_says_inside_that_it_writes_a_published_id_was_there_before_or_not(submitted_first: bool) -> None:
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


def test_a_late_write_of_the_tenant_before_is_not_a_write_to_what_the_next_one_published() -> None:
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


def test_a_pool_without_memory_is_asked_for_leases_and_nothing_else() -> None:
    checker = Checker()
    checker.took("rows", [0, 1], ())
    checker.published("rows", 0, b"key")
    checker.released("rows", [0, 0], ())
    (finding,) = checker.findings
    assert (finding.kind, finding.memory, finding.start) == ("unleased", "rows", 0)


def test_entries_on_disk_are_judged_like_all_else() -> None:
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


def test_the_host_may_be_held_up_by_a_flight_and_by_nothing_else() -> None:
    with rig() as made:
        made.see(made.compute.submit(nothing))
        assert made.kinds == []
        made.device.stall("queue full")
        (finding,) = made.checker.findings
    assert finding.kind == "stall" and finding.first.endswith("`queue full`") and "test_checker.py:" in finding.first
    assert finding.message.endswith("it may be held up by: flight")


def test_what_may_hold_the_host_up_can_be_chosen() -> None:
    strict, lax = Checker(allowed_waits=frozenset()), Checker(allowed_waits=frozenset({"flush"}))
    for checker in (strict, lax):
        checker.stalled("flush")
        checker.stalled("flight")
    assert [len(strict.findings), len(lax.findings)] == [2, 1]
    assert strict.findings[0].message.endswith("held up by: nothing")


def test_ids_that_are_still_leased_at_the_end_are_a_leak() -> None:
    with rig() as made:
        made.leased(0, 1, 2)
        made.release(1)
        made.checker.took("rows", [4], ())
        blocks, rows = made.checker.check_idle()
        assert (blocks.kind, blocks.memory, blocks.start, blocks.stop) == ("leak", "kv", 0, BLOCK)
        assert blocks.message.startswith("2 of blocks still leased when all is done: 0, 2; the first since `lease of blocks` (host, ")
        assert rows.message.startswith("1 of rows still leased")
        assert made.checker.check_idle() == made.checker.findings == [blocks, rows]
        made.release(0, 2)
        made.checker.released("rows", [4], ())
        assert made.checker.check_idle() == []


def test_many_leaks_are_not_all_listed() -> None:
    checker = Checker()
    checker.took("rows", range(11), ())
    (finding,) = checker.check_idle()
    assert "11 of rows still leased when all is done: 0, 1, 2, 3, 4, 5, 6, 7 and 3 more" in finding.message


def test_a_cached_id_is_no_leak() -> None:
    with rig() as made:
        made.leased(0)
        made.host_write(0, 64)
        made.publish(0)
        made.release(0)
        assert made.checker.check_idle() == []


# ---------------------------------------------------------------------- poison


class Poisoned:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int, set[SimFence]]] = []
        self.checker = Checker(poison=lambda memory, start, stop, after: self.calls.append((memory, start, stop, set(after))))  # type: ignore[arg-type]
        self.checker.backed("blocks", "kv", BLOCK)

    def told(self) -> list[tuple[str, int, int, set[SimFence]]]:
        calls, self.calls = self.calls, []
        return calls


def test_a_free_id_is_poisoned_behind_its_uses_and_so_is_one_that_is_taken() -> None:
    with rig("late") as made:
        poisoned, flight, store = Poisoned(), made.compute.submit(nothing), made.copy.submit(nothing)
        checker = poisoned.checker
        checker.took("blocks", [3], ())
        assert poisoned.told() == [("kv", 192, 256, set())]
        checker.shared("blocks", [3])
        checker.released("blocks", [3], [store])
        assert poisoned.told() == []  # still leased
        checker.released("blocks", [3], [flight])
        assert poisoned.told() == [("kv", 192, 256, {flight, store})]
        checker.took("blocks", [3], [flight, store])
        assert poisoned.told() == [("kv", 192, 256, {flight, store})]
        checker.released("blocks", [3], ())  # unused by this tenant, but perhaps not yet left by the last
        assert poisoned.told() == [("kv", 192, 256, {flight, store})]


def test_a_published_id_is_poisoned_only_once_it_is_forgotten_and_unused() -> None:
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


def test_fences_that_the_host_saw_done_are_not_waited_for_again() -> None:
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


def test_a_pool_without_memory_has_nothing_to_poison() -> None:
    poisoned = Poisoned()
    poisoned.checker.took("rows", [0], ())
    poisoned.checker.released("rows", [0], ())
    assert poisoned.told() == []


def test_simulated_memory_is_poisoned_when_its_id_is_given_up() -> None:
    with rig("late") as made:
        made.leased(0, 1)
        made.checker.backed("disk", "disk", 1)
        made.checker.took("disk", [12345], ())  # no memory of the device's: left alone
        made.memory.data[: 2 * BLOCK] = 1
        made.host_write(0, 128)
        flight = made.read(made.compute, 0, 64)
        made.release(0, 1, after=[flight])
        assert made.memory.data[0] == 1, "work on its way still reads it"
        made.see(flight)
        assert made.memory.data[: 2 * BLOCK].unique().tolist() == [POISON]


def test_simulated_says_which_policies_there_are() -> None:
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


def test_findings_of_other_labels_memories_or_kinds_are_other_findings() -> None:
    checker = Checker()
    for memory in ("kv", "host"):
        for label in ("one", "two"):
            checker.host_touched(lambda memory=memory: [Access(memory, 0, 1, write=False)], label)
    assert len(checker.findings) == 4


def test_after_the_last_finding_that_there_is_room_for_nothing_more_is_kept() -> None:
    checker = Checker(max_findings=3)
    for index in range(10):
        checker.stalled(f"reason {index}")
    checker.took("rows", [0], ())
    assert checker.check_idle() == []
    assert [finding.first.rpartition("`reason ")[2] for finding in checker.findings] == ["0`", "1`", "2`"]


def test_work_without_a_label_is_called_work_and_a_touch_of_the_host_touch() -> None:
    with rig() as made:
        made.compute.submit(nothing, reads(0, 64))
        made.checker.host_touched(reads(64, 128), "")
        made.device.close()
        assert {finding.first.rpartition(", ")[2] for finding in made.checker.findings} == {"`work`", "`touch`"}


def test_the_call_site_is_the_line_that_asked_the_device() -> None:
    with rig() as made:
        made.compute.submit(nothing, reads(0, 64), label="here")
        made.device.close()
        (finding,) = made.checker.findings
    line = test_the_call_site_is_the_line_that_asked_the_device.__code__.co_firstlineno + 2
    assert finding.first == f"testing/test_checker.py:{line} test_the_call_site_is_the_line_that_asked_the_device, `here`"


def test_it_is_a_witness() -> None:
    witness: Witness = Checker()
    assert isinstance(witness, Checker)
