"""Rules of the engine loop: the order of submission, launch and commit, which results are used, and when clients are
informed.
"""

from __future__ import annotations

from proof.mutations.operators import (
    Append,
    Become,
    Delete,
    DropArgument,
    DropOperand,
    MoveAfter,
    Never,
    Once,
    Rewrite,
    SetArgument,
    Swap,
    Unwrap,
    Value,
)
from proof.mutations.reasons import PINS
from proof.mutations.tables import Change, Exempt, Fault

MUTATIONS = (
    Fault("H12", "the masks of an answer are those of an earlier token").without(
        "committed-tokens-advance-the-grammar", Value("0"), needs={"grammar"}
    ),
    Fault("H12", "an answer goes on behind the end of its grammar").without(
        "complete-answer-ends", Never(), needs={"grammar"}
    ),
    Fault("H32", "a router takes a block that was evicted and stored again for evicted").without(
        "removals-are-not-merged-over-a-store",
        Become(
            "for at, event in enumerate(events):\n"
            "    if isinstance(event, BlockRemoved) and event.medium == medium:\n"
            "        hashes = events.pop(at).block_hashes + hashes\n"
            "        break"
        ),
        needs={"offload"},
    ),
    Fault("H23", "a finished request releases its blocks before their store is submitted").without(
        "store-is-submitted-before-its-blocks-are-released", MoveAfter("ended-requests-end"), needs={"offload"}
    ),
    Fault("H23", "blocks become findable after their request has released them").without(
        "completed-blocks-are-published-before-their-requests-end",
        Value("None"),
        Change("ended-requests-end", Append("parts.scheduler.publish(committed)")),
    ),
    Fault("H16", "finished requests release resources without the fence of the step that still uses them").without(
        "launched-step-is-recorded"
    ),
    Fault("H12", "the host uses results of a step that the device has not run").without(
        "commit-waits-for-its-step", Delete(), Change("mailbox-is-read-after-its-step", Delete())
    ),
    Fault(
        "H9", "a client receives a token of a step whose load has failed, because the offload worker is late"
    ).without("failed-loads-are-looked-up-at-the-commit", needs={"failing_load", "offload"}),
    Fault(
        "H12", "any message ends the wait for a step, and the host uses results that the device has not computed"
    ).without(
        "bell-does-not-end-the-wait-for-a-step",
        Once(),
        Change("mailbox-is-read-after-its-step", Delete()),
        needs={"offload"},
    ),
    Fault("H26", "a request that arrived during the wait for a step waits for a load that was never submitted").without(
        "loads-planned-during-a-wait-are-submitted", Unwrap("submit"), needs={"offload", "meanwhile"}
    ),
    Fault("H9", "a failed step's tokens in the mailbox go to clients, and its blocks become findable").without(
        "results-of-a-failed-step-are-discarded", needs={"failing_step"}
    ),
    Fault("H22", "requests of a failed step keep their blocks, and their clients receive nothing more").without(
        "failed-step-ends-its-requests", needs={"failing_step"}
    ),
    Fault("H9", "a request continues after logits that are NaN").without(
        "non-finite-logits-end-their-request", DropOperand("finite"), needs={"bad_logits"}
    ),
    Fault("H24", "a client receives its request's end while the request's blocks are still in use").without(
        "request-ends-before-its-client-is-notified", Swap()
    ),
    Fault("H24", "a client receives its request's abort while the request's blocks are still in use").without(
        "aborted-request-ends-before-its-client-is-notified", Swap(), needs={"abort"}
    ),
    Fault("H21", "a request continues after its client has left").without("aborted-request-ends", needs={"abort"}),
    Fault("H8", "blocks on the device are found after a reset").without("reset-reaches-the-scheduler", needs={"reset"}),
    Fault("H8", "blocks in the tiers are found after a reset").without(
        "reset-reaches-the-tiers", needs={"offload", "reset"}
    ),
    Fault("H8", "blocks from before a reset are found in a tier after the reset has ended").without(
        "reset-ends-after-the-tiers", Never(), needs={"offload", "reset"}
    ),
    Fault("H26", "a request waits forever for blocks that are in a tier").without(
        "ready-load-joins-a-step", needs={"offload"}
    ),
    Fault("H8", "the weights change during a request, and its KV mixes old and new weights").without(
        "new-weights-wait-for-running-requests",
        DropOperand("num_begun"),
        Change(
            "new-weights-wait-for-the-step-in-flight",
            Value("previous is None or parts.scheduler.num_running <= 1"),
        ),
        needs={"weights"},
    ),
    Fault("H26", "requests that arrive while an update of the weights is pending start with the old weights").without(
        "new-requests-wait-for-new-weights", needs={"weights"}
    ),
    Fault("H8", "running transfers publish blocks of the old weights").without(
        "new-weights-drop-the-keys-of-the-tiers", needs={"offload", "weights"}
    ),
    Fault("H14", "keys of new blocks do not include the new weights").without(
        "new-weights-have-new-keys",
        SetArgument("BlockKeys", "fingerprint", "''"),
        at="new-weights-replace-the-keys",
        needs={"weights"},
    ),
    Fault("H14", "after an update of the weights, engines with different salts find each other's blocks").without(
        "new-weights-keep-the-salt",
        DropArgument("BlockKeys", "salt"),
        at="new-weights-replace-the-keys",
        needs={"weights"},
    ),
    Fault("H14", "requests find KV of the old weights under the old keys").without(
        "new-weights-replace-the-keys", needs={"weights"}
    ),
    Fault("H26", "no request is admitted after an update of the weights").without(
        "new-weights-end-the-pause", needs={"weights"}
    ),
    Fault("H14", "engines of different models find each other's blocks").without(
        "keys-contain-the-served-model", SetArgument("BlockKeys", "fingerprint", "''"), at="keys-of-the-served-model"
    ),
    Fault("H14", "an engine with a salt finds blocks of engines with another salt").without(
        "keys-contain-the-configured-salt", DropArgument("BlockKeys", "salt"), at="keys-of-the-served-model"
    ),
    Fault("H14", "requests with different cache salts find each other's blocks").without(
        "keys-are-computed-with-the-requests-salt", DropArgument("keys_of", "salt"), needs={"cache_salts"}
    ),
    # ------------------------------------------------------------------ close
    Fault("H10", "a step's resources are released while it still runs").without(
        "last-step-is-committed-before-the-end", Delete(2), needs={"close"}
    ),
    Fault("H22", "a closed engine leaves its clients waiting, and their blocks in use").without(
        "requests-end-with-the-engine", needs={"close"}
    ),
    Fault("H10", "another engine may open a directory that this one still writes to").without(
        "streams-end-before-the-disk-is-unlocked", Swap(), needs={"close", "disk"}
    ),
    Fault("H10", "the streams end during a step that is never committed").without(
        "loop-ends-before-the-transfers", needs={"close"}
    ),
    Fault("H22", "a close after a failed step waits forever for other ranks, or never ends its requests").without(
        "error-of-the-last-step-ends-the-engine", needs={"close", "rank_loss"}
    ),
    Fault("H26", "a close raises when the device is lost").without(
        "close-survives-a-lost-device", Become("raise"), needs={"close", "device_loss"}
    ),
)

