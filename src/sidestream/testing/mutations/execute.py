"""The executor's rules: what a flight waits for, what a row keeps, and who owns a mailbox slot."""

from __future__ import annotations

from sidestream.testing.mutations.mechanism import Edit, Equivalent, Exempt, Mutation

_EXECUTOR = "sidestream.execute.executor:Executor"
_GRAPHS = "sidestream.execute.graphs:Graphs"
_FLIGHT = "sidestream.execute.executor:Flight"
_MAILBOX = "sidestream.execute.mailbox:Mailbox"
_STATE = "sidestream.execute.state:DecodeState"

MUTATIONS = (
    Mutation(
        name="layer-waits-for-its-load",
        hazard="H5",
        target=f"{_EXECUTOR}._gate",
        old="        for fence in gates.by_layer[layer]:\n            self._stream.wait(fence)\n",
        new="",
        removes="a flight reads blocks that a load is still writing",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="row-begins-on-the-device",
        hazard="H16",
        target=f"{_EXECUTOR}._run",
        old="                if row.begin is not None:\n",
        new="                if row.begin is not None and not row.begin.outputs:\n",
        removes="a request that comes back draws with what the row's owner before it left there",
        needs=frozenset({"preempt"}),
    ),
    Mutation(
        name="row-begins-on-the-host",
        hazard="H16",
        target=f"{_EXECUTOR}.launch",
        old="            self._wanted_logprobs[row.row] = row.begin.sampling.top_logprobs\n",
        new="            self._wanted_logprobs.setdefault(row.row, row.begin.sampling.top_logprobs)\n",
        removes="a request gets the log-probabilities that the row's owner before it asked for",
        needs=frozenset({"logprobs"}),
    ),
    Mutation(
        name="row-forgets-its-owner's-outputs",
        hazard="H16",
        target=f"{_STATE}._fill_tables",
        old="    counts[row].zero_()\n",
        new="",
        removes="a request is penalised for tokens that the row's owner before it was given",
        needs=frozenset({"sampling"}),
    ),
    Mutation(
        name="row-forgets-its-owner's-prompt",
        hazard="H16",
        target=f"{_STATE}._fill_tables",
        old="    in_prompt[row].zero_()\n",
        new="",
        removes="a request is penalised for tokens in the prompt of the row's owner before it",
        needs=frozenset({"sampling"}),
    ),
    Mutation(
        name="row-remembers-outputs-from-before-a-retraction",
        hazard="H16",
        target=f"{_STATE}._fill_tables",
        old="    counts[row].index_add_(0, outputs, torch.ones_like(outputs, dtype=counts.dtype))\n",
        new="",
        removes="a request that comes back is not penalised for what it was given before",
        needs=frozenset({"preempt", "sampling"}),
    ),
    Mutation(
        name="drawn-token-stays-on-the-device",
        hazard="H19",
        target=f"{_STATE}.commit",
        old="    self.last[self.index(rows)] = tokens\n",
        new="",
        removes="the next step continues from the token before the last",
    ),
    # ------------------------------------------------------------------ captured passes
    Mutation(
        name="gate-is-recorded-behind-its-loads",
        hazard="H5",
        target=f"{_GRAPHS}.close_gates",
        old="            self._gates.wait(fence)\n",
        new="            pass\n",
        removes="a captured pass goes on before the layers that it waits for are loaded",
        needs=frozenset({"offload", "captured"}),
    ),
    Mutation(
        name="batch-with-a-load-takes-the-gated-graph",
        hazard="H5",
        target=f"{_GRAPHS}.replay",
        old="captured.gated if gated else captured.plain",
        new="captured.plain",
        removes="a batch whose blocks are on their way is computed by the graph that waits for nothing",
        needs=frozenset({"offload", "captured"}),
    ),
    Mutation(
        name="gate-is-recorded-for-each-flight",
        hazard="H5",
        target=f"{_GRAPHS}.close_gates",
        old="        event.record(self._gates)\n",
        new="",
        removes="a captured pass waits for the loads of an earlier one",
        needs=frozenset({"offload", "captured"}),
    ),
    Mutation(
        name="table-of-a-row-is-its-owners",
        hazard="H16",
        target="sidestream.execute.frame:TableKeeper.changes",
        old="len(held) if wanted[: len(held)] == held else 0",
        new="min(len(held), len(wanted))",
        removes="a captured pass reads and writes the blocks of the row's owner before",
        needs=frozenset({"captured"}),
    ),
    Mutation(
        name="changed-blocks-reach-the-device",
        hazard="H16",
        target=f"{_EXECUTOR}._run",
        old="                self._state.place(changes.places, changes.blocks)\n",
        new="                pass\n",
        removes="a captured pass writes to whatever block its table was made with",
        needs=frozenset({"captured"}),
    ),
    Mutation(
        name="frame-is-filled-before-its-replay",
        hazard="H18",
        target=f"{_EXECUTOR}._captured_work",
        old="        captured.frame.fill(numbers)\n",
        new="",
        removes="a captured pass computes the batch before it again",
        needs=frozenset({"captured"}),
    ),
    Mutation(
        name="letters-have-their-own-slots",
        hazard="H17",
        target="sidestream.execute.mailbox:Letter.start",
        old="return self.lease.ids[0] * self.num_bytes",
        new="return 0",
        removes="a flight writes what it drew over what the host has not read yet",
    ),
    Mutation(
        name="letter-is-held-until-it-was-read",
        hazard="H17",
        target=f"{_MAILBOX}.address",
        old="    return Letter(self._pool.take(1), self._slot_bytes)\n",
        new="    lease = self._pool.take(1)\n    lease.release()\n    return Letter(lease, self._slot_bytes)\n",
        removes="a slot of the mailbox is free while its flight has yet to write and the host to read",
        also=(
            Edit(f"{_MAILBOX}.read", "    letter.lease.release(after=(fence,))\n", ""),
            Edit(f"{_FLIGHT}.drop", "    self.letter.lease.release(after=(self.fence,))\n", "    return\n"),
        ),
    ),
    Mutation(
        name="broken-logits-are-told",
        hazard="H9",
        target=f"{_MAILBOX}.write",
        old='"finite": drawn.finite}',
        new='"finite": drawn.finite | True}',
        removes="the host believes what was drawn from logits that are no numbers",
        needs=frozenset({"bad_logits"}),
    ),
    Mutation(
        name="read-letter-is-given-back",
        hazard="H22",
        target=f"{_MAILBOX}.read",
        old="    letter.lease.release(after=(fence,))\n",
        new="",
        removes="the mailbox runs out of slots",
    ),
    Mutation(
        name="letter-of-a-failed-flight-is-given-back",
        hazard="H22",
        target=f"{_FLIGHT}.drop",
        old="    self.letter.lease.release(after=(self.fence,))\n",
        new="    return\n",
        removes="each failed flight takes a slot of the mailbox with it",
        needs=frozenset({"failing_flight"}),
    ),
)

