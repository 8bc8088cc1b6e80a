"""The scratch block of speculative steps is stored as the recurrent state of a prompt's block.

Thread: https://github.com/LMCache/LMCache/pull/5004 (open when read): see issue 4984, too. With MTP, no step ends at
    the last boundary of a prompt. vLLM puts the null block there and moves the scratch block to the tail; LMCache's own
    list keeps the scratch block at the boundary and stores it.
Simplified: three boundaries with one state each; speculative steps write the scratch block.
Fix: the tracker follows vLLM's list, and stores nothing for the null block, as the thread proposes.
"""

from functools import partial

from sidestream_order.explore import explore
from sidestream_order.sim import SimDevice

SCRATCH = 1


def program(device: SimDevice, *, fixed: bool) -> None:
    """Prefill in two steps that write states 0 and 2, store the states of all boundaries, and decode with drafts."""
    states = device.allocate("states", 3 * 8).data.view(3, 8)
    stored = device.allocate_host("host", 3 * 8).data.view(3, 8)
    compute, store = device.stream("compute"), device.stream("store")
    for state in (0, 2):
        prefilled = compute.submit(partial(states[state].fill_, state), writes=[states[state]], label=f"state {state}")
    store.wait(prefilled)
    tracked = [0, None, 2] if fixed else [0, SCRATCH, 2]
    findable = {}
    for boundary, state in enumerate(tracked):
        if state is not None:
            source, target = states[state], stored[boundary]
            store.submit(partial(target.copy_, source), reads=[source], writes=[target], label=f"boundary {boundary}")
            findable[boundary] = target
    scratch = states[SCRATCH]
    compute.submit(partial(scratch.fill_, 99), writes=[scratch], label="speculative step")
    device.close()
    assert all(target[0] == boundary for boundary, target in findable.items()), "a findable state is no state"


if __name__ == "__main__":
    for fixed in (False, True):
        print(f"{'fixed' if fixed else 'published'}: {explore(partial(program, fixed=fixed))}\n")
