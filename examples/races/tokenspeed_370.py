"""A captured decode graph is replayed while the KV of its request is still being loaded back.

Thread: https://github.com/lightseekorg/tokenspeed/pull/370 (closed when read): a captured graph cannot contain the
    waits for single layers, because their events are recorded on a stream outside of the capture.
Simplified: one block, one layer; the graph is captured before the first load.
Fix: the compute stream waits for the load stream before the replay, as the thread proposes.
"""

from functools import partial

from sidestream_order.explore import explore
from sidestream_order.sim import SimDevice


def program(device: SimDevice, *, fixed: bool) -> None:
    """Capture a decode step that waits for an event, load a retracted request's KV, and replay the step."""
    block, attended = device.allocate("kv", 32).data.view(2, 16)
    host = device.allocate_host("host", 16).data
    device.host_touched(writes=[host], label="stored earlier")
    host.fill_(7)
    compute, load = device.stream("compute"), device.stream("load")
    loaded = device.event("layer loaded")

    def decode() -> None:
        compute.wait_event(loaded)  # never recorded so far: the graph has no wait
        compute.submit(partial(attended.copy_, block), reads=[block], writes=[attended], label="decode")

    graph = compute.capture(decode)
    load.submit(partial(block.copy_, host), reads=[host], writes=[block], label="load back")
    fence = loaded.record(load)
    if fixed:
        compute.wait(fence)
    compute.replay(graph, label="replay")
    device.close()
    assert attended.tolist() == [7] * 16, "the replay attends to KV that was not loaded yet"


if __name__ == "__main__":
    for fixed in (False, True):
        print(f"{'fixed' if fixed else 'published'}: {explore(partial(program, fixed=fixed))}\n")
