"""Rules of recurrent states: which state a step reads and writes, and when a checkpoint is a hit."""

from __future__ import annotations

from proof.mutations.operators import Always, Become, Delete, DropArgument, DropOperand, Rewrite, Value
from proof.mutations.tables import Exempt, Fault, Feature

_ONE_STREAM = "all steps run on one stream, and a state is released after its transfers have ended"

_DRAFTED: frozenset[Feature] = frozenset({"states", "speculative"})

MUTATIONS = (
    Fault("H15", "a request reuses blocks without a checkpoint at their end").without(
        "hit-needs-a-state-at-its-end", Always(), needs={"states"}
    ),
    Fault("H15", "a request continues from an unrelated state").without(
        "request-starts-from-the-checkpoint-that-it-found", Become("source = self._states.take(1)"), needs={"states"}
    ),
    Fault("H15", "the step after a checkpoint reads the state from before the checkpoint").without(
        "next-step-reads-the-checkpoint", needs={"states"}
    ),
    Fault("H7", "a checkpoint is findable while the step that writes it may still run").without(
        "checkpoint-is-published-after-its-step", Rewrite("<=", "!="), needs={"states"}
    ),
    Fault("H15", "a checkpoint has the key of the block before its last block").without(
        "checkpoint-has-the-key-of-its-last-block", Rewrite("- 1", "- 2"), needs={"states"}
    ),
    Fault("H10", "a checkpoint is overwritten while it is being stored").without(
        "checkpoint-is-released-after-its-transfers", DropArgument("release", "until"), needs={"states", "offload"}
    ),
    Fault("H10", "the states of a request that has ended are overwritten while they are being stored").without(
        "states-are-released-after-the-last-step", DropArgument("release", "until"), needs={"states", "offload"}
    ),
    Fault("H10", "the last checkpoint of an answer is overwritten before its store has copied it").without(
        "stored-checkpoint-is-released-after-its-copy", DropArgument("release", "until"), needs={"states", "offload"}
    ),
    Fault("H5", "a step reads a state that a load is still writing").without(
        "states-wait-for-their-load", needs={"slow_load", "states", "offload", "layer_groups"}
    ),
    Fault("H5", "a step reads a state of which only a part was loaded").without(
        "states-are-loaded-before-layers", DropOperand("num_whole"), needs={"states", "offload", "layer_groups"}
    ),
    Fault("H5", "a captured step reads a state that a load is still writing").without(
        "captured-states-wait-for-their-load", needs={"slow_load", "states", "offload", "captured", "layer_groups"}
    ),
    Fault("H16", "a row starts from an empty state instead of its own").without(
        "states-of-a-row-are-its-owners", needs={"states"}
    ),
    Fault("H26", "a request is admitted without a state to write").without(
        "admission-needs-a-state", Always(False), needs={"states"}
    ),
    Fault("H15", "the checkpoint of an evicted block stays, and wastes memory").without(
        "state-is-forgotten-with-its-block", needs={"states"}
    ),
    Fault("H26", "checkpoints take the states that waiting requests need").without(
        "checkpoint-leaves-a-state-for-each-request", Become("return True"), needs={"states"}
    ),
    Fault("H9", "checkpoints of a request with non-finite logits, whose KV is wrong, stay findable").without(
        "broken-request-invalidates-its-states", needs={"states", "bad_logits"}
    ),
    Fault("H8", "a checkpoint stays findable after a reset of the cache").without(
        "reset-drops-keys-of-states", needs={"states", "reset"}
    ),
    Fault("H12", "a state includes rejected drafts").without(
        "replay-ends-at-the-last-accepted-draft", Become("replayed = number >= 0 * behind"), needs=_DRAFTED
    ),
    Fault("H12", "a state is recorded as covering the drafts of its row, although the drafts are not in it").without(
        "state-covers-no-draft", needs=_DRAFTED
    ),
    Fault("H12", "a state includes the drafts of its row before any of them is accepted").without(
        "state-is-written-before-its-drafts",
        Become("if number == len(self.sources) - 1:\n    _scatter(tensors, self.writes[rows], states)"),
        needs=_DRAFTED,
    ),
    Fault("H16", "a step replays the inputs of its own drafts instead of the inputs of the accepted drafts").without(
        "kept-inputs-are-read-before-others-are-kept",
        Become("self._keep_inputs(layer, inputs)\nself._decode(layer, inputs, outputs, advance)"),
        needs=_DRAFTED,
    ),
    Fault("H16", "stale inputs are replayed instead of the accepted drafts' inputs").without(
        "inputs-of-drafts-are-kept", needs=_DRAFTED
    ),
    Fault("H16", "a step replays the inputs of tokens that are not the accepted drafts, or replays nothing").without(
        "kept-inputs-know-their-tokens", needs=_DRAFTED
    ),
    Fault("H15", "a checkpoint includes tokens after the end of its block").without(
        "checkpoint-is-written-at-its-border", Rewrite("==", "<="), needs=_DRAFTED
    ),
    Fault("H15", "a padding row, or a row without a checkpoint, overwrites the state of another request").without(
        "checkpoint-is-written-if-its-border-is-reached",
        Become("checkpoints = torch.where(checkpoints >= 0, checkpoints, 0)"),
        needs=_DRAFTED,
    ),
    Fault("H15", "a state that no step wrote is published as a checkpoint").without(
        "candidate-is-a-checkpoint-if-its-border-was-reached", Always(), needs=_DRAFTED
    ),
    Fault("H10", "an unwritten state stays in use while its request runs, and is never released afterwards").without(
        "candidate-that-is-no-checkpoint-is-released", needs=_DRAFTED
    ),
    Fault("H10", "states of requests that leave the device are never released").without(
        "candidates-are-released-with-their-request", needs=_DRAFTED
    ),
)

