"""Rules of the block pool: references, fences of last uses, keys."""

from __future__ import annotations

from proof.mutations.operators import (
    Always,
    Become,
    Compare,
    Delete,
    DropOperand,
    Never,
    Rewrite,
    SetArgument,
    Unwrap,
    Value,
)
from proof.mutations.reasons import PINS
from proof.mutations.tables import Change, Exempt, Fault

MUTATIONS = (
    Fault("H15", "a request finds a block whose layers with a sliding window are missing, and attends to them").without(
        "partial-block-is-marked", Delete(), Change("partial-blocks-are-marked", Delete()), needs={"offload", "window"}
    ),
    Fault("H21", "a second copy of a block takes the key, but the first copy still claims it").without(
        "keys-refer-to-one-block-each", Never()
    ),
    Fault("H14", "of blocks that become findable together, each is found under another one's key").without(
        "block-has-its-own-key", SetArgument("zip", 1, "block_ids[::-1]")
    ),
    Fault("H2", "the next owner of a block does not get the fence of the store or step that still uses it").without(
        "release-keeps-its-fences", SetArgument("_release", 1, "()")
    ),
    Fault("H2", "a block is free while a store still reads it or a load still writes it").without(
        "release-waits-for-transfers-that-only-the-host-observes", Always(), needs={"offload"}
    ),
    Fault("H2", "blocks become free at the engine's next poll, although a transfer still uses them").without(
        "postponed-release-waits-for-its-use", DropOperand("poll"), needs={"offload"}
    ),
    Fault(
        "H3", "the next owner of a block whose transfer has ended lacks the fence of the step that still uses it"
    ).without("postponed-release-keeps-its-fences", SetArgument("_postpone", 2, "()"), needs={"offload"}),
    Fault("H22", "blocks that a transfer used when their request ended are never released").without(
        "postponed-release-is-executed", needs={"offload"}
    ),
    Fault("H22", "leased blocks are never released").without("release-ends-its-reference"),
    Fault("H21", "a block that two requests read is free once the first of them ends: in use and free at once").without(
        "last-release-frees", Always()
    ),
    Fault("H22", "blocks without a key are lost: neither in use nor free").without(
        "released-block-without-a-key-is-free"
    ),
    Fault("H3", "a new owner does not get the fences of transfers and steps that still use its blocks").without(
        "take-passes-the-fences-on", Value("()")
    ),
    Fault("H11", "a cached block that a request reads may be given to another one for writing").without(
        "shared-block-is-not-evictable"
    ),
    Fault("H21", "a reader's release ends another owner's lease").without("share-counts-its-reference"),
    Fault("H7", "a key still refers to a block that is being overwritten").without(
        "evicted-block-loses-its-key", Value("[]")
    ),
    Fault("H22", "blocks that a reset made unfindable count as cached forever").without(
        "unfindable-block-is-free", Delete(2), needs={"reset"}
    ),
    Fault("H8", "blocks dropped by a reset are still found").without("reset-removes-keys", Delete(2), needs={"reset"}),
    Fault("H21", "a second copy of a block takes the key, but the first copy still claims it").without(
        "key-refers-to-one-block"
    ),
    Fault("H15", "after an evicted block, later blocks of the prefix still count as found, at wrong positions").without(
        "match-ends-at-a-gap", Become("continue"), Change("end-of-a-sequence-is-evicted-first", Unwrap("reversed"))
    ),
    Fault("H26", "the first block of a sequence is evicted first, and the blocks after it are of no use").without(
        "end-of-a-sequence-is-evicted-first", Unwrap("reversed")
    ),
    Fault("H26", "the block that was used last is evicted first, and computed again").without(
        "least-recently-used-block-is-evicted-first", Rewrite("last=False", "last=True")
    ),
    Fault("H14", "requests find KV of other weights, on the device and in the tiers").without(
        "other-weights-have-other-keys",
        DropOperand("fingerprint"),
        Change("new-keys-drop-the-blocks-on-the-device", Delete()),
        Change("new-weights-drop-the-keys-of-the-tiers", Delete()),
        at="key-identity",
        needs={"weights"},
    ),
    Fault("H14", "engines with different salts find each other's blocks").without(
        "key-contains-the-salt", DropOperand("salt"), at="key-identity"
    ),
    Fault("H14", "models with different weights find each other's blocks").without(
        "key-contains-the-weights", DropOperand("fingerprint"), at="key-identity"
    ),
    Fault("H14", "blocks of another size, dtype or number of layers are found").without(
        "key-contains-the-layout", DropOperand("layout"), at="key-identity"
    ),
    Fault(
        "H14", "blocks of equal tokens after different prefixes have the same key, so a request gets the wrong KV"
    ).without("key-contains-its-prefix", DropOperand(0)),
    Fault(
        "H14", "a key depends on the salt and the block's own tokens, so a request gets KV of another prefix"
    ).without(
        "key-contains-every-block-before",
        Become(
            "keys.append(hashlib.blake2b(parent + data[start : start + width], digest_size=KEY_BYTES).digest())\n"
            "continue"
        ),
        at="key-contains-its-prefix",
        needs={"twins"},
    ),
    Fault("H14", "all first blocks have the same key, so a request gets KV of other tokens").without(
        "key-contains-its-tokens", DropOperand(1), at="key-contains-its-prefix"
    ),
    Fault("H14", "requests with different cache salts find each other's blocks").without(
        "key-contains-the-requests-salt", Always(), needs={"cache_salts"}
    ),
    Fault("H14", "models with other recurrent states find each other's checkpoints").without(
        "key-contains-the-states", Rewrite(", **parts", ""), at="key-identity"
    ),
)