EQUIVALENT = (
    Equivalent(
        Mutation(
            name="flight-waits-for-the-last-use",
            hazard="H2",
            target=f"{_EXECUTOR}.launch",
            old="    for fence in after:\n        self._stream.wait(fence)\n",
            new="",
            removes="a flight does not wait for the last use of its blocks",
            needs=frozenset({"offload"}),
        ),
        "flights run in the order of their launch, and blocks that anything else uses come back when the host has seen the end of that use",
        noticed_by="engine/test_offload.py::test_flight_waits_for_what_it_is_told_to_wait_for",
    ),
    Equivalent(
        Mutation(
            name="row-begins-with-its-last-token",
            hazard="H16",
            target=f"{_STATE}.begin",
            old="    self.last[row : row + 1].fill_((0, *start.prompt[-1:], *start.outputs[-1:])[-1])\n",
            new="",
            removes="a row's last token is its owner's before, until the first draw",
        ),
        "a row's first chunks carry their tokens, and the last of them draws one before a decode step asks for it",
    ),
)

_WARM_UP = "before anything is served; tests/attention/test_engine_in_interpreter.py runs it"

_UNPLACED = (
    "the simulated device always has room for a table's changes; "
    "tests/attention/test_engine_in_interpreter.py::test_a_graph_that_could_not_be_filled_leaves_the_next_flight_right lets it have none"
)

EXEMPT = (
    Exempt(f"{_EXECUTOR}.warm_up", "replace(row, start=1", "a value"),
    Exempt(f"{_EXECUTOR}.capture", "gates=self._gates,", "a stream"),
    Exempt(f"{_EXECUTOR}._run_for_nothing", "after=(), gates=LayerGates()", _WARM_UP),
    Exempt(f"{_EXECUTOR}._run_for_nothing", 'self._device.wait_host(flight.fence, reason="flight")', _WARM_UP),
    Exempt(f"{_EXECUTOR}._run_for_nothing", "flight.drop()", _WARM_UP),
    Exempt(f"{_EXECUTOR}._run_for_nothing", "if flight.fence.failure is not None:", _WARM_UP),
    Exempt("sidestream.execute.inputs:StepInputs.to", "replace(self, **moved)", "a value"),
    Exempt("sidestream.execute.frame:TableKeeper.changes", "places.extend(range(base + kept, base + len(wanted)))", "a list"),
    Exempt("sidestream.execute.frame:TableKeeper.changes", "blocks.extend(wanted[kept:])", "a list"),
    Exempt(f"{_EXECUTOR}._run", "self._tables.forget()", _UNPLACED),
    Exempt(f"{_GRAPHS}._finish", 'self._device.wait_host(fence, reason="flight")', _WARM_UP),
    Exempt(f"{_GRAPHS}._finish", "if fence.failure is not None:", _WARM_UP),
    Exempt(f"{_EXECUTOR}._run", "self._state.begin(row.row, row.begin)", "see row-begins-on-the-device"),
    Exempt(f"{_EXECUTOR}._run", "self._state.commit(rows, drawn.tokens)", "see drawn-token-stays-on-the-device"),
)
