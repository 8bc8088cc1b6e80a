"""Requests that end, come back and are shared by ranks."""

from __future__ import annotations

from reenact import reenact


def test_h13_ranks_disagree_on_which_load_is_complete() -> None:
    reenact("ranks that decide alone", by=("tokens",), within=10)


def test_h21_abort_and_commit_both_free_the_blocks_of_a_step() -> None:
    reenact("abort while a step is in flight", by=("checker", "balance"), within=1)


def test_h22_release_is_left_to_a_worker_that_has_ended() -> None:
    reenact("release left to a worker that has gone", by=("checker", "balance"), within=5)


def test_h25_recovered_request_emits_a_token_of_a_chunk_that_is_not_its_last() -> None:
    reenact("token of a chunk that is not the last", by=("tokens",), within=1)


def test_h26_requests_preempt_each_other_and_neither_progresses() -> None:
    reenact("preempted before it ran", by=("order",), within=1)
