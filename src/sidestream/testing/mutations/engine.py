"""The loop's rules: the order of submission, launch and commit, what is believed of a step, and who is told when."""

from __future__ import annotations

from sidestream.testing.mutations.mechanism import Edit, Equivalent, Exempt, Mutation

_ENGINE = "sidestream.engine.engine:Engine"
_LOOP = "sidestream.engine.loop:StepLoop"
_LISTENER = "sidestream.engine.listening:Listener"
_STREAMS = "sidestream.engine.output_stream:OutputStreams"
_WEIGHTS = "sidestream.engine.weights:WeightUpdates"
_FAILURES = "sidestream.engine.failures:Failures"
_BUILD = "sidestream.engine.build"
_MAILBOX = "sidestream.runner.mailbox:Mailbox"

MUTATIONS = (
    Mutation(
        name="store-is-ordered-before-its-blocks-are-released",
        hazard="H23",
        target=f"{_LOOP}._commit",
        old="        parts.transfers.submit([store])\n",
        new="        pass\n",
        removes="a request that ends gives its blocks back as if nothing was to be stored of them",
        needs=frozenset({"offload"}),
        also=(
            Edit(
                f"{_LOOP}._commit",
                "    self._streams.finish(endings)\n",
                "    self._streams.finish(endings)\n"
                "    if parts.transfers is not None and store is not None:\n        parts.transfers.submit([store])\n",
            ),
        ),
    ),
    Mutation(
        name="what-was-completed-is-published-before-its-requests-end",
        hazard="H23",
        target=f"{_LOOP}._commit",
        old="    store = parts.scheduler.publish(committed)\n",
        new="    store = None\n",
        removes="blocks are made findable when their request has given them back",
        also=(
            Edit(
                f"{_LOOP}._commit",
                "    self._streams.finish(endings)\n",
                "    self._streams.finish(endings)\n    parts.scheduler.publish(committed)\n",
            ),
        ),
    ),
    Mutation(
        name="launched-step-is-noted",
        hazard="H16",
        target=f"{_LOOP}._launch",
        old="    parts.scheduler.launched(plan.batch, step.fence)\n",
        new="",
        removes="requests that end do not know which step still uses what they release",
    ),
    Mutation(
        name="commit-waits-for-its-step",
        hazard="H12",
        target=f"{_LOOP}._commit",
        old="    self._listener.wait_for(step.fence)\n",
        new="",
        removes="the host believes a step that the device has not run",
        also=(
            Edit(
                f"{_MAILBOX}.read",
                '    if not fence.poll():\n        raise InvariantError(f"the mailbox was read before {fence!r}")\n',
                "",
            ),
        ),
    ),
    Mutation(
        name="who-was-rung-up-waits-on",
        hazard="H12",
        target=f"{_LISTENER}.wait_for",
        old='    while not wait_host(fence, reason="step", bell=self._inbox.bell):\n',
        new='    if not wait_host(fence, reason="step", bell=self._inbox.bell):\n',
        removes="whoever rings ends the wait for a step, and the host believes what the device has not run",
        needs=frozenset({"offload"}),
        also=(
            Edit(
                f"{_MAILBOX}.read",
                '    if not fence.poll():\n        raise InvariantError(f"the mailbox was read before {fence!r}")\n',
                "",
            ),
        ),
    ),
    Mutation(
        name="loads-ordered-meanwhile-are-submitted",
        hazard="H26",
        target=f"{_LISTENER}._listen",
        old="        transfers.submit(self._scheduler.order_loads())\n",
        new="        self._scheduler.order_loads()\n",
        removes="a request that came while a step was awaited waits for a load that nobody was told of",
        needs=frozenset({"offload", "meanwhile"}),
    ),
    Mutation(
        name="failed-step-is-not-believed",
        hazard="H9",
        target=f"{_LOOP}._commit",
        old="    if step.fence.failure is not None:\n        self._failures.end_step(step)\n        return\n",
        new="",
        removes="what a failed step left in the mailbox goes to clients, and its blocks are findable",
        needs=frozenset({"failing_step"}),
    ),
    Mutation(
        name="failed-step-ends-its-requests",
        hazard="H22",
        target=f"{_FAILURES}.end_step",
        old=(
            "        if self._is_current(row):\n"
            '            self._streams.end_sample(row.request_id, "error", f"the forward pass failed: {failure}")\n'
        ),
        new="        pass\n",
        removes="requests of a failed step hold what they hold, and nobody hears of them again",
        needs=frozenset({"failing_step"}),
    ),
    Mutation(
        name="broken-logits-end-their-request",
        hazard="H9",
        target=f"{_STREAMS}.send",
        old="or not result.finite:",
        new="or (not result.finite and not result):",
        removes="a request goes on behind logits that are no numbers",
        needs=frozenset({"bad_logits"}),
    ),
    Mutation(
        name="request-ends-before-its-client-is-told",
        hazard="H24",
        target=f"{_STREAMS}.finish",
        old=("            self._close(stream.request, last.finish_reason)\n            stream.send(last)\n"),
        new="            stream.send(last)\n            self._close(stream.request, last.finish_reason)\n",
        removes="a client that hears of its request's end finds its blocks in use",
    ),
    Mutation(
        name="aborted-request-ends-before-its-client-is-told",
        hazard="H24",
        target=f"{_STREAMS}.end_sample",
        old="        self._close(stream.request, reason)\n        stream.end(reason, error)\n",
        new="        stream.end(reason, error)\n        self._close(stream.request, reason)\n",
        removes="a client that hears of its request's abort finds its blocks in use",
        needs=frozenset({"abort"}),
    ),
    Mutation(
        name="aborted-request-ends",
        hazard="H21",
        target=f"{_STREAMS}.abort",
        old="        self.end_sample(request_id, reason)\n",
        new="        pass\n",
        removes="a request goes on when its client has gone",
        needs=frozenset({"abort"}),
    ),
    Mutation(
        name="reset-reaches-the-scheduler",
        hazard="H8",
        target=f"{_ENGINE}.reset_cache",
        old="        self.parts.scheduler.forget_all()\n",
        new="",
        removes="blocks on the device are found after a reset",
        needs=frozenset({"reset"}),
    ),
    Mutation(
        name="reset-reaches-the-tiers",
        hazard="H8",
        target=f"{_ENGINE}.reset_cache",
        old="            transfers.forget_all()\n",
        new="            pass\n",
        removes="blocks in the tiers are found after a reset",
        needs=frozenset({"offload", "reset"}),
    ),
    Mutation(
        name="reset-lasts-until-the-tiers-have-forgotten",
        hazard="H8",
        target=f"{_ENGINE}.reset_cache",
        old="    while transfers is not None and not transfers.has_forgotten and self._alive:\n",
        new="    while False:\n",
        removes="a reset has ended, and blocks of before it are found in a tier",
        needs=frozenset({"offload", "reset"}),
    ),
    Mutation(
        name="load-that-is-ready-joins-a-step",
        hazard="H26",
        target=f"{_LISTENER}._apply",
        old="                scheduler.load_ready(request_id, epoch)\n",
        new="                pass\n",
        removes="a request waits for ever for blocks that are there",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="new-weights-wait-for-running-requests",
        hazard="H8",
        target=f"{_WEIGHTS}.apply",
        old="if not self._announced or self._scheduler.num_begun:",
        new="if not self._announced or self._scheduler.num_running > 1:",
        removes="weights change under a request, and its blocks hold some of the old and some of the new ones",
        needs=frozenset({"weights"}),
        also=(
            Edit(
                f"{_LOOP}._turn",
                "    if previous is None:\n        self.weights.apply()\n",
                "    self.weights.apply()\n",
            ),
        ),
    ),
    Mutation(
        name="new-weights-go-before-new-requests",
        hazard="H26",
        target=f"{_WEIGHTS}.announce",
        old="    self._scheduler.pause_admission()\n",
        new="",
        removes="requests that come after new weights were announced begin on the old ones",
        needs=frozenset({"weights"}),
    ),
    Mutation(
        name="new-weights-forget-the-tiers",
        hazard="H8",
        target=f"{_WEIGHTS}.apply",
        old="            self._transfers.forget_all()\n",
        new="            pass\n",
        removes="transfers on their way publish blocks of the old weights",
        needs=frozenset({"offload", "weights"}),
    ),
    Mutation(
        name="new-weights-have-new-keys",
        hazard="H14",
        target=f"{_WEIGHTS}.apply",
        old="BlockKeys(fingerprint=fingerprint, layout=",
        new="BlockKeys(fingerprint='', layout=",
        removes="blocks of the new weights have keys that say nothing of them",
        needs=frozenset({"weights"}),
    ),
    Mutation(
        name="new-weights-keep-the-salt",
        hazard="H14",
        target=f"{_WEIGHTS}.apply",
        old=", salt=self._salt)",
        new=")",
        removes="after new weights, engines with different salts find each other's blocks",
        needs=frozenset({"weights"}),
    ),
    Mutation(
        name="new-weights-take-the-keys-over",
        hazard="H14",
        target=f"{_WEIGHTS}.apply",
        old="        self._scheduler.rekey(",
        new="        self._scheduler.keys_of(()) or str(",
        removes="requests find, under the old keys, what the old weights computed",
        needs=frozenset({"weights"}),
    ),
    Mutation(
        name="new-weights-let-new-requests-in",
        hazard="H26",
        target=f"{_WEIGHTS}.apply",
        old="    self._scheduler.resume_admission()\n",
        new="",
        removes="nobody is admitted any more once the weights were replaced",
        needs=frozenset({"weights"}),
    ),
    Mutation(
        name="keys-name-the-served-model",
        hazard="H14",
        target=f"{_BUILD}:build_engine",
        old="BlockKeys(fingerprint=model.fingerprint, layout=model.layout, salt=config.salt)",
        new="BlockKeys(fingerprint='', layout=model.layout, salt=config.salt)",
        removes="engines of different models find each other's blocks",
    ),
    Mutation(
        name="keys-name-the-configured-salt",
        hazard="H14",
        target=f"{_BUILD}:build_engine",
        old="BlockKeys(fingerprint=model.fingerprint, layout=model.layout, salt=config.salt)",
        new="BlockKeys(fingerprint=model.fingerprint, layout=model.layout)",
        removes="an engine that was given a salt finds what engines with another one left",
    ),
    # ------------------------------------------------------------------ the end
    Mutation(
        name="last-step-lands-before-the-end",
        hazard="H10",
        target=f"{_LOOP}.drain",
        old="    self._commit(self.in_flight)\n    self.in_flight = None\n",
        new="",
        removes="a step is still on its way when what it uses is given back",
        needs=frozenset({"close"}),
    ),
    Mutation(
        name="requests-end-with-the-engine",
        hazard="H22",
        target=f"{_LOOP}.drain",
        old="    self._streams.abort_all()\n",
        new="",
        removes="an engine that was closed leaves its clients waiting, and their blocks in use",
        needs=frozenset({"close"}),
    ),
    Mutation(
        name="streams-end-before-the-disk-is-let-go-of",
        hazard="H10",
        target=f"{_ENGINE}.close",
        old=(
            "        if transfers is not None:\n            ends.callback(transfers.close)\n        ends.callback(parts.device.close)\n"
        ),
        new=(
            "        ends.callback(parts.device.close)\n        if transfers is not None:\n            ends.callback(transfers.close)\n"
        ),
        removes="another engine may open a directory that this one still writes to",
        needs=frozenset({"close", "disk"}),
    ),
    Mutation(
        name="loop-ends-before-transfers-do",
        hazard="H10",
        target=f"{_ENGINE}.close",
        old="        ends.callback(self._end_loop)\n",
        new="",
        removes="the streams end under a step that nobody takes in",
        needs=frozenset({"close"}),
    ),
)