EQUIVALENT = (
    Fault("H14", "an engine whose tiers are exact finds blocks that came back from 8 bits")
    .without("keys-contain-the-form-in-tiers", Rewrite("tier_layout", "model.layout"), at="keys-of-the-served-model")
    .unreached(
        "workloads store KV as it is",
        "engine/test_eight_bit_tiers.py::test_engines_with_and_without_8_bits_have_different_keys",
    ),
    Fault("H14", "an engine with batch_invariant finds blocks whose bits another one computed differently")
    .without("keys-tell-invariant-kv")
    .unreached(
        "workloads compute exactly",
        "engine/test_batch_invariant.py::test_keys_of_invariant_kv_depend_on_the_mode_and_the_number_of_threads",
    ),
    Fault("H8", "answers of half-replaced weights are served")
    .without("weights-that-were-not-taken-end-the-engine", Never())
    .unreached(
        "no schedule reads a checkpoint", "engine/test_weights.py::test_weights_that_fail_on_the_device_end_the_engine"
    ),
    Fault("H12", "a client gets log-probabilities of a prompt's first tokens twice")
    .without("preempted-request-drops-log-probabilities-of-its-prompt")
    .unreached(
        "workloads ask for no log-probabilities of prompts",
        "test_prompt_logprobs.py::test_a_preempted_prompt_gives_each_log_probability_once",
    ),
    Fault("H17", "the masks of a step are made for the drafts of an earlier one")
    .without("masks-of-drafts-wait-for-their-pass")
    .unreached(
        "no schedule has drafts in answers with a grammar",
        "engine/test_structured.py::test_drafts_obey_the_grammar_and_are_still_accepted",
    ),
    Fault("H12", "a client takes half an answer for a complete one")
    .without("answer-that-left-its-grammar-is-an-error", Never())
    .unreached(
        "no schedule has a grammar that reaches a limit",
        "engine/test_structured.py::test_a_grammar_that_fails_ends_its_answer_with_an_error_alone",
    ),
    Fault("H12", "rejected drafts count as tokens of the answer")
    .without("grammar-returns-from-its-drafts")
    .unreached(
        "schedules have toy grammars, which keep no position while they fill masks",
        "grammar/test_token_grammar.py::test_masks_of_drafts_leave_the_position_as_it_was",
    ),
    Fault("H12", "forced tokens that no step has drawn count as tokens of the answer")
    .without("grammar-returns-from-its-look-ahead")
    .unreached(
        "schedules have toy grammars, which keep no position while they look ahead",
        "grammar/test_token_grammar.py::test_the_only_continuation_is_forced_and_leaves_the_position_as_it_was",
    ),
    Fault("H9", "blocks of a request with wrong KV are found in host memory and on disk")
    .without("invalidated-keys-are-sent-to-the-tiers", needs={"bad_logits"})
    .unreached(
        "the injected fault changes only logits: the KV of earlier chunks is right, so its reuse cannot be detected",
        "engine/test_failures.py::test_blocks_of_a_request_with_non_finite_logits_are_never_reused",
    ),
    Fault("H9", "a client receives a token computed from blocks that a failed load left half filled")
    .without("failed-load-is-known-before-its-step-is-committed", needs={"failing_copy", "offload"})
    .unseen("the fences of the load report the same failure: see load-failure-is-known-with-its-step"),
    Fault("H23", "a step waits for the loads of earlier steps and not for its own")
    .without("loads-are-submitted-before-their-step-is-gated", Swap(), needs={"offload"})
    .unseen(
        "a request joins a step only when its load has all its fences, which takes one turn of the "
        "offload worker, so loads of the current turn never gate the current step"
    ),
    Fault("H10", "a failed step ends a request that was preempted after the launch and would be computed again")
    .without("failed-step-ends-its-own-requests", DropOperand("epoch"), needs={"failing_step", "preempt"})
    .unseen(
        "a request of a failed step may end with an error: an answer is missing, but no answer is wrong",
        "engine/test_failures.py::test_a_request_preempted_while_a_failing_step_ran_is_computed_again",
    ),
    Fault("H8", "the weights are replaced repeatedly")
    .without("new-weights-are-taken-once", needs={"weights"})
    .unseen("the weights are the same each time, so only blocks cached in between are lost"),
    Fault("H10", "streams end during running transfers")
    .without("transfers-end-before-their-streams", needs={"close", "disk"})
    .unseen(
        "blocks that were not stored are misses, and every oracle allows a miss",
        "engine/test_close.py::test_tokens_of_the_last_step_are_delivered_and_its_blocks_stored",
    ),
)

