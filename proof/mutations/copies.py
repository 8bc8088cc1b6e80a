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
from proof.mutations.tables import Change, Exempt, Fault

MUTATIONS = (
    # ------------------------------------------------------------------ release of device blocks
    Fault("H10", "a release does not wait for the transfer that was submitted last").without(
        "release-waits-for-the-last-submitted-transfer",
        SetArgument("SettledFence", 0, "self._last_job - 1"),
        needs={"offload"},
    ),
    Fault("H2", "blocks of a delayed store may be reused before the copy has read them").without(
        "deferred-store-holds-its-blocks", DropArgument("release", "until"), needs={"offload", "growing_tier"}
    ),
    Fault("H2", "blocks of a delayed store are not leased for it").without(
        "deferred-store-leases-its-blocks", SetArgument("share", 0, "[]"), needs={"offload", "growing_tier"}
    ),
    Fault("H5", "copies use host memory that is not pinned yet").without(
        "host-tier-uses-only-pinned-memory",
        SetArgument("grow", 0, "self._host.memory.num_bytes"),
        needs={"offload", "growing_tier"},
    ),
    Fault("H2", "a release waits for all of its transfers except the last one").without(
        "settled-fence-is-done-with-its-job", Value("self.settled.read() >= self.tick - 1"), needs={"offload"}
    ),
    Fault("H2", "transfers count as ended once their commands were received").without(
        "only-settled-jobs-count-as-settled", Value("self._last"), needs={"offload"}
    ),
    Fault("H2", "stores count as ended once their commands were received").without(
        "received-job-is-unsettled",
        Value("(job_id for job_id, plan in plans if isinstance(plan, LoadPlan))"),
        Change("job-settles-once", PopInstead()),
        needs={"offload"},
    ),
    Fault("H22", "blocks that a transfer used when their request ended are never released").without(
        "settled-blocks-are-released", needs={"offload"}
    ),
    Fault("H2", "a store counts as ended between two pieces").without(
        "store-settles-after-its-last-piece-began",
        DropOperand("begun"),
        Change("job-settles-once", PopInstead()),
        at="store-is-settled",
        needs={"offload", "layer_groups", "states"},  # several pieces, and blocks soon used again
    ),
    Fault("H2", "a store counts as ended although some of its pieces still run").without(
        "store-settles-after-its-pieces-ended",
        DropOperand("pieces"),
        Change("job-settles-once", PopInstead()),
        at="store-is-settled",
        needs={"offload"},
    ),
    Fault("H10", "a load with a failed piece counts as ended while other pieces still run").without(
        "load-settles-after-its-pieces-ended",
        Value("self.failure is not None or self.ended == len(self.copies) and self.all_begun"),
        Change(
            "load-settles-once",
            Rewrite(".settled", ".settled or job.job_id not in self._context.unsettled._unsettled"),
        ),
        at="load-is-settled",
        needs={"failing_copy", "offload"},
    ),
    # ------------------------------------------------------------------ copies
    Fault(
        "H1", "a store reads blocks that the step is still writing; the commit's wait for the same step is removed too"
    ).without(
        "store-waits-for-step",
        SetArgument("Copy", "after", "slots.after"),
        Change("commit-waits-for-its-step", Delete()),
        Change("mailbox-is-read-after-its-step", Delete()),
        at="store-waits",
        needs={"offload"},
    ),
    Fault("H3", "a load writes into blocks that a step or a store still uses").without(
        "load-waits-for-the-last-use", SetArgument("Copy", "after", "()"), needs={"offload"}
    ),
    Fault("H3", "a copy counts as ready although the fences that it must wait for are not done").without(
        "copy-drops-only-finished-fences", DropOperand("poll"), needs={"offload"}
    ),
    Fault("H15", "a block in the host tier lacks its last layer").without(
        "store-copies-every-layer", SetArgument("range", 0, "layout.num_layers - 1"), needs={"offload"}
    ),
    Fault("H15", "a load of several layers at once omits the last one").without(
        "load-copies-every-layer",
        Value("range(layer, max(layer + 1, min(layer + step, layout.num_layers - 1)))"),
        needs={"offload"},
    ),
    Fault("H15", "a load omits the last group of layers if it has fewer layers than the others").without(
        "last-group-of-layers-is-loaded",
        Value("range(layer, layer + step if layer + step <= layout.num_layers else layer)"),
        at="load-copies-every-layer",
        needs={"offload", "layer_groups"},
    ),
    Fault("H15", "a copy of many segments omits some of them").without(
        "copy-has-all-its-slices", Always(), needs={"offload"}
    ),
    Fault("H7", "a copy counts as done while it still runs: its key is findable, its slots are free").without(
        "slice-counts-after-its-fence", DropOperand("poll"), needs={"offload"}
    ),
    Fault("H7", "a copy counts as done once all of it was submitted to the device").without(
        "copy-is-done-after-its-last-slice", DropOperand("_in_flight"), at="copy-is-done", needs={"offload"}
    ),
    Fault("H15", "a copy counts as done when its first slices are done").without(
        "copy-is-done-after-all-was-submitted", DropOperand("submitted"), at="copy-is-done", needs={"offload"}
    ),
    Fault("H15", "a copy counts as successful although only its last slice succeeded").without(
        "copy-fails-with-any-of-its-slices", DropOperand(0), needs={"failing_copy", "offload"}
    ),
    Fault("H3", "a copy is submitted to the device before the fences that it must wait for are done").without(
        "copy-is-submitted-after-its-fences", Always(), needs={"offload"}
    ),
    Fault("H9", "a copy never ends if a slice failed before the last one was submitted").without(
        "failed-copy-ends", DropOperand("failure"), needs={"failing_copy", "offload"}
    ),
    Fault("H9", "the rest of a failed copy is copied, and the copy ends twice").without(
        "failed-copy-submits-no-more-slices", needs={"failing_copy", "offload"}
    ),
    Fault("H6", "a slot of the host tier is reused while a load still reads it").without(
        "load-holds-its-slots",
        Rewrite(
            "self._host.pool.lease(plan.keys)",
            "(lambda held: (held.pool._release(held.ids, ()), held)[1])(self._host.pool.lease(plan.keys))",
        ),
        needs={"offload"},
    ),
    Fault(
        "H22", "a block that is written to the disk because it was reused is never evicted from the host tier"
    ).without("slot-of-a-reused-block-is-released", needs={"disk"}),
    Fault("H22", "slots are never released after a load").without("load-releases-its-slots", needs={"offload"}),
    Fault("H22", "slots of the host tier are never released").without("store-releases-its-slots", needs={"offload"}),
    Fault("H9", "a failed store leaves a key for wrong bytes").without(
        "failed-store-leaves-no-entry", DropOperand(0), at="store-is-published", needs={"failing_copy", "offload"}
    ),
    Fault("H8", "a running store republishes a key that a reset dropped").without(
        "store-from-before-a-reset-publishes-nothing",
        DropOperand("generation"),
        at="store-is-published",
        needs={"offload", "reset"},
    ),
    Fault("H22", "blocks are never released after a store").without("ended-store-is-settled", needs={"offload"}),
    Fault("H22", "blocks whose store was skipped are never released").without(
        "skipped-store-is-settled", needs={"offload"}
    ),
    # ------------------------------------------------------------------ close
    Fault("H22", "transfers submitted just before the close never release their blocks").without(
        "last-submitted-transfers-are-dropped-at-close",
        Become("if self._switches.abandoned:\n    self._drop()\nself._take_commands()"),
        Change("transfers-are-dropped", Delete()),
        needs={"close", "offload"},
    ),
    Fault("H22", "blocks of stores that a close dropped are never released").without(
        "dropped-store-is-settled", needs={"close", "offload"}
    ),
    Fault("H26", "requests wait forever for transfers of an offload worker that has failed").without(
        "failure-of-the-offload-worker-is-reported", needs={"device_loss", "offload"}
    ),
)

