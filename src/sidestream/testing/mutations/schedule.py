"""The scheduler's rules: what counts as computed, what is released behind what, which results are dropped, who goes
first.
"""

from __future__ import annotations

from sidestream.testing.mutations.mechanism import Edit, Equivalent, Exempt, Mutation

_SCHEDULER = "sidestream.schedule.scheduler:Scheduler"
_QUEUES = "sidestream.schedule.queues:RequestQueues"
_PREFIX_CACHE = "sidestream.schedule.prefix_cache:PrefixCache"
_ALLOCATOR = "sidestream.schedule.allocation:Allocator"
_TIERS = "sidestream.schedule.tiers:TierLoads"
_PREFILL = "sidestream.schedule.prefill:PrefillPlanner"
_DECODE = "sidestream.schedule.decoding:DecodePlanner"
_ADMISSION = "sidestream.schedule.admission:Admission"
_PREEMPTION = "sidestream.schedule.preemption:Preemption"
_COMMITTER = "sidestream.schedule.commit:Committer"
_REQUEST = "sidestream.schedule.request:Request"

MUTATIONS = (
    # ------------------------------------------------------------------ what counts as computed
    Mutation(
        name="only-committed-blocks-are-published",
        hazard="H12",
        target=f"{_COMMITTER}.commit",
        old="complete = request.committed_len // size",
        new="complete = min(request.launched_len, len(request.tokens)) // size",
        removes="blocks are findable, and stored behind the wrong step, as soon as the step that fills them was launched",
    ),
    Mutation(
        name="late-result-is-dropped",
        hazard="H10",
        target=f"{_COMMITTER}.commit",
        old="request.epoch != epoch or ",
        new="",
        removes="a request that was preempted and runs again takes in the token of a step from before",
        needs=frozenset({"failing_copy", "offload"}),
    ),
    Mutation(
        name="preemption-begins-an-epoch",
        hazard="H10",
        target=f"{_QUEUES}.requeue",
        old="    request.epoch += 1\n",
        new="",
        removes="what was launched before a preemption cannot be told from what was launched after it",
        needs=frozenset({"failing_copy", "offload"}),
    ),
    Mutation(
        name="blocks-of-broken-logits-are-not-published",
        hazard="H9",
        target=f"{_COMMITTER}.commit",
        old="if not result.finite:",
        new="if result is None:",
        removes="others find the KV of a request whose logits show that it is broken",
        needs=frozenset({"bad_logits"}),
    ),
    Mutation(
        name="failed-load-is-computed",
        hazard="H9",
        target=f"{_SCHEDULER}.load_failed",
        old="self._preemption.preempt(request)",
        new="request.promotions = 0",
        removes="a request goes on with blocks that a load left half filled",
        needs=frozenset({"failing_copy", "offload"}),
    ),
    Mutation(
        name="failed-load-is-not-tried-again",
        hazard="H26",
        target=f"{_TIERS}.mark_load_failed",
        old="    request.avoid_tiers = True\n",
        new="",
        removes="a request loads, fails, and loads the same again for ever",
        needs=frozenset({"failing_copy", "offload"}),
    ),
    Mutation(
        name="only-the-last-chunk-samples",
        hazard="H25",
        target=f"{_PREFILL}._add_chunk",
        old="samples=stop == known",
        new="samples=True",
        removes="a prompt's first chunks yield tokens, too",
    ),
    # ------------------------------------------------------------------ fences of blocks
    Mutation(
        name="release-waits-for-the-last-step",
        hazard="H3",
        target=f"{_ALLOCATOR}.release",
        old="request.blocks.release(after=after, ",
        new="request.blocks.release(",
        removes="a load or a store of the next owner does not wait for the step that still uses the blocks",
    ),
    Mutation(
        name="release-waits-for-the-transfers",
        hazard="H10",
        target=f"{_ALLOCATOR}.release",
        old="request.blocks.release(after=after, until=self._tiers.uses())",
        new="request.blocks.release(after=after)",
        removes="whoever gets a block next writes into it while a store still reads it, or a load that nobody waits for any more lands in it",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="step-leaves-its-fence",
        hazard="H16",
        target=f"{_SCHEDULER}.launched",
        old="            request.last_fence = fence\n",
        new="            pass\n",
        removes="a request that ends does not know which step still uses what it releases",
    ),
    Mutation(
        name="load-waits-for-its-blocks-last-use",
        hazard="H4",
        target=f"{_ADMISSION}._try_admit",
        old="tuple(fresh[:num_loads]), after)",
        new="tuple(fresh[:num_loads]), ())",
        removes="a load writes into blocks that the old owner's step or store still uses",
        needs=frozenset({"offload"}),
    ),
    # ------------------------------------------------------------------ leases
    Mutation(
        name="hits-are-leased-before-others-are-evicted",
        hazard="H11",
        target=f"{_ALLOCATOR}.start",
        old=(
            "    blocks = self._blocks.share(hits)\n"
            "    fresh = self._blocks.take(self._limits.num_blocks(len(request.tokens)) - len(hits))\n"
        ),
        new=(
            "    fresh = self._blocks.take(self._limits.num_blocks(len(request.tokens)) - len(hits))\n"
            "    blocks = self._blocks.share(hits)\n"
        ),
        removes="the blocks that a request found are evicted to make room for the same request",
    ),
    Mutation(
        name="admission-needs-room",
        hazard="H26",
        target=f"{_ADMISSION}._try_admit",
        old="    if not self.has_room(request, hits):\n        return False\n",
        new="",
        removes="a request is admitted half: its hits are leased, then there is no room for the rest",
        needs=frozenset({"preempt"}),
    ),
    Mutation(
        name="hits-are-no-room",
        hazard="H26",
        target=f"{_ALLOCATOR}.fits",
        old=" - sum(self._blocks.is_cached(block) for block in hits)",
        new="",
        removes="cached blocks that the request will share count as room for its other ones",
        needs=frozenset({"preempt"}),
    ),
    Mutation(
        name="decode-reserves-its-block",
        hazard="H11",
        target=f"{_DECODE}._make_room",
        old="drafts or self._reserve(request, stop, step, preempting=not request.drafts_in_flight)",
        new="drafts or stop",
        removes="a token's KV is written where the request has no block",
    ),
    Mutation(
        name="drafts-reserve-their-blocks",
        hazard="H11",
        target=f"{_DECODE}._make_room",
        old="if drafts and not self._reserve(request, request.launched_len + 1 + drafts, step, preempting=False):",
        new="if drafts and not request.blocks:",
        removes="drafts' KV is written where the request has no block",
        needs=frozenset({"speculative"}),
    ),
    Mutation(
        name="bounds-come-down-at-commit",
        hazard="H19",
        target=f"{_REQUEST}.settle_drafts",
        old="    self.launched_len -= 1 + drafts - drawn\n    self.launched_outputs -= 1 + drafts - drawn\n",
        new="",
        removes="a request whose drafts fail is taken to be longer and longer, until it may not go on",
        needs=frozenset({"speculative"}),
    ),
    Mutation(
        name="drafts-on-their-way-lower-the-bound",
        hazard="H19",
        target=f"{_DECODE}.plan",
        old="length - in_flight",
        new="length",
        removes="the host takes all drafts of the step before for right",
        needs=frozenset({"speculative"}),
    ),
    Mutation(
        name="nothing-follows-the-token-that-ends-a-request",
        hazard="H21",
        target=f"{_REQUEST}.append_outputs",
        old='            return count, "stop"\n',
        new='            tokens.extend(token_ids[count:])\n            return len(token_ids), "stop"\n',
        removes="an accepted run goes on behind its end",
        needs=frozenset({"speculative"}),
    ),
    Mutation(
        name="accepted-tokens-are-committed-and-no-more",
        hazard="H12",
        target=f"{_COMMITTER}.commit",
        old="request.committed_len += count",
        new="request.committed_len += 1 + drafts",
        removes="KV of drafts that were wrong becomes findable",
        needs=frozenset({"speculative"}),
    ),
    Mutation(
        name="finish-releases",
        hazard="H22",
        target=f"{_SCHEDULER}.finish",
        old="    self._allocator.release(request)\n",
        new="",
        removes="nobody gives back what a finished request used",
    ),
    Mutation(
        name="finish-leaves-the-queue",
        hazard="H21",
        target=f"{_QUEUES}.remove",
        old=(
            "    self.waiting.pop(request.id, None)\n"
            "    self.unfinished.pop(request.id, None)\n"
            "    request.state = State.FINISHED\n"
        ),
        new="    self.unfinished.pop(request.id, None)\n",
        removes="a request that was aborted while it waited is admitted afterwards, and nobody ends it",
        needs=frozenset({"abort"}),
    ),
    Mutation(
        name="gone-request-completes-no-blocks",
        hazard="H22",
        target=f"{_ALLOCATOR}.release",
        old="    self._prefix_cache.drop_pending(request, request.keys)\n",
        new="",
        removes="others wait for ever for blocks that a request was about to complete when it ended",
        needs=frozenset({"abort"}),
    ),
    # ------------------------------------------------------------------ loads
    Mutation(
        name="load-has-its-fences-before-its-first-step",
        hazard="H5",
        target=f"{_PREFILL}.plan",
        old=" or request.loading",
        new="",
        removes="a request joins a step before its load has fences that the step could wait for",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="request-with-a-load-is-loading",
        hazard="H5",
        target=f"{_ADMISSION}._try_admit",
        old="request.loading = request.arriving = num_loads > 0",
        new="request.loading = False",
        removes="nobody knows that a request's load has no fences yet",
        needs=frozenset({"offload"}),
    ),
    # ------------------------------------------------------------------ rows
    Mutation(
        name="row-begins-with-each-epoch",
        hazard="H16",
        target=f"{_REQUEST}.start",
        old="self.begun = self.stepped = False",
        new="self.stepped = False",
        removes="a request that comes back draws with what the row's owner before it left there",
        needs=frozenset({"preempt"}),
    ),
    Mutation(
        name="row-begins-once",
        hazard="H19",
        target=f"{_DECODE}.plan",
        old="outputs - in_flight,\n                None,\n",
        new=(
            "outputs - in_flight,\n"
            "RowStart(request.sampling, request.prompt, tuple(request.tokens[len(request.prompt) :])),\n"
        ),
        removes="a decode step takes the host's last token, one step old, in place of the one that the device has just drawn",
    ),
    # ------------------------------------------------------------------ resets and new weights
    Mutation(
        name="reset-forgets-the-device",
        hazard="H8",
        target=f"{_PREFIX_CACHE}.forget_all",
        old="    self._blocks.forget_all()\n",
        new="",
        removes="blocks on the device are found after a reset",
        needs=frozenset({"reset"}),
    ),
    Mutation(
        name="reset-makes-running-requests-private",
        hazard="H8",
        target=f"{_PREFIX_CACHE}.forget_all",
        old="    for request in running:\n        request.shares = False\n",
        new="",
        removes="requests that run through a reset are not told of it, and publish what they computed before",
        needs=frozenset({"reset"}),
    ),
    Mutation(
        name="blocks-from-before-a-reset-stay-private",
        hazard="H8",
        target=f"{_PREFIX_CACHE}.publish",
        old=" or not request.shares",
        new="",
        removes="a request that runs through a reset publishes what it computed before",
        needs=frozenset({"reset"}),
    ),
    Mutation(
        name="waiting-requests-get-the-new-keys",
        hazard="H14",
        target=f"{_SCHEDULER}.rekey",
        old="        self._prefix_cache.drop_stale_keys(request)\n",
        new="        pass\n",
        removes="a request that waited publishes blocks of the new weights under keys of the old ones",
        needs=frozenset({"weights"}),
    ),
    Mutation(
        name="new-weights-wait-for-those-who-began",
        hazard="H8",
        target=f"{_REQUEST}.has_begun",
        old="self.cached is not None or self.epoch > 0",
        new="self.epoch < 0",
        removes="a request that was preempted comes back on other weights, in the middle of its answer",
        needs=frozenset({"preempt", "weights"}),
        also=(
            Edit(
                f"{_SCHEDULER}.num_begun",
                "sum(request.has_begun for request in self._queues.unfinished.values())",
                "len(self._queues.running)",
            ),
        ),
    ),
    # ------------------------------------------------------------------ who goes first
    Mutation(
        name="preempted-request-is-not-planned",
        hazard="H26",
        target=f"{_DECODE}.plan",
        old="        if request.state is not running:  # preempted for an earlier row of this step\n            continue\n",
        new="",
        removes="a request gets a row of the same step that took its blocks away",
        needs=frozenset({"preempt"}),
        also=(Edit(f"{_PREFILL}.plan", "request.state is not State.RUNNING or ", ""),),
    ),
    Mutation(
        name="older-requests-are-not-preempted",
        hazard="H26",
        target=f"{_PREEMPTION}.victim_for",
        old="below = ranked[ranked.index(request) + 1 :]",
        new="below = [other for other in ranked if other is not request]",
        removes="a younger request takes the blocks of an older one, which has a row in this step already",
        needs=frozenset({"preempt"}),
    ),
    Mutation(
        name="waiting-request-is-not-admitted",
        hazard="H10",
        target=f"{_ADMISSION}._may_start",
        old="request.state is State.WAITING and (not self.paused or request.has_begun)",
        new="(not self.paused or request.has_begun)",
        removes="the end of a wait for the disk changes a request that went on without it",
        needs=frozenset({"disk", "restart"}),
        also=(Edit(f"{_TIERS}.end_promotion", "request.state is not State.LOADING or ", ""),),
    ),
)

