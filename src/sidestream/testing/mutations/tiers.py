"""The tiers' rules: pins, grants, victims and serials of the index; what is verified of a file."""

from __future__ import annotations

from sidestream.testing.mutations.mechanism import Edit, Equivalent, Exempt, Mutation

_INDEX = "sidestream.offload.tiers.index:TierIndex"
_LEASE = "sidestream.offload.tiers.index:ReadLease"
_TIERS = "sidestream.offload.tiers"
_DISK = "sidestream.offload.tiers.disk"

MUTATIONS = (
    Mutation(
        name="pinned-entry-is-not-evicted",
        hazard="H2",
        target=f"{_INDEX}.pin",
        old="        slot.pins += 1\n        self._idle.pop(slot.entry.key, None)\n",
        new="        slot.pins += 1\n",
        removes="an entry is deleted to make room while it is being read",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="pinned-entry-is-not-deleted-by-a-reset",
        hazard="H8",
        target=f"{_INDEX}._retire",
        old=(
            "    if slot.pins:\n        self._leaving += 1\n    else:\n"
            "        del self._idle[slot.entry.key]\n        self._doomed.append(slot.entry)\n"
        ),
        new="    self._idle.pop(slot.entry.key, None)\n    self._doomed.append(slot.entry)\n",
        removes="what a reset forgot is deleted while it is still being read",
        needs=frozenset({"disk", "reset"}),
    ),
    Mutation(
        name="forgotten-entry-stays-forgotten",
        hazard="H8",
        target=f"{_INDEX}._unpin",
        old="        if slot.retired:\n            self._leaving -= 1\n            self._doomed.append(slot.entry)\n        else:\n            self._idle[slot.entry.key] = slot\n",
        new="        self._idle[slot.entry.key] = slot\n",
        removes="an entry that was forgotten while it was read counts as evictable afterwards",
        needs=frozenset({"disk", "reset"}),
    ),
    Mutation(
        name="forgotten-entry-is-marked",
        hazard="H8",
        target=f"{_INDEX}._retire",
        old="    slot.retired = True\n",
        new="",
        removes="the last reader of an entry does not learn that it was forgotten meanwhile",
        needs=frozenset({"disk", "reset"}),
    ),
    Mutation(
        name="reader-ends-its-own-pin",
        hazard="H22",
        target=f"{_INDEX}._unpin",
        old="        slot.pins -= 1\n",
        new="",
        removes="what was read once counts as being read for ever",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="key-is-written-by-one-at-a-time",
        hazard="H11",
        target=f"{_INDEX}.reserve",
        old="if key in self._slots or key in self._writing:",
        new="if key in self._slots:",
        removes="one key is written twice at the same time",
        needs=frozenset({"disk", "reset", "slow_tier"}),
    ),
    Mutation(
        name="each-write-has-its-own-serial",
        hazard="H11",
        target=f"{_INDEX}.reserve",
        old="    self._next_serial += 1\n",
        new="",
        removes="a late deletion hits a newer write of the same key",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="serials-go-on-after-a-restart",
        hazard="H11",
        target=f"{_DISK}:_scan",
        old="        next_serial = max(next_serial, serial + 1)\n",
        new="",
        removes="a new write has the name of one from before the restart",
        needs=frozenset({"disk", "restart"}),
    ),
    Mutation(
        name="reset-forgets-entries",
        hazard="H8",
        target=f"{_INDEX}.drop",
        old="            self._retire(slot)\n",
        new="            pass\n",
        removes="what was on disk before a reset is found after it",
        needs=frozenset({"disk", "reset"}),
    ),
    Mutation(
        name="grant-ends",
        hazard="H22",
        target=f"{_INDEX}._end",
        old="    del self._writing[grant.entry.key]\n",
        new="",
        removes="a key counts as being written for ever, and is never written again",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="read-ends-its-pins",
        hazard="H22",
        target=f"{_LEASE}.release",
        old="    self._index._unpin(slots)\n",
        new="",
        removes="what was read once stays on disk for ever",
        needs=frozenset({"disk"}),
    ),
    Mutation(
        name="every-bit-is-verified",
        hazard="H9",
        target=f"{_DISK}:DiskTier._read_verified",
        old='        if header[_DIGEST_AT:] != _digest(expected, view):\n            return "does not match its checksum"\n',
        new="",
        removes="a file with a wrong bit is served",
        needs=frozenset({"corrupt_tier", "disk"}),
    ),
)

_VERIFIED = "every read verifies the whole file, so it is a miss"

