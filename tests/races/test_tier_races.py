"""Slots, keys and entries that promise bytes which are not there, or not those."""

from __future__ import annotations

from reenact import reenact


def test_h6_slot_is_freed_by_a_timer_while_a_store_still_writes_it() -> None:
    reenact("slot freed by a timer", by=("checker", "tokens"), within=2)


def test_h7_key_is_findable_before_its_bytes_are_complete() -> None:
    reenact("key published before its bytes", by=("checker", "tokens"), within=5)


def test_h8_store_survives_new_weights_and_publishes_kv_of_the_old_ones() -> None:
    reenact("store that survives new weights", by=("tokens",), within=1)


def test_h9_failed_write_leaves_an_entry() -> None:
    reenact("failed write that stays visible", by=("checker", "tokens"), within=1)


def test_h10_load_lands_in_a_block_that_was_given_away_after_its_deadline() -> None:
    reenact("load that lands after its deadline", by=("checker", "tokens"), within=2)


def test_h14_key_does_not_contain_the_adapter() -> None:
    reenact("key without identity", by=("tokens",), within=1)


def test_h15_block_of_which_the_recurrent_state_is_missing_counts_as_a_hit() -> None:
    reenact("block of which a part is missing", by=("checker", "tokens"), within=1)


def test_h24_client_receives_the_end_before_the_references_are_dropped() -> None:
    reenact("done before its references are dropped", by=("order",), within=1)
