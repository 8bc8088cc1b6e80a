"""Streams and fences of the CUDA device on the fake GPU, and the loss of the device."""

from __future__ import annotations

import contextlib
import gc
import random
import re
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from cuda_rig import PATIENCE_S, FakeGpu, GpuStream, Wait

from sidestream.errors import DeviceError, DeviceLost, InvariantError, OutOfDeviceMemory
from sidestream_kv.device.base import WakeUp
from sidestream_kv.device.cuda import CudaDevice
from sidestream_kv.device.cuda.graphs import Capture, CudaGraph
from sidestream_kv.device.cuda.stream import CudaStream
from sidestream_kv.metrics import Metrics, Timeline

# How long something that must not happen is given to happen. A pass never depends on it, a catch does.
SILENCE_S = 0.1
ILLEGAL = "CUDA error: an illegal memory access was encountered"


def nothing() -> None: ...


def waits(gpu: FakeGpu, stream: CudaStream) -> int:
    return sum(isinstance(entry, Wait) for entry in gpu.queues[stream.handle])


# ---------------------------------------------------------------------- fences


def test_a_fence_is_done_once_the_gpu_passed_its_event(gpu: FakeGpu, device: CudaDevice) -> None:
    stream = device.stream("compute")
    first, second = stream.submit(nothing), stream.submit(nothing)
    assert (first.tick, second.tick, first.stream) == (1, 2, "compute")
    assert (first.poll(), second.poll()) == (False, False)
    gpu.step(stream.handle)
    assert (second.poll(), first.poll()) == (False, True)
    gpu.step(stream.handle)
    assert second.poll()


def test_work_is_enqueued_by_the_submitting_thread_and_then_freed(gpu: FakeGpu, device: CudaDevice) -> None:
    class Held:
        thread: int | None = None

        def work(self) -> None:
            self.thread = threading.get_ident()

    held = Held()
    fence = device.stream("compute").submit(held.work)
    assert held.thread == threading.get_ident()
    alive = weakref.ref(held)
    del held
    assert alive() is None
    assert not fence.poll()


def test_polling_a_finished_fence_again_makes_no_driver_call(gpu: FakeGpu, device: CudaDevice) -> None:
    stream = device.stream("compute")
    fences = [stream.submit(nothing) for _ in range(5)]
    gpu.run()
    assert fences[-1].poll()
    asked = sum(event.queries for event in gpu.events)
    assert asked == 5
    assert all(fence.poll() for fence in fences)
    assert sum(event.queries for event in gpu.events) == asked


def test_polling_a_late_fence_queries_only_the_oldest_event(gpu: FakeGpu, device: CudaDevice) -> None:
    stream = device.stream("compute")
    fences = [stream.submit(nothing) for _ in range(100)]
    assert not fences[-1].poll()
    assert sum(event.queries for event in gpu.events) == 1


def test_events_are_reused_in_a_long_run(gpu: FakeGpu, device: CudaDevice) -> None:
    one, other = device.stream("compute"), device.stream("store")
    for _ in range(500):
        fences = one.submit(nothing), other.submit(nothing)
        gpu.run()
        done = [fence.poll() for fence in fences]
        assert all(done)
    assert len(gpu.events) == 2


