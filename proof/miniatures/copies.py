"""Bugs with unordered copies and compute: wrong bytes without an error, or a blocked thread. Each function runs one bug
on a simulated device, with or without its protection (fix).
"""

from __future__ import annotations

from proof.miniatures.stage import BOTH, Blocks, Miniature, Outcome, copy, finish
from sidestream_order.sim import SimDevice, SimFence


def store_before_compute(device: SimDevice, protected: bool) -> Outcome:
    """The store does not wait for the step that fills the block, and stores the block's previous content."""
    kv, host = Blocks(device, "kv", 1), Blocks(device, "host", 1)
    compute, store = device.stream("compute"), device.stream("store")
    block, slot = kv.pool.take(1), host.pool.take(1)
    filled = kv.write(compute, block.ids, 7, "prefill")
    if protected:
        store.wait(filled)
    stored = copy(store, kv, block.ids, host, slot.ids, "store")
    block.release(after=(filled, stored))
    finish(device, stored)
    found = host.seen(slot.ids)
    slot.release()
    return Outcome(found, (7, 7))


def tokens_behind_a_store(device: SimDevice, protected: bool) -> Outcome:
    """One copy engine executes all copies of one direction in the order of submission, across streams. So the tokens of
    a step arrive only after 20 ms of bulk copies.
    """
    kv, host = Blocks(device, "kv", 2), Blocks(device, "host", 2)
    drawn, mailbox = Blocks(device, "drawn", 1), Blocks(device, "mailbox", 1)
    compute, copy_engine = device.stream("compute"), device.stream("copy engine")
    leases = blocks, slots, token, entry = kv.pool.take(2), host.pool.take(2), drawn.pool.take(1), mailbox.pool.take(1)
    filled = kv.write(compute, blocks.ids, 7, "step")
    sampled = drawn.write(compute, token.ids, 42, "sample")
    copy_engine.wait(filled)
    copy_engine.submit(lambda: device.sleep(0.02), label="the bulk of the store")
    stored = copy(copy_engine, kv, blocks.ids, host, slots.ids, "store")
    # With the fix, a kernel writes the token to mapped memory; without it, the copy engine copies the token.
    path = compute if protected else copy_engine
    path.wait(sampled)
    delivered = copy(path, drawn, token.ids, mailbox, entry.ids, "token to the host")
    finish(device, delivered)
    waited_s, found = device.now(), mailbox.seen(entry.ids)
    for lease in leases:
        lease.release(after=(stored, delivered, sampled, filled))
    late = (f"the token came after {waited_s * 1000:.0f} ms",) if waited_s > 0.01 else ()
    return Outcome(found, (42, 42), late=late)


def graph_replayed_during_a_load(device: SimDevice, protected: bool) -> Outcome:
    """The event of the load was not recorded yet during the capture, so the graph contains no wait: a replay reads KV
    that is still being loaded.
    """
    kv, host = Blocks(device, "kv", 1), Blocks(device, "host", 1)
    compute, load = device.stream("compute"), device.stream("load")
    block, slot = kv.pool.take(1), host.pool.take(1)
    loaded, found = device.event("loaded"), list[int]()

    def decode() -> None:
        if protected:
            compute.wait_external(loaded)
        else:
            compute.wait_event(loaded)
        kv.read(compute, block.ids, found, "decode")

    graph = compute.capture(decode)
    host.put(slot.ids, 7)
    copied = copy(load, host, slot.ids, kv, block.ids, "load of a preempted request")
    loaded.record(load)
    launched = compute.replay(graph, label="replay")
    finish(device, launched)
    block.release(after=(copied, launched))
    slot.release(after=(copied,))
    return Outcome(tuple(found), (7, 7))


def queue_of_one_stream_full(device: SimDevice, protected: bool) -> Outcome:
    """All transfers share a stream. With about a thousand pending operations, a submission blocks the thread until the
    device has caught up.
    """
    compute = device.stream("compute")
    filled = compute.submit(lambda: device.sleep(1.0), label="long prefill")
    streams = [device.stream(f"store {index}") for index in range(4 if protected else 1)]
    for transfer in range(36):
        stream = streams[transfer % len(streams)]
        stream.wait(filled)
        for _ in range(30):
            stream.submit(lambda: None, label="copy")
    stalls = device.host_waits().get("queue full", 0)
    return Outcome(late=(f"the forward thread was blocked {stalls} times",) if stalls else ())


