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
from proof.mutations.tables import Change, Exempt, Fault

MUTATIONS = (
    # ------------------------------------------------------------------ sliding windows
    Fault("H15", "a block that a layer with a sliding window reads is loaded without this layer").without(
        "window-reaches-back-from-the-first-token",
        Value("blocks_before_window((num_blocks + 1) * self.block_tokens, self.window, self.block_tokens)"),
        needs={"offload", "window"},
    ),
    Fault("H15", "a request reuses blocks without layers whose sliding window reaches them").without(
        "hit-is-whole-in-its-window", Value("None"), needs={"offload", "window"}
    ),
    Fault("H15", "a block without the layers with a sliding window becomes findable like a whole block").without(
        "block-without-all-layers-is-published-as-partial",
        SetArgument("publish_all", "partial", "False"),
        needs={"offload", "window"},
    ),
    # ------------------------------------------------------------------ computed tokens
    Fault(
        "H12",
        "blocks become findable when the step that fills them is launched, and their store waits for the wrong step",
    ).without("only-committed-blocks-are-published", Value("min(request.launched_len, len(request.tokens)) // size")),
    Fault("H10", "a preempted request that runs again accepts the token of an earlier step").without(
        "late-result-is-dropped", DropOperand("epoch"), at="late-results", needs={"failing_load", "offload"}
    ),
    Fault("H10", "steps launched before a preemption cannot be distinguished from those launched after it").without(
        "preemption-begins-an-epoch", needs={"failing_load", "offload"}
    ),
    Fault("H9", "other requests find wrong KV, of a request with non-finite logits").without(
        "blocks-of-non-finite-logits-are-not-published", Never(), needs={"bad_logits"}
    ),
    Fault("H9", "a request continues with blocks that a failed load left half filled").without(
        "failed-load-is-computed", Become("request.promotions = 0"), needs={"failing_copy", "offload"}
    ),
    Fault("H26", "a request loads, fails, and loads the same blocks again, forever").without(
        "failed-load-is-not-tried-again", needs={"failing_copy", "offload"}
    ),
    Fault("H25", "a prompt's first chunks yield tokens, too").without(
        "only-the-last-chunk-samples", SetArgument("_row", "samples", "True")
    ),
    # ------------------------------------------------------------------ fences of blocks
    Fault("H3", "a load or a store of the next owner does not wait for the step that still uses the blocks").without(
        "release-waits-for-the-last-step", DropArgument("release", "after"), at="blocks-are-released"
    ),
    Fault(
        "H10",
        "the next owner of a block writes it while a store still reads it, or while an abandoned load still writes it",
    ).without(
        "release-waits-for-the-transfers", DropArgument("release", "until"), at="blocks-are-released", needs={"offload"}
    ),
    Fault("H16", "a finished request releases resources without the fence of the step that still uses them").without(
        "step-leaves-its-fence"
    ),
    Fault("H4", "a load writes into blocks that the old owner's step or store still uses").without(
        "load-waits-for-its-blocks-last-use", SetArgument("LoadPlan", 4, "()"), needs={"offload"}
    ),
    # ------------------------------------------------------------------ leases
    Fault("H11", "cached blocks that a request found are evicted to make room for the same request").without(
        "hits-are-leased-before-others-are-evicted", MoveAfter("admission-takes-its-blocks")
    ),
    Fault("H26", "a request is admitted partly: its hits are leased, then there is no room for the rest").without(
        "admission-needs-room", needs={"preempt"}
    ),
    Fault("H26", "cached blocks that the request will share count as free for its other blocks").without(
        "hits-are-not-free-blocks", DropOperand("is_cached"), needs={"preempt"}
    ),
    Fault("H26", "a request computes blocks that are on the device").without(
        "blocks-on-the-device-are-reused", Value("self._blocks.match(keys[:1])")
    ),
    Fault("H26", "a request computes blocks that are in host memory, although to load them is faster").without(
        "blocks-in-host-memory-are-reused", Always(), needs={"offload"}
    ),
    Fault("H11", "a token's KV is written where the request has no block").without(
        "decode-reserves-its-block", SetOperand("_reserve", "True")
    ),
    Fault("H11", "a token's KV is written behind the request's last block").without(
        "decode-gets-its-block", Become("busy = []")
    ),
    Fault("H11", "drafts' KV is written where the request has no block").without(
        "drafts-reserve-their-blocks", Never(), needs={"speculative"}
    ),
    Fault("H19", "a request with rejected drafts counts as longer and longer, until it must stop").without(
        "bounds-come-down-at-commit", Delete(), needs={"speculative"}
    ),
    Fault("H19", "the host assumes that all drafts of the previous step were accepted").without(
        "drafts-in-flight-lower-the-bound",
        SetArgument(
            "RowColumns",
            3,
            "tuple((rows.stops - 1 - np.array([0] * (count - len(self.drafts)) + self.drafts)).tolist())",
        ),
        at="decode-row",
        needs={"speculative"},
    ),
    Fault("H21", "a request gets accepted tokens beyond its end").without(
        "tokens-after-the-last-one-are-dropped",
        Become("tokens.extend(token_ids[count:])\nreturn len(token_ids), 'stop'"),
        needs={"speculative"},
    ),
    Fault("H12", "KV of rejected drafts becomes findable").without(
        "only-accepted-tokens-are-committed", Value("before + 1 + drafts"), needs={"speculative"}
    ),
    Fault("H22", "blocks and request slot of a finished request are never released").without("finish-releases"),
    Fault("H21", "a request that was aborted while it waited is admitted afterwards, and never ends").without(
        "finish-leaves-the-queue", Delete(), Change("finished-request-is-finished", Delete()), needs={"abort"}
    ),
    Fault("H22", "other requests wait forever for blocks that an ended request would have completed").without(
        "ended-request-completes-no-blocks", needs={"abort"}
    ),
    # ------------------------------------------------------------------ loads
    Fault("H5", "a request joins a step before its load has fences that the step could wait for").without(
        "load-has-its-fences-before-its-first-step", DropOperand("loading"), at="prefill-is-possible", needs={"offload"}
    ),
    Fault("H5", "a request counts as loaded before its load has fences").without(
        "request-with-a-load-is-loading", Become("request.loading = False"), needs={"offload"}
    ),
    # ------------------------------------------------------------------ rows
    Fault("H16", "a readmitted request samples with the state of the request slot's previous owner").without(
        "slot-begins-with-each-epoch", Become("self.stepped = False"), needs={"preempt"}
    ),
    Fault(
        "H19",
        "a decode step uses the host's last token, one step old, instead of the token that the device has just sampled",
    ).without(
        "slot-begins-once-per-epoch",
        SetArgument(
            "RowColumns",
            9,
            "tuple([__import__('sidestream.types').types.RowStart(request.sampling, request.prompt, "
            "tuple(request.tokens[len(request.prompt) :])) for request in rows.requests])",
        ),
        at="decode-row",
    ),
    # ------------------------------------------------------------------ resets and new weights
    Fault("H8", "blocks on the device are found after a reset").without(
        "reset-drops-keys-on-the-device", needs={"reset"}
    ),
    Fault(
        "H8", "requests that run during a reset do not learn of it, and publish blocks that they computed before"
    ).without("reset-makes-running-requests-private", needs={"reset"}),
    Fault("H8", "a request that runs during a reset publishes blocks that it computed before").without(
        "blocks-from-before-a-reset-stay-private", DropOperand("shares"), needs={"reset"}
    ),
    Fault("H14", "a request that waited publishes blocks of the new weights under keys of the old ones").without(
        "waiting-requests-get-the-new-keys", needs={"weights"}
    ),
    Fault("H14", "a request that was in transit during an update of the weights keeps keys of the old weights").without(
        "request-that-arrives-late-gets-the-new-keys", needs={"weights"}
    ),
    Fault("H8", "a request that was preempted continues with other weights, in the middle of its output").without(
        "new-weights-wait-for-preempted-requests",
        DropOperand("has_begun"),
        Change("begun-requests", Value("len(self._queues.running)")),
        at="request-may-start",
        needs={"preempt", "weights"},
    ),
    # ------------------------------------------------------------------ order of requests
    Fault("H26", "a request that was preempted while a step was planned still gets a row in that step").without(
        "preempted-request-is-not-planned",
        Delete(),
        Change("prefill-is-possible", DropOperand("state")),
        needs={"preempt"},
    ),
    Fault("H26", "a request that was preempted for a decode row has a row in the same step").without(
        "request-preempted-for-another-row-is-not-planned", DropOperand("RUNNING"), needs={"preempt"}
    ),
    Fault("H26", "a younger request takes the blocks of an older one, which has a row in this step already").without(
        "older-requests-are-not-preempted",
        Value("[other for other in ranked if other is not request]"),
        needs={"preempt"},
    ),
    Fault(
        "H10", "a request runs before its promotion has ended, and the end of the promotion changes its state"
    ).without(
        "waiting-request-is-not-admitted",
        DropOperand("state"),
        Change("late-promotions", DropOperand("state")),
        at="request-may-start",
        needs={"disk", "restart"},
    ),
)