def test_no_fence_is_lost_if_threads_poll_and_submit_concurrently(gpu: FakeGpu, device: CudaDevice) -> None:
    stream = device.stream("compute")
    stop, seen = threading.Event(), []

    def poll_and_run() -> None:
        while not stop.is_set():
            gpu.run()
            if fences and not fences[-1].poll():
                seen.append(fences[-1])

    fences = [stream.submit(nothing)]
    threads = [threading.Thread(target=poll_and_run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(2000):
        fences.append(stream.submit(nothing))
        if len(fences) % 7 == 0:
            fences[-7].poll()
    stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    gpu.run()
    assert [fence.tick for fence in fences] == list(range(1, 2002))
    assert all(fence.poll() for fence in reversed(fences))
    assert len(set(map(id, device._events))) == len(device._events) == len(gpu.events)  # each given back once


# ---------------------------------------------------------------------- what work raises


def test_work_that_raises_fails_only_its_own_fence(gpu: FakeGpu, device: CudaDevice) -> None:
    stream = device.stream("store")

    class Big: ...

    kept: list[weakref.ref[Big]] = []

    def broken() -> None:
        big = Big()
        kept.append(weakref.ref(big))
        raise ValueError("broken")

    before, failed, behind = stream.submit(nothing), stream.submit(broken), stream.submit(nothing)
    gpu.run()
    assert behind.poll()
    assert isinstance(failed.failure, ValueError)
    assert (before.failure, behind.failure, kept[0]()) == (None, None, None)


def test_out_of_memory_is_a_named_error_and_the_device_continues(gpu: FakeGpu, device: CudaDevice) -> None:
    def broken() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")

    stream = device.stream("compute")
    fence = stream.submit(broken)
    assert isinstance(fence.failure, OutOfDeviceMemory)
    assert str(fence.failure) == (
        "out of device memory: CUDA out of memory. Tried to allocate 20.00 GiB.; lower the KV memory or the batch"
    )
    stream.submit(nothing)
    assert device.lost is None


def test_an_interrupt_inside_work_is_raised_after_the_work_has_its_fence(gpu: FakeGpu, device: CudaDevice) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    stream = device.stream("compute")
    with pytest.raises(KeyboardInterrupt):
        stream.submit(interrupted)
    behind = stream.submit(nothing)
    assert behind.tick == 2
    gpu.run()
    assert behind.poll()


def test_work_that_submits_to_its_own_stream_is_refused(device: CudaDevice) -> None:
    stream = device.stream("compute")
    fence = stream.submit(lambda: stream.submit(nothing) and None)
    assert isinstance(fence.failure, InvariantError)
    assert "submits work to its own stream" in str(fence.failure)


# ---------------------------------------------------------------------- order between streams


def test_a_stream_waits_on_the_device_for_the_fence_of_another(gpu: FakeGpu, device: CudaDevice) -> None:
    store, compute, ran = device.stream("store"), device.stream("compute"), []
    written = compute.submit(lambda: gpu.launch(compute, lambda: ran.append("write")))
    store.wait(written)
    stored = store.submit(lambda: gpu.launch(store, lambda: ran.append("store")))
    gpu.run(store)
    assert ran == []
    assert not stored.poll()
    gpu.run()
    assert ran == ["write", "store"]


def test_an_event_is_recorded_without_a_change_of_torchs_current_stream(gpu: FakeGpu, device: CudaDevice) -> None:
    """Changing it takes several times as long, and a step behind a load records an event for each group of layers."""
    stream, loaded = device.stream("gates"), device.event("loaded")
    entered: list[GpuStream] = []
    stream._current = contextlib.contextmanager(lambda: (yield entered.append(stream.external)))()
    fence = loaded.record(stream)
    assert entered == []
    gpu.run()
    assert fence.poll()


def test_a_stream_waits_for_the_last_record_of_an_event(gpu: FakeGpu, device: CudaDevice) -> None:
    load, compute, ran = device.stream("load"), device.stream("compute"), []
    loaded = device.event("loaded")
    compute.wait_event(loaded)  # it was never recorded, so this does nothing
    assert waits(gpu, compute) == 0
    load.submit(lambda: gpu.launch(load, lambda: ran.append("load")))
    loaded.record(load)
    compute.wait_event(loaded)
    compute.submit(lambda: gpu.launch(compute, lambda: ran.append("step")))
    gpu.run(compute)
    assert ran == []
    gpu.run()
    assert ran == ["load", "step"]


def test_reusing_an_event_does_not_change_waits_for_its_earlier_fence(gpu: FakeGpu, device: CudaDevice) -> None:
    store, compute = device.stream("store"), device.stream("compute")
    written = compute.submit(nothing)
    store.wait(written)
    stored = store.submit(nothing)
    gpu.run(compute)
    assert written.poll()
    again = compute.submit(nothing)  # with the event of `written`
    assert len(gpu.events) == 2
    gpu.run(store)
    assert stored.poll()
    assert not again.poll()


def test_an_event_is_not_reused_while_a_wait_for_it_is_being_submitted(gpu: FakeGpu, device: CudaDevice) -> None:
    """Recorded anew in between, it would stand for other work."""
    store, compute = device.stream("store"), device.stream("compute")
    written = compute.submit(nothing)
    event, free = gpu.events[-1], []
    make, asker = event.wait, threading.Thread(target=written.poll)

    def slowly(stream: GpuStream) -> None:
        gpu.run(compute)
        asker.start()
        asker.join(SILENCE_S)
        free.extend(device._events)
        make(stream)

    event.wait = slowly  # type: ignore[method-assign]
    store.wait(written)
    asker.join(PATIENCE_S)
    assert free == []
    assert device._events == [event]


def test_a_wait_for_finished_work_makes_no_driver_call(gpu: FakeGpu, device: CudaDevice) -> None:
    store, compute = device.stream("store"), device.stream("compute")
    own, past = store.submit(nothing), compute.submit(nothing)
    gpu.run(compute)
    store.wait(own)
    store.wait(past)
    assert waits(gpu, store) == 0


def test_a_gpu_stream_refuses_to_wait_for_unfinished_host_work(gpu: FakeGpu, device: CudaDevice) -> None:
    disk, load, gate = device.worker("disk"), device.stream("load"), threading.Event()
    read = disk.submit(lambda: gate.wait(PATIENCE_S) and None)
    with pytest.raises(InvariantError, match="a GPU cannot wait for host work"):
        load.wait(read)
    gate.set()
    assert device.wait_host(read, reason="test", timeout_s=PATIENCE_S)
    load.wait(read)
    assert waits(gpu, load) == 0


def test_fences_of_another_device_are_refused(device: CudaDevice) -> None:
    other = CudaDevice(driver=FakeGpu())  # type: ignore[arg-type]
    fence = other.stream("compute").submit(nothing)
    with pytest.raises(InvariantError, match="not of this device"):
        device.stream("store").wait(fence)
    other.close()


def test_a_failed_wait_call_marks_the_device_as_lost(gpu: FakeGpu, device: CudaDevice) -> None:
    """What was to be held up would run unordered."""
    compute, store = device.stream("compute"), device.stream("store")
    fence = compute.submit(nothing)
    event = gpu.events[-1]
    event.wait = lambda stream: (_ for _ in ()).throw(RuntimeError("CUDA error: invalid argument"))  # type: ignore[method-assign]
    with pytest.raises(DeviceLost):
        store.wait(fence)
    assert device.lost is not None


# ---------------------------------------------------------------------- a lost device


def test_every_call_on_a_lost_device_raises_and_close_works(gpu: FakeGpu) -> None:
    device = CudaDevice(driver=gpu)  # type: ignore[arg-type]
    compute, store = device.stream("compute"), device.stream("store")
    done = compute.submit(nothing)
    gpu.run()
    assert done.poll()
    pending, other = compute.submit(nothing), store.submit(nothing)
    gpu.broken = torch.AcceleratorError(ILLEGAL) if _takes_text() else RuntimeError(ILLEGAL)
    with pytest.raises(DeviceLost, match=r"illegal memory access.*restart the process"):
        pending.poll()
    gpu.broken = None  # whatever the driver says from now on
    for call in (
        other.poll,
        pending.poll,
        lambda: store.submit(nothing),
        lambda: compute.wait(other),
        lambda: device.allocate("kv", 1),
    ):
        with pytest.raises(DeviceLost, match="illegal memory access"):
            call()
    with pytest.raises(DeviceLost):
        device.wait_host(other, reason="test")
    assert done.poll()  # it was seen done before
    assert device.lost is not None
    gpu.broken = RuntimeError(ILLEGAL)
    device.close()
    device.close()


def _takes_text() -> bool:
    try:
        torch.AcceleratorError("x")
    except TypeError:
        return False
    return True


def test_work_that_loses_the_device_raises_in_submit(gpu: FakeGpu, device: CudaDevice) -> None:
    def broken() -> None:
        raise RuntimeError("Triton Error [CUDA]: device-side assert triggered")

    with pytest.raises(DeviceLost, match="device-side assert"):
        device.stream("compute").submit(broken)
    with pytest.raises(DeviceLost, match="device-side assert"):
        device.stream("store").submit(nothing) if device.lost is None else device._check_alive()


def test_work_whose_event_cannot_be_recorded_marks_the_device_as_lost(gpu: FakeGpu, device: CudaDevice) -> None:
    """It is on its way, and no fence will ever cover it."""

    def breaks_behind() -> None:
        gpu.broken = RuntimeError("CUDA error: invalid resource handle")

    with pytest.raises(DeviceLost):
        device.stream("compute").submit(breaks_behind)
    gpu.broken = None
    assert "invalid resource handle" in str(device.lost)


# ---------------------------------------------------------------------- waits of the host


def test_host_waits_are_counted_by_reason(gpu: FakeGpu) -> None:
    metrics = Metrics()
    device = CudaDevice(driver=gpu, metrics=metrics)  # type: ignore[arg-type]
    stream = device.stream("compute")
    fence = stream.submit(nothing)
    assert device.wait_host(fence, reason="step")
    assert device.wait_host(fence, reason="step")  # done already
    assert not device.wait_host(stream.submit(nothing), reason="drain", timeout_s=0.0)
    assert device.host_waits() == {"step": 1, "drain": 1}
    device.close()


def test_an_event_is_not_reused_while_a_thread_blocks_on_it(gpu: FakeGpu, device: CudaDevice) -> None:
    stream = device.stream("compute")
    fence = stream.submit(nothing)
    event = gpu.events[-1]
    gpu.hold_waiters = True
    waiter = threading.Thread(target=lambda: device.wait_host(fence, reason="step"))
    waiter.start()
    assert event.blocked.wait(PATIENCE_S)
    gpu.run()
    assert fence.poll()
    stream.submit(nothing)
    assert gpu.events[-1] is not event
    assert device._events == []
    event.let_go.set()
    waiter.join(PATIENCE_S)
    assert device._events == [event]
    gpu.hold_waiters = False


def test_a_thread_of_the_host_gets_a_turn_when_a_fence_is_done(gpu: FakeGpu, device: CudaDevice) -> None:
    stream, seen = device.stream("store"), threading.Event()
    fence = stream.submit(nothing)

    def turn() -> WakeUp:
        if fence.poll():
            seen.set()
            return WakeUp()
        return WakeUp(fences=(fence,))

    thread = device.thread("offload", turn)
    thread.wake()
    gpu.run()
    assert seen.wait(PATIENCE_S)
    thread.close()
    assert thread.failure is None


# ---------------------------------------------------------------------- names and handles


def test_stream_handles_are_reused_and_stream_names_are_not(gpu: FakeGpu, device: CudaDevice) -> None:
    first = device.stream("load 1")
    handle = first.handle
    first.close()
    first.close()
    assert device.stream("load 2").handle == handle
    with pytest.raises(InvariantError, match="stream load 1 exists already"):
        device.stream("load 1")
    with pytest.raises(InvariantError, match="stream load 1 is closed"):
        first.submit(nothing)


def test_only_the_compute_stream_has_high_priority(gpu: FakeGpu, device: CudaDevice) -> None:
    low, high = device.stream("store"), device.stream("compute")
    assert [made for made in gpu.made if made[0] in (low.handle, high.handle)] == [
        (low.handle, False),
        (high.handle, True),
    ]


def test_close_runs_submitted_work_and_releases_each_handle_once(gpu: FakeGpu) -> None:
    device = CudaDevice(driver=gpu)  # type: ignore[arg-type]
    streams = [device.stream(f"load {index}") for index in range(3)]
    fences = [stream.submit(nothing) for stream in streams]
    device.close()
    device.close()
    assert all(fence.poll() for fence in fences)
    assert sorted(handle for handle, _ in gpu.kept) == sorted(stream.handle for stream in streams)
    assert gpu.pinned == {}
    with pytest.raises(InvariantError, match="closed"):
        device.stream("late")


def test_a_timeline_span_goes_from_enqueueing_to_the_poll_that_saw_the_end(gpu: FakeGpu) -> None:
    timeline = Timeline()
    device = CudaDevice(driver=gpu, timeline=timeline)  # type: ignore[arg-type]
    fence = device.stream("compute").submit(nothing, label="step 1")
    assert timeline.spans() == []
    gpu.run()
    fence.poll()
    (span,) = timeline.spans()
    assert (span.track, span.name) == ("compute", "step 1")
    device.close()


def test_an_error_that_does_not_lose_the_device_fails_its_fence_only(gpu: FakeGpu, device: CudaDevice) -> None:
    def broken() -> None:
        raise DeviceError("cuMemcpyBatchAsync failed: CUDA_ERROR_INVALID_VALUE (1), invalid argument")

    stream = device.stream("store")
    fence = stream.submit(broken)
    gpu.run()
    assert fence.poll()
    assert isinstance(fence.failure, DeviceError)
    assert not isinstance(fence.failure, DeviceLost)


# ---------------------------------------------------------------------- graphs


def test_a_graph_cannot_wait_for_an_event_that_was_never_recorded_h5(device: CudaDevice) -> None:
    """There would be no node, and nothing that says so."""
    compute = device.stream("compute")
    compute._capture = Capture([], [])
    with pytest.raises(InvariantError, match="event loaded was never recorded"):
        compute.wait_external(device.event("loaded"))
    assert compute._capture.waits == []
    compute._capture = None


def test_a_graph_waits_for_an_event_outside_it_h5(gpu: FakeGpu, device: CudaDevice) -> None:
    load, compute = device.stream("load"), device.stream("compute")
    loaded = device.event("loaded")
    load.submit(nothing)
    loaded.record(load)
    compute._capture = Capture([], [])
    compute.wait_external(loaded)
    assert (waits(gpu, compute), compute._capture.waits) == (1, [loaded])
    compute._capture = None


def test_a_graph_can_be_enqueued_only_by_work_of_its_stream(device: CudaDevice) -> None:
    with pytest.raises(InvariantError, match="only its own work may enqueue a graph"):
        device.stream("compute").enqueue(CudaGraph(None, (), (), 0))


@pytest.fixture
def current(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The streams that are current, one within the other. What torch captures is nothing, but what fails in a capture
    keeps it from ending.
    """
    entered: list[object] = []

    class Current:
        def __init__(self, external: object) -> None:
            self._external = external

        def __enter__(self) -> None:
            self._depth = len(entered)
            entered.append(self._external)

        def __exit__(self, *raised: object) -> None:
            del entered[self._depth :]

    class Capturing:
        def __init__(self, graph: object, *, stream: object, **how: object) -> None:
            self._stream = stream

        def __enter__(self) -> None:
            entered.append(self._stream)

        def __exit__(self, kind: object, *raised: object) -> None:
            assert entered[-1] is self._stream
            gpu.broken = None
            if kind is not None:
                raise invalidated()
            entered.pop()

    class Nothing:
        def replay(self) -> None: ...

        def pool(self) -> None: ...

    monkeypatch.setattr(gpu, "current", Current)
    monkeypatch.setattr(torch.cuda, "graph", Capturing)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Nothing)
    return entered


def invalidated() -> RuntimeError:
    return RuntimeError("CUDA error: operation failed due to a previous error during capture")


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")


def refuse() -> None:
    raise InvariantError("no")


@pytest.mark.parametrize(
    ("work", "named", "said"),
    [
        (out_of_memory, OutOfDeviceMemory, "out of device memory: CUDA out of memory. Tried to allocate 2.00 GiB.;"),
        (refuse, InvariantError, "no"),
    ],
)
@pytest.mark.parametrize("side", [False, True])
def test_a_failed_capture_raises_its_first_error_and_the_stream_continues(
    gpu: FakeGpu,
    device: CudaDevice,
    current: list[object],
    work: Callable[[], None],
    named: type[Exception],
    said: str,
    side: bool,
) -> None:
    stream, seen = device.stream("compute"), list[list[object]]()

    def captured(work: Callable[[], None], **how: CudaGraph) -> CudaGraph:
        return stream.capture(lambda: stream.submit(work) and None, **how)

    def fail() -> None:
        gpu.broken = invalidated()  # what comes behind it in the capture fails as well
        work()

    first = captured(nothing)
    with pytest.raises(named, match=re.escape(said)):
        captured(lambda: stream.on_side_stream(fail) if side else fail(), beside=first)
    assert current == []
    second = captured(lambda: seen.append([*current]), beside=first)
    assert seen == [[stream.external] * 3]
    fences = [stream.submit(nothing), stream.replay(first), stream.replay(second)]
    gpu.run()
    assert [(fence.poll(), fence.failure) for fence in fences] == [(True, None)] * 3


def test_objects_made_by_a_failed_capture_are_freed_at_once(device: CudaDevice, current: list[object]) -> None:
    """Not when the interpreter next looks for cycles: others need the memory now."""
    stream = device.stream("compute")
    made: list[weakref.ref[object]] = []

    def build() -> None:
        buffer = torch.zeros(4)
        made.append(weakref.ref(buffer))
        out_of_memory()

    gc.disable()
    try:
        with contextlib.suppress(OutOfDeviceMemory):
            stream.capture(build)
        assert made[0]() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------------- the side stream


def test_side_stream_work_runs_after_earlier_work_and_before_the_join(gpu: FakeGpu) -> None:
    for seed in range(40):
        device = CudaDevice(driver=gpu)  # type: ignore[arg-type]
        stream, done = device.stream("compute"), list[str]()

        def work(stream: CudaStream = stream, done: list[str] = done) -> None:
            def beside(name: str) -> None:
                assert stream.side_handle is not None
                gpu.launch(GpuStream(gpu, stream.side_handle), lambda: done.append(name))

            gpu.launch(stream, lambda: done.append("before"))
            stream.on_side_stream(lambda: beside("side"))
            gpu.launch(stream, lambda: done.append("between"))
            stream.on_side_stream(lambda: beside("side, too"))
            gpu.launch(stream, lambda: done.append("last"))
            stream.join()
            gpu.launch(stream, lambda: done.append("behind"))

        stream.submit(work)
        stream.submit(work)
        gpu.run(rng=random.Random(seed))
        assert [done[at] for at in (0, 5, 6, 11)] == ["before", "behind"] * 2
        for turn in (done[:6], done[6:]):
            assert turn.index("side") < turn.index("side, too") > turn.index("between") < turn.index("last")
        device.close()
        assert len(gpu.kept) == len({handle for handle, _ in gpu.kept}) == 2


def test_work_that_does_not_join_its_side_stream_fails_with_a_complete_fence(gpu: FakeGpu, device: CudaDevice) -> None:
    stream, done = device.stream("compute"), list[str]()

    def forgets() -> None:
        stream.on_side_stream(lambda: gpu.launch(GpuStream(gpu, stream.side_handle or 0), lambda: done.append("side")))

    def fails() -> None:
        forgets()
        raise ValueError("something else")

    for work, error in ((forgets, InvariantError), (fails, ValueError)):
        fence = stream.submit(work)
        assert isinstance(fence.failure, error)
        done.clear()
        while not fence.poll():
            gpu.step(stream.handle) or gpu.step(stream.side_handle or 0)
        assert done == ["side"]
    stream.submit(stream.join)  # nothing is left to join
    assert waits(gpu, stream) == 0


def test_only_work_of_a_stream_may_use_its_side_stream(device: CudaDevice) -> None:
    with pytest.raises(InvariantError, match="only its own work may use the side stream"):
        device.stream("compute").on_side_stream(nothing)
