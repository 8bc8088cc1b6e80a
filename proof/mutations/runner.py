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
from proof.mutations.tables import Change, Equivalent, Exempt, Mutation

_NO_FORCED = "no schedule has drafts in answers with a grammar"

MUTATIONS = (
    Mutation(
        name="token-ids-are-read-whole",
        hazard="H9",
        change=Rewrite(".tolist()", ".astype(np.int16).tolist()"),
        consequence="clients receive other tokens if the vocabulary has more than 32,768",
    ),
    Mutation(
        name="layer-waits-for-its-load",
        hazard="H5",
        consequence="a step reads blocks that a load is still writing",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="slot-begins-on-the-device",
        hazard="H16",
        change=Become("begins[0][1].outputs or self._state.begin(begins)"),
        consequence="a readmitted request samples with the state of the request slot's previous owner",
        needs=frozenset({"preempt"}),
    ),
    Mutation(
        name="slot-begins-on-the-host",
        hazard="H16",
        consequence="a request gets the log-probabilities requested by the request slot's previous owner",
        needs=frozenset({"logprobs"}),
    ),
    Mutation(
        name="step-samples-in-the-mode-of-its-rows",
        hazard="H16",
        consequence="a step samples by argmax although a row has a temperature or penalties",
        needs=frozenset({"sampling"}),
    ),
    Mutation(
        name="row-samples-with-its-own-options",
        hazard="H16",
        consequence="a request samples with the temperature, filters and seed of the request slot's previous owner",
        needs=frozenset({"sampling"}),
    ),
    Mutation(
        name="ban-lasts-until-min-tokens",
        hazard="H19",
        change=SetOperand("min_tokens", "outputs >= 1"),
        consequence="a captured step samples an end token before the minimum length",
        needs=frozenset({"captured", "min_tokens"}),
        also=(Change("ban-is-needed", SetOperand("min_tokens", "outputs < 1")),),
    ),
    Mutation(
        name="sampling-uses-the-index-of-its-output",
        hazard="H19",
        change=Value("output.positions[:count] - state.rules.prompt_len[slots]"),
        consequence="a token is sampled with the random number of the previous token",
        needs=frozenset({"sampling"}),
    ),
    Mutation(
        name="sampled-tokens-count-for-later-penalties",
        hazard="H19",
        change=SetArgument("slot_tensors", "counted", "False"),
        consequence="a sampled token is not penalised when it repeats",
        needs=frozenset({"sampling"}),
    ),
    Mutation(
        name="captured-sampling-suits-every-row",
        hazard="H16",
        change=CallInstead("max", "min"),
        consequence="a step samples all rows in the mode of its simplest row",
        needs=frozenset({"captured", "sampling"}),
    ),
    Mutation(
        name="slot-drops-outputs-of-its-last-owner",
        hazard="H16",
        at="slot-drops-outputs-before",
        consequence="a request is penalised for output tokens of the request slot's previous owner",
        needs=frozenset({"sampling"}),
    ),
    Mutation(
        name="slot-drops-the-prompt-of-its-last-owner",
        hazard="H16",
        at="slot-drops-prompt-before",
        consequence="a request is penalised for prompt tokens of the request slot's previous owner",
        needs=frozenset({"penalties"}),
    ),
    Mutation(
        name="slot-keeps-outputs-from-before-a-preemption",
        hazard="H16",
        consequence="a readmitted request is not penalised for its earlier output",
        needs=frozenset({"preempt", "sampling"}),
    ),
    Mutation(
        name="sampled-token-stays-on-the-device",
        hazard="H19",
        consequence="the next step continues from the token before the sampled one",
    ),
    # ------------------------------------------------------------------ drafts
    Mutation(
        name="accepted-run-is-published-before-the-next-step-reads-it",
        hazard="H19",
        change=Become(
            "state.history[slot[:, None], column.clamp(max=start[:, None] + 1)] = drawn.to(torch.int32)[:, :1]"
        ),
        consequence="the next step drafts from stale history: the text is right, but few drafts are accepted",
        needs=frozenset({"speculative"}),
    ),
    Mutation(
        name="length-is-published-by-its-step",
        hazard="H19",
        change=Value("start + 1"),
        consequence="the next step starts at a position whose drafts were accepted already",
        needs=frozenset({"speculative"}),
    ),
    Mutation(
        name="last-token-is-the-last-accepted-one",
        hazard="H19",
        change=Value("drawn[:, 0]"),
        consequence="the next step continues from the first token of an accepted run",
        needs=frozenset({"speculative"}),
    ),
    Mutation(
        name="row-positions-come-from-the-device",
        hazard="H19",
        change=Value("starts + counts < starts"),
        consequence="a step computes at the host's outdated position",
        needs=frozenset({"speculative"}),
    ),
    Mutation(
        name="slot-begins-with-its-own-history",
        hazard="H16",
        consequence="a request's drafts are made from tokens of the request slot's previous owner",
        needs=frozenset({"speculative"}),
    ),
    Mutation(
        name="only-verified-drafts-are-accepted",
        hazard="H19",
        change=Value("1 + num_drafts"),
        consequence="tokens sampled after a rejected draft are sent to the client",
        needs=frozenset({"speculative"}),
    ),
    Mutation(
        name="drafts-count-for-later-penalties-in-their-row",
        hazard="H19",
        change=Value("None"),
        consequence="a token is not penalised for its repetition within an accepted run",
        needs=frozenset({"speculative", "penalties"}),
    ),
    Mutation(
        name="accepted-tokens-count-for-later-penalties",
        hazard="H19",
        change=Rewrite(".to(torch.int32)", ".to(torch.int32).tril()"),
        consequence="accepted drafts of a step's first rows are not counted as output",
        needs=frozenset({"speculative", "penalties"}),
    ),
    Mutation(
        name="host-reads-accept-lengths",
        hazard="H19",
        change=Compare("<"),
        consequence="the host takes only one token of each accepted run",
        needs=frozenset({"speculative"}),
    ),
    # ------------------------------------------------------------------ steps that run twice
    Mutation(
        name="second-run-is-part-of-its-step",
        hazard="H3",
        change=Become(
            "inputs, output = self._run_once(batch, step)\n"
            "batch.self_check and self._stream.submit(lambda: self._run_twice(batch, step), label='second run')"
        ),
        consequence="a step's fence does not cover its second run, which writes blocks that have another owner",
        needs=frozenset({"self_check"}),
    ),
    Mutation(
        name="second-run-comes-before-sampling",
        hazard="H19",
        at="second-run-is-part-of-its-step",
        change=Become(
            "inputs, output = self._run_once(batch, step)\n"
            "batch.self_check and self._sample(batch, step, inputs, output)\n"
            "inputs, output = self._run_twice(batch, step) if batch.self_check else (inputs, output)"
        ),
        consequence="the second run reads the tokens that the first one sampled",
        needs=frozenset({"self_check"}),
    ),
    Mutation(
        name="second-run-begins-with-the-hidden-states-of-the-first",
        hazard="H19",
        consequence="the second run drafts from hidden states that the first run kept for the next step",
        needs=frozenset({"self_check", "hidden_states"}),
    ),
    # ------------------------------------------------------------------ hidden states
    Mutation(
        name="captured-samples-go-to-their-mailbox-entry",
        hazard="H17",
        consequence="two captured steps write their samples to the same place",
        needs=frozenset({"captured"}),
    ),
    Mutation(
        name="padding-rows-sample-no-token",
        hazard="H18",
        change=Unwrap("where", 2),
        consequence="samples of padding rows count as samples of a request",
        needs=frozenset({"captured"}),
    ),
    Mutation(
        name="hidden-state-is-of-the-last-accepted-token",
        hazard="H19",
        change=Value("hidden[logit[:, 0]]"),
        consequence="the next step drafts from the accepted run's start: the text is right, but few drafts are "
        "accepted",
        needs=frozenset({"hidden_states"}),
    ),
    Mutation(
        name="drafting-stays-in-the-blocks-of-its-row",
        hazard="H11",
        change=Unwrap("minimum"),
        consequence="the proposer writes KV beyond the blocks of a row with few drafts, into another owner's block",
        needs=frozenset({"hidden_states"}),
    ),
    Mutation(
        name="hidden-state-comes-back-with-its-block",
        hazard="H15",
        change=Never(),
        consequence="after a cached prefix, drafts are made as if there was no prefix",
        needs=frozenset({"hidden_states"}),
    ),
    Mutation(
        name="hidden-states-wait-for-their-load",
        hazard="H15",
        consequence="the hidden state of a block is read before it was loaded",
        needs=frozenset({"hidden_states", "offload"}),
    ),
    Mutation(
        name="hidden-state-is-written-to-its-block",
        hazard="H15",
        consequence="a block is found without its hidden state",
        needs=frozenset({"hidden_states"}),
    ),
    Mutation(
        name="next-chunk-reads-the-hidden-state-of-the-last-chunk",
        hazard="H19",
        consequence="a prefill chunk reads the hidden state of the request slot's previous owner",
        needs=frozenset({"hidden_states"}),
    ),
    Mutation(
        name="proposer-runs-in-every-step",
        hazard="H15",
        change=Value("not continues and proposed is None"),
        consequence="the drafter's KV lacks verified tokens",
        needs=frozenset({"hidden_states"}),
    ),
    # ------------------------------------------------------------------ captured passes
    Mutation(
        name="proposer-branch-is-joined",
        hazard="H15",
        consequence="the next step drafts from KV that is not written yet",
        needs=frozenset({"hidden_states", "captured"}),
    ),
    Mutation(
        name="gate-is-recorded-behind-its-loads",
        hazard="H5",
        consequence="a captured pass continues before the layers that it waits for are loaded",
        needs=frozenset({"offload", "captured"}),
    ),
    Mutation(
        name="captured-layer-waits-for-its-load",
        hazard="H5",
        change=Never(),
        consequence="a captured pass waits for no load",
        needs=frozenset({"offload", "captured"}),
    ),
    Mutation(
        name="first-captured-layer-waits-for-its-load",
        hazard="H5",
        at="captured-layer-waits-for-its-load",
        change=Rewrite("self._starts", "self._starts[1:]"),
        consequence="a captured pass reads its first layers before they are loaded",
        needs=frozenset({"offload", "captured"}),
    ),
    Mutation(
        name="middle-captured-layers-wait-for-their-load",
        hazard="H5",
        at="captured-layer-waits-for-its-load",
        change=Rewrite("self._starts", "(self._starts[0], self._starts[-1])"),
        consequence="a captured pass reads layers in the middle before they are loaded",
        needs=frozenset({"offload", "captured", "layer_groups"}),
    ),
    Mutation(
        name="last-captured-layers-wait-for-their-load",
        hazard="H5",
        at="captured-layer-waits-for-its-load",
        change=Rewrite("self._starts", "self._starts[:-1]"),
        consequence="a captured pass reads its last layers before they are loaded",
        needs=frozenset({"offload", "captured"}),
    ),
    Mutation(
        name="batch-with-loads-replays-the-gated-graph",
        hazard="H5",
        change=Never(),
        consequence="a batch with running loads is computed by the graph without gates",
        needs=frozenset({"offload", "captured"}),
    ),
    Mutation(
        name="gate-is-recorded-for-each-step",
        hazard="H5",
        consequence="a captured pass waits for the loads of an earlier one",
        needs=frozenset({"offload", "captured"}),
    ),
    Mutation(
        name="block-table-belongs-to-its-slots-owner",
        hazard="H16",
        change=Value("min(len(held), len(block_table))"),
        consequence="a captured pass reads and writes the blocks of the request slot's previous owner",
        needs=frozenset({"captured"}),
    ),
    Mutation(
        name="changed-blocks-reach-the-device",
        hazard="H16",
        consequence="a captured pass writes to the block that its table had at capture",
        needs=frozenset({"captured"}),
    ),
    Mutation(
        name="captured-inputs-are-filled-before-the-replay",
        hazard="H18",
        consequence="a captured pass computes the previous batch again",
        needs=frozenset({"captured"}),
    ),
    Mutation(
        name="mailbox-entries-do-not-overlap",
        hazard="H17",
        change=Value("0"),
        consequence="a step overwrites results that the host has not read yet",
    ),
    Mutation(
        name="mailbox-entry-is-leased-until-read",
        hazard="H17",
        change=Become(
            "lease = self._pool.take(1)\n"
            "lease.release()\n"
            "return MailboxEntry(self._memory.name, lease, self._entry_bytes)"
        ),
        consequence="a mailbox slot is free before its step has written it and the host has read it",
        also=(
            Change("read-mailbox-entry-is-released", Delete()),
            Change("mailbox-entry-of-a-failed-step-is-released", Delete()),
        ),
    ),
    Mutation(
        name="non-finite-logits-are-reported",
        hazard="H9",
        change=SetOperand("finite", "drawn.finite | True"),
        consequence="the host uses tokens sampled from logits that are NaN",
        needs=frozenset({"bad_logits"}),
    ),
    Mutation(
        name="masked-tokens-are-not-sampled",
        hazard="H18",
        consequence="an answer has tokens that its grammar does not allow",
        needs=frozenset({"grammar"}),
        also=(Change("masked-tokens-are-not-sampled-with-logprobs", Delete()),),
    ),
    Mutation(
        name="slot-begins-with-its-need-of-masks",
        hazard="H18",
        consequence="a step is sampled without the masks of a new request",
        needs=frozenset({"grammar"}),
    ),
    Mutation(
        name="read-mailbox-entry-is-released",
        hazard="H22",
        consequence="the mailbox runs out of slots",
    ),
    Mutation(
        name="mailbox-entry-of-a-failed-step-is-released",
        hazard="H22",
        consequence="each failed step leaks a mailbox slot",
        needs=frozenset({"failing_step"}),
    ),
)

