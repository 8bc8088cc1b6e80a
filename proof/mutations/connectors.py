"""Rules of the connectors: jobs of other engines, whose memory a copy uses until its job is reported."""

from __future__ import annotations

from proof.mutations.operators import (
    Always,
    Append,
    Become,
    CallInstead,
    Delete,
    DropOperand,
    Never,
    Rewrite,
    SetArgument,
    Unwrap,
    Value,
)
from proof.mutations.tables import Change, Exempt, Fault, Mutation

MUTATIONS: tuple[Mutation, ...] = ()


_UNSEEN = "schedules run Sidestream's own engine, and connectors are for others"
_STORE = "connectors/test_block_store.py::test_"
_TIER = "connectors/test_vllm_tier.py::test_"
_SGLANG = "connectors/test_sglang_storage.py::test_"
_PLANNER = "connectors/test_planner.py::test_"
_CARRIER = "connectors/test_carrier.py::test_"
_HELD = f"{_PLANNER}a_transfer_holds_its_device_blocks_until_all_ranks_have_settled"
_OTHER_MODEL = f"{_TIER}a_directory_of_another_model_or_layout_is_refused"

EQUIVALENT = (
    Fault("H7", "a key is found while its block is being written")
    .without(
        "block-is-findable-after-its-write",
        Delete(),
        Change("write-is-submitted", Append("grant.written = True\nself._index.publish(grant)")),
    )
    .unreached(_UNSEEN, f"{_STORE}a_key_is_found_only_after_its_whole_block_was_written"),
    Fault("H9", "a block that could not be read is reported as loaded")
    .without("failed-copy-is-not-good", Never())
    .unreached(_UNSEEN, f"{_STORE}a_damaged_or_missing_entry_is_not_good_and_is_forgotten"),
    Fault("H10", "the engine uses its memory again while a copy of the same job still reads or writes it")
    .without("job-ends-after-its-last-copy", Always())
    .unreached(_UNSEEN, f"{_STORE}a_job_ends_after_its_last_copy"),
    Fault("H10", "an engine that resets its cache uses its memory again while copies run")
    .without("drained-store-copies-nothing", Never())
    .unreached(_UNSEEN, f"{_STORE}drain_returns_when_no_copy_runs_and_the_log_says_for_what_it_waits"),
    Fault("H10", "a close that a copy outlasts does not tell the engine to keep its memory")
    .without("closed-store-copies-nothing", Never())
    .unreached(_UNSEEN, f"{_STORE}close_gives_up_what_has_not_begun_and_refuses_to_end_before_what_has"),
    Fault("H11", "a block that another job writes counts as not stored")
    .without("block-is-written-by-one-job", DropOperand("_writing"))
    .unreached(_UNSEEN, f"{_STORE}keys_that_are_there_or_being_written_are_not_written_again"),
    Fault("H26", "a slow medium holds all of the engine's host memory")
    .without("pending-stores-are-bounded", Never())
    .unreached(_UNSEEN, f"{_STORE}a_slow_medium_holds_a_bounded_number_of_blocks"),
    Fault("H22", "stores that have ended count as waiting, until none is accepted")
    .without("settled-store-waits-no-more")
    .unreached(_UNSEEN, f"{_STORE}a_slow_medium_holds_a_bounded_number_of_blocks"),
    Fault("H22", "a key whose write failed is never written again")
    .without("failed-store-ends-its-grant")
    .unreached(_UNSEEN, f"{_STORE}a_failed_write_leaves_no_entry_and_the_next_writes_wait"),
    Fault("H26", "an engine finds an unreadable block again and again, and its request makes no progress")
    .without("unreadable-block-is-forgotten")
    .unreached(_UNSEEN, f"{_STORE}a_read_that_fails_is_not_good_and_its_key_is_not_found_again"),
    Fault("H22", "an entry that was loaded once is never evicted")
    .without("loaded-entry-is-unpinned")
    .unreached(_UNSEEN, f"{_STORE}an_entry_is_not_evicted_while_it_is_read_and_can_be_afterwards"),
    Fault("H9", "entries of a removed directory are found, and each request waits for a read that fails")
    .without("lost-medium-is-forgotten-by-its-store")
    .unreached(_UNSEEN, f"{_STORE}blocks_of_a_removed_directory_are_forgotten"),
    Fault("H26", "a request waits for a load behind a read that hangs")
    .without("queued-load-ends-at-its-deadline", Always())
    .unreached(_UNSEEN, f"{_STORE}a_load_that_has_not_begun_ends_at_its_deadline"),
    Fault("H26", "new requests wait for a medium that hangs")
    .without("resting-tier-is-not-read", DropOperand("_reads_rest_until"))
    .unreached(_UNSEEN, f"{_STORE}nothing_is_found_while_a_read_is_overdue"),
    Fault("H26", "every store tries a medium that has just failed")
    .without("resting-tier-is-not-written", DropOperand("_writes_rest_until"))
    .unreached(_UNSEEN, f"{_STORE}a_failed_write_leaves_no_entry_and_the_next_writes_wait"),
    Fault("H8", "blocks of the weights before a reset are found after it")
    .without("stopped-store-finds-nothing", DropOperand("_stopped"), at="resting-tier-is-not-read")
    .unreached(_UNSEEN, f"{_STORE}a_stopped_store_finds_and_writes_nothing_and_keeps_its_entries"),
    Fault("H8", "blocks of other weights are in the directory, and the next start serves them")
    .without("stopped-store-writes-nothing", DropOperand("_stopped"), at="resting-tier-is-not-written")
    .unreached(_UNSEEN, f"{_STORE}a_stopped_store_finds_and_writes_nothing_and_keeps_its_entries"),
    Fault("H14", "a chunk of one group of layers is served for another")
    .without("key-of-a-chunk-has-its-group", SetArgument("blake2b", 0, "key[:-4]"))
    .unreached(_UNSEEN, f"{_TIER}equal_hashes_of_two_groups_are_two_chunks"),
    Fault("H14", "a directory serves chunks of other layers, ranks or block hashes")
    .without("layout-has-all-fields", Rewrite(", **self.fields", ""))
    .unreached(_UNSEEN, _OTHER_MODEL),
    Fault("H14", "a directory serves blocks whose layers begin at other bytes")
    .without("layout-has-its-parts", Rewrite(", 'parts': _in_words(self.parts)", ""))
    .unreached(_UNSEEN, f"{_STORE}layouts_with_other_parts_of_a_block_are_told_apart"),
    Fault("H5", "an indexer reads keys before they have arrived, because only the attention after it waits")
    .without("indexer-lets-the-step-wait", Value("True"))
    .unreached(_UNSEEN, f"{_TIER}a_step_waits_as_a_whole_if_vllm_does_not_call_for_each_layer"),
    Fault("H11", "a block of one group of layers is copied over bytes of another block")
    .without("regions-are-apart", Never())
    .unreached(_UNSEEN, f"{_TIER}regions_of_different_sizes_in_the_same_memory_are_refused"),
    Fault("H14", "a directory serves chunks of other weights")
    .without("fingerprint-has-all-parts", DropOperand(0))
    .unreached(_UNSEEN, _OTHER_MODEL),
    Fault("H14", "a directory serves chunks of another RoPE")
    .without("fingerprint-has-the-overrides", DropOperand(1), at="fingerprint-has-all-parts")
    .unreached(_UNSEEN, _OTHER_MODEL),
    Fault("H10", "a write that outlasts its deadline stores what the engine has put into the memory since")
    .without("stored-block-is-copied", Unwrap("array"))
    .unreached(_UNSEEN, f"{_SGLANG}a_page_is_copied_so_that_a_slow_write_stores_what_it_was"),
    Fault("H10", "the engine uses host memory again while a read still writes there")
    .without(
        "shared-load-waits-for-what-has-begun",
        Value("monotonic() + (self._deadline_s if timeout_s is None else timeout_s)"),
    )
    .unreached(_UNSEEN, f"{_SGLANG}a_read_into_host_memory_that_has_begun_is_waited_for"),
    Fault("H26", "a medium that hangs holds the engine's thread, although its memory is not in danger")
    .without("shared-wait-ends-at-its-deadline", DropOperand("monotonic"))
    .unreached(_UNSEEN, f"{_SGLANG}a_read_into_a_tensor_is_a_miss_after_its_deadline"),
    Fault("H14", "K of a page is served for its V")
    .without("key-of-a-page-has-its-part", SetArgument("key_of", 0, "key.encode()"))
    .unreached(_UNSEEN, f"{_SGLANG}pages_come_back_after_a_restart_and_the_log_says_so"),
    Fault("H8", "blocks of the weights before an update in place are served after it")
    .without("storage-is-off-after-a-flush", Never())
    .unreached(_UNSEEN, f"{_SGLANG}after_a_flush_the_storage_is_off_unless_weights_never_change"),
    Fault("H14", "KV is served without the sliding windows or the Mamba state that belong to it")
    .without("model-with-other-state-is-refused", Never())
    .unreached(_UNSEEN, f"{_SGLANG}a_model_with_other_state_is_refused_and_its_directory_is_free_again"),
    Fault("H22", "a failure ends a thread of SGLang, and requests wait for it")
    .without("failure-is-a-miss-for-sglang", Become("raise"))
    .unreached(_UNSEEN, f"{_SGLANG}a_failure_is_a_miss_and_is_logged"),
    Fault("H14", "a directory serves pages of other weights")
    .without("sglang-weights-have-all-parts", DropOperand(0))
    .unreached(_UNSEEN, f"{_SGLANG}a_directory_of_another_model_or_layout_is_refused"),
    Fault("H14", "a directory serves pages of another RoPE")
    .without("sglang-weights-have-the-overrides", DropOperand(1), at="sglang-weights-have-all-parts")
    .unreached(_UNSEEN, f"{_SGLANG}a_directory_of_another_model_or_layout_is_refused"),
    Fault("H14", "a replica cannot start, because its directory is that of another")
    .without("rank-has-its-directory", DropOperand(1))
    .unreached(_UNSEEN, f"{_SGLANG}each_rank_has_its_own_directory"),
    Fault("H9", "a rank finds nothing, so no rank loads anything")
    .without("every-rank-of-an-mla-model-writes")
    .unreached(_UNSEEN, f"{_SGLANG}every_rank_of_an_mla_model_writes_its_own_pages"),
    Fault("H8", "pages are served although SGLang was asked to delete them")
    .without("cleared-store-finds-nothing")
    .unreached(_UNSEEN, f"{_SGLANG}cleared_pages_are_misses"),
    Fault("H26", "the hashes of all blocks that were ever stored fill the scheduler's memory")
    .without("hashes-of-lost-blocks-are-forgotten", Never())
    .unreached(_UNSEEN, f"{_PLANNER}a_block_that_found_no_slot_has_no_event_and_is_forgotten"),
    Fault("H26", "requests load blocks that were evicted, and each of these loads fails")
    .without("removed-keys-leave-the-planner", Never())
    .unreached(_UNSEEN, f"{_PLANNER}a_block_that_one_rank_lacks_is_not_found"),
    Fault("H13", "a block is found that a rank does not have")
    .without("block-counts-if-every-rank-has-it", Rewrite("in self._ranks", "in self._ranks[:1]"))
    .unreached(_UNSEEN, f"{_PLANNER}a_block_that_one_rank_lacks_is_not_found"),
    Fault("H26", "requests load blocks that the reset removes, and each of these loads fails")
    .without("nothing-is-found-until-a-reset-is-executed", Never())
    .unreached(_UNSEEN, f"{_PLANNER}after_a_reset_nothing_is_found_until_all_ranks_have_executed_it"),
    Fault("H26", "a request plans the same failing load again and again")
    .without("request-loads-no-more-after-a-failure", Never())
    .unreached(_UNSEEN, f"{_PLANNER}a_request_computes_everything_after_a_load_failed_on_any_rank"),
    Fault("H10", "the load of a request that ended writes blocks that have another owner")
    .without("load-holds-its-device-blocks")
    .unreached(_UNSEEN, _HELD),
    Fault("H26", "a request promotes an unreadable block again and again")
    .without("after-a-promotion-only-host-memory-counts", Never())
    .unreached(_UNSEEN, f"{_PLANNER}blocks_on_disk_are_promoted_and_then_loaded_from_host_memory"),
    Fault("H26", "requests load blocks that no tier has, and each of these loads fails")
    .without("hit-has-the-whole-window", Always())
    .unreached(_UNSEEN, f"{_PLANNER}a_hit_needs_the_whole_sliding_window"),
    Fault("H2", "a preempted request stores blocks that it has lost")
    .without("resumed-request-has-new-blocks", Never())
    .unreached(_UNSEEN, f"{_PLANNER}a_resumed_request_stores_its_new_blocks"),
    Fault("H2", "a block that its request has lost is stored, when there is room for it again")
    .without("block-behind-the-window-is-not-stored", Value("state.seen[at]"))
    .unreached(_UNSEEN, f"{_PLANNER}a_block_that_fell_behind_its_window_is_not_stored_later"),
    Fault("H26", "blocks of a long prompt are never stored, because its first blocks hold all that stores may hold")
    .without("store-without-room-is-tried-again")
    .unreached(_UNSEEN, f"{_PLANNER}blocks_without_room_are_stored_in_order_at_later_steps_and_at_the_end"),
    Fault("H8", "KV of the weights before a reset is stored after it")
    .without("blocks-from-before-a-reset-are-not-stored", DropOperand("stale"))
    .unreached(_UNSEEN, f"{_PLANNER}blocks_from_before_a_reset_are_not_stored_until_the_request_starts_again"),
    Fault("H8", "KV of the weights before a reset is stored after it, by an order that waited for the next step")
    .without("unsent-store-ends-with-a-reset")
    .unreached(_UNSEEN, f"{_PLANNER}a_store_that_was_not_sent_before_a_reset_is_not_executed"),
    Fault("H2", "a store reads blocks of a request that ended, and another request overwrites them")
    .without("store-holds-its-device-blocks", Unwrap("add"))
    .unreached(_UNSEEN, _HELD),
    Fault("H1", "blocks are stored that their load has not written yet")
    .without("blocks-of-an-unfinished-load-are-not-stored", DropOperand(1))
    .unreached(_UNSEEN, f"{_PLANNER}blocks_of_an_unfinished_load_are_not_stored"),
    Fault("H2", "a request that was preempted, and then ended, stores blocks that have another owner")
    .without("ended-request-stores-its-own-blocks")
    .unreached(_UNSEEN, f"{_PLANNER}an_ended_request_that_lost_its_blocks_stores_nothing"),
    Fault("H13", "device blocks are used again while another rank still copies them")
    .without("blocks-are-held-until-all-ranks-settled", CallInstead("min", "max"))
    .unreached(_UNSEEN, _HELD),
    Fault("H10", "device blocks are used again while they are copied")
    .without("blocks-are-held-until-settled", Always())
    .unreached(_UNSEEN, _HELD),
    Fault("H14", "a block of one group of layers is loaded for another")
    .without("key-has-the-group", Value("bytes(1)"))
    .unreached(_UNSEEN, f"{_PLANNER}equal_hashes_of_two_groups_are_two_blocks"),
    Fault("H14", "a block is stored as the state at its end, and has the state after an earlier token")
    .without("state-is-stored-when-it-is-handed", Never())
    .unreached(_UNSEEN, f"{_PLANNER}states_are_stored_when_they_are_handed_over_and_with_their_own_tokens"),
    Fault("H14", "a state is stored under the hash of fewer tokens than it has seen")
    .without("state-is-stored-with-its-own-tokens", DropOperand(1))
    .unreached(_UNSEEN, f"{_PLANNER}states_are_stored_when_they_are_handed_over_and_with_their_own_tokens"),
    Fault("H5", "an engine copies a state to the block of a step before the state has arrived")
    .without("state-arrives-before-its-step", DropOperand(0))
    .unreached(_UNSEEN, f"{_CARRIER}no_load_is_told_early_where_steps_begin_before_their_layers"),
    Fault("H3", "a load writes blocks that a step of their last owner still uses")
    .without("load-waits-for-earlier-steps")
    .unreached(_UNSEEN, f"{_CARRIER}a_load_waits_for_the_steps_before_its_own_but_not_for_its_own"),
    Fault("H8", "after a reset, the tiers still have blocks of the weights before")
    .without("reset-order-reaches-the-tiers")
    .unreached(_UNSEEN, f"{_CARRIER}a_reset_forgets_all_blocks_and_those_that_are_being_stored"),
    Fault("H1", "a store reads blocks that its step has not written yet")
    .without("store-waits-for-its-step")
    .unreached(_UNSEEN, f"{_CARRIER}a_store_waits_for_its_step"),
    Fault("H9", "a request uses blocks whose load has failed")
    .without("failed-load-is-told")
    .unreached(_UNSEEN, f"{_CARRIER}a_block_that_is_gone_fails_the_load"),
    Fault("H10", "the engine uses blocks again that a failed load may still write")
    .without("failed-load-is-told-when-it-writes-no-more", Never())
    .unreached(_UNSEEN, f"{_CARRIER}a_failed_load_is_told_when_it_has_settled"),
    Fault("H5", "a step reads blocks whose load has not ended")
    .without("load-is-told-after-its-fences")
    .unreached(_UNSEEN, f"{_CARRIER}a_load_is_told_after_its_last_copy"),
    Fault("H5", "a step reads blocks whose last copies were left to it")
    .without("step-waits-for-loads-told-early")
    .unreached(_UNSEEN, f"{_CARRIER}a_step_waits_for_loads_that_were_told_in_an_idle_step"),
    Fault("H5", "an engine that leaves out the waits of its layers reads blocks before they have arrived")
    .without("step-without-its-waits-ends-the-engine", Never())
    .unreached(_UNSEEN, f"{_CARRIER}a_step_that_was_launched_without_its_waits_is_an_error"),
    Fault("H9", "a request goes on with blocks whose copies have failed")
    .without("load-that-was-told-cannot-fail", Never())
    .unreached(_UNSEEN, f"{_CARRIER}a_load_that_fails_after_it_was_told_ends_the_engine"),
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
    Exempt("Carrier.begin", ("gates",), "see step-waits-for-loads-told-early"),
    Exempt("Carrier.wait_for_layer", ("wait",), "see step-waits-for-loads-told-early"),
    Exempt("Carrier.finished", ("poll", "add", "add"), "see failed-load-is-told, load-is-told-after-its-fences"),
    Exempt("KeyEvents.changed", ("add",), "an event, which no request waits for"),
    Exempt("SidestreamConnector.take_events", ("take",), "it passes events on"),
    Exempt("Planner.allocated", ("loading", "loading"), "see load-holds-its-device-blocks"),
    Exempt("Planner.plan_step", ("extend", "loading"), "an engine schedules no request before it knows of its load"),
    Exempt("Planner._load_ended", ("loading", "loading"), "see blocks-of-an-unfinished-load-are-not-stored"),
    Exempt("Planner.reset", ("clear",), "the keys may be stored again"),
    Exempt("SidestreamConnector._open", ("replace",), "it changes a copy of a value"),
    Exempt("SidestreamConnector.bind_connector_metadata", ("begin",), "see load-waits-for-earlier-steps"),
    Exempt("SidestreamConnector.update_connector_output", ("take",), "it passes reports on"),
    Exempt("Stats.reset", ("clear",), "it clears counts"),
    Exempt("SidestreamTier.shutdown", ("release",), "it lets vLLM unmap its memory, which no copy uses any more"),
)
