"""Rules of the memory of a cache process, which several engines share. Schedules of the torture test have such a memory
and a neighbour, but no cache process.
"""

from __future__ import annotations

from proof.mutations.operators import Always, DropOperand, Never, Rewrite, SetArgument, Value
from proof.mutations.tables import Exempt, Fault

MUTATIONS = (
    Fault("H10", "a slot is written while another engine reads or writes it").without(
        "shared-slot-has-one-writer-and-no-reader", Value("list[int]()"), needs={"shared_memory"}
    ),
    Fault("H6", "another engine evicts a block while it is read").without(
        "shared-slot-is-leased-while-it-is-read", Value("list[int]()"), needs={"shared_memory"}
    ),
    Fault("H22", "slots that one engine has used can never be used by another one again").without(
        "lease-of-a-shared-slot-ends", needs={"shared_memory"}
    ),
    Fault("H7", "a slot that another engine has rewritten is read as the block that was in it before").without(
        "shared-record-is-compared-under-its-lease", Never(), needs={"shared_memory"}
    ),
    Fault("H9", "a slot that is half written is found under the key that it had before").without(
        "shared-record-is-void-while-its-slot-is-written", needs={"shared_memory"}
    ),
    Fault("H7", "other engines, and a restarted one, find no block").without(
        "shared-record-is-published-last", needs={"shared_memory"}
    ),
    Fault("H7", "a slot that another engine has rewritten is read as the block that was in it before").without(
        "block-that-others-evicted-is-forgotten", SetArgument("forget", 0, "[]"), needs={"shared_memory"}
    ),
    Fault("H22", "slots that another engine uses are in use here as well, forever").without(
        "refused-slot-is-not-kept", needs={"shared_memory"}
    ),
)

_UNSEEN = "a schedule has no cache process, and a block that is not found, or is lost, is computed again"
_POOL = "offload/test_shared_memory.py::test_"
_ENGINE = "engine/test_shared_host.py::test_"
_PROCESS = "offload/test_cache_process.py::test_"