EQUIVALENT = (
    Equivalent(
        Mutation(
            name="keys-are-made-with-the-requests-salt",
            hazard="H14",
            target=f"{_ENGINE}._keys_of",
            old="keys_of(tokens, salt=cache_salt)",
            new="keys_of(tokens)",
            removes="requests with different cache salts find each other's blocks",
        ),
        "no request of a schedule has a cache salt",
        noticed_by="engine/test_offload.py::test_requests_with_different_cache_salts_share_kv_in_no_tier",
    ),
    Equivalent(
        Mutation(
            name="tiers-learn-what-is-invalidated",
            hazard="H9",
            target=f"{_LOOP}._commit",
            old="        parts.transfers.forget(committed.invalidated)\n",
            new="        pass\n",
            removes="the same in host memory and on disk",
            needs=frozenset({"bad_logits"}),
        ),
        "the fault breaks logits alone: the KV of earlier chunks is good, and reusing it does no harm that could be seen",
        noticed_by="engine/test_failures.py::test_nothing_that_a_request_computed_is_found_after_its_logits_are_not_finite",
    ),
    Equivalent(
        Mutation(
            name="failed-load-is-known-before-its-step-is-believed",
            hazard="H9",
            target=f"{_LOOP}._commit",
            old="    self._listener.apply_events()",
            new="    ",
            removes="a token that was drawn from blocks which a load left half filled goes to its client",
            needs=frozenset({"failing_copy", "offload"}),
        ),
        "the fences of the load say the same: see failure-of-a-load-is-known-with-its-step",
    ),
    Equivalent(
        Mutation(
            name="loads-are-submitted-before-their-step-is-gated",
            hazard="H23",
            target=f"{_LOOP}._launch",
            old="        parts.transfers.submit(plan.transfers)\n        gates = parts.transfers.gates(plan.batch)\n",
            new="        gates = parts.transfers.gates(plan.batch)\n        parts.transfers.submit(plan.transfers)\n",
            removes="a step waits for the loads of earlier steps and not for its own",
            needs=frozenset({"offload"}),
        ),
        "a request joins a step when its load has all its fences, which takes the offload worker a turn: no load of this step gates a step of this step",
    ),
    Equivalent(
        Mutation(
            name="store-is-submitted-before-its-request-ends",
            hazard="H2",
            target=f"{_LOOP}._commit",
            old=(
                "    if parts.transfers is not None and store is not None:\n        parts.transfers.submit([store])\n"
            ),
            new="",
            removes="what a request completed with its last token is stored when the request holds it no more",
            needs=frozenset({"offload"}),
            also=(
                Edit(
                    f"{_LOOP}._commit",
                    "    self._streams.finish(endings)\n",
                    "    self._streams.finish(endings)\n"
                    "    if parts.transfers is not None and store is not None:\n"
                    "        parts.transfers.submit([store])\n",
                ),
            ),
        ),
        "what is to be stored is findable, so it is cached, and nobody takes blocks between the two",
    ),
    Equivalent(
        Mutation(
            name="failed-step-ends-its-own-requests",
            hazard="H10",
            target=f"{_FAILURES}._is_current",
            old="return request is not None and request.epoch == row.epoch",
            new="return request is not None",
            removes="a request that was preempted before its step failed, and would be computed again, ends with an error",
            needs=frozenset({"failing_step", "preempt"}),
        ),
        "who was in a failed step may end with its error: no answer is wrong, one is missing",
    ),
    Equivalent(
        Mutation(
            name="new-weights-are-taken-once",
            hazard="H8",
            target=f"{_WEIGHTS}.apply",
            old="    self._announced.clear()\n",
            new="",
            removes="the weights are replaced again and again",
            needs=frozenset({"weights"}),
        ),
        "they are the same weights again; what was cached meanwhile is lost, and nothing else",
    ),
    Equivalent(
        Mutation(
            name="transfers-end-before-their-streams",
            hazard="H10",
            target=f"{_ENGINE}.close",
            old="        if transfers is not None:\n            ends.callback(transfers.flush, timeout_s=flush_s)\n",
            new="",
            removes="streams end under transfers that are on their way",
            needs=frozenset({"close", "disk"}),
        ),
        "what is not flushed is lost as cache, and every oracle allows a miss",
        noticed_by="engine/test_close.py::test_tokens_of_the_last_step_are_delivered_and_its_blocks_stored",
    ),
)

