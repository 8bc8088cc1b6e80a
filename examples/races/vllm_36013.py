"""The host reads a pinned tensor before the copy into it has ended.

Thread: https://github.com/vllm-project/vllm/pull/36013 (merged): `num_accepted_tokens` is copied with
    `non_blocking=True`; asynchronous scheduling had removed the synchronisation that used to hide the race.
Simplified: one request; an old count of 1 is in the pinned tensor.
Fix: an event after the copy, for which the host waits before it reads, as in the thread.
"""

from functools import partial

from sidestream_order.explore import explore
from sidestream_order.sim import SimDevice

OLD, NEW = 1, 3


def program(device: SimDevice, *, fixed: bool) -> None:
    """Verify drafts, copy the accepted count to the host, and plan the next step with it."""
    count, pinned = device.allocate("accepted", 1).data, device.allocate_host("pinned", 1).data
    device.host_touched(writes=[pinned], label="a step before")
    pinned.fill_(OLD)
    compute = device.stream("compute")
    compute.submit(partial(count.fill_, NEW), writes=[count], label="verify")
    copied = compute.submit(partial(pinned.copy_, count), reads=[count], writes=[pinned], label="count to the host")
    if fixed:
        device.wait_host(copied, reason="step")
    device.host_touched(reads=[pinned], label="plan the next step")
    assert pinned.item() == NEW, "the next step uses the accept length of the step before"


if __name__ == "__main__":
    for fixed in (False, True):
        print(f"{'fixed' if fixed else 'published'}: {explore(partial(program, fixed=fixed))}\n")
