"""The scheduler's rules: what counts as computed, what is released behind what, which results are dropped, who goes first."""

from __future__ import annotations

from sidestream.testing.mutations.mechanism import Edit, Equivalent, Exempt, Mutation

_SCHEDULER = "sidestream.schedule.scheduler:Scheduler"
_REQUEST = "sidestream.schedule.request:Request"

MUTATIONS = (
    # ------------------------------------------------------------------ what counts as computed
    Mutation(
        name="only-committed-blocks-are-published",
        hazard="H12",
        target=f"{_SCHEDULER}._publish",
        old="complete = request.committed_len // self.limits.block_tokens",
        new="complete = min(request.launched_len, len(request.tokens)) // self.limits.block_tokens",
        removes="blocks are findable, and stored behind the wrong flight, as soon as the flight that fills them was launched",
    ),
    Mutation(
        name="late-result-is-dropped",
        hazard="H10",
        target=f"{_SCHEDULER}.commit",
        old="request.epoch != row.epoch or ",
        new="",
        removes="a request that was retracted and runs again takes in the token of a flight from before",
        needs=frozenset({"preempt"}),
    ),
    Mutation(
        name="retraction-begins-an-epoch",
        hazard="H10",
        target=f"{_SCHEDULER}._retract",
        old="    request.epoch += 1\n",
        new="",
        removes="what was launched before a retraction cannot be told from what was launched after it",
        needs=frozenset({"preempt"}),
    ),
    Mutation(
        name="blocks-of-broken-logits-are-not-published",
        hazard="H9",
        target=f"{_SCHEDULER}.commit",
        old="if result is None or result.finite:",
        new="if True:",
        removes="others find the KV of a request whose logits show that it is broken",
        needs=frozenset({"bad_logits"}),
    ),
    Mutation(
        name="failed-load-is-computed",
        hazard="H9",
        target=f"{_SCHEDULER}.load_failed",
        old="self._retract(request)",
        new="request.promotions = 0",
        removes="a request goes on with blocks that a load left half filled",
        needs=frozenset({"failing_copy", "offload"}),
    ),
    Mutation(
        name="only-the-last-chunk-samples",
        hazard="H25",
        target=f"{_SCHEDULER}._plan_chunk",
        old="samples=stop == known",
        new="samples=True",
        removes="a prompt's first chunks yield tokens, too",
    ),
    # ------------------------------------------------------------------ fences of blocks
    Mutation(
        name="release-waits-for-the-last-flight",
        hazard="H3",
        target=f"{_SCHEDULER}._give_up_device",
        old="request.blocks.release(after=after)",
        new="request.blocks.release()",
        removes="a load or a store of the next owner does not wait for the flight that still uses the blocks",
    ),
    Mutation(
        name="flight-leaves-its-fence",
        hazard="H16",
        target=f"{_SCHEDULER}.launched",
        old="            request.last_fence = fence\n",
        new="            pass\n",
        removes="a request that ends does not know which flight still uses what it releases",
    ),
    Mutation(
        name="grown-block-waits-for-its-last-use",
        hazard="H2",
        target=f"{_SCHEDULER}._reserve",
        old="    fresh = self._blocks.take(missing)\n    draft.after.extend(fresh.after)\n    request.blocks.extend(fresh)\n",
        new="    fresh = self._blocks.take(missing)\n    request.blocks.extend(fresh)\n",
        removes="a decode step writes into a block that a store still reads",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="fresh-blocks-wait-for-their-last-use",
        hazard="H4",
        target=f"{_SCHEDULER}._try_admit",
        old="    draft.after.extend(fresh.after)\n",
        new="",
        removes="a prefill writes into blocks that a store still reads",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="load-waits-for-its-blocks-last-use",
        hazard="H3",
        target=f"{_SCHEDULER}._try_admit",
        old="LoadPlan(request.id, request.epoch, keys, block_ids, fresh.after)",
        new="LoadPlan(request.id, request.epoch, keys, block_ids, ())",
        removes="a load writes into blocks that the old owner's flight or store still uses",
        needs=frozenset({"offload"}),
    ),
    # ------------------------------------------------------------------ leases
    Mutation(
        name="hits-are-leased-before-others-are-evicted",
        hazard="H11",
        target=f"{_SCHEDULER}._try_admit",
        old=(
            "    blocks = self._blocks.share(hits)\n"
            "    fresh = self._blocks.take(-(-len(request.tokens) // limits.block_tokens) - len(hits))\n"
        ),
        new=(
            "    fresh = self._blocks.take(-(-len(request.tokens) // limits.block_tokens) - len(hits))\n"
            "    blocks = self._blocks.share(hits)\n"
        ),
        removes="the blocks that a request found are evicted to make room for the same request",
    ),
    Mutation(
        name="admission-needs-room",
        hazard="H26",
        target=f"{_SCHEDULER}._try_admit",
        old="    if not self._has_room(request, hits):\n        return False\n",
        new="",
        removes="a request is admitted half: its hits are leased, then there is no room for the rest",
        needs=frozenset({"preempt"}),
    ),
    Mutation(
        name="hits-are-no-room",
        hazard="H26",
        target=f"{_SCHEDULER}._has_room",
        old=" - sum(self._blocks.is_cached(item) for item in hits)",
        new="",
        removes="cached blocks that the request will share count as room for its other ones",
        needs=frozenset({"preempt"}),
    ),
    Mutation(
        name="decode-reserves-its-block",
        hazard="H11",
        target=f"{_SCHEDULER}._plan_running",
        old=" and self._reserve(request, request.launched_len + 1, draft)",
        new="",
        removes="a token's KV is written where the request has no block",
    ),
    Mutation(
        name="finish-releases",
        hazard="H22",
        target=f"{_SCHEDULER}.finish",
        old="    self._give_up_device(request)\n",
        new="    self._running.pop(request.id, None)\n",
        removes="nobody gives back what a finished request used",
    ),
    Mutation(
        name="finish-leaves-the-queue",
        hazard="H21",
        target=f"{_SCHEDULER}.finish",
        old="    self._queue.pop(request.id, None)\n    self._requests.pop(request.id, None)\n    request.state = State.FINISHED\n",
        new="    self._requests.pop(request.id, None)\n",
        removes="a request that was aborted while it waited is admitted afterwards, and nobody ends it",
        needs=frozenset({"abort"}),
    ),
    Mutation(
        name="gone-request-completes-no-blocks",
        hazard="H22",
        target=f"{_SCHEDULER}._give_up_device",
        old="            del self._coming[key]\n",
        new="            pass\n",
        removes="others wait for ever for blocks that a request was about to complete when it ended",
        needs=frozenset({"abort"}),
    ),
    # ------------------------------------------------------------------ rows
    Mutation(
        name="row-begins-with-each-epoch",
        hazard="H16",
        target=f"{_SCHEDULER}._start",
        old="request.begun = request.stepped = False",
        new="request.stepped = False",
        removes="a request that comes back draws with what the row's owner before it left there",
        needs=frozenset({"preempt"}),
    ),
    Mutation(
        name="row-begins-once",
        hazard="H19",
        target=f"{_SCHEDULER}._row_plan",
        old="if not request.begun:",
        new="if not request.begun or tokens is None:",
        removes="a decode step takes the host's last token, one step old, in place of the one that the device has just drawn",
    ),
    # ------------------------------------------------------------------ resets and new weights
    Mutation(
        name="reset-forgets-the-device",
        hazard="H8",
        target=f"{_SCHEDULER}.forget_all",
        old="    self._blocks.forget_all()\n",
        new="",
        removes="blocks on the device are found after a reset",
        needs=frozenset({"reset"}),
    ),
    Mutation(
        name="blocks-from-before-a-reset-stay-private",
        hazard="H8",
        target=f"{_SCHEDULER}._publish",
        old=" or not request.shares",
        new="",
        removes="a request that runs through a reset publishes what it computed before",
        needs=frozenset({"reset"}),
    ),
    Mutation(
        name="waiting-requests-get-the-new-keys",
        hazard="H14",
        target=f"{_SCHEDULER}.rekey",
        old="        request.keys.clear()\n",
        new="",
        removes="a request that waited publishes blocks of the new weights under keys of the old ones",
        needs=frozenset({"weights"}),
    ),
    Mutation(
        name="new-weights-wait-for-those-who-began",
        hazard="H8",
        target=f"{_SCHEDULER}._may_start",
        old="request.cached is not None or request.epoch > 0",
        new="request.epoch < 0",
        removes="a request that was retracted comes back on other weights, in the middle of its answer",
        needs=frozenset({"preempt", "weights"}),
        also=(
            Edit(
                f"{_SCHEDULER}.num_begun",
                "sum(request.cached is not None or request.epoch > 0 for request in self._requests.values())",
                "len(self._running)",
            ),
        ),
    ),
    # ------------------------------------------------------------------ who goes first
    Mutation(
        name="retracted-request-is-not-planned",
        hazard="H26",
        target=f"{_SCHEDULER}.plan",
        old="        if request.state is State.RUNNING:  # a retraction for an older one may have come before\n            self._plan_running(request, draft)\n",
        new="        self._plan_running(request, draft)\n",
        removes="a request gets a row of the same step that took its blocks away",
        needs=frozenset({"preempt"}),
    ),
    Mutation(
        name="older-requests-are-not-retracted",
        hazard="H26",
        target=f"{_SCHEDULER}._victim_for",
        old="behind = ranked[ranked.index(request) + 1 :]",
        new="behind = [other for other in ranked if other is not request]",
        removes="a younger request takes the blocks of an older one, which has a row in this step already",
        needs=frozenset({"preempt"}),
    ),
    Mutation(
        name="waiting-request-is-not-admitted",
        hazard="H10",
        target=f"{_SCHEDULER}._may_start",
        old="request.state is State.WAITING and (self.admits_new or request.cached is not None or request.epoch > 0)",
        new="(self.admits_new or request.cached is not None or request.epoch > 0)",
        removes="the end of a wait for the disk changes a request that went on without it",
        needs=frozenset({"disk", "slow_tier"}),
        also=(Edit(f"{_SCHEDULER}.promoted", "request.state is not State.LOADING or ", ""),),
    ),
)

