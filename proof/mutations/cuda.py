"""Rules of the CUDA device: waits between streams, and failures. No schedule runs on a GPU; unit tests on a fake GPU
detect the removal of these rules. The torture test of a device (`python -m proof torture --device cuda --mutations`)
removes the other tables' rules on a real GPU.
"""

from __future__ import annotations

from proof.mutations.operators import Always, Never
from proof.mutations.tables import Exempt, Fault, Mutation

_STREAMS = "device/test_cuda_streams.py"
_UNSEEN = "schedules run on the simulated device"

MUTATIONS: tuple[Mutation, ...] = ()

EQUIVALENT = (
    Fault("H1", "no stream of a GPU waits for another one")
    .without("gpu-stream-waits-for-a-fence")
    .unreached(_UNSEEN, f"{_STREAMS}::test_a_stream_waits_on_the_device_for_the_fence_of_another"),
    Fault("H1", "a stream of a GPU does not wait for an event that another one recorded")
    .without("gpu-stream-waits-for-an-event")
    .unreached(_UNSEEN, f"{_STREAMS}::test_a_stream_waits_for_the_last_record_of_an_event"),
    Fault("H5", "a layer of a captured step reads KV that a load has not written yet")
    .without("gpu-graph-waits-for-its-event")
    .unreached(_UNSEEN, f"{_STREAMS}::test_a_graph_waits_for_an_event_outside_it_h5"),
    Fault("H1", "a stream of a GPU runs on without waiting for work of a host thread")
    .without("gpu-does-not-wait-for-host-work", Never())
    .unreached(_UNSEEN, f"{_STREAMS}::test_a_gpu_stream_refuses_to_wait_for_unfinished_host_work"),
    Fault("H1", "work beside the main stream reads what the main stream has not written yet")
    .without("side-stream-starts-after-the-main-stream")
    .unreached(_UNSEEN, f"{_STREAMS}::test_side_stream_work_runs_after_earlier_work_and_before_the_join"),
    Fault("H1", "work after the join reads what the side stream has not written yet")
    .without("main-stream-waits-for-the-side-stream")
    .unreached(_UNSEEN, f"{_STREAMS}::test_side_stream_work_runs_after_earlier_work_and_before_the_join"),
    Fault("H1", "work that asks for the join goes on without it")
    .without("gpu-work-joins-its-side-stream")
    .unreached(_UNSEEN, f"{_STREAMS}::test_side_stream_work_runs_after_earlier_work_and_before_the_join"),
    Fault("H3", "the fence of failed work is done while its side stream still uses memory")
    .without("failed-work-joins-its-side-stream")
    .unreached(_UNSEEN, f"{_STREAMS}::test_work_that_does_not_join_its_side_stream_fails_with_a_complete_fence"),
    Fault("H9", "the engine goes on with a device that runs no work any more")
    .without("work-that-loses-the-gpu-raises", Never())
    .unreached(_UNSEEN, f"{_STREAMS}::test_work_that_loses_the_device_raises_in_submit"),
    Fault("H26", "Ctrl-C while work is submitted is swallowed")
    .without("interrupt-inside-work-is-raised", Never())
    .unreached(_UNSEEN, f"{_STREAMS}::test_an_interrupt_inside_work_is_raised_after_the_work_has_its_fence"),
    Fault("H12", "a wait for work on a GPU ends at once, and the host reads tokens that are not there yet")
    .without("unfinished-gpu-work-is-not-done", Never())
    .unreached(_UNSEEN, f"{_STREAMS}::test_host_waits_are_counted_by_reason"),
    Fault("H12", "a wait for work on a GPU ends at once, and the host reads tokens that are not there yet")
    .without("host-waits-until-the-fence-is-done", Never())
    .unreached(
        _UNSEEN, "device/test_cuda_forecast.py::test_a_wait_sleeps_until_shortly_before_the_forecast_end_and_then_polls"
    ),
    Fault("H5", "a kernel unpacks a buffer into which the packed blocks have not been copied yet")
    .without("blocks-are-unpacked-after-they-have-arrived", Never(), at="vectors-are-converted-on-the-device")
    .unreached(_UNSEEN, "device/test_cuda_copies.py::test_blocks_are_unpacked_after_they_have_arrived_on_the_device"),
    Fault("H1", "a buffer is copied to host memory before a kernel has packed the blocks into it")
    .without("blocks-are-packed-before-they-leave", Always(), at="vectors-are-converted-on-the-device")
    .unreached(_UNSEEN, "device/test_cuda_copies.py::test_blocks_are_packed_before_they_leave_the_device"),
    Fault("H10", "memory is unpinned while a thread pins more of it, which then stays pinned")
    .without("memory-is-unpinned-after-its-pinning")
    .unreached(_UNSEEN, "device/test_cuda_pinned.py::test_close_stops_pinning_and_unpins_all_chunks"),
)

_COPY = "a copy of a value object"
_SUM = "it adds values; the kernels of all ranks are launched in the same order"
_ANSWER = "it returns what was seen"

EXEMPT = (
    Exempt("CudaDevice.prepare", ("replace", "replace"), _COPY),
    Exempt("CudaDevice.wait_host", ("wait",), "see host-waits-until-the-fence-is-done"),
    Exempt("CudaDevice.wait_host", ("poll",), _ANSWER),
    Exempt("CudaDevice.warm_up", ("failure",), "an error at the start of the engine, before any request"),
    Exempt("CudaDevice._claim", ("add",), "it refuses two streams of one name"),
    Exempt("CudaStream._submit", ("begin",), "without it there is no fence to return"),
    Exempt("FenceWaiter.is_done", ("ended",), "a forecast, which only decides how long a wait sleeps"),
    Exempt("FenceWaiter.wait", ("launched", "ended"), "a forecast, which only decides how long a wait sleeps"),
    Exempt("FenceWaiter.wait", ("poll", "poll"), _ANSWER),
    Exempt("FenceWaiter.wait_until", ("wait",), "without it the loop polls at once"),
    Exempt("_add_few", ("_ended",), "it ends a wait for a rank that is lost, after which the engine ends"),
    Exempt("_sum_tile", ("_ended",), "it ends a wait for a rank that is lost, after which the engine ends"),
    Exempt("PeerSums.right", ("add",), _SUM),
    Exempt("PeerSums._seconds", ("add", "add"), _SUM),
    Exempt("PeerSums._replay_s", ("add",), _SUM),
    Exempt("PeerSums.close", ("clear",), "the streams have ended"),
)