def pageable_copy(device: SimDevice, protected: bool) -> Outcome:
    """Block ids are copied from pageable memory: the call blocks until the device has finished all earlier work and the
    copy.
    """
    staging, ids_on_device = Blocks(device, "staging", 1, pageable=not protected), Blocks(device, "ids", 1)
    inputs, found = device.stream("inputs"), list[int]()
    source, target = staging.pool.take(1), ids_on_device.pool.take(1)
    staging.put(source.ids, 3)
    copied = copy(inputs, staging, source.ids, ids_on_device, target.ids, "block ids")
    read = ids_on_device.read(inputs, target.ids, found, "gather")
    finish(device, read)
    source.release(after=(copied,))
    target.release(after=(read,))
    stalls = device.host_waits().get("pageable copy", 0)
    return Outcome(tuple(found), (3, 3), late=("a pageable copy",) if stalls else ())


def block_reused_under_a_store(device: SimDevice, protected: bool) -> Outcome:
    """A block is freed and reused while a store still reads it: the new owner's KV is stored under the old owner's
    key.
    """
    kv, host = Blocks(device, "kv", 1), Blocks(device, "host", 1)
    compute, store = device.stream("compute"), device.stream("store")
    block, slot = kv.pool.take(1), host.pool.take(1)
    filled = kv.write(compute, block.ids, 7, "prefill")
    store.wait(filled)
    stored = copy(store, kv, block.ids, host, slot.ids, "store")
    block.release(after=(filled, stored))  # immediately: the host does not wait for the store
    fresh = kv.pool.take(1)
    for fence in fresh.after if protected else ():
        compute.wait(fence)
    refilled = kv.write(compute, fresh.ids, 8, "prefill of the new owner")
    finish(device, stored)
    found = host.seen(slot.ids)
    slot.release()
    fresh.release(after=(refilled, stored))
    return Outcome(found, (7, 7))


def wait_for_an_event_not_yet_recorded(device: SimDevice, protected: bool) -> Outcome:
    """A background thread enqueues the gather and records an event. A wait for this event has no effect if it comes
    before the record.
    """
    kv, host = Blocks(device, "kv", 1), Blocks(device, "host", 1)
    compute, gather, background = device.stream("compute"), device.stream("gather"), device.stream("background")
    block, slot, gathered = kv.pool.take(1), host.pool.take(1), device.event("gathered")
    filled = kv.write(compute, block.ids, 7, "prefill")

    def enqueue() -> None:
        gather.wait(filled)
        copy(gather, kv, block.ids, host, slot.ids, "gather")
        gathered.record(gather)

    if protected:
        enqueue()
    handed_over = background.submit((lambda: None) if protected else enqueue, label="background thread")
    block.release(after=(filled, gathered.fence) if gathered.fence is not None else (filled,))
    fresh = kv.pool.take(1)
    for fence in fresh.after:
        compute.wait(fence)
    refilled = kv.write(compute, fresh.ids, 8, "prefill of the new owner")
    finish(device, handed_over)
    assert gathered.fence is not None
    finish(device, gathered.fence)
    found = host.seen(slot.ids)
    slot.release()
    fresh.release(after=(refilled,))
    return Outcome(found, (7, 7))


def load_under_the_old_owners_step(device: SimDevice, protected: bool) -> Outcome:
    """A step of the block's old owner still reads the block. A load that relies only on bookkeeping of the host
    overwrites it.
    """
    kv, host = Blocks(device, "kv", 1), Blocks(device, "host", 1)
    compute, load, found = device.stream("compute"), device.stream("load"), list[int]()
    block, slot = kv.pool.take(1), host.pool.take(1)
    host.put(slot.ids, 8)
    kv.write(compute, block.ids, 7, "prefill of the old owner")
    last = kv.read(compute, block.ids, found, "last step of the old owner")
    block.release(after=(last,))
    fresh = kv.pool.take(1)
    for fence in fresh.after if protected else ():
        load.wait(fence)
    loaded = copy(load, host, slot.ids, kv, fresh.ids, "load")
    compute.wait(loaded)
    launched = kv.read(compute, fresh.ids, found, "step of the new owner")
    finish(device, launched)
    slot.release(after=(loaded,))
    fresh.release(after=(loaded, launched))
    return Outcome(tuple(found), (7, 7, 8, 8))


