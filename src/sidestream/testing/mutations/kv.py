"""The ledger's rules: references, fences of last uses, keys."""

from __future__ import annotations

from sidestream.testing.mutations.mechanism import Edit, Equivalent, Exempt, Mutation

_POOL = "sidestream.kv.pool"
_PREFIX = "sidestream.kv.prefix"
_KEYS = "sidestream.kv.keys"

MUTATIONS = (
    Mutation(
        name="release-keeps-its-fences",
        hazard="H2",
        target=f"{_POOL}:Lease.release",
        old="self.pool._release(self.ids, tuple(after))",
        new="self.pool._release(self.ids, ())",
        removes="whoever takes a block next does not know of the store or step that still uses it",
    ),
    Mutation(
        name="release-waits-for-uses-that-only-the-host-sees",
        hazard="H2",
        target=f"{_POOL}:Lease.release",
        old="if until is None or until.poll():",
        new="if True:",
        removes="a block is free while a store still reads it or a load still lands in it",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="postponed-release-waits-for-its-use",
        hazard="H2",
        target=f"{_POOL}:FencedPool.settle",
        old="while self._postponed and self._postponed[0][0].poll():",
        new="while self._postponed:",
        removes="blocks are free when the engine looks for news, though a transfer still uses them",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="postponed-release-is-carried-out",
        hazard="H22",
        target=f"{_POOL}:FencedPool.settle",
        old="        self._release(block_ids, after)\n",
        new="        pass\n",
        removes="blocks that a transfer used when their request ended stay in use for ever",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="release-ends-its-reference",
        hazard="H22",
        target=f"{_POOL}:FencedPool._release",
        old="        references[block_id] -= 1\n",
        new="",
        removes="what was taken once is in use for ever",
    ),
    Mutation(
        name="last-release-frees",
        hazard="H21",
        target=f"{_POOL}:FencedPool._release",
        old="        if not references[block_id]:\n            idle.append(block_id)\n",
        new="        idle.append(block_id)\n",
        removes="a block that two requests read is free once the first of them ends: in use and free at once",
    ),
    Mutation(
        name="released-block-without-a-key-is-free",
        hazard="H22",
        target=f"{_POOL}:FencedPool._release",
        old="    self._free.extend(others)\n",
        new="    pass\n",
        removes="blocks that nobody can find are in nobody's use and not free: lost",
    ),
    Mutation(
        name="take-hands-on-fences",
        hazard="H3",
        target=f"{_POOL}:FencedPool.take",
        old="pending = merge_fences(fence for block_id in block_ids for fence in fences[block_id])",
        new="pending = ()",
        removes="a new owner is not told which transfers and steps still use its blocks",
    ),
    Mutation(
        name="shared-block-is-not-evictable",
        hazard="H11",
        target=f"{_POOL}:FencedPool.share",
        old="        self._cached.discard_all(idle)\n",
        new="        pass\n",
        removes="a cached block that a request reads may be given to another one for writing",
    ),
    Mutation(
        name="share-counts-its-reference",
        hazard="H21",
        target=f"{_POOL}:FencedPool.share",
        old="        references[block_id] += 1\n",
        new="        pass\n",
        removes="a reader's release ends another owner's lease",
    ),
    Mutation(
        name="evicted-block-loses-its-key",
        hazard="H7",
        target=f"{_POOL}:FencedPool._evict",
        old="    self._index.remove_all(block_ids)\n",
        new="",
        removes="a key goes on naming a block that is being overwritten",
    ),
    Mutation(
        name="forgotten-block-is-free",
        hazard="H22",
        target=f"{_POOL}:FencedPool._not_findable",
        old="            self._cached.discard(block_id)\n            self._free.append(block_id)\n",
        new="            pass\n",
        removes="blocks that a reset made unfindable count as cached for ever",
        needs=frozenset({"reset"}),
    ),
    Mutation(
        name="reset-removes-keys",
        hazard="H8",
        target=f"{_PREFIX}:PrefixIndex.clear",
        old="    self._id_of.clear()\n    self._key_of.clear()\n",
        new="",
        removes="what a reset forgot is found all the same",
        needs=frozenset({"reset"}),
    ),
    Mutation(
        name="key-names-one-block",
        hazard="H21",
        target=f"{_PREFIX}:PrefixIndex.add",
        old="    if key in self._id_of or block_id in self._key_of:\n        return False\n",
        new="",
        removes="a block that was computed twice takes the key over, and the first one keeps a name that it does not have",
    ),
    Mutation(
        name="match-ends-at-a-gap",
        hazard="H15",
        target=f"{_PREFIX}:PrefixIndex.match",
        old="            break\n",
        new="            continue\n",
        removes="a prefix of which an earlier block was evicted counts as found, its later blocks in the wrong places",
        also=(
            Edit(f"{_POOL}:FencedPool._release", "for block_id in reversed(block_ids):", "for block_id in block_ids:"),
        ),
    ),
    Mutation(
        name="other-weights-have-other-keys",
        hazard="H14",
        target=f"{_KEYS}:BlockKeys.__init__",
        old='"fingerprint": fingerprint, ',
        new="",
        removes="requests find, on the device and in the tiers, what other weights computed",
        needs=frozenset({"weights"}),
        also=(
            Edit("sidestream.schedule.scheduler:Scheduler.rekey", "    self.forget_all()\n", ""),
            Edit(
                "sidestream.engine.weights:WeightUpdates.apply",
                "            self._transfers.forget_all()\n",
                "            pass\n",
            ),
        ),
    ),
    Mutation(
        name="key-names-the-salt",
        hazard="H14",
        target=f"{_KEYS}:BlockKeys.__init__",
        old=', "salt": salt',
        new="",
        removes="engines with different salts find each other's blocks",
    ),
    Mutation(
        name="key-names-the-weights",
        hazard="H14",
        target=f"{_KEYS}:BlockKeys.__init__",
        old='"fingerprint": fingerprint, ',
        new="",
        removes="models with different weights find each other's blocks",
    ),
    Mutation(
        name="key-names-the-layout",
        hazard="H14",
        target=f"{_KEYS}:BlockKeys.__init__",
        old='"layout": layout.describe(), ',
        new="",
        removes="blocks of another size, dtype or number of layers are found",
    ),
    Mutation(
        name="key-names-its-prefix",
        hazard="H14",
        target=f"{_KEYS}:_chain",
        old="blake2b(parent + data[start : start + width], digest_size=KEY_BYTES)",
        new="blake2b(data[start : start + width], digest_size=KEY_BYTES)",
        removes="equal blocks behind different beginnings have one key, and one gets the other's KV",
    ),
)

