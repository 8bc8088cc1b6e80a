"""Happens-before: every existing order counts, and every missing one is found, whichever work ran first."""

from __future__ import annotations

from checker_rig import RUNS, Rig, judged, kinds, nothing, reads, rig, writes

from sidestream_kv.device.base import WakeUp
from sidestream_kv.device.cpu import CpuDevice
from sidestream_order.checker import Checker

# ---------------------------------------------------------------------- a race is found, and an edge ends it


def test_a_store_that_does_not_wait_for_its_step_races_in_every_schedule() -> None:
    def program(rig: Rig) -> None:
        rig.host_write(0, 64)
        rig.write(rig.compute, 0, 64, "step")
        rig.read(rig.copy, 0, 64, "store")

    (race,) = judged(program)
    assert (race.kind, race.memory, race.start, race.stop, race.streams) == ("race", "kv", 0, 64, ("compute", "copy"))


def test_a_race_is_reported_in_submission_order_with_the_missing_edge() -> None:
    for policy, seed in RUNS:
        with rig(policy, seed) as made:
            made.host_write(0, 64)
            made.write(made.compute, 0, 64, "step")
            made.read(made.copy, 0, 64, "store")
            made.device.close()
            (race,) = made.checker.findings
        assert race.first.endswith(" write, `step`") and "checker_rig.py:" in race.first
        assert race.second.endswith(" read, `store`")
        assert "`store` (copy:1, " in race.message and ") reads kv[0:64], which `step` (compute:1, " in race.message
        assert ") writes: nothing orders `store` after compute:1" in race.message
        assert str(race) == f"race: {race.message}"


def test_a_race_reports_how_far_its_stream_had_waited() -> None:
    with rig("early") as made:
        first = made.write(made.compute, 0, 64)
        made.copy.wait(first)
        made.write(made.compute, 0, 64, "second")
        made.read(made.copy, 0, 64, "store")
        made.device.close()
        (race,) = made.checker.findings
    assert race.message.endswith("nothing orders `store` after compute:2 (it knows of compute up to 1)")


def test_a_wait_on_the_device_prevents_a_race() -> None:
    def program(rig: Rig) -> None:
        rig.copy.wait(rig.write(rig.compute, 0, 64))
        rig.read(rig.copy, 0, 64)

    assert kinds(program) == set()


def test_two_writes_race_and_so_does_a_write_with_an_earlier_read() -> None:
    def two_writes(rig: Rig) -> None:
        rig.write(rig.compute, 0, 64)
        rig.write(rig.copy, 0, 64)

    def read_then_write(rig: Rig) -> None:
        rig.host_write(0, 64)
        rig.read(rig.compute, 0, 64)
        rig.write(rig.copy, 0, 64)

    assert kinds(two_writes) == kinds(read_then_write) == {"race"}


def test_a_write_must_wait_for_readers_on_every_stream() -> None:
    def program(rig: Rig, *, forgotten: bool) -> None:
        load = rig.device.stream("load")
        rig.host_write(0, 64)
        one, other = rig.read(rig.compute, 0, 64), rig.read(rig.copy, 0, 64)
        load.wait(one)
        if not forgotten:
            load.wait(other)
        rig.write(load, 0, 64)

    assert kinds(lambda rig: program(rig, forgotten=False)) == set()
    assert kinds(lambda rig: program(rig, forgotten=True)) == {"race"}


def test_two_reads_do_not_race() -> None:
    def program(rig: Rig) -> None:
        rig.host_write(0, 64)
        rig.read(rig.compute, 0, 64)
        rig.read(rig.copy, 0, 64)

    assert kinds(program) == set()


def test_work_of_one_stream_does_not_race() -> None:
    def program(rig: Rig) -> None:
        for _ in range(3):
            rig.write(rig.compute, 0, 64)
            rig.read(rig.compute, 0, 64)

    assert kinds(program) == set()