_LATER = "copies are submitted in another order, but each with all its waits"

EQUIVALENT = (
    Fault("H3", "a store writes the buffer with whose bytes another store is compared")
    .without("buffer-belongs-to-one-store", DropOperand("_busy"), needs={"offload"})
    .unreached(
        "workloads store KV as it is",
        "offload/test_eight_bit.py::test_blocks_are_found_when_packed_and_read_when_unpacked",
    ),
    Fault("H22", "the blocks of a load that misses one of them are never released")
    .without("missed-load-releases-its-slots", needs={"offload"})
    .unseen(
        "a load that misses a block in a schedule misses its first one, so it holds no slot yet",
        "offload/test_loads.py::test_a_load_that_misses_its_last_block_holds_no_slot",
    ),
    Fault("H9", "blocks stored by a request with wrong KV are found in host memory")
    .without("invalidated-blocks-leave-the-host-tier", needs={"bad_logits"})
    .unreached(
        "the injected fault changes only logits: the KV of earlier chunks is right, so its reuse cannot be detected",
        "offload/test_disk_transfers.py::test_forget_removes_only_its_keys_in_tiers_and_in_flight",
    ),
    Fault("H1", "the store's stream does not wait for the step that filled the blocks")
    .without(
        "store-waits-on-its-stream", SetArgument("Copy", "after", "slots.after"), at="store-waits", needs={"offload"}
    )
    .unseen(
        "the commit that plans a store has seen the step end; see store-waits-for-step",
        "offload/test_disk_transfers.py::test_stored_blocks_are_written_to_disk_and_read_back_byte_for_byte",
    ),
    Fault("H2", "the store's stream does not wait for the last use of the slots that it writes")
    .without(
        "store-waits-for-the-last-use-of-its-slots",
        SetArgument("Copy", "after", "plan.after"),
        at="store-waits",
        needs={"offload"},
    )
    .unseen(
        "a slot is released only after the host has seen its last use end",
        "offload/test_store_and_load.py::test_a_store_waits_for_the_last_use_of_its_host_slots",
    ),
    Fault("H11", "blocks that the host tier already has are stored again")
    .without("block-is-stored-once", DropOperand("get"), needs={"offload"})
    .unseen(
        "the second copy gets no key, and its slot is free when it is done: only time is lost",
        "offload/test_store_and_load.py::test_blocks_with_a_finished_or_running_store_are_not_copied_again",
    ),
    Fault("H26", "a copy for which no request waits delays a copy for which a request waits")
    .without("urgent-copies-go-first", Value("reversed(self._queues)"), needs={"offload"})
    .unseen(_LATER, "offload/test_pacing.py::test_a_begun_urgent_copy_runs_before_a_copy_that_began_earlier"),
    Fault("H7", "slices of one lane run side by side, and end in another order than the lane polls them")
    .without("slice-waits-for-the-one-before", needs={"offload"})
    .unseen(
        "each slice is polled before its copy counts as done; a layer's fences are on one stream",
        "offload/test_pacing.py::test_slices_alternate_streams_and_wait_for_the_slice_before",
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
