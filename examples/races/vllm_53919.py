"""Counts of accepted drafts are copied to the host in the old order of rows while the host moves the rows.

Thread: https://github.com/vllm-project/vllm/pull/53919 (open when read): the next step's `_update_states` permutes the
    pinned counts without waiting for the copy, and a gather then permutes them again: another request's count.
Simplified: two requests that change places; the counts are one byte each.
Fix: the host waits for the copy before the first move, and does not gather, as the thread proposes.
"""

from functools import partial

import torch

from sidestream_order.explore import explore
from sidestream_order.sim import SimDevice

ACCEPTED = (4, 1)


def program(device: SimDevice, *, fixed: bool) -> None:
    """Rows 0 and 1 change places between a step and the use of its counts."""
    counts, pinned = device.allocate("counts", 2).data, device.allocate_host("pinned counts", 2).data
    device.host_touched(writes=[pinned], label="a step before")
    pinned.fill_(1)
    compute = device.stream("compute")
    compute.submit(partial(counts.copy_, torch.tensor(ACCEPTED)), writes=[counts], label="verify")
    copied = compute.submit(partial(pinned.copy_, counts), reads=[counts], writes=[pinned], label="counts to the host")
    if fixed:
        device.wait_host(copied, reason="step")
    device.host_touched(reads=[pinned], writes=[pinned], label="move rows")
    pinned.copy_(pinned.flip(0))
    device.wait_host(copied, reason="step")
    device.host_touched(reads=[pinned], label="prepare the next step")
    used = pinned.tolist() if fixed else [pinned[1].item(), pinned[0].item()]  # gathered by previous positions
    assert used == [ACCEPTED[1], ACCEPTED[0]], f"accept lengths {used} belong to other requests"


if __name__ == "__main__":
    for fixed in (False, True):
        print(f"{'fixed' if fixed else 'published'}: {explore(partial(program, fixed=fixed))}\n")
