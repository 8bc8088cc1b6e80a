"""The host fills its one pinned buffer for the next step while the copy of the last step still reads it.

Thread: https://github.com/NVIDIA/TensorRT-LLM/pull/15546 (merged): block offsets are copied asynchronously from a
    pinned buffer that every call overwrites; with the overlap scheduler, attention indexed another batch's blocks.
Simplified: three steps; attention copies the offsets that it sees.
Fix: each step has a fresh host buffer, as in the thread.
"""

from functools import partial

from sidestream_order.explore import explore
from sidestream_order.sim import SimDevice

STEPS = 3


def program(device: SimDevice, *, fixed: bool) -> None:
    """Fill the block offsets of a step on the host, copy them, and use them; the host runs ahead."""
    pinned = device.allocate_host("host offsets", STEPS * 8).data.view(STEPS, 8)
    offsets = device.allocate("offsets", 8).data
    used = device.allocate("offsets used", STEPS * 8).data.view(STEPS, 8)
    execution = device.stream("execution")
    for step in range(STEPS):
        buffer = pinned[step if fixed else 0]
        device.host_touched(writes=[buffer], label=f"offsets of step {step}")
        buffer.fill_(step)
        execution.submit(partial(offsets.copy_, buffer), reads=[buffer], writes=[offsets], label=f"copy {step}")
        execution.submit(
            partial(used[step].copy_, offsets), reads=[offsets], writes=[used[step]], label=f"attention {step}"
        )
    device.close()
    assert used[:, 0].tolist() == list(range(STEPS)), "attention uses the block offsets of another step"


if __name__ == "__main__":
    for fixed in (False, True):
        print(f"{'fixed' if fixed else 'published'}: {explore(partial(program, fixed=fixed))}\n")
