"""Rules of recurrent states: which state a step reads and writes, and when a checkpoint is a hit."""

from __future__ import annotations

from proof.mutations.operators import Always, Become, Delete, DropArgument, DropOperand, Rewrite, Value
from proof.mutations.tables import Equivalent, Exempt, Feature, Mutation

_ONE_STREAM = "all steps run on one stream, and a state is released after its transfers have ended"

_DRAFTED: frozenset[Feature] = frozenset({"states", "speculative"})

MUTATIONS = (
    Mutation(
        name="hit-needs-a-state-at-its-end",
        hazard="H15",
        change=Always(),
        consequence="a request reuses blocks without a checkpoint at their end",
        needs=frozenset({"states"}),
    ),
    Mutation(
        name="request-starts-from-the-checkpoint-that-it-found",
        hazard="H15",
        change=Become("source = self._states.take(1)"),
        consequence="a request continues from an unrelated state",
        needs=frozenset({"states"}),
    ),
    Mutation(
        name="next-step-reads-the-checkpoint",
        hazard="H15",
        consequence="the step after a checkpoint reads the state from before the checkpoint",
        needs=frozenset({"states"}),
    ),
    Mutation(
        name="checkpoint-is-published-after-its-step",
        hazard="H7",
        change=Rewrite("<=", "!="),
        consequence="a checkpoint is findable while the step that writes it may still run",
        needs=frozenset({"states"}),
    ),
    Mutation(
        name="checkpoint-has-the-key-of-its-last-block",
        hazard="H15",
        change=Rewrite("- 1", "- 2"),
        consequence="a checkpoint has the key of the block before its last block",
        needs=frozenset({"states"}),
    ),
    Mutation(
        name="checkpoint-is-released-after-its-transfers",
        hazard="H10",
        change=DropArgument("release", "until"),
        consequence="a checkpoint is overwritten while it is being stored",
        needs=frozenset({"states", "offload"}),
    ),
    Mutation(
        name="states-are-released-after-the-last-step",
        hazard="H10",
        change=DropArgument("release", "until"),
        consequence="the states of a request that has ended are overwritten while they are being stored",
        needs=frozenset({"states", "offload"}),
    ),
    Mutation(
        name="stored-checkpoint-is-released-after-its-copy",
        hazard="H10",
        change=DropArgument("release", "until"),
        consequence="the last checkpoint of an answer is overwritten before its store has copied it",
        needs=frozenset({"states", "offload"}),
    ),
    Mutation(
        name="states-wait-for-their-load",
        hazard="H5",
        consequence="a step reads a state that a load is still writing",
        needs=frozenset({"slow_load", "states", "offload", "layer_groups"}),
    ),
    Mutation(
        name="states-are-loaded-before-layers",
        hazard="H5",
        change=DropOperand("num_whole"),
        consequence="a step reads a state of which only a part was loaded",
        needs=frozenset({"states", "offload", "layer_groups"}),
    ),
    Mutation(
        name="captured-states-wait-for-their-load",
        hazard="H5",
        consequence="a captured step reads a state that a load is still writing",
        needs=frozenset({"slow_load", "states", "offload", "captured", "layer_groups"}),
    ),
    Mutation(
        name="states-of-a-row-are-its-owners",
        hazard="H16",
        consequence="a row starts from an empty state instead of its own",
        needs=frozenset({"states"}),
    ),
    Mutation(
        name="admission-needs-a-state",
        hazard="H26",
        change=Always(False),
        consequence="a request is admitted without a state to write",
        needs=frozenset({"states"}),
    ),
    Mutation(
        name="state-is-forgotten-with-its-block",
        hazard="H15",
        consequence="the checkpoint of an evicted block stays, and wastes memory",
        needs=frozenset({"states"}),
    ),
    Mutation(
        name="checkpoint-leaves-a-state-for-each-request",
        hazard="H26",
        change=Become("return True"),
        consequence="checkpoints take the states that waiting requests need",
        needs=frozenset({"states"}),
    ),
    Mutation(
        name="broken-request-invalidates-its-states",
        hazard="H9",
        consequence="checkpoints of a request with non-finite logits, whose KV is wrong, stay findable",
        needs=frozenset({"states", "bad_logits"}),
    ),
    Mutation(
        name="reset-drops-keys-of-states",
        hazard="H8",
        consequence="a checkpoint stays findable after a reset of the cache",
        needs=frozenset({"states", "reset"}),
    ),
    Mutation(
        name="replay-ends-at-the-last-accepted-draft",
        hazard="H12",
        change=Become("replayed = number >= 0 * behind"),
        consequence="a state includes rejected drafts",
        needs=_DRAFTED,
    ),
    Mutation(
        name="state-covers-no-draft",
        hazard="H12",
        consequence="a state is recorded as covering the drafts of its row, although the drafts are not in it",
        needs=_DRAFTED,
    ),
    Mutation(
        name="state-is-written-before-its-drafts",
        hazard="H12",
        change=Become("if number == len(self.sources) - 1:\n    _scatter(tensors, self.writes[rows], states)"),
        consequence="a state includes the drafts of its row before any of them is accepted",
        needs=_DRAFTED,
    ),
    Mutation(
        name="kept-inputs-are-read-before-others-are-kept",
        hazard="H16",
        change=Become("self._keep_inputs(layer, inputs)\nself._decode(layer, inputs, outputs, advance)"),
        consequence="a step replays the inputs of its own drafts instead of the inputs of the accepted drafts",
        needs=_DRAFTED,
    ),
    Mutation(
        name="inputs-of-drafts-are-kept",
        hazard="H16",
        consequence="stale inputs are replayed instead of the accepted drafts' inputs",
        needs=_DRAFTED,
    ),
    Mutation(
        name="kept-inputs-know-their-tokens",
        hazard="H16",
        consequence="a step replays the inputs of tokens that are not the accepted drafts, or replays nothing",
        needs=_DRAFTED,
    ),
    Mutation(
        name="checkpoint-is-written-at-its-border",
        hazard="H15",
        change=Rewrite("==", "<="),
        consequence="a checkpoint includes tokens after the end of its block",
        needs=_DRAFTED,
    ),
    Mutation(
        name="checkpoint-is-written-if-its-border-is-reached",
        hazard="H15",
        change=Become("checkpoints = torch.where(checkpoints >= 0, checkpoints, 0)"),
        consequence="a padding row, or a row without a checkpoint, overwrites the state of another request",
        needs=_DRAFTED,
    ),
    Mutation(
        name="candidate-is-a-checkpoint-if-its-border-was-reached",
        hazard="H15",
        change=Always(),
        consequence="a state that no step wrote is published as a checkpoint",
        needs=_DRAFTED,
    ),
    Mutation(
        name="candidate-that-is-no-checkpoint-is-released",
        hazard="H10",
        consequence="an unwritten state stays in use while its request runs, and is never released afterwards",
        needs=_DRAFTED,
    ),
    Mutation(
        name="candidates-are-released-with-their-request",
        hazard="H10",
        consequence="states of requests that leave the device are never released",
        needs=_DRAFTED,
    ),
)

