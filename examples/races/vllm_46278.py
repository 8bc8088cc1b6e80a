"""A store reads blocks that the scheduler counts as computed, but that the device has not computed yet.

Thread: https://github.com/vllm-project/vllm/pull/46278 (merged): garbled text under load, without an error (issue
    45704). Half a year before, pull request 31341 had fixed the same race in another connector.
Simplified: one block. The copy is launched by a background thread, as in vLLM.
Fix: the host records an event on the compute stream, and the store's stream waits for it, as in the thread.
"""

from functools import partial

from sidestream_kv.device.base import WakeUp
from sidestream_kv.device.channel import Channel
from sidestream_order.explore import explore
from sidestream_order.sim import SimDevice, SimFence


def program(device: SimDevice, *, fixed: bool) -> None:
    """Launch a step, count its tokens as computed, and let the copy thread store the block."""
    block, host = device.allocate("kv", 16).data, device.allocate_host("host", 16).data
    compute, store = device.stream("compute"), device.stream("store")
    jobs: Channel[SimFence] = Channel("jobs", tracer=device.tracer)
    stored: list[SimFence] = []

    def copy() -> WakeUp:
        computed = jobs.take()
        if computed is not None:
            if fixed:
                store.wait(computed)
            stored.append(store.submit(partial(host.copy_, block), reads=[block], writes=[host], label="store"))
        return WakeUp()

    copier = device.thread("copier", copy)
    jobs.put(compute.submit(partial(block.fill_, 7), writes=[block], label="step"))
    copier.wake()
    while not stored:
        device.sleep(0.001)
    device.close()
    assert host.tolist() == [7] * 16, "the host has what the block held before the step"


if __name__ == "__main__":
    for fixed in (False, True):
        print(f"{'fixed' if fixed else 'published'}: {explore(partial(program, fixed=fixed))}\n")