_SAVES_TIME = "saves work only: "

EQUIVALENT = (
    Equivalent(
        Mutation(
            name="wait-for-the-disk-ends",
            hazard="H26",
            target=f"{_SCHEDULER}._may_promote",
            old="        and request.promotions < self.limits.max_promotions\n",
            new="",
            removes="a request goes back to waiting for a disk that does not answer, again and again",
            needs=frozenset({"disk", "slow_tier"}),
            also=(Edit(f"{_SCHEDULER}.promoted", "    if not again:\n        request.avoid_disk = True\n", ""),),
        ),
        "each wait has a deadline, and a disk that a schedule makes slow answers at last; tests/schedule/test_scheduler.py has one that does not",
    ),
    Equivalent(
        Mutation(
            name="row-release-waits-for-the-last-flight",
            hazard="H16",
            target=f"{_SCHEDULER}._give_up_device",
            old="request.row.release(after=after)",
            new="request.row.release()",
            removes="the next owner of a row does not know which flight still uses it",
        ),
        "rows are touched by the compute stream only, and that runs flights in the order of their launch",
    ),
    Equivalent(
        Mutation(
            name="finish-happens-once",
            hazard="H21",
            target=f"{_SCHEDULER}.finish",
            old="    if request.state is State.FINISHED:\n        return\n",
            new="",
            removes="a request is finished twice",
        ),
        "the engine finishes a request only while it has a session, and a request that does not run has nothing to release",
    ),
    Equivalent(
        Mutation(
            name="result-of-a-request-that-does-not-run-is-dropped",
            hazard="H10",
            target=f"{_SCHEDULER}.commit",
            old=" or request.state is not State.RUNNING",
            new="",
            removes="a request that waits takes in a token of a flight from before",
        ),
        "a request that stopped running was retracted, so its epoch differs, or it finished, so it is not found",
    ),
    Equivalent(
        Mutation(
            name="promotion-of-an-older-epoch-is-dropped",
            hazard="H10",
            target=f"{_SCHEDULER}.promoted",
            old=" or request.epoch != epoch",
            new="",
            removes="the end of an earlier wait for the disk counts as the end of this one",
        ),
        "a request that waits for the disk cannot be retracted, so its epoch stays until the wait ends",
    ),
    Equivalent(
        Mutation(
            name="failed-load-of-an-older-epoch-is-dropped",
            hazard="H10",
            target=f"{_SCHEDULER}.load_failed",
            old="request.epoch == epoch and request.state is State.RUNNING",
            new="request.row is not None",
            removes="a request that began anew is retracted because a load from before failed",
        ),
        "it computes once more what it had: time is lost, and nothing else",
    ),
    Equivalent(
        Mutation(
            name="flight-of-an-older-epoch-leaves-no-fence",
            hazard="H16",
            target=f"{_SCHEDULER}.launched",
            old=" and request.epoch == row.epoch",
            new="",
            removes="a flight from before stands for the uses of a request that began anew",
        ),
        "a flight is launched and noted in the step that planned it; nothing comes between",
    ),
    Equivalent(
        Mutation(
            name="reset-ends-joining",
            hazard="H8",
            target=f"{_SCHEDULER}.forget_all",
            old="    self._coming.clear()\n",
            new="",
            removes="requests wait for blocks that will not be published after a reset",
        ),
        "they wait until the request that computes them ends, and then compute them",
    ),
    Equivalent(
        Mutation(
            name="new-keys-forget-the-device",
            hazard="H8",
            target=f"{_SCHEDULER}.rekey",
            old="    self.forget_all()\n",
            new="",
            removes="blocks of the old weights stay where they are",
            needs=frozenset({"weights"}),
        ),
        "nobody asks for their keys any more, so they only take room; both together: other-weights-have-other-keys",
    ),
    Equivalent(
        Mutation(
            name="late-request-gets-the-new-keys",
            hazard="H14",
            target=f"{_SCHEDULER}.submit",
            old="    if request.keys_version != self.keys_version:\n        request.keys.clear()\n",
            new="    if request.keys_version != self.keys_version:\n",
            removes="a request whose keys were made before new weights came, and which arrives after them, keeps its keys",
            needs=frozenset({"weights"}),
        ),
        "that takes a client on another thread, and a schedule's clients are on the engine's",
    ),
    Equivalent(
        Mutation(
            name="published-block-is-not-coming",
            hazard="H26",
            target=f"{_SCHEDULER}._publish",
            old="            del self._coming[key]\n",
            new="            pass\n",
            removes="a block counts as about to be completed when it is complete",
        ),
        "whoever wants the block finds it in the pool and does not ask whether it is coming",
    ),
    Equivalent(
        Mutation(
            name="request-joins-one-that-computes-the-same",
            hazard="H26",
            target=f"{_SCHEDULER}._try_admit",
            old="    if self._awaits_another(wanted[len(hits) : found + 1]):\n        return True\n",
            new="",
            removes="two requests load or compute the same blocks side by side",
        ),
        _SAVES_TIME + "both get the same bytes, and the second block stays without a key",
    ),
    Equivalent(
        Mutation(
            name="request-steps-before-it-is-retracted",
            hazard="H26",
            target=f"{_SCHEDULER}._victim_for",
            old="stepped = [other for other in behind if other.stepped]",
            new="stepped = behind",
            removes="a request is retracted before it ran a step",
        ),
        "the first in rank is never a victim, so it ends, and the next one is first: fewer steps are wasted, none is endless",
    ),
    Equivalent(
        Mutation(
            name="request-steps-before-it-yields-to-priority",
            hazard="H26",
            target=f"{_SCHEDULER}._retract_for_priority",
            old="if r.stepped and r.priority",
            new="if r.priority",
            removes="a request of lower priority is retracted before it ran a step",
            needs=frozenset({"priority"}),
        ),
        "priorities are an order: the highest runs on, ends, and the next one is highest",
    ),
    Equivalent(
        Mutation(
            name="waiters-for-the-disk-are-counted",
            hazard="H26",
            target=f"{_SCHEDULER}._may_promote",
            old="sum(other.state is State.LOADING for other in self._queue.values())",
            new="0",
            removes="more requests wait for the disk than could run, and crowd the host tier",
            needs=frozenset({"disk"}),
        ),
        _SAVES_TIME + "a promotion that finds no room is cut, and its request computes",
    ),
    Equivalent(
        Mutation(
            name="waiting-counts-as-work",
            hazard="H26",
            target=f"{_REQUEST}.has_work",
            old="self.state is not State.RUNNING or ",
            new="",
            removes="a request that was retracted with its last token on its way does not age",
        ),
        "every other waiting request could decode, so it ages; and a workload that ends starves nobody",
    ),
)

