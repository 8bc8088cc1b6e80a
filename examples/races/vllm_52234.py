"""A decode instance reads blocks by a reference that is older than their content: another prompt's KV.

Thread: https://github.com/vllm-project/vllm/issues/52234 (open when read): "stale reference after producer reused the
    blocks" returns HTTP 200 with the previous prompt's answer; failed NIXL reads return garbage.
Simplified: one block; the read is a stream. Only the stale reference is modelled, not the failed read.
Fix (ours): the block stays with the reader until its read has ended; the producer's next prompt waits for that.
"""

from functools import partial

from sidestream_order.explore import explore
from sidestream_order.sim import SimDevice

FIRST, SECOND = 1, 2


def program(device: SimDevice, *, fixed: bool) -> None:
    """The producer hands out a reference to a block, and uses the block for its next prompt."""
    block = device.allocate("producer kv", 16).data
    received = device.allocate("consumer kv", 16).data
    prefill, nixl = device.stream("prefill"), device.stream("nixl")
    computed = prefill.submit(partial(block.fill_, FIRST), writes=[block], label="first prompt")
    device.wait_host(computed, reason="step")  # the reference is sent when the prefill has ended
    read = nixl.submit(partial(received.copy_, block), reads=[block], writes=[received], label="read by reference")
    if fixed:
        prefill.wait(read)
    prefill.submit(partial(block.fill_, SECOND), writes=[block], label="second prompt")
    device.close()
    assert received.tolist() == [FIRST] * 16, "the answer is that of another prompt"


if __name__ == "__main__":
    for fixed in (False, True):
        print(f"{'fixed' if fixed else 'published'}: {explore(partial(program, fixed=fixed))}\n")