def zero_fill_after_a_load(device: SimDevice, protected: bool) -> Outcome:
    """Fresh blocks are zeroed on another stream than the stream of the load, so the zeros may be written last."""
    kv, host = Blocks(device, "kv", 1), Blocks(device, "host", 1)
    compute, load, found = device.stream("compute"), device.stream("load"), list[int]()
    block, slot = kv.pool.take(1), host.pool.take(1)
    host.put(slot.ids, 7)
    zeroed = kv.write(compute, block.ids, 0, "zero-fill")
    if protected:
        load.wait(zeroed)
    loaded = copy(load, host, slot.ids, kv, block.ids, "load")
    compute.wait(loaded)
    launched = kv.read(compute, block.ids, found, "step")
    finish(device, launched)
    slot.release(after=(loaded,))
    block.release(after=(loaded, launched))
    return Outcome(tuple(found), (7, 7))


def layer_read_before_its_load(device: SimDevice, protected: bool) -> Outcome:
    """A load arrives layer by layer. Each reader must wait for its layer, but one reader does not wait."""
    kv, host = Blocks(device, "kv", 1), Blocks(device, "host", 1)
    compute, load, found = device.stream("compute"), device.stream("load"), list[int]()
    block, slot = kv.pool.take(1), host.pool.take(1)
    host.put(slot.ids, 7)
    loaded = [
        copy(load, host, slot.ids, kv, block.ids, f"load layer {layer}", range(layer, layer + 1)) for layer in BOTH
    ]

    def extend() -> None:
        for layer in BOTH:
            if protected or layer == 0:
                compute.wait(loaded[layer])
            compute.touch(kv.reads(block.ids, range(layer, layer + 1)))
            found.append(int(kv.numbers[block.ids[0], layer]))

    launched = compute.submit(extend, label="extend")
    finish(device, launched)
    slot.release(after=(loaded[-1],))
    block.release(after=(loaded[-1], launched))
    return Outcome(tuple(found), (7, 7))


def two_movers_of_one_block(device: SimDevice, protected: bool) -> Outcome:
    """Two connectors are stacked, and each has its own pool of block ids: both allocate the same block."""
    kv = Blocks(device, "kv", 2)
    compute, receive, found = device.stream("compute"), device.stream("receive"), list[int]()
    other_pool = kv.pool if protected else kv.another_pool("the same blocks in the other connector's ledger")
    mine, theirs = kv.pool.take(1), other_pool.take(1)
    filled = kv.write(compute, mine.ids, 7, "prefill")
    received = kv.write(receive, theirs.ids, 8, "KV from elsewhere")
    compute.wait(received)
    kv.read(compute, mine.ids, found, "step of mine")
    launched = kv.read(compute, theirs.ids, found, "step of theirs")
    finish(device, launched)
    mine.release(after=(filled, launched))
    theirs.release(after=(received, launched))
    return Outcome(tuple(found), (7, 7, 8, 8))


def consumer_before_producer(device: SimDevice, protected: bool) -> Outcome:
    """All work is on one stream, so it runs in order. But the copy of the block ids is enqueued after the gather that
    reads them.
    """
    staging, ids_on_device = Blocks(device, "staging", 1), Blocks(device, "ids", 1)
    inputs, found = device.stream("inputs"), list[int]()
    source, target = staging.pool.take(1), ids_on_device.pool.take(1)
    staging.put(source.ids, 3)

    def upload() -> SimFence:
        return copy(inputs, staging, source.ids, ids_on_device, target.ids, "block ids")

    def gather() -> SimFence:
        return ids_on_device.read(inputs, target.ids, found, "gather")

    _, last = [step() for step in ((upload, gather) if protected else (gather, upload))]
    finish(device, last)
    source.release(after=(last,))
    target.release(after=(last,))
    return Outcome(tuple(found), (3, 3))


