"""A copy whose source may be read in any order reads KV before the waits of its own stream.

Thread: https://github.com/vllm-project/vllm/pull/39306 (merged): `CU_MEMCPY_SRC_ACCESS_ORDER_ANY` lets a DMA engine
    prefetch the source before the stream's waits; only the write of the target is in stream order.
Simplified: the simulated copies read in stream order, so the early read is a stream of its own, which waits for nothing
    that the store's stream waits for. The store's write waits for that read.
Fix: a store is read in stream order, and only loads are read in any order, as in the thread.
"""

from functools import partial

from sidestream_order.explore import explore
from sidestream_order.sim import SimDevice


def program(device: SimDevice, *, fixed: bool) -> None:
    """Store a block behind the step that computes it."""
    block = device.allocate("kv", 16).data
    fetched, host = device.allocate_host("host", 32).data.view(2, 16)
    compute, store, prefetch = device.stream("compute"), device.stream("store"), device.stream("dma prefetch")
    step = compute.submit(partial(block.fill_, 7), writes=[block], label="step")
    store.wait(step)
    if fixed:
        store.submit(partial(host.copy_, block), reads=[block], writes=[host], label="store, source in stream order")
    else:
        read = prefetch.submit(partial(fetched.copy_, block), reads=[block], writes=[fetched], label="read, any order")
        store.wait(read)
        store.submit(partial(host.copy_, fetched), reads=[fetched], writes=[host], label="store, write")
    device.close()
    assert host.tolist() == [7] * 16, "the host has what the block held before the step"


if __name__ == "__main__":
    for fixed in (False, True):
        print(f"{'fixed' if fixed else 'published'}: {explore(partial(program, fixed=fixed))}\n")
