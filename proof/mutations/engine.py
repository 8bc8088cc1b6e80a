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
from proof.mutations.tables import Change, Equivalent, Exempt, Mutation

MUTATIONS = (
    Mutation(
        name="committed-tokens-advance-the-grammar",
        hazard="H12",
        change=Value("0"),
        consequence="the masks of an answer are those of an earlier token",
        needs=frozenset({"grammar"}),
    ),
    Mutation(
        name="complete-answer-ends",
        hazard="H12",
        change=Never(),
        consequence="an answer goes on behind the end of its grammar",
        needs=frozenset({"grammar"}),
    ),
    Mutation(
        name="removals-are-not-merged-over-a-store",
        hazard="H32",
        change=Become(
            "for at, event in enumerate(events):\n"
            "    if isinstance(event, BlockRemoved) and event.medium == medium:\n"
            "        hashes = events.pop(at).block_hashes + hashes\n"
            "        break"
        ),
        consequence="a router takes a block that was evicted and stored again for evicted",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="store-is-submitted-before-its-blocks-are-released",
        hazard="H23",
        change=MoveAfter("ended-requests-end"),
        consequence="a finished request releases its blocks before their store is submitted",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="completed-blocks-are-published-before-their-requests-end",
        hazard="H23",
        change=Value("None"),
        consequence="blocks become findable after their request has released them",
        also=(Change("ended-requests-end", Append("parts.scheduler.publish(committed)")),),
    ),
    Mutation(
        name="launched-step-is-recorded",
        hazard="H16",
        consequence="finished requests release resources without the fence of the step that still uses them",
    ),
    Mutation(
        name="commit-waits-for-its-step",
        hazard="H12",
        consequence="the host uses results of a step that the device has not run",
        also=(Change("mailbox-is-read-after-its-step", Delete()),),
    ),
    Mutation(
        name="failed-loads-are-looked-up-at-the-commit",
        hazard="H9",
        consequence="a client receives a token of a step whose load has failed, because the offload worker is late",
        needs=frozenset({"failing_load", "offload"}),
    ),
    Mutation(
        name="bell-does-not-end-the-wait-for-a-step",
        hazard="H12",
        change=Once(),
        consequence="any message ends the wait for a step, and the host uses results that the device has not computed",
        needs=frozenset({"offload"}),
        also=(Change("mailbox-is-read-after-its-step", Delete()),),
    ),
    Mutation(
        name="loads-planned-during-a-wait-are-submitted",
        hazard="H26",
        change=Unwrap("submit"),
        consequence="a request that arrived during the wait for a step waits for a load that was never submitted",
        needs=frozenset({"offload", "meanwhile"}),
    ),
    Mutation(
        name="results-of-a-failed-step-are-discarded",
        hazard="H9",
        consequence="a failed step's tokens in the mailbox go to clients, and its blocks become findable",
        needs=frozenset({"failing_step"}),
    ),
    Mutation(
        name="failed-step-ends-its-requests",
        hazard="H22",
        consequence="requests of a failed step keep their blocks, and their clients receive nothing more",
        needs=frozenset({"failing_step"}),
    ),
    Mutation(
        name="non-finite-logits-end-their-request",
        hazard="H9",
        change=DropOperand("finite"),
        consequence="a request continues after logits that are NaN",
        needs=frozenset({"bad_logits"}),
    ),
    Mutation(
        name="request-ends-before-its-client-is-notified",
        hazard="H24",
        change=Swap(),
        consequence="a client receives its request's end while the request's blocks are still in use",
    ),
    Mutation(
        name="aborted-request-ends-before-its-client-is-notified",
        hazard="H24",
        change=Swap(),
        consequence="a client receives its request's abort while the request's blocks are still in use",
        needs=frozenset({"abort"}),
    ),
    Mutation(
        name="aborted-request-ends",
        hazard="H21",
        consequence="a request continues after its client has left",
        needs=frozenset({"abort"}),
    ),
    Mutation(
        name="reset-reaches-the-scheduler",
        hazard="H8",
        consequence="blocks on the device are found after a reset",
        needs=frozenset({"reset"}),
    ),
    Mutation(
        name="reset-reaches-the-tiers",
        hazard="H8",
        consequence="blocks in the tiers are found after a reset",
        needs=frozenset({"offload", "reset"}),
    ),
    Mutation(
        name="reset-ends-after-the-tiers",
        hazard="H8",
        change=Never(),
        consequence="blocks from before a reset are found in a tier after the reset has ended",
        needs=frozenset({"offload", "reset"}),
    ),
    Mutation(
        name="ready-load-joins-a-step",
        hazard="H26",
        consequence="a request waits forever for blocks that are in a tier",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="new-weights-wait-for-running-requests",
        hazard="H8",
        change=DropOperand("num_begun"),
        consequence="the weights change during a request, and its KV mixes old and new weights",
        needs=frozenset({"weights"}),
        also=(
            Change(
                "new-weights-wait-for-the-step-in-flight",
                Value("previous is None or parts.scheduler.num_running <= 1"),
            ),
        ),
    ),
    Mutation(
        name="new-requests-wait-for-new-weights",
        hazard="H26",
        consequence="requests that arrive while an update of the weights is pending start with the old weights",
        needs=frozenset({"weights"}),
    ),
    Mutation(
        name="new-weights-drop-the-keys-of-the-tiers",
        hazard="H8",
        consequence="running transfers publish blocks of the old weights",
        needs=frozenset({"offload", "weights"}),
    ),
    Mutation(
        name="new-weights-have-new-keys",
        hazard="H14",
        at="new-weights-replace-the-keys",
        change=SetArgument("BlockKeys", "fingerprint", "''"),
        consequence="keys of new blocks do not include the new weights",
        needs=frozenset({"weights"}),
    ),
    Mutation(
        name="new-weights-keep-the-salt",
        hazard="H14",
        at="new-weights-replace-the-keys",
        change=DropArgument("BlockKeys", "salt"),
        consequence="after an update of the weights, engines with different salts find each other's blocks",
        needs=frozenset({"weights"}),
    ),
    Mutation(
        name="new-weights-replace-the-keys",
        hazard="H14",
        consequence="requests find KV of the old weights under the old keys",
        needs=frozenset({"weights"}),
    ),
    Mutation(
        name="new-weights-end-the-pause",
        hazard="H26",
        consequence="no request is admitted after an update of the weights",
        needs=frozenset({"weights"}),
    ),
    Mutation(
        name="keys-contain-the-served-model",
        hazard="H14",
        at="keys-of-the-served-model",
        change=SetArgument("BlockKeys", "fingerprint", "''"),
        consequence="engines of different models find each other's blocks",
    ),
    Mutation(
        name="keys-contain-the-configured-salt",
        hazard="H14",
        at="keys-of-the-served-model",
        change=DropArgument("BlockKeys", "salt"),
        consequence="an engine with a salt finds blocks of engines with another salt",
    ),
    Mutation(
        name="keys-are-computed-with-the-requests-salt",
        hazard="H14",
        change=DropArgument("keys_of", "salt"),
        consequence="requests with different cache salts find each other's blocks",
        needs=frozenset({"cache_salts"}),
    ),
    # ------------------------------------------------------------------ close
    Mutation(
        name="last-step-is-committed-before-the-end",
        hazard="H10",
        change=Delete(2),
        consequence="a step's resources are released while it still runs",
        needs=frozenset({"close"}),
    ),
    Mutation(
        name="requests-end-with-the-engine",
        hazard="H22",
        consequence="a closed engine leaves its clients waiting, and their blocks in use",
        needs=frozenset({"close"}),
    ),
    Mutation(
        name="streams-end-before-the-disk-is-unlocked",
        hazard="H10",
        change=Swap(),
        consequence="another engine may open a directory that this one still writes to",
        needs=frozenset({"close", "disk"}),
    ),
    Mutation(
        name="loop-ends-before-the-transfers",
        hazard="H10",
        consequence="the streams end during a step that is never committed",
        needs=frozenset({"close"}),
    ),
    Mutation(
        name="error-of-the-last-step-ends-the-engine",
        hazard="H22",
        consequence="a close after a failed step waits forever for other ranks, or never ends its requests",
        needs=frozenset({"close", "rank_loss"}),
    ),
    Mutation(
        name="close-survives-a-lost-device",
        hazard="H26",
        change=Become("raise"),
        consequence="a close raises when the device is lost",
        needs=frozenset({"close", "device_loss"}),
    ),
)

