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
from proof.mutations.tables import Change, Equivalent, Exempt, Mutation

_BALANCE = "it decides only whether a tier is read; tests/offload/test_costs.py covers it"
_POLICY = "it decides only what a tier writes; tests/offload/test_write_policy.py covers it"

MUTATIONS = (
    Mutation(
        name="forgotten-entries-are-deleted-at-close",
        hazard="H22",
        consequence="files of forgotten entries are left on disk, and the next start finds them again",
        needs=frozenset({"disk", "reset"}),
    ),
    # ------------------------------------------------------------------ disk writes
    Mutation(
        name="disk-write-holds-its-slot",
        hazard="H6",
        change=SetArgument("share", 0, "[]"),
        consequence="a slot is reused while a disk write still reads it",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="disk-write-counts-after-its-fence",
        hazard="H6",
        change=DropOperand("poll"),
        consequence="a write's slot and grant are released while it still runs",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="failed-disk-write-leaves-no-entry",
        hazard="H9",
        change=Value("good or ticket.grant.victim is None"),
        consequence="a block whose write failed counts as written",
        needs=frozenset({"disk", "failing_tier"}),
        also=(Change("entry-was-written", Rewrite("grant.written", "grant.written and grant.void")),),
    ),
    Mutation(
        name="refused-disk-write-ends-its-grant",
        hazard="H22",
        consequence="a key whose write failed counts as being written forever",
        needs=frozenset({"disk", "failing_tier"}),
    ),
    Mutation(
        name="finished-disk-write-ends-its-grant",
        hazard="H22",
        consequence="entries written to disk are never found, and count as being written forever",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="disk-write-releases-its-slot",
        hazard="H22",
        consequence="slots are never released after a disk write",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="disk-write-from-before-a-reset-publishes-nothing",
        hazard="H8",
        change=DropOperand("_is_current"),
        consequence="a running write publishes a key that a reset is about to drop",
        needs=frozenset({"disk", "reset"}),
    ),
    Mutation(
        name="failure-of-a-block-is-noted",
        hazard="H9",
        consequence="a block whose read or write failed counts as good, because others of its batch are",
        needs=frozenset({"disk", "failing_tier"}),
    ),
    # ------------------------------------------------------------------ disk reads
    Mutation(
        name="disk-read-counts-after-its-fence",
        hazard="H7",
        change=Always(),
        consequence="a block from disk is findable in the host tier before its bytes are complete",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="failed-disk-read-is-a-miss",
        hazard="H9",
        change=Value(
            "self._context.log.ended(f'{self.name}-read', ticket.failure(), 1, ticket.submitted_s) "
            "or ticket.work.seconds == 0"
        ),
        consequence="a read that failed, or found a damaged file, leaves a key for wrong bytes",
        needs=frozenset({"disk", "failing_tier"}),
    ),
    Mutation(
        name="disk-read-from-before-a-reset-publishes-nothing",
        hazard="H8",
        change=DropOperand("_is_current"),
        consequence="a running read republishes a key that a reset dropped",
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
        consequence="a read slower than its request's deadline writes into a slot that has a new owner",
        needs=frozenset({"disk", "slow_tier"}),
    ),
    Mutation(
        name="disk-read-ends-its-pin",
        hazard="H22",
        consequence="an entry that was read once can never be evicted",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="disk-read-releases-its-slot",
        hazard="H22",
        consequence="slots are never released after a disk read",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="promotion-releases-its-slots",
        hazard="H22",
        consequence="slots held for a request that waited for the disk are never released",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="ended-promotion-is-reported",
        hazard="H26",
        consequence="a request waits forever for blocks that were read from disk",
        needs=frozenset({"disk"}),
    ),
    # ------------------------------------------------------------------ resets
    Mutation(
        name="transfers-check-the-generation",
        hazard="H8",
        change=Compare("<="),
        consequence="running transfers republish keys that a reset dropped",
        needs=frozenset({"offload", "reset"}),
    ),
    Mutation(
        name="reset-begins-a-generation",
        hazard="H8",
        change=Become("self._worker.forgotten -= 1"),
        consequence="transfers submitted before a reset cannot be distinguished from those submitted after it",
        needs=frozenset({"offload", "reset"}),
    ),
    Mutation(
        name="store-has-the-generation-of-its-submission",
        hazard="H8",
        change=SetArgument("submit", 2, "self._switches.generation"),
        consequence="a store submitted before a reset and started after it counts as submitted after it",
        needs=frozenset({"offload", "reset"}),
    ),
    Mutation(
        name="reset-drops-keys-of-the-host-tier",
        hazard="H8",
        consequence="blocks in the host tier are found after a reset",
        needs=frozenset({"offload", "reset"}),
    ),
    Mutation(
        name="reset-drops-keys-of-the-disk",
        hazard="H8",
        consequence="blocks on disk are found after a reset",
        needs=frozenset({"disk", "reset"}),
    ),
    Mutation(
        name="reset-waits-for-the-tiers",
        hazard="H8",
        change=Value("True"),
        consequence="blocks from before a reset are found in a tier after the reset has ended",
        needs=frozenset({"offload", "reset"}),
    ),
    Mutation(
        name="reset-that-failed-says-so",
        hazard="H8",
        change=Never(),
        consequence="a reset counts as done although the tiers still hold blocks, because transfers have failed",
        needs=frozenset({"device_loss", "offload", "reset"}),
    ),
)

