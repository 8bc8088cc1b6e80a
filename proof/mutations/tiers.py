"""Rules of the tiers: pins, grants, victims and serials of the index; verification of files."""

from __future__ import annotations

from proof.mutations.operators import (
    Always,
    Append,
    Compare,
    Delete,
    DropOperand,
    Never,
    PopInstead,
    Rewrite,
    SetArgument,
    Value,
)
from proof.mutations.reasons import PINS
from proof.mutations.tables import Change, Equivalent, Exempt, Mutation

MUTATIONS = (
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
        name="serials-go-on-after-a-restart",
        hazard="H11",
        consequence="a new write has the file name of a write from before the restart",
        needs=frozenset({"disk", "restart"}),
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
)

_VERIFIED = "every read verifies the whole file, so a damaged file is a miss"

_ALONE = "in a schedule, one engine uses a directory; tests/offload has two"

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
        noticed_by="ranks/test_shared_entries.py::test_files_that_only_one_rank_has_are_deleted_from_its_disk",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="learned-entries-stay-within-the-capacity",
            hazard="H22",
            change=Never(),
            consequence="the index of a tier grows with the entries of other processes",
        ),
        _ALONE,
        noticed_by="offload/test_disk_index.py::test_learning_keeps_own_writes_and_stays_within_the_capacity",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="own-write-of-a-key-is-kept",
            hazard="H11",
            change=Never(),
            consequence="an entry that is being read or written is replaced by another process's entry of its key",
        ),
        _ALONE,
        noticed_by="offload/test_disk_index.py::test_learning_keeps_own_writes_and_stays_within_the_capacity",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="vanished-entry-is-forgotten",
            hazard="H9",
            consequence="entries that another process has deleted are found, and each load of them fails",
        ),
        _ALONE,
        noticed_by="offload/test_disk_index.py::test_unlearned_entries_are_not_found_and_not_deleted_again",
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
            change=Compare(">"),
            consequence="the length of a truncated file is not checked",
            needs=frozenset({"disk"}),
        ),
        "the checksum detects the missing bytes",
        noticed_by="offload/test_disk_failures.py::test_a_truncated_file_is_a_miss_even_when_the_buffer_holds_the_missing_bytes",
    ),
    Equivalent(
        Mutation(
            name="entry-is-renamed-into-place",
            hazard="H7",
            change=DropOperand("TEMPORARY"),
            consequence="a killed process leaves a part of an entry under the entry's name",
            needs=frozenset({"disk", "restart"}),
        ),
        "the next open deletes files of the wrong length, and " + _VERIFIED,
        noticed_by="offload/test_disk_failures.py::test_a_file_gets_its_final_name_only_once_complete_H7",
    ),
    Equivalent(
        Mutation(
            name="entry-counts-as-written-after-its-write",
            hazard="H7",
            consequence="an entry counts as written although its write failed",
            needs=frozenset({"disk", "failing_tier"}),
            also=(Change("write-begins", Append("grant.written = True")),),
        ),
        "a failed write raises, so its fence has the failure as well",
        noticed_by="offload/test_disk_failures.py::test_a_failed_write_leaves_no_entry_and_no_file_H9",
    ),
    Equivalent(
        Mutation(
            name="leftovers-are-deleted",
            hazard="H7",
            change=Value("status.st_size == 0"),
            consequence="an unfinished file of a killed process counts as an entry",
            needs=frozenset({"disk", "restart"}),
        ),
        "a read opens the entry's final name and does not find it: a miss",
        noticed_by="offload/test_disk.py::test_the_temporary_file_of_a_killed_process_is_removed",
    ),
    Equivalent(
        Mutation(
            name="files-of-the-wrong-length-are-deleted",
            hazard="H9",
            change=DropOperand("st_size"),
            consequence="a truncated file counts as an entry",
            needs=frozenset({"disk", "restart"}),
        ),
        _VERIFIED,
        noticed_by="offload/test_disk.py::test_opening_removes_and_counts_files_of_wrong_size_or_place",
    ),
    Equivalent(
        Mutation(
            name="later-write-of-a-key-wins",
            hazard="H11",
            change=Value("twin is not None and twin[0] < serial"),
            consequence="if two files have the same key, the earlier file is kept",
            needs=frozenset({"disk", "restart"}),
        ),
        "equal keys mean equal bytes: either file is right",
        noticed_by="offload/test_disk.py::test_the_later_of_two_files_with_one_key_is_served",
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
            name="directory-has-one-owner",
            hazard="H11",
            consequence="two engines write one directory and delete each other's entries",
        ),
        "a schedule has one engine at a time; tests/offload/test_disk_processes.py has two",
        noticed_by="offload/test_disk_refusals.py::test_a_second_engine_on_a_directory_is_refused",
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
        noticed_by="offload/test_disk_directory.py::test_a_write_notices_a_lost_directory_and_creates_it_again_locked",
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
            change=Value("entry.key in self._published"),
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
    Exempt("DiskTier.open", ("callback",), "it closes the directory's lock only if opening fails"),
    Exempt("_open", ("fingerprint=",), "see disk-of-other-weights-is-refused"),
    Exempt("open_tiers", ("callback",), "it closes tiers that no engine has used, if another tier cannot be opened"),
    Exempt("TierStack.close", ("callback",), "if one tier fails to close, the others are closed nevertheless"),
    Exempt("_write_whole", ("rename",), "see entry-is-renamed-into-place"),
    Exempt(
        "TierDirectory._replace_file",
        ("rename",),
        "it runs before the directory has entries; if the process is killed half-way, the next open writes the file",
    ),
    Exempt("TierIndex.publish", ("_end",), "see grant-ends"),
    Exempt("TierIndex.abandon", ("_end",), "see grant-ends"),
    Exempt("TierIndex.forget", ("_retire",), "see damaged-entry-is-dropped"),
    Exempt("TierIndex.clear", ("drop",), "see reset-drops-entries"),
)