_SAVES_TIME = "saves work only: "

EQUIVALENT = (
    Equivalent(
        Mutation(
            name="broken-request-invalidates-its-blocks",
            hazard="H9",
            target=f"{_PREFIX_CACHE}.invalidate",
            old="    self._blocks.forget(\n        [block",
            new="    list(\n        [block",
            removes="earlier blocks of a request whose logits show that its KV is broken stay on the device for others to find",
            needs=frozenset({"bad_logits"}),
        ),
        "the fault breaks logits alone: the KV of earlier chunks is good, and reusing it does no harm that could be seen",
        noticed_by="engine/test_failures.py::test_nothing_that_a_request_computed_is_found_after_its_logits_are_not_finite",
    ),
    Equivalent(
        Mutation(
            name="fresh-blocks-wait-for-their-last-use",
            hazard="H4",
            target=f"{_ADMISSION}._try_admit",
            old="    step.after.extend(after)\n",
            new="",
            removes="a prefill does not wait for the last use of its blocks",
            needs=frozenset({"offload"}),
        ),
        "steps run in the order of their launch, and blocks that anything else uses come back when the host has seen the end of that use",
        noticed_by="schedule/test_allocation.py::test_a_step_waits_for_the_last_use_of_the_blocks_it_writes",
    ),
    Equivalent(
        Mutation(
            name="blocks-taken-meanwhile-wait-for-their-last-use",
            hazard="H2",
            target=f"{_SCHEDULER}.order_loads",
            old=", after=self._owed)",
            new=")",
            removes="a step does not wait for the last use of blocks that were taken while the one before the last was awaited",
            needs=frozenset({"offload", "meanwhile"}),
        ),
        "steps run in the order of their launch, and blocks that anything else uses come back when the host has seen the end of that use",
        noticed_by="schedule/test_scheduler_meanwhile.py::test_the_next_step_waits_for_the_last_use_of_blocks_that_were_taken_meanwhile",
    ),
    Equivalent(
        Mutation(
            name="blocks-taken-before-wait-for-their-last-use",
            hazard="H2",
            target=f"{_SCHEDULER}.plan",
            old=", after=self._owed)",
            new=")",
            removes="a step waits for the last use only of the blocks that were taken in its own step",
            needs=frozenset({"offload", "meanwhile"}),
        ),
        "steps run in the order of their launch, and blocks that anything else uses come back when the host has seen the end of that use",
        noticed_by="schedule/test_scheduler_meanwhile.py::test_fences_are_owed_until_a_step_was_planned",
    ),
    Equivalent(
        Mutation(
            name="nobody-overtakes-who-needs-a-step",
            hazard="H26",
            target=f"{_ADMISSION}._try_admit",
            old="    if step.loads_only and not num_loads:\n        return False\n",
            new="",
            removes="who computes is admitted while a step is awaited, before it is known what that step leaves for it to share",
            needs=frozenset({"offload", "meanwhile"}),
        ),
        "it is planned with the next step, as it would have been",
        noticed_by="schedule/test_scheduler_meanwhile.py::test_who_has_to_compute_is_left_for_the_plan_and_is_not_overtaken",
    ),
    Equivalent(
        Mutation(
            name="grown-block-waits-for-its-last-use",
            hazard="H2",
            target=f"{_DECODE}._reserve",
            old="step.after.extend(self._allocator.grow(request, missing))",
            new="self._allocator.grow(request, missing)",
            removes="a decode step does not wait for the last use of its new block",
            needs=frozenset({"offload"}),
        ),
        "steps run in the order of their launch, and blocks that anything else uses come back when the host has seen the end of that use",
        noticed_by="schedule/test_allocation.py::test_a_decode_row_that_grows_waits_for_the_last_use_of_its_new_block",
    ),
    Equivalent(
        Mutation(
            name="load-is-ready-for-its-own-epoch",
            hazard="H5",
            target=f"{_TIERS}.mark_load_ready",
            old="if request is not None and request.epoch == epoch:",
            new="if request is not None:",
            removes="news of a load that was given up lets another one's request into a step too early",
            needs=frozenset({"offload", "preempt"}),
        ),
        "an old load's news and the new one's order are too many steps apart for a schedule to bring them together",
        noticed_by="schedule/test_tiers.py::test_news_of_a_load_that_was_given_up_lets_nobody_into_a_step",
    ),
    Equivalent(
        Mutation(
            name="wait-for-the-disk-ends",
            hazard="H26",
            target=f"{_TIERS}.may_promote",
            old="        and request.promotions < self._limits.max_promotions\n",
            new="",
            removes="a request goes back to waiting for a disk that does not answer, again and again",
            needs=frozenset({"disk", "slow_tier"}),
            also=(Edit(f"{_TIERS}.end_promotion", "    if not again:\n        request.avoid_disk = True\n", ""),),
        ),
        "each wait has a deadline, and a disk that a schedule makes slow answers at last; the test has one that does not",
        noticed_by="schedule/test_tiers.py::test_after_an_incomplete_promotion_the_disk_is_left_alone",
    ),
    Equivalent(
        Mutation(
            name="row-release-waits-for-the-last-step",
            hazard="H16",
            target=f"{_ALLOCATOR}.release",
            old="request.slot.release(after=after)",
            new="request.slot.release()",
            removes="the next owner of a row does not know which step still uses it",
        ),
        "rows are touched by the compute stream only, and that runs steps in the order of their launch",
        noticed_by="schedule/test_allocation.py::test_blocks_and_row_of_an_aborted_request_wait_for_its_step",
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
            target=f"{_COMMITTER}.commit",
            old=" or request.state is not running",
            new="",
            removes="a request that waits takes in a token of a step from before",
        ),
        "a request that stopped running was preempted, so its epoch differs, or it finished, so it is not found",
    ),
    Equivalent(
        Mutation(
            name="promotion-of-an-older-epoch-is-dropped",
            hazard="H10",
            target=f"{_TIERS}.end_promotion",
            old=" or request.epoch != epoch",
            new="",
            removes="the end of an earlier wait for the disk counts as the end of this one",
        ),
        "a request that waits for the disk cannot be preempted, so its epoch stays until the wait ends",
        noticed_by="schedule/test_tiers.py::test_news_of_a_promotion_or_load_that_nobody_waits_for_are_ignored",
    ),
    Equivalent(
        Mutation(
            name="failed-load-of-an-older-epoch-is-dropped",
            hazard="H10",
            target=f"{_TIERS}.mark_load_failed",
            old="request.epoch != epoch or request.state is not State.RUNNING",
            new="request.slot is None",
            removes="a request that began anew is preempted because a load from before failed",
        ),
        "it computes once more what it had: time is lost, and nothing else",
        noticed_by="schedule/test_tiers.py::test_news_of_a_promotion_or_load_that_nobody_waits_for_are_ignored",
    ),
    Equivalent(
        Mutation(
            name="step-of-an-older-epoch-leaves-no-fence",
            hazard="H16",
            target=f"{_SCHEDULER}.launched",
            old=" and request.epoch == epoch",
            new="",
            removes="a step from before stands for the uses of a request that began anew",
        ),
        "a step is launched and noted in the step that planned it; nothing comes between",
    ),
    Equivalent(
        Mutation(
            name="reset-ends-joining",
            hazard="H8",
            target=f"{_PREFIX_CACHE}.forget_all",
            old="    self._pending.clear()\n",
            new="",
            removes="requests wait for blocks that will not be published after a reset",
        ),
        "they wait until the request that computes them ends, and then compute them",
        noticed_by="schedule/test_scheduler_reset.py::test_nobody_waits_to_join_what_was_begun_before_a_reset",
    ),
    Equivalent(
        Mutation(
            name="fresh-start-shares-again",
            hazard="H8",
            target=f"{_REQUEST}.start",
            old="    self.shares = True\n",
            new="",
            removes="a request that ran through a reset and then began anew keeps its blocks to itself",
            needs=frozenset({"preempt", "reset"}),
        ),
        _SAVES_TIME + "others compute what they could have found",
        noticed_by="schedule/test_scheduler_reset.py::test_a_request_that_starts_anew_after_a_reset_shares_its_blocks_again",
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
            old="    self._prefix_cache.drop_stale_keys(request)\n",
            new="",
            removes="a request whose keys were made before new weights came, and which arrives after them, keeps its keys",
            needs=frozenset({"weights"}),
        ),
        "that takes a client on another thread, and a schedule's clients are on the engine's",
    ),
    Equivalent(
        Mutation(
            name="published-block-is-not-coming",
            hazard="H26",
            target=f"{_PREFIX_CACHE}.publish",
            old="    self.drop_pending(request, keys)\n",
            new="",
            removes="a block counts as about to be completed when it is complete",
        ),
        "whoever wants the block finds it in the pool and does not ask whether it is coming",
        noticed_by="schedule/test_prefix_cache.py::test_a_load_that_is_done_is_nothing_to_join",
    ),
    Equivalent(
        Mutation(
            name="request-joins-one-that-computes-the-same",
            hazard="H26",
            target=f"{_ADMISSION}._try_admit",
            old="    if self._prefix_cache.is_pending(wanted[len(hits) : num_found + 1]):\n        return True\n",
            new="",
            removes="two requests load or compute the same blocks side by side",
        ),
        _SAVES_TIME + "both get the same bytes, and the second block stays without a key",
        noticed_by="schedule/test_admission.py::test_a_step_looks_at_a_bounded_number_of_those_in_line",
    ),
    Equivalent(
        Mutation(
            name="request-steps-before-it-is-preempted",
            hazard="H26",
            target=f"{_PREEMPTION}.victim_for",
            old="stepped = [other for other in below if other.stepped]",
            new="stepped = below",
            removes="a request is preempted before it ran a step",
        ),
        "the first in rank is never a victim, so it ends, and the next one is first: fewer steps are wasted, none is endless",
        noticed_by="schedule/test_preemption.py::test_only_the_first_in_line_may_throw_out_one_that_has_not_stepped",
    ),
    Equivalent(
        Mutation(
            name="request-steps-before-it-yields-to-priority",
            hazard="H26",
            target=f"{_PREEMPTION}._lower_priority",
            old="if request.stepped and request.priority",
            new="if request.priority",
            removes="a request of lower priority is preempted before it ran a step",
            needs=frozenset({"priority"}),
        ),
        "priorities are an order: the highest runs on, ends, and the next one is highest",
        noticed_by="schedule/test_scheduler_priorities.py::test_room_is_not_taken_from_one_that_has_not_stepped",
    ),
    Equivalent(
        Mutation(
            name="waiters-for-the-disk-are-counted",
            hazard="H26",
            target=f"{_TIERS}.may_promote",
            old="sum(other.state is State.LOADING for other in self._queues.waiting.values())",
            new="0",
            removes="more requests wait for the disk than could run, and crowd the host tier",
            needs=frozenset({"disk"}),
        ),
        _SAVES_TIME + "a promotion that finds no room is cut, and its request computes",
        noticed_by="schedule/test_tiers.py::test_no_more_requests_wait_for_the_disk_than_there_are_rows_to_come_to",
    ),
)

