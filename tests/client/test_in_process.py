"""How news come from the engine thread to an event loop of the same process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sidestream.client.base import Answer
from sidestream.client.in_process import _Post
from sidestream.types import CachedTokens, Delta


class Taker:
    """Stands for the client: gives every answer its news."""

    def take(self, answer: Answer, news: Delta) -> None:
        answer.put(news)


def test_news_of_a_step_wake_their_event_loop_once_and_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async def told() -> tuple[list[list[Delta]], int]:
        loop, calls = asyncio.get_running_loop(), list[Any]()
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda work: calls.append(work) or wake(work))
        post, client, answers = _Post(loop), Taker(), [Answer(number, 1) for number in range(3)]
        for step in range(2):  # the second one's news come behind the delivery of the first one's
            for index, answer in enumerate(answers):
                post.put(client, answer, Delta(index, str(step), (), (), None, 1, CachedTokens()))  # type: ignore[arg-type]
            await asyncio.sleep(0)
        return [[await answer.read(), await answer.read()] for answer in answers], len(calls)

    news, num_calls = asyncio.run(told())
    assert [[(delta.index, delta.text) for delta in of_one] for of_one in news] == [
        [(index, "0"), (index, "1")] for index in range(3)
    ]
    assert num_calls == 2


def test_a_closed_event_loop_hears_nothing() -> None:
    loop = asyncio.new_event_loop()
    post, answer = _Post(loop), Answer(1, 1)
    loop.close()
    post.put(Taker(), answer, Delta(0, "", (1,), (), None, 1, CachedTokens()))  # type: ignore[arg-type]
    assert not answer._news