_WHAT_MAY_BE_CONCLUDED = "looks at fences; what it may conclude is ruled above"
_OTHER_THREAD = "another thread's wait for the engine's; a schedule has one thread"
_NOTHING = "without it nothing is told, published or ended; when it happens is ruled above"

_MESSAGE = "a message, not a lease; a schedule calls what must come between two steps there and then. tests/engine/test_listening.py looks"
_UNBUILT = "of an engine that could not be built: nothing runs"
_WARM_UP = "before anything is served; tests/attention/test_engine_in_interpreter.py runs it"

EXEMPT = (
    Exempt(
        f"{_LOOP}._turn",
        "step.fence.failure is not None",
        "a simulated step fails when it runs, not when it is launched; on a GPU this saves the step behind it from being in vain",
    ),
    Exempt(f"{_BUILD}:build_engine", "salt=config.salt,\n", "see new-weights-keep-the-salt"),
    Exempt(f"{_BUILD}:build_engine", "undo.callback(device.close)", _UNBUILT),
    Exempt(f"{_BUILD}:build_engine", "undo.callback(stack.close)", _UNBUILT),
    Exempt(f"{_BUILD}:_open_device", "undo.callback(device.close)", _UNBUILT),
    Exempt(f"{_BUILD}:_warm_up", "lease = blocks.take(", _WARM_UP),
    Exempt(f"{_BUILD}:_warm_up", "lease.release()", _WARM_UP),
    Exempt(f"{_ENGINE}._sample", "keys_version=checked.keys_version,", "see late-request-gets-the-new-keys"),
    Exempt(f"{_ENGINE}.call", "done.wait(0.05)", _OTHER_THREAD),
    Exempt(f"{_ENGINE}._end_loop", "self._thread.join()", _OTHER_THREAD),
    Exempt(
        f"{_LOOP}._launch",
        "after=plan.after, gates=gates",
        "see step-waits-for-the-last-use and layer-waits-for-its-load",
    ),
    Exempt(
        f"{_LOOP}._turn",
        "        self._commit(previous)\n        self.in_flight = None\n        self._commit(step)\n",
        _NOTHING,
    ),
    Exempt(f"{_LOOP}._turn", "    self.in_flight = step\n    self._commit(previous)\n", _NOTHING),
    Exempt(f"{_LOOP}._launch", "self.times.launched(begin_s)", "measures; the scheduler's call is ruled above"),
    Exempt(f"{_LOOP}._commit", "parts.scheduler.commit(step.batch", _NOTHING),
    Exempt(f"{_STREAMS}.finish", "self.end_sample(", "see broken-logits-end-their-request"),
    Exempt(f"{_STREAMS}.finish", 'self._close(stream.request, "abort")', "see aborted-request-ends"),
    Exempt(f"{_STREAMS}.abort_all", 'self.end_sample(request_id, "abort")', "see requests-end-with-the-engine"),
    Exempt(f"{_STREAMS}._close", "self._serving.release()", "counts for the bound of the queue"),
    Exempt(f"{_FAILURES}.end_step", "step.drop()", "see letter-of-a-failed-step-is-given-back"),
    Exempt(f"{_STREAMS}.fail_all", "self._by_id.clear()", "the engine has failed, and nothing runs any more"),
    Exempt(f"{_LISTENER}.wait_for", '        wait_host(fence, reason="step")\n', "see commit-waits-for-its-step"),
    Exempt(f"{_LISTENER}._listen", "transfers.poll()", _WHAT_MAY_BE_CONCLUDED),
    Exempt(f"{_LISTENER}.apply_events", "self._transfers.poll()", _WHAT_MAY_BE_CONCLUDED),
    Exempt(f"{_FAILURES}.end_engine", "self._inbox.take()", _MESSAGE),
    Exempt(f"{_LISTENER}.apply_messages", "self._inbox.take(anytime=anytime)", _MESSAGE),
    Exempt(f"{_LOOP}._idle", "parts.inbox.bell.wait(", "sleeps when there is nothing to do"),
)
