"""Rules of stores and of copies between device and host memory: their waits, slots and publication, and the release of
device blocks.
"""

from __future__ import annotations

from proof.mutations.operators import (
    Always,
    Become,
    Delete,
    DropArgument,
    DropOperand,
    PopInstead,
    Rewrite,
    SetArgument,
    Value,
)
from proof.mutations.reasons import COUNT, GIVES_UP, LOOKS, MESSAGE, QUEUE
from proof.mutations.tables import Change, Equivalent, Exempt, Mutation

MUTATIONS = (
    # ------------------------------------------------------------------ release of device blocks
    Mutation(
        name="release-waits-for-the-last-submitted-transfer",
        hazard="H10",
        change=SetArgument("SettledFence", 0, "self._last_job - 1"),
        consequence="a release does not wait for the transfer that was submitted last",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="deferred-store-holds-its-blocks",
        hazard="H2",
        change=DropArgument("release", "until"),
        consequence="blocks of a delayed store may be reused before the copy has read them",
        needs=frozenset({"offload", "growing_tier"}),
    ),
    Mutation(
        name="deferred-store-leases-its-blocks",
        hazard="H2",
        change=SetArgument("share", 0, "[]"),
        consequence="blocks of a delayed store are not leased for it",
        needs=frozenset({"offload", "growing_tier"}),
    ),
    Mutation(
        name="host-tier-uses-only-pinned-memory",
        hazard="H5",
        change=SetArgument("grow", 0, "self._host.memory.num_bytes"),
        consequence="copies use host memory that is not pinned yet",
        needs=frozenset({"offload", "growing_tier"}),
    ),
    Mutation(
        name="settled-fence-is-done-with-its-job",
        hazard="H2",
        change=Value("self.settled.read() >= self.tick - 1"),
        consequence="a release waits for all of its transfers except the last one",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="only-settled-jobs-count-as-settled",
        hazard="H2",
        change=Value("self._last"),
        consequence="transfers count as ended once their commands were received",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="received-job-is-unsettled",
        hazard="H2",
        change=Value("(job_id for job_id, plan in plans if isinstance(plan, LoadPlan))"),
        consequence="stores count as ended once their commands were received",
        needs=frozenset({"offload"}),
        also=(Change("job-settles-once", PopInstead()),),
    ),
    Mutation(
        name="settled-blocks-are-released",
        hazard="H22",
        consequence="blocks that a transfer used when their request ended are never released",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="store-settles-after-its-last-piece-began",
        hazard="H2",
        at="store-is-settled",
        change=DropOperand("begun"),
        consequence="a store counts as ended between two pieces",
        needs=frozenset({"offload", "layer_groups", "states"}),  # several pieces, and blocks soon used again
        also=(Change("job-settles-once", PopInstead()),),
    ),
    Mutation(
        name="store-settles-after-its-pieces-ended",
        hazard="H2",
        at="store-is-settled",
        change=DropOperand("pieces"),
        consequence="a store counts as ended although some of its pieces still run",
        needs=frozenset({"offload"}),
        also=(Change("job-settles-once", PopInstead()),),
    ),
    Mutation(
        name="load-settles-after-its-pieces-ended",
        hazard="H10",
        at="load-is-settled",
        change=Value("self.failure is not None or self.ended == len(self.copies) and self.all_begun"),
        consequence="a load with a failed piece counts as ended while other pieces still run",
        needs=frozenset({"failing_copy", "offload"}),
        also=(
            Change(
                "load-settles-once",
                Rewrite(".settled", ".settled or job.job_id not in self._context.unsettled._unsettled"),
            ),
        ),
    ),
    # ------------------------------------------------------------------ copies
    Mutation(
        name="store-waits-for-step",
        hazard="H1",
        at="store-waits",
        change=SetArgument("Copy", "after", "slots.after"),
        consequence="a store reads blocks that the step is still writing; the commit's wait for the same step is "
        "removed too",
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
        consequence="a load writes into blocks that a step or a store still uses",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="copy-drops-only-finished-fences",
        hazard="H3",
        change=DropOperand("poll"),
        consequence="a copy counts as ready although the fences that it must wait for are not done",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="store-copies-every-layer",
        hazard="H15",
        change=SetArgument("range", 0, "layout.num_layers - 1"),
        consequence="a block in the host tier lacks its last layer",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="load-copies-every-layer",
        hazard="H15",
        change=Value("range(layer, max(layer + 1, min(layer + step, layout.num_layers - 1)))"),
        consequence="a load of several layers at once omits the last one",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="last-group-of-layers-is-loaded",
        hazard="H15",
        at="load-copies-every-layer",
        change=Value("range(layer, layer + step if layer + step <= layout.num_layers else layer)"),
        consequence="a load omits the last group of layers if it has fewer layers than the others",
        needs=frozenset({"offload", "layer_groups"}),
    ),
    Mutation(
        name="copy-has-all-its-slices",
        hazard="H15",
        change=Always(),
        consequence="a copy of many segments omits some of them",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="slice-counts-after-its-fence",
        hazard="H7",
        change=DropOperand("poll"),
        consequence="a copy counts as done while it still runs: its key is findable, its slots are free",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="copy-is-done-after-its-last-slice",
        hazard="H7",
        at="copy-is-done",
        change=DropOperand("_in_flight"),
        consequence="a copy counts as done once all of it was submitted to the device",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="copy-is-done-after-all-was-submitted",
        hazard="H15",
        at="copy-is-done",
        change=DropOperand("submitted"),
        consequence="a copy counts as done when its first slices are done",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="copy-fails-with-any-of-its-slices",
        hazard="H15",
        change=DropOperand(0),
        consequence="a copy counts as successful although only its last slice succeeded",
        needs=frozenset({"failing_copy", "offload"}),
    ),
    Mutation(
        name="copy-is-submitted-after-its-fences",
        hazard="H3",
        change=Always(),
        consequence="a copy is submitted to the device before the fences that it must wait for are done",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="failed-copy-ends",
        hazard="H9",
        change=DropOperand("failure"),
        consequence="a copy never ends if a slice failed before the last one was submitted",
        needs=frozenset({"failing_copy", "offload"}),
    ),
    Mutation(
        name="failed-copy-submits-no-more-slices",
        hazard="H9",
        consequence="the rest of a failed copy is copied, and the copy ends twice",
        needs=frozenset({"failing_copy", "offload"}),
    ),
    Mutation(
        name="load-holds-its-slots",
        hazard="H6",
        change=Rewrite(
            "self._host.pool.lease(plan.keys)",
            "(lambda held: (held.pool._release(held.ids, ()), held)[1])(self._host.pool.lease(plan.keys))",
        ),
        consequence="a slot of the host tier is reused while a load still reads it",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="slot-of-a-reused-block-is-released",
        hazard="H22",
        consequence="a block that is written to the disk because it was reused is never evicted from the host tier",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="load-releases-its-slots",
        hazard="H22",
        consequence="slots are never released after a load",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="store-releases-its-slots",
        hazard="H22",
        consequence="slots of the host tier are never released",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="failed-store-leaves-no-entry",
        hazard="H9",
        at="store-is-published",
        change=DropOperand(0),
        consequence="a failed store leaves a key for wrong bytes",
        needs=frozenset({"failing_copy", "offload"}),
    ),
    Mutation(
        name="store-from-before-a-reset-publishes-nothing",
        hazard="H8",
        at="store-is-published",
        change=DropOperand("generation"),
        consequence="a running store republishes a key that a reset dropped",
        needs=frozenset({"offload", "reset"}),
    ),
    Mutation(
        name="ended-store-is-settled",
        hazard="H22",
        consequence="blocks are never released after a store",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="skipped-store-is-settled",
        hazard="H22",
        consequence="blocks whose store was skipped are never released",
        needs=frozenset({"offload"}),
    ),
    # ------------------------------------------------------------------ close
    Mutation(
        name="last-submitted-transfers-are-dropped-at-close",
        hazard="H22",
        change=Become("if self._switches.abandoned:\n    self._drop()\nself._take_commands()"),
        consequence="transfers submitted just before the close never release their blocks",
        needs=frozenset({"close", "offload"}),
        also=(Change("transfers-are-dropped", Delete()),),
    ),
    Mutation(
        name="dropped-store-is-settled",
        hazard="H22",
        consequence="blocks of stores that a close dropped are never released",
        needs=frozenset({"close", "offload"}),
    ),
    Mutation(
        name="failure-of-the-offload-worker-is-reported",
        hazard="H26",
        consequence="requests wait forever for transfers of an offload worker that has failed",
        needs=frozenset({"device_loss", "offload"}),
    ),
)

