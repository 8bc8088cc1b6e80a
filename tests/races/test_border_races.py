"""Front ends and an engine in processes of their own."""

from __future__ import annotations

from reenact import reenact


def test_h32_frame_overtakes_the_one_before_it() -> None:
    reenact("frames that two threads hand over", by=("tokens",), within=5)


def test_h32_frame_that_was_only_late_is_sent_again() -> None:
    reenact("frame sent again after a timeout", by=("tokens",), within=5)


def test_h32_frame_is_lost_without_an_error() -> None:
    reenact("frame overwritten before it was read", by=("tokens",), within=5)


def test_h32_token_of_an_ended_request_reaches_the_next_one_with_its_number() -> None:
    reenact("stream number used again", by=("tokens",), within=5)


def test_h32_abort_that_crosses_the_finish_ends_another_request() -> None:
    reenact("abort that crosses the finish", by=("tokens",), within=5)


def test_h34_front_end_receives_answers_of_a_dead_earlier_one() -> None:
    reenact("place of a front end that has died", by=("tokens",), within=5)


def test_h34_request_of_a_lost_front_end_is_never_ended() -> None:
    reenact("requests of a process that has gone", by=("balance",), within=5)


def test_h35_outputs_pile_up_for_a_reader_that_does_not_read() -> None:
    reenact("outputs for a reader that does not read", by=("order",), within=10)
