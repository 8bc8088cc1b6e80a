"""Rules of the tiers: pins, grants, victims and serials of the index; verification of files."""

from __future__ import annotations

from proof.mutations.operators import (
    Always,
    Append,
    Delete,
    DropOperand,
    Never,
    PopInstead,
    Rewrite,
    SetArgument,
    Swap,
    Value,
)
from proof.mutations.reasons import PINS
from proof.mutations.tables import Change, Equivalent, Exempt, Mutation

MUTATIONS = (
    Mutation(
        name="written-slot-is-released",
        hazard="H22",
        consequence="a slot that was written is never read or written again",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="pinned-entry-is-not-evicted",
        hazard="H2",
        consequence="an entry is deleted to make room while it is being read",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="pinned-entry-is-not-deleted-by-a-reset",
        hazard="H8",
        change=Never(),
        consequence="an entry dropped by a reset is deleted while it is still being read",
        needs=frozenset({"disk", "reset"}),
        also=(Change("idle-entry-leaves-the-idle-list", PopInstead()),),
    ),
    Mutation(
        name="dropped-entry-stays-dropped",
        hazard="H8",
        change=Always(),
        consequence="an entry dropped during a read counts as evictable afterwards",
        needs=frozenset({"disk", "reset"}),
    ),
    Mutation(
        name="reader-ends-its-own-pin",
        hazard="H22",
        consequence="an entry that was read once stays pinned forever",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="key-is-written-by-one-at-a-time",
        hazard="H11",
        change=DropOperand("_writing"),
        consequence="one key is written twice at the same time",
        needs=frozenset({"disk", "reset", "slow_tier"}),
    ),
    Mutation(
        name="each-write-has-its-own-serial",
        hazard="H11",
        consequence="a late deletion deletes a newer write of the same key",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="reset-drops-entries",
        hazard="H8",
        consequence="entries from before a reset are found after it",
        needs=frozenset({"disk", "reset"}),
    ),
    Mutation(
        name="grant-ends",
        hazard="H22",
        consequence="a key counts as being written forever, and is never written again",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="read-ends-its-pins",
        hazard="H22",
        consequence="an entry that was read once is never deleted",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="least-recently-used-entry-is-evicted-first",
        hazard="H26",
        change=Rewrite("last=False", "last=True"),
        consequence="the entry that was used last is evicted first, and its block is computed again",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="every-bit-is-verified",
        hazard="H9",
        consequence="a file with a wrong bit is served",
        needs=frozenset({"corrupt_tier", "disk"}),
    ),
    Mutation(
        name="header-is-verified",
        hazard="H9",
        consequence="the file of another block is served, if it agrees with its own checksum",
        needs=frozenset({"swapped_files", "disk"}),
    ),
    Mutation(
        name="checksum-covers-the-whole-block",
        hazard="H9",
        change=SetArgument("update", 0, "payload[payload.nbytes // 2 :]"),
        consequence="a wrong bit in the first half of a block is not detected",
        needs=frozenset({"flipped_block", "disk"}),
    ),
    Mutation(
        name="own-write-of-a-key-is-kept",
        hazard="H11",
        change=Never(),
        consequence="an entry that is being read or written is replaced by another process's entry of its key",
        needs=frozenset({"shared_disk"}),
    ),
    Mutation(
        name="vanished-entry-is-forgotten",
        hazard="H9",
        consequence="entries that another process has deleted are found, and each load of them fails",
        needs=frozenset({"shared_disk"}),
    ),
    Mutation(
        name="slot-is-leased-while-it-is-read",
        hazard="H2",
        change=Rewrite("not self._set(fcntl.F_RDLCK, _FIRST_SLOT + first, count)", "False"),
        consequence="another process overwrites a slot that is being read",
        needs=frozenset({"shared_disk"}),
    ),
    Mutation(
        name="slot-has-one-writer-and-no-reader",
        hazard="H11",
        change=Rewrite("not self._set(fcntl.F_WRLCK, _FIRST_SLOT + first, count)", "False"),
        consequence="two processes write one slot at the same time",
        needs=frozenset({"shared_disk"}),
    ),
    Mutation(
        name="lease-of-a-pinned-entry-ends",
        hazard="H22",
        consequence="a slot that was read once is never written again by another process",
        needs=frozenset({"shared_disk"}),
    ),
    Mutation(
        name="own-entry-that-gave-way-is-forgotten",
        hazard="H9",
        consequence="an entry stays findable after a write of the same engine has taken its slot",
        needs=frozenset({"shared_disk"}),
    ),
)

_VERIFIED = "every read verifies the whole file, so a damaged file is a miss"

_UNSEEN = "a block that another engine has written or evicted unnoticed is computed again"

