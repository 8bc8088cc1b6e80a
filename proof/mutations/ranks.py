"""Rules of tensor-parallel ranks: every rank does the same work, and rank 0 goes on only when all have done it."""

from __future__ import annotations

from proof.mutations.operators import (
    Always,
    Append,
    Compare,
    DropOperand,
    Never,
    SetArgument,
    Value,
)
from proof.mutations.tables import Equivalent, Exempt, Feature, Mutation

_RANKS: frozenset[Feature] = frozenset({"ranks"})
_TRANSFERS: frozenset[Feature] = frozenset({"ranks", "offload"})

MUTATIONS = (
    # ------------------------------------------------------------------ fences
    Mutation(
        name="fence-of-all-ranks-waits-for-each-rank",
        hazard="H13",
        change=Value("()"),
        consequence="a block is loaded, stored or published when rank 0 is done with it, while another rank is not",
        needs=_TRANSFERS,
    ),
    Mutation(
        name="blocks-are-used-until-every-rank-has-passed",
        hazard="H13",
        change=SetArgument("replace", "on_all_ranks", "None"),
        consequence="blocks are stored or overwritten after rank 0's part of a step, while another rank is still in it",
        needs=_TRANSFERS,
    ),
    Mutation(
        name="rank-reports-only-what-is-done",
        hazard="H13",
        change=DropOperand("poll"),
        consequence="rank 0 takes work of another rank for done as soon as it was submitted there",
        needs=_TRANSFERS,
    ),
    Mutation(
        name="deferred-store-waits-for-every-rank",
        hazard="H13",
        change=SetArgument("StorePlan", 2, "()"),
        consequence="a deferred store reads blocks on a rank that has not filled them yet",
        needs=frozenset({"ranks", "offload", "growing_tier"}),
    ),
    Mutation(
        name="store-of-a-newest-checkpoint-waits-for-every-rank",
        hazard="H13",
        change=SetArgument("StorePlan", 2, "()"),
        consequence="the newest checkpoint of an answer is stored from a rank that has not written it yet",
        needs=frozenset({"ranks", "offload", "states"}),
    ),
    Mutation(
        name="rank-waits-for-the-named-fence",
        hazard="H13",
        change=Compare("<"),
        consequence="a copy or step of a rank waits for work before the one that its message names, not for that one",
        needs=_TRANSFERS,
    ),
    Mutation(
        name="unreported-rank-has-the-least-memory",
        hazard="H13",
        change=Value("min((ready.num_bytes for ready in self._ready.values()), default=1 << 62)"),
        consequence="a copy uses host memory that a rank has not pinned yet",
        needs=frozenset({"ranks", "offload", "growing_tier"}),
    ),
    # ------------------------------------------------------------------ the same work on every rank
    Mutation(
        name="step-is-sent-to-every-rank",
        hazard="H13",
        consequence="the other ranks skip a step",
        needs=_RANKS,
    ),
    Mutation(
        name="message-is-sent-once",
        hazard="H13",
        at="message-is-sent",
        change=Append("self._transport.send(message)"),
        consequence="the other ranks carry a plan out twice",
        needs=_RANKS,
    ),
    Mutation(
        name="block-table-of-every-rank-belongs-to-the-slots-owner",
        hazard="H13",
        change=Always(),
        consequence="another rank reads and writes blocks of the slot's owner before",
        needs=_RANKS,
    ),
    Mutation(
        name="sampled-tokens-are-those-of-rank-0",
        hazard="H13",
        consequence="ranks go on with tokens that differ, as their logits may in the last bit",
        needs=_RANKS,
    ),
    Mutation(
        name="drafts-are-those-of-rank-0",
        hazard="H13",
        consequence="ranks verify drafts that differ",
        needs=frozenset({"ranks", "speculative"}),
    ),
    Mutation(
        name="second-run-is-on-every-rank",
        hazard="H13",
        change=SetArgument("of_columns", "self_check", "False"),
        consequence="rank 0 waits in its second run for collectives that the other ranks never enter",
        needs=frozenset({"ranks", "self_check"}),
    ),
    # ------------------------------------------------------------------ failures and the end
    Mutation(
        name="fence-that-was-done-meanwhile-causes-a-turn",
        hazard="H22",
        change=Never(),
        consequence="the offload worker sleeps forever beside a fence that was done while it looked",
        needs=_TRANSFERS,
    ),
    Mutation(
        name="failure-on-any-rank-fails-all",
        hazard="H9",
        consequence="a block that one rank could not load or store counts as complete",
        needs=frozenset({"ranks", "failing_copy"}),
    ),
    Mutation(
        name="failed-load-of-any-rank-is-known-before-the-commit",
        hazard="H9",
        consequence="results of a step are used although a load that it waited for has failed on another rank",
        needs=frozenset({"ranks", "failing_load"}),
    ),
    Mutation(
        name="rank-reports-its-failures",
        hazard="H9",
        change=Never(),
        consequence="a rank reports a failed copy as done",
        needs=frozenset({"ranks", "failing_copy"}),
    ),
    Mutation(
        name="no-step-of-a-rank-follows-a-failed-one",
        hazard="H13",
        change=Never(),
        consequence="the collectives of a rank's next step meet those of the step that failed: wrong tokens, no error",
        needs=frozenset({"failing_step", "ranks"}),
    ),
    Mutation(
        name="step-with-a-lost-rank-is-not-committed",
        hazard="H22",
        change=Never(),
        consequence="a step whose collectives were aborted gives clients wrong tokens before the engine ends",
        needs=frozenset({"ranks", "rank_loss"}),
    ),
    Mutation(
        name="other-ranks-end-before-the-device",
        hazard="H22",
        consequence="the engine closes while other ranks have work in flight",
        needs=_RANKS | {"close"},
    ),
)