EQUIVALENT = (
    Equivalent(
        Mutation(
            name="step-waits-for-the-last-use",
            hazard="H2",
            consequence="a step does not wait for the last use of its blocks",
            needs=frozenset({"offload"}),
        ),
        "steps run in launch order; blocks with other uses are released only after the host has seen those uses end",
        noticed_by="engine/test_offload.py::test_a_step_waits_for_the_fences_of_its_plan",
    ),
    Equivalent(
        Mutation(
            name="slot-begins-with-its-last-token",
            hazard="H16",
            consequence="until its first sample, a request slot holds the last token of its previous owner",
        ),
        "prefill chunks carry their tokens, and the last chunk samples the token that the first decode step reads",
    ),
    Equivalent(
        Mutation(
            name="masks-are-written-after-their-last-use",
            hazard="H17",
            change=Never(),
            consequence="the host overwrites masks that a sampler still reads",
        ),
        "a step is sampled after the commit of the step before it, whose sampler has therefore ended",
        noticed_by="engine/test_structured.py::test_masks_and_drafts_are_refused_while_a_step_uses_them",
    ),
    Equivalent(
        Mutation(
            name="masks-are-kept-until-they-were-read",
            hazard="H17",
            consequence="masks that are written while a sampler reads them raise no error",
        ),
        "see masks-are-written-after-their-last-use",
        noticed_by="engine/test_structured.py::test_masks_and_drafts_are_refused_while_a_step_uses_them",
    ),
    Equivalent(
        Mutation(
            name="drafts-are-read-after-their-pass",
            hazard="H17",
            change=Never(),
            consequence="the host reads the drafts of an earlier step",
        ),
        "the engine waits for the pass",
        noticed_by="engine/test_structured.py::test_masks_and_drafts_are_refused_while_a_step_uses_them",
    ),
    Equivalent(
        Mutation(
            name="log-probabilities-are-read-after-their-step",
            hazard="H17",
            change=Never(),
            consequence="the host reads log-probabilities of an earlier step's prompt",
        ),
        "the engine waits for the step",
        noticed_by="runner/test_mailbox.py::test_log_probabilities_of_prompts_are_read_after_the_fence",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="slot-forgets-the-last-owners-prompt",
            hazard="H18",
            consequence="a request gets log-probabilities of its slot's last owner's prompt",
        ),
        "workloads ask for no log-probabilities of prompts",
        noticed_by="test_prompt_logprobs.py::test_samples_and_streams_have_log_probabilities_of_the_prompt",
    ),
    Equivalent(
        Mutation(
            name="forced-tokens-are-drafted",
            hazard="H19",
            consequence="answers with a grammar take one step for each token",
        ),
        _NO_FORCED,
        noticed_by="engine/test_jump_ahead.py::test_tokens_and_log_probabilities_are_those_without_drafts",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="forced-drafts-begin-behind-the-row",
            hazard="H19",
            change=Rewrite(" - ", " - 1 - "),
            consequence="forced tokens are drafted at a wrong position, and rejected",
        ),
        _NO_FORCED,
        noticed_by="ops/test_argmax_and_ngram.py::test_forced_tokens_replace_the_drafts_behind_their_own_beginning",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="forced-drafts-follow-their-own-beginning",
            hazard="H19",
            change=Rewrite(" == ", " <= "),
            consequence="forced tokens are drafted behind other tokens, and rejected",
        ),
        _NO_FORCED,
        noticed_by="ops/test_argmax_and_ngram.py::test_forced_tokens_replace_the_drafts_behind_their_own_beginning",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="slot-begins-without-forced-tokens",
            hazard="H18",
            consequence="a request gets drafts from the grammar of its slot's last owner",
        ),
        _NO_FORCED,
        noticed_by="runner/test_state.py::test_a_slot_begins_without_the_forced_tokens_of_its_last_owner",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="forced-drafts-are-known-to-the-host",
            hazard="H19",
            change=Never(),
            consequence="masks are made for other drafts than those of the step, so an answer leaves its grammar",
        ),
        _NO_FORCED,
        noticed_by="engine/test_jump_ahead.py::test_forced_tokens_count_behind_their_own_beginning_only",
        unreached=True,
    ),
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
