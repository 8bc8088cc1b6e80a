"""The loop's rules: the order of submission, launch and commit, what is believed of a flight, and who is told when."""

from __future__ import annotations

from sidestream.testing.mutations.mechanism import Edit, Equivalent, Exempt, Mutation

_LOOP = "sidestream.engine.loop:Engine"
_MAILBOX = "sidestream.execute.mailbox:Mailbox"

MUTATIONS = (
    Mutation(
        name="loads-are-submitted-before-their-flight-is-gated",
        hazard="H23",
        target=f"{_LOOP}.step",
        old="        parts.transfers.submit(plan.transfers)\n        gates = parts.transfers.gates(plan.batch)\n",
        new="        gates = parts.transfers.gates(plan.batch)\n        parts.transfers.submit(plan.transfers)\n",
        removes="a flight waits for the loads of earlier steps and not for its own",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="launched-flight-is-noted",
        hazard="H16",
        target=f"{_LOOP}.step",
        old="        parts.scheduler.launched(plan.batch, flight.fence)\n",
        new="",
        removes="requests that end do not know which flight still uses what they release",
    ),
    Mutation(
        name="commit-waits-for-its-flight",
        hazard="H12",
        target=f"{_LOOP}._commit",
        old='    parts.device.wait_host(flight.fence, reason="flight")\n',
        new="",
        removes="the host believes a flight that the device has not run",
        also=(
            Edit(
                f"{_MAILBOX}.read", '    if not fence.poll():\n        raise InvariantError(f"the mailbox was read before {fence!r}")\n', ""
            ),
        ),
    ),
    Mutation(
        name="failed-flight-is-not-believed",
        hazard="H9",
        target=f"{_LOOP}._commit",
        old="    if flight.fence.failure is not None:\n        self._flight_failed(flight)\n        return\n",
        new="",
        removes="what a failed flight left in the mailbox goes to clients, and its blocks are findable",
        needs=frozenset({"failing_flight"}),
    ),
    Mutation(
        name="failed-load-is-known-before-its-flight-is-believed",
        hazard="H9",
        target=f"{_LOOP}._commit",
        old="    self._apply_events()",
        new="    ",
        removes="a token that was drawn from blocks which a load left half filled goes to its client",
        needs=frozenset({"failing_copy", "offload"}),
    ),
    Mutation(
        name="request-ends-before-its-client-is-told",
        hazard="H24",
        target=f"{_LOOP}._commit",
        old=(
            "        if reason is not None:\n"
            "            self._forget(request, reason)  # before its client is told: whoever hears of the end finds nothing held (H24)\n"
            "        if not session.tell() and reason is None:\n"
            '            self._forget(request, "abort")\n'
        ),
        new=(
            "        told = session.tell()\n"
            "        if reason is not None or not told:\n"
            '            self._forget(request, reason or "abort")\n'
        ),
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
        old="            self.parts.transfers.forget_all()\n",
        new="            pass\n",
        removes="blocks in the tiers are found after a reset",
        needs=frozenset({"offload", "reset"}),
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
        target=f"{_LOOP}._update_weights",
        old="    scheduler.admits_new = False\n",
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
)

EQUIVALENT = (
    Equivalent(
        Mutation(
            name="store-is-submitted-before-its-request-ends",
            hazard="H2",
            target=f"{_LOOP}._commit",
            old=(
                "    if parts.transfers is not None and committed.store is not None:\n"
                "        parts.transfers.submit([committed.store])  # before anything is freed: the blocks are still their requests'\n"
            ),
            new="",
            removes="what a request completed with its last token is stored when the request holds it no more",
            needs=frozenset({"offload"}),
            also=(
                Edit(
                    f"{_LOOP}._commit",
                    '            self._forget(request, "abort")\n',
                    '            self._forget(request, "abort")\n'
                    "    if parts.transfers is not None and committed.store is not None:\n"
                    "        parts.transfers.submit([committed.store])\n",
                ),
            ),
        ),
        "what is to be stored is findable, so it is cached, and nobody takes blocks between the two",
    ),
    Equivalent(
        Mutation(
            name="failed-flight-ends-its-own-requests",
            hazard="H10",
            target=f"{_LOOP}._is_current",
            old="return request is not None and request.epoch == row.epoch",
            new="return request is not None",
            removes="a request that was retracted before its flight failed, and would be computed again, ends with an error",
            needs=frozenset({"failing_flight", "preempt"}),
        ),
        "who was in a failed flight may end with its error: no answer is wrong, one is missing",
    ),
)

EXEMPT: tuple[Exempt, ...] = ()