def test_a_wait_orders_later_work_behind_work_before_its_fence_only() -> None:
    def wait_too_late(rig: Rig) -> None:
        rig.host_write(0, 64)
        step = rig.write(rig.compute, 0, 64)
        rig.read(rig.copy, 0, 64)
        rig.copy.wait(step)

    def fence_too_early(rig: Rig) -> None:
        rig.host_write(0, 64)
        before = rig.compute.submit(nothing)
        rig.write(rig.compute, 0, 64)
        rig.copy.wait(before)
        rig.read(rig.copy, 0, 64)

    def a_later_fence_of_the_same_stream(rig: Rig) -> None:
        rig.write(rig.compute, 0, 64)
        rig.copy.wait(rig.compute.submit(nothing))
        rig.read(rig.copy, 0, 64)

    assert kinds(wait_too_late) == kinds(fence_too_early) == {"race"}
    assert kinds(a_later_fence_of_the_same_stream) == set()


def test_order_is_transitive_over_streams() -> None:
    def program(rig: Rig, *, cut: bool) -> None:
        load = rig.device.stream("load")
        step = rig.write(rig.compute, 0, 64)
        rig.copy.wait(step)
        between = rig.copy.submit(nothing)
        if cut:
            between = rig.device.stream("other").submit(nothing)
        load.wait(between)
        rig.write(load, 0, 64)

    assert kinds(lambda rig: program(rig, cut=False)) == set()
    assert kinds(lambda rig: program(rig, cut=True)) == {"race"}


# ---------------------------------------------------------------------- bytes


def test_adjacent_ranges_do_not_race_and_overlaps_are_exact_to_the_byte() -> None:
    def neighbours(rig: Rig) -> None:
        rig.write(rig.compute, 0, 64)
        rig.write(rig.copy, 64, 128)

    def overlap(rig: Rig) -> None:
        rig.write(rig.compute, 0, 64)
        rig.write(rig.copy, 63, 128)

    assert kinds(neighbours) == set()
    (race,) = judged(overlap)
    assert (race.start, race.stop) == (63, 64)


def test_accesses_to_different_memories_do_not_race() -> None:
    def program(rig: Rig) -> None:
        rig.device.allocate("host", 64)
        rig.compute.submit(nothing, writes(0, 64))
        rig.copy.submit(nothing, writes(0, 64, "host"))

    assert kinds(program) == set()


def test_an_empty_range_does_not_race() -> None:
    def program(rig: Rig) -> None:
        rig.write(rig.compute, 0, 64)
        rig.write(rig.copy, 32, 32)
        rig.read(rig.copy, 32, 32)

    assert kinds(program) == set()


def test_a_write_is_compared_with_the_last_access_of_each_byte() -> None:
    def program(rig: Rig, *, forgotten: int) -> None:
        rig.host_write(0, 96)
        for index in range(4):
            fence = rig.read(rig.compute if index == forgotten else rig.copy, index * 24, index * 24 + 24)
            if index != forgotten:
                last = fence
        rig.device.stream("load").wait(last)
        rig.write(rig.device._streams["load"], 0, 96)

    for forgotten in range(3):
        assert kinds(lambda rig, forgotten=forgotten: program(rig, forgotten=forgotten)) == {"race"}


def test_a_write_over_many_ranges_merges_them_and_may_be_split_again() -> None:
    def program(rig: Rig) -> None:
        for start in (0, 16, 32, 48):
            rig.write(rig.compute, start, start + 16)
        whole = rig.write(rig.compute, 0, 64)
        rig.copy.wait(whole)
        rig.read(rig.copy, 8, 56)
        rig.write(rig.copy, 20, 30)

    assert kinds(program) == set()


def test_splitting_a_range_keeps_its_earlier_accesses() -> None:
    def program(rig: Rig) -> None:
        load = rig.device.stream("load")
        load.wait(rig.write(rig.compute, 0, 64))
        rig.read(load, 0, 64)
        rig.copy.wait(rig.compute.submit(nothing))
        rig.write(rig.copy, 16, 32)  # behind the write, not behind the read

    (race,) = judged(program)
    assert (race.streams, race.start, race.stop) == (("load", "copy"), 16, 32)