_WHAT_MAY_BE_CONCLUDED = "it polls fences; rules above cover its decisions"
_OTHER_THREAD = "another thread waits here for the engine thread; a schedule has one thread"
_NOTHING = (
    "without it, no output is sent, no block is published and no request ends; rules above cover when that may happen"
)

_MESSAGE = (
    "a message, not a lease; a schedule runs such work at once between two steps; see tests/engine/test_listening.py"
)
_UNBUILT = "it runs only if an engine cannot be built; then no work runs"
_WARM_UP = "it runs before the engine serves; tests/attention/test_engine_in_interpreter.py runs it"

_EVENTS = "KV events tell other programs; the engine does not depend on them (test_kv_events.py)"

_DROP = "it drops blocks whose KV is right; tests/engine/test_prefixes.py covers it"

EXEMPT = (
    Exempt("Prefixes.run", ("_unpin", "_drop"), PINS),
    Exempt("facts_of", ("state", "state"), "sizes of a model that is not loaded"),
    Exempt("Operations.update_weights", ("fingerprint=",), "see new-weights-replace-the-keys"),
    Exempt("Operations._take_weights", ("wait_host",), "without it, a failure is not known; see the rule behind it"),
    Exempt("Prefixes._pin_now", ("add",), PINS),
    Exempt("Prefixes._drop", ("forget", "forget", "drop", "failure"), _DROP),
    Exempt("build_engine", ("callback", "callback"), _UNBUILT),
    Exempt("_build_parts", ("salt=",), "see new-weights-keep-the-salt"),
    Exempt("_open_device", ("callback",), _UNBUILT),
    Exempt("run_warm_up", ("take", "release"), _WARM_UP),
    Exempt("_sample", ("keys_version",), "see request-that-arrives-late-gets-the-new-keys"),
    Exempt("CacheHistory.asked", ("keys_version",), "a record for tests/engine/test_explain.py"),
    Exempt("Engine.call", ("wait",), _OTHER_THREAD),
    Exempt("Engine.close", ("callback", "callback"), "see streams-end-before-the-disk-is-unlocked"),
    Exempt("Engine.close", ("callback",), _EVENTS),
    Exempt("Engine.close", ("callback",), "it deletes captured graphs; see tests/engine/test_short_captures.py"),
    Exempt("OutputStreams.cancel", ("end_sample",), "see tests/client/test_clients.py"),
    Exempt("Operations._set_paused", ("paused",), "the health says it; see tests/engine/test_pause.py"),
    Exempt("Engine._end_loop", ("join",), _OTHER_THREAD),
    Exempt("StepLoop._launch", ("after=", "gates="), "see step-waits-for-the-last-use and layer-waits-for-its-load"),
    Exempt("StepLoop._launch", ("gates",), "see loads-are-submitted-before-their-step-is-gated"),
    Exempt("StepLoop._launch", ("launched",), "a measurement"),
    Exempt(
        "StepLoop._turn",
        ("failure",),
        "a simulated step fails when it runs, not when it is launched; on a GPU this avoids a useless next step",
    ),
    Exempt("StepLoop._turn", ("_commit", "_commit", "_commit"), _NOTHING),
    Exempt("StepLoop._commit", ("commit",), _NOTHING),
    Exempt("StepLoop._commit", ("end_sample",), "see complete-answer-ends"),
    Exempt("StepLoop._idle", ("wait",), "it sleeps while the engine is idle"),
    Exempt("Listener.apply_messages", ("take",), _MESSAGE),
    Exempt("Listener.apply_events", ("poll",), _WHAT_MAY_BE_CONCLUDED),
    Exempt("Listener.wait_for", ("wait_host",), "see commit-waits-for-its-step"),
    Exempt("Listener._listen", ("poll",), _WHAT_MAY_BE_CONCLUDED),
    Exempt("KVEvents.close", ("join",), _EVENTS),
    Exempt("KVEvents._run", ("wait",), _EVENTS),
    Exempt("KVEvents._publish_queued", ("remove",), _EVENTS),
    Exempt("Failures.end_step", ("drop",), "see mailbox-entry-of-a-failed-step-is-released"),
    Exempt("Failures.end_engine", ("take",), _MESSAGE),
    Exempt("OutputStreams.finish", ("end_sample",), "see non-finite-logits-end-their-request"),
    Exempt("StructuredSampler.follow", ("finite", "failure"), "the reason that a client is told"),
    Exempt("OutputStreams.finish", ("_close",), "see finish-releases"),
    Exempt("OutputStreams.fail_all", ("clear",), "the engine has failed, so no more work runs"),
    Exempt("OutputStreams._close", ("release",), "it only counts; for requests and blocks see finish-releases"),
)