_LATER = "copies are submitted in another order, but each with all its waits"

EQUIVALENT = (
    Equivalent(
        Mutation(
            name="buffer-belongs-to-one-store",
            hazard="H3",
            change=DropOperand("_busy"),
            consequence="a store writes the buffer with whose bytes another store is compared",
            needs=frozenset({"offload"}),
        ),
        "workloads store KV as it is",
        noticed_by="offload/test_eight_bit.py::test_blocks_are_found_when_packed_and_read_when_unpacked",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="missed-load-releases-its-slots",
            hazard="H22",
            consequence="the blocks of a load that misses one of them are never released",
            needs=frozenset({"offload"}),
        ),
        "a load that misses a block in a schedule misses its first one, so it holds no slot yet",
        noticed_by="offload/test_loads.py::test_a_load_that_misses_its_last_block_holds_no_slot",
    ),
    Equivalent(
        Mutation(
            name="invalidated-blocks-leave-the-host-tier",
            hazard="H9",
            consequence="blocks stored by a request with wrong KV are found in host memory",
            needs=frozenset({"bad_logits"}),
        ),
        "the injected fault changes only logits: the KV of earlier chunks is right, so its reuse cannot be detected",
        noticed_by="offload/test_disk_transfers.py::test_forget_removes_only_its_keys_in_tiers_and_in_flight",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="store-waits-on-its-stream",
            hazard="H1",
            at="store-waits",
            change=SetArgument("Copy", "after", "slots.after"),
            consequence="the store's stream does not wait for the step that filled the blocks",
            needs=frozenset({"offload"}),
        ),
        "the commit that plans a store has seen the step end; see store-waits-for-step",
        noticed_by="offload/test_disk_transfers.py::test_stored_blocks_are_written_to_disk_and_read_back_byte_for_byte",
    ),
    Equivalent(
        Mutation(
            name="store-waits-for-the-last-use-of-its-slots",
            hazard="H2",
            at="store-waits",
            change=SetArgument("Copy", "after", "plan.after"),
            consequence="the store's stream does not wait for the last use of the slots that it writes",
            needs=frozenset({"offload"}),
        ),
        "a slot is released only after the host has seen its last use end",
        noticed_by="offload/test_store_and_load.py::test_a_store_waits_for_the_last_use_of_its_host_slots",
    ),
    Equivalent(
        Mutation(
            name="block-is-stored-once",
            hazard="H11",
            change=DropOperand("get"),
            consequence="blocks that the host tier already has are stored again",
            needs=frozenset({"offload"}),
        ),
        "the second copy gets no key, and its slot is free when it is done: only time is lost",
        noticed_by="offload/test_store_and_load.py::test_blocks_with_a_finished_or_running_store_are_not_copied_again",
    ),
    Equivalent(
        Mutation(
            name="urgent-copies-go-first",
            hazard="H26",
            change=Value("reversed(self._queues)"),
            consequence="a copy for which no request waits delays a copy for which a request waits",
            needs=frozenset({"offload"}),
        ),
        _LATER,
        noticed_by="offload/test_pacing.py::test_a_begun_urgent_copy_runs_before_a_copy_that_began_earlier",
    ),
    Equivalent(
        Mutation(
            name="slice-waits-for-the-one-before",
            hazard="H7",
            consequence="slices of one lane run side by side, and end in another order than the lane polls them",
            needs=frozenset({"offload"}),
        ),
        "each slice is polled before its copy counts as done; a layer's fences are on one stream",
        noticed_by="offload/test_pacing.py::test_slices_alternate_streams_and_wait_for_the_slice_before",
    ),
)