EQUIVALENT = (
    Equivalent(
        Mutation(
            name="key-names-the-requests-salt",
            hazard="H14",
            target=f"{_KEYS}:BlockKeys._root_of",
            old="if not salt:",
            new="if True:",
            removes="requests with different cache salts find each other's blocks",
        ),
        "no request of a schedule has a cache salt",
        noticed_by="kv/test_keys.py::test_another_cache_salt_shares_no_key_and_the_same_one_all",
    ),
    Equivalent(
        Mutation(
            name="remembered-keys-are-those-behind-this-prefix",
            hazard="H14",
            target=f"{_KEYS}:BlockKeys.extend",
            old="    parent = keys[-1]\n",
            new="    pass\n",
            removes="the same 512 tokens behind different beginnings have the same keys, and one gets the other's KV",
        ),
        "no prompt of a schedule has so many tokens",
        noticed_by="kv/test_keys.py::test_keys_that_are_remembered_are_those_that_would_be_made",
    ),
    Equivalent(
        Mutation(
            name="merged-fences-are-of-all-streams",
            hazard="H2",
            target=f"{_POOL}:merge_fences",
            old="        last[fence.stream] = fence\n",
            new="        last = {fence.stream: fence}\n",
            removes="of uses on several streams only one is waited for",
            needs=frozenset({"offload"}),
        ),
        "when a step is planned one step at most is on its way, and the host waits for whatever else uses blocks",
        noticed_by="kv/test_pool.py::test_the_next_owner_waits_for_every_stream_that_used_the_id_and_for_the_last_use_on_each",
    ),
    Equivalent(
        Mutation(
            name="merged-fences-are-the-last",
            hazard="H2",
            target=f"{_POOL}:merge_fences",
            old="last[fence.stream].tick < fence.tick",
            new="last[fence.stream].tick > fence.tick",
            removes="of two uses on one stream only the first is waited for",
        ),
        "when a step is planned one step at most is on its way, and the host waits for whatever else uses blocks",
        noticed_by="kv/test_pool.py::test_the_next_owner_waits_for_every_stream_that_used_the_id_and_for_the_last_use_on_each",
    ),
    Equivalent(
        Mutation(
            name="release-adds-to-earlier-fences",
            hazard="H2",
            target=f"{_POOL}:FencedPool._release",
            old="merged[before] = merge_fences((*before, *after))",
            new="merged[before] = after",
            removes="the last one to release a shared block makes the ledger forget the store that still reads it",
            needs=frozenset({"offload"}),
        ),
        "steps run in the order of their launch, and whatever else uses blocks is waited for by the host: the last release knows the last use",
        noticed_by="kv/test_pool.py::test_the_next_owner_waits_for_every_stream_that_used_the_id_and_for_the_last_use_on_each",
    ),
    Equivalent(
        Mutation(
            name="postponed-release-keeps-its-fences",
            hazard="H3",
            target=f"{_POOL}:FencedPool._postpone",
            old="self._postponed.append((until, block_ids, after))",
            new="self._postponed.append((until, block_ids, ()))",
            removes="whoever takes a block after its transfer ended does not know of the step that still uses it",
            needs=frozenset({"offload"}),
        ),
        "only a load that got the blocks between the end of the transfer and that of the last step would come too soon: hardly any schedule has one",
        noticed_by="kv/test_pool.py::test_an_id_that_comes_back_late_brings_its_fences",
    ),
    Equivalent(
        Mutation(
            name="unused-lease-keeps-fences",
            hazard="H2",
            target=f"{_POOL}:FencedPool.take",
            old="fences[block_id] = tuple(fence for fence in fences[block_id] if not fence.poll())",
            new="fences[block_id] = ()",
            removes="a lease that ends before anything waited on its behalf takes the fences of the use before with it",
            needs=frozenset({"abort", "offload", "preempt"}),
        ),
        "the step that admits has its step wait for all fresh blocks, so only a load could come too soon into blocks of a request that left before its first step",
        noticed_by="kv/test_pool.py::test_a_use_that_ended_without_a_fence_does_not_hide_the_one_before",
    ),
    Equivalent(
        Mutation(
            name="extended-lease-keeps-fences",
            hazard="H2",
            target=f"{_POOL}:Lease.extend",
            old="self.after = merge_fences((*self.after, *other.after))",
            new="self.after = tuple(self.after)",
            removes="a lease that grew does not say which fences its new blocks have",
        ),
        "the scheduler hands the fences of fresh blocks to the step before it joins the leases; nobody reads them from the joined one",
        noticed_by="kv/test_pool.py::test_a_joined_lease_waits_for_what_both_waited_for",
    ),
    Equivalent(
        Mutation(
            name="finished-fences-are-dropped",
            hazard="H2",
            target=f"{_POOL}:merge_fences",
            old="if not fence.poll() and (",
            new="if (",
            removes="streams wait for what has happened already",
        ),
        "a wait for a fence that is done takes no time and orders nothing that is not ordered",
        noticed_by="kv/test_pool.py::test_a_finished_use_is_nothing_to_wait_for",
    ),
)