EQUIVALENT = (
    Equivalent(
        Mutation(
            name="reset-reaches-writes-on-their-way",
            hazard="H8",
            target=f"{_INDEX}.drop",
            old="            grant.void = True\n",
            new="            pass\n",
            removes="writes on their way do not learn of a reset",
            needs=frozenset({"disk", "reset"}),
        ),
        "the offload worker asks by generation, too: see disk-write-from-before-a-reset-publishes-nothing",
        noticed_by="offload/test_disk_index.py::test_clear_makes_every_key_unreachable_even_those_being_written_H8",
    ),
    Equivalent(
        Mutation(
            name="write-from-before-a-reset-publishes-nothing",
            hazard="H8",
            target=f"{_INDEX}.publish",
            old="    if grant.void:\n        self.abandon(grant)\n        return\n",
            new="",
            removes="a write that was on its way brings back what a reset forgot",
            needs=frozenset({"disk", "reset"}),
        ),
        "the offload worker asks by generation, too: see disk-write-from-before-a-reset-publishes-nothing",
        noticed_by="offload/test_disk_index.py::test_clear_makes_every_key_unreachable_even_those_being_written_H8",
    ),
    Equivalent(
        Mutation(
            name="length-is-verified",
            hazard="H9",
            target=f"{_DISK}:DiskTier._read_verified",
            old="if num_bytes != HEADER_BYTES + view.nbytes:",
            new="if num_bytes > HEADER_BYTES + view.nbytes:",
            removes="a file that lacks its end is not refused for that",
            needs=frozenset({"disk"}),
        ),
        "the checksum covers what is missing",
        noticed_by="offload/test_disk_failures.py::test_a_truncated_file_is_a_miss_even_when_the_buffer_holds_the_missing_bytes",
    ),
    Equivalent(
        Mutation(
            name="header-is-verified",
            hazard="H14",
            target=f"{_DISK}:DiskTier._read_verified",
            old='        if not header.startswith(expected):\n            return "has a header of something else"\n',
            new="",
            removes="a file of another key, model or layout under this name is not refused for that",
            needs=frozenset({"disk"}),
        ),
        "the checksum covers the header that belongs there",
        noticed_by="offload/test_disk_failures.py::test_a_damaged_file_is_a_miss_is_deleted_and_counted",
    ),
    Equivalent(
        Mutation(
            name="entry-is-renamed-into-place",
            hazard="H7",
            target=f"{_DISK}:_write_whole",
            old="temporary = path + _TEMPORARY",
            new="temporary = path",
            removes="a killed process leaves a part of an entry under the entry's name",
            needs=frozenset({"disk", "restart"}),
        ),
        "the next open deletes files of the wrong length, and " + _VERIFIED,
        noticed_by="offload/test_disk_failures.py::test_a_file_has_its_entry_name_only_once_it_is_complete_H7",
    ),
    Equivalent(
        Mutation(
            name="entry-counts-as-written-when-it-is",
            hazard="H7",
            target=f"{_DISK}:DiskTier.write",
            old="    grant.written = True\n",
            new="",
            removes="an entry counts as written though its write failed",
            needs=frozenset({"disk", "failing_tier"}),
            also=(
                Edit(
                    f"{_DISK}:DiskTier.write",
                    "    view = self._view(payload)\n",
                    "    view = self._view(payload)\n    grant.written = True\n",
                ),
            ),
        ),
        "a write that fails raises, so its fence says so, too",
        noticed_by="offload/test_disk_failures.py::test_a_failed_write_leaves_no_entry_and_no_file_H9",
    ),
    Equivalent(
        Mutation(
            name="leftovers-are-deleted",
            hazard="H7",
            target=f"{_DISK}:_scan",
            old="if file.name.endswith(_TEMPORARY):",
            new="if status.st_size == 0:",
            removes="a file that a killed process was writing counts as an entry",
            needs=frozenset({"disk", "restart"}),
        ),
        "a read looks for the entry under its own name and does not find it: a miss",
        noticed_by="offload/test_disk.py::test_the_temporary_file_of_a_killed_process_is_removed",
    ),
    Equivalent(
        Mutation(
            name="files-of-the-wrong-length-are-deleted",
            hazard="H9",
            target=f"{_DISK}:_scan",
            old="status.st_size != file_bytes\n            or not",
            new="not",
            removes="a file that lacks its end counts as an entry",
            needs=frozenset({"disk", "restart"}),
        ),
        _VERIFIED,
        noticed_by="offload/test_disk.py::test_a_file_of_the_wrong_size_or_place_is_removed_and_counted_at_open",
    ),
    Equivalent(
        Mutation(
            name="later-write-of-a-key-wins",
            hazard="H11",
            target=f"{_DISK}:_scan",
            old="elif twin is not None and twin[0] > serial:",
            new="elif twin is not None and twin[0] < serial:",
            removes="of two files of one key the earlier one is kept",
            needs=frozenset({"disk", "restart"}),
        ),
        "equal keys mean equal bytes: either will do",
        noticed_by="offload/test_disk.py::test_of_two_files_of_one_key_the_later_one_is_served",
    ),
    Equivalent(
        Mutation(
            name="disk-of-other-weights-is-refused",
            hazard="H14",
            target=f"{_DISK}:_check_description",
            old="if found.get(name) != value\n",
            new='if name == "format_version" and found.get(name) != value\n',
            removes="a directory that another model or layout wrote is opened",
            needs=frozenset({"disk", "restart"}),
        ),
        "its keys are other ones, and so are its headers: nothing is found",
        noticed_by="offload/test_disk_refusals.py::test_another_layout_is_refused",
    ),
    Equivalent(
        Mutation(
            name="directory-has-one-owner",
            hazard="H11",
            target=f"{_DISK}:_hold",
            old="        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
            new="",
            removes="two engines write one directory and delete each other's entries",
        ),
        "a schedule has one engine at a time; tests/offload/test_disk_processes.py has two",
        noticed_by="offload/test_disk_refusals.py::test_a_second_engine_on_the_directory_is_refused_and_the_first_goes_on",
    ),
    Equivalent(
        Mutation(
            name="newer-write-survives-a-failed-read-of-an-older",
            hazard="H10",
            target=f"{_INDEX}.forget",
            old="if slot is not None and slot.entry == entry:",
            new="if slot is not None:",
            removes="a failed read of what was forgotten makes the same key, written anew, forgotten too",
            needs=frozenset({"disk", "failing_tier", "reset"}),
        ),
        "a good entry is lost: a miss",
        noticed_by="offload/test_disk_index.py::test_a_late_forget_does_not_drop_a_newer_write_of_the_key",
    ),
    Equivalent(
        Mutation(
            name="entry-is-idle-when-its-last-reader-left",
            hazard="H2",
            target=f"{_INDEX}._unpin",
            old="        if slot.pins:\n            continue\n",
            new="",
            removes="an entry is evictable while a second reader reads it",
            needs=frozenset({"disk"}),
        ),
        "the transfer engine reads a key once at a time; who wants it meanwhile joins that read",
    ),
    Equivalent(
        Mutation(
            name="abandoned-grant-leaves-no-file",
            hazard="H22",
            target=f"{_INDEX}.abandon",
            old=(
                "    if grant.written:\n        self._doomed.append(grant.entry)\n"
                "    if grant.victim is not None:\n        self._doomed.append(grant.victim)\n"
            ),
            new="",
            removes="files that nobody knows of take room until the next open",
            needs=frozenset({"disk", "failing_tier"}),
        ),
        "they hold what their names say, so the next open may serve them; tests/offload/test_disk_machine.py counts the files",
    ),
    Equivalent(
        Mutation(
            name="doomed-entries-are-deleted",
            hazard="H22",
            target=f"{_INDEX}._make_room",
            old="    if self._doomed:\n        return self._doomed.popleft()\n",
            new="",
            removes="what was forgotten takes room until the tier is closed",
            needs=frozenset({"disk", "reset"}),
        ),
        "they hold what their names say; tests/offload/test_disk_machine.py counts the files",
    ),
)