# ---------------------------------------------------------------------- the host


def test_work_that_the_host_saw_done_precedes_its_later_submissions() -> None:
    def program(rig: Rig, *, seen: bool) -> None:
        step = rig.write(rig.compute, 0, 64)
        if seen:
            rig.see(step)
        rig.write(rig.copy, 0, 64)

    assert kinds(lambda rig: program(rig, seen=True)) == set()
    assert kinds(lambda rig: program(rig, seen=False)) == {"race"}


def test_seeing_work_done_after_a_submission_does_not_order_them() -> None:
    def program(rig: Rig) -> None:
        step = rig.write(rig.compute, 0, 64)
        rig.write(rig.copy, 0, 64)
        rig.see(step)

    assert kinds(program) == {"race"}


def test_a_successful_poll_orders_later_submissions() -> None:
    def program(rig: Rig) -> None:
        step = rig.write(rig.compute, 0, 64)
        while not step.poll():
            rig.device.sleep(1.0)
        rig.write(rig.copy, 0, 64)

    assert kinds(program) == set()


def test_a_thread_that_starts_late_learns_from_an_old_fence() -> None:
    with rig("late") as made:
        filled = made.write(made.compute, 0, 64, "step")
        sent: list[bool] = []

        def turn() -> WakeUp:
            if filled.poll() and not sent:
                sent.append(True)
                made.read(made.copy, 0, 64, "store")
            return WakeUp((filled,))

        made.device.thread("worker", turn).wake()
        for _ in range(300):  # after 256, old records are deleted
            made.see(made.write(made.compute, 64, 128, "step"))
        assert not sent
        for _ in range(20):
            made.device.sleep(1.0)
        made.device.close()
        assert sent and made.checker.findings == []


def test_a_fence_that_the_host_saw_done_covers_work_it_waited_for() -> None:
    def program(rig: Rig) -> None:
        rig.copy.wait(rig.write(rig.compute, 0, 64))
        rig.see(rig.copy.submit(nothing))
        rig.host_read(0, 64)

    assert kinds(program) == set()


def test_a_host_read_without_a_wait_for_the_writer_is_a_race() -> None:
    def program(rig: Rig, *, seen: bool) -> None:
        rig.host_write(0, 64)
        step = rig.write(rig.compute, 0, 64, "step")
        if seen:
            rig.see(step)
        rig.host_read(0, 64)

    assert kinds(lambda rig: program(rig, seen=True)) == set()
    (race,) = judged(lambda rig: program(rig, seen=False))
    assert race.streams == ("compute", "host")
    assert race.message.endswith("the host saw no fence that covers compute:1 done before `look`")


def test_a_host_write_after_submitting_work_on_its_bytes_is_a_race() -> None:
    def program(rig: Rig, *, filled_first: bool) -> None:
        if filled_first:
            rig.host_write(0, 64)
            rig.write(rig.copy, 0, 64)
        else:
            rig.write(rig.copy, 0, 64)
            rig.host_write(0, 64)

    assert kinds(lambda rig: program(rig, filled_first=True)) == set()
    assert kinds(lambda rig: program(rig, filled_first=False)) == {"race"}


def test_host_writes_before_and_after_a_submission_are_told_apart() -> None:
    def program(rig: Rig) -> None:
        rig.host_write(0, 8)
        rig.write(rig.copy, 0, 64)  # knows of the first fill, not of the second
        rig.host_write(0, 16)

    assert kinds(program) == {"race"}


# ---------------------------------------------------------------------- inside work