EQUIVALENT = (
    Equivalent(
        Mutation(
            name="hit-needs-all-parts-of-a-state",
            hazard="H15",
            change=DropOperand(1),
            consequence="a request loads a checkpoint of which a part was evicted",
            needs=frozenset({"states", "offload"}),
        ),
        "the load fails as a whole if a part is missing, and the request computes the blocks",
        noticed_by="schedule/test_states.py::test_a_checkpoint_in_a_tier_is_a_hit_only_with_all_its_parts",
    ),
    Equivalent(
        Mutation(
            name="state-covers-what-is-before-its-row",
            hazard="H15",
            change=Become("wrong = covered != covered"),
            consequence="a row reads a state that does not match the tokens before the row",
            needs=frozenset({"states"}),
        ),
        "the scheduler plans no such read; this check is a second line of defence",
        noticed_by="models/test_hybrid.py::test_a_state_that_covers_other_tokens_gives_nan_logits",
    ),
    Equivalent(
        Mutation(
            name="broken-request-invalidates-its-first-state",
            hazard="H9",
            change=Become("of_states = keys"),
            consequence="a checkpoint that is broken fails every request that starts from it",
            needs=frozenset({"states", "bad_logits"}),
        ),
        "no checkpoint of a schedule is broken when it is published",
        noticed_by="schedule/test_states.py::test_non_finite_logits_drop_the_checkpoint_from_which_the_request_began",
    ),
    Equivalent(
        Mutation(
            name="state-after-a-wrong-one-is-wrong",
            hazard="H15",
            change=Delete(),
            consequence="a chunk without logits reads a wrong state, and the text of later chunks is wrong",
            needs=frozenset({"states"}),
        ),
        "the scheduler plans no such read, and a failed load computes its request again: a second line of defence",
        noticed_by="models/test_hybrid.py::test_logits_computed_from_a_wrong_state_are_nan",
    ),
    Equivalent(
        Mutation(
            name="fresh-state-waits-for-its-last-use",
            hazard="H3",
            change=Value("(loaded, fresh.after)"),
            consequence="a load overwrites a state that a step still reads",
            needs=frozenset({"states", "offload"}),
        ),
        "the load also waits for the last uses of the request's new blocks, and these are the same steps",
        noticed_by="schedule/test_states.py::test_the_next_writer_of_a_state_waits_for_its_last_uses",
    ),
    Equivalent(
        Mutation(
            name="checkpoint-waits-for-its-last-use",
            hazard="H2",
            consequence="a step overwrites a state that an earlier step still reads",
            needs=frozenset({"states"}),
        ),
        _ONE_STREAM,
        noticed_by="schedule/test_states.py::test_the_next_writer_of_a_state_waits_for_its_last_uses",
    ),
    Equivalent(
        Mutation(
            name="candidate-waits-for-its-last-use",
            hazard="H2",
            consequence="a step overwrites a state that an earlier step still reads",
            needs=_DRAFTED,
        ),
        _ONE_STREAM,
        noticed_by="schedule/test_states.py::test_a_step_waits_for_the_last_uses_of_its_new_checkpoint_state",
    ),
    Equivalent(
        Mutation(
            name="states-are-published-with-their-blocks",
            hazard="H15",
            change=Delete(),
            consequence="no checkpoint is ever found",
            needs=frozenset({"states"}),
        ),
        "checkpoints only save time",
        noticed_by="schedule/test_states.py::test_a_repeated_prompt_continues_from_its_checkpoint",
    ),
    Equivalent(
        Mutation(
            name="checkpoint-is-made-where-prompts-branch",
            hazard="H15",
            consequence="prompts that share a beginning compute it each time",
            needs=frozenset({"states"}),
        ),
        "the checkpoint only saves time",
        noticed_by="schedule/test_states.py::test_a_checkpoint_is_made_where_prompts_were_seen_to_branch",
    ),
    Equivalent(
        Mutation(
            name="newest-checkpoint-of-an-answer-replaces-the-one-before",
            hazard="H15",
            consequence="old checkpoints of an answer take memory that other checkpoints need",
            needs=frozenset({"states"}),
        ),
        "the replacement only saves memory",
        noticed_by="schedule/test_states.py::test_the_newest_checkpoint_of_an_answer_replaces_the_previous_one",
    ),
    Equivalent(
        Mutation(
            name="newest-checkpoint-is-stored-when-its-request-leaves",
            hazard="H15",
            consequence="the checkpoint at the end of an answer is not found after a restart",
            needs=frozenset({"states", "offload"}),
        ),
        "storing the checkpoint only saves time",
        noticed_by="schedule/test_states.py::test_the_newest_checkpoint_is_stored_when_its_request_ends",
    ),
)