_GUARD = "raises when the index's user broke a rule; the rule itself has its mutation"

EXEMPT = (
    Exempt(f"{_TIERS}.registry:open_tiers", "undo.callback(tier.close)", "of an engine that was never built"),
    Exempt(
        f"{_TIERS}.stack:TierStack.close", "ends.callback(tier.close)", "the process may end without it: see kill -9"
    ),
    Exempt(
        f"{_DISK}:_open",
        "fingerprint=context.fingerprint,",
        "a schedule opens its disk itself; see disk-of-other-weights-is-refused",
    ),
    Exempt(f"{_INDEX}.clear", "self.drop([*self._slots, *self._writing])", "see reset-forgets-entries"),
    Exempt(f"{_INDEX}.publish", "    self._end(grant)\n    self._slots", "see grant-ends"),
    Exempt(f"{_INDEX}.abandon", "self._end(grant)", "see grant-ends"),
    Exempt(f"{_INDEX}.forget", "self._retire(slot)", "see damaged-entry-is-forgotten"),
    Exempt(f"{_INDEX}.take_doomed", "self._doomed.clear()", "what is closed is not asked again"),
    Exempt(f"{_DISK}:DiskTier.open", "on_failure.callback(os.close, lock)", "of a directory that was never opened"),
    Exempt(f"{_DISK}:_write_whole", "os.rename(temporary, path)", "see entry-is-renamed-into-place"),
    Exempt(
        f"{_DISK}:_write_description",
        "temporary.replace(directory / _TIER_FILE)",
        "before the directory has an entry; killed half-way, it is made again",
    ),
)
