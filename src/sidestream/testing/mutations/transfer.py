"""Rules of the transfer engine: waits, leases and publications of copies, and reports to the engine."""

from __future__ import annotations

from sidestream.testing.mutations.operators import (
    Always,
    Append,
    Become,
    Compare,
    Delete,
    DropArgument,
    DropOperand,
    MoveAfter,
    Never,
    PopInstead,
    Rewrite,
    SetArgument,
    SetOperand,
    Value,
)
from sidestream.testing.mutations.tables import Change, Equivalent, Exempt, Mutation

MUTATIONS = (
    # ------------------------------------------------------------------ release of device blocks
    Mutation(
        name="release-waits-for-the-last-submitted-transfer",
        hazard="H10",
        change=SetArgument("SettledFence", 0, "self._last_job - 1"),
        removes="a release does not wait for the transfer that was ordered last",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="deferred-store-holds-its-blocks",
        hazard="H2",
        change=DropArgument("release", "until"),
        removes="blocks of a delayed store may be reused before the copy has read them",
        needs=frozenset({"offload", "growing_tier"}),
    ),
    Mutation(
        name="deferred-store-leases-its-blocks",
        hazard="H2",
        change=SetArgument("share", 0, "[]"),
        removes="blocks of a delayed store are not leased for it",
        needs=frozenset({"offload", "growing_tier"}),
    ),
    Mutation(
        name="host-tier-uses-only-pinned-memory",
        hazard="H5",
        change=SetArgument("grow", 0, "self._host.memory.num_bytes"),
        removes="copies use host memory that is not pinned yet",
        needs=frozenset({"offload", "growing_tier"}),
    ),
    Mutation(
        name="settled-fence-is-done-with-its-job",
        hazard="H2",
        change=Value("self.settled.read() >= self.tick - 1"),
        removes="a release does not wait for the last of the transfers that it has to wait for",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="only-settled-jobs-count-as-settled",
        hazard="H2",
        change=Value("self._last"),
        removes="transfers count as ended once their orders were received",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="received-job-is-unsettled",
        hazard="H2",
        change=Value("(job_id for job_id, plan in plans if isinstance(plan, LoadPlan))"),
        removes="stores count as ended once their orders were received",
        needs=frozenset({"offload"}),
        also=(Change("job-settles-once", PopInstead()),),
    ),
    Mutation(
        name="settled-blocks-are-released",
        hazard="H22",
        removes="blocks that a transfer used when their request ended are never released",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="store-settles-after-its-last-piece-began",
        hazard="H2",
        at="store-is-settled",
        change=DropOperand("begun"),
        removes="a store counts as ended between two pieces",
        needs=frozenset({"offload"}),
        also=(Change("job-settles-once", PopInstead()),),
    ),
    Mutation(
        name="store-settles-after-its-pieces-ended",
        hazard="H2",
        at="store-is-settled",
        change=DropOperand("pieces"),
        removes="a store counts as ended when the first of its last pieces is",
        needs=frozenset({"offload"}),
        also=(Change("job-settles-once", PopInstead()),),
    ),
    Mutation(
        name="load-settles-after-its-pieces-ended",
        hazard="H10",
        at="load-is-settled",
        change=Value("self.failure is not None or self.ended == len(self.copies) and self.all_begun"),
        removes="a load with a failed piece counts as ended while other pieces still run",
        needs=frozenset({"failing_copy", "offload"}),
        also=(
            Change(
                "load-settles-once", Rewrite(".settled", ".settled or job.job_id not in self._unsettled._unsettled")
            ),
        ),
    ),
    # ------------------------------------------------------------------ copies
    Mutation(
        name="store-waits-for-step",
        hazard="H1",
        at="store-waits",
        change=SetArgument("Copy", "after", "slots.after"),
        removes="a store reads blocks that the step is still writing; the commit's wait for the same step is removed "
        "too",
        needs=frozenset({"offload"}),
        also=(
            Change("commit-waits-for-its-step", Delete()),
            Change("mailbox-is-read-after-its-step", Delete()),
        ),
    ),
    Mutation(
        name="load-waits-for-the-last-use",
        hazard="H3",
        change=SetArgument("Copy", "after", "()"),
        removes="a load writes into blocks that a step or a store still uses",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="copy-drops-only-finished-fences",
        hazard="H3",
        change=DropOperand("poll"),
        removes="a copy counts as ready although the fences that it must wait for are not done",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="store-copies-every-layer",
        hazard="H15",
        change=SetArgument("range", 0, "layout.num_layers - 1"),
        removes="a block in the host tier lacks its last layer",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="load-copies-every-layer",
        hazard="H15",
        change=Value("range(layer, max(layer + 1, min(layer + step, layout.num_layers - 1)))"),
        removes="a load of several layers at once omits the last one",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="copy-has-all-its-slices",
        hazard="H15",
        change=Always(),
        removes="a copy of many segments omits some of them",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="slice-counts-after-its-fence",
        hazard="H7",
        change=DropOperand("poll"),
        removes="a copy counts as done while it still runs: its key is findable, its slots are free",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="copy-is-done-after-its-last-slice",
        hazard="H7",
        at="copy-is-done",
        change=DropOperand("_in_flight"),
        removes="a copy counts as done once all of it was submitted to the device",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="copy-is-done-after-all-was-submitted",
        hazard="H15",
        at="copy-is-done",
        change=DropOperand("submitted"),
        removes="a copy counts as done when its first slices are done",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="copy-fails-with-any-of-its-slices",
        hazard="H15",
        change=DropOperand(0),
        removes="a copy counts as successful although only its last slice succeeded",
        needs=frozenset({"failing_copy", "offload"}),
    ),
    Mutation(
        name="copy-is-submitted-after-its-fences",
        hazard="H3",
        change=Always(),
        removes="a copy is submitted to the device before the fences that it must wait for are done",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="failed-copy-ends",
        hazard="H9",
        change=DropOperand("failure"),
        removes="a copy never ends if a slice failed before the last one was submitted",
        needs=frozenset({"failing_copy", "offload"}),
    ),
    Mutation(
        name="failed-copy-submits-no-more-slices",
        hazard="H9",
        removes="the rest of a failed copy is copied, and the copy ends twice",
        needs=frozenset({"failing_copy", "offload"}),
    ),
    Mutation(
        name="load-holds-its-slots",
        hazard="H6",
        change=SetArgument("share", 0, "[]"),
        removes="a slot of the host tier is reused while a load still reads it",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="load-releases-its-slots",
        hazard="H22",
        removes="slots are never released after a load",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="store-releases-its-slots",
        hazard="H22",
        removes="slots of the host tier are never released",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="failed-store-leaves-no-entry",
        hazard="H9",
        at="store-is-published",
        change=DropOperand(0),
        removes="a failed store leaves a key for wrong bytes",
        needs=frozenset({"failing_copy", "offload"}),
    ),
    Mutation(
        name="store-from-before-a-reset-publishes-nothing",
        hazard="H8",
        at="store-is-published",
        change=DropOperand("generation"),
        removes="a running store republishes a key that a reset dropped",
        needs=frozenset({"offload", "reset"}),
    ),
    Mutation(
        name="ended-store-is-settled",
        hazard="H22",
        removes="blocks are never released after a store",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="skipped-store-is-settled",
        hazard="H22",
        removes="blocks whose store was skipped are never released",
        needs=frozenset({"offload"}),
    ),
    # ------------------------------------------------------------------ reports of loads to the engine
    Mutation(
        name="load-is-ready-after-its-last-slice-was-submitted",
        hazard="H5",
        change=MoveAfter("submitted-copy-leaves-its-queue"),
        removes="a step joins a load that has no fences yet for its last layers",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="load-is-ready-after-its-last-piece-began",
        hazard="H5",
        at="load-is-submitted",
        change=DropOperand("all_begun"),
        removes="a step joins a load before its last pieces were submitted",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="submitted-load-is-reported",
        hazard="H26",
        removes="a request waits forever for a finished load",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="ready-load-becomes-an-event",
        hazard="H26",
        removes="a request waits forever for a finished load",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="ended-load-is-settled",
        hazard="H22",
        removes="blocks are never released after a load",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="failed-load-is-reported",
        hazard="H9",
        removes="a request never learns that its load failed",
        needs=frozenset({"failing_copy", "offload"}),
    ),
    Mutation(
        name="load-failure-is-known-with-its-step",
        hazard="H9",
        change=Never(),
        removes="results of a step with a failed load are used, because the offload worker has not reported the "
        "failure yet",
        needs=frozenset({"failing_copy", "failing_load", "offload"}),
    ),
    Mutation(
        name="load-fails-with-any-of-its-slices",
        hazard="H15",
        change=Rewrite("self.submitted.fences", "self.submitted.groups[-1].fences"),
        removes="results of a step are used although only the last layers of its load succeeded",
        needs=frozenset({"failing_copy", "failing_load", "offload"}),
    ),
    # ------------------------------------------------------------------ close
    Mutation(
        name="last-submitted-transfers-are-dropped-at-close",
        hazard="H22",
        change=Become("if self.switches.abandoned:\n    self._drop()\nself._take_commands()"),
        removes="transfers ordered just before the close never release their blocks",
        needs=frozenset({"close", "offload"}),
        also=(Change("transfers-are-dropped", Delete()),),
    ),
    Mutation(
        name="dropped-store-is-settled",
        hazard="H22",
        removes="blocks of stores that a close dropped are never released",
        needs=frozenset({"close", "offload"}),
    ),
    # ------------------------------------------------------------------ gates
    Mutation(
        name="step-waits-for-its-own-loads",
        hazard="H5",
        change=Append("if len(batch.rows) > 1:\n    return LayerGates()"),
        removes="a step of several rows does not wait for loads, like a graph captured without waits",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="each-layer-waits-for-its-own-copy",
        hazard="H5",
        at="layer-gates",
        change=Rewrite("[group].fences", "[0].fences"),
        removes="later layers are read as soon as the first ones are loaded",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="layer-waits-for-its-last-slice",
        hazard="H5",
        at="layer-gates",
        change=Rewrite("[group].fences[-1]", "[group].fences[0]"),
        removes="a layer is read as soon as its first slice is loaded",
        needs=frozenset({"offload"}),
    ),
    # ------------------------------------------------------------------ disk writes
    Mutation(
        name="disk-write-holds-its-slot",
        hazard="H6",
        change=SetArgument("share", 0, "[]"),
        removes="a slot is reused while a disk write still reads it",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="disk-write-counts-after-its-fence",
        hazard="H6",
        change=DropOperand("poll"),
        removes="a write's slot and grant are released while it still runs",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="failed-disk-write-leaves-no-entry",
        hazard="H9",
        change=Value("good or ticket.grant.victim is None"),
        removes="a block whose write failed counts as written",
        needs=frozenset({"disk", "failing_tier"}),
        also=(Change("entry-was-written", Rewrite("grant.written", "grant.written and grant.void")),),
    ),
    Mutation(
        name="refused-disk-write-ends-its-grant",
        hazard="H22",
        removes="a key whose write failed counts as being written forever",
        needs=frozenset({"disk", "failing_tier"}),
    ),
    Mutation(
        name="finished-disk-write-ends-its-grant",
        hazard="H22",
        removes="entries written to disk are never found, and count as being written forever",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="disk-write-releases-its-slot",
        hazard="H22",
        removes="slots are never released after a disk write",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="disk-write-from-before-a-reset-publishes-nothing",
        hazard="H8",
        change=DropOperand("_is_current"),
        removes="a running write publishes a key that a reset is about to drop",
        needs=frozenset({"disk", "reset"}),
    ),
    # ------------------------------------------------------------------ disk reads
    Mutation(
        name="disk-read-counts-after-its-fence",
        hazard="H7",
        change=Always(),
        removes="a block from disk is findable in the host tier before its bytes are complete",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="failed-disk-read-is-a-miss",
        hazard="H9",
        change=Value(
            "self._log.ended(f'{self.name}-read', ticket.failure(), 1, ticket.ordered_s) or ticket.work.seconds == 0"
        ),
        removes="a read that failed, or found a damaged file, leaves a key for wrong bytes",
        needs=frozenset({"disk", "failing_tier"}),
    ),
    Mutation(
        name="disk-read-from-before-a-reset-publishes-nothing",
        hazard="H8",
        change=DropOperand("_is_current"),
        removes="a running read republishes a key that a reset dropped",
        needs=frozenset({"disk", "reset", "slow_tier"}),
    ),
    Mutation(
        name="disk-read-holds-its-slot-beyond-the-deadline",
        hazard="H10",
        at="promotion-releases-its-slots",
        change=Append(
            "for key, read in waiter.reads.items():\n    if not read.taken_in:\n        read.taken_in = True\n        "
            "del self._io[read.tier].reads[key]\n        read.pin.release()\n        read.slot.release()"
        ),
        removes="a read slower than its request's deadline writes into a slot that has a new owner",
        needs=frozenset({"disk", "slow_tier"}),
    ),
    Mutation(
        name="disk-read-ends-its-pin",
        hazard="H22",
        removes="an entry that was read once can never be evicted",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="disk-read-releases-its-slot",
        hazard="H22",
        removes="slots are never released after a disk read",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="promotion-releases-its-slots",
        hazard="H22",
        removes="slots held for a request that waited for the disk are never released",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="ended-promotion-is-reported",
        hazard="H26",
        removes="a request waits forever for blocks that were read from disk",
        needs=frozenset({"disk"}),
    ),
    # ------------------------------------------------------------------ resets
    Mutation(
        name="transfers-check-the-generation",
        hazard="H8",
        change=Compare("<="),
        removes="running transfers republish keys that a reset dropped",
        needs=frozenset({"offload", "reset"}),
    ),
    Mutation(
        name="reset-begins-a-generation",
        hazard="H8",
        change=Become("self._worker.forgotten -= 1"),
        removes="transfers submitted before a reset cannot be distinguished from those submitted after it",
        needs=frozenset({"offload", "reset"}),
    ),
    Mutation(
        name="store-has-the-generation-of-its-submission",
        hazard="H8",
        change=SetArgument("submit", 2, "self.switches.generation"),
        removes="a store ordered before a reset and started after it counts as ordered after it",
        needs=frozenset({"offload", "reset"}),
    ),
    Mutation(
        name="reset-drops-keys-of-the-host-tier",
        hazard="H8",
        removes="blocks in the host tier are found after a reset",
        needs=frozenset({"offload", "reset"}),
    ),
    Mutation(
        name="reset-drops-keys-of-the-disk",
        hazard="H8",
        removes="blocks on disk are found after a reset",
        needs=frozenset({"disk", "reset"}),
    ),
    Mutation(
        name="reset-waits-for-the-tiers",
        hazard="H8",
        change=Value("True"),
        removes="blocks from before a reset are found in a tier after the reset has ended",
        needs=frozenset({"offload", "reset"}),
    ),
)

