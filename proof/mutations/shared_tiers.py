"""Rules of tiers in stores that several engines share. The store of a schedule of the torture test is in memory."""

from __future__ import annotations

from proof.mutations.operators import Always, DropOperand, Never, Rewrite, SetArgument, Value
from proof.mutations.reasons import GIVES_UP
from proof.mutations.tables import Exempt, Fault

MUTATIONS = (
    Fault("H9", "a damaged value is read as a block").without(
        "every-bit-of-a-value-is-verified", Never(), needs={"store"}
    ),
    Fault("H26", "a request asks again and again for blocks that no process has stored").without(
        "request-asks-once", DropOperand("has_asked"), needs={"store"}
    ),
    Fault("H26", "a request that has asked waits forever").without("ended-find-is-reported", needs={"store"}),
)

_UNSEEN = "the store of a schedule has no server and one rank, and a block that is not found is computed again"
_ENGINE = "engine/test_shared_tiers.py::test_"
_STORE = "offload/test_shared_stores.py::test_"
_SCHEDULE = "schedule/test_tiers.py::test_"

EQUIVALENT = (
    # ------------------------------------------------------------------ values
    Fault("H9", "a value that another key, model or layout has is read as a block of this key")
    .without("value-is-of-its-key", Never())
    .unreached(_UNSEEN, _STORE + "lying_store_gives_no_wrong_block"),
    Fault("H9", "a value whose header is right and whose block is damaged is read as a block")
    .without("checksum-of-a-value-covers-its-block")
    .unreached(_UNSEEN, _STORE + "lying_store_gives_no_wrong_block"),
    Fault("H9", "blocks that were written to the store are never found")
    .without("value-counts-as-written-after-its-write")
    .unreached(_UNSEEN, _ENGINE + "only_missing_blocks_are_asked_for"),
    Fault("H9", "a block that some ranks lack counts as found, and each of its reads fails")
    .without("value-is-found-on-every-rank", Rewrite("None not in each", "each"))
    .unreached(_UNSEEN, _STORE + "ranks_find_a_block_that_all_of_them_hold"),
    Fault("H9", "a rank of SGLang reads another rank's share of a block")
    .without("rank-has-its-part-of-a-store")
    .unreached(_UNSEEN, _STORE + "ranks_of_other_engines_meet_in_no_store"),
    Fault("H26", "each block of a prompt waits for a timeout of its own while the store stalls")
    .without("failed-store-is-left-alone", Never())
    .unreached(_UNSEEN, _ENGINE + "a_store_is_left_alone_after_a_failure"),
    Fault("H10", "a call that ended late writes into the buffer of another call")
    .without("late-call-keeps-its-buffer", Rewrite(".add_done_callback(lambda _: ", ".done(), ("))
    .unreached(_UNSEEN, _STORE + "a_late_call_of_mooncake_keeps_its_buffer_until_it_ends"),
    Fault("H10", "the client is closed during a call that has timed out, and crashes")
    .without("calls-end-before-the-client", Rewrite("cancel_futures=True", "wait=False"))
    .unreached(_UNSEEN, _STORE + "a_late_call_of_mooncake_keeps_its_buffer_until_it_ends"),
    Fault("H26", "a replica is asked to load blocks that are not stored yet, and computes them")
    .without("hand-over-waits-for-its-blocks", Always())
    .unreached(_UNSEEN, _ENGINE + "a_hand_over_ends_when_the_store_holds_the_prompt"),
    # ------------------------------------------------------------------ questions
    Fault("H26", "a request computes the blocks that it asks for")
    .without("request-waits-for-its-answer")
    .unreached(_UNSEEN, _SCHEDULE + "a_request_asks_once_for_blocks_that_no_tier_is_known_to_hold"),
    Fault("H26", "a request asks for blocks that it would have computed before the answer comes")
    .without("question-is-a-small-share-of-computing", Rewrite("self._costs.compute_seconds(num_blocks)", "1000.0"))
    .unreached(_UNSEEN, _ENGINE + "no_question_if_computing_is_as_fast_as_an_answer"),
    Fault("H26", "a request waits without a bound for a store that does not answer")
    .without("question-has-a-deadline", DropOperand("deadline_s"))
    .unreached(_UNSEEN, _ENGINE + "a_late_answer_serves_the_next_request"),
    Fault("H26", "a request waits in vain because too many questions are in flight, or because the engine closes")
    .without("wait-without-a-question-ends-at-once")
    .unreached(_UNSEEN, "offload/test_finds.py::test_a_request_whose_blocks_are_not_asked_for_does_not_wait"),
    Fault("H26", "questions pile up while the store stalls")
    .without("questions-are-bounded", DropOperand("_MOST_QUESTIONS"))
    .unreached(_UNSEEN, _ENGINE + "a_store_that_stalls_collects_few_questions"),
    Fault("H7", "an answer is taken in before it has come")
    .without("answer-is-complete", Rewrite(".fence.poll()", ".fence"))
    .unreached(_UNSEEN, _ENGINE + "a_late_answer_serves_the_next_request"),
    Fault("H26", "blocks that another process has stored are never found")
    .without("answer-enters-the-index")
    .unreached(_UNSEEN, _ENGINE + "an_engine_finds_what_another_has_stored"),
    Fault("H9", "a block is found again while a write deletes it, and each load of it fails")
    .without("entry-that-leaves-is-not-found", Value("False"))
    .unreached(_UNSEEN, _ENGINE + "an_entry_that_is_about_to_be_deleted_is_not_found"),
    Fault("H14", "a hand-over tells of the blocks of another user's request")
    .without("hand-over-is-of-its-own-request", SetArgument("keys_of", "salt", "''"))
    .unreached(_UNSEEN, _ENGINE + "a_hand_over_tells_of_no_block_of_another_request"),
    Fault("H8", "a block is found by an answer that was asked for before a reset")
    .without("reset-reaches-questions-in-flight")
    .unreached(_UNSEEN, _ENGINE + "a_reset_reaches_blocks_in_the_store_and_answers_on_their_way"),
    Fault("H8", "a reset leaves blocks in the store, and the next request finds them there")
    .without("dropped-entries-are-not-found-again")
    .unreached(_UNSEEN, _ENGINE + "a_reset_reaches_blocks_in_the_store_and_answers_on_their_way"),
)

EXEMPT = (
    Exempt("TierLoads.find", ("epoch",), "late-promotions compares it"),
    Exempt("Finds._ask", ("void",), "reset-reaches-questions-in-flight sets it"),
    Exempt("Finds._ask", ("abandoned",), GIVES_UP),
    Exempt("Finds._ask", ("extend",), "a list"),
    Exempt("Finds.finish", ("remove",), "a list"),
    Exempt("Finds._end_waits", ("remove",), "a list"),
    Exempt("Finds.finish", ("ended",), "a question that failed has no answer"),
    Exempt("Finds.finish", ("void",), "reset-reaches-questions-in-flight sets it"),
    Exempt("Finds.finish", ("poll",), "a list of deletions, for `has_work`"),
)
