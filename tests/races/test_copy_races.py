"""Copies and compute that nothing orders."""

from __future__ import annotations

from reenact import reenact


def test_h2_block_is_reused_while_its_store_still_reads_it() -> None:
    reenact("block reused under a store", by=("checker", "tokens"), within=10)


def test_h3_load_overwrites_a_block_that_the_old_owners_step_still_reads() -> None:
    reenact("load under the old owner's step", by=("checker", "tokens"), within=5)


def test_h4_zero_fill_of_a_fresh_block_lands_after_the_load() -> None:
    reenact("zero-fill after a load", by=("checker", "tokens"), within=5)


def test_h5_one_accessor_forgets_to_wait_for_its_layer() -> None:
    reenact("layer read before its load", by=("checker", "tokens"), within=30)


def test_h11_two_movers_own_the_same_block() -> None:
    reenact("two movers of one block", by=("checker", "tokens"), within=5)


def test_h23_consumer_is_enqueued_before_its_producer() -> None:
    reenact("consumer before producer", by=("checker", "tokens"), within=1)


def test_h23_kernel_that_starts_early_reads_before_the_last_one_wrote() -> None:
    reenact("early part of a dependent launch", by=("checker", "tokens"), within=12)


def test_h1_copy_engine_reads_its_source_before_the_stream_has_waited() -> None:
    reenact("source read in any order", by=("checker", "tokens"), within=12)


def test_p1_pageable_copy_blocks_the_calling_thread() -> None:
    reenact("pageable copy", by=("checker", "order"), within=1)