_GUARD = "raises when a caller broke a rule; the rule itself has its mutation"
_LIST = "a list"
_PREFIX_KEYS = "makes keys; takes nothing"

EXEMPT = (
    Exempt(f"{_SCHEDULER}.keys_of", "self._keys.extend(keys, tokens)", _PREFIX_KEYS),
    Exempt(f"{_SCHEDULER}._wanted", "self._keys.extend(request.keys, request.tokens)", _PREFIX_KEYS),
    Exempt(f"{_SCHEDULER}._publish", "self._keys.extend(request.keys, request.tokens)", _PREFIX_KEYS),
    Exempt(f"{_SCHEDULER}.commit", "stored.extend(complete)", _LIST),
    Exempt(f"{_SCHEDULER}.commit", "prefix.extend(request.keys", _LIST),
    Exempt(
        f"{_SCHEDULER}._try_admit",
        "blocks.extend(fresh)",
        "without it a request has no blocks to write to; when they may be written is ruled above",
    ),
    Exempt(f"{_SCHEDULER}._start", "self._rows.take(1)", "a row waits for nothing: see row-release-waits-for-the-last-flight"),
    Exempt(f"{_SCHEDULER}._publish", "if self._blocks.publish(block, key):", "which blocks: see only-committed-blocks-are-published"),
)
