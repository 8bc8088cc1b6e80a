"""A key is published for a recurrent state that no step has written: the store copies the null block.

Thread: https://github.com/vllm-project/vllm/issues/53084 (closed when read): with states aligned to blocks, a step that
    passes a boundary leaves the null block there, and the Mooncake store publishes it: outputs differ silently.
Simplified: two boundaries, and one step to the second. vLLM's null block holds zeros; here it was never written.
Fix (ours): only boundaries at which a step wrote a state are stored.
"""

from functools import partial

from sidestream_order.explore import explore
from sidestream_order.sim import SimDevice

NULL = 0


def program(device: SimDevice, *, fixed: bool) -> None:
    """Store the state at each boundary, and restore the first."""
    states = device.allocate("states", 3 * 8).data.view(3, 8)
    stored = device.allocate_host("store", 2 * 8).data.view(2, 8)
    compute, store = device.stream("compute"), device.stream("store")
    at_boundary = [NULL, 2]  # the step ran over the first boundary without stopping there
    written = compute.submit(partial(states[2].fill_, 2), writes=[states[2]], label="step to boundary 1")
    store.wait(written)
    findable = []
    for boundary, state in enumerate(at_boundary):
        if fixed and state == NULL:
            continue
        source, target = states[state], stored[boundary]
        store.submit(partial(target.copy_, source), reads=[source], writes=[target], label=f"boundary {boundary}")
        findable.append(boundary)
    device.close()
    assert all(stored[boundary, 0] == boundary + 1 for boundary in findable), "a findable state is no state"


if __name__ == "__main__":
    for fixed in (False, True):
        print(f"{'fixed' if fixed else 'published'}: {explore(partial(program, fixed=fixed))}\n")
