"""The CPU device: streams are FIFOs, fences order them, submissions never block, and finished work holds no object."""

from __future__ import annotations

import functools
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from sidestream.errors import InvariantError
from sidestream_kv.device.base import CopyBatch
from sidestream_kv.device.channel import Bell
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.metrics import Metrics, Timeline
from sidestream_kv.types import Fence

# Nothing here takes long; a test that would hang fails instead.
PATIENCE_S = 10.0


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(compute_threads=3)
    yield device
    device.close()


class Barrier:
    """Work that holds its stream up until it is opened, and says when it got there."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self._open.wait(PATIENCE_S)

    def open(self) -> None:
        self._open.set()


def finish(device: CpuDevice, *fences: Fence) -> None:
    for fence in fences:
        assert device.wait_host(fence, reason="test", timeout_s=PATIENCE_S)


# ---------------------------------------------------------------------- one stream


def test_work_of_a_stream_runs_in_order_of_submission(device: CpuDevice) -> None:
    stream, ran = device.stream("compute"), []
    fences = [stream.submit(lambda i=i: ran.append(i)) for i in range(100)]
    finish(device, fences[-1])
    assert ran == list(range(100))
    assert all(fence.poll() for fence in fences)
    assert [fence.tick for fence in fences] == list(range(1, 101))
    assert {fence.stream for fence in fences} == {"compute"}


def test_a_fence_is_not_done_before_its_work_is(device: CpuDevice) -> None:
    stream, barrier = device.stream("compute"), Barrier()
    before, held, behind = stream.submit(lambda: None), stream.submit(barrier), stream.submit(lambda: None)
    assert barrier.reached.wait(PATIENCE_S)
    assert (before.poll(), held.poll(), behind.poll()) == (True, False, False)
    barrier.open()
    finish(device, behind)
    assert held.poll()


def test_work_that_raises_fails_only_its_own_fence(device: CpuDevice) -> None:
    stream, ran = device.stream("copy"), []
    error = ValueError("broken")

    def broken() -> None:
        raise error

    first, bad, last = stream.submit(lambda: ran.append(1)), stream.submit(broken), stream.submit(lambda: ran.append(2))
    finish(device, last)
    assert ran == [1, 2]
    assert (first.failure, bad.failure, last.failure) == (None, error, None)


def test_system_exit_inside_work_does_not_stop_the_stream(device: CpuDevice) -> None:
    stream = device.stream("copy")

    def leave() -> None:
        raise SystemExit

    bad, last = stream.submit(leave), stream.submit(lambda: None)
    finish(device, last)
    assert isinstance(bad.failure, SystemExit)


def test_submission_never_blocks_with_10_000_pending(device: CpuDevice) -> None:
    stream, other, barrier, ran = device.stream("copy"), device.stream("compute"), Barrier(), []
    held = stream.submit(barrier)
    for i in range(10_000):
        last = stream.submit(lambda i=i: ran.append(i))
        other.wait(last)
    behind = other.submit(lambda: None)
    assert barrier.reached.wait(PATIENCE_S)
    assert not held.poll() and not ran and not behind.poll()  # so all of it was pending while this thread went on
    barrier.open()
    finish(device, behind)
    assert len(ran) == 10_000


# ---------------------------------------------------------------------- between streams


def test_streams_run_concurrently(device: CpuDevice) -> None:
    barrier = Barrier()
    held = device.stream("copy").submit(barrier)
    finish(device, device.stream("compute").submit(lambda: None))
    assert not held.poll()
    barrier.open()


def test_only_work_after_a_wait_runs_after_its_fence(device: CpuDevice) -> None:
    compute, copy, barrier, order = device.stream("compute"), device.stream("copy"), Barrier(), []
    held = compute.submit(lambda: (barrier(), order.append("step")))
    before = copy.submit(lambda: order.append("copy before the wait"))
    copy.wait(held)
    behind = copy.submit(lambda: order.append("copy behind the wait"))
    finish(device, before)
    assert barrier.reached.wait(PATIENCE_S)
    assert order == ["copy before the wait"] and not behind.poll()
    barrier.open()
    finish(device, behind)
    assert order == ["copy before the wait", "step", "copy behind the wait"]


def test_a_capture_that_waits_for_another_stream_raises(device: CpuDevice) -> None:
    compute, copy = device.stream("compute"), device.stream("copy")
    own, other = compute.submit(lambda: None), copy.submit(lambda: None)
    with pytest.raises(InvariantError, match=r"during a capture.*use `wait_external`"):
        compute.capture(lambda: compute.wait(other))
    assert compute.capture(lambda: compute.wait(own)).nodes == ()
    compute.wait(other)  # the capture has ended


def test_a_stream_wait_does_not_block_the_calling_thread(device: CpuDevice) -> None:
    compute, copy, barrier = device.stream("compute"), device.stream("copy"), Barrier()
    copy.wait(compute.submit(barrier))
    behind = copy.submit(lambda: None)
    assert not behind.poll()
    assert device.host_waits() == {}
    barrier.open()
    finish(device, behind)


def test_a_wait_inside_work_blocks_that_work(device: CpuDevice) -> None:
    compute, load, barrier, order = device.stream("compute"), device.stream("load"), Barrier(), []
    loaded = load.submit(lambda: (barrier(), order.append("load")))
    first_layer = threading.Event()

    def step() -> None:
        order.append("layer 0")
        first_layer.set()
        compute.wait(loaded)
        order.append("layer 1")

    computed = compute.submit(step)
    assert first_layer.wait(PATIENCE_S) and barrier.reached.wait(PATIENCE_S)
    assert order == ["layer 0"]
    barrier.open()
    finish(device, computed)
    assert order == ["layer 0", "load", "layer 1"]


def test_a_stream_may_wait_for_its_own_earlier_work(device: CpuDevice) -> None:
    stream = device.stream("compute")
    earlier = stream.submit(lambda: None)
    stream.wait(earlier)
    finish(device, stream.submit(lambda: stream.wait(earlier)))


def test_a_stream_that_waits_for_failed_work_continues(device: CpuDevice) -> None:
    def broken() -> None:
        raise OSError

    compute, load = device.stream("compute"), device.stream("load")
    compute.wait(load.submit(broken))
    finish(device, compute.submit(lambda: None))


def test_streams_with_equal_names_on_two_devices_are_different(device: CpuDevice) -> None:
    other, barrier = CpuDevice(), Barrier()
    here, there = device.stream("compute"), other.stream("compute")
    here.wait(there.submit(barrier))
    behind = here.submit(lambda: None)
    assert barrier.reached.wait(PATIENCE_S)
    assert not device.wait_host(behind, reason="test", timeout_s=0.05)
    barrier.open()
    finish(device, behind)
    other.close()


class ForeignFence:
    stream, tick, failure = "elsewhere", 1, None

    def poll(self) -> bool:
        return False


def test_a_fence_of_another_kind_of_stream_is_refused(device: CpuDevice) -> None:
    stream = device.stream("compute")
    with pytest.raises(InvariantError, match="of another kind of stream"):
        stream.wait(ForeignFence())
    with pytest.raises(InvariantError, match="not of this device"):
        device.wait_host(ForeignFence(), reason="test")


# ---------------------------------------------------------------------- what the host waits for


def test_host_waits_for_unfinished_work_are_counted_by_reason() -> None:
    metrics = Metrics()
    device = CpuDevice(metrics=metrics)
    stream, barrier = device.stream("compute"), Barrier()
    fence = stream.submit(barrier)
    assert not device.wait_host(fence, reason="step", timeout_s=0)
    assert not device.wait_host(fence, reason="close", timeout_s=0)
    assert not device.wait_host(fence, reason="step", timeout_s=0)
    barrier.open()
    finish(device, fence)
    counted = device.host_waits()
    assert (counted["step"], counted["close"]) == (2, 1)
    assert device.wait_host(fence, reason="late")
    assert "late" not in device.host_waits()
    assert metrics.value("host_waits_total", "step") == 2
    device.close()


def test_a_host_wait_ends_when_its_bell_rings_or_its_fence_is_done() -> None:
    device, bell, barrier = CpuDevice(), Bell(), Barrier()
    fence = device.stream("compute").submit(barrier)
    threading.Thread(target=bell.ring).start()
    assert not device.wait_host(fence, reason="step", bell=bell)
    assert not bell.rung
    threading.Thread(target=barrier.open).start()
    assert device.wait_host(fence, reason="step", bell=bell)
    device.close()


# ---------------------------------------------------------------------- what a stream holds on to


class Held:
    """Stands for a tensor or a lease."""


def test_objects_held_by_work_are_freed_when_its_fence_is_done(device: CpuDevice) -> None:
    stream, barrier = device.stream("copy"), Barrier()
    held = Held()
    gone = weakref.ref(held)
    stream.submit(barrier)
    fence = stream.submit(functools.partial(id, held))
    del held
    assert gone() is not None
    barrier.open()
    finish(device, fence)
    assert gone() is None


def test_local_variables_of_failed_work_are_freed_although_its_error_is_kept(device: CpuDevice) -> None:
    had: list[weakref.ref[Held]] = []

    def step() -> None:
        activations = Held()
        had.append(weakref.ref(activations))
        raise ValueError("out of luck")

    fence = device.stream("compute").submit(step)
    finish(device, fence)
    assert had[0]() is None
    assert "step" in "".join(traceback.format_exception(fence.failure))  # where it happened is still known


# ---------------------------------------------------------------------- the end


def test_close_runs_submitted_work_of_every_stream() -> None:
    device, ran = CpuDevice(), []
    compute, copy, barrier = device.stream("compute"), device.stream("copy"), Barrier()
    copied = copy.submit(lambda: (barrier(), ran.append("copy")))
    compute.wait(copied)
    compute.submit(lambda: ran.append("step"))
    barrier.open()
    device.close()
    assert ran == ["copy", "step"]
    device.close()


def test_a_closed_stream_refuses_work() -> None:
    device = CpuDevice()
    stream = device.stream("copy")
    device.close()
    with pytest.raises(InvariantError, match="stream copy is closed: store 3 blocks cannot be submitted"):
        stream.submit(lambda: None, label="store 3 blocks")


def test_two_streams_of_a_device_cannot_share_a_name(device: CpuDevice) -> None:
    device.stream("copy")
    with pytest.raises(InvariantError, match="stream copy exists already"):
        device.stream("copy")


# ---------------------------------------------------------------------- the timeline


def test_the_timeline_has_a_span_for_each_work_once_its_fence_is_done() -> None:
    timeline = Timeline()
    device = CpuDevice(timeline=timeline)
    copy = device.stream("copy")
    copy.submit(lambda: None, label="store 2 blocks")
    finish(device, copy.submit(lambda: None))
    spans = timeline.spans()
    assert [(span.track, span.name) for span in spans] == [("copy", "store 2 blocks"), ("copy", "work")]
    assert spans[0].start_ns <= spans[0].stop_ns <= spans[1].start_ns
    device.close()


def test_the_timeline_shows_waits_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidestream_kv.device.host._VISIBLE_WAIT_NS", -1)
    timeline = Timeline()
    device = CpuDevice(timeline=timeline)
    compute, load, barrier = device.stream("compute"), device.stream("load"), Barrier()
    compute.wait(load.submit(barrier))
    step = compute.submit(lambda: None, label="decode 1")
    barrier.open()
    finish(device, step)
    assert [span.name for span in timeline.spans() if span.track == "compute"] == ["wait for load", "decode 1"]
    device.close()


# ---------------------------------------------------------------------- threads


def threads_inside(device: CpuDevice, name: str) -> Callable[[], int]:
    stream, seen = device.stream(name), []

    def count() -> int:
        finish(device, stream.submit(lambda: seen.append(torch.get_num_threads())))
        return int(seen[-1])

    return count


@pytest.mark.parametrize(
    "names", [("compute", "store", "load"), ("store", "load", "compute")], ids=["compute first", "compute last"]
)
def test_the_compute_stream_uses_the_configured_threads_and_others_one(
    device: CpuDevice, names: tuple[str, ...]
) -> None:
    counts = {
        name: threads_inside(device, name) for name in names
    }  # all streams exist before one of them runs anything
    assert {name: count() for name, count in counts.items()} == {"compute": 3, "store": 1, "load": 1}


def test_streams_do_not_change_the_thread_count_of_other_threads(device: CpuDevice) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        device.stream("compute")
        device.stream("store")
        seen = [torch.get_num_threads()]
        newcomer = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        newcomer.start()
        newcomer.join()
        assert seen == [2, 2]
    finally:
        torch.set_num_threads(before)


def has_libgomp() -> bool:
    """Whether torch computes with GNU OpenMP here, whose threads can be seen."""
    maps = Path("/proc/self/maps")
    return maps.exists() and "libgomp" in maps.read_text(encoding="utf-8", errors="replace")


def compute_with_three_threads() -> None:
    torch.set_num_threads(3)
    torch.ones(1 << 20).mul_(2)


def foreign_threads() -> set[int]:
    """Threads of the process that Python did not start."""
    return {int(thread.name) for thread in Path("/proc/self/task").iterdir()} - {
        thread.native_id for thread in threading.enumerate()
    }


def fresh_threads(known: set[int], *, expected: int) -> int:
    """How many foreign threads are not known, once they are as many as expected or time is up: threads end when they
    like.
    """
    until = time.monotonic() + PATIENCE_S
    while len(foreign_threads() - known) != expected and time.monotonic() < until:
        pass
    return len(foreign_threads() - known)


@pytest.mark.skipif(not has_libgomp(), reason="torch computes without libgomp")
def test_a_compute_stream_adds_no_openmp_threads_to_the_process(device: CpuDevice) -> None:
    """A model is loaded by one thread and run by another: with a team for each, there are more threads than cores."""
    counts: list[int] = []

    def load_and_run() -> None:
        known = foreign_threads()
        compute_with_three_threads()
        counts.append(fresh_threads(known, expected=2))
        finish(device, device.stream("compute").submit(compute_with_three_threads))
        counts.append(fresh_threads(known, expected=2))

    before = torch.get_num_threads()
    loader = threading.Thread(target=load_and_run)
    loader.start()
    loader.join()
    torch.set_num_threads(before)
    assert counts == [2, 2]


def test_the_openmp_threads_of_the_creating_thread_end_before_the_stream_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[threading.Thread, list[str]]] = []

    def end() -> None:
        ended.append(
            (
                threading.current_thread(),
                [thread.name for thread in threading.enumerate() if thread.name == "sidestream-compute"],
            )
        )

    monkeypatch.setattr("sidestream_kv.device.cpu._end_own_openmp_team", end)
    for threads in (1, 3):
        device = CpuDevice(compute_threads=threads)
        for name in ("store", "compute", "load"):
            device.stream(name)
        device.close()
    assert ended == [(threading.current_thread(), [])]  # for the stream that has a team of its own, and for no other


@pytest.mark.parametrize("failure", [OSError("no such library"), AttributeError("no such function")], ids=repr)
def test_a_system_without_libgomp_computes_too(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def load(name: str) -> None:
        raise failure

    monkeypatch.setattr("sidestream_kv.device.cpu.ctypes.CDLL", load)
    finish(device, device.stream("compute").submit(compute_with_three_threads))


def test_a_copy_of_many_segments_takes_the_interpreter_lock_once(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call for each segment would take the lock each time from a forward pass that needs it for each kernel."""
    source, target = device.allocate("host", 4096), device.allocate("kv", 4096)
    source.data.copy_(torch.arange(4096) % 251)
    sources, targets = np.array([0, 64, 128, 512, 640, 1024]), np.array([512, 576, 640, 0, 128, 2048])
    copy_all, counts = torch._foreach_copy_, []

    def record(to: Sequence[torch.Tensor], from_: Sequence[torch.Tensor]) -> None:
        counts.append(len(to))
        copy_all(to, from_)

    monkeypatch.setattr(torch, "_foreach_copy_", record)
    stream = device.stream("load")
    finish(device, stream.submit_copy(CopyBatch(source, target, sources, targets, 64), 0, 6))

    assert counts == [3]  # three segments in a row, two that are as far apart in both, and one
    for from_, to in zip(sources.tolist(), targets.tolist(), strict=True):
        assert torch.equal(target.data[to : to + 64], source.data[from_ : from_ + 64])
    assert int((target.data != 0).sum()) <= 6 * 64


def test_events_for_graphs_are_refused_on_a_cpu(device: CpuDevice) -> None:
    with pytest.raises(InvariantError, match="a CPU has no events"):
        device.event("gate 0")
    with pytest.raises(InvariantError, match="cannot wait for an event: a CPU has none"):
        device.stream("compute").wait_external(None)


def test_a_failed_fence_drops_the_local_variables_of_the_error_and_of_its_cause(device: CpuDevice) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def allocate() -> None:
        tensor = torch.zeros(4)
        held.append(weakref.ref(tensor))
        raise ValueError("cause")

    def work() -> None:
        try:
            allocate()
        except ValueError as error:
            raise RuntimeError("failed") from error

    fence = device.stream("compute").submit(work)
    assert device.wait_host(fence, reason="test")
    assert str(fence.failure) == "failed"
    assert held[0]() is None
