"""Rules of the executor: waits of a step, contents of a row, and owners of mailbox slots."""

from __future__ import annotations

from proof.mutations.operators import (
    Become,
    CallInstead,
    Compare,
    Delete,
    Never,
    Rewrite,
    SetArgument,
    SetOperand,
    Unwrap,
    Value,
)
from proof.mutations.tables import Change, Exempt, Fault

_NO_FORCED = "no schedule has drafts in answers with a grammar"

MUTATIONS = (
    Fault("H9", "clients receive other tokens if the vocabulary has more than 32,768").without(
        "token-ids-are-read-whole", Rewrite(".tolist()", ".astype(np.int16).tolist()")
    ),
    Fault("H5", "a step reads blocks that a load is still writing").without(
        "layer-waits-for-its-load", needs={"offload"}
    ),
    Fault("H16", "a readmitted request samples with the state of the request slot's previous owner").without(
        "slot-begins-on-the-device", Become("begins[0][1].outputs or self._state.begin(begins)"), needs={"preempt"}
    ),
    Fault("H16", "a request gets the log-probabilities requested by the request slot's previous owner").without(
        "slot-begins-on-the-host", needs={"logprobs"}
    ),
    Fault("H16", "a step samples by argmax although a row has a temperature or penalties").without(
        "step-samples-in-the-mode-of-its-rows", needs={"sampling"}
    ),
    Fault(
        "H16", "a request samples with the temperature, filters and seed of the request slot's previous owner"
    ).without("row-samples-with-its-own-options", needs={"sampling"}),
    Fault("H19", "a captured step samples an end token before the minimum length").without(
        "ban-lasts-until-min-tokens",
        SetOperand("min_tokens", "outputs >= 1"),
        Change("ban-is-needed", SetOperand("min_tokens", "outputs < 1")),
        needs={"captured", "min_tokens"},
    ),
    Fault("H19", "a token is sampled with the random number of the previous token").without(
        "sampling-uses-the-index-of-its-output",
        Value("output.positions[:count] - state.rules.prompt_len[slots]"),
        needs={"sampling"},
    ),
    Fault("H19", "a sampled token is not penalised when it repeats").without(
        "sampled-tokens-count-for-later-penalties", SetArgument("slot_tensors", "counted", "False"), needs={"sampling"}
    ),
    Fault("H16", "a step samples all rows in the mode of its simplest row").without(
        "captured-sampling-suits-every-row", CallInstead("max", "min"), needs={"captured", "sampling"}
    ),
    Fault("H16", "a request is penalised for output tokens of the request slot's previous owner").without(
        "slot-drops-outputs-of-its-last-owner", at="slot-drops-outputs-before", needs={"sampling"}
    ),
    Fault("H16", "a request is penalised for prompt tokens of the request slot's previous owner").without(
        "slot-drops-the-prompt-of-its-last-owner", at="slot-drops-prompt-before", needs={"penalties"}
    ),
    Fault("H16", "a readmitted request is not penalised for its earlier output").without(
        "slot-keeps-outputs-from-before-a-preemption", needs={"preempt", "sampling"}
    ),
    Fault("H19", "the next step continues from the token before the sampled one").without(
        "sampled-token-stays-on-the-device"
    ),
    # ------------------------------------------------------------------ drafts
    Fault("H19", "the next step drafts from stale history: the text is right, but few drafts are accepted").without(
        "accepted-run-is-published-before-the-next-step-reads-it",
        Become("state.history[slot[:, None], column.clamp(max=start[:, None] + 1)] = drawn.to(torch.int32)[:, :1]"),
        needs={"speculative"},
    ),
    Fault("H19", "the next step starts at a position whose drafts were accepted already").without(
        "length-is-published-by-its-step", Value("start + 1"), needs={"speculative"}
    ),
    Fault("H19", "the next step continues from the first token of an accepted run").without(
        "last-token-is-the-last-accepted-one", Value("drawn[:, 0]"), needs={"speculative"}
    ),
    Fault("H19", "a step computes at the host's outdated position").without(
        "row-positions-come-from-the-device", Value("starts + counts < starts"), needs={"speculative"}
    ),
    Fault("H16", "a request's drafts are made from tokens of the request slot's previous owner").without(
        "slot-begins-with-its-own-history", needs={"speculative"}
    ),
    Fault("H19", "tokens sampled after a rejected draft are sent to the client").without(
        "only-verified-drafts-are-accepted", Value("1 + num_drafts"), needs={"speculative"}
    ),
    Fault("H19", "a token is not penalised for its repetition within an accepted run").without(
        "drafts-count-for-later-penalties-in-their-row", Value("None"), needs={"speculative", "penalties"}
    ),
    Fault("H19", "accepted drafts of a step's first rows are not counted as output").without(
        "accepted-tokens-count-for-later-penalties",
        Rewrite(".to(torch.int32)", ".to(torch.int32).tril()"),
        needs={"speculative", "penalties"},
    ),
    Fault("H19", "the host takes only one token of each accepted run").without(
        "host-reads-accept-lengths", Compare("<"), needs={"speculative"}
    ),
    # ------------------------------------------------------------------ steps that run twice
    Fault("H3", "a step's fence does not cover its second run, which writes blocks that have another owner").without(
        "second-run-is-part-of-its-step",
        Become(
            "inputs, output = self._run_once(batch, step)\n"
            "batch.self_check and self._stream.submit(lambda: self._run_twice(batch, step), label='second run')"
        ),
        needs={"self_check"},
    ),
    Fault("H19", "the second run reads the tokens that the first one sampled").without(
        "second-run-comes-before-sampling",
        Become(
            "inputs, output = self._run_once(batch, step)\n"
            "batch.self_check and self._sample(batch, step, inputs, output)\n"
            "inputs, output = self._run_twice(batch, step) if batch.self_check else (inputs, output)"
        ),
        at="second-run-is-part-of-its-step",
        needs={"self_check"},
    ),
    Fault("H19", "the second run drafts from hidden states that the first run kept for the next step").without(
        "second-run-begins-with-the-hidden-states-of-the-first", needs={"self_check", "hidden_states"}
    ),
    # ------------------------------------------------------------------ hidden states
    Fault("H17", "two captured steps write their samples to the same place").without(
        "captured-samples-go-to-their-mailbox-entry", needs={"captured"}
    ),
    Fault("H18", "samples of padding rows count as samples of a request").without(
        "padding-rows-sample-no-token", Unwrap("where", 2), needs={"captured"}
    ),
    Fault(
        "H19", "the next step drafts from the accepted run's start: the text is right, but few drafts are accepted"
    ).without("hidden-state-is-of-the-last-accepted-token", Value("hidden[logit[:, 0]]"), needs={"hidden_states"}),
    Fault(
        "H11", "the proposer writes KV beyond the blocks of a row with few drafts, into another owner's block"
    ).without("drafting-stays-in-the-blocks-of-its-row", Unwrap("minimum"), needs={"hidden_states"}),
    Fault("H15", "after a cached prefix, drafts are made as if there was no prefix").without(
        "hidden-state-comes-back-with-its-block", Never(), needs={"hidden_states"}
    ),
    Fault("H15", "the hidden state of a block is read before it was loaded").without(
        "hidden-states-wait-for-their-load", needs={"hidden_states", "offload"}
    ),
    Fault("H15", "a block is found without its hidden state").without(
        "hidden-state-is-written-to-its-block", needs={"hidden_states"}
    ),
    Fault("H19", "a prefill chunk reads the hidden state of the request slot's previous owner").without(
        "next-chunk-reads-the-hidden-state-of-the-last-chunk", needs={"hidden_states"}
    ),
    Fault("H15", "the drafter's KV lacks verified tokens").without(
        "proposer-runs-in-every-step", Value("not continues and proposed is None"), needs={"hidden_states"}
    ),
    # ------------------------------------------------------------------ captured passes
    Fault("H15", "the next step drafts from KV that is not written yet").without(
        "proposer-branch-is-joined", needs={"hidden_states", "captured"}
    ),
    Fault("H5", "a captured pass continues before the layers that it waits for are loaded").without(
        "gate-is-recorded-behind-its-loads", needs={"offload", "captured"}
    ),
    Fault("H5", "a captured pass waits for no load").without(
        "captured-layer-waits-for-its-load", Never(), needs={"offload", "captured"}
    ),
    Fault("H5", "a captured pass reads its first layers before they are loaded").without(
        "first-captured-layer-waits-for-its-load",
        Rewrite("self._starts", "self._starts[1:]"),
        at="captured-layer-waits-for-its-load",
        needs={"offload", "captured"},
    ),
    Fault("H5", "a captured pass reads layers in the middle before they are loaded").without(
        "middle-captured-layers-wait-for-their-load",
        Rewrite("self._starts", "(self._starts[0], self._starts[-1])"),
        at="captured-layer-waits-for-its-load",
        needs={"offload", "captured", "layer_groups"},
    ),
    Fault("H5", "a captured pass reads its last layers before they are loaded").without(
        "last-captured-layers-wait-for-their-load",
        Rewrite("self._starts", "self._starts[:-1]"),
        at="captured-layer-waits-for-its-load",
        needs={"offload", "captured"},
    ),
    Fault("H5", "a batch with running loads is computed by the graph without gates").without(
        "batch-with-loads-replays-the-gated-graph", Never(), needs={"offload", "captured"}
    ),
    Fault("H5", "a captured pass waits for the loads of an earlier one").without(
        "gate-is-recorded-for-each-step", needs={"offload", "captured"}
    ),
    Fault("H16", "a captured pass reads and writes the blocks of the request slot's previous owner").without(
        "block-table-belongs-to-its-slots-owner", Value("min(len(held), len(block_table))"), needs={"captured"}
    ),
    Fault("H16", "a captured pass writes to the block that its table had at capture").without(
        "changed-blocks-reach-the-device", needs={"captured"}
    ),
    Fault("H18", "a captured pass computes the previous batch again").without(
        "captured-inputs-are-filled-before-the-replay", needs={"captured"}
    ),
    Fault("H17", "a step overwrites results that the host has not read yet").without(
        "mailbox-entries-do-not-overlap", Value("0")
    ),
    Fault("H17", "a mailbox slot is free before its step has written it and the host has read it").without(
        "mailbox-entry-is-leased-until-read",
        Become(
            "lease = self._pool.take(1)\n"
            "lease.release()\n"
            "return MailboxEntry(self._memory.name, lease, self._entry_bytes)"
        ),
        Change("read-mailbox-entry-is-released", Delete()),
        Change("mailbox-entry-of-a-failed-step-is-released", Delete()),
    ),
    Fault("H9", "the host uses tokens sampled from logits that are NaN").without(
        "non-finite-logits-are-reported", SetOperand("finite", "drawn.finite | True"), needs={"bad_logits"}
    ),
    Fault("H18", "an answer has tokens that its grammar does not allow").without(
        "masked-tokens-are-not-sampled",
        Delete(),
        Change("masked-tokens-are-not-sampled-with-logprobs", Delete()),
        needs={"grammar"},
    ),
    Fault("H18", "a step is sampled without the masks of a new request").without(
        "slot-begins-with-its-need-of-masks", needs={"grammar"}
    ),
    Fault("H22", "the mailbox runs out of slots").without("read-mailbox-entry-is-released"),
    Fault("H22", "each failed step leaks a mailbox slot").without(
        "mailbox-entry-of-a-failed-step-is-released", needs={"failing_step"}
    ),
)