_MISS = "then the blocks are a miss, and are recomputed"
_LATER = "copies are submitted in another order, each with all its waits"

EQUIVALENT = (
    Equivalent(
        Mutation(
            name="invalidated-blocks-leave-the-host-tier",
            hazard="H9",
            removes="blocks stored by a request with wrong KV are found in host memory",
            needs=frozenset({"bad_logits"}),
        ),
        "the fault breaks logits alone: the KV of earlier chunks is right, so its reuse cannot be detected",
        noticed_by="offload/test_disk_transfers.py::test_what_is_invalidated_is_unreachable_wherever_it_is_or_is_going_to_and_the_rest_is_not",
    ),
    Equivalent(
        Mutation(
            name="invalidated-blocks-leave-the-disk",
            hazard="H9",
            removes="blocks stored by a request with wrong KV are found on disk",
            needs=frozenset({"bad_logits"}),
        ),
        "the fault breaks logits alone: the KV of earlier chunks is right, so its reuse cannot be detected",
        noticed_by="offload/test_disk_transfers.py::test_what_is_invalidated_is_unreachable_wherever_it_is_or_is_going_to_and_the_rest_is_not",
    ),
    Equivalent(
        Mutation(
            name="layer-waits-for-all-pieces",
            hazard="H5",
            at="layer-gates",
            change=DropOperand("before"),
            removes="blocks of a load are read before they are loaded, except those of its last piece",
            needs=frozenset({"offload"}),
        ),
        "each slice waits for the one before it, so the last piece ends after all others: see "
        "slice-waits-for-the-one-before",
        noticed_by="offload/test_load_gates.py::test_layer_waits_for_the_last_slice_of_all_earlier_pieces_and_of_its_own_group",
    ),
    Equivalent(
        Mutation(
            name="layer-waits-for-the-last-slice-of-each-piece",
            hazard="H5",
            at="layer-gates",
            change=Rewrite("fences[-1] for", "fences[0] for"),
            removes="a piece of a load counts as loaded when its first slice is loaded",
            needs=frozenset({"offload"}),
        ),
        "the last piece is submitted after all others, and almost never ends before another piece's last slice",
        noticed_by="offload/test_load_gates.py::test_layer_waits_for_the_last_slice_of_all_earlier_pieces_and_of_its_own_group",
    ),
    Equivalent(
        Mutation(
            name="missing-load-is-settled",
            hazard="H22",
            removes="blocks whose load came too late are never released",
            needs=frozenset({"offload", "reset"}),
        ),
        "only stores of earlier orders can evict anything between a plan and its order, and they almost never evict a "
        "part of that run",
        noticed_by="offload/test_store_and_load.py::test_load_of_blocks_that_are_gone_is_a_failed_load",
    ),
    Equivalent(
        Mutation(
            name="missing-load-is-reported",
            hazard="H26",
            removes="a request whose blocks were evicted before its load waits forever",
            needs=frozenset({"offload", "reset"}),
        ),
        "only stores of earlier orders can evict anything between a plan and its order, and they hardly ever evict a "
        "part of just that run",
        noticed_by="offload/test_store_and_load.py::test_load_of_blocks_that_are_gone_is_a_failed_load",
    ),
    Equivalent(
        Mutation(
            name="dropped-load-is-settled",
            hazard="H22",
            removes="blocks and slots of loads that a close dropped are never released",
            needs=frozenset({"close", "offload"}),
        ),
        "the close would have to come in the same turn in which the offload worker receives the load",
        noticed_by="offload/test_worker.py::test_close_lets_go_of_a_load_of_which_no_piece_has_begun",
    ),
    Equivalent(
        Mutation(
            name="dropped-load-settles-once",
            hazard="H21",
            change=Always(),
            removes="a failed load releases its slots a second time at the close",
            needs=frozenset({"close", "failing_copy", "offload"}),
        ),
        "the close would have to come in the same turn in which the offload worker sees a piece fail, and other loads "
        "would have to keep its lane full: no test brings that about",
    ),
    Equivalent(
        Mutation(
            name="load-is-ready-after-all-pieces-were-submitted",
            hazard="H5",
            at="load-is-submitted",
            change=DropOperand("submitted"),
            removes="a step joins a load that has no fences yet for some of its pieces",
            needs=frozenset({"offload"}),
        ),
        "nothing ends between two polls of the simulated offload worker, so the pieces of a load are submitted in "
        "order",
        noticed_by="offload/test_worker.py::test_load_is_ready_when_all_its_pieces_were_given_in_whatever_order",
    ),
    Equivalent(
        Mutation(
            name="store-waits-on-its-stream",
            hazard="H1",
            at="store-waits",
            change=SetArgument("Copy", "after", "slots.after"),
            removes="the store's stream does not wait for the step that filled the blocks",
            needs=frozenset({"offload"}),
        ),
        "the commit that plans a store has seen the step end; see store-waits-for-step",
        noticed_by="offload/test_disk_transfers.py::test_stored_block_is_written_to_disk_and_read_back_byte_for_byte",
    ),
    Equivalent(
        Mutation(
            name="store-waits-for-the-last-use-of-its-slots",
            hazard="H2",
            at="store-waits",
            change=SetArgument("Copy", "after", "plan.after"),
            removes="the store's stream does not wait for the last use of the slots that it writes",
            needs=frozenset({"offload"}),
        ),
        "slots are released after their last use was seen done",
        noticed_by="offload/test_store_and_load.py::test_store_waits_for_the_last_use_of_the_slots_it_writes",
    ),
    Equivalent(
        Mutation(
            name="disk-read-waits-on-its-stream",
            hazard="H2",
            removes="a disk read does not wait for the last use of its slot",
            needs=frozenset({"disk"}),
        ),
        "slots are released when their last use was seen to be done",
    ),
    Equivalent(
        Mutation(
            name="block-is-stored-once",
            hazard="H11",
            change=DropOperand("get"),
            removes="blocks that the host tier already has are stored again",
            needs=frozenset({"offload"}),
        ),
        "the second copy gets no key and is free when done: only time is lost",
        noticed_by="offload/test_store_and_load.py::test_blocks_that_are_stored_or_being_stored_are_not_copied_again",
    ),
    Equivalent(
        Mutation(
            name="step-waits-only-for-its-own-loads",
            hazard="H5",
            at="loads-of-a-step",
            change=DropOperand(1),
            removes="a step waits for loads of requests that are not in it",
            needs=frozenset({"offload"}),
        ),
        "the step waits too long, but this cannot cause a deadlock",
        noticed_by="offload/test_store_and_load.py::test_step_is_gated_layer_by_layer_by_the_loads_of_its_own_requests_only",
    ),
    Equivalent(
        Mutation(
            name="load-without-fences-gates-no-step",
            hazard="H5",
            at="loads-of-a-step",
            change=DropOperand("submitted"),
            removes="a step asks for fences that a load does not have yet",
            needs=frozenset({"offload"}),
        ),
        "a request joins a step when its load has all its fences: see load-has-its-fences-before-its-first-step",
        noticed_by="offload/test_worker.py::test_load_that_was_not_submitted_gates_nobody",
    ),
    Equivalent(
        Mutation(
            name="settled-is-read-before-the-events",
            hazard="H9",
            change=MoveAfter("transfer-events-are-taken"),
            removes="a load's record is deleted before its last message arrives",
            needs=frozenset({"offload"}),
        ),
        "the simulated offload worker takes no turn while the engine polls",
        noticed_by="offload/test_worker.py::test_load_that_settles_while_the_engine_polls_is_kept_until_its_events_were_polled",
    ),
    Equivalent(
        Mutation(
            name="failed-load-is-not-reported-as-ready",
            hazard="H9",
            at="load-is-submitted",
            change=DropOperand(2),
            removes="a request joins a step although its load has failed",
            needs=frozenset({"failing_copy", "offload"}),
        ),
        "the step's results are dropped: see load-failure-is-known-with-its-step",
        noticed_by="offload/test_worker.py::test_load_of_which_a_piece_has_failed_is_never_said_to_be_ready",
    ),
    Equivalent(
        Mutation(
            name="load-failure-is-reported-once",
            hazard="H9",
            change=DropOperand("reported"),
            removes="the failure of a load is reported repeatedly",
            needs=frozenset({"failing_copy", "offload"}),
        ),
        "the first report preempts the request, and later ones belong to an earlier epoch",
        noticed_by="offload/test_worker.py::test_failed_load_is_told_once_whoever_sees_it_first",
    ),
    Equivalent(
        Mutation(
            name="load-failure-is-not-reported-again-at-the-end",
            hazard="H9",
            change=Always(),
            removes="the failure of a load is reported twice",
            needs=frozenset({"failing_copy", "offload"}),
        ),
        "the first report preempts the request, and later ones belong to an earlier epoch",
        noticed_by="offload/test_worker.py::test_failed_load_is_told_once_whoever_sees_it_first",
    ),
    Equivalent(
        Mutation(
            name="loads-come-before-promotions",
            hazard="H11",
            change=Value("[(plan, self._host.pool.share([])) for plan in plans]"),
            removes="one promotion evicts blocks that another one needs",
            needs=frozenset({"disk"}),
        ),
        _MISS,
        noticed_by="offload/test_disk_transfers.py::test_promotion_does_not_evict_what_its_own_run_has_in_the_host_tier",
    ),
    Equivalent(
        Mutation(
            name="missing-source-fails-the-load",
            hazard="H15",
            change=SetOperand(0, "not source_ids"),
            removes="a load copies the rest if a part was evicted since it was planned",
            needs=frozenset({"offload"}),
        ),
        "only stores of earlier orders can evict anything between a plan and its order, and they almost never evict a "
        "part of that run",
        noticed_by="offload/test_store_and_load.py::test_load_of_blocks_that_are_gone_is_a_failed_load",
    ),
    Equivalent(
        Mutation(
            name="promoted-block-is-held-for-its-request",
            hazard="H26",
            removes="a block read from disk is evicted before its request is admitted",
            needs=frozenset({"disk"}),
        ),
        _MISS,
        noticed_by="offload/test_disk_transfers.py::test_block_that_was_promoted_early_is_kept_until_its_request_has_all",
    ),
    Equivalent(
        Mutation(
            name="kept-slots-are-held",
            hazard="H26",
            change=SetArgument("share", 0, "[]"),
            removes="the part of a run in the host tier is evicted while the rest is read from disk",
            needs=frozenset({"disk"}),
        ),
        _MISS,
        noticed_by="offload/test_disk_transfers.py::test_promotion_does_not_evict_what_its_own_run_has_in_the_host_tier",
    ),
    Equivalent(
        Mutation(
            name="damaged-entry-is-dropped",
            hazard="H9",
            removes="an unreadable entry is read again and again",
            needs=frozenset({"disk", "failing_tier"}),
        ),
        "every read is verified, so each of them is a miss; and a request tries twice at most",
        noticed_by="offload/test_disk_transfers.py::test_damaged_entry_is_a_miss_and_is_forgotten",
    ),
    Equivalent(
        Mutation(
            name="promotion-has-a-deadline",
            hazard="H26",
            change=DropOperand("deadline_s"),
            removes="a request waits as long as the disk takes",
            needs=frozenset({"disk", "slow_tier"}),
        ),
        "slow operations of a schedule end at last; tests/engine/test_offload.py has a disk that never answers",
        noticed_by="offload/test_disk_transfers.py::test_deadline_is_told_once_and_releases_nothing_and_the_late_block_lands_alone",
    ),
    Equivalent(
        Mutation(
            name="urgent-copies-go-first",
            hazard="H26",
            change=Value("reversed(self._queues)"),
            removes="a copy without a waiting request delays one that a request waits for",
            needs=frozenset({"offload"}),
        ),
        _LATER,
        noticed_by="offload/test_pacing.py::test_urgent_copy_that_has_begun_goes_before_one_that_began_earlier",
    ),
    Equivalent(
        Mutation(
            name="load-settles-after-its-last-piece-began",
            hazard="H10",
            at="load-is-settled",
            change=DropOperand(1),
            removes="a load counts as ended between two pieces, and its slots are free",
            needs=frozenset({"offload"}),
            also=(
                Change(
                    "load-settles-once", Rewrite(".settled", ".settled or job.job_id not in self._unsettled._unsettled")
                ),
            ),
        ),
        "other waiting copies would have to run between two pieces of the load",
        noticed_by="offload/test_worker.py::test_load_of_which_all_that_has_begun_has_ended_goes_on_to_hold_its_slots",
    ),
    Equivalent(
        Mutation(
            name="failed-load-begins-no-more-pieces",
            hazard="H10",
            change=Always(),
            removes="a failed load that has released its blocks still writes them",
            needs=frozenset({"failing_copy", "offload"}),
            also=(
                Change(
                    "load-settles-once", Rewrite(".settled", ".settled or job.job_id not in self._unsettled._unsettled")
                ),
            ),
        ),
        "other waiting copies would have to run between two pieces of the load",
        noticed_by="offload/test_worker.py::test_load_of_which_a_piece_fails_before_the_next_began_fails_and_begins_no_more",
    ),
    Equivalent(
        Mutation(
            name="load-fails-with-any-of-its-pieces",
            hazard="H15",
            change=Value("copy.failure if job.all_begun else None"),
            removes="a load with a failed piece continues, and its request does not learn of the failure",
            needs=frozenset({"failing_copy", "offload"}),
        ),
        "other waiting copies would have to run between two pieces of the load",
        noticed_by="offload/test_worker.py::test_load_of_which_a_piece_fails_before_the_next_began_fails_and_begins_no_more",
    ),
    Equivalent(
        Mutation(
            name="disk-read-has-the-generation-of-its-submission",
            hazard="H8",
            change=SetArgument("submit", 1, "self.switches.generation"),
            removes="a read ordered before a reset and started after it counts as ordered after it",
            needs=frozenset({"disk", "reset"}),
        ),
        "the offload worker would have to sleep from the order of a read until a reset, and the request learn of it "
        "first",
        noticed_by="offload/test_worker.py::test_what_was_ordered_before_a_reset_and_begun_after_it_publishes_nothing",
    ),
    Equivalent(
        Mutation(
            name="slice-waits-for-the-one-before",
            hazard="H7",
            removes="other copies wait for all slices in flight, and slices end in another order than the lane's "
            "polling order",
            needs=frozenset({"offload"}),
        ),
        "each slice is polled before its copy counts as done; a layer's fences are on one stream",
        noticed_by="offload/test_pacing.py::test_slices_take_the_streams_in_turn_each_behind_the_one_before_whosever_it_was",
    ),
)

