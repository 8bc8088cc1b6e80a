"""Blocks must be leased while work uses them, and released only after that work."""

from __future__ import annotations

import pytest
from checker_rig import Rig, judged, kinds, nothing, reads, rig, writes

# ---------------------------------------------------------------------- leases


def test_work_on_a_block_without_a_lease_is_found_at_submission() -> None:
    def never(rig: Rig) -> None:
        rig.leased()
        rig.write(rig.compute, 0, 64)

    def no_longer(rig: Rig) -> None:
        rig.leased(0)
        step = rig.write(rig.compute, 0, 64)
        rig.see(step)
        rig.release(0)
        rig.read(rig.compute, 0, 64)

    def in_time(rig: Rig) -> None:
        rig.leased(0)
        rig.write(rig.compute, 0, 64)
        rig.release(0, after=[rig.read(rig.compute, 0, 64)])

    assert kinds(never) == kinds(no_longer) == {"unleased"}
    assert kinds(in_time) == set()
    (finding,) = judged(no_longer)
    assert "touches blocks 0 (kv[0:64]), which had no open lease when it was submitted" in finding.message


def test_a_cached_block_may_be_read_under_a_shared_lease_only() -> None:
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


def test_a_block_is_leased_until_its_last_lease_ends() -> None:
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


def test_an_access_of_the_host_without_a_lease_is_found() -> None:
    def program(rig: Rig, *, leased: bool) -> None:
        rig.leased(0)
        rig.host_write(0, 64)
        if not leased:
            rig.release(0)
        rig.host_read(0, 64)

    assert kinds(lambda rig: program(rig, leased=True)) == set()
    assert kinds(lambda rig: program(rig, leased=False)) == {"unleased"}


def test_a_touch_inside_work_needs_a_lease_when_the_work_is_submitted() -> None:
    def program(rig: Rig, *, leased_before: bool) -> None:
        rig.leased()
        gate = rig.copy.submit(nothing)

        def step() -> None:
            rig.compute.touch(writes(0, 64))

        if leased_before:
            rig.take(0)
        rig.compute.wait(gate)
        last = rig.compute.submit(step)
        if not leased_before:
            rig.take(0)
        rig.release(0, after=[last])

    assert kinds(lambda rig: program(rig, leased_before=True)) == set()
    with rig("late") as made:
        program(made, leased_before=False)
        made.device.close()
        assert made.kinds == ["unleased"]


def test_a_touch_counts_for_the_lease_open_at_submission() -> None:
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


def test_releasing_a_block_more_often_than_leased_is_found() -> None:
    def program(rig: Rig) -> None:
        rig.leased(0)
        rig.release(0)
        rig.release(0)
        rig.release(5)

    assert kinds(program) == {"unleased"}
    assert "released blocks 0 (kv[0:64]), which had no open lease" in judged(program)[0].message


def test_taking_a_block_under_an_open_lease_is_found_and_both_leases_count() -> None:
    def program(rig: Rig) -> None:
        rig.leased(0)
        rig.take(0)
        rig.release(0)
        rig.host_write(0, 64)

    (finding,) = judged(program)
    assert finding.kind == "early_release"
    assert (
        "gave out blocks 0 (kv[0:64]), which `lease of blocks`" in finding.message and "still holds" in finding.message
    )


# ---------------------------------------------------------------------- releases


def test_a_release_that_does_not_cover_the_last_use_is_found() -> None:
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
    assert (
        "the host had not seen compute:2 done, and no fence given with a release comes after it (given: compute:1)"
        in finding.message
    )


@pytest.mark.parametrize("waits", [True, False])
def test_a_fence_of_another_stream_covers_work_that_it_waits_for(waits: bool) -> None:
    def program(made: Rig) -> None:
        made.leased(0)
        use = made.write(made.compute, 0, 64)
        if waits:
            made.copy.wait(use)
        made.release(0, after=[made.copy.submit(nothing)])

    assert kinds(program) == (set() if waits else {"early_release"})


def test_one_of_several_pending_fences_may_cover_the_last_use() -> None:
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


def test_a_release_is_judged_once_all_its_fences_are_known() -> None:
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


def test_fences_of_earlier_releases_count_until_the_block_is_reused() -> None:
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


def test_an_earlier_fence_does_not_replace_a_later_one_of_its_stream() -> None:
    def program(rig: Rig) -> None:
        rig.leased(0)
        rig.share(0)
        first, second = rig.write(rig.compute, 0, 64), rig.write(rig.compute, 0, 64)
        rig.release(0, after=[second])
        rig.release(0, after=[first])

    assert kinds(program) == set()


def test_a_release_must_cover_every_stream_that_uses_the_block() -> None:
    def program(rig: Rig) -> None:
        rig.leased(0)
        step = rig.write(rig.compute, 0, 64)
        rig.copy.wait(step)
        rig.read(rig.copy, 0, 64, "store")
        rig.release(0, after=[step])

    (finding,) = judged(program)
    assert finding.kind == "early_release" and finding.first.endswith("`store`")


def test_uses_under_an_earlier_lease_do_not_count_for_the_next_one() -> None:
    def program(rig: Rig) -> None:
        rig.leased(0)
        rig.release(0, after=[rig.write(rig.compute, 0, 64)])
        rig.take(0)
        rig.release(0)  # never used it

    assert kinds(program) == set()


def test_accesses_declared_after_the_lease_ended_are_checked_against_its_end() -> None:
    def program(rig: Rig, *, covered: bool) -> None:
        rig.leased(0)
        gate = rig.copy.submit(nothing)
        rig.compute.wait(gate)
        step = rig.compute.submit(lambda: rig.compute.touch(writes(0, 64)), label="step")
        rig.release(0, after=[step] if covered else [])

    assert kinds(lambda rig: program(rig, covered=True)) == set()
    (finding,) = judged(lambda rig: program(rig, covered=False))
    assert finding.kind == "early_release" and finding.first.endswith("`step`")


def test_a_touch_of_earlier_work_does_not_hide_the_use_by_later_work() -> None:
    with rig("late") as made:
        made.leased(0)
        early = made.compute.submit(lambda: made.compute.touch(writes(0, 64)))
        made.read(made.compute, 0, 64, "later")
        made.see(early)
        made.release(0, after=[early])
        assert [finding.first.rpartition(", ")[2] for finding in made.checker.findings] == ["`later`"]