_GUARD = "raises when the ledger's user broke a rule; the rule itself has its mutation"

EXEMPT = (
    Exempt(f"{_POOL}:Lease.open", "return self._open", "a question"),
    Exempt(f"{_POOL}:Lease.extend", "if other.pool is not self.pool or not other._open or not self._open:", _GUARD),
    Exempt(f"{_POOL}:Lease.extend", "other._open = False", _GUARD),
    Exempt(f"{_POOL}:Lease.extend", "self.ids.extend(other.ids)", "a list"),
    Exempt(f"{_POOL}:Lease.release", "if not self._open:", _GUARD),
    Exempt(f"{_POOL}:Lease.release", "self._open = False", _GUARD),
    Exempt(
        f"{_POOL}:FencedPool.take",
        "self._references[block_id] = 1",
        "without it nothing can be leased; what a lease does is ruled above",
    ),
    Exempt(f"{_POOL}:FencedPool.publish", "if self._references[block_id] == 0:", _GUARD),
    Exempt(f"{_POOL}:FencedPool.take", "block_ids.extend(self._evict(evicted))", "a list"),
    Exempt(f"{_POOL}:FencedPool.publish_all", "if 0 in map(self._references.__getitem__, block_ids):", _GUARD),
    Exempt(
        f"{_POOL}:FencedPool.publish_all",
        "self.publish(block_id, key)",
        "when: see slice-is-seen-done-before-it-counts",
    ),
    Exempt(
        f"{_KEYS}:BlockKeys.extend", "keys.extend(", "adds to a list; whose keys they are: see key-names-its-prefix"
    ),
    Exempt(f"{_POOL}:FencedPool.publish", "self._index.add(key, block_id)", "see key-names-one-block"),
    Exempt(
        f"{_POOL}:FencedPool.check",
        "num_states = (block_id in free) + (block_id in self._cached) + (self._references[block_id] > 0)",
        _GUARD,
    ),
    Exempt(f"{_POOL}:FencedPool.check", "if num_states != 1 or self._references[block_id] < 0:", _GUARD),
    Exempt(f"{_POOL}:FencedPool.forget_all", "self._index.clear()", "see reset-removes-keys"),
    Exempt(
        f"{_POOL}:FencedPool.grow",
        "    self._references.extend(0 for _ in range(self.size, size))\n"
        "    self._fences.extend(() for _ in range(self.size, size))\n"
        "    self._free.extend(range(self.size, size))\n",
        "lists, of ids that nobody has had",
    ),
)