_OPENED_ONCE = (
    "the torture test gives each rank a tier whose entries are those of all ranks, and a rank that lacks an entry "
    "would only miss it"
)

EQUIVALENT = (
    Equivalent(
        Mutation(
            name="only-entries-of-all-ranks-are-found",
            hazard="H9",
            consequence="rank 0 finds entries that another rank lacks, and each load of them fails",
        ),
        _OPENED_ONCE,
        noticed_by="ranks/test_shared_entries.py::test_only_entries_that_every_rank_holds_are_kept",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="entry-of-another-rank-only-is-deleted",
            hazard="H22",
            consequence="entries that rank 0 lacks stay on the disks of other ranks forever",
        ),
        _OPENED_ONCE,
        noticed_by="ranks/test_shared_entries.py::test_entries_that_only_one_rank_has_are_deleted_from_its_disk",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="learned-entries-stay-within-the-capacity",
            hazard="H22",
            change=Never(),
            consequence="the index of a tier grows with the entries of other processes",
        ),
        _UNSEEN,
        noticed_by="offload/test_disk_index.py::test_learning_keeps_own_writes_and_stays_within_the_capacity",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="reset-reaches-writes-in-flight",
            hazard="H8",
            consequence="running writes do not learn of a reset",
            needs=frozenset({"disk", "reset"}),
        ),
        "the offload worker also compares reset generations: see disk-write-from-before-a-reset-publishes-nothing",
        noticed_by="offload/test_disk_index.py::test_clear_removes_all_keys_even_those_being_written_H8",
    ),
    Equivalent(
        Mutation(
            name="write-from-before-a-reset-publishes-nothing",
            hazard="H8",
            consequence="a running write republishes a key that a reset dropped",
            needs=frozenset({"disk", "reset"}),
        ),
        "the offload worker also compares reset generations: see disk-write-from-before-a-reset-publishes-nothing",
        noticed_by="offload/test_disk_index.py::test_clear_removes_all_keys_even_those_being_written_H8",
    ),
    Equivalent(
        Mutation(
            name="length-is-verified",
            hazard="H9",
            change=Never(),
            consequence="the length of a file that was cut short is not checked",
            needs=frozenset({"disk"}),
        ),
        "the checksum detects the missing bytes",
        noticed_by="offload/test_disk_failures.py::test_a_short_segment_is_a_miss_even_when_the_buffer_holds_the_missing_bytes",
    ),
    Equivalent(
        Mutation(
            name="entry-counts-as-written-after-its-write",
            hazard="H7",
            consequence="an entry counts as written although its write failed",
            needs=frozenset({"disk", "failing_tier"}),
            also=(Change("write-begins", Append("for each in grants:\n    each.written = True")),),
        ),
        "a failed write raises, so its fence has the failure as well",
        noticed_by="offload/test_disk_failures.py::test_a_failed_write_leaves_no_entry_H9",
    ),
    Equivalent(
        Mutation(
            name="disk-of-other-weights-is-refused",
            hazard="H14",
            change=Value(
                "[f'{name} {found.get(name)!r} (here {value!r})' for name, value in wanted.items() if name == "
                "'format_version' and found.get(name) != value]"
            ),
            consequence="a directory that another model or layout wrote is opened",
            needs=frozenset({"disk", "restart"}),
        ),
        "its keys and headers differ: nothing is found",
        noticed_by="offload/test_disk_refusals.py::test_another_layout_is_refused",
    ),
    Equivalent(
        Mutation(
            name="pinned-entry-is-leased",
            hazard="H2",
            change=Never(),
            consequence="another process overwrites a block that a request waits for",
        ),
        _UNSEEN,
        noticed_by="offload/test_disk_sharing.py::test_a_slot_is_not_written_while_another_engine_leases_it",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="slot-is-taken-as-it-was-seen",
            hazard="H11",
            change=Always(),
            consequence="a write takes the slot that another process has just written",
        ),
        _UNSEEN,
        noticed_by="offload/test_disk_sharing.py::test_a_slot_that_another_engine_has_written_meanwhile_is_not_taken",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="record-is-compared-under-the-lease",
            hazard="H10",
            change=Never(),
            consequence="a read of an evicted entry deletes the newer entry in its slot",
            needs=frozenset({"disk"}),
        ),
        "the header of the slot names another write: a miss",
        noticed_by="offload/test_disk_sharing.py::test_an_entry_that_another_engine_has_evicted_is_not_found_any_more",
    ),
    Equivalent(
        Mutation(
            name="record-is-void-while-its-slot-is-written",
            hazard="H7",
            consequence="a killed process leaves the record of a slot that it has half overwritten",
            needs=frozenset({"disk"}),
        ),
        _VERIFIED,
        noticed_by="offload/test_disk_failures.py::test_a_record_is_valid_only_while_its_slot_is_complete_H7",
    ),
    Equivalent(
        Mutation(
            name="record-is-published-after-its-payload",
            hazard="H7",
            change=Swap(),
            consequence="other processes find an entry before it is written",
            needs=frozenset({"disk"}),
        ),
        _VERIFIED,
        noticed_by="offload/test_disk_failures.py::test_a_record_is_valid_only_while_its_slot_is_complete_H7",
    ),
    Equivalent(
        Mutation(
            name="damaged-entry-is-deleted",
            hazard="H22",
            consequence="a damaged entry is found again after every restart",
            needs=frozenset({"disk"}),
        ),
        _VERIFIED,
        noticed_by="offload/test_disk_failures.py::test_a_damaged_slot_is_a_miss_and_is_deleted_and_counted",
    ),
    Equivalent(
        Mutation(
            name="entry-that-vanished-early-is-not-published",
            hazard="H9",
            consequence="an entry that another process has evicted at once stays findable, and each load of it fails",
        ),
        _UNSEEN,
        noticed_by="offload/test_disk_index.py::test_an_entry_that_vanished_before_its_publication_is_not_findable",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="entry-of-a-lost-segment-is-a-miss",
            hazard="H9",
            change=Rewrite("'is in a file that is gone'", "None"),
            consequence="what a buffer held before is served as a block of a file that is gone",
        ),
        "no schedule deletes a file of the tier",
        noticed_by="offload/test_disk_failures.py::test_a_lost_segment_is_a_miss_and_is_made_anew",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="lost-segment-is-made-anew",
            hazard="H9",
            change=Value("fd is None"),
            consequence="blocks are written to a file that was deleted, and lost with the process",
        ),
        "no schedule deletes a file of the tier",
        noticed_by="offload/test_disk_failures.py::test_a_lost_segment_is_a_miss_and_is_made_anew",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="directory-is-set-up-by-one-process",
            hazard="H11",
            change=Value("None"),
            consequence="two processes make the files of a directory at the same time",
        ),
        _UNSEEN,
        noticed_by="offload/test_disk_refusals.py::test_a_directory_that_is_set_up_for_too_long_is_refused",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="files-with-another-name-are-not-written",
            hazard="H11",
            change=DropOperand("st_nlink"),
            consequence="a write changes a file outside the directory",
        ),
        "no schedule links files",
        noticed_by="offload/test_disk_directory.py::test_a_file_with_another_name_outside_is_not_written",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="serials-go-on-after-a-restart",
            hazard="H11",
            change=Value("1"),
            consequence="a write has the serial number of a write from before the restart",
            needs=frozenset({"disk"}),
        ),
        "equal keys and serial numbers mean equal bytes",
        noticed_by="offload/test_disk.py::test_serial_numbers_continue_after_a_restart",
    ),
    Equivalent(
        Mutation(
            name="later-write-of-a-key-wins",
            hazard="H11",
            change=Append("slots = slots[::-1]"),
            consequence="of two entries of a key, the earlier one is kept",
            needs=frozenset({"disk"}),
        ),
        "equal keys mean equal bytes: either entry is right",
        noticed_by="offload/test_disk.py::test_the_later_of_two_entries_with_one_key_is_served",
    ),
    Equivalent(
        Mutation(
            name="entries-of-other-processes-are-found",
            hazard="H26",
            consequence="an engine finds the blocks of other engines only after a restart",
        ),
        _UNSEEN,
        noticed_by="offload/test_disk_sharing.py::test_the_worker_looks_for_blocks_of_other_engines",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="directory-in-use-is-not-cleared",
            hazard="H11",
            change=Never(),
            consequence="`sidestream cache clear` deletes the blocks of a running engine",
        ),
        "no schedule runs a command",
        noticed_by="cli/test_cache.py::test_a_directory_is_cleared_only_when_no_engine_uses_it",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="lost-directory-is-noticed",
            hazard="H9",
            change=Always(),
            consequence="an engine whose directory was removed writes no block until it is started again",
        ),
        "no schedule removes a directory in use; every read and write then fails, which is a miss",
        noticed_by="offload/test_disk_directory.py::test_a_write_notices_a_lost_directory_and_creates_it_again",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="entries-of-a-lost-medium-are-forgotten",
            hazard="H9",
            consequence="entries of a removed directory are found, and each request waits for a read that fails",
        ),
        "no schedule removes a directory in use; every read of such an entry is a miss",
        noticed_by="offload/test_disk_directory.py::test_a_lost_directory_drops_all_entries_until_the_next_write",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="newer-write-survives-a-failed-read-of-an-older",
            hazard="H10",
            change=Value("entry.key in self"),
            consequence="a failed read of a dropped entry also drops a newer entry of the same key",
            needs=frozenset({"disk", "failing_tier", "reset"}),
        ),
        "the good entry is lost, so its key is a miss",
        noticed_by="offload/test_disk_index.py::test_a_late_forget_does_not_drop_a_newer_write_of_the_key",
    ),
    Equivalent(
        Mutation(
            name="entry-is-idle-after-its-last-reader",
            hazard="H2",
            consequence="an entry is evictable while a second reader reads it",
            needs=frozenset({"disk"}),
        ),
        "the offload worker has at most one read per key in flight; other requests for the key join that read",
    ),
    Equivalent(
        Mutation(
            name="abandoned-grant-leaves-no-file",
            hazard="H22",
            change=Delete(2),
            consequence="files without an entry take room until the next open",
            needs=frozenset({"disk", "failing_tier"}),
        ),
        "these files hold their keys' content, so they may be served after the next open; "
        "tests/offload/test_disk_machine.py counts the files",
    ),
    Equivalent(
        Mutation(
            name="doomed-entries-are-deleted",
            hazard="H22",
            consequence="dropped entries take room until the tier is closed",
            needs=frozenset({"disk", "reset"}),
        ),
        "these entries hold their keys' content; tests/offload/test_disk_machine.py counts the files",
    ),
)