EQUIVALENT = (
    # ------------------------------------------------------------------ slots
    Fault("H26", "an engine evicts a block that another one has written a moment ago")
    .without("shared-slot-is-taken-as-it-was-seen", Value("list[int]()"))
    .unreached(_UNSEEN, _POOL + "blocks_that_were_written_a_moment_ago_are_not_evicted_unseen"),
    Fault("H26", "a block is found by no other engine until it was written to the disk as well")
    .without("published-slot-may-be-read-by-others")
    .unreached(_UNSEEN, _POOL + "a_published_block_is_read_by_others_while_it_is_still_in_use"),
    Fault("H26", "a block that two engines have written is lost with the first copy")
    .without("twin-of-a-lost-block-is-found")
    .unreached(_UNSEEN, _POOL + "a_block_written_twice_takes_one_place_in_the_index"),
    Fault("H8", "a block is found again after a reset")
    .without("reset-voids-shared-records")
    .unreached(_UNSEEN, _POOL + "a_reset_and_a_drop_reach_all_engines"),
    Fault("H8", "a block that was dropped is found again")
    .without("drop-voids-shared-records")
    .unreached(_UNSEEN, _POOL + "a_reset_and_a_drop_reach_all_engines"),
    Fault("H26", "an engine finds nothing that another has written")
    .without("records-of-others-enter-the-index", Always())
    .unreached(_UNSEEN, _POOL + "an_engine_finds_what_another_has_written"),
    Fault("H26", "each request plans a load of a block that is gone")
    .without("block-that-cannot-be-leased-is-forgotten")
    .unreached(_UNSEEN, _POOL + "a_run_of_keys_ends_at_a_block_that_is_gone"),
    Fault("H22", "slots are leased forever by a transfer that found too few of them")
    .without("refused-take-takes-nothing")
    .unreached(_UNSEEN, _POOL + "a_slot_that_another_engine_reads_is_not_evicted"),
    Fault("H26", "a block that another engine reads while it should be evicted is lost to this one")
    .without("refused-slot-is-found-again")
    .unreached(_UNSEEN, _POOL + "a_slot_that_another_engine_reads_is_not_evicted"),
    Fault("H9", "the self-check refuses a block that another engine has written in place of a checked one")
    .without("checksum-ends-with-its-block")
    .unreached(_UNSEEN, _POOL + "a_block_that_another_engine_wrote_has_no_checksum_of_an_earlier_one"),
    # ------------------------------------------------------------------ engines
    Fault("H26", "an engine finds only what other engines had written before it started")
    .without("blocks-of-other-engines-are-found")
    .unreached(_UNSEEN, _ENGINE + "running_engines_find_each_others_blocks"),
    Fault("H26", "a request computes what another engine stored a moment ago")
    .without("question-looks-at-shared-memory")
    .unreached(_UNSEEN, _ENGINE + "a_request_finds_what_another_engine_stored_a_moment_ago"),
    Fault("H8", "engines with other weights load each other's blocks")
    .without("shared-memory-is-of-one-model", SetArgument("open", "fingerprint", "''"))
    .unreached(_UNSEEN, _PROCESS + "an_engine_gets_the_memory_that_another_has_made"),
    Fault("H22", "an engine that does not start keeps its memory from other models")
    .without("failed-start-leaves-the-shared-memory")
    .unreached(_UNSEEN, _PROCESS + "an_engine_that_does_not_start_leaves_its_memory"),
    Fault("H22", "an engine that was closed keeps its memory from other models until its process ends")
    .without("closed-engine-leaves-the-shared-memory")
    .unreached(_UNSEEN, _ENGINE + "the_first_request_of_a_restarted_engine_finds_its_blocks"),
    Fault("H22", "the leases of an engine that was closed last as long as its memory is mapped")
    .without("leases-end-before-the-goodbye")
    .unreached(_UNSEEN, _PROCESS + "an_engine_that_closes_leaves_no_lease_and_no_descriptor"),
    Fault("H10", "with an older kernel, an engine that starts overwrites the blocks of all engines with zeros")
    .without("pages-of-others-are-not-zeroed", DropOperand("_zeroes"))
    .unreached(_UNSEEN, "device/test_cuda_pinned.py::test_pages_of_other_processes_keep_their_bytes"),
    # ------------------------------------------------------------------ the cache process
    Fault("H10", "the leases of one engine do not exclude the others, which have the same descriptor")
    .without("each-engine-has-its-own-descriptor", Rewrite("_opened_anew(", "os.dup("))
    .unreached(_UNSEEN, _PROCESS + "leases_outlive_a_connection_that_ends_without_a_goodbye"),
    Fault("H6", "a slot is written again while the GPU still copies for an engine that was killed")
    .without(
        "leases-outlive-the-connection", Rewrite("self._selector.unregister(engine.connection)", "self._drop(engine)")
    )
    .unreached(_UNSEEN, _PROCESS + "leases_outlive_a_connection_that_ends_without_a_goodbye"),
    Fault("H22", "the leases of an engine that was killed never end")
    .without("leases-end-with-the-process")
    .unreached(_UNSEEN, _PROCESS + "a_killed_engine_leaves_its_blocks_and_no_lease"),
    Fault("H22", "the cache process keeps a descriptor for each engine that a process has ever made")
    .without("goodbye-gives-the-descriptor-back")
    .unreached(_UNSEEN, _PROCESS + "an_engine_that_closes_leaves_no_lease_and_no_descriptor"),
    Fault("H26", "the memory of all models together grows without a bound")
    .without("cache-process-keeps-its-bound", Never())
    .unreached(_UNSEEN, _PROCESS + "memory_beyond_the_bound_is_refused_while_the_rest_is_in_use"),
    Fault("H26", "a second cache process takes the socket of the first, whose memory no engine finds any more")
    .without("one-cache-process-for-a-socket")
    .unreached(_UNSEEN, _PROCESS + "a_second_cache_process_is_refused"),
    Fault("H9", "another user reads and writes the KV of this one")
    .without("memory-is-for-one-user", Always())
    .unreached(_UNSEEN, _PROCESS + "another_user_gets_no_memory"),
    Fault("H9", "an engine loads what another user has written")
    .without("memory-of-another-user-is-not-used", Never())
    .unreached(_UNSEEN, _PROCESS + "the_memory_of_another_user_is_not_used"),
    Fault("H9", "an engine of another version maps a memory that it misreads")
    .without("greeting-of-another-version-is-refused", Rewrite("version != VERSION", "False"))
    .unreached(_UNSEEN, _PROCESS + "a_wrong_greeting_is_refused_by_name"),
    Fault("H9", "an engine maps the memory of another version, and misreads it")
    .without("other-version-is-refused", Never())
    .unreached(_UNSEEN, _PROCESS + "a_wrong_answer_is_refused"),
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