EQUIVALENT = (
    Equivalent(
        Mutation(
            name="keys-contain-the-form-in-tiers",
            hazard="H14",
            at="keys-of-the-served-model",
            change=Rewrite("tier_layout", "model.layout"),
            consequence="an engine whose tiers are exact finds blocks that came back from 8 bits",
        ),
        "workloads store KV as it is",
        noticed_by="engine/test_eight_bit_tiers.py::test_engines_with_and_without_8_bits_have_different_keys",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="keys-tell-invariant-kv",
            hazard="H14",
            consequence="an engine with batch_invariant finds blocks whose bits another one computed differently",
        ),
        "workloads compute exactly",
        noticed_by="engine/test_batch_invariant.py::"
        "test_keys_of_invariant_kv_depend_on_the_mode_and_the_number_of_threads",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="weights-that-were-not-taken-end-the-engine",
            hazard="H8",
            change=Never(),
            consequence="answers of half-replaced weights are served",
        ),
        "no schedule reads a checkpoint",
        noticed_by="engine/test_weights.py::test_weights_that_fail_on_the_device_end_the_engine",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="preempted-request-drops-log-probabilities-of-its-prompt",
            hazard="H12",
            consequence="a client gets log-probabilities of a prompt's first tokens twice",
        ),
        "workloads ask for no log-probabilities of prompts",
        noticed_by="test_prompt_logprobs.py::test_a_preempted_prompt_gives_each_log_probability_once",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="masks-of-drafts-wait-for-their-pass",
            hazard="H17",
            consequence="the masks of a step are made for the drafts of an earlier one",
        ),
        "no schedule has drafts in answers with a grammar",
        noticed_by="engine/test_structured.py::test_drafts_obey_the_grammar_and_are_still_accepted",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="answer-that-left-its-grammar-is-an-error",
            hazard="H12",
            change=Never(),
            consequence="a client takes half an answer for a complete one",
        ),
        "no schedule has a grammar that reaches a limit",
        noticed_by="engine/test_structured.py::test_a_grammar_that_fails_ends_its_answer_with_an_error_alone",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="grammar-returns-from-its-drafts",
            hazard="H12",
            consequence="rejected drafts count as tokens of the answer",
        ),
        "schedules have toy grammars, which keep no position while they fill masks",
        noticed_by="grammar/test_token_grammar.py::test_masks_of_drafts_leave_the_position_as_it_was",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="grammar-returns-from-its-look-ahead",
            hazard="H12",
            consequence="forced tokens that no step has drawn count as tokens of the answer",
        ),
        "schedules have toy grammars, which keep no position while they look ahead",
        noticed_by="grammar/test_token_grammar.py::test_the_only_continuation_is_forced_and_leaves_the_position_as_it_was",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="invalidated-keys-are-sent-to-the-tiers",
            hazard="H9",
            consequence="blocks of a request with wrong KV are found in host memory and on disk",
            needs=frozenset({"bad_logits"}),
        ),
        "the injected fault changes only logits: the KV of earlier chunks is right, so its reuse cannot be detected",
        noticed_by="engine/test_failures.py::test_blocks_of_a_request_with_non_finite_logits_are_never_reused",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="failed-load-is-known-before-its-step-is-committed",
            hazard="H9",
            consequence="a client receives a token computed from blocks that a failed load left half filled",
            needs=frozenset({"failing_copy", "offload"}),
        ),
        "the fences of the load report the same failure: see load-failure-is-known-with-its-step",
    ),
    Equivalent(
        Mutation(
            name="loads-are-submitted-before-their-step-is-gated",
            hazard="H23",
            change=Swap(),
            consequence="a step waits for the loads of earlier steps and not for its own",
            needs=frozenset({"offload"}),
        ),
        "a request joins a step only when its load has all its fences, which takes one turn of the offload worker, so "
        "loads of the current turn never gate the current step",
    ),
    Equivalent(
        Mutation(
            name="failed-step-ends-its-own-requests",
            hazard="H10",
            change=DropOperand("epoch"),
            consequence="a failed step ends a request that was preempted after the launch and would be computed again",
            needs=frozenset({"failing_step", "preempt"}),
        ),
        "a request of a failed step may end with an error: an answer is missing, but no answer is wrong",
        noticed_by="engine/test_failures.py::test_a_request_preempted_while_a_failing_step_ran_is_computed_again",
    ),
    Equivalent(
        Mutation(
            name="new-weights-are-taken-once",
            hazard="H8",
            consequence="the weights are replaced repeatedly",
            needs=frozenset({"weights"}),
        ),
        "the weights are the same each time, so only blocks cached in between are lost",
    ),
    Equivalent(
        Mutation(
            name="transfers-end-before-their-streams",
            hazard="H10",
            consequence="streams end during running transfers",
            needs=frozenset({"close", "disk"}),
        ),
        "blocks that were not stored are misses, and every oracle allows a miss",
        noticed_by="engine/test_close.py::test_tokens_of_the_last_step_are_delivered_and_its_blocks_stored",
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
    Exempt("OutputStreams.finish", ("_close",), "see finish-releases"),
    Exempt("OutputStreams.fail_all", ("clear",), "the engine has failed, so no more work runs"),
    Exempt("OutputStreams._close", ("release",), "it only counts; for requests and blocks see finish-releases"),
)
