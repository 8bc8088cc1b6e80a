"""Benchmarks wait for the tokens of requests, and a request that fails ends the wait."""

from __future__ import annotations

import pytest

from bench.requests import Answer
from sidestream.errors import SidestreamError


def test_a_wait_for_tokens_ends_with_them() -> None:
    Answer(0.0, times=[1.0, 2.0]).wait_for(2)


@pytest.mark.parametrize(
    ("error", "message"), [("no memory", "failed: no memory"), (None, "ended after 1 of 2 tokens")]
)
def test_a_wait_for_tokens_of_a_failed_request_raises(error: str | None, message: str) -> None:
    answer = Answer(0.0, times=[1.0], error=error)
    answer.ended.set()
    with pytest.raises(SidestreamError, match=message):
        answer.wait_for(2)


def test_a_wait_for_tokens_takes_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.requests._PATIENCE_S", 0.01)
    with pytest.raises(SidestreamError, match="has 0 of 1 tokens"):
        Answer(0.0).wait_for(1)
