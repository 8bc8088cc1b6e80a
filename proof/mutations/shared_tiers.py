"""Rules of tiers in stores that several engines share. The store of a schedule of the torture test is in memory."""

from __future__ import annotations

from proof.mutations.operators import Always, Delete, DropOperand, Never, Operator, Rewrite, SetArgument, Value
from proof.mutations.reasons import GIVES_UP
from proof.mutations.tables import Equivalent, Exempt, Mutation

MUTATIONS = (
    Mutation(
        name="every-bit-of-a-value-is-verified",
        hazard="H9",
        change=Never(),
        consequence="a damaged value is read as a block",
        needs=frozenset({"store"}),
    ),
    Mutation(
        name="request-asks-once",
        hazard="H26",
        change=DropOperand("has_asked"),
        consequence="a request asks again and again for blocks that no process has stored",
        needs=frozenset({"store"}),
    ),
    Mutation(
        name="ended-find-is-reported",
        hazard="H26",
        consequence="a request that has asked waits forever",
        needs=frozenset({"store"}),
    ),
)

_DELETE = Delete()
_UNSEEN = "the store of a schedule has no server and one rank, and a block that is not found is computed again"


def _noticed(name: str, hazard: str, consequence: str, by: str, change: Operator = _DELETE) -> Equivalent:
    mutation = Mutation(name=name, hazard=hazard, change=change, consequence=consequence)
    return Equivalent(mutation, _UNSEEN, noticed_by=by, unreached=True)


_ENGINE = "engine/test_shared_tiers.py::test_"
_STORE = "offload/test_shared_stores.py::test_"
_SCHEDULE = "schedule/test_tiers.py::test_"

EQUIVALENT = (
    # ------------------------------------------------------------------ values
    _noticed(
        "value-is-of-its-key",
        "H9",
        "a value that another key, model or layout has is read as a block of this key",
        _STORE + "lying_store_gives_no_wrong_block",
        Never(),
    ),
    _noticed(
        "checksum-of-a-value-covers-its-block",
        "H9",
        "a value whose header is right and whose block is damaged is read as a block",
        _STORE + "lying_store_gives_no_wrong_block",
    ),
    _noticed(
        "value-counts-as-written-after-its-write",
        "H9",
        "blocks that were written to the store are never found",
        _ENGINE + "only_missing_blocks_are_asked_for",
    ),
    _noticed(
        "value-is-found-on-every-rank",
        "H9",
        "a block that some ranks lack counts as found, and each of its reads fails",
        _STORE + "ranks_find_a_block_that_all_of_them_hold",
        Rewrite("None not in each", "each"),
    ),
    _noticed(
        "rank-has-its-part-of-a-store",
        "H9",
        "a rank of SGLang reads another rank's share of a block",
        _STORE + "ranks_of_other_engines_meet_in_no_store",
    ),
    _noticed(
        "failed-store-is-left-alone",
        "H26",
        "each block of a prompt waits for a timeout of its own while the store stalls",
        _ENGINE + "a_store_is_left_alone_after_a_failure",
        Never(),
    ),
    _noticed(
        "late-call-keeps-its-buffer",
        "H10",
        "a call that ended late writes into the buffer of another call",
        _STORE + "a_late_call_of_mooncake_keeps_its_buffer_until_it_ends",
        Rewrite(".add_done_callback(lambda _: ", ".done(), ("),
    ),
    _noticed(
        "calls-end-before-the-client",
        "H10",
        "the client is closed during a call that has timed out, and crashes",
        _STORE + "a_late_call_of_mooncake_keeps_its_buffer_until_it_ends",
        Rewrite("cancel_futures=True", "wait=False"),
    ),
    _noticed(
        "hand-over-waits-for-its-blocks",
        "H26",
        "a replica is asked to load blocks that are not stored yet, and computes them",
        _ENGINE + "a_hand_over_ends_when_the_store_holds_the_prompt",
        Always(),
    ),
    # ------------------------------------------------------------------ questions
    _noticed(
        "request-waits-for-its-answer",
        "H26",
        "a request computes the blocks that it asks for",
        _SCHEDULE + "a_request_asks_once_for_blocks_that_no_tier_is_known_to_hold",
    ),
    _noticed(
        "question-is-a-small-share-of-computing",
        "H26",
        "a request asks for blocks that it would have computed before the answer comes",
        _ENGINE + "no_question_if_computing_is_as_fast_as_an_answer",
        Rewrite("self._costs.compute_seconds(num_blocks)", "1000.0"),
    ),
    _noticed(
        "question-has-a-deadline",
        "H26",
        "a request waits without a bound for a store that does not answer",
        _ENGINE + "a_late_answer_serves_the_next_request",
        DropOperand("deadline_s"),
    ),
    _noticed(
        "wait-without-a-question-ends-at-once",
        "H26",
        "a request waits in vain because too many questions are in flight, or because the engine closes",
        "offload/test_finds.py::test_a_request_whose_blocks_are_not_asked_for_does_not_wait",
    ),
    _noticed(
        "questions-are-bounded",
        "H26",
        "questions pile up while the store stalls",
        _ENGINE + "a_store_that_stalls_collects_few_questions",
        DropOperand("_MOST_QUESTIONS"),
    ),
    _noticed(
        "answer-is-complete",
        "H7",
        "an answer is taken in before it has come",
        _ENGINE + "a_late_answer_serves_the_next_request",
        Rewrite(".fence.poll()", ".fence"),
    ),
    _noticed(
        "answer-enters-the-index",
        "H26",
        "blocks that another process has stored are never found",
        _ENGINE + "an_engine_finds_what_another_has_stored",
    ),
    _noticed(
        "entry-that-leaves-is-not-found",
        "H9",
        "a block is found again while a write deletes it, and each load of it fails",
        _ENGINE + "an_entry_that_is_about_to_be_deleted_is_not_found",
        Value("False"),
    ),
    _noticed(
        "hand-over-is-of-its-own-request",
        "H14",
        "a hand-over tells of the blocks of another user's request",
        _ENGINE + "a_hand_over_tells_of_no_block_of_another_request",
        SetArgument("keys_of", "salt", "''"),
    ),
    _noticed(
        "reset-reaches-questions-in-flight",
        "H8",
        "a block is found by an answer that was asked for before a reset",
        _ENGINE + "a_reset_reaches_blocks_in_the_store_and_answers_on_their_way",
    ),
    _noticed(
        "dropped-entries-are-not-found-again",
        "H8",
        "a reset leaves blocks in the store, and the next request finds them there",
        _ENGINE + "a_reset_reaches_blocks_in_the_store_and_answers_on_their_way",
    ),
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
