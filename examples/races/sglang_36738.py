"""A prefix is loaded back into pages that the last step of their old owner still writes.

Thread: https://github.com/sgl-project/sglang/pull/36738 (merged): overlap scheduling frees a finished request's pages
    while the round launched for it still runs. The compute stream is ordered behind it, HiCache's transfers are not.
Simplified: one page; the old owner's last step is the only work in flight.
Fix: the load stream waits for the forward stream before the copies, as in the thread.
"""

from functools import partial

from sidestream_order.explore import explore
from sidestream_order.sim import SimDevice

OLD, PREFIX = 1, 7


def program(device: SimDevice, *, fixed: bool) -> None:
    """The page of a finished request is reallocated for a prefix that host memory holds."""
    page, attended = device.allocate("kv", 32).data.view(2, 16)
    host = device.allocate_host("host", 16).data
    device.host_touched(writes=[host], label="stored earlier")
    host.fill_(PREFIX)
    forward, load = device.stream("forward"), device.stream("load")
    overrun = forward.submit(partial(page.fill_, OLD), writes=[page], label="last step of the old owner")
    if fixed:
        load.wait(overrun)
    loaded = load.submit(partial(page.copy_, host), reads=[host], writes=[page], label="load back")
    forward.wait(loaded)
    forward.submit(partial(attended.copy_, page), reads=[page], writes=[attended], label="step of the new owner")
    device.close()
    assert attended.tolist() == [PREFIX] * 16, "the new owner attends to the old owner's KV"


if __name__ == "__main__":
    for fixed in (False, True):
        print(f"{'fixed' if fixed else 'published'}: {explore(partial(program, fixed=fixed))}\n")
