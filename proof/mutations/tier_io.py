"""Rules of reads and writes of slower tiers, and of resets of the tiers."""

from __future__ import annotations

from proof.mutations.operators import (
    Always,
    Append,
    Become,
    Compare,
    DropOperand,
    Never,
    Rewrite,
    SetArgument,
    Value,
)
from proof.mutations.reasons import GIVES_UP
from proof.mutations.tables import Change, Exempt, Fault

_BALANCE = "it decides only whether a tier is read; tests/offload/test_costs.py covers it"
_POLICY = "it decides only what a tier writes; tests/offload/test_write_policy.py covers it"

MUTATIONS = (
    Fault("H22", "files of forgotten entries are left on disk, and the next start finds them again").without(
        "forgotten-entries-are-deleted-at-close", needs={"disk", "reset"}
    ),
    # ------------------------------------------------------------------ disk writes
    Fault("H6", "a slot is reused while a disk write still reads it").without(
        "disk-write-holds-its-slot", SetArgument("share", 0, "[]"), needs={"disk"}
    ),
    Fault("H6", "a write's slot and grant are released while it still runs").without(
        "disk-write-counts-after-its-fence", DropOperand("poll"), needs={"disk"}
    ),
    Fault("H9", "a block whose write failed counts as written").without(
        "failed-disk-write-leaves-no-entry",
        Value("good or ticket.grant.victim is None"),
        Change("entry-was-written", Rewrite("grant.written", "grant.written and grant.void")),
        needs={"disk", "failing_tier"},
    ),
    Fault("H22", "a key whose write failed counts as being written forever").without(
        "refused-disk-write-ends-its-grant", needs={"disk", "failing_tier"}
    ),
    Fault("H22", "entries written to disk are never found, and count as being written forever").without(
        "finished-disk-write-ends-its-grant", needs={"disk"}
    ),
    Fault("H22", "slots are never released after a disk write").without("disk-write-releases-its-slot", needs={"disk"}),
    Fault("H8", "a running write publishes a key that a reset is about to drop").without(
        "disk-write-from-before-a-reset-publishes-nothing", DropOperand("_is_current"), needs={"disk", "reset"}
    ),
    Fault("H9", "a block whose read or write failed counts as good, because others of its batch are").without(
        "failure-of-a-block-is-noted", needs={"disk", "failing_tier"}
    ),
    # ------------------------------------------------------------------ disk reads
    Fault("H7", "a block from disk is findable in the host tier before its bytes are complete").without(
        "disk-read-counts-after-its-fence", Always(), needs={"disk"}
    ),
    Fault("H9", "a read that failed, or found a damaged file, leaves a key for wrong bytes").without(
        "failed-disk-read-is-a-miss",
        Value(
            "self._context.log.ended(f'{self.name}-read', ticket.failure(), 1, ticket.submitted_s) "
            "or ticket.work.seconds == 0"
        ),
        needs={"disk", "failing_tier"},
    ),
    Fault("H8", "a running read republishes a key that a reset dropped").without(
        "disk-read-from-before-a-reset-publishes-nothing",
        DropOperand("_is_current"),
        needs={"disk", "reset", "slow_tier"},
    ),
    Fault("H10", "a read slower than its request's deadline writes into a slot that has a new owner").without(
        "disk-read-holds-its-slot-beyond-the-deadline",
        Append(
            "for key, read in waiter.reads.items():\n    if not read.taken_in:\n        read.taken_in = True\n        "
            "del self._io[read.tier].reads[key]\n        read.pin.release()\n        read.slot.release()"
        ),
        at="promotion-releases-its-slots",
        needs={"disk", "slow_tier"},
    ),
    Fault("H22", "an entry that was read once can never be evicted").without("disk-read-ends-its-pin", needs={"disk"}),
    Fault("H22", "slots are never released after a disk read").without("disk-read-releases-its-slot", needs={"disk"}),
    Fault("H22", "slots held for a request that waited for the disk are never released").without(
        "promotion-releases-its-slots", needs={"disk"}
    ),
    Fault("H26", "a request waits forever for blocks that were read from disk").without(
        "ended-promotion-is-reported", needs={"disk"}
    ),
    # ------------------------------------------------------------------ resets
    Fault("H8", "running transfers republish keys that a reset dropped").without(
        "transfers-check-the-generation", Compare("<="), needs={"offload", "reset"}
    ),
    Fault("H8", "transfers submitted before a reset cannot be distinguished from those submitted after it").without(
        "reset-begins-a-generation", Become("self._worker.forgotten -= 1"), needs={"offload", "reset"}
    ),
    Fault("H8", "a store submitted before a reset and started after it counts as submitted after it").without(
        "store-has-the-generation-of-its-submission",
        SetArgument("submit", 2, "self._switches.generation"),
        needs={"offload", "reset"},
    ),
    Fault("H8", "blocks in the host tier are found after a reset").without(
        "reset-drops-keys-of-the-host-tier", needs={"offload", "reset"}
    ),
    Fault("H8", "blocks on disk are found after a reset").without(
        "reset-drops-keys-of-the-disk", needs={"disk", "reset"}
    ),
    Fault("H8", "blocks from before a reset are found in a tier after the reset has ended").without(
        "reset-waits-for-the-tiers", Value("True"), needs={"offload", "reset"}
    ),
    Fault("H8", "a reset counts as done although the tiers still hold blocks, because transfers have failed").without(
        "reset-that-failed-says-so", Never(), needs={"device_loss", "offload", "reset"}
    ),
)

_ONE_DISK = "no schedule has two directories"
_MISS = "the blocks are then a miss, and are recomputed"

