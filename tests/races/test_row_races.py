"""Rows, mailboxes, staging buffers and the inputs of graphs. (H19 and H20 are among the seeds' own bugs.)"""

from __future__ import annotations

from reenact import reenact


def test_h12_token_is_read_before_its_counted_step_is_done() -> None:
    reenact("token read when the step was counted", by=("checker", "tokens"), within=5)


def test_h3_block_is_released_after_the_first_of_two_runs_of_a_step() -> None:
    reenact("released before the second run", by=("checker", "tokens"), within=5)


def test_h16_row_of_a_finished_request_is_reused_before_its_last_step() -> None:
    reenact("row reused under its last step", by=("checker", "tokens"), within=5)


def test_h17_staging_buffer_is_refilled_while_a_copy_still_reads_it() -> None:
    reenact("staging refilled under a copy", by=("checker", "tokens"), within=5)


def test_h18_padded_row_of_a_graph_writes_the_block_of_an_earlier_batch() -> None:
    reenact("padded row of a graph", by=("tokens",), within=1)


def test_h19_state_of_a_row_is_a_view_that_the_next_step_overwrites() -> None:
    reenact("state kept as a view", by=("accept length",), within=1)
