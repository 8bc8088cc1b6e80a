"""A KV offloader of two streams, as many engines have one, on the simulated device: its race, and the fix.

    python examples/two_stream_offloader.py          # both versions, 100 schedules each

The mover is not Sidestream's. All it needs of the kit is to submit its work with the tensors that the work touches.
"""

from functools import partial

from sidestream_order.explore import replay
from sidestream_order.sim import SimDevice, SimFence

BLOCK, BLOCKS, STEPS = 64, 2, 6


def offload(device: SimDevice, *, fixed: bool) -> None:
    """Compute blocks into a device pool of two, and copy each to the host. Wrong if the host's bytes are."""
    kv = device.allocate("kv", BLOCKS * BLOCK).data.view(BLOCKS, BLOCK)
    host = device.allocate_host("host", STEPS * BLOCK).data.view(STEPS, BLOCK)
    compute, store = device.stream("compute"), device.stream("store")
    copied: dict[int, SimFence] = {}  # by device block: the fence of the copy that last read it
    for step in range(STEPS):
        block = kv[step % BLOCKS]
        if fixed and step % BLOCKS in copied:
            compute.wait(copied[step % BLOCKS])  # the block may still be on its way to the host
        forward = compute.submit(partial(block.fill_, step), writes=[block], label=f"forward {step}")
        store.wait(forward)
        copied[step % BLOCKS] = store.submit(
            partial(host[step].copy_, block), reads=[block], writes=[host[step]], label=f"copy {step}"
        )
    device.close()
    assert all((host[step] == step).all() for step in range(STEPS)), "the host holds wrong bytes"


if __name__ == "__main__":
    for fixed in (False, True):
        runs = [replay(partial(offload, fixed=fixed), "random", seed, trace=False) for seed in range(100)]
        races, wrong = (sum(oracle in run.oracles for run in runs) for oracle in ("checker", "assertion"))
        print(
            f"{'with' if fixed else 'without'} the wait: the checker objects to {races} of 100 schedules, "
            f"the host's bytes are wrong after {wrong}"
        )
        print(*[problem.text for problem in runs[0].problems[:1]], sep="\n", end="\n" if runs[0].problems else "")
