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
from proof.mutations.tables import Change, Exempt, Fault

MUTATIONS = (
    Fault("H22", "a slot that was written is never read or written again").without(
        "written-slot-is-released", needs={"disk"}
    ),
    Fault("H2", "an entry is deleted to make room while it is being read").without(
        "pinned-entry-is-not-evicted", needs={"disk"}
    ),
    Fault("H8", "an entry dropped by a reset is deleted while it is still being read").without(
        "pinned-entry-is-not-deleted-by-a-reset",
        Never(),
        Change("idle-entry-leaves-the-idle-list", PopInstead()),
        needs={"disk", "reset"},
    ),
    Fault("H8", "an entry dropped during a read counts as evictable afterwards").without(
        "dropped-entry-stays-dropped", Always(), needs={"disk", "reset"}
    ),
    Fault("H22", "an entry that was read once stays pinned forever").without("reader-ends-its-own-pin", needs={"disk"}),
    Fault("H11", "one key is written twice at the same time").without(
        "key-is-written-by-one-at-a-time", DropOperand("_writing"), needs={"disk", "reset", "slow_tier"}
    ),
    Fault("H11", "a late deletion deletes a newer write of the same key").without(
        "each-write-has-its-own-serial", needs={"disk"}
    ),
    Fault("H8", "entries from before a reset are found after it").without(
        "reset-drops-entries", needs={"disk", "reset"}
    ),
    Fault("H22", "a key counts as being written forever, and is never written again").without(
        "grant-ends", needs={"disk"}
    ),
    Fault("H22", "an entry that was read once is never deleted").without("read-ends-its-pins", needs={"disk"}),
    Fault("H26", "the entry that was used last is evicted first, and its block is computed again").without(
        "least-recently-used-entry-is-evicted-first", Rewrite("last=False", "last=True"), needs={"disk"}
    ),
    Fault("H9", "a file with a wrong bit is served").without("every-bit-is-verified", needs={"corrupt_tier", "disk"}),
    Fault("H9", "the file of another block is served, if it agrees with its own checksum").without(
        "header-is-verified", needs={"swapped_files", "disk"}
    ),
    Fault("H9", "a wrong bit in the first half of a block is not detected").without(
        "checksum-covers-the-whole-block",
        SetArgument("update", 0, "payload[payload.nbytes // 2 :]"),
        needs={"flipped_block", "disk"},
    ),
    Fault("H11", "an entry that is being read or written is replaced by another process's entry of its key").without(
        "own-write-of-a-key-is-kept", Never(), needs={"shared_disk"}
    ),
    Fault("H9", "entries that another process has deleted are found, and each load of them fails").without(
        "vanished-entry-is-forgotten", needs={"shared_disk"}
    ),
    Fault("H2", "another process overwrites a slot that is being read").without(
        "slot-is-leased-while-it-is-read",
        Rewrite("not self._set(fcntl.F_RDLCK, _FIRST_SLOT + first, count)", "False"),
        needs={"shared_disk"},
    ),
    Fault("H11", "two processes write one slot at the same time").without(
        "slot-has-one-writer-and-no-reader",
        Rewrite("not self._set(fcntl.F_WRLCK, _FIRST_SLOT + first, count)", "False"),
        needs={"shared_disk"},
    ),
    Fault("H22", "a slot that was read once is never written again by another process").without(
        "lease-of-a-pinned-entry-ends", needs={"shared_disk"}
    ),
    Fault("H9", "an entry stays findable after a write of the same engine has taken its slot").without(
        "own-entry-that-gave-way-is-forgotten", needs={"shared_disk"}
    ),
)

_VERIFIED = "every read verifies the whole file, so a damaged file is a miss"

_UNSEEN = "a block that another engine has written or evicted unnoticed is computed again"

_OPENED_ONCE = (
    "the torture test gives each rank a tier whose entries are those of all ranks, and a rank that lacks an entry "
    "would only miss it"
)