_GIVES_UP = "saves time at a close whose flush time is over"
_MESSAGE = "a message; rules above cover its content"
_VALUE = "a value"
_QUEUE = "a list"
_COUNT = "a progress count; rules above cover its effects"
_PLACE = "without it there is no place to write to; rules above cover how long it is held"

_LOOKS = "polls fences; rules above cover its decisions"
_FOR_SPEED = "for speed: a step waits for its loads in any case"

EXEMPT = (
    Exempt("_Load.gates", ("submitted",), "see load-without-fences-gates-no-step"),
    Exempt("_Load.share_left", ("submitted", "submitted"), _FOR_SPEED),
    Exempt("_Load.seconds_left", ("submitted", "failure", "submitted"), _FOR_SPEED),
    Exempt("OffloadConnector.gates", ("add",), "a set"),
    Exempt("OffloadConnector.gates", ("gates",), "see each-layer-waits-for-its-own-copy"),
    Exempt("OffloadConnector.seconds_left", ("epoch",), _FOR_SPEED),
    Exempt("OffloadConnector.poll", ("take",), _MESSAGE),
    Exempt("OffloadConnector.poll", ("submitted", "reported"), _VALUE),
    Exempt("OffloadConnector.failed_loads", ("reported",), _VALUE),
    Exempt("OffloadConnector.flush", ("abandoned",), _GIVES_UP),
    Exempt("OffloadConnector.flush", ("poll",), _LOOKS),
    Exempt(
        "OffloadConnector.close",
        ("abandoned",),
        "there is no stream to submit to: tests/offload/test_worker.py closes with commands that were not received",
    ),
    Exempt(
        "OffloadConnector.close",
        ("failure",),
        "a worker that failed takes no more turns: tests/offload/test_worker.py has one",
    ),
    Exempt("OffloadConnector.close", ("poll",), _LOOKS),
    Exempt("Part.bytes_left", ("poll",), _FOR_SPEED),
    Exempt("OffloadWorker._turn", ("extend", "retire", "retire"), _LOOKS),
    Exempt("OffloadWorker._turn", ("abandoned", "abandoned"), _GIVES_UP),
    Exempt("OffloadWorker._take_commands", ("take",), _MESSAGE),
    Exempt("OffloadWorker._take_commands", ("_forget",), "see reset-drops-keys-of-the-host-tier"),
    Exempt("OffloadWorker._forget", ("forget_all",), "see reset-drops-keys-of-the-host-tier"),
    Exempt("OffloadWorker._forget", ("forget",), "see invalidated-blocks-leave-the-host-tier"),
    Exempt("OffloadWorker._take_in_copies", ("abandoned",), "all at once at the close; else some in each turn"),
    Exempt("OffloadWorker._drop", ("drop",), "of loads: see dropped-load-is-settled"),
    Exempt("OffloadWorker._drop", ("drop",), "of stores: see dropped-store-is-settled"),
    Exempt("Stores.begin_pieces", ("begun",), _QUEUE),
    Exempt("Stores._begin_piece", ("begun",), _COUNT),
    Exempt("Stores._begin_piece", ("abandoned",), _GIVES_UP),
    Exempt("Stores._begin_piece", ("take",), _PLACE),
    Exempt("Stores._begin_piece", ("add",), _QUEUE),
    Exempt("Stores.end", ("ended",), "see failed-store-leaves-no-entry"),
    Exempt(
        "Stores.forget_deferred",
        ("clear",),
        "keys without bytes; the device forgets its blocks: tests/offload/test_worker.py resets with deferred stores",
    ),
    Exempt("Stores.drop", ("clear",), _GIVES_UP),
    Exempt("Stores.drop", ("begun",), "see last-submitted-transfers-are-dropped-at-close"),
    Exempt("Loads.begin_piece", ("failure",), _QUEUE),
    Exempt("Loads._begin_piece", ("begun",), _COUNT),
    Exempt("Loads._begin_piece", ("add",), _QUEUE),
    Exempt("Loads.submitted", ("submitted",), _COUNT),
    Exempt("Loads.submitted", ("failure", "failure"), "see failed-load-is-not-reported-as-ready"),
    Exempt("Loads.end", ("failure",), "which copies are measured"),
    Exempt("Loads.end", ("failure",), "decides which of several failures is kept"),
    Exempt("Loads._settle", ("ended", "failure"), "see failed-load-is-reported"),
    Exempt("Loads.drop", ("failure",), "see dropped-load-is-settled"),
    Exempt("LoadJob.all_begun", ("begun",), "a query; rules above cover its callers"),
    Exempt("Promotions._promote", ("abandoned",), _GIVES_UP),
    Exempt("Promotions.finish_waits", ("remove",), "a list"),
    Exempt(
        "Promotions.finish_waits",
        ("failure",),
        "the reason reported to a request, which looks its blocks up in any case",
    ),
    Exempt("TierIO.write", ("abandoned",), _GIVES_UP),
    Exempt(
        "TierIO.write", ("reserve",), "without it there is no entry to write; rules above cover how long it is held"
    ),
    Exempt("TierIO.finish_writes", ("ended",), "see failed-disk-write-leaves-no-entry"),
    Exempt("TierIO.read", ("take",), _PLACE),
    Exempt("TierIO.read", ("pin",), "without it there is no entry to read; rules above cover how long it is held"),
    Exempt("TierIO.finish_reads", ("taken_in",), "when: see disk-read-counts-after-its-fence"),
    Exempt("TierIO.finish_reads", ("publish",), "when: see disk-read-counts-after-its-fence"),
    Exempt("TierIO.finish_reads", ("failure",), "a read that never ran proves nothing about its entry"),
    Exempt("TierIO._timed", ("abandoned",), _GIVES_UP),
    Exempt("ReadTicket.failure", ("failure",), "a query; rules above cover its callers"),
    Exempt("Lane.cancel", ("clear", "failure"), _GIVES_UP),
    Exempt("Lane.fill", ("submitted",), "see load-is-ready-after-its-last-slice-was-submitted"),
)
