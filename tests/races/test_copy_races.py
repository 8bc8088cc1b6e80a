"""Copies and compute that nothing orders."""

from __future__ import annotations

from reenact import assert_caught, assert_clean


def test_h2_block_is_reused_while_its_store_still_reads_it() -> None:
    assert_caught("block reused under a store", by=("checker", "tokens"), within=10)
    assert_clean("block reused under a store")


def test_h3_load_overwrites_a_block_that_the_old_owners_step_still_reads() -> None:
    assert_caught("load under the old owner's step", by=("checker", "tokens"), within=5)
    assert_clean("load under the old owner's step")


def test_h4_zero_fill_of_a_fresh_block_lands_after_the_load() -> None:
    assert_caught("zero-fill after a load", by=("checker", "tokens"), within=5)
    assert_clean("zero-fill after a load")


def test_h5_one_accessor_forgets_to_wait_for_its_layer() -> None:
    assert_caught("layer read before its load", by=("checker", "tokens"), within=30)
    assert_clean("layer read before its load")


def test_h11_two_movers_own_the_same_block() -> None:
    assert_caught("two movers of one block", by=("checker", "tokens"), within=5)
    assert_clean("two movers of one block")


def test_h23_consumer_is_enqueued_before_its_producer() -> None:
    assert_caught("consumer before producer", by=("checker", "tokens"), within=1)
    assert_clean("consumer before producer")


def test_h23_kernel_that_starts_early_reads_what_the_one_before_it_writes() -> None:
    assert_caught("early part of a dependent launch", by=("checker", "tokens"), within=12)
    assert_clean("early part of a dependent launch")


def test_h1_copy_engine_reads_its_source_before_the_stream_has_waited() -> None:
    assert_caught("source read in any order", by=("checker", "tokens"), within=12)
    assert_clean("source read in any order")


def test_p1_pageable_copy_holds_up_the_thread_that_asks_for_it() -> None:
    assert_caught("pageable copy", by=("checker", "order"), within=1)
    assert_clean("pageable copy")
