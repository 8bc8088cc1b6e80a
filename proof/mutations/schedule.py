"""Rules of the scheduler: computed tokens, fences of releases, dropped results, and the order of requests."""

from __future__ import annotations

from proof.mutations.operators import (
    Always,
    Become,
    Delete,
    DropArgument,
    DropOperand,
    MoveAfter,
    Never,
    SetArgument,
    SetOperand,
    Unwrap,
    Value,
)
from proof.mutations.tables import Change, Equivalent, Exempt, Mutation

MUTATIONS = (
    # ------------------------------------------------------------------ sliding windows
    Mutation(
        name="window-reaches-back-from-the-first-token",
        hazard="H15",
        change=Value("blocks_before_window((num_blocks + 1) * self.block_tokens, self.window, self.block_tokens)"),
        consequence="a block that a layer with a sliding window reads is loaded without this layer",
        needs=frozenset({"offload", "window"}),
    ),
    Mutation(
        name="hit-is-whole-in-its-window",
        hazard="H15",
        change=Value("None"),
        consequence="a request reuses blocks without layers whose sliding window reaches them",
        needs=frozenset({"offload", "window"}),
    ),
    Mutation(
        name="block-without-all-layers-is-published-as-partial",
        hazard="H15",
        change=SetArgument("publish_all", "partial", "False"),
        consequence="a block without the layers with a sliding window becomes findable like a whole block",
        needs=frozenset({"offload", "window"}),
    ),
    # ------------------------------------------------------------------ computed tokens
    Mutation(
        name="only-committed-blocks-are-published",
        hazard="H12",
        change=Value("min(request.launched_len, len(request.tokens)) // size"),
        consequence="blocks become findable when the step that fills them is launched, and their store waits for the "
        "wrong step",
    ),
    Mutation(
        name="late-result-is-dropped",
        hazard="H10",
        at="late-results",
        change=DropOperand("epoch"),
        consequence="a preempted request that runs again accepts the token of an earlier step",
        needs=frozenset({"failing_load", "offload"}),
    ),
    Mutation(
        name="preemption-begins-an-epoch",
        hazard="H10",
        consequence="steps launched before a preemption cannot be distinguished from those launched after it",
        needs=frozenset({"failing_load", "offload"}),
    ),
    Mutation(
        name="blocks-of-non-finite-logits-are-not-published",
        hazard="H9",
        change=Never(),
        consequence="other requests find wrong KV, of a request with non-finite logits",
        needs=frozenset({"bad_logits"}),
    ),
    Mutation(
        name="failed-load-is-computed",
        hazard="H9",
        change=Become("request.promotions = 0"),
        consequence="a request continues with blocks that a failed load left half filled",
        needs=frozenset({"failing_copy", "offload"}),
    ),
    Mutation(
        name="failed-load-is-not-tried-again",
        hazard="H26",
        consequence="a request loads, fails, and loads the same blocks again, forever",
        needs=frozenset({"failing_copy", "offload"}),
    ),
    Mutation(
        name="only-the-last-chunk-samples",
        hazard="H25",
        change=SetArgument("_row", "samples", "True"),
        consequence="a prompt's first chunks yield tokens, too",
    ),
    # ------------------------------------------------------------------ fences of blocks
    Mutation(
        name="release-waits-for-the-last-step",
        hazard="H3",
        at="blocks-are-released",
        change=DropArgument("release", "after"),
        consequence="a load or a store of the next owner does not wait for the step that still uses the blocks",
    ),
    Mutation(
        name="release-waits-for-the-transfers",
        hazard="H10",
        at="blocks-are-released",
        change=DropArgument("release", "until"),
        consequence="the next owner of a block writes it while a store still reads it, or while an abandoned load "
        "still writes it",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="step-leaves-its-fence",
        hazard="H16",
        consequence="a finished request releases resources without the fence of the step that still uses them",
    ),
    Mutation(
        name="load-waits-for-its-blocks-last-use",
        hazard="H4",
        change=SetArgument("LoadPlan", 4, "()"),
        consequence="a load writes into blocks that the old owner's step or store still uses",
        needs=frozenset({"offload"}),
    ),
    # ------------------------------------------------------------------ leases
    Mutation(
        name="hits-are-leased-before-others-are-evicted",
        hazard="H11",
        change=MoveAfter("admission-takes-its-blocks"),
        consequence="cached blocks that a request found are evicted to make room for the same request",
    ),
    Mutation(
        name="admission-needs-room",
        hazard="H26",
        consequence="a request is admitted partly: its hits are leased, then there is no room for the rest",
        needs=frozenset({"preempt"}),
    ),
    Mutation(
        name="hits-are-not-free-blocks",
        hazard="H26",
        change=DropOperand("is_cached"),
        consequence="cached blocks that the request will share count as free for its other blocks",
        needs=frozenset({"preempt"}),
    ),
    Mutation(
        name="blocks-on-the-device-are-reused",
        hazard="H26",
        change=Value("self._blocks.match(keys[:1])"),
        consequence="a request computes blocks that are on the device",
    ),
    Mutation(
        name="blocks-in-host-memory-are-reused",
        hazard="H26",
        change=Always(),
        consequence="a request computes blocks that are in host memory, although to load them is faster",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="decode-reserves-its-block",
        hazard="H11",
        change=SetOperand("_reserve", "True"),
        consequence="a token's KV is written where the request has no block",
    ),
    Mutation(
        name="drafts-reserve-their-blocks",
        hazard="H11",
        change=Never(),
        consequence="drafts' KV is written where the request has no block",
        needs=frozenset({"speculative"}),
    ),
    Mutation(
        name="bounds-come-down-at-commit",
        hazard="H19",
        change=Delete(),
        consequence="a request with rejected drafts counts as longer and longer, until it must stop",
        needs=frozenset({"speculative"}),
    ),
    Mutation(
        name="drafts-in-flight-lower-the-bound",
        hazard="H19",
        at="decode-row",
        change=SetArgument(
            "RowColumns",
            3,
            "tuple(map(lambda r, d: r.launched_len - 1 - d, requests, [0] * len(self.plain) + self.drafts))",
        ),
        consequence="the host assumes that all drafts of the previous step were accepted",
        needs=frozenset({"speculative"}),
    ),
    Mutation(
        name="tokens-after-the-last-one-are-dropped",
        hazard="H21",
        change=Become("tokens.extend(token_ids[count:])\nreturn len(token_ids), 'stop'"),
        consequence="a request gets accepted tokens beyond its end",
        needs=frozenset({"speculative"}),
    ),
    Mutation(
        name="only-accepted-tokens-are-committed",
        hazard="H12",
        change=Value("before + 1 + drafts"),
        consequence="KV of rejected drafts becomes findable",
        needs=frozenset({"speculative"}),
    ),
    Mutation(
        name="finish-releases",
        hazard="H22",
        consequence="blocks and request slot of a finished request are never released",
    ),
    Mutation(
        name="finish-leaves-the-queue",
        hazard="H21",
        consequence="a request that was aborted while it waited is admitted afterwards, and never ends",
        needs=frozenset({"abort"}),
        also=(Change("finished-request-is-finished", Delete()),),
    ),
    Mutation(
        name="ended-request-completes-no-blocks",
        hazard="H22",
        consequence="other requests wait forever for blocks that an ended request would have completed",
        needs=frozenset({"abort"}),
    ),
    # ------------------------------------------------------------------ loads
    Mutation(
        name="load-has-its-fences-before-its-first-step",
        hazard="H5",
        at="prefill-is-possible",
        change=DropOperand("loading"),
        consequence="a request joins a step before its load has fences that the step could wait for",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="request-with-a-load-is-loading",
        hazard="H5",
        change=Become("request.loading = False"),
        consequence="a request counts as loaded before its load has fences",
        needs=frozenset({"offload"}),
    ),
    # ------------------------------------------------------------------ rows
    Mutation(
        name="slot-begins-with-each-epoch",
        hazard="H16",
        change=Become("self.stepped = False"),
        consequence="a readmitted request samples with the state of the request slot's previous owner",
        needs=frozenset({"preempt"}),
    ),
    Mutation(
        name="slot-begins-once-per-epoch",
        hazard="H19",
        at="decode-row",
        change=SetArgument(
            "RowColumns",
            9,
            "tuple([__import__('sidestream.types').types.RowStart(request.sampling, request.prompt, "
            "tuple(request.tokens[len(request.prompt) :])) for request in requests])",
        ),
        consequence="a decode step uses the host's last token, one step old, instead of the token that the device has "
        "just sampled",
    ),
    # ------------------------------------------------------------------ resets and new weights
    Mutation(
        name="reset-drops-keys-on-the-device",
        hazard="H8",
        consequence="blocks on the device are found after a reset",
        needs=frozenset({"reset"}),
    ),
    Mutation(
        name="reset-makes-running-requests-private",
        hazard="H8",
        consequence="requests that run during a reset do not learn of it, and publish blocks that they computed before",
        needs=frozenset({"reset"}),
    ),
    Mutation(
        name="blocks-from-before-a-reset-stay-private",
        hazard="H8",
        change=DropOperand("shares"),
        consequence="a request that runs during a reset publishes blocks that it computed before",
        needs=frozenset({"reset"}),
    ),
    Mutation(
        name="waiting-requests-get-the-new-keys",
        hazard="H14",
        consequence="a request that waited publishes blocks of the new weights under keys of the old ones",
        needs=frozenset({"weights"}),
    ),
    Mutation(
        name="request-that-arrives-late-gets-the-new-keys",
        hazard="H14",
        consequence="a request that was in transit during an update of the weights keeps keys of the old weights",
        needs=frozenset({"weights"}),
    ),
    Mutation(
        name="new-weights-wait-for-preempted-requests",
        hazard="H8",
        at="request-may-start",
        change=DropOperand("has_begun"),
        consequence="a request that was preempted continues with other weights, in the middle of its output",
        needs=frozenset({"preempt", "weights"}),
        also=(Change("begun-requests", Value("len(self._queues.running)")),),
    ),
    # ------------------------------------------------------------------ order of requests
    Mutation(
        name="preempted-request-is-not-planned",
        hazard="H26",
        consequence="a request that was preempted while a step was planned still gets a row in that step",
        needs=frozenset({"preempt"}),
        also=(Change("prefill-is-possible", DropOperand("state")),),
    ),
    Mutation(
        name="older-requests-are-not-preempted",
        hazard="H26",
        change=Value("[other for other in ranked if other is not request]"),
        consequence="a younger request takes the blocks of an older one, which has a row in this step already",
        needs=frozenset({"preempt"}),
    ),
    Mutation(
        name="waiting-request-is-not-admitted",
        hazard="H10",
        at="request-may-start",
        change=DropOperand("state"),
        consequence="a request runs before its promotion has ended, and the end of the promotion changes its state",
        needs=frozenset({"disk", "restart"}),
        also=(Change("late-promotions", DropOperand("state")),),
    ),
)