EQUIVALENT = (
    Fault("H2", "a step does not wait for the last use of its blocks")
    .without("step-waits-for-the-last-use", needs={"offload"})
    .unseen(
        "steps run in launch order; blocks with other uses are released only after the host has seen those uses end",
        "engine/test_offload.py::test_a_step_waits_for_the_fences_of_its_plan",
    ),
    Fault("H16", "until its first sample, a request slot holds the last token of its previous owner")
    .without("slot-begins-with-its-last-token")
    .unseen("prefill chunks carry their tokens, and the last chunk samples the token that the first decode step reads"),
    Fault("H17", "the host overwrites masks that a sampler still reads")
    .without("masks-are-written-after-their-last-use", Never())
    .unseen(
        "a step is sampled after the commit of the step before it, whose sampler has therefore ended",
        "engine/test_structured.py::test_masks_and_drafts_are_refused_while_a_step_uses_them",
    ),
    Fault("H17", "masks that are written while a sampler reads them raise no error")
    .without("masks-are-kept-until-they-were-read")
    .unseen(
        "see masks-are-written-after-their-last-use",
        "engine/test_structured.py::test_masks_and_drafts_are_refused_while_a_step_uses_them",
    ),
    Fault("H17", "the host reads the drafts of an earlier step")
    .without("drafts-are-read-after-their-pass", Never())
    .unseen(
        "the engine waits for the pass",
        "engine/test_structured.py::test_masks_and_drafts_are_refused_while_a_step_uses_them",
    ),
    Fault("H17", "the host reads log-probabilities of an earlier step's prompt")
    .without("log-probabilities-are-read-after-their-step", Never())
    .unreached(
        "the engine waits for the step",
        "runner/test_mailbox.py::test_log_probabilities_of_prompts_are_read_after_the_fence",
    ),
    Fault("H18", "a request gets log-probabilities of its slot's last owner's prompt")
    .without("slot-forgets-the-last-owners-prompt")
    .unseen(
        "workloads ask for no log-probabilities of prompts",
        "test_prompt_logprobs.py::test_samples_and_streams_have_log_probabilities_of_the_prompt",
    ),
    Fault("H19", "answers with a grammar take one step for each token")
    .without("forced-tokens-are-drafted")
    .unreached(_NO_FORCED, "engine/test_jump_ahead.py::test_tokens_and_log_probabilities_are_those_without_drafts"),
    Fault("H19", "forced tokens are drafted at a wrong position, and rejected")
    .without("forced-drafts-begin-behind-the-row", Rewrite(" - ", " - 1 - "))
    .unreached(
        _NO_FORCED, "ops/test_argmax_and_ngram.py::test_forced_tokens_replace_the_drafts_behind_their_own_beginning"
    ),
    Fault("H19", "forced tokens are drafted behind other tokens, and rejected")
    .without("forced-drafts-follow-their-own-beginning", Rewrite(" == ", " <= "))
    .unreached(
        _NO_FORCED, "ops/test_argmax_and_ngram.py::test_forced_tokens_replace_the_drafts_behind_their_own_beginning"
    ),
    Fault("H18", "a request gets drafts from the grammar of its slot's last owner")
    .without("slot-begins-without-forced-tokens")
    .unreached(_NO_FORCED, "runner/test_state.py::test_a_slot_begins_without_the_forced_tokens_of_its_last_owner"),
    Fault("H19", "masks are made for other drafts than those of the step, so an answer leaves its grammar")
    .without("forced-drafts-are-known-to-the-host", Never())
    .unreached(_NO_FORCED, "engine/test_jump_ahead.py::test_forced_tokens_count_behind_their_own_beginning_only"),
)

