"""A flush before a preemption waits for the copies on the device, but not for stores that no stream has yet.

Thread: https://github.com/LMCache/LMCache/pull/3808 (merged): its review remarks that a synchronisation finds
    nothing to wait for between the worker's hand-over of a store and the server's submission to a stream.
Simplified: server and worker are threads of one device; the flush waits for the gathers that have been recorded.
Fix (ours): the flush waits until the server has taken every store that was handed over, then for its gather.
"""

from functools import partial

from sidestream_kv.device.base import WakeUp
from sidestream_kv.device.channel import Channel
from sidestream_order.explore import explore
from sidestream_order.sim import SimDevice, SimFence

OLD, NEW = 1, 2


def program(device: SimDevice, *, fixed: bool) -> None:
    """Hand a store over, flush because of a preemption, and let the next forward pass overwrite the block."""
    block, host = device.allocate("kv", 16).data, device.allocate_host("host", 16).data
    compute, copies = device.stream("compute"), device.stream("gather")
    stores: Channel[SimFence] = Channel("stores", tracer=device.tracer)
    gathers: list[SimFence] = []

    def serve() -> WakeUp:
        computed = stores.take()
        if computed is not None:
            copies.wait(computed)
            gathers.append(copies.submit(partial(host.copy_, block), reads=[block], writes=[host], label="gather"))
        return WakeUp()

    server = device.thread("server", serve)
    stores.put(compute.submit(partial(block.fill_, OLD), writes=[block], label="step of the old owner"))
    server.wake()
    while fixed and not gathers:
        device.sleep(0.001)
    for gather in gathers:  # the flush
        device.wait_host(gather, reason="step")
    compute.submit(partial(block.fill_, NEW), writes=[block], label="step of the new owner")
    while not gathers:
        device.sleep(0.001)
    device.close()
    assert host.tolist() == [OLD] * 16, "the old owner's key leads to the new owner's KV"


if __name__ == "__main__":
    for fixed in (False, True):
        print(f"{'fixed' if fixed else 'published'}: {explore(partial(program, fixed=fixed))}\n")
