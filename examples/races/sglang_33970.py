"""The transfer to the decode instance reads the pages of a prefill chunk while the forward pass still writes them.

Thread: https://github.com/sgl-project/sglang/pull/33970 (open when read): with Mooncake, every chunk but the last is
    sent without waiting for the event that the forward pass recorded; needles in those chunks are lost.
Simplified: two chunks of one page each. RDMA is a stream, the decode instance's pool is a memory.
Fix: each transfer waits for the event of the forward pass that wrote its pages, as the thread proposes.
"""

from functools import partial

from sidestream_order.explore import explore
from sidestream_order.sim import SimDevice

CHUNKS = 2


def program(device: SimDevice, *, fixed: bool) -> None:
    """Prefill two chunks, and send each as soon as it is launched."""
    pages = device.allocate("prefill pages", CHUNKS * 16).data.view(CHUNKS, 16)
    received = device.allocate("decode pages", CHUNKS * 16).data.view(CHUNKS, 16)
    forward, rdma = device.stream("forward"), device.stream("rdma")
    for chunk in range(CHUNKS):
        page, there = pages[chunk], received[chunk]
        written = forward.submit(partial(page.fill_, chunk + 1), writes=[page], label=f"forward of chunk {chunk}")
        if fixed or chunk == CHUNKS - 1:  # the last chunk is sent when its token is known
            rdma.wait(written)
        rdma.submit(partial(there.copy_, page), reads=[page], writes=[there], label=f"transfer of chunk {chunk}")
    device.close()
    assert received[:, 0].tolist() == [1, 2], "the decode instance has half-written KV"


if __name__ == "__main__":
    for fixed in (False, True):
        print(f"{'fixed' if fixed else 'published'}: {explore(partial(program, fixed=fixed))}\n")
