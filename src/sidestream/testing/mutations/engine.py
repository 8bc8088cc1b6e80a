"""The loop's rules: the order of submission, launch and commit, what is believed of a step, and who is told when."""

from __future__ import annotations

from sidestream.testing.mutations.mechanism import Edit, Equivalent, Exempt, Mutation

_LOOP = "sidestream.engine.loop:Engine"
_BUILD = "sidestream.engine.build"
_MAILBOX = "sidestream.execute.mailbox:Mailbox"

MUTATIONS = (
    Mutation(
        name="store-is-ordered-before-its-blocks-are-released",
        hazard="H23",
        target=f"{_LOOP}._commit",
        old="        parts.transfers.submit([store])  # before anything is freed: the blocks are still their requests'\n",
        new="        pass\n",
        removes="a request that ends gives its blocks back as if nothing was to be stored of them",
        needs=frozenset({"offload"}),
        also=(
            Edit(
                f"{_LOOP}._commit",
                '            self._forget(request, "abort")\n',
                '            self._forget(request, "abort")\n'
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
                '            self._forget(request, "abort")\n',
                '            self._forget(request, "abort")\n    parts.scheduler.publish(committed)\n',
            ),
        ),
    ),
    Mutation(
        name="launched-step-is-noted",
        hazard="H16",
        target=f"{_LOOP}._turn",
        old="        parts.scheduler.launched(plan.batch, step.fence)\n",
        new="",
        removes="requests that end do not know which step still uses what they release",
    ),
    Mutation(
        name="commit-waits-for-its-step",
        hazard="H12",
        target=f"{_LOOP}._commit",
        old="    self._await(step)\n",
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
        target=f"{_LOOP}._await",
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
        target=f"{_LOOP}._listen",
        old="        transfers.submit(self.parts.scheduler.order_loads())\n",
        new="        self.parts.scheduler.order_loads()\n",
        removes="a request that came while a step was awaited waits for a load that nobody was told of",
        needs=frozenset({"offload", "meanwhile"}),
    ),
    Mutation(
        name="failed-step-is-not-believed",
        hazard="H9",
        target=f"{_LOOP}._commit",
        old="    if step.fence.failure is not None:\n        self._step_failed(step)\n        return\n",
        new="",
        removes="what a failed step left in the mailbox goes to clients, and its blocks are findable",
        needs=frozenset({"failing_step"}),
    ),
    Mutation(
        name="failed-step-ends-its-requests",
        hazard="H22",
        target=f"{_LOOP}._step_failed",
        old=(
            "        if self._is_current(row):\n"
            '            self._end(row.request_id, "error", f"the forward pass failed: {step.fence.failure}")\n'
        ),
        new="        pass\n",
        removes="requests of a failed step hold what they hold, and nobody hears of them again",
        needs=frozenset({"failing_step"}),
    ),
    Mutation(
        name="broken-logits-end-their-request",
        hazard="H9",
        target=f"{_LOOP}._commit",
        old="or not result.finite:",
        new="or (not result.finite and not result):",
        removes="a request goes on behind logits that are no numbers",
        needs=frozenset({"bad_logits"}),
    ),
    Mutation(
        name="request-ends-before-its-client-is-told",
        hazard="H24",
        target=f"{_LOOP}._commit",
        old=("            self._forget(request, last.finish_reason)\n            session.tell(last)\n"),
        new="            session.tell(last)\n            self._forget(request, last.finish_reason)\n",
        removes="a client that hears of its request's end finds its blocks in use",
    ),
    Mutation(
        name="aborted-request-ends-before-its-client-is-told",
        hazard="H24",
        target=f"{_LOOP}._end",
        old="        self._forget(session.request, reason)\n        session.end(reason, error)\n",
        new="        session.end(reason, error)\n        self._forget(session.request, reason)\n",
        removes="a client that hears of its request's abort finds its blocks in use",
        needs=frozenset({"abort"}),
    ),
    Mutation(
        name="aborted-request-ends",
        hazard="H21",
        target=f"{_LOOP}._abort",
        old="        self._end(request_id, reason)\n",
        new="        pass\n",
        removes="a request goes on when its client has gone",
        needs=frozenset({"abort"}),
    ),
    Mutation(
        name="reset-reaches-the-scheduler",
        hazard="H8",
        target=f"{_LOOP}.reset_cache",
        old="        self.parts.scheduler.forget_all()\n",
        new="",
        removes="blocks on the device are found after a reset",
        needs=frozenset({"reset"}),
    ),
    Mutation(
        name="reset-reaches-the-tiers",
        hazard="H8",
        target=f"{_LOOP}.reset_cache",
        old="            transfers.forget_all()\n",
        new="            pass\n",
        removes="blocks in the tiers are found after a reset",
        needs=frozenset({"offload", "reset"}),
    ),
    Mutation(
        name="reset-lasts-until-the-tiers-have-forgotten",
        hazard="H8",
        target=f"{_LOOP}.reset_cache",
        old="    while transfers is not None and not transfers.has_forgotten and self._alive:\n",
        new="    while False:\n",
        removes="a reset has ended, and blocks of before it are found in a tier",
        needs=frozenset({"offload", "reset"}),
    ),
    Mutation(
        name="load-that-is-ready-joins-a-step",
        hazard="H26",
        target=f"{_LOOP}._apply",
        old="                scheduler.load_ready(request_id, epoch)\n",
        new="                pass\n",
        removes="a request waits for ever for blocks that are there",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="new-weights-wait-for-running-requests",
        hazard="H8",
        target=f"{_LOOP}._update_weights",
        old="if scheduler.num_begun or self._previous is not None:",
        new="if scheduler.num_running > 1 and self._previous is not None:",
        removes="weights change under a request, and its blocks hold some of the old and some of the new ones",
        needs=frozenset({"weights"}),
    ),
    Mutation(
        name="new-weights-go-before-new-requests",
        hazard="H26",
        target=f"{_LOOP}._announce",
        old="    self.parts.scheduler.admits_new = False\n",
        new="",
        removes="requests that come after new weights were announced begin on the old ones",
        needs=frozenset({"weights"}),
    ),
    Mutation(
        name="new-weights-forget-the-tiers",
        hazard="H8",
        target=f"{_LOOP}._update_weights",
        old="            self.parts.transfers.forget_all()\n",
        new="            pass\n",
        removes="transfers on their way publish blocks of the old weights",
        needs=frozenset({"offload", "weights"}),
    ),
    Mutation(
        name="new-weights-have-new-keys",
        hazard="H14",
        target=f"{_LOOP}._update_weights",
        old="BlockKeys(fingerprint=fingerprint, layout=",
        new="BlockKeys(fingerprint='', layout=",
        removes="blocks of the new weights have keys that say nothing of them",
        needs=frozenset({"weights"}),
    ),
    Mutation(
        name="new-weights-keep-the-salt",
        hazard="H14",
        target=f"{_LOOP}._update_weights",
        old=", salt=self.parts.salt)",
        new=")",
        removes="after new weights, engines with different salts find each other's blocks",
        needs=frozenset({"weights"}),
    ),
    Mutation(
        name="new-weights-take-the-keys-over",
        hazard="H14",
        target=f"{_LOOP}._update_weights",
        old="        scheduler.rekey(",
        new="        scheduler.keys_of(()) or str(",
        removes="requests find, under the old keys, what the old weights computed",
        needs=frozenset({"weights"}),
    ),
    Mutation(
        name="new-weights-let-new-requests-in",
        hazard="H26",
        target=f"{_LOOP}._update_weights",
        old="    scheduler.admits_new = True\n",
        new="",
        removes="nobody is admitted any more once the weights were replaced",
        needs=frozenset({"weights"}),
    ),
    Mutation(
        name="keys-name-the-served-model",
        hazard="H14",
        target=f"{_BUILD}:build_engine",
        old="BlockKeys(fingerprint=model.fingerprint, layout=layout, salt=config.salt)",
        new="BlockKeys(fingerprint='', layout=layout, salt=config.salt)",
        removes="engines of different models find each other's blocks",
    ),
    Mutation(
        name="keys-name-the-configured-salt",
        hazard="H14",
        target=f"{_BUILD}:build_engine",
        old="BlockKeys(fingerprint=model.fingerprint, layout=layout, salt=config.salt)",
        new="BlockKeys(fingerprint=model.fingerprint, layout=layout)",
        removes="an engine that was given a salt finds what engines with another one left",
    ),
    # ------------------------------------------------------------------ the end
    Mutation(
        name="last-step-lands-before-the-end",
        hazard="H10",
        target=f"{_LOOP}._drain",
        old="    self._commit(self._previous)\n    self._previous = None\n",
        new="",
        removes="a step is still on its way when what it uses is given back",
        needs=frozenset({"close"}),
    ),
    Mutation(
        name="requests-end-with-the-engine",
        hazard="H22",
        target=f"{_LOOP}._drain",
        old='        self._end(request_id, "abort")\n',
        new="        pass\n",
        removes="an engine that was closed leaves its clients waiting, and their blocks in use",
        needs=frozenset({"close"}),
    ),
    Mutation(
        name="streams-end-before-the-disk-is-let-go-of",
        hazard="H10",
        target=f"{_LOOP}.close",
        old=(
            "        if transfers is not None:\n            ends.callback(transfers.close)\n        ends.callback(self.parts.device.close)\n"
        ),
        new=(
            "        ends.callback(self.parts.device.close)\n        if transfers is not None:\n            ends.callback(transfers.close)\n"
        ),
        removes="another engine may open a directory that this one still writes to",
        needs=frozenset({"close", "disk"}),
    ),
    Mutation(
        name="loop-ends-before-transfers-do",
        hazard="H10",
        target=f"{_LOOP}.close",
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
            target=f"{_LOOP}._keys_of",
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
            old="    self._apply_events()",
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
            target=f"{_LOOP}._turn",
            old="        parts.transfers.submit(plan.transfers)\n        gates = parts.transfers.gates(plan.batch)\n",
            new="        gates = parts.transfers.gates(plan.batch)\n        parts.transfers.submit(plan.transfers)\n",
            removes="a step waits for the loads of earlier steps and not for its own",
            needs=frozenset({"offload"}),
        ),
        "a request joins a step when its load has all its fences, which takes the mover a turn: no load of this step gates a step of this step",
    ),
    Equivalent(
        Mutation(
            name="store-is-submitted-before-its-request-ends",
            hazard="H2",
            target=f"{_LOOP}._commit",
            old=(
                "    if parts.transfers is not None and store is not None:\n"
                "        parts.transfers.submit([store])  # before anything is freed: the blocks are still their requests'\n"
            ),
            new="",
            removes="what a request completed with its last token is stored when the request holds it no more",
            needs=frozenset({"offload"}),
            also=(
                Edit(
                    f"{_LOOP}._commit",
                    '            self._forget(request, "abort")\n',
                    '            self._forget(request, "abort")\n'
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
            target=f"{_LOOP}._is_current",
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
            target=f"{_LOOP}._update_weights",
            old="    self._updates.clear()\n",
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
            target=f"{_LOOP}.close",
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

_MESSAGE = "a message, not a lease; a schedule calls what must come between two steps there and then. tests/engine/test_meanwhile.py looks"
_UNBUILT = "of an engine that could not be built: nothing runs"
_WARM_UP = "before anything is served; tests/attention/test_engine_in_interpreter.py runs it"

EXEMPT = (
    Exempt(
        "sidestream.engine.loop:Engine._turn",
        "step.fence.failure is not None",
        "a simulated step fails when it runs, not when it is launched; on a GPU this saves the step behind it from being in vain",
    ),
    Exempt(
        f"{_BUILD}:_open_tiers",
        "fingerprint=model.fingerprint,",
        "a schedule opens its disk itself; see disk-of-other-weights-is-refused",
    ),
    Exempt(f"{_BUILD}:build_engine", "salt=config.salt,\n", "see new-weights-keep-the-salt"),
    Exempt(f"{_BUILD}:build_engine", "undo.callback(device.close)", _UNBUILT),
    Exempt(f"{_BUILD}:build_engine", "undo.callback(disk.close)", _UNBUILT),
    Exempt(f"{_BUILD}:_open_device", "undo.callback(device.close)", _UNBUILT),
    Exempt(f"{_BUILD}:_warm_up", "lease = blocks.take(", _WARM_UP),
    Exempt(f"{_BUILD}:_warm_up", "lease.release()", _WARM_UP),
    Exempt(f"{_LOOP}.call", "done.wait(0.05)", _OTHER_THREAD),
    Exempt(f"{_LOOP}._end_loop", "self._thread.join()", _OTHER_THREAD),
    Exempt(
        f"{_LOOP}._turn",
        "after=plan.after, gates=gates",
        "see step-waits-for-the-last-use and layer-waits-for-its-load",
    ),
    Exempt(
        f"{_LOOP}._turn",
        "        self._commit(self._previous)\n        self._previous = None\n        self._commit(step)\n",
        _NOTHING,
    ),
    Exempt(f"{_LOOP}._turn", "    self._commit(previous)\n", _NOTHING),
    Exempt(f"{_LOOP}._commit", "parts.scheduler.commit(step.batch", _NOTHING),
    Exempt(f"{_LOOP}._commit", 'self._end(request.id, "error"', "see broken-logits-end-their-request"),
    Exempt(f"{_LOOP}._step_failed", "step.drop()", "see letter-of-a-failed-step-is-given-back"),
    Exempt(f"{_LOOP}._fail", "self._sessions.clear()", "the engine has failed, and nothing runs any more"),
    Exempt(f"{_LOOP}._await", '        wait_host(fence, reason="step")\n', "see commit-waits-for-its-step"),
    Exempt(f"{_LOOP}._listen", "transfers.poll()", _WHAT_MAY_BE_CONCLUDED),
    Exempt(f"{_LOOP}._apply_events", "transfers.poll()", _WHAT_MAY_BE_CONCLUDED),
    Exempt(f"{_LOOP}._fail", "self._inbox.take()", _MESSAGE),
    Exempt(f"{_LOOP}._apply_inbox", "self._inbox.take(anytime=anytime)", _MESSAGE),
    Exempt(f"{_LOOP}._idle", "self._inbox.bell.wait(", "sleeps when there is nothing to do"),
)
