"""A request's row of the page table is given to a new request while the draft pass in flight still reads it.

Thread: https://github.com/sgl-project/sglang/pull/18803 (closed when read): with overlap scheduling and MTP, the
    result of step N-1 frees the row of a finished request while step N runs: an index out of bounds now and then.
Simplified: one row, two requests; the rows' entries are numbers of slots.
Fix: the row is freed one result later, when the pass that reads it is known to have ended, as the thread proposes.
"""

from functools import partial

from sidestream_order.explore import explore
from sidestream_order.sim import SimDevice

SLOTS_OF_A, SLOTS_OF_B = 3, 9


def program(device: SimDevice, *, fixed: bool) -> None:
    """Request A ends in step N-1 and is still in step N; request B gets its row."""
    row = device.allocate("req_to_token", 8).data
    used_by_a, used_by_b = device.allocate("slots read", 16).data.view(2, 8)
    schedule, forward = device.stream("schedule"), device.stream("forward")
    filled = schedule.submit(partial(row.fill_, SLOTS_OF_A), writes=[row], label="row of A")
    forward.wait(filled)
    draft = forward.submit(partial(used_by_a.copy_, row), reads=[row], writes=[used_by_a], label="step N, drafts of A")
    # The host has the result of step N-1: A has ended, and its row is free.
    if fixed:
        device.wait_host(draft, reason="step")
    filled = schedule.submit(partial(row.fill_, SLOTS_OF_B), writes=[row], label="row of B")
    forward.wait(filled)
    forward.submit(partial(used_by_b.copy_, row), reads=[row], writes=[used_by_b], label="step N+1 of B")
    device.close()
    assert used_by_a.tolist() == [SLOTS_OF_A] * 8, "A's drafts read B's slots"


if __name__ == "__main__":
    for fixed in (False, True):
        print(f"{'fixed' if fixed else 'published'}: {explore(partial(program, fixed=fixed))}\n")
