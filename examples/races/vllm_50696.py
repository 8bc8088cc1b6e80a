"""Fresh blocks are zeroed on the compute stream after a load has filled them.

Thread: https://github.com/vllm-project/vllm/pull/50696 (merged): loads were not ordered behind the compute stream,
    which zeroes new blocks of hybrid models. A request attended to zeros for its whole cached prefix.
Simplified: one block; its zeroing was launched by an earlier step, for an owner that has gone.
Fix: the load's stream waits for the compute stream, as in the thread.
"""

from functools import partial

from sidestream_order.explore import explore
from sidestream_order.sim import SimDevice


def program(device: SimDevice, *, fixed: bool) -> None:
    """Zero a block, load a cached prefix into it, and attend to it."""
    block, attended = device.allocate("kv", 32).data.view(2, 16)
    host = device.allocate_host("host", 16).data
    device.host_touched(writes=[host], label="stored earlier")
    host.fill_(7)
    compute, load = device.stream("compute"), device.stream("load")
    zeroed = compute.submit(block.zero_, writes=[block], label="zero new blocks")
    if fixed:
        load.wait(zeroed)
    loaded = load.submit(partial(block.copy_, host), reads=[host], writes=[block], label="load")
    device.wait_host(loaded, reason="step")  # the request is scheduled when its load has ended
    compute.submit(partial(attended.copy_, block), reads=[block], writes=[attended], label="step")
    device.close()
    assert attended.tolist() == [7] * 16, "the step attends to zeros"


if __name__ == "__main__":
    for fixed in (False, True):
        print(f"{'fixed' if fixed else 'published'}: {explore(partial(program, fixed=fixed))}\n")