_ONE_DISK = "no schedule has two directories"
_MISS = "the blocks are then a miss, and are recomputed"

EQUIVALENT = (
    Equivalent(
        Mutation(
            name="block-is-in-one-tier-of-a-kind",
            hazard="H22",
            change=Always(),
            consequence="a block takes room in several directories of the disk tier",
        ),
        _ONE_DISK,
        noticed_by="offload/test_disk_directories.py::test_blocks_are_divided_and_each_is_in_one_directory",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="tier-that-fails-is-passed-over",
            hazard="H26",
            change=Value("self._members"),
            consequence="blocks are not written while one of several directories is full or broken",
        ),
        _ONE_DISK,
        noticed_by="offload/test_disk_directories.py::test_a_directory_that_fails_is_passed_over",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="invalidated-blocks-leave-the-disk",
            hazard="H9",
            consequence="blocks stored by a request with wrong KV are found on disk",
            needs=frozenset({"bad_logits"}),
        ),
        "the injected fault changes only logits: the KV of earlier chunks is right, so its reuse cannot be detected",
        noticed_by="offload/test_disk_transfers.py::test_forget_removes_only_its_keys_in_tiers_and_in_flight",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="disk-read-waits-on-its-stream",
            hazard="H2",
            consequence="a disk read does not wait for the last use of its slot",
            needs=frozenset({"disk"}),
        ),
        "a slot is released only after the host has seen its last use end",
    ),
    Equivalent(
        Mutation(
            name="loads-come-before-promotions",
            hazard="H11",
            change=Value("[(plan, self._host.pool.share([])) for plan in plans]"),
            consequence="one promotion evicts blocks that another one needs",
            needs=frozenset({"disk"}),
        ),
        _MISS,
        noticed_by="offload/test_disk_transfers.py::test_a_promotion_does_not_evict_its_own_blocks_from_host_memory",
    ),
    Equivalent(
        Mutation(
            name="promoted-block-is-held-for-its-request",
            hazard="H26",
            consequence="a block read from disk is evicted before its request is admitted",
            needs=frozenset({"disk"}),
        ),
        _MISS,
        noticed_by="offload/test_disk_transfers.py::test_a_promoted_block_is_not_evicted_before_the_whole_promotion_ends",
    ),
    Equivalent(
        Mutation(
            name="kept-slots-are-held",
            hazard="H26",
            change=SetArgument("lease", 0, "()"),
            consequence="the part of a run in the host tier is evicted while the rest is read from disk",
            needs=frozenset({"disk"}),
        ),
        _MISS,
        noticed_by="offload/test_disk_transfers.py::test_a_promotion_does_not_evict_its_own_blocks_from_host_memory",
    ),
    Equivalent(
        Mutation(
            name="damaged-entry-is-dropped",
            hazard="H9",
            consequence="an unreadable entry is read again and again",
            needs=frozenset({"disk", "failing_tier"}),
        ),
        "every read is verified and becomes a miss, and a request tries at most twice",
        noticed_by="offload/test_disk_transfers.py::test_a_damaged_disk_entry_is_a_miss_and_is_dropped",
    ),
    Equivalent(
        Mutation(
            name="promotion-has-a-deadline",
            hazard="H26",
            change=DropOperand("deadline_s"),
            consequence="a request waits for the disk without a bound",
            needs=frozenset({"disk", "slow_tier"}),
        ),
        "in a schedule, slow disk operations end; tests/engine/test_offload.py has a disk that never answers",
        noticed_by="offload/test_disk_transfers.py::test_a_late_read_keeps_its_slot_past_the_deadline_and_is_published",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="disk-read-has-the-generation-of-its-submission",
            hazard="H8",
            change=SetArgument("submit", 1, "self._switches.generation"),
            consequence="a read submitted before a reset and started after it counts as submitted after it",
            needs=frozenset({"disk", "reset"}),
        ),
        "the fault needs an offload worker that does not run between the submission of a read and a reset, and a "
        "request that learns of the reset first",
        noticed_by="offload/test_worker.py::test_transfers_submitted_before_a_reset_and_begun_after_it_publish_nothing",
        unreached=True,
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