EQUIVALENT = (
    Fault("H15", "a block stays findable only without some layers, after it was computed or loaded whole")
    .without("whole-block-takes-the-key-over", needs={"offload", "window"})
    .unseen(
        "it only saves loads", "engine/test_windows.py::test_a_shorter_prompt_loads_the_blocks_in_its_window_again"
    ),
    Fault("H14", "blocks that were stored under keys of an older format are found")
    .without("keys-have-a-version", Rewrite("sidestream-kv-1", "sidestream-kv-2"))
    .unseen(
        "another hash of the same parts: all keys of a schedule change, and no two become equal",
        "kv/test_keys.py::test_keys_equal_those_of_earlier_versions",
    ),
    Fault("H14", "the same 512 tokens after different prefixes have the same keys, so a request gets the wrong KV")
    .without("cached-keys-belong-to-their-prefix")
    .unreached("no prompt of a schedule has so many tokens", "kv/test_keys.py::test_cached_keys_equal_computed_keys"),
    Fault("H2", "the next owner waits for only one of several uses on different streams")
    .without("merged-fences-are-of-all-streams", Become("last = {fence.stream: fence}"), needs={"offload"})
    .unseen(
        "at most one step runs when the next is planned, and the host waits for all other uses of blocks",
        "kv/test_pool.py::test_the_next_owner_of_a_block_waits_for_its_last_use_on_each_stream",
    ),
    Fault("H2", "the next owner waits only for the first of two uses on one stream")
    .without("merged-fences-are-the-last", Compare(">", "tick"), at="merged-fences")
    .unseen(
        "at most one step runs when the next is planned, and the host waits for all other uses of blocks",
        "kv/test_pool.py::test_the_next_owner_of_a_block_waits_for_its_last_use_on_each_stream",
    ),
    Fault("H2", "the last release of a shared block discards the fence of the store that still reads it")
    .without("release-adds-to-earlier-fences", Value("after"), needs={"offload"})
    .unseen(
        "steps run in the order of their launch, and the host waits for all other uses of blocks, so "
        "the last release knows the last use",
        "kv/test_pool.py::test_the_next_owner_of_a_block_waits_for_its_last_use_on_each_stream",
    ),
    Fault("H2", "the release of an unused lease discards the fences of earlier uses")
    .without("unused-lease-keeps-fences", Value("()"), needs={"abort", "offload", "preempt"})
    .unreached(
        "the first step of a request waits for all its fresh blocks; the fault needs a load into the "
        "blocks of a request that left before that step",
        "kv/test_pool.py::test_a_release_without_a_fence_keeps_the_fence_of_the_use_before",
    ),
    Fault("H2", "a lease that grew lacks the fences of its new blocks")
    .without("extended-lease-keeps-fences")
    .unseen(
        "the scheduler hands the fences of fresh blocks to the step before it joins the leases; they "
        "are never read from the joined lease",
        "kv/test_pool.py::test_a_joined_lease_has_the_fences_of_both_leases",
    ),
    Fault("H2", "streams wait for fences that are already done")
    .without("finished-fences-are-dropped", DropOperand("poll"), at="merged-fences")
    .unseen(
        "a wait for a fence that is done takes no time and adds no order",
        "kv/test_pool.py::test_the_next_owner_does_not_wait_for_a_finished_use",
    ),
)

_GUARD = "it raises if the caller breaks a rule, which has its own mutation"

EXEMPT = (
    Exempt("BlockKeys.extend", ("extend",), "it appends keys to a list; see key-contains-its-prefix"),
    Exempt("Lease.open", ("_open",), "a query"),
    Exempt("Lease.extend", ("_open", "_open", "_open"), _GUARD),
    Exempt("PrefixIndex.clear", ("clear",), "a mark that stays makes a whole block count as partial: more loads"),
    Exempt("Lease.extend", ("extend",), "a list"),
    Exempt("Lease.release", ("_open", "_open"), _GUARD),
    Exempt("FencedPool.grow", ("extend", "extend", "extend"), "they only append new ids to lists"),
    Exempt("FencedPool.take", ("extend",), "a list"),
    Exempt("FencedPool.take", ("_references",), "without it nothing can be leased; rules above cover leases"),
    Exempt("FencedPool.publish", ("_references",), _GUARD),
    Exempt("FencedPool.publish", ("add",), "see key-refers-to-one-block"),
    Exempt("FencedPool.publish_all", ("_references",), _GUARD),
    Exempt("FencedPool.publish_all", ("publish",), "slice-counts-after-its-fence decides when it is called"),
    Exempt("FencedPool.demote", ("add",), "it changes only which blocks are evicted first"),
    Exempt("FencedPool.forget_all", ("clear",), "see reset-removes-keys"),
    Exempt("FencedPool.forget_all", ("pins", "clear"), PINS),
    Exempt("FencedPool._evict", ("pins",), PINS),
    Exempt("Pins.add", ("_end", "_end"), PINS),
    Exempt("Pins.end", ("_end",), PINS),
    Exempt("Pins.end_first", ("_end",), PINS),
    Exempt("Pins.forget", ("_end",), PINS),
    Exempt("Pins.clear", ("clear", "clear"), PINS),
    Exempt("Pins._end_late", ("_end",), PINS),
    Exempt("FencedPool.check", ("_references", "_references", "_references"), _GUARD),
)
