"""Two device blocks are offloaded into the same host block, and the second copy does not wait for the first.

Thread: https://github.com/NVIDIA/TensorRT-LLM/pull/9056 (merged): see issue 8813, too. With priorities, a host block
    is evicted and filled again in one step. The block was then a mix of two: tokens of other prompts.
Simplified: two streams with one copy each, in two halves.
Fix: transfers remember the last write of a block, and the next one waits for it, as in the thread.
"""

from functools import partial

import torch

from sidestream_kv.device.base import no_accesses
from sidestream_order.explore import explore
from sidestream_order.sim import SimDevice, SimStream


def halves(stream: SimStream, target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy in two pieces; other work may run in between."""
    target[:8].copy_(source[:8])
    stream.touch(no_accesses)
    target[8:].copy_(source[8:])


def program(device: SimDevice, *, fixed: bool) -> None:
    """Offload block 0, evict it from the host, and offload block 1 into its place."""
    blocks, host = device.allocate("kv", 32).data.view(2, 16), device.allocate_host("host", 16).data
    compute, streams = device.stream("compute"), [device.stream(f"offload {number}") for number in range(2)]
    last = None
    for number, stream in enumerate(streams):
        block = blocks[number]
        stream.wait(compute.submit(partial(block.fill_, number), writes=[block], label=f"block {number}"))
        if fixed and last is not None:
            stream.wait(last)
        last = stream.submit(
            partial(halves, stream, host, block), reads=[block], writes=[host], label=f"offload of block {number}"
        )
    device.close()
    assert host.tolist() == [1] * 16, "the host block is a mix of two blocks"


if __name__ == "__main__":
    for fixed in (False, True):
        print(f"{'fixed' if fixed else 'published'}: {explore(partial(program, fixed=fixed))}\n")