_GUARD = "raises when a caller broke a rule; the rule itself has its mutation"
_LIST = "a list"
_STATE = "the state itself; what depends on it is ruled above"
_PREFIX_KEYS = "makes keys; takes nothing"
_NEW_KEYS = "see late-request-gets-the-new-keys"

EXEMPT = (
    Exempt(f"{_PREFIX_CACHE}.keys_of", "self._keys.extend(keys, tokens, salt=salt)", _PREFIX_KEYS),
    Exempt(f"{_SCHEDULER}.keys_of", "keys_of(tokens, salt=salt)", _PREFIX_KEYS),
    Exempt(
        f"{_PREFIX_CACHE}.wanted_keys",
        "self._keys.extend(request.keys, request.tokens, salt=request.cache_salt)",
        _PREFIX_KEYS,
    ),
    Exempt(
        f"{_PREFIX_CACHE}.publish",
        "self._keys.extend(request.keys, request.tokens, salt=request.cache_salt)",
        _PREFIX_KEYS,
    ),
    Exempt(f"{_PREFIX_CACHE}.drop_stale_keys", "if request.keys_version != self.keys_version:", _NEW_KEYS),
    Exempt(f"{_PREFIX_CACHE}.drop_stale_keys", "request.keys.clear()", _NEW_KEYS),
    Exempt(f"{_PREFIX_CACHE}.drop_stale_keys", "request.keys_version = self.keys_version", _NEW_KEYS),
    Exempt(f"{_PREFIX_CACHE}.rekey", "self.keys_version += 1", _NEW_KEYS),
    Exempt(f"{_SCHEDULER}.keys_version", "self._prefix_cache.keys_version", "a question of front ends"),
    Exempt(f"{_SCHEDULER}.forget_all", "self._prefix_cache.forget_all(", "see reset-forgets-the-device"),
    Exempt(f"{_TIERS}.end_promotion", "request.state = State.WAITING", _STATE),
    Exempt(f"{_TIERS}.promote", "request.state = State.LOADING", _STATE),
    Exempt(f"{_QUEUES}.start", "request.state = State.RUNNING", _STATE),
    Exempt(f"{_QUEUES}.requeue", "request.state = State.WAITING", _STATE),
    Exempt(f"{_PREEMPTION}.preempt", "self._allocator.release(request)", "see finish-releases"),
    Exempt(f"{_SCHEDULER}.submit", "self._queues.add(request)", "a request without a queue is never admitted"),
    Exempt(f"{_SCHEDULER}.finish", "self._queues.remove(request)", "see finish-leaves-the-queue"),
    Exempt(f"{_SCHEDULER}.rekey", "self._prefix_cache.rekey(keys)", "see new-weights-take-the-keys-over"),
    Exempt(f"{_COMMITTER}.commit", "request.stepped = True", "see request-steps-before-it-is-preempted"),
    Exempt(
        f"{_PREFILL}._row",
        "if not request.begun:",
        "chunks behind the first may begin the row again; that decode rows do not: row-begins-once",
    ),
    Exempt(f"{_PREFILL}._row", "request.begun = True", "likewise"),
    Exempt(f"{_TIERS}.locate", "if request.avoid_tiers else", "see failed-load-is-not-tried-again"),
    Exempt(f"{_TIERS}.may_promote", "and not request.avoid_disk", "see wait-for-the-disk-ends"),
    Exempt(f"{_ALLOCATOR}.release", "if request.last_fence is None else", "see release-waits-for-the-last-step"),
    Exempt(f"{_SCHEDULER}.publish", "self._committer.publish(committed)", "the call; its rules are in commit.py"),
    Exempt(f"{_SCHEDULER}.commit", "self._committer.commit(batch", "the call; its rules are in commit.py"),
    Exempt(
        f"{_COMMITTER}.publish",
        "self._prefix_cache.publish(request, complete)",
        "see only-committed-blocks-are-published",
    ),
    Exempt(f"{_COMMITTER}.publish", "stored.extend(fresh)", _LIST),
    Exempt(f"{_COMMITTER}.publish", "prefix.extend(request.keys", _LIST),
    Exempt(f"{_REQUEST}.append_outputs", "tokens.extend(token_ids)", _LIST),
    Exempt(f"{_ALLOCATOR}.grow", "self._blocks.take(count)", "see decode-reserves-its-block"),
    Exempt(f"{_ALLOCATOR}.grow", "request.blocks.extend(fresh)", "likewise"),
    Exempt(
        f"{_ALLOCATOR}.start",
        "blocks.extend(fresh)",
        "without it a request has no blocks to write to; when they may be written is ruled above",
    ),
    Exempt(
        f"{_ALLOCATOR}.start",
        "self._slots.take(1)",
        "a slot waits for nothing: see row-release-waits-for-the-last-step",
    ),
    Exempt(
        f"{_PREFIX_CACHE}.publish",
        "for key, block in zip(keys, ids, strict=True) if self._blocks.publish(block, key)",
        "which blocks: see only-committed-blocks-are-published",
    ),
    Exempt(f"{_TIERS}.mark_load_ready", "request.loading = False", "see load-has-its-fences-before-its-first-step"),
    Exempt(
        f"{_PREFILL}.plan",
        "self._tiers.seconds_left(request.id, request.epoch, step_s=step.step_s) > step.lead_s",
        "for speed: a step waits for its loads whoever is in it, see step-waits-for-its-loads-layer-by-layer",
    ),
)