def test_a_wait_inside_work_orders_its_later_accesses() -> None:
    def program(rig: Rig, *, touch_late: bool) -> None:
        load = rig.write(rig.copy, 0, 64, "load")

        def step() -> None:
            rig.compute.wait(load)
            if touch_late:
                rig.compute.touch(reads(0, 64))

        rig.host_write(64, 128)
        rig.compute.submit(step, reads(64, 128) if touch_late else reads(0, 64), label="step")

    assert kinds(lambda rig: program(rig, touch_late=True)) == set()
    found = set()
    for policy, seed in RUNS:  # a read before the load is of bytes that nobody wrote, too
        with rig(policy, seed) as made:
            program(made, touch_late=False)
            made.device.close()
            assert "race" in made.kinds
            found |= set(made.kinds)
    assert found == {"race", "unwritten"}


def test_a_touch_before_the_wait_is_a_race() -> None:
    def program(rig: Rig) -> None:
        rig.host_write(0, 64)
        load = rig.write(rig.copy, 0, 64, "load")

        def step() -> None:
            rig.compute.touch(reads(0, 64))
            rig.compute.wait(load)

        rig.compute.submit(step, label="step")

    (race,) = judged(program)
    assert race.first.endswith("`load`") and race.second.endswith(" program, `step`")  # where the step was submitted


def test_a_wait_for_work_covers_its_accesses_and_its_own_waits() -> None:
    def program(rig: Rig) -> None:
        load = rig.write(rig.copy, 0, 64)

        def step() -> None:
            rig.compute.wait(load)
            rig.compute.touch(writes(64, 128))

        last = rig.device.stream("last")
        last.wait(rig.compute.submit(step))
        rig.write(last, 0, 128)

    assert kinds(program) == set()


def test_a_touch_outside_of_work_is_no_finding() -> None:
    checker = Checker()
    checker.touched("compute", reads(0, 64))
    assert checker.findings == []


# ---------------------------------------------------------------------- as on CUDA


def test_a_replay_does_not_repeat_waits_for_events_made_at_capture() -> None:
    def program(rig: Rig, *, external: bool) -> None:
        rig.host_write(0, 64)
        event = rig.device.event("loaded")

        def build() -> None:
            if external:
                rig.compute.wait_external(event)
            else:
                rig.compute.wait_event(event)  # not recorded yet: no part of the graph
            rig.read(rig.compute, 0, 64, "layer")

        graph = rig.compute.capture(build)
        rig.copy.submit(nothing, writes(0, 64), label="load")
        event.record(rig.copy)
        rig.compute.replay(graph, label="decode")

    assert kinds(lambda rig: program(rig, external=True)) == set()
    (race,) = judged(lambda rig: program(rig, external=False))
    assert race.second.endswith("`decode: layer`")


def test_a_wait_for_an_unrecorded_event_does_not_prevent_a_race() -> None:
    def program(rig: Rig, *, recorded: bool) -> None:
        rig.host_write(0, 64)
        rig.write(rig.copy, 0, 64)
        event = rig.device.event("loaded")
        if recorded:
            event.record(rig.copy)
        rig.compute.wait_event(event)
        rig.read(rig.compute, 0, 64)

    assert kinds(lambda rig: program(rig, recorded=True)) == set()
    assert kinds(lambda rig: program(rig, recorded=False)) == {"race"}


# ---------------------------------------------------------------------- real threads


def test_races_on_the_cpu_device_are_found() -> None:
    for ordered in (True, False):
        checker = Checker()
        device = CpuDevice(compute_threads=1, tracer=checker)
        compute, copy = device.stream("compute"), device.stream("copy")
        for index in range(200):
            span = (index % 7) * 64, (index % 7) * 64 + 64
            step = compute.submit(nothing, writes(*span), label="step")
            if ordered:
                copy.wait(step)
            store = copy.submit(nothing, reads(*span), label="store")
            compute.wait(store)
        device.close()
        # Without the wait the store may read before anything was written, too.
        assert {finding.kind for finding in checker.findings} - {"unwritten"} == (set() if ordered else {"race"})