_SAVES_TIME = "saves work only: "

EQUIVALENT = (
    Equivalent(
        Mutation(
            name="checkpoint-is-loaded-with-its-whole-prefix",
            hazard="H26",
            change=Never(),
            consequence="a request waits for a part of a prefix at whose end there is no recurrent state",
            needs=frozenset({"disk", "states"}),
        ),
        "without the state, the request computes the prefix: only time is lost",
        noticed_by="schedule/test_tiers.py::test_a_prefix_with_recurrent_state_is_loaded_whole_or_not_at_all",
    ),
    Equivalent(
        Mutation(
            name="prompt-with-log-probabilities-is-computed",
            hazard="H12",
            consequence="a prompt's cached tokens have no log-probabilities",
        ),
        "workloads ask for no log-probabilities of prompts",
        noticed_by="test_prompt_logprobs.py::test_a_prompt_with_log_probabilities_is_computed_and_its_blocks_are_kept",
    ),
    Equivalent(
        Mutation(
            name="partial-block-is-not-stored",
            hazard="H15",
            change=Value("{key: block for key in keys if (block := self._blocks.get(key)) is not None}"),
            consequence="a block without some layers is stored, and later loaded as a whole block",
            needs=frozenset({"growing_tier", "offload", "window"}),
        ),
        "no schedule loads a block whose store was deferred and then drops it from host memory before the store",
        noticed_by="engine/test_windows.py::test_a_block_loaded_without_all_layers_is_never_stored",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="non-finite-logits-invalidate-blocks",
            hazard="H9",
            consequence="blocks of a request with non-finite logits, whose KV is wrong, stay findable on the device",
            needs=frozenset({"bad_logits"}),
        ),
        "the injected fault changes only logits: the KV of earlier chunks is right, so its reuse cannot be detected",
        noticed_by="engine/test_failures.py::test_blocks_of_a_request_with_non_finite_logits_are_never_reused",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="fresh-blocks-wait-for-their-last-use",
            hazard="H4",
            consequence="a prefill does not wait for the last use of its blocks",
            needs=frozenset({"offload"}),
        ),
        "steps run in launch order; blocks with other uses are released only after the host has seen those uses end",
        noticed_by="schedule/test_allocation.py::test_a_step_waits_for_the_last_use_of_the_blocks_that_it_writes",
    ),
    Equivalent(
        Mutation(
            name="blocks-taken-during-a-wait-wait-for-their-last-use",
            hazard="H2",
            change=DropArgument("StepBuilder", "after"),
            consequence="fences of blocks that `plan_loads` takes are lost, and no step waits for them",
            needs=frozenset({"offload", "meanwhile"}),
        ),
        "steps run in launch order; blocks with other uses are released only after the host has seen those uses end",
        noticed_by="schedule/test_scheduler_meanwhile.py::test_the_next_step_waits_for_the_last_use_of_blocks_taken_during_a_wait",
    ),
    Equivalent(
        Mutation(
            name="blocks-taken-before-wait-for-their-last-use",
            hazard="H2",
            change=DropArgument("StepBuilder", "after"),
            consequence="a step ignores the fences of blocks that `plan_loads` took before it",
            needs=frozenset({"offload", "meanwhile"}),
        ),
        "steps run in launch order; blocks with other uses are released only after the host has seen those uses end",
        noticed_by="schedule/test_scheduler_meanwhile.py::test_fences_of_blocks_taken_during_a_wait_are_kept_until_a_step_has_rows",
    ),
    Equivalent(
        Mutation(
            name="order-of-admission-is-kept-during-a-wait",
            hazard="H26",
            consequence="a request is admitted while a step runs, too early to share the blocks of that step",
            needs=frozenset({"offload", "meanwhile"}),
        ),
        "the request is planned with the next step, as with the rule",
        noticed_by="schedule/test_scheduler_meanwhile.py::test_a_request_without_a_load_is_not_overtaken_during_a_wait",
    ),
    Equivalent(
        Mutation(
            name="grown-block-waits-for-its-last-use",
            hazard="H2",
            change=Unwrap("extend"),
            consequence="a decode step does not wait for the last use of its new block",
            needs=frozenset({"offload"}),
        ),
        "steps run in launch order; blocks with other uses are released only after the host has seen those uses end",
        noticed_by="schedule/test_allocation.py::test_a_decode_row_that_grows_waits_for_the_last_use_of_its_new_block",
    ),
    Equivalent(
        Mutation(
            name="load-is-ready-for-its-own-epoch",
            hazard="H5",
            change=DropOperand("epoch"),
            consequence="the message of an abandoned load marks the request's next load as ready too early",
            needs=frozenset({"offload", "preempt"}),
        ),
        "the old load's message and the new load's submission are too many steps apart to coincide in a schedule",
        noticed_by="schedule/test_tiers.py::test_the_end_of_a_load_of_an_earlier_epoch_is_ignored",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="request-promotes-a-bounded-number-of-times",
            hazard="H26",
            change=DropOperand("promotions"),
            consequence="a request repeatedly waits for a disk that does not answer",
            needs=frozenset({"disk", "slow_tier"}),
            also=(Change("disk-is-not-tried-again", Delete()),),
        ),
        "each wait has a deadline, and in a schedule a slow disk answers in the end; the unit test's disk never does",
        noticed_by="schedule/test_tiers.py::test_after_an_incomplete_promotion_a_request_does_not_wait_for_the_disk",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="slot-release-waits-for-the-last-step",
            hazard="H16",
            change=DropArgument("release", "after"),
            consequence="the next owner of a request slot lacks the fence of the step that still uses it",
        ),
        "only the compute stream uses request slots, and it runs steps in launch order",
        noticed_by="schedule/test_allocation.py::test_blocks_and_row_of_an_aborted_request_keep_the_fence_of_its_step",
    ),
    Equivalent(
        Mutation(
            name="finish-happens-once",
            hazard="H21",
            consequence="a request is finished twice",
        ),
        "the engine finishes a request only while it has a session, and a request that does not run holds no resources",
    ),
    Equivalent(
        Mutation(
            name="result-of-a-request-that-does-not-run-is-dropped",
            hazard="H10",
            at="late-results",
            change=DropOperand("state"),
            consequence="a waiting request accepts a token of an earlier step",
        ),
        "a request that stopped running was preempted, so its epoch differs, or it finished, so it is not found",
    ),
    Equivalent(
        Mutation(
            name="promotion-of-an-older-epoch-is-dropped",
            hazard="H10",
            at="late-promotions",
            change=DropOperand("epoch"),
            consequence="the end of a request's earlier promotion counts as the end of its current one",
        ),
        "a request that waits for the disk cannot be preempted, so its epoch stays until the wait ends",
        noticed_by="schedule/test_tiers.py::test_events_of_abandoned_promotions_and_loads_are_ignored",
    ),
    Equivalent(
        Mutation(
            name="failed-load-of-an-older-epoch-is-dropped",
            hazard="H10",
            change=DropOperand("epoch"),
            consequence="a restarted request is preempted because an earlier load failed",
        ),
        "the request recomputes its KV: only time is lost",
        noticed_by="schedule/test_tiers.py::test_events_of_abandoned_promotions_and_loads_are_ignored",
    ),
    Equivalent(
        Mutation(
            name="step-of-an-older-epoch-leaves-no-fence",
            hazard="H16",
            change=DropOperand("epoch"),
            consequence="the fence of an earlier step counts as the last use of a restarted request",
        ),
        "a step is launched and recorded in the same turn that planned it",
        noticed_by="schedule/test_allocation.py::test_launching_a_plan_ignores_requests_preempted_or_aborted_since",
    ),
    Equivalent(
        Mutation(
            name="reset-ends-joining",
            hazard="H8",
            consequence="requests wait for blocks that are not published after a reset",
        ),
        "the waiting requests continue when the request that computes the blocks ends, and compute the blocks "
        "themselves",
        noticed_by="schedule/test_scheduler_reset.py::test_no_request_waits_for_pending_blocks_from_before_a_reset",
    ),
    Equivalent(
        Mutation(
            name="fresh-start-shares-again",
            hazard="H8",
            consequence="a request that ran during a reset and was then restarted does not publish its blocks",
            needs=frozenset({"preempt", "reset"}),
        ),
        _SAVES_TIME + "other requests recompute these blocks",
        noticed_by="schedule/test_scheduler_reset.py::test_a_request_preempted_after_a_reset_publishes_its_blocks_again",
    ),
    Equivalent(
        Mutation(
            name="new-keys-drop-the-blocks-on-the-device",
            hazard="H8",
            consequence="blocks of the old weights stay cached on the device",
            needs=frozenset({"weights"}),
        ),
        "the old keys are never looked up again, so these blocks only take room; other-weights-have-other-keys "
        "removes both rules",
        noticed_by="schedule/test_scheduler_reset.py::test_blocks_of_old_weights_are_freed",
    ),
    Equivalent(
        Mutation(
            name="published-block-is-not-pending",
            hazard="H26",
            consequence="a complete block counts as pending",
        ),
        "a request that wants the block finds it in the pool first",
        noticed_by="schedule/test_prefix_cache.py::test_a_request_does_not_wait_for_a_finished_load",
    ),
    Equivalent(
        Mutation(
            name="request-joins-one-that-computes-the-same",
            hazard="H26",
            consequence="two requests load or compute the same blocks side by side",
        ),
        _SAVES_TIME + "both compute the same bytes, and the second block gets no key",
        noticed_by="schedule/test_admission.py::test_a_step_considers_a_bounded_number_of_waiting_requests",
    ),
    Equivalent(
        Mutation(
            name="request-steps-before-it-is-preempted",
            hazard="H26",
            change=Always(),
            consequence="a request is preempted before it ran a step",
        ),
        "the first request in rank is never preempted, so requests end one after another: only steps are wasted",
        noticed_by="schedule/test_preemption.py::test_only_the_first_request_may_preempt_one_that_has_run_no_step",
    ),
    Equivalent(
        Mutation(
            name="request-steps-before-it-yields-to-priority",
            hazard="H26",
            change=DropOperand("stepped"),
            consequence="a request of lower priority is preempted before it ran a step",
            needs=frozenset({"priority"}),
        ),
        "the request with the best priority is never preempted, so requests end one after another",
        noticed_by="schedule/test_scheduler_priorities.py::test_a_request_that_has_run_no_step_is_not_preempted",
    ),
    Equivalent(
        Mutation(
            name="promoting-requests-are-bounded",
            hazard="H26",
            change=Value("0"),
            consequence="more requests wait for the disk than can run, and fill the host tier",
            needs=frozenset({"disk"}),
        ),
        _SAVES_TIME + "a promotion that finds no room is cut, and its request computes",
        noticed_by="schedule/test_tiers.py::test_at_most_as_many_requests_wait_for_the_disk_as_there_are_rows",
    ),
)

