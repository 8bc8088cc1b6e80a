"""A transfer that timed out writes into staging memory that has a new owner.

Thread: https://github.com/novitalabs/pegaflow/issues/403 (open when read): on a timeout, the requester returns the
    staging chunks to their pool while RDMA reads that were posted to the network card may still land there.
Simplified: one chunk; the slow read is a stream, and the new owner stages a block of the device.
Fix (ours): the chunk stays in quarantine: its next owner waits for the read's fence (the thread drains the queue pair).
"""

from functools import partial

from sidestream_order.explore import explore
from sidestream_order.sim import SimDevice

LATE, OWN = 1, 2


def program(device: SimDevice, *, fixed: bool) -> None:
    """Fetch a remote block with a deadline, give up, and use the staging chunk for a store."""
    chunk, disk = device.allocate_host("staging", 16).data, device.allocate_host("disk", 16).data
    block = device.allocate("kv", 16).data
    rdma, store = device.stream("rdma"), device.stream("store")

    def read() -> None:
        device.sleep(1.0)
        chunk.fill_(LATE)

    fetched = rdma.submit(read, writes=[chunk], label="remote read")
    if device.wait_host(fetched, reason="step", timeout_s=0.01):
        return
    if fixed:
        store.wait(fetched)
    store.submit(partial(block.fill_, OWN), writes=[block], label="compute")
    store.submit(partial(chunk.copy_, block), reads=[block], writes=[chunk], label="stage")
    store.submit(partial(device.sleep, 2.0), label="slow disk")
    store.submit(partial(disk.copy_, chunk), reads=[chunk], writes=[disk], label="write to disk")
    device.close()
    assert disk.tolist() == [OWN] * 16, "the late read landed in the new owner's chunk"


if __name__ == "__main__":
    for fixed in (False, True):
        print(f"{'fixed' if fixed else 'published'}: {explore(partial(program, fixed=fixed))}\n")