EQUIVALENT = (
    Fault("H9", "rank 0 finds entries that another rank lacks, and each load of them fails")
    .without("only-entries-of-all-ranks-are-found")
    .unreached(_OPENED_ONCE, "ranks/test_shared_entries.py::test_only_entries_that_every_rank_holds_are_kept"),
    Fault("H22", "entries that rank 0 lacks stay on the disks of other ranks forever")
    .without("entry-of-another-rank-only-is-deleted")
    .unreached(
        _OPENED_ONCE, "ranks/test_shared_entries.py::test_entries_that_only_one_rank_has_are_deleted_from_its_disk"
    ),
    Fault("H22", "the index of a tier grows with the entries of other processes")
    .without("learned-entries-stay-within-the-capacity", Never())
    .unreached(_UNSEEN, "offload/test_disk_index.py::test_learning_keeps_own_writes_and_stays_within_the_capacity"),
    Fault("H8", "running writes do not learn of a reset")
    .without("reset-reaches-writes-in-flight", needs={"disk", "reset"})
    .unseen(
        "the offload worker also compares reset generations: see disk-write-from-before-a-reset-publishes-nothing",
        "offload/test_disk_index.py::test_clear_removes_all_keys_even_those_being_written_H8",
    ),
    Fault("H8", "a running write republishes a key that a reset dropped")
    .without("write-from-before-a-reset-publishes-nothing", needs={"disk", "reset"})
    .unseen(
        "the offload worker also compares reset generations: see disk-write-from-before-a-reset-publishes-nothing",
        "offload/test_disk_index.py::test_clear_removes_all_keys_even_those_being_written_H8",
    ),
    Fault("H9", "the length of a file that was cut short is not checked")
    .without("length-is-verified", Never(), needs={"disk"})
    .unseen(
        "the checksum detects the missing bytes",
        "offload/test_disk_failures.py::test_a_short_segment_is_a_miss_even_when_the_buffer_holds_the_missing_bytes",
    ),
    Fault("H7", "an entry counts as written although its write failed")
    .without(
        "entry-counts-as-written-after-its-write",
        Delete(),
        Change("write-begins", Append("for each in grants:\n    each.written = True")),
        needs={"disk", "failing_tier"},
    )
    .unseen(
        "a failed write raises, so its fence has the failure as well",
        "offload/test_disk_failures.py::test_a_failed_write_leaves_no_entry_H9",
    ),
    Fault("H14", "a directory that another model or layout wrote is opened")
    .without(
        "disk-of-other-weights-is-refused",
        Value(
            "[f'{name} {found.get(name)!r} (here {value!r})' for name, value in wanted.items() if name == "
            "'format_version' and found.get(name) != value]"
        ),
        needs={"disk", "restart"},
    )
    .unseen(
        "its keys and headers differ: nothing is found", "offload/test_disk_refusals.py::test_another_layout_is_refused"
    ),
    Fault("H2", "another process overwrites a block that a request waits for")
    .without("pinned-entry-is-leased", Never())
    .unreached(_UNSEEN, "offload/test_disk_sharing.py::test_a_slot_is_not_written_while_another_engine_leases_it"),
    Fault("H11", "a write takes the slot that another process has just written")
    .without("slot-is-taken-as-it-was-seen", Always())
    .unreached(
        _UNSEEN, "offload/test_disk_sharing.py::test_a_slot_that_another_engine_has_written_meanwhile_is_not_taken"
    ),
    Fault("H10", "a read of an evicted entry deletes the newer entry in its slot")
    .without("record-is-compared-under-the-lease", Never(), needs={"disk"})
    .unseen(
        "the header of the slot names another write: a miss",
        "offload/test_disk_sharing.py::test_an_entry_that_another_engine_has_evicted_is_not_found_any_more",
    ),
    Fault("H7", "a killed process leaves the record of a slot that it has half overwritten")
    .without("record-is-void-while-its-slot-is-written", needs={"disk"})
    .unseen(_VERIFIED, "offload/test_disk_failures.py::test_a_record_is_valid_only_while_its_slot_is_complete_H7"),
    Fault("H7", "other processes find an entry before it is written")
    .without("record-is-published-after-its-payload", Swap(), needs={"disk"})
    .unseen(_VERIFIED, "offload/test_disk_failures.py::test_a_record_is_valid_only_while_its_slot_is_complete_H7"),
    Fault("H22", "a damaged entry is found again after every restart")
    .without("damaged-entry-is-deleted", needs={"disk"})
    .unseen(_VERIFIED, "offload/test_disk_failures.py::test_a_damaged_slot_is_a_miss_and_is_deleted_and_counted"),
    Fault("H9", "an entry that another process has evicted at once stays findable, and each load of it fails")
    .without("entry-that-vanished-early-is-not-published")
    .unreached(
        _UNSEEN, "offload/test_disk_index.py::test_an_entry_that_vanished_before_its_publication_is_not_findable"
    ),
    Fault("H9", "what a buffer held before is served as a block of a file that is gone")
    .without("entry-of-a-lost-segment-is-a-miss", Rewrite("'is in a file that is gone'", "None"))
    .unreached(
        "no schedule deletes a file of the tier",
        "offload/test_disk_failures.py::test_a_lost_segment_is_a_miss_and_is_made_anew",
    ),
    Fault("H9", "blocks are written to a file that was deleted, and lost with the process")
    .without("lost-segment-is-made-anew", Value("fd is None"))
    .unreached(
        "no schedule deletes a file of the tier",
        "offload/test_disk_failures.py::test_a_lost_segment_is_a_miss_and_is_made_anew",
    ),
    Fault("H11", "two processes make the files of a directory at the same time")
    .without("directory-is-set-up-by-one-process", Value("None"))
    .unreached(_UNSEEN, "offload/test_disk_refusals.py::test_a_directory_that_is_set_up_for_too_long_is_refused"),
    Fault("H11", "a write changes a file outside the directory")
    .without("files-with-another-name-are-not-written", DropOperand("st_nlink"))
    .unreached(
        "no schedule links files",
        "offload/test_disk_directory.py::test_a_file_with_another_name_outside_is_not_written",
    ),
    Fault("H11", "a write has the serial number of a write from before the restart")
    .without("serials-go-on-after-a-restart", Value("1"), needs={"disk"})
    .unseen(
        "equal keys and serial numbers mean equal bytes",
        "offload/test_disk.py::test_serial_numbers_continue_after_a_restart",
    ),
    Fault("H11", "of two entries of a key, the earlier one is kept")
    .without("later-write-of-a-key-wins", Append("slots = slots[::-1]"), needs={"disk"})
    .unseen(
        "equal keys mean equal bytes: either entry is right",
        "offload/test_disk.py::test_the_later_of_two_entries_with_one_key_is_served",
    ),
    Fault("H26", "an engine finds the blocks of other engines only after a restart")
    .without("entries-of-other-processes-are-found")
    .unreached(_UNSEEN, "offload/test_disk_sharing.py::test_the_worker_looks_for_blocks_of_other_engines"),
    Fault("H11", "`sidestream cache clear` deletes the blocks of a running engine")
    .without("directory-in-use-is-not-cleared", Never())
    .unreached(
        "no schedule runs a command", "cli/test_cache.py::test_a_directory_is_cleared_only_when_no_engine_uses_it"
    ),
    Fault("H11", "`sidestream cache gc` deletes a block that an engine reads")
    .without("block-in-use-is-not-collected", Never())
    .unreached(
        "no schedule runs a command",
        "cli/test_cache.py::test_unused_blocks_are_deleted_while_an_engine_uses_the_others",
    ),
    Fault("H9", "an engine whose directory was removed writes no block until it is started again")
    .without("lost-directory-is-noticed", Always())
    .unreached(
        "no schedule removes a directory in use; every read and write then fails, which is a miss",
        "offload/test_disk_directory.py::test_a_write_notices_a_lost_directory_and_creates_it_again",
    ),
    Fault("H9", "entries of a removed directory are found, and each request waits for a read that fails")
    .without("entries-of-a-lost-medium-are-forgotten")
    .unreached(
        "no schedule removes a directory in use; every read of such an entry is a miss",
        "offload/test_disk_directory.py::test_a_lost_directory_drops_all_entries_until_the_next_write",
    ),
    Fault("H10", "a failed read of a dropped entry also drops a newer entry of the same key")
    .without(
        "newer-write-survives-a-failed-read-of-an-older",
        Value("entry.key in self"),
        needs={"disk", "failing_tier", "reset"},
    )
    .unseen(
        "the good entry is lost, so its key is a miss",
        "offload/test_disk_index.py::test_a_late_forget_does_not_drop_a_newer_write_of_the_key",
    ),
    Fault("H2", "an entry is evictable while a second reader reads it")
    .without("entry-is-idle-after-its-last-reader", needs={"disk"})
    .unseen("the offload worker has at most one read per key in flight; other requests for the key join that read"),
    Fault("H22", "files without an entry take room until the next open")
    .without("abandoned-grant-leaves-no-file", Delete(2), needs={"disk", "failing_tier"})
    .unseen(
        "these files hold their keys' content, so they may be served after the next open; "
        "tests/offload/test_disk_machine.py counts the files"
    ),
    Fault("H22", "dropped entries take room until the tier is closed")
    .without("doomed-entries-are-deleted", needs={"disk", "reset"})
    .unseen("these entries hold their keys' content; tests/offload/test_disk_machine.py counts the files"),
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
    Exempt("Inspection._delete", ("release",), "the command ends, and its leases with it"),
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
