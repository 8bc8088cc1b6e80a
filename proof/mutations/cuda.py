"""Rules of the CUDA device: waits between streams, and failures. No schedule runs on a GPU; unit tests on a fake GPU
detect the removal of these rules. The torture test of a device (`python -m proof torture --device cuda --mutations`)
removes the other tables' rules on a real GPU.
"""

from __future__ import annotations

from proof.mutations.operators import Always, Delete, Never, Operator
from proof.mutations.tables import Equivalent, Exempt, Mutation

_DELETE = Delete()
_STREAMS = "test_cuda_streams.py"


def _on_gpu(
    name: str, hazard: str, consequence: str, noticed_by: str, change: Operator = _DELETE, at: str = ""
) -> Equivalent:
    """`noticed_by`: file below `tests/device/`, two colons, function."""
    return Equivalent(
        Mutation(name=name, hazard=hazard, change=change, consequence=consequence, at=at),
        "schedules run on the simulated device",
        noticed_by=f"device/{noticed_by}",
        unreached=True,
    )


MUTATIONS: tuple[Mutation, ...] = ()

EQUIVALENT = (
    _on_gpu(
        "gpu-stream-waits-for-a-fence",
        "H1",
        "no stream of a GPU waits for another one",
        f"{_STREAMS}::test_a_stream_waits_on_the_device_for_the_fence_of_another",
    ),
    _on_gpu(
        "gpu-stream-waits-for-an-event",
        "H1",
        "a stream of a GPU does not wait for an event that another one recorded",
        f"{_STREAMS}::test_a_stream_waits_for_the_last_record_of_an_event",
    ),
    _on_gpu(
        "gpu-graph-waits-for-its-event",
        "H5",
        "a layer of a captured step reads KV that a load has not written yet",
        f"{_STREAMS}::test_a_graph_waits_for_an_event_outside_it_h5",
    ),
    _on_gpu(
        "gpu-does-not-wait-for-host-work",
        "H1",
        "a stream of a GPU runs on without waiting for work of a host thread",
        f"{_STREAMS}::test_a_gpu_stream_refuses_to_wait_for_unfinished_host_work",
        Never(),
    ),
    _on_gpu(
        "side-stream-starts-after-the-main-stream",
        "H1",
        "work beside the main stream reads what the main stream has not written yet",
        f"{_STREAMS}::test_side_stream_work_runs_after_earlier_work_and_before_the_join",
    ),
    _on_gpu(
        "main-stream-waits-for-the-side-stream",
        "H1",
        "work after the join reads what the side stream has not written yet",
        f"{_STREAMS}::test_side_stream_work_runs_after_earlier_work_and_before_the_join",
    ),
    _on_gpu(
        "gpu-work-joins-its-side-stream",
        "H1",
        "work that asks for the join goes on without it",
        f"{_STREAMS}::test_side_stream_work_runs_after_earlier_work_and_before_the_join",
    ),
    _on_gpu(
        "failed-work-joins-its-side-stream",
        "H3",
        "the fence of failed work is done while its side stream still uses memory",
        f"{_STREAMS}::test_work_that_does_not_join_its_side_stream_fails_with_a_complete_fence",
    ),
    _on_gpu(
        "work-that-loses-the-gpu-raises",
        "H9",
        "the engine goes on with a device that runs no work any more",
        f"{_STREAMS}::test_work_that_loses_the_device_raises_in_submit",
        Never(),
    ),
    _on_gpu(
        "interrupt-inside-work-is-raised",
        "H26",
        "Ctrl-C while work is submitted is swallowed",
        f"{_STREAMS}::test_an_interrupt_inside_work_is_raised_after_the_work_has_its_fence",
        Never(),
    ),
    _on_gpu(
        "unfinished-gpu-work-is-not-done",
        "H12",
        "a wait for work on a GPU ends at once, and the host reads tokens that are not there yet",
        f"{_STREAMS}::test_host_waits_are_counted_by_reason",
        Never(),
    ),
    _on_gpu(
        "host-waits-until-the-fence-is-done",
        "H12",
        "a wait for work on a GPU ends at once, and the host reads tokens that are not there yet",
        "test_cuda_forecast.py::test_a_wait_sleeps_until_shortly_before_the_forecast_end_and_then_polls",
        Never(),
    ),
    _on_gpu(
        "blocks-are-unpacked-after-they-have-arrived",
        "H5",
        "a kernel unpacks a buffer into which the packed blocks have not been copied yet",
        "test_cuda_copies.py::test_blocks_are_unpacked_after_they_have_arrived_on_the_device",
        Never(),
        at="vectors-are-converted-on-the-device",
    ),
    _on_gpu(
        "blocks-are-packed-before-they-leave",
        "H1",
        "a buffer is copied to host memory before a kernel has packed the blocks into it",
        "test_cuda_copies.py::test_blocks_are_packed_before_they_leave_the_device",
        Always(),
        at="vectors-are-converted-on-the-device",
    ),
    _on_gpu(
        "memory-is-unpinned-after-its-pinning",
        "H10",
        "memory is unpinned while a thread pins more of it, which then stays pinned",
        "test_cuda_pinned.py::test_close_stops_pinning_and_unpins_all_chunks",
    ),
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
