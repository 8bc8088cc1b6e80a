"""Bugs with KV in host memory and on disk: slots, keys and entries that refer to missing or wrong bytes. Each function
runs one bug on a simulated device, with or without its protection (fix).
"""

from __future__ import annotations

from proof.miniatures.stage import KEY, LAYOUT, Blocks, Miniature, Outcome, copy, finish
from sidestream.errors import TierFull
from sidestream_kv.kv.keys import BlockKeys
from sidestream_kv.kv.pool import PoolExhausted
from sidestream_kv.offload.tiers.index import TierIndex
from sidestream_kv.types import Key
from sidestream_order.sim import SimDevice


def slot_freed_by_a_timer(device: SimDevice, protected: bool) -> Outcome:
    """A store is slow, and the lock on its slot expires after 10 ms. Then a disk read fills the slot, and the late
    store overwrites the slot.
    """
    kv, host = Blocks(device, "kv", 1), Blocks(device, "host", 1)
    compute, store, disk = device.stream("compute"), device.stream("store"), device.stream("disk")
    block, slot = kv.pool.take(1), host.pool.take(1)
    filled = kv.write(compute, block.ids, 7, "prefill")
    store.wait(filled)
    store.submit(lambda: device.sleep(0.02), label="a slow bus")
    stored = copy(store, kv, block.ids, host, slot.ids, "store")
    block.release(after=(filled, stored))
    device.sleep(0.01)
    slot.release(after=(stored,) if protected else ())
    fresh = host.pool.take(1)
    for fence in fresh.after:
        disk.wait(fence)
    promoted = host.write(disk, fresh.ids, 9, "read from disk")
    finish(device, stored, promoted)
    found = host.seen(fresh.ids)
    fresh.release()
    return Outcome(found, (9, 9))


def key_published_before_its_bytes(device: SimDevice, protected: bool) -> Outcome:
    """A key is published when its store is submitted: the next request loads bytes that are not there yet."""
    kv, host = Blocks(device, "kv", 2), Blocks(device, "host", 1)
    compute, store, load = device.stream("compute"), device.stream("store"), device.stream("load")
    block, slot, fresh, found = kv.pool.take(1), host.pool.take(1), kv.pool.take(1), list[int]()
    filled = kv.write(compute, block.ids, 7, "prefill")
    store.wait(filled)
    stored = copy(store, kv, block.ids, host, slot.ids, "store")
    block.release(after=(filled, stored))
    if not protected or stored.poll():
        host.pool.publish(slot.ids[0], KEY)
    hit = host.pool.get(KEY)
    if hit is None:
        ready = kv.write(compute, fresh.ids, 7, "prefill once more")
    else:
        reading = host.pool.share([hit])
        ready = copy(load, host, reading.ids, kv, fresh.ids, "load")
        reading.release(after=(ready,))
    slot.release(after=(stored,))
    compute.wait(ready)
    step = kv.read(compute, fresh.ids, found, "step")
    finish(device, step)
    fresh.release(after=(ready, step))
    return Outcome(tuple(found), (7, 7))


def store_that_survives_new_weights(device: SimDevice, protected: bool) -> Outcome:
    """The weights change during a store, and all keys are dropped. Then the store publishes KV of the old weights."""
    kv, host, weights, generation = Blocks(device, "kv", 1), Blocks(device, "host", 1), 1, 0
    compute, store, load, found = device.stream("compute"), device.stream("store"), device.stream("load"), list[int]()
    block, slot = kv.pool.take(1), host.pool.take(1)
    filled = kv.write(compute, block.ids, weights, "prefill with the old weights")
    store.wait(filled)
    stored = copy(store, kv, block.ids, host, slot.ids, "store")
    generation_of_store = generation
    block.release(after=(filled, stored))

    weights, generation = 2, generation + 1
    kv.pool.forget_all()
    host.pool.forget_all()

    finish(device, stored)
    if not protected or generation_of_store == generation:
        host.pool.publish(slot.ids[0], KEY)
    slot.release()
    fresh, hit = kv.pool.take(1), host.pool.get(KEY)
    if hit is None:
        ready = kv.write(compute, fresh.ids, weights, "prefill with the new weights")
    else:
        reading = host.pool.share([hit])
        ready = copy(load, host, reading.ids, kv, fresh.ids, "load")
        reading.release(after=(ready,))
    compute.wait(ready)
    step = kv.read(compute, fresh.ids, found, "step with the new weights")
    finish(device, step)
    fresh.release(after=(ready, step))
    return Outcome(tuple(found), (2, 2))


def failed_write_that_stays_visible(device: SimDevice, protected: bool) -> Outcome:
    """The write of an entry fails, but its key is published: every later hit reads bytes that were never written."""
    medium = device.allocate_host("disk", 1)
    index, disk, found = (
        TierIndex(name="disk", max_entries=1, entry_bytes=1, tracer=device.tracer),
        device.stream("disk"),
        list[int](),
    )
    grant = index.reserve(KEY)
    assert grant is not None

    def write() -> None:
        raise TierFull("no space left on device: free some, or choose another directory")

    written = disk.submit(write, lambda: index.accesses(grant), label="write")
    finish(device, written)
    if protected and written.failure is not None:
        index.abandon(grant)
    else:
        grant.written = True
        index.publish(grant)
    if index.lookup([KEY]):
        pin = index.pin([KEY])
        (entry,) = pin.entries
        read = disk.submit(
            lambda: found.append(int(medium.data[entry.serial])),
            lambda: [index.access(entry, write=False)],
            label="read",
        )
        finish(device, read)
        pin.release()
    else:
        found.append(7)  # a miss: the block is computed again
    return Outcome(tuple(found), (7,))