_SAVES_TIME = "saves work only: "

EQUIVALENT = (
    Fault("H26", "a request waits for a part of a prefix at whose end there is no recurrent state")
    .without("checkpoint-is-loaded-with-its-whole-prefix", Never(), needs={"disk", "states"})
    .unseen(
        "without the state, the request computes the prefix: only time is lost",
        "schedule/test_tiers.py::test_a_prefix_with_recurrent_state_is_loaded_whole_or_not_at_all",
    ),
    Fault("H12", "a prompt's cached tokens have no log-probabilities")
    .without("prompt-with-log-probabilities-is-computed")
    .unseen(
        "workloads ask for no log-probabilities of prompts",
        "test_prompt_logprobs.py::test_a_prompt_with_log_probabilities_is_computed_and_its_blocks_are_kept",
    ),
    Fault("H15", "a block without some layers is stored, and later loaded as a whole block")
    .without(
        "partial-block-is-not-stored",
        Value("{key: block for key in keys if (block := self._blocks.get(key)) is not None}"),
        needs={"growing_tier", "offload", "window"},
    )
    .unreached(
        "no schedule loads a block whose store was deferred and then drops it from host memory before the store",
        "engine/test_windows.py::test_a_block_loaded_without_all_layers_is_never_stored",
    ),
    Fault("H9", "blocks of a request with non-finite logits, whose KV is wrong, stay findable on the device")
    .without("non-finite-logits-invalidate-blocks", needs={"bad_logits"})
    .unreached(
        "the injected fault changes only logits: the KV of earlier chunks is right, so its reuse cannot be detected",
        "engine/test_failures.py::test_blocks_of_a_request_with_non_finite_logits_are_never_reused",
    ),
    Fault("H4", "a prefill does not wait for the last use of its blocks")
    .without("fresh-blocks-wait-for-their-last-use", needs={"offload"})
    .unseen(
        "steps run in launch order; blocks with other uses are released only after the host has seen those uses end",
        "schedule/test_allocation.py::test_a_step_waits_for_the_last_use_of_the_blocks_that_it_writes",
    ),
    Fault("H2", "fences of blocks that `plan_loads` takes are lost, and no step waits for them")
    .without(
        "blocks-taken-during-a-wait-wait-for-their-last-use",
        DropArgument("StepBuilder", "after"),
        needs={"offload", "meanwhile"},
    )
    .unseen(
        "steps run in launch order; blocks with other uses are released only after the host has seen those uses end",
        "schedule/test_scheduler_meanwhile.py::test_the_next_step_waits_for_the_last_use_of_blocks_taken_during_a_wait",
    ),
    Fault("H2", "a step ignores the fences of blocks that `plan_loads` took before it")
    .without(
        "blocks-taken-before-wait-for-their-last-use",
        DropArgument("StepBuilder", "after"),
        needs={"offload", "meanwhile"},
    )
    .unseen(
        "steps run in launch order; blocks with other uses are released only after the host has seen those uses end",
        ""
        "schedule/test_scheduler_meanwhile.py::test_fences_of_blocks_taken_during_a_wait_are_kept_until_a_step_has_rows",
    ),
    Fault("H26", "a request is admitted while a step runs, too early to share the blocks of that step")
    .without("order-of-admission-is-kept-during-a-wait", needs={"offload", "meanwhile"})
    .unseen(
        "the request is planned with the next step, as with the rule",
        "schedule/test_scheduler_meanwhile.py::test_a_request_without_a_load_is_not_overtaken_during_a_wait",
    ),
    Fault("H2", "a decode step does not wait for the last use of its new block")
    .without("grown-block-waits-for-its-last-use", Unwrap("extend"), needs={"offload"})
    .unseen(
        "steps run in launch order; blocks with other uses are released only after the host has seen those uses end",
        "schedule/test_allocation.py::test_a_decode_row_that_grows_waits_for_the_last_use_of_its_new_block",
    ),
    Fault("H2", "a decode step does not wait for the last uses of the new blocks of its requests")
    .without("grown-blocks-wait-for-their-last-use", Unwrap("extend"), needs={"offload"})
    .unseen(
        "steps run in launch order; blocks with other uses are released only after the host has seen those uses end",
        "schedule/test_allocation.py::test_decode_rows_that_grow_wait_for_the_last_uses_of_their_new_blocks",
    ),
    Fault("H5", "the message of an abandoned load marks the request's next load as ready too early")
    .without("load-is-ready-for-its-own-epoch", DropOperand("epoch"), needs={"offload", "preempt"})
    .unreached(
        "the old load's message and the new load's submission are too many steps apart to coincide in a schedule",
        "schedule/test_tiers.py::test_the_end_of_a_load_of_an_earlier_epoch_is_ignored",
    ),
    Fault("H26", "a request repeatedly waits for a disk that does not answer")
    .without(
        "request-promotes-a-bounded-number-of-times",
        DropOperand("promotions"),
        Change("disk-is-not-tried-again", Delete()),
        needs={"disk", "slow_tier"},
    )
    .unreached(
        "each wait has a deadline, and in a schedule a slow disk answers in the end; the unit test's disk never does",
        "schedule/test_tiers.py::test_after_an_incomplete_promotion_a_request_does_not_wait_for_the_disk",
    ),
    Fault("H16", "the next owner of a request slot lacks the fence of the step that still uses it")
    .without("slot-release-waits-for-the-last-step", DropArgument("release", "after"))
    .unseen(
        "only the compute stream uses request slots, and it runs steps in launch order",
        "schedule/test_allocation.py::test_blocks_and_row_of_an_aborted_request_keep_the_fence_of_its_step",
    ),
    Fault("H21", "a request is finished twice")
    .without("finish-happens-once")
    .unseen(
        "the engine finishes a request only while it has a session, and a request that does not run holds no resources"
    ),
    Fault("H10", "the end of a request's earlier promotion counts as the end of its current one")
    .without("promotion-of-an-older-epoch-is-dropped", DropOperand("epoch"), at="late-promotions")
    .unseen(
        "a request that waits for the disk cannot be preempted, so its epoch stays until the wait ends",
        "schedule/test_tiers.py::test_events_of_abandoned_promotions_and_loads_are_ignored",
    ),
    Fault("H10", "a restarted request is preempted because an earlier load failed")
    .without("failed-load-of-an-older-epoch-is-dropped", DropOperand("epoch"))
    .unseen(
        "the request recomputes its KV: only time is lost",
        "schedule/test_tiers.py::test_events_of_abandoned_promotions_and_loads_are_ignored",
    ),
    Fault("H16", "the fence of an earlier step counts as the last use of a restarted request")
    .without("step-of-an-older-epoch-leaves-no-fence", DropOperand("epoch"))
    .unseen(
        "a step is launched and recorded in the same turn that planned it",
        "schedule/test_allocation.py::test_launching_a_plan_ignores_requests_preempted_or_aborted_since",
    ),
    Fault("H8", "requests wait for blocks that are not published after a reset")
    .without("reset-ends-joining")
    .unseen(
        "the waiting requests continue when the request that computes the blocks ends, and compute "
        "the blocks themselves",
        "schedule/test_scheduler_reset.py::test_no_request_waits_for_pending_blocks_from_before_a_reset",
    ),
    Fault("H8", "a request that ran during a reset and was then restarted does not publish its blocks")
    .without("fresh-start-shares-again", needs={"preempt", "reset"})
    .unseen(
        _SAVES_TIME + "other requests recompute these blocks",
        "schedule/test_scheduler_reset.py::test_a_request_preempted_after_a_reset_publishes_its_blocks_again",
    ),
    Fault("H8", "blocks of the old weights stay cached on the device")
    .without("new-keys-drop-the-blocks-on-the-device", needs={"weights"})
    .unseen(
        "the old keys are never looked up again, so these blocks only take room; "
        "other-weights-have-other-keys removes both rules",
        "schedule/test_scheduler_reset.py::test_blocks_of_old_weights_are_freed",
    ),
    Fault("H26", "a complete block counts as pending")
    .without("published-block-is-not-pending")
    .unseen(
        "a request that wants the block finds it in the pool first",
        "schedule/test_prefix_cache.py::test_a_request_does_not_wait_for_a_finished_load",
    ),
    Fault("H26", "two requests load or compute the same blocks side by side")
    .without("request-joins-one-that-computes-the-same")
    .unseen(
        _SAVES_TIME + "both compute the same bytes, and the second block gets no key",
        "schedule/test_admission.py::test_a_step_considers_a_bounded_number_of_waiting_requests",
    ),
    Fault("H26", "a request is preempted before it ran a step")
    .without("request-steps-before-it-is-preempted", Always())
    .unseen(
        "the first request in rank is never preempted, so requests end one after another: only steps are wasted",
        "schedule/test_preemption.py::test_only_the_first_request_may_preempt_one_that_has_run_no_step",
    ),
    Fault("H26", "a request of lower priority is preempted before it ran a step")
    .without("request-steps-before-it-yields-to-priority", DropOperand("stepped"), needs={"priority"})
    .unseen(
        "the request with the best priority is never preempted, so requests end one after another",
        "schedule/test_scheduler_priorities.py::test_a_request_that_has_run_no_step_is_not_preempted",
    ),
    Fault("H26", "more requests wait for the disk than can run, and fill the host tier")
    .without("promoting-requests-are-bounded", Value("0"), needs={"disk"})
    .unseen(
        _SAVES_TIME + "a promotion that finds no room is cut, and its request computes",
        "schedule/test_tiers.py::test_at_most_as_many_requests_wait_for_the_disk_as_there_are_rows",
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
    Exempt("Allocator.grow_by_one", ("take", "extend"), _BLOCKS),
    Exempt("Allocator.release", ("last_fence",), "see release-waits-for-the-last-step"),
    Exempt("DecodeColumns.of", ("epoch",), "see late-result-is-dropped"),
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