EQUIVALENT = (
    Fault("H22", "a block takes room in several directories of the disk tier")
    .without("block-is-in-one-tier-of-a-kind", Always())
    .unreached(_ONE_DISK, "offload/test_disk_directories.py::test_blocks_are_divided_and_each_is_in_one_directory"),
    Fault("H26", "blocks are not written while one of several directories is full or broken")
    .without("tier-that-fails-is-passed-over", Value("self._members"))
    .unreached(_ONE_DISK, "offload/test_disk_directories.py::test_a_directory_that_fails_is_passed_over"),
    Fault("H9", "blocks stored by a request with wrong KV are found on disk")
    .without("invalidated-blocks-leave-the-disk", needs={"bad_logits"})
    .unreached(
        "the injected fault changes only logits: the KV of earlier chunks is right, so its reuse cannot be detected",
        "offload/test_disk_transfers.py::test_forget_removes_only_its_keys_in_tiers_and_in_flight",
    ),
    Fault("H2", "a disk read does not wait for the last use of its slot")
    .without("disk-read-waits-on-its-stream", needs={"disk"})
    .unseen("a slot is released only after the host has seen its last use end"),
    Fault("H11", "one promotion evicts blocks that another one needs")
    .without(
        "loads-come-before-promotions", Value("[(plan, self._host.pool.share([])) for plan in plans]"), needs={"disk"}
    )
    .unseen(_MISS, "offload/test_disk_transfers.py::test_a_promotion_does_not_evict_its_own_blocks_from_host_memory"),
    Fault("H26", "a block read from disk is evicted before its request is admitted")
    .without("promoted-block-is-held-for-its-request", needs={"disk"})
    .unseen(
        _MISS, "offload/test_disk_transfers.py::test_a_promoted_block_is_not_evicted_before_the_whole_promotion_ends"
    ),
    Fault("H26", "the part of a run in the host tier is evicted while the rest is read from disk")
    .without("kept-slots-are-held", SetArgument("lease", 0, "()"), needs={"disk"})
    .unseen(_MISS, "offload/test_disk_transfers.py::test_a_promotion_does_not_evict_its_own_blocks_from_host_memory"),
    Fault("H9", "an unreadable entry is read again and again")
    .without("damaged-entry-is-dropped", needs={"disk", "failing_tier"})
    .unseen(
        "every read is verified and becomes a miss, and a request tries at most twice",
        "offload/test_disk_transfers.py::test_a_damaged_disk_entry_is_a_miss_and_is_dropped",
    ),
    Fault("H26", "a request waits for the disk without a bound")
    .without("promotion-has-a-deadline", DropOperand("deadline_s"), needs={"disk", "slow_tier"})
    .unreached(
        "in a schedule, slow disk operations end; tests/engine/test_offload.py has a disk that never answers",
        "offload/test_disk_transfers.py::test_a_late_read_keeps_its_slot_past_the_deadline_and_is_published",
    ),
    Fault("H8", "a read submitted before a reset and started after it counts as submitted after it")
    .without(
        "disk-read-has-the-generation-of-its-submission",
        SetArgument("submit", 1, "self._switches.generation"),
        needs={"disk", "reset"},
    )
    .unreached(
        "the fault needs an offload worker that does not run between the submission of a read and a "
        "reset, and a request that learns of the reset first",
        "offload/test_worker.py::test_transfers_submitted_before_a_reset_and_begun_after_it_publish_nothing",
    ),
)

EXEMPT = (
    Exempt("OffloadConnector.failure", ("failure",), "it only answers a question, see reset-that-failed-says-so"),
    Exempt("OffloadWorker._forget", ("forget_all",), "see reset-drops-keys-of-the-host-tier"),
    Exempt("OffloadWorker._forget", ("forget",), "see invalidated-blocks-leave-the-host-tier"),
    Exempt("Promotions._promote", ("abandoned",), GIVES_UP),
    Exempt("Promotions.finish_waits", ("remove",), "a list"),
    Exempt(
        "Promotions.finish_waits",
        ("failure",),
        "the reason reported to a request, which looks its blocks up in any case",
    ),
    Exempt("OffloadConnector.submit", ("begin",), _BALANCE),
    Exempt("TierWaits.end", ("epoch", "ended"), _BALANCE),
    Exempt("TierBalance._turn_up", ("clear",), _BALANCE),
    Exempt("TierWrites.stored", ("add",), _POLICY),
    Exempt("TierWrites.loads", ("epoch",), _POLICY),
    Exempt("TierWrites.continue_rest", ("abandoned", "clear"), GIVES_UP),
    Exempt("TierIO._grant", ("abandoned",), GIVES_UP),
    Exempt(
        "TierIO._grant", ("reserve",), "without it there is no entry to write; rules above cover how long it is held"
    ),
    Exempt("TierIO._begin_write", ("add",), "see block-is-in-one-tier-of-a-kind"),
    Exempt("TierIO._finish_writes", ("ended",), "see failed-disk-write-leaves-no-entry"),
    Exempt(
        "TierIO._begin_read", ("pin",), "without it there is no entry to read; rules above cover how long it is held"
    ),
    Exempt("TierIO.finish_reads", ("taken_in",), "disk-read-counts-after-its-fence decides when it is called"),
    Exempt("TierIO.finish_reads", ("publish",), "disk-read-counts-after-its-fence decides when it is called"),
    Exempt("TierIO._timed", ("abandoned",), GIVES_UP),
    Exempt("ReadTicket.failure", ("failure", "failure"), "a query; rules above cover its callers"),
    Exempt("WriteTicket.failure", ("failure", "failure"), "a query; rules above cover its callers"),
)
