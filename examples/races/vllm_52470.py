"""A background thread stores the blocks of a preempted request after they have got a new owner.

Thread: https://github.com/vllm-project/vllm/pull/52470 (closed when read): the Mooncake store connector learns of a
    preemption only after the next forward pass: it stores the new owner's KV under the old request's keys.
Simplified: one block and one job in the sending thread's queue; putting it into the store is a stream.
Fix: before the next forward pass, the host waits for the jobs of preempted requests (vLLM's `handle_preemptions`; the
    thread aborts them instead).
"""

from functools import partial

from sidestream_kv.device.base import WakeUp
from sidestream_kv.device.channel import Channel
from sidestream_order.explore import explore
from sidestream_order.sim import SimDevice, SimFence

OLD, NEW = 1, 2


def program(device: SimDevice, *, fixed: bool) -> None:
    """Compute a block, queue its store, preempt the request, and compute the new owner's KV in the block."""
    block, stored = device.allocate("kv", 16).data, device.allocate_host("store", 16).data
    compute, put = device.stream("compute"), device.stream("put")
    jobs: Channel[SimFence] = Channel("jobs", tracer=device.tracer)
    puts: list[SimFence] = []

    def send() -> WakeUp:
        computed = jobs.take()
        if computed is not None:
            put.wait(computed)
            puts.append(put.submit(partial(stored.copy_, block), reads=[block], writes=[stored], label="put"))
        return WakeUp()

    sender = device.thread("sender", send)
    jobs.put(compute.submit(partial(block.fill_, OLD), writes=[block], label="step of the old owner"))
    sender.wake()
    if fixed:
        while not puts:
            device.sleep(0.001)
        device.wait_host(puts[0], reason="step")
    compute.submit(partial(block.fill_, NEW), writes=[block], label="step of the new owner")
    while not puts:
        device.sleep(0.001)
    device.close()
    assert stored.tolist() == [OLD] * 16, "the old owner's key leads to the new owner's KV"


if __name__ == "__main__":
    for fixed in (False, True):
        print(f"{'fixed' if fixed else 'published'}: {explore(partial(program, fixed=fixed))}\n")