EQUIVALENT = (
    Fault("H15", "a request loads a checkpoint of which a part was evicted")
    .without("hit-needs-all-parts-of-a-state", DropOperand(1), needs={"states", "offload"})
    .unseen(
        "the load fails as a whole if a part is missing, and the request computes the blocks",
        "schedule/test_states.py::test_a_checkpoint_in_a_tier_is_a_hit_only_with_all_its_parts",
    ),
    Fault("H15", "a row reads a state that does not match the tokens before the row")
    .without("state-covers-what-is-before-its-row", Become("wrong = covered != covered"), needs={"states"})
    .unseen(
        "the scheduler plans no such read; this check is a second line of defence",
        "models/test_hybrid.py::test_a_state_that_covers_other_tokens_gives_nan_logits",
    ),
    Fault("H9", "a checkpoint that is broken fails every request that starts from it")
    .without("broken-request-invalidates-its-first-state", Become("of_states = keys"), needs={"states", "bad_logits"})
    .unseen(
        "no checkpoint of a schedule is broken when it is published",
        "schedule/test_states.py::test_non_finite_logits_drop_the_checkpoint_from_which_the_request_began",
    ),
    Fault("H15", "a chunk without logits reads a wrong state, and the text of later chunks is wrong")
    .without("state-after-a-wrong-one-is-wrong", Delete(), needs={"states"})
    .unseen(
        "the scheduler plans no such read, and a failed load computes its request again: a second line of defence",
        "models/test_hybrid.py::test_logits_computed_from_a_wrong_state_are_nan",
    ),
    Fault("H3", "a load overwrites a state that a step still reads")
    .without("fresh-state-waits-for-its-last-use", Value("(loaded, fresh.after)"), needs={"states", "offload"})
    .unseen(
        "the load also waits for the last uses of the request's new blocks, and these are the same steps",
        "schedule/test_states.py::test_the_next_writer_of_a_state_waits_for_its_last_uses",
    ),
    Fault("H2", "a step overwrites a state that an earlier step still reads")
    .without("checkpoint-waits-for-its-last-use", needs={"states"})
    .unseen(_ONE_STREAM, "schedule/test_states.py::test_the_next_writer_of_a_state_waits_for_its_last_uses"),
    Fault("H2", "a step overwrites a state that an earlier step still reads")
    .without("candidate-waits-for-its-last-use", needs=_DRAFTED)
    .unseen(_ONE_STREAM, "schedule/test_states.py::test_a_step_waits_for_the_last_uses_of_its_new_checkpoint_state"),
    Fault("H15", "no checkpoint is ever found")
    .without("states-are-published-with-their-blocks", Delete(), needs={"states"})
    .unseen(
        "checkpoints only save time", "schedule/test_states.py::test_a_repeated_prompt_continues_from_its_checkpoint"
    ),
    Fault("H15", "prompts that share a beginning compute it each time")
    .without("checkpoint-is-made-where-prompts-branch", needs={"states"})
    .unseen(
        "the checkpoint only saves time",
        "schedule/test_states.py::test_a_checkpoint_is_made_where_prompts_were_seen_to_branch",
    ),
    Fault("H15", "old checkpoints of an answer take memory that other checkpoints need")
    .without("newest-checkpoint-of-an-answer-replaces-the-one-before", needs={"states"})
    .unseen(
        "the replacement only saves memory",
        "schedule/test_states.py::test_the_newest_checkpoint_of_an_answer_replaces_the_previous_one",
    ),
    Fault("H15", "the checkpoint at the end of an answer is not found after a restart")
    .without("newest-checkpoint-is-stored-when-its-request-leaves", needs={"states", "offload"})
    .unseen(
        "storing the checkpoint only saves time",
        "schedule/test_states.py::test_the_newest_checkpoint_is_stored_when_its_request_ends",
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