_WARM_UP = "it runs before the engine serves; tests/attention/test_engine_in_interpreter.py runs it"

_UNPLACED = (
    "the simulated device always has room for a table's changes; "
    "tests/attention/test_engine_in_interpreter.py::test_a_failure_to_fill_a_graph_does_not_change_the_next_step "
    "lets it have none"
)

EXEMPT = (
    Exempt("Executor.sample", ("replace",), "it copies a value"),
    Exempt("Executor._prepare", ("replace",), "it copies a value"),
    Exempt("Executor.capture", ("gates=",), "a stream"),
    Exempt("Executor.warm_up", ("after=", "gates=", "wait_host", "drop", "failure"), _WARM_UP),
    Exempt("Executor.launch", ("begin",), "see slot-begins-on-the-host and step-samples-in-the-mode-of-its-rows"),
    Exempt("Executor.launch", ("begin",), "see slot-forgets-the-last-owners-prompt"),
    Exempt("StepWork.running", ("forget",), _UNPLACED),
    Exempt("BlockTableMirror.changes", ("extend", "extend"), "a list"),
    Exempt("Graphs.delete", ("clear", "clear"), "a dict"),
    Exempt("Graphs._finish", ("wait_host", "failure"), _WARM_UP),
    Exempt("GraphKey.all_of", ("replace",), "it copies a value"),
    Exempt("StepInputs.without_padding", ("replace", "replace"), "a value"),
    Exempt("_fetch", ("add",), "a sum"),
)