def early_part_of_a_dependent_launch(device: SimDevice, protected: bool) -> Outcome:
    """Programmatic dependent launch: the early part of a kernel runs while the kernel before it still runs, although
    both are on one stream. What that kernel writes must be read after the wait for its end.

    The early part is modelled as work of a second stream, which waits only for what the kernel before waits for.
    """
    lengths, kv = Blocks(device, "lengths", 1), Blocks(device, "kv", 1)
    compute, early = device.stream("compute"), device.stream("early part")
    length, block, seen, found = lengths.pool.take(1), kv.pool.take(1), list[int](), list[int]()
    planned = lengths.write(compute, length.ids, 1, "lengths")
    written = kv.write(compute, block.ids, 7, "write KV")
    early.wait(planned)
    if protected:
        begun = lengths.read(early, length.ids, seen, "attend, before its wait")
    else:
        begun = kv.read(early, block.ids, found, "attend, before its wait")
    compute.wait(begun)
    ended = kv.read(compute, block.ids, found if protected else seen, "attend")
    finish(device, ended)
    length.release(after=(planned, begun))
    block.release(after=(written, begun, ended))
    return Outcome(tuple(found), (7, 7))


def source_read_in_any_order(device: SimDevice, protected: bool) -> Outcome:
    """A batch of copies with `CU_MEMCPY_SRC_ACCESS_ORDER_ANY`: the DMA engine may read the source before the stream has
    waited for the work that fills it.

    The engine's reads are modelled as work of a stream of their own; the host has to see the source complete before it
    submits the batch.
    """
    kv, host = Blocks(device, "kv", 1), Blocks(device, "host", 1)
    compute, store, dma = device.stream("compute"), device.stream("store"), device.stream("DMA")
    block, slot = kv.pool.take(1), host.pool.take(1)
    filled = kv.write(compute, block.ids, 7, "prefill")
    store.wait(filled)
    if protected:
        finish(device, filled)
    moved = copy(dma, kv, block.ids, host, slot.ids, "store, its source in any order")
    store.wait(moved)
    stored = store.submit(lambda: None, label="end of the store")
    finish(device, stored)
    found = host.seen(slot.ids)
    block.release(after=(filled, moved))
    slot.release(after=(moved,))
    return Outcome(found, (7, 7))


COPIES = (
    Miniature(
        "store before compute",
        "H1",
        "The store's stream waits for the fence of the step that fills the block.",
        store_before_compute,
    ),
    Miniature(
        "tokens behind a store",
        "P5",
        "A kernel writes tokens to the mailbox, not the copy engine.",
        tokens_behind_a_store,
    ),
    Miniature(
        "graph replayed during a load",
        "H5",
        "The graph contains a node that waits for an external event.",
        graph_replayed_during_a_load,
    ),
    Miniature(
        "queue of one stream full", "P2", "Transfers are spread over a pool of streams.", queue_of_one_stream_full
    ),
    Miniature("pageable copy", "P1", "Copies use pinned memory.", pageable_copy),
    Miniature(
        "block reused under a store",
        "H2",
        "The new owner's stream waits for the store's fence.",
        block_reused_under_a_store,
    ),
    Miniature(
        "wait for an event not yet recorded",
        "H2",
        "A fence exists only once its record is enqueued.",
        wait_for_an_event_not_yet_recorded,
    ),
    Miniature(
        "load under the old owner's step",
        "H3",
        "The load's stream waits for the last step.",
        load_under_the_old_owners_step,
    ),
    Miniature(
        "zero-fill after a load",
        "H4",
        "The load's stream waits for the zero-fill, as for any other use.",
        zero_fill_after_a_load,
    ),
    Miniature(
        "layer read before its load",
        "H5",
        "The only loop over layers waits for each layer.",
        layer_read_before_its_load,
    ),
    Miniature(
        "two movers of one block",
        "H11",
        "There is one pool, and a lease for writing is exclusive.",
        two_movers_of_one_block,
    ),
    Miniature("consumer before producer", "H23", "The write is enqueued before the read.", consumer_before_producer),
    Miniature(
        "early part of a dependent launch",
        "H23",
        "Before its wait, the kernel reads only what was written before the kernel in front of it.",
        early_part_of_a_dependent_launch,
    ),
    Miniature(
        "source read in any order",
        "H1",
        "The host sees the source complete before it submits the copy.",
        source_read_in_any_order,
    ),
)
