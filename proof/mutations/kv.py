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
from proof.mutations.tables import Change, Equivalent, Exempt, Mutation

MUTATIONS = (
    Mutation(
        name="partial-block-is-marked",
        hazard="H15",
        consequence="a request finds a block whose layers with a sliding window are missing, and attends to them",
        needs=frozenset({"offload", "window"}),
        also=(Change("partial-blocks-are-marked", Delete()),),
    ),
    Mutation(
        name="keys-refer-to-one-block-each",
        hazard="H21",
        change=Never(),
        consequence="a second copy of a block takes the key, but the first copy still claims it",
    ),
    Mutation(
        name="block-has-its-own-key",
        hazard="H14",
        change=SetArgument("zip", 1, "block_ids[::-1]"),
        consequence="of blocks that become findable together, each is found under another one's key",
    ),
    Mutation(
        name="release-keeps-its-fences",
        hazard="H2",
        change=SetArgument("_release", 1, "()"),
        consequence="the next owner of a block does not get the fence of the store or step that still uses it",
    ),
    Mutation(
        name="release-waits-for-transfers-that-only-the-host-observes",
        hazard="H2",
        change=Always(),
        consequence="a block is free while a store still reads it or a load still writes it",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="postponed-release-waits-for-its-use",
        hazard="H2",
        change=DropOperand("poll"),
        consequence="blocks become free at the engine's next poll, although a transfer still uses them",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="postponed-release-keeps-its-fences",
        hazard="H3",
        change=SetArgument("_postpone", 2, "()"),
        consequence="the next owner of a block whose transfer has ended lacks the fence of the step that still uses it",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="postponed-release-is-executed",
        hazard="H22",
        consequence="blocks that a transfer used when their request ended are never released",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="release-ends-its-reference",
        hazard="H22",
        consequence="leased blocks are never released",
    ),
    Mutation(
        name="last-release-frees",
        hazard="H21",
        change=Always(),
        consequence="a block that two requests read is free once the first of them ends: in use and free at once",
    ),
    Mutation(
        name="released-block-without-a-key-is-free",
        hazard="H22",
        consequence="blocks without a key are lost: neither in use nor free",
    ),
    Mutation(
        name="take-passes-the-fences-on",
        hazard="H3",
        change=Value("()"),
        consequence="a new owner does not get the fences of transfers and steps that still use its blocks",
    ),
    Mutation(
        name="shared-block-is-not-evictable",
        hazard="H11",
        consequence="a cached block that a request reads may be given to another one for writing",
    ),
    Mutation(
        name="share-counts-its-reference",
        hazard="H21",
        consequence="a reader's release ends another owner's lease",
    ),
    Mutation(
        name="evicted-block-loses-its-key",
        hazard="H7",
        consequence="a key still refers to a block that is being overwritten",
    ),
    Mutation(
        name="unfindable-block-is-free",
        hazard="H22",
        change=Delete(2),
        consequence="blocks that a reset made unfindable count as cached forever",
        needs=frozenset({"reset"}),
    ),
    Mutation(
        name="reset-removes-keys",
        hazard="H8",
        change=Delete(2),
        consequence="blocks dropped by a reset are still found",
        needs=frozenset({"reset"}),
    ),
    Mutation(
        name="key-refers-to-one-block",
        hazard="H21",
        consequence="a second copy of a block takes the key, but the first copy still claims it",
    ),
    Mutation(
        name="match-ends-at-a-gap",
        hazard="H15",
        change=Become("continue"),
        consequence="after an evicted block, later blocks of the prefix still count as found, at wrong positions",
        also=(Change("end-of-a-sequence-is-evicted-first", Unwrap("reversed")),),
    ),
    Mutation(
        name="end-of-a-sequence-is-evicted-first",
        hazard="H26",
        change=Unwrap("reversed"),
        consequence="the first block of a sequence is evicted first, and the blocks after it are of no use",
    ),
    Mutation(
        name="least-recently-used-block-is-evicted-first",
        hazard="H26",
        change=Rewrite("last=False", "last=True"),
        consequence="the block that was used last is evicted first, and computed again",
    ),
    Mutation(
        name="other-weights-have-other-keys",
        hazard="H14",
        at="key-identity",
        change=DropOperand("fingerprint"),
        consequence="requests find KV of other weights, on the device and in the tiers",
        needs=frozenset({"weights"}),
        also=(
            Change("new-keys-drop-the-blocks-on-the-device", Delete()),
            Change("new-weights-drop-the-keys-of-the-tiers", Delete()),
        ),
    ),
    Mutation(
        name="key-contains-the-salt",
        hazard="H14",
        at="key-identity",
        change=DropOperand("salt"),
        consequence="engines with different salts find each other's blocks",
    ),
    Mutation(
        name="key-contains-the-weights",
        hazard="H14",
        at="key-identity",
        change=DropOperand("fingerprint"),
        consequence="models with different weights find each other's blocks",
    ),
    Mutation(
        name="key-contains-the-layout",
        hazard="H14",
        at="key-identity",
        change=DropOperand("layout"),
        consequence="blocks of another size, dtype or number of layers are found",
    ),
    Mutation(
        name="key-contains-its-prefix",
        hazard="H14",
        change=DropOperand(0),
        consequence="blocks of equal tokens after different prefixes have the same key, so a request gets the wrong KV",
    ),
    Mutation(
        name="key-contains-every-block-before",
        hazard="H14",
        at="key-contains-its-prefix",
        change=Become(
            "keys.append(blake2b(parent + data[start : start + width], digest_size=KEY_BYTES).digest())\ncontinue"
        ),
        consequence="a key depends on the salt and the block's own tokens, so a request gets KV of another prefix",
        needs=frozenset({"twins"}),
    ),
    Mutation(
        name="key-contains-its-tokens",
        hazard="H14",
        at="key-contains-its-prefix",
        change=DropOperand(1),
        consequence="all first blocks have the same key, so a request gets KV of other tokens",
    ),
    Mutation(
        name="key-contains-the-requests-salt",
        hazard="H14",
        change=Always(),
        consequence="requests with different cache salts find each other's blocks",
        needs=frozenset({"cache_salts"}),
    ),
    Mutation(
        name="key-contains-the-states",
        hazard="H14",
        at="key-identity",
        change=Rewrite(", **parts", ""),
        consequence="models with other recurrent states find each other's checkpoints",
    ),
)

