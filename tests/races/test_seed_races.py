"""The bugs that Sidestream was built because of, in miniature."""

from __future__ import annotations

import pytest
from reenact import named, reenact

from proof.miniatures import Outcome
from sidestream_order.checker import simulated


def test_h1_store_reads_a_block_before_compute_wrote_it() -> None:
    reenact("store before compute", by=("checker", "tokens"), within=5)


def test_p5_tokens_submitted_after_a_store_queue_behind_it() -> None:
    reenact("tokens behind a store", by=("order",), within=5)


def test_h2_a_flush_waits_for_an_event_that_a_background_thread_has_not_recorded_yet() -> None:
    reenact("wait for an event not yet recorded", by=("checker", "tokens"), within=5)


def test_h5_graph_is_replayed_while_its_request_is_being_loaded() -> None:
    reenact("graph replayed during a load", by=("checker", "tokens"), within=5)


def test_h19_worker_publishes_the_next_steps_state_too_late() -> None:
    reenact("state published by a late worker", by=("checker", "accept length"), within=10, seeds=4)


def test_h20_flag_is_read_twice_and_changes_in_between() -> None:
    reenact("flag read twice", by=("accept length",), within=10, seeds=4)


@pytest.mark.parametrize("name", ["state published by a late worker", "flag read twice"])
def test_a_stale_draft_state_changes_accept_lengths_but_not_the_text(name: str) -> None:
    def play(*, protected: bool) -> Outcome:
        device, _ = simulated("random", 0)
        try:
            return named(name).run(device, protected)
        finally:
            device.kill()

    stale, right = play(protected=False), play(protected=True)
    assert stale.output == stale.expected == right.output
    assert sum(stale.accept_lengths) < sum(right.accept_lengths) == sum(stale.expected_accept_lengths)


def test_p2_full_queue_of_the_single_store_stream_blocks_the_forward_thread() -> None:
    reenact("queue of one stream full", by=("checker", "order"), within=2, seeds=1)