_LEASED = "the release of these states has its own mutation: states-are-released-after-the-last-step"

_ORDER = "it changes only which checkpoints are evicted first"

EXEMPT = (
    Exempt("Allocator.plan_states", ("shares",), "a request that shares no blocks publishes no checkpoint"),
    Exempt("Allocator.plan_decode_states", ("shares",), "a request that shares no blocks publishes no checkpoint"),
    Exempt("Allocator.release", ("release",), "see states-are-released-after-the-last-step"),
    Exempt("Committer.commit", ("commit",), "see checkpoint-is-released-after-its-transfers"),
    Exempt("ReuseFinder._find", ("replace",), "this replace only copies a dataclass with one field changed"),
    Exempt("ReuseFinder.loadable", ("replace",), "this replace only copies a dataclass with one field changed"),
    Exempt("StateCache.start", ("take", "take"), _LEASED),
    Exempt("StateCache.plan", ("take",), _LEASED),
    Exempt("StateCache.plan_decode", ("take",), "see candidates-are-released-with-their-request"),
    Exempt("StateCache.publish", ("publish",), "see states-are-published-with-their-blocks"),
    Exempt("StateCache.store_latest", ("clear",), "see stored-checkpoint-is-released-after-its-copy"),
    Exempt("StateCache.forget", ("forget",), "see state-is-forgotten-with-its-block"),
    Exempt("StateCache.take_superseded", ("clear",), _ORDER),
    Exempt("StateCache.forget_all", ("forget_all", "clear"), "see reset-drops-keys-of-states"),
    Exempt("StateCache.forget_all", ("clear", "clear"), _ORDER),
    Exempt("StateCache._is_unused", ("is_cached",), "see admission-needs-a-state"),
)
