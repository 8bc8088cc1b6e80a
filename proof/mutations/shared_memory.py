"""Rules of the memory of a cache process, which several engines share. Schedules of the torture test have such a memory
and a neighbour, but no cache process.
"""

from __future__ import annotations

from proof.mutations.operators import Always, Delete, DropOperand, Never, Operator, Rewrite, SetArgument, Value
from proof.mutations.tables import Equivalent, Exempt, Mutation

MUTATIONS = (
    Mutation(
        name="shared-slot-has-one-writer-and-no-reader",
        hazard="H10",
        change=Value("list[int]()"),
        consequence="a slot is written while another engine reads or writes it",
        needs=frozenset({"shared_memory"}),
    ),
    Mutation(
        name="shared-slot-is-leased-while-it-is-read",
        hazard="H6",
        change=Value("list[int]()"),
        consequence="another engine evicts a block while it is read",
        needs=frozenset({"shared_memory"}),
    ),
    Mutation(
        name="lease-of-a-shared-slot-ends",
        hazard="H22",
        consequence="slots that one engine has used can never be used by another one again",
        needs=frozenset({"shared_memory"}),
    ),
    Mutation(
        name="shared-record-is-compared-under-its-lease",
        hazard="H7",
        change=Never(),
        consequence="a slot that another engine has rewritten is read as the block that was in it before",
        needs=frozenset({"shared_memory"}),
    ),
    Mutation(
        name="shared-record-is-void-while-its-slot-is-written",
        hazard="H9",
        consequence="a slot that is half written is found under the key that it had before",
        needs=frozenset({"shared_memory"}),
    ),
    Mutation(
        name="shared-record-is-published-last",
        hazard="H7",
        consequence="other engines, and a restarted one, find no block",
        needs=frozenset({"shared_memory"}),
    ),
    Mutation(
        name="block-that-others-evicted-is-forgotten",
        hazard="H7",
        change=SetArgument("forget", 0, "[]"),
        consequence="a slot that another engine has rewritten is read as the block that was in it before",
        needs=frozenset({"shared_memory"}),
    ),
    Mutation(
        name="refused-slot-is-not-kept",
        hazard="H22",
        consequence="slots that another engine uses are in use here as well, forever",
        needs=frozenset({"shared_memory"}),
    ),
)

_DELETE = Delete()
_UNSEEN = "a schedule has no cache process, and a block that is not found, or is lost, is computed again"


def _noticed(name: str, hazard: str, consequence: str, by: str, change: Operator = _DELETE) -> Equivalent:
    mutation = Mutation(name=name, hazard=hazard, change=change, consequence=consequence)
    return Equivalent(mutation, _UNSEEN, noticed_by=by, unreached=True)


_POOL = "offload/test_shared_memory.py::test_"
_ENGINE = "engine/test_shared_host.py::test_"
_PROCESS = "offload/test_cache_process.py::test_"