_LIST = "a list"
_STATE = "it sets the state itself; rules above cover the effects"
_PREFIX_KEYS = "it makes keys, and takes no resources"
_BLOCKS = "without it, a request has no blocks to write to; rules above cover when they may be written"
_PASSES_ON = "it forwards the call; the rule is in the called function"
_NEW_KEYS = (
    "see waiting-requests-get-the-new-keys and request-that-arrives-late-gets-the-new-keys, whose calls lead here"
)

_DROP = "it drops blocks whose KV is right; tests/engine/test_prefixes.py covers it"

EXEMPT = (
    Exempt("PrefixCache.drop", ("forget", "forget"), _DROP),
    Exempt("Scheduler.drop", ("drop",), _DROP),
    Exempt("Request.append_outputs", ("extend",), _LIST),
    Exempt("Request.has_begun", ("epoch",), "see new-weights-wait-for-preempted-requests"),
    Exempt("Scheduler.keys_of", ("salt=",), _PASSES_ON),
    Exempt("Scheduler.submit", ("add",), "without it a request is unknown"),
    Exempt("Scheduler.finish", ("remove",), "see finish-leaves-the-queue"),
    Exempt("Scheduler.keys_version", ("keys_version",), _PASSES_ON),
    Exempt(
        "Scheduler.forget_all",
        ("forget_all",),
        "see reset-drops-keys-on-the-device, reset-drops-keys-of-states and reset-makes-running-requests-private",
    ),
    Exempt("Scheduler.rekey", ("rekey",), "see new-weights-replace-the-keys"),
    Exempt("Scheduler.pause_admission", ("paused",), "see new-requests-wait-for-new-weights"),
    Exempt("Scheduler.resume_admission", ("paused",), "see new-weights-end-the-pause"),
    Exempt("Scheduler.commit", ("commit",), _PASSES_ON),
    Exempt("Scheduler.publish", ("publish",), _PASSES_ON),
    Exempt("Allocator.start", ("take", "extend"), _BLOCKS),
    Exempt("Allocator.start", ("take",), "a slot has no fence of its own: see slot-release-waits-for-the-last-step"),
    Exempt("Allocator.grow", ("take", "extend"), _BLOCKS),
    Exempt("Allocator.release", ("last_fence",), "see release-waits-for-the-last-step"),
    Exempt("Committer.commit", ("stepped",), "see request-steps-before-it-is-preempted"),
    Exempt("Committer.publish", ("publish",), "only-committed-blocks-are-published decides which blocks it gets"),
    Exempt("Committer.publish", ("extend", "extend"), _LIST),
    Exempt("Preemption.preempt", ("release",), "see release-waits-for-the-last-step and preemption-begins-an-epoch"),
    Exempt("Preemption.preempt", ("requeue",), "without it a request runs without blocks"),
    Exempt(
        "PrefillPlanner.plan",
        ("epoch",),
        "for speed: a step waits for its loads in any case, see each-layer-waits-for-its-own-copy",
    ),
    Exempt(
        "PrefillPlanner._row",
        ("begun", "begun"),
        "a later prefill chunk may initialise the request slot again; for decode rows see slot-begins-once-per-epoch",
    ),
    Exempt("Admission._lookup", ("avoid_tiers", "avoid_disk"), "a record for tests/engine/test_explain.py"),
    Exempt("PrefixCache.keys_of", ("extend", "salt="), _PREFIX_KEYS),
    Exempt("PrefixCache.drop_stale_keys", ("keys_version", "keys_version", "clear", "keys_version"), _NEW_KEYS),
    Exempt("PrefixCache.rekey", ("keys_version",), _NEW_KEYS),
    Exempt("PrefixCache.wanted_keys", ("extend", "salt="), _PREFIX_KEYS),
    Exempt("PrefixCache.publish", ("extend", "salt="), _PREFIX_KEYS),
    Exempt("PrefixCache.publish", ("salt=",), "KV events name the salt; no key depends on it here"),
    Exempt("PrefixCache.publish", ("publish",), "only-committed-blocks-are-published decides which blocks it gets"),
    Exempt("RequestQueues.start", ("state",), _STATE),
    Exempt("RequestQueues.requeue", ("state",), _STATE),
    Exempt("TierLoads.locate", ("avoid_tiers",), "see failed-load-is-not-tried-again"),
    Exempt("TierLoads.promote", ("state",), _STATE),
    Exempt("TierLoads.end_promotion", ("state",), _STATE),
    Exempt("TierLoads.mark_load_ready", ("loading",), "see load-has-its-fences-before-its-first-step"),
)