EXEMPT = (
    Exempt("OffloadWorker._turn", ("extend", "retire", "retire"), LOOKS),
    Exempt("OffloadWorker._turn", ("abandoned", "abandoned"), GIVES_UP),
    Exempt("OffloadWorker._take_commands", ("take",), MESSAGE),
    Exempt("OffloadWorker._take_commands", ("_forget",), "see reset-drops-keys-of-the-host-tier"),
    Exempt(
        "OffloadWorker._take_in_copies",
        ("abandoned",),
        "at the close, all ended copies are handled in one turn",
    ),
    Exempt("OffloadWorker._drop", ("drop",), "for loads see dropped-load-is-settled"),
    Exempt("OffloadWorker._drop", ("drop",), "for stores see dropped-store-is-settled"),
    Exempt("Stores.begin_pieces", ("begun",), QUEUE),
    Exempt("Stores._begin_piece", ("begun",), COUNT),
    Exempt("Stores._begin_piece", ("abandoned",), GIVES_UP),
    Exempt("Stores._begin_piece", ("add",), QUEUE),
    Exempt("Stores.end", ("ended",), "see failed-store-leaves-no-entry"),
    Exempt(
        "Stores.forget_deferred",
        ("clear",),
        "these keys have no bytes yet; tests/offload/test_growing_tier.py resets the cache while stores are deferred",
    ),
    Exempt("Stores.drop", ("clear",), GIVES_UP),
    Exempt("Stores.drop", ("begun",), "see last-submitted-transfers-are-dropped-at-close"),
    Exempt("Lane.cancel", ("clear", "failure"), GIVES_UP),
    Exempt("Lane.fill", ("submitted",), "see load-is-ready-after-its-last-slice-was-submitted"),
)
