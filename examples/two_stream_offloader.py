"""A KV offloader of two streams, as many engines have one, on the simulated device: its race, and the fix.

    python examples/two_stream_offloader.py          # both versions, 100 schedules each

The mover is not Sidestream's. All it needs of the kit is to submit its work with the byte ranges that the work touches.
"""

import numpy as np

from sidestream.device.base import CopyBatch
from sidestream.testing.checker import simulated
from sidestream.types import Access

BLOCK, BLOCKS, STEPS = 64, 2, 6


def offload(policy: str, seed: int, *, fixed: bool) -> tuple[list[str], bool]:
    """Compute blocks into a device pool of two and copy each to the host; what the checker found, and whether the
    host's bytes are right.
    """
    device, checker = simulated(policy, seed)
    kv, host = device.allocate("kv", BLOCKS * BLOCK), device.allocate_host("host", STEPS * BLOCK)
    compute, store = device.stream("compute"), device.stream("store")
    copied = [None] * BLOCKS  # by device block: the fence of the copy that last read it
    for step in range(STEPS):
        block = step % BLOCKS
        start, stop = block * BLOCK, (block + 1) * BLOCK
        if fixed and copied[block] is not None:
            compute.wait(copied[block])  # the block may still be on its way to the host
        forward = compute.submit(
            lambda start=start, stop=stop, step=step: kv.data[start:stop].fill_(step),
            lambda start=start, stop=stop: [Access("kv", start, stop, write=True)],
            label=f"forward {step}",
        )
        store.wait(forward)
        copy = CopyBatch(kv, host, np.array([start]), np.array([step * BLOCK]), BLOCK)
        copied[block] = store.submit(lambda copy=copy: store.copy(copy), copy.accesses, label=f"copy {step}")
    device.close()
    right = all(bool((host.data[step * BLOCK : (step + 1) * BLOCK] == step).all()) for step in range(STEPS))
    return [finding.message for finding in checker.findings], right


if __name__ == "__main__":
    for fixed in (False, True):
        runs = [offload("random", seed, fixed=fixed) for seed in range(100)]
        races, wrong = sum(bool(found) for found, _ in runs), sum(not right for _, right in runs)
        print(
            f"{'with' if fixed else 'without'} the wait: the checker objects to {races} of 100 schedules, "
            f"the host's bytes are wrong after {wrong}"
        )
        print(*runs[0][0][:1], sep="\n", end="\n" if runs[0][0] else "")