EXEMPT = (
    Exempt("TierIndex.clear", ("clear",), PINS),
    Exempt("_open", ("fingerprint=",), "see disk-of-other-weights-is-refused"),
    Exempt(
        "open_tiers",
        ("replace", "callback"),
        "it closes tiers that no engine has used, if another tier cannot be opened",
    ),
    Exempt("_directories", ("replace",), "it makes values"),
    Exempt("Medium.load", ("written",), "see entries-of-other-processes-are-found"),
    Exempt("Medium._look", ("written",), "see entries-of-other-processes-are-found"),
    Exempt("TierStack.close", ("callback",), "if one tier fails to close, the others are closed nevertheless"),
    Exempt(
        "TierDirectory._write_description",
        ("rename",),
        "it runs before the directory has entries; if the process is killed half-way, the next open writes the file",
    ),
    Exempt("TierDirectory._write_description", ("remove",), "a leftover of a killed process"),
    Exempt("TierDirectory.locked", ("flock",), "see directory-is-set-up-by-one-process: closing the directory ends it"),
    Exempt("open_slots", ("join",), "only `sidestream cache clear` asks whether a directory is in use"),
    Exempt("_trim", ("remove", "remove"), "it gives back space; a file that is too long does no harm"),
    Exempt("SlotTable.create", ("remove",), "a leftover of a killed process"),
    Exempt("SlotTable.create", ("rename",), "its caller uses the file that is renamed: nothing would be found again"),
    Exempt("SlotTable.resized", ("replace",), "it makes a value"),
    Exempt("allows_direct_io", ("remove", "remove"), "the file is of this function only"),
    Exempt("Medium._read_run", ("share",), "see slot-is-leased-while-it-is-read"),
    Exempt("Medium._read_run", ("release",), "see written-slot-is-released"),
    Exempt("Medium.delete", ("release",), "see written-slot-is-released"),
    Exempt("Medium.lease", ("share",), "see pinned-entry-is-leased"),
    Exempt("Medium.release", ("release",), "see lease-of-a-pinned-entry-ends"),
    Exempt("Medium._owns", ("release", "release"), "see written-slot-is-released"),
    Exempt("Medium._spare_slots", ("extend",), "it only proposes slots: see slot-is-taken-as-it-was-seen"),
    Exempt("Medium._publish", ("publish",), "see record-is-published-after-its-payload"),
    Exempt("Inspection.verify", ("release",), "the command ends, and its leases with it"),
    Exempt("Inspection._read_all", ("share", "release"), "a block that is overwritten meanwhile counts as damaged"),
    Exempt("clear", ("remove", "remove", "remove"), "what a command is for"),
    Exempt("OffloadWorker._turn", ("poll",), "see entries-of-other-processes-are-found"),
    Exempt("Refresh.at_once", ("poll",), "see question-looks-at-shared-memory"),
    Exempt("BlockStore.take_finished", ("poll",), "see entries-of-other-processes-are-found"),
    Exempt("SharedStore.lookup", ("poll",), "see entries-of-other-processes-are-found"),
    Exempt("TierIndex.publish", ("_end",), "see grant-ends"),
    Exempt("TierIndex.abandon", ("_end",), "see grant-ends"),
    Exempt("TierIndex.forget", ("_retire",), "see damaged-entry-is-dropped"),
    Exempt("TierIndex.clear", ("drop",), "see reset-drops-entries"),
)