EQUIVALENT = (
    # ------------------------------------------------------------------ slots
    _noticed(
        "shared-slot-is-taken-as-it-was-seen",
        "H26",
        "an engine evicts a block that another one has written a moment ago",
        _POOL + "blocks_that_were_written_a_moment_ago_are_not_evicted_unseen",
        Value("list[int]()"),
    ),
    _noticed(
        "published-slot-may-be-read-by-others",
        "H26",
        "a block is found by no other engine until it was written to the disk as well",
        _POOL + "a_published_block_is_read_by_others_while_it_is_still_in_use",
    ),
    _noticed(
        "twin-of-a-lost-block-is-found",
        "H26",
        "a block that two engines have written is lost with the first copy",
        _POOL + "a_block_written_twice_takes_one_place_in_the_index",
    ),
    _noticed(
        "reset-voids-shared-records",
        "H8",
        "a block is found again after a reset",
        _POOL + "a_reset_and_a_drop_reach_all_engines",
    ),
    _noticed(
        "drop-voids-shared-records",
        "H8",
        "a block that was dropped is found again",
        _POOL + "a_reset_and_a_drop_reach_all_engines",
    ),
    _noticed(
        "records-of-others-enter-the-index",
        "H26",
        "an engine finds nothing that another has written",
        _POOL + "an_engine_finds_what_another_has_written",
        Always(),
    ),
    _noticed(
        "block-that-cannot-be-leased-is-forgotten",
        "H26",
        "each request plans a load of a block that is gone",
        _POOL + "a_run_of_keys_ends_at_a_block_that_is_gone",
    ),
    _noticed(
        "refused-take-takes-nothing",
        "H22",
        "slots are leased forever by a transfer that found too few of them",
        _POOL + "a_slot_that_another_engine_reads_is_not_evicted",
    ),
    _noticed(
        "refused-slot-is-found-again",
        "H26",
        "a block that another engine reads while it should be evicted is lost to this one",
        _POOL + "a_slot_that_another_engine_reads_is_not_evicted",
    ),
    _noticed(
        "checksum-ends-with-its-block",
        "H9",
        "the self-check refuses a block that another engine has written in place of a checked one",
        _POOL + "a_block_that_another_engine_wrote_has_no_checksum_of_an_earlier_one",
    ),
    # ------------------------------------------------------------------ engines
    _noticed(
        "blocks-of-other-engines-are-found",
        "H26",
        "an engine finds only what other engines had written before it started",
        _ENGINE + "running_engines_find_each_others_blocks",
    ),
    _noticed(
        "question-looks-at-shared-memory",
        "H26",
        "a request computes what another engine stored a moment ago",
        _ENGINE + "a_request_finds_what_another_engine_stored_a_moment_ago",
    ),
    _noticed(
        "shared-memory-is-of-one-model",
        "H8",
        "engines with other weights load each other's blocks",
        _PROCESS + "an_engine_gets_the_memory_that_another_has_made",
        SetArgument("open", "fingerprint", "''"),
    ),
    _noticed(
        "failed-start-leaves-the-shared-memory",
        "H22",
        "an engine that does not start keeps its memory from other models",
        _PROCESS + "an_engine_that_does_not_start_leaves_its_memory",
    ),
    _noticed(
        "closed-engine-leaves-the-shared-memory",
        "H22",
        "an engine that was closed keeps its memory from other models until its process ends",
        _ENGINE + "the_first_request_of_a_restarted_engine_finds_its_blocks",
    ),
    _noticed(
        "leases-end-before-the-goodbye",
        "H22",
        "the leases of an engine that was closed last as long as its memory is mapped",
        _PROCESS + "an_engine_that_closes_leaves_no_lease_and_no_descriptor",
    ),
    _noticed(
        "pages-of-others-are-not-zeroed",
        "H10",
        "with an older kernel, an engine that starts overwrites the blocks of all engines with zeros",
        "device/test_cuda_pinned.py::test_pages_of_other_processes_keep_their_bytes",
        DropOperand("_zeroes"),
    ),
    # ------------------------------------------------------------------ the cache process
    _noticed(
        "each-engine-has-its-own-descriptor",
        "H10",
        "the leases of one engine do not exclude the others, which have the same descriptor",
        _PROCESS + "leases_outlive_a_connection_that_ends_without_a_goodbye",
        Rewrite("_opened_anew(", "os.dup("),
    ),
    _noticed(
        "leases-outlive-the-connection",
        "H6",
        "a slot is written again while the GPU still copies for an engine that was killed",
        _PROCESS + "leases_outlive_a_connection_that_ends_without_a_goodbye",
        Rewrite("self._selector.unregister(engine.connection)", "self._drop(engine)"),
    ),
    _noticed(
        "leases-end-with-the-process",
        "H22",
        "the leases of an engine that was killed never end",
        _PROCESS + "a_killed_engine_leaves_its_blocks_and_no_lease",
    ),
    _noticed(
        "goodbye-gives-the-descriptor-back",
        "H22",
        "the cache process keeps a descriptor for each engine that a process has ever made",
        _PROCESS + "an_engine_that_closes_leaves_no_lease_and_no_descriptor",
    ),
    _noticed(
        "cache-process-keeps-its-bound",
        "H26",
        "the memory of all models together grows without a bound",
        _PROCESS + "memory_beyond_the_bound_is_refused_while_the_rest_is_in_use",
        Never(),
    ),
    _noticed(
        "one-cache-process-for-a-socket",
        "H26",
        "a second cache process takes the socket of the first, whose memory no engine finds any more",
        _PROCESS + "a_second_cache_process_is_refused",
    ),
    _noticed(
        "memory-is-for-one-user",
        "H9",
        "another user reads and writes the KV of this one",
        _PROCESS + "another_user_gets_no_memory",
        Always(),
    ),
    _noticed(
        "memory-of-another-user-is-not-used",
        "H9",
        "an engine loads what another user has written",
        _PROCESS + "the_memory_of_another_user_is_not_used",
        Never(),
    ),
    _noticed(
        "greeting-of-another-version-is-refused",
        "H9",
        "an engine of another version maps a memory that it misreads",
        _PROCESS + "a_wrong_greeting_is_refused_by_name",
        Rewrite("version != VERSION", "False"),
    ),
    _noticed(
        "other-version-is-refused",
        "H9",
        "an engine maps the memory of another version, and misreads it",
        _PROCESS + "a_wrong_answer_is_refused",
        Never(),
    ),
)

_OF_THE_POOL = "what any pool does; the marked statements beside it add what engines share"
_DESCRIPTORS = "descriptors of an engine that does not start; a test counts them"

EXEMPT = (
    Exempt("FencedPool.take_some", ("take",), "a choice of their number"),
    Exempt("FencedPool.lease", ("share",), "load-holds-its-slots and others mark its callers"),
    Exempt("CacheProcess.run", ("_close",), "the process ends, and with it everything that it holds"),
    Exempt("CacheProcess._close", ("_drop",), "the process ends, and with it everything that it holds"),
    Exempt("CacheProcess._admit", ("add",), "a set of engines; goodbye-gives-the-descriptor-back uses it"),
    Exempt("SharedMemory.open", ("_close", "_close"), _DESCRIPTORS),
    Exempt("SharedMemory.close", ("_close",), "leases-end-before-the-goodbye and the goodbye have ended everything"),
    Exempt("content_of", ("_close",), _DESCRIPTORS),
    Exempt("_ask", ("_close", "_close", "_close"), _DESCRIPTORS),
    Exempt("SharedPool._follow", ("add", "clear"), "sets; twin-of-a-lost-block-is-found uses them"),
    Exempt("SharedPool.take_some", ("take", "take", "extend"), "shared-slot-has-one-writer-and-no-reader leases them"),
    Exempt("SharedPool.lease", ("_references", "share"), "shared-slot-is-leased-while-it-is-read leases them"),
    Exempt("SharedPool.share", ("_references", "share"), _OF_THE_POOL),
    Exempt("SharedPool._release", ("_release", "_references"), _OF_THE_POOL),
    Exempt("SharedPool.publish", ("publish",), _OF_THE_POOL),
    Exempt("SharedPool.forget_all", ("forget_all",), _OF_THE_POOL),
    Exempt("SharedPool.forget", ("forget",), _OF_THE_POOL),
)
