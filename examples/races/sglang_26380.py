"""The scheduler's stream changes an index mapping for the next step while the forward pass in flight reads it.

Thread: https://github.com/sgl-project/sglang/pull/26380 (merged): alloc and retract write `req_to_token` and the
    mapping to sliding-window slots under the previous forward pass; a first fix in both directions cost occupancy.
Simplified: the mapping is one value for each step, and each step copies it.
Fix: the schedule stream waits for the forward stream at the top of each loop, as in the thread.
"""

from functools import partial

from sidestream_order.explore import explore
from sidestream_order.sim import SimDevice, SimFence

STEPS = 3


def program(device: SimDevice, *, fixed: bool) -> None:
    """Three overlapped steps, each with a mapping of its own in the same memory."""
    mapping = device.allocate("full_to_swa_index_mapping", 8).data
    seen = device.allocate("slots read", STEPS * 8).data.view(STEPS, 8)
    schedule, forward = device.stream("schedule"), device.stream("forward")
    last: SimFence | None = None
    for step in range(STEPS):
        if fixed and last is not None:
            schedule.wait(last)
        mapped = schedule.submit(partial(mapping.fill_, step), writes=[mapping], label=f"mapping of step {step}")
        forward.wait(mapped)
        last = forward.submit(
            partial(seen[step].copy_, mapping), reads=[mapping], writes=[seen[step]], label=f"forward {step}"
        )
    device.close()
    assert seen[:, 0].tolist() == list(range(STEPS)), "a forward pass reads the mapping of the next step"


if __name__ == "__main__":
    for fixed in (False, True):
        print(f"{'fixed' if fixed else 'published'}: {explore(partial(program, fixed=fixed))}\n")