EQUIVALENT = (
    Equivalent(
        Mutation(
            name="slot-begins-on-every-rank",
            hazard="H13",
            change=Value("{}"),
            consequence="a slot of another rank keeps the state of the request before",
            needs=_RANKS,
        ),
        reason="other ranks take tokens and drafts from rank 0, so the sampling state of their slots decides nothing",
        noticed_by="ranks/test_rank_messages.py::test_a_slot_begins_on_every_rank",
    ),
    Equivalent(
        Mutation(
            name="read-on-a-rank-waits-for-its-slot",
            hazard="H6",
            consequence="a rank reads an entry into a slot from which it still loads a block",
            needs=frozenset({"ranks", "disk"}),
        ),
        reason="see disk-read-waits-on-its-stream: rank 0 releases a slot after every rank has reported its last use",
        noticed_by="ranks/test_follower.py::test_a_read_waits_for_the_fences_that_its_message_names",
    ),
    Equivalent(
        Mutation(
            name="step-is-the-next-one",
            hazard="H13",
            change=Never(),
            consequence="a step that came twice is carried out twice",
            needs=_RANKS,
        ),
        reason="nothing loses or repeats a message: the check finds errors of this code",
        noticed_by="ranks/test_rank_messages.py::test_a_repeated_or_skipped_step_is_refused",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="copy-waits-on-every-rank",
            hazard="H3",
            consequence="slices of one direction run beside each other on the other ranks",
            needs=_TRANSFERS,
        ),
        reason="the wait for the slice before only lets other copies in between: slices touch different bytes",
        noticed_by="ranks/test_leader.py::test_a_copy_waits_for_the_same_fences_on_every_rank",
    ),
    Equivalent(
        Mutation(
            name="copy-on-a-rank-waits-for-the-one-before",
            hazard="H3",
            consequence="slices of one direction run beside each other on a rank",
            needs=_TRANSFERS,
        ),
        reason="see copy-waits-on-every-rank",
        noticed_by="ranks/test_follower.py::test_a_copy_waits_for_the_fences_that_its_message_names",
    ),
)

EXEMPT = (
    Exempt("share_of_rank", ("replace",), "a copy of a configuration"),
    Exempt("build_rank_parts", ("callback",), "closes what was opened if the rest of the build fails"),
)
