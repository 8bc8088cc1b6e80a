"""Rules of the connectors: jobs of other engines, whose memory a copy uses until its job is reported."""

from __future__ import annotations

from proof.mutations.operators import (
    Always,
    Append,
    Become,
    Delete,
    DropOperand,
    Never,
    Operator,
    Rewrite,
    SetArgument,
    Unwrap,
    Value,
)
from proof.mutations.tables import Change, Equivalent, Exempt, Mutation

MUTATIONS: tuple[Mutation, ...] = ()


def _unreached(
    name: str,
    hazard: str,
    consequence: str,
    noticed_by: str,
    *,
    change: Operator | None = None,
    at: str = "",
    also: tuple[Change, ...] = (),
) -> Equivalent:
    return Equivalent(
        Mutation(name=name, hazard=hazard, change=change or Delete(), at=at, consequence=consequence, also=also),
        "schedules run Sidestream's own engine, and connectors are for others",
        noticed_by=f"connectors/{noticed_by}",
        unreached=True,
    )


_STORE = "test_block_store.py::test_"
_TIER = "test_vllm_tier.py::test_"
_SGLANG = "test_sglang_storage.py::test_"
_OTHER_MODEL = f"{_TIER}a_directory_of_another_model_or_layout_is_refused"

EQUIVALENT = (
    _unreached(
        "block-is-findable-after-its-write",
        "H7",
        "a key is found while its block is being written",
        f"{_STORE}a_key_is_found_only_after_its_whole_block_was_written",
        also=(Change("write-is-submitted", Append("grant.written = True\nself._index.publish(grant)")),),
    ),
    _unreached(
        "failed-copy-is-not-good",
        "H9",
        "a block that could not be read is reported as loaded",
        f"{_STORE}a_damaged_or_missing_entry_is_not_good_and_is_forgotten",
        change=Never(),
    ),
    _unreached(
        "job-ends-after-its-last-copy",
        "H10",
        "the engine uses its memory again while a copy of the same job still reads or writes it",
        f"{_STORE}a_job_ends_after_its_last_copy",
        change=Always(),
    ),
    _unreached(
        "drained-store-copies-nothing",
        "H10",
        "an engine that resets its cache uses its memory again while copies run",
        f"{_STORE}drain_returns_when_no_copy_runs_and_the_log_says_for_what_it_waits",
        change=Never(),
    ),
    _unreached(
        "closed-store-copies-nothing",
        "H10",
        "a close that a copy outlasts does not tell the engine to keep its memory",
        f"{_STORE}close_gives_up_what_has_not_begun_and_refuses_to_end_before_what_has",
        change=Never(),
    ),
    _unreached(
        "block-is-written-by-one-job",
        "H11",
        "a block that another job writes counts as not stored",
        f"{_STORE}keys_that_are_there_or_being_written_are_not_written_again",
        change=DropOperand("_writing"),
    ),
    _unreached(
        "pending-stores-are-bounded",
        "H26",
        "a slow medium holds all of the engine's host memory",
        f"{_STORE}a_slow_medium_holds_a_bounded_number_of_blocks",
        change=Never(),
    ),
    _unreached(
        "settled-store-waits-no-more",
        "H22",
        "stores that have ended count as waiting, until none is accepted",
        f"{_STORE}a_slow_medium_holds_a_bounded_number_of_blocks",
    ),
    _unreached(
        "failed-store-ends-its-grant",
        "H22",
        "a key whose write failed is never written again",
        f"{_STORE}a_failed_write_leaves_no_entry_and_the_next_writes_wait",
    ),
    _unreached(
        "unreadable-block-is-forgotten",
        "H26",
        "an engine finds an unreadable block again and again, and its request makes no progress",
        f"{_STORE}a_read_that_fails_is_not_good_and_its_key_is_not_found_again",
    ),
    _unreached(
        "loaded-entry-is-unpinned",
        "H22",
        "an entry that was loaded once is never evicted",
        f"{_STORE}an_entry_is_not_evicted_while_it_is_read_and_can_be_afterwards",
    ),
    _unreached(
        "lost-medium-is-forgotten-by-its-store",
        "H9",
        "entries of a removed directory are found, and each request waits for a read that fails",
        f"{_STORE}blocks_of_a_removed_directory_are_forgotten",
    ),
    _unreached(
        "queued-load-ends-at-its-deadline",
        "H26",
        "a request waits for a load behind a read that hangs",
        f"{_STORE}a_load_that_has_not_begun_ends_at_its_deadline",
        change=Always(),
    ),
    _unreached(
        "resting-tier-is-not-read",
        "H26",
        "new requests wait for a medium that hangs",
        f"{_STORE}nothing_is_found_while_a_read_is_overdue",
        change=DropOperand("_reads_rest_until"),
    ),
    _unreached(
        "resting-tier-is-not-written",
        "H26",
        "every store tries a medium that has just failed",
        f"{_STORE}a_failed_write_leaves_no_entry_and_the_next_writes_wait",
        change=DropOperand("_writes_rest_until"),
    ),
    _unreached(
        "stopped-store-finds-nothing",
        "H8",
        "blocks of the weights before a reset are found after it",
        f"{_STORE}a_stopped_store_finds_and_writes_nothing_and_keeps_its_entries",
        change=DropOperand("_stopped"),
        at="resting-tier-is-not-read",
    ),
    _unreached(
        "stopped-store-writes-nothing",
        "H8",
        "blocks of other weights are in the directory, and the next start serves them",
        f"{_STORE}a_stopped_store_finds_and_writes_nothing_and_keeps_its_entries",
        change=DropOperand("_stopped"),
        at="resting-tier-is-not-written",
    ),
    _unreached(
        "key-of-a-chunk-has-its-group",
        "H14",
        "a chunk of one group of layers is served for another",
        f"{_TIER}equal_hashes_of_two_groups_are_two_chunks",
        change=SetArgument("blake2b", 0, "key[:-4]"),
    ),
    _unreached(
        "layout-has-all-fields",
        "H14",
        "a directory serves chunks of other layers, ranks or block hashes",
        _OTHER_MODEL,
        change=Rewrite(", **self.fields", ""),
    ),
    _unreached(
        "fingerprint-has-all-parts",
        "H14",
        "a directory serves chunks of other weights",
        _OTHER_MODEL,
        change=DropOperand(0),
    ),
    _unreached(
        "fingerprint-has-the-overrides",
        "H14",
        "a directory serves chunks of another RoPE",
        _OTHER_MODEL,
        change=DropOperand(1),
        at="fingerprint-has-all-parts",
    ),
    _unreached(
        "stored-block-is-copied",
        "H10",
        "a write that outlasts its deadline stores what the engine has put into the memory since",
        f"{_SGLANG}a_page_is_copied_so_that_a_slow_write_stores_what_it_was",
        change=Unwrap("array"),
    ),
    _unreached(
        "shared-load-waits-for-what-has-begun",
        "H10",
        "the engine uses host memory again while a read still writes there",
        f"{_SGLANG}a_read_into_host_memory_that_has_begun_is_waited_for",
        change=Value("monotonic() + (self._deadline_s if timeout_s is None else timeout_s)"),
    ),
    _unreached(
        "shared-wait-ends-at-its-deadline",
        "H26",
        "a medium that hangs holds the engine's thread, although its memory is not in danger",
        f"{_SGLANG}a_read_into_a_tensor_is_a_miss_after_its_deadline",
        change=DropOperand("end_s"),
    ),
    _unreached(
        "key-of-a-page-has-its-part",
        "H14",
        "K of a page is served for its V",
        f"{_SGLANG}pages_come_back_after_a_restart_and_the_log_says_so",
        change=SetArgument("key_of", 0, "key.encode()"),
    ),
    _unreached(
        "storage-is-off-after-a-flush",
        "H8",
        "blocks of the weights before an update in place are served after it",
        f"{_SGLANG}after_a_flush_the_storage_is_off_unless_weights_never_change",
        change=Never(),
    ),
    _unreached(
        "model-with-other-state-is-refused",
        "H14",
        "KV is served without the sliding windows or the Mamba state that belong to it",
        f"{_SGLANG}a_model_with_other_state_is_refused_and_its_directory_is_free_again",
        change=Never(),
    ),
    _unreached(
        "failure-is-a-miss-for-sglang",
        "H22",
        "a failure ends a thread of SGLang, and requests wait for it",
        f"{_SGLANG}a_failure_is_a_miss_and_is_logged",
        change=Become("raise"),
    ),
    _unreached(
        "sglang-weights-have-all-parts",
        "H14",
        "a directory serves pages of other weights",
        f"{_SGLANG}a_directory_of_another_model_or_layout_is_refused",
        change=DropOperand(0),
    ),
    _unreached(
        "sglang-weights-have-the-overrides",
        "H14",
        "a directory serves pages of another RoPE",
        f"{_SGLANG}a_directory_of_another_model_or_layout_is_refused",
        change=DropOperand(1),
        at="sglang-weights-have-all-parts",
    ),
    _unreached(
        "rank-has-its-directory",
        "H14",
        "a replica cannot start, because its directory is that of another",
        f"{_SGLANG}each_rank_has_its_own_directory",
        change=DropOperand(1),
    ),
    _unreached(
        "every-rank-of-an-mla-model-writes",
        "H9",
        "a rank finds nothing, so no rank loads anything",
        f"{_SGLANG}every_rank_of_an_mla_model_writes_its_own_pages",
    ),
    _unreached(
        "cleared-store-finds-nothing",
        "H8",
        "pages are served although SGLang was asked to delete them",
        f"{_SGLANG}cleared_pages_are_misses",
    ),
)

EXEMPT = (
    Exempt("BlockStore.store", ("add", "add"), "see block-is-written-by-one-job"),
    Exempt("BlockStore._grant", ("reserve",), "without a grant there is no write"),
    Exempt("BlockStore.load", ("pin",), "without a lease there is no read; see loaded-entry-is-unpinned"),
    Exempt("BlockStore._count", ("add",), "see failed-copy-is-not-good"),
    Exempt("BlockStore._wait", ("wait",), "see drained-store-copies-nothing, closed-store-copies-nothing"),
    Exempt("_snapshot", ("replace",), "a method of a text"),
    Exempt("SharedStore._begin", ("begin",), "a parameter: `store` or `load` of BlockStore"),
    Exempt("SharedStore._wait", ("wait",), "only a pause between two looks; see shared-wait-ends-at-its-deadline"),
    Exempt("SharedStore._wait", ("add",), "a result that is not waited for would only take memory"),
    Exempt("SharedStore._collect", ("remove",), "a result that is not waited for would only take memory"),
    Exempt("Pages.clear", ("clear",), "see cleared-store-finds-nothing"),
    Exempt("SidestreamTier.shutdown", ("release",), "it lets vLLM unmap its memory, which no copy uses any more"),
)