def load_that_lands_after_its_deadline(device: SimDevice, protected: bool) -> Outcome:
    """A load misses its deadline, and its request gives up. Then the load writes into a block that has a new owner."""
    kv, host = Blocks(device, "kv", 1), Blocks(device, "host", 1)
    compute, load, found = device.stream("compute"), device.stream("load"), list[int]()
    block, slot = kv.pool.take(1), host.pool.take(1)
    host.put(slot.ids, 7)
    load.submit(lambda: device.sleep(0.02), label="a slow bus")
    loaded = copy(load, host, slot.ids, kv, block.ids, "load")
    device.sleep(0.01)
    block.release(after=(loaded,) if protected else ())
    fresh = kv.pool.take(1)
    for fence in fresh.after:
        compute.wait(fence)
    filled = kv.write(compute, fresh.ids, 9, "prefill of the new owner")
    finish(device, loaded, filled)
    step = kv.read(compute, fresh.ids, found, "step of the new owner")
    finish(device, step)
    slot.release()
    fresh.release()
    return Outcome(tuple(found), (9, 9))


def key_without_identity(device: SimDevice, protected: bool) -> Outcome:
    """Two adapters get the same tokens, and the key does not include the adapter: one adapter gets the other's KV."""
    kv, compute, found = Blocks(device, "kv", 2), device.stream("compute"), list[int]()

    def serve(adapter: str, number: int) -> None:
        keys: list[Key] = []
        BlockKeys(fingerprint="toy", layout=LAYOUT, salt=adapter if protected else "").extend(keys, [5])
        hit = kv.pool.get(keys[0])
        if hit is None:
            lease = kv.pool.take(1)
            finish(device, kv.write(compute, lease.ids, number, f"prefill with {adapter}"))
            kv.pool.publish(lease.ids[0], keys[0])
        else:
            lease = kv.pool.share([hit])
        step = kv.read(compute, lease.ids, found, f"step with {adapter}")
        finish(device, step)
        lease.release()

    serve("adapter a", 7)
    serve("adapter b", 8)
    return Outcome(tuple(found), (7, 7, 8, 8))


def block_of_which_a_part_is_missing(device: SimDevice, protected: bool) -> Outcome:
    """Target KV, draft KV and recurrent state of a block are cached separately, and the cache for states is small: the
    KV may be a hit although the state was evicted.
    """
    rooms = {"target KV": 2, "draft KV": 2, "state": 1}
    host = [Blocks(device, f"{part} on the host", slots) for part, slots in rooms.items()]
    here = [Blocks(device, part, 1) for part in rooms]
    compute, load, found = device.stream("compute"), device.stream("load"), list[int]()
    for key, number in ((b"a" * 16, 7), (b"b" * 16, 8)):
        for part in host:
            slot = part.pool.take(1)  # the second state evicts the first
            part.put(slot.ids, number)
            part.pool.publish(slot.ids[0], key)
            slot.release()
    slots = [part.pool.get(b"a" * 16) for part in host]
    is_hit = None not in slots if protected else slots[0] is not None
    leases, step = [part.pool.take(1) for part in here], None
    for source, slot_id, target, lease in zip(host, slots, here, leases, strict=True):
        if not is_hit:
            target.write(compute, lease.ids, 7, "prefill")
        elif slot_id is not None:
            reading = source.pool.share([slot_id])
            loaded = copy(load, source, reading.ids, target, lease.ids, "load")
            reading.release(after=(loaded,))
            compute.wait(loaded)
    for target, lease in zip(here, leases, strict=True):
        step = target.read(compute, lease.ids, found, "step")
        finish(device, step)
        lease.release()
    return Outcome(tuple(found), (7, 7) * 3)


def done_before_its_references_are_dropped(device: SimDevice, protected: bool) -> Outcome:
    """A store reports its completion before it releases its block: a reader may then find the block still in use."""
    kv, host = Blocks(device, "kv", 1), Blocks(device, "host", 1)
    compute, store, late = device.stream("compute"), device.stream("store"), list[str]()
    block, slot = kv.pool.take(1), host.pool.take(1)
    filled = kv.write(compute, block.ids, 7, "prefill")
    store.wait(filled)
    stored = copy(store, kv, block.ids, host, slot.ids, "store")
    finish(device, stored)

    def on_done() -> None:
        try:
            kv.pool.take(1).release()
        except PoolExhausted:
            late.append("the block of a store that was done is still held")

    if protected:
        block.release()
        on_done()
    else:
        on_done()
        block.release()
    slot.release()
    return Outcome(late=tuple(late))


TIERS = (
    Miniature(
        "slot freed by a timer",
        "H6",
        "A lease ends with the fence of its last use, never by a timer.",
        slot_freed_by_a_timer,
    ),
    Miniature(
        "key published before its bytes",
        "H7",
        "A key is published after its store was seen done.",
        key_published_before_its_bytes,
    ),
    Miniature(
        "store that survives new weights",
        "H8",
        "A store of an earlier generation publishes nothing.",
        store_that_survives_new_weights,
    ),
    Miniature(
        "failed write that stays visible", "H9", "A write that failed leaves no entry.", failed_write_that_stays_visible
    ),
    Miniature(
        "load that lands after its deadline",
        "H10",
        "The block is not reused before the load's real end.",
        load_that_lands_after_its_deadline,
    ),
    Miniature("key without identity", "H14", "The adapter is hashed into the key.", key_without_identity),
    Miniature(
        "block of which a part is missing",
        "H15",
        "All parts are present, or the lookup is a miss.",
        block_of_which_a_part_is_missing,
    ),
    Miniature(
        "done before its references are dropped", "H24", "Release, then signal.", done_before_its_references_are_dropped
    ),
)
