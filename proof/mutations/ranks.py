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
from proof.mutations.tables import Exempt, Fault, Feature

_RANKS: frozenset[Feature] = frozenset({"ranks"})
_TRANSFERS: frozenset[Feature] = frozenset({"ranks", "offload"})

MUTATIONS = (
    # ------------------------------------------------------------------ fences
    Fault(
        "H13", "a block is loaded, stored or published when rank 0 is done with it, while another rank is not"
    ).without("fence-of-all-ranks-waits-for-each-rank", Value("()"), needs=_TRANSFERS),
    Fault(
        "H13", "blocks are stored or overwritten after rank 0's part of a step, while another rank is still in it"
    ).without(
        "blocks-are-used-until-every-rank-has-passed", SetArgument("replace", "on_all_ranks", "None"), needs=_TRANSFERS
    ),
    Fault("H13", "rank 0 takes work of another rank for done as soon as it was submitted there").without(
        "rank-reports-only-what-is-done", DropOperand("poll"), needs=_TRANSFERS
    ),
    Fault("H13", "a deferred store reads blocks on a rank that has not filled them yet").without(
        "deferred-store-waits-for-every-rank",
        SetArgument("StorePlan", 2, "()"),
        needs={"ranks", "offload", "growing_tier"},
    ),
    Fault("H13", "the newest checkpoint of an answer is stored from a rank that has not written it yet").without(
        "store-of-a-newest-checkpoint-waits-for-every-rank",
        SetArgument("StorePlan", 2, "()"),
        needs={"ranks", "offload", "states"},
    ),
    Fault(
        "H13", "a copy or step of a rank waits for work before the one that its message names, not for that one"
    ).without("rank-waits-for-the-named-fence", Compare("<"), needs=_TRANSFERS),
    Fault("H13", "a copy uses host memory that a rank has not pinned yet").without(
        "unreported-rank-has-the-least-memory",
        Value("min((ready.num_bytes for ready in self._ready.values()), default=1 << 62)"),
        needs={"ranks", "offload", "growing_tier"},
    ),
    # ------------------------------------------------------------------ the same work on every rank
    Fault("H13", "the other ranks skip a step").without("step-is-sent-to-every-rank", needs=_RANKS),
    Fault("H13", "the other ranks carry a plan out twice").without(
        "message-is-sent-once", Append("self._transport.send(message)"), at="message-is-sent", needs=_RANKS
    ),
    Fault("H13", "another rank reads and writes blocks of the slot's owner before").without(
        "block-table-of-every-rank-belongs-to-the-slots-owner", Always(), needs=_RANKS
    ),
    Fault("H13", "ranks go on with tokens that differ, as their logits may in the last bit").without(
        "sampled-tokens-are-those-of-rank-0", needs=_RANKS
    ),
    Fault("H13", "ranks verify drafts that differ").without(
        "drafts-are-those-of-rank-0", needs={"ranks", "speculative"}
    ),
    Fault("H13", "rank 0 waits in its second run for collectives that the other ranks never enter").without(
        "second-run-is-on-every-rank", SetArgument("of_columns", "self_check", "False"), needs={"ranks", "self_check"}
    ),
    # ------------------------------------------------------------------ failures and the end
    Fault("H22", "the offload worker sleeps forever beside a fence that was done while it looked").without(
        "fence-that-was-done-meanwhile-causes-a-turn", Never(), needs=_TRANSFERS
    ),
    Fault("H9", "a block that one rank could not load or store counts as complete").without(
        "failure-on-any-rank-fails-all", needs={"ranks", "failing_copy"}
    ),
    Fault("H9", "results of a step are used although a load that it waited for has failed on another rank").without(
        "failed-load-of-any-rank-is-known-before-the-commit", needs={"ranks", "failing_load"}
    ),
    Fault("H9", "a rank reports a failed copy as done").without(
        "rank-reports-its-failures", Never(), needs={"ranks", "failing_copy"}
    ),
    Fault(
        "H13", "the collectives of a rank's next step meet those of the step that failed: wrong tokens, no error"
    ).without("no-step-of-a-rank-follows-a-failed-one", Never(), needs={"failing_step", "ranks"}),
    Fault("H22", "a step whose collectives were aborted gives clients wrong tokens before the engine ends").without(
        "step-with-a-lost-rank-is-not-committed", Never(), needs={"ranks", "rank_loss"}
    ),
    Fault("H22", "the engine closes while other ranks have work in flight").without(
        "other-ranks-end-before-the-device", needs=_RANKS | {"close"}
    ),
)

EQUIVALENT = (
    Fault("H13", "a slot of another rank keeps the state of the request before")
    .without("slot-begins-on-every-rank", Value("{}"), needs=_RANKS)
    .unseen(
        "other ranks take tokens and drafts from rank 0, so the sampling state of their slots decides nothing",
        "ranks/test_rank_messages.py::test_a_slot_begins_on_every_rank",
    ),
    Fault("H6", "a rank reads an entry into a slot from which it still loads a block")
    .without("read-on-a-rank-waits-for-its-slot", needs={"ranks", "disk"})
    .unseen(
        "see disk-read-waits-on-its-stream: rank 0 releases a slot after every rank has reported its last use",
        "ranks/test_follower.py::test_a_read_waits_for_the_fences_that_its_message_names",
    ),
    Fault("H13", "a step that came twice is carried out twice")
    .without("step-is-the-next-one", Never(), needs=_RANKS)
    .unreached(
        "nothing loses or repeats a message: the check finds errors of this code",
        "ranks/test_rank_messages.py::test_a_repeated_or_skipped_step_is_refused",
    ),
    Fault("H3", "slices of one direction run beside each other on the other ranks")
    .without("copy-waits-on-every-rank", needs=_TRANSFERS)
    .unseen(
        "the wait for the slice before only lets other copies in between: slices touch different bytes",
        "ranks/test_leader.py::test_a_copy_waits_for_the_same_fences_on_every_rank",
    ),
    Fault("H3", "slices of one direction run beside each other on a rank")
    .without("copy-on-a-rank-waits-for-the-one-before", needs=_TRANSFERS)
    .unseen(
        "see copy-waits-on-every-rank",
        "ranks/test_follower.py::test_a_copy_waits_for_the_fences_that_its_message_names",
    ),
)

EXEMPT = (
    Exempt("share_of_rank", ("replace",), "a copy of a configuration"),
    Exempt("build_rank_parts", ("callback",), "closes what was opened if the rest of the build fails"),
)
