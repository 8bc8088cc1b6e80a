"""A request that arrives from the prefill instance seeds a row of the future map that the last step still writes.

Thread: https://github.com/sgl-project/sglang/pull/35748 (merged): the schedule stream publishes into the map after the
    event "published", but the forward pass stashes more state into the same row after that event.
Simplified: a row is one token and one stashed value; the row's old owner has ended.
Fix: the schedule stream waits for the whole forward pass, as in the thread.
"""

from functools import partial

from sidestream_order.explore import explore
from sidestream_order.sim import SimDevice

OLD, NEW = 1, 2


def program(device: SimDevice, *, fixed: bool) -> None:
    """The old owner's step publishes and stashes; then the new owner's state is put into the row and read."""
    row = device.allocate("future map", 2).data
    token, stash = row[:1], row[1:]
    read = device.allocate("inputs of the next step", 2).data
    forward, schedule = device.stream("forward"), device.stream("schedule")
    published = forward.submit(partial(token.fill_, OLD), writes=[token], label="publish, old owner")
    ended = forward.submit(partial(stash.fill_, OLD), writes=[stash], label="stash, old owner")
    schedule.wait(ended if fixed else published)
    seeded = schedule.submit(partial(row.fill_, NEW), writes=[row], label="publish, new owner")
    forward.wait(seeded)
    forward.submit(partial(read.copy_, row), reads=[row], writes=[read], label="next step, new owner")
    device.close()
    assert read.tolist() == [NEW, NEW], "the new owner's step reads the old owner's state"


if __name__ == "__main__":
    for fixed in (False, True):
        print(f"{'fixed' if fixed else 'published'}: {explore(partial(program, fixed=fixed))}\n")
