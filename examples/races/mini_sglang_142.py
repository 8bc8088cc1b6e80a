"""Pages of a finished request are free while the page table of the step in flight still points at them.

Thread: https://github.com/sgl-project/mini-sglang/issues/142 (open when read): its text was not available, so this
    program follows a summary of one line: pages are freed while the table points at them.
Simplified: a pool of one page with leases. The new owner's KV arrives on another stream, here a load.
Fix: the release names the step that still uses the page, and the new owner waits for that step.
"""

from functools import partial

from sidestream_kv.kv.pool import FencedPool
from sidestream_order.explore import explore
from sidestream_order.sim import SimDevice

A, B = 1, 2


def program(device: SimDevice, *, fixed: bool) -> None:
    """Request A ends in step 1 while step 2, which contains it, is in flight; request B takes its page."""
    page = device.allocate("kv", 16).data
    assert device.tracer is not None
    device.tracer.backed("pages", "kv", 16)
    pages = FencedPool("pages", 1, tracer=device.tracer)
    decode, load = device.stream("decode"), device.stream("load")
    lease = pages.take(1)
    first = decode.submit(partial(page[:8].fill_, A), writes=[page[:8]], label="step 1 of A")
    second = decode.submit(partial(page[8:].fill_, A), writes=[page[8:]], label="step 2 of A")
    device.wait_host(first, reason="step")  # A has ended: step 2 computes a token too many
    lease.release(after=[second] if fixed else [])
    taken = pages.take(1)
    for fence in taken.after:
        load.wait(fence)
    loaded = load.submit(partial(page.fill_, B), writes=[page], label="load of B")
    device.wait_host(loaded, reason="step")
    device.wait_host(second, reason="step")
    device.host_touched(reads=[page], label="compare")
    found = page.tolist()
    taken.release()
    device.close()
    assert found == [B] * 16, "A's step wrote into B's page"


if __name__ == "__main__":
    for fixed in (False, True):
        print(f"{'fixed' if fixed else 'published'}: {explore(partial(program, fixed=fixed))}\n")