EQUIVALENT = (
    Equivalent(
        Mutation(
            name="whole-block-takes-the-key-over",
            hazard="H15",
            consequence="a block stays findable only without some layers, after it was computed or loaded whole",
            needs=frozenset({"offload", "window"}),
        ),
        "it only saves loads",
        noticed_by="engine/test_windows.py::test_a_shorter_prompt_loads_the_blocks_in_its_window_again",
    ),
    Equivalent(
        Mutation(
            name="keys-have-a-version",
            hazard="H14",
            change=Rewrite("sidestream-kv-1", "sidestream-kv-2"),
            consequence="blocks that were stored under keys of an older format are found",
        ),
        "another hash of the same parts: all keys of a schedule change, and no two become equal",
        noticed_by="kv/test_keys.py::test_keys_equal_those_of_earlier_versions",
    ),
    Equivalent(
        Mutation(
            name="cached-keys-belong-to-their-prefix",
            hazard="H14",
            consequence="the same 512 tokens after different prefixes have the same keys, so a request gets the wrong "
            "KV",
        ),
        "no prompt of a schedule has so many tokens",
        noticed_by="kv/test_keys.py::test_cached_keys_equal_computed_keys",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="merged-fences-are-of-all-streams",
            hazard="H2",
            change=Become("last = {fence.stream: fence}"),
            consequence="the next owner waits for only one of several uses on different streams",
            needs=frozenset({"offload"}),
        ),
        "at most one step runs when the next is planned, and the host waits for all other uses of blocks",
        noticed_by="kv/test_pool.py::test_the_next_owner_of_a_block_waits_for_its_last_use_on_each_stream",
    ),
    Equivalent(
        Mutation(
            name="merged-fences-are-the-last",
            hazard="H2",
            at="merged-fences",
            change=Compare(">", "tick"),
            consequence="the next owner waits only for the first of two uses on one stream",
        ),
        "at most one step runs when the next is planned, and the host waits for all other uses of blocks",
        noticed_by="kv/test_pool.py::test_the_next_owner_of_a_block_waits_for_its_last_use_on_each_stream",
    ),
    Equivalent(
        Mutation(
            name="release-adds-to-earlier-fences",
            hazard="H2",
            change=Value("after"),
            consequence="the last release of a shared block discards the fence of the store that still reads it",
            needs=frozenset({"offload"}),
        ),
        "steps run in the order of their launch, and the host waits for all other uses of blocks, so the last release "
        "knows the last use",
        noticed_by="kv/test_pool.py::test_the_next_owner_of_a_block_waits_for_its_last_use_on_each_stream",
    ),
    Equivalent(
        Mutation(
            name="unused-lease-keeps-fences",
            hazard="H2",
            change=Value("()"),
            consequence="the release of an unused lease discards the fences of earlier uses",
            needs=frozenset({"abort", "offload", "preempt"}),
        ),
        "the first step of a request waits for all its fresh blocks; the fault needs a load into the blocks of a "
        "request that left before that step",
        noticed_by="kv/test_pool.py::test_a_release_without_a_fence_keeps_the_fence_of_the_use_before",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="extended-lease-keeps-fences",
            hazard="H2",
            consequence="a lease that grew lacks the fences of its new blocks",
        ),
        "the scheduler hands the fences of fresh blocks to the step before it joins the leases; they are never read "
        "from the joined lease",
        noticed_by="kv/test_pool.py::test_a_joined_lease_has_the_fences_of_both_leases",
    ),
    Equivalent(
        Mutation(
            name="finished-fences-are-dropped",
            hazard="H2",
            at="merged-fences",
            change=DropOperand("poll"),
            consequence="streams wait for fences that are already done",
        ),
        "a wait for a fence that is done takes no time and adds no order",
        noticed_by="kv/test_pool.py::test_the_next_owner_does_not_wait_for_a_finished_use",
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
